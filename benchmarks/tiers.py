"""The tiers in figures: what each way to fetch costs, what warm-up, DRAM and coarse pages save.

    python -m benchmarks.tiers read       extents by the store, TensorStore and plain preadv
    python -m benchmarks.tiers fig5       tokens/s by batch, until DRAM is full and beyond it
    python -m benchmarks.tiers fig12      where each chunk is when decode starts, as a picture
    python -m benchmarks.tiers fig21a     time to fetch by way, 8 GiB on disk and 2 GiB of DRAM
    python -m benchmarks.tiers fig21b     tokens/s by way, and with DRAM only
    python -m benchmarks.tiers warm       bytes from SSD in the first 64 steps, by warm-up
    python -m benchmarks.tiers precision  bytes, tokens/s and needles with pages of int8 and int4
    python -m benchmarks.tiers session    opening a saved session against prefilling again
    python -m benchmarks.tiers all        all of them

fig21a asks the store for what traces of the bundled model ask (`tier_traces.py`; they are recorded
when first needed, ten minutes for all) at the size of Llama-3-8B; the others run the bundled model.
SSD figures say whether the page cache was emptied (--cold) or a link imitated (--ssd-link GB/s,us):
with neither, reads come from the page cache. Every run is checked: pages are those asked for, and
all arrangements generate the same tokens. Writes JSON, and a PNG where there is something to see.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import tier_engine, tier_reads, tier_store
from benchmarks.common import MIB, RESULTS, environment, table, write_result
from benchmarks.haystack import PLACES, needle_prompt
from benchmarks.index_texts import all_texts
from benchmarks.probes import shared_prefill
from benchmarks.tier_plots import PLOTS
from benchmarks.tier_traces import long_context
from kvdrive_jax import Engine
from kvdrive_jax.models.tokenizer import Tokenizer
from kvdrive_jax.models.weights import load_pretrained
from kvdrive_jax.tiers.link import Link, Links

TOKENS, STEPS = 6600, 64
Shown = list[list[str]]


def parse_link(text: str) -> Link:
    """``3.5,80``: GB/s and microseconds."""
    rate, latency = text.split(",")
    return Link(float(rate) * 1e9, float(latency) * 1e-6)


def _demo() -> tuple[Any, Any]:
    return load_pretrained("demo"), Tokenizer.from_pretrained("demo")


def _prompt(tokenizer: Any, tokens: int, name: str = "licence") -> list[int]:
    return {text.name: text for text in all_texts(tokenizer, tokens, 8)}[name].prompt


def _links(options: argparse.Namespace) -> Links:
    return Links(ssd_to_dram=options.ssd_link, dram_to_hbm=options.pcie_link)


def _same(results: dict[str, dict[str, Any]]) -> None:
    """RuntimeError unless every run generated the same tokens."""
    first = next(iter(results.values()))["tokens"]
    for name, result in results.items():
        if result["tokens"] != first:
            raise RuntimeError(f"{name} generated other tokens")


def read(options: argparse.Namespace) -> tuple[dict[str, Any], Shown]:
    """Reads of 64 random extents of four sizes; from the page cache, or with --cold without it."""
    rows = [
        tier_reads.compare(size, 256 * MIB, 64, 4 if options.cold else 15, cold=options.cold)
        for size in (4096, 16384, 65536, 262144, 1048576)
    ]
    shown = [["extent", "store GB/s", "TensorStore", "preadv", "store / preadv"]]
    for row in rows:
        speed = row["GB_per_s"]
        shown.append(
            [
                f"{row['extent_bytes'] // 1024} KiB",
                *(f"{speed[way]:.2f}" for way in ("store", "tensorstore", "preadv")),
                f"{speed['store'] / speed['preadv']:.2f}",
            ]
        )
    return {"rows": rows}, shown


def fig21a(options: argparse.Namespace) -> tuple[dict[str, Any], Shown]:
    """Time that a decode step waits for its pages, by the way they are fetched."""
    asked = long_context(
        options.traces,
        layers=tier_store.LAYERS,
        kv_heads=tier_store.KV_HEADS,
        texts=10,
        steps=STEPS,
        ratio=1 / 64,
        multiple=2.0,
        prefetch=1.25,
    )
    size = tier_store.geometry().page_bytes * asked.chunks * tier_store.LAYERS * tier_store.KV_HEADS
    directory = tier_store.room(options.directory, size)
    rows = {}
    try:
        for name, how in tier_store.ARRANGEMENTS.items():
            steps = 2 if how["sync"] == "layerwise" else options.steps or 32
            rows[name] = tier_store.fetch_times(
                asked,
                how,
                directory=directory,
                dram_bytes=2 << 30,
                extent_bytes=options.extent_bytes,
                steps=steps,
                pause_s=2e-3,
                link=options.ssd_link,
                cold=options.cold,
            )
            print(f"{name}: {1e3 * rows[name]['mean_fetch_s']:.1f} ms", flush=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    slowest = rows["layerwise"]["mean_fetch_s"]
    shown = [["", "ms a step", "later", "x layerwise", "MiB from SSD", "read / needed"]]
    for name, row in rows.items():
        shown.append(
            [
                name,
                f"{1e3 * row['mean_fetch_s']:.1f}",
                f"{1e3 * row['later_fetch_s']:.1f}",
                f"{slowest / row['mean_fetch_s']:.0f}",
                f"{row['ssd_bytes_per_step'] / MIB:.1f}",
                f"{row['read_amplification']:.2f}",
            ]
        )
    figures = {
        "chunks": asked.chunks,
        "bytes_on_disk": size,
        "dram_bytes": 2 << 30,
        "extent_bytes": options.extent_bytes,
        "cold": options.cold,
        "rows": rows,
    }
    return figures, shown


FIG21B: dict[str, tuple[dict[str, Any], float | None]] = {
    "DRAM only": ({}, None),
    "adaptive, 25 % in DRAM": ({"ssd_dir": "made", "prefetch": 1.25}, 0.25),
    "hierarchical, 25 % in DRAM": (
        {"ssd_dir": "made", "sync": "hierarchical", "prefetch": 1.25},
        0.25,
    ),
    "adaptive, 25 %, not warm": (
        {"ssd_dir": "made", "warm_up": "none", "prefetch": 1.25},
        0.25,
    ),
    "adaptive, 25 %, nothing ahead": ({"ssd_dir": "made", "prefetch": 1.0}, 0.25),
    "adaptive, 12.5 % in DRAM": ({"ssd_dir": "made", "prefetch": 1.25}, 0.125),
    "blockwise": ({"ssd_dir": "made", "sync": "blockwise"}, 0.0),
    "layerwise": ({"ssd_dir": "made", "sync": "layerwise"}, 0.0),
}


def fig21b(options: argparse.Namespace) -> tuple[dict[str, Any], Shown]:
    """Decode of the bundled model after 6.6K tokens: tokens/s by way, the best of two runs."""
    model, tokenizer = _demo()
    prompt = _prompt(tokenizer, TOKENS)
    steps = options.steps or STEPS
    results: dict[str, dict[str, Any]] = {}
    with shared_prefill():
        for again in (False, True):
            for name, (tiers, share) in FIG21B.items():
                how = tier_engine.config(extent_bytes=options.extent_bytes, **tiers)
                few = 9 if name == "layerwise" else steps
                got = tier_engine.run(
                    model, tokenizer, how, [prompt], few, links=_links(options), share=share
                )
                best = results.get(name)
                if best is None or got["decode_tokens_per_s"] > best["decode_tokens_per_s"]:
                    results[name] = got
                print(f"{name}: {got['decode_tokens_per_s']:.2f} tokens/s", flush=True)
            if again:
                break
    for result in results.values():
        result["tokens"] = [tokens[:9] for tokens in result["tokens"]]
    _same(results)
    rows = {name: tier_engine.summary({**r, "tokens": r["tokens"]}) for name, r in results.items()}
    for name, row in rows.items():
        count = 8 if name == "layerwise" else steps - 1
        stats = results[name]
        row["fetch_ms_per_step"] = 1e3 * stats["stage_s"]["fetch"] / count
        row["step_ms"] = 1e3 * stats["decode_s"] / count
        row["ssd_bytes_per_step"] = stats["bytes"]["ssd_to_dram"] / count
        row["hbm_bytes_per_step"] = stats["bytes"]["dram_to_hbm"] / count
    full = rows["DRAM only"]["tokens_per_s"]
    shown = [["", "tokens/s", "of DRAM only", "fetch ms", "SSD MiB a step", "DRAM MiB"]]
    for name, row in rows.items():
        shown.append(
            [
                name,
                f"{row['tokens_per_s']:.2f}",
                f"{100 * row['tokens_per_s'] / full:.0f} %",
                f"{row['fetch_ms_per_step']:.1f}",
                f"{row['ssd_bytes_per_step'] / MIB:.2f}",
                f"{row['dram_peak_bytes'] / MIB:.0f}",
            ]
        )
    return {"tokens": len(prompt), "steps": steps, "rows": rows}, shown


def warm(options: argparse.Namespace) -> tuple[dict[str, Any], Shown]:
    """Bytes read from SSD in the first 64 steps, with 25 % in DRAM, by warm-up."""
    model, tokenizer = _demo()
    shown = [["", "per-head", "aggregated", "none", "saved by per-head"]]
    rows: dict[str, Any] = {}
    for text in ("licence", "needle", "code"):
        prompt, results = _prompt(tokenizer, TOKENS, text), {}
        with shared_prefill():
            for kind in ("per-head", "aggregated", "none"):
                how = tier_engine.config(
                    ssd_dir="made",
                    warm_up=kind,
                    prefetch=1.25,
                    extent_bytes=options.extent_bytes,
                )
                results[kind] = tier_engine.run(
                    model, tokenizer, how, [prompt], STEPS + 1, share=0.25
                )
        _same(results)
        moved = {kind: result["bytes"]["ssd_to_dram"] for kind, result in results.items()}
        rows[text] = {"ssd_bytes": moved, "pages": {k: r["pages"] for k, r in results.items()}}
        shown.append(
            [
                text,
                *(f"{nbytes / MIB:.1f} MiB" for nbytes in moved.values()),
                f"{100 * (1 - moved['per-head'] / moved['none']):.0f} %",
            ]
        )
    return {"steps": STEPS, "dram_share": 0.25, "rows": rows}, shown


def fig5(options: argparse.Namespace) -> tuple[dict[str, Any], Shown]:
    """Tokens/s by batch, DRAM for three sessions: without SSD, naively with it, and as it is."""
    model, tokenizer = _demo()
    texts = ("licence", "code", "needle", "chat")
    whole = [_prompt(tokenizer, 1400, text)[:700] for text in texts]
    steps = options.steps or 48
    ways: dict[str, dict[str, Any]] = {
        "DRAM only": {},
        "naive": {"ssd_dir": "made", "sync": "layerwise"},
        "blockwise": {"ssd_dir": "made", "sync": "blockwise"},
        "adaptive": {"ssd_dir": "made"},
    }
    how = tier_engine.config(budget=128, window=1.0, batch=8)
    limit = tier_engine.dram_budget(model, tokenizer, how, [700] * 3, steps, 1.0)
    rows: list[dict[str, Any]] = []
    for batch in (1, 2, 3, 4, 6):
        prompts = [whole[i % len(whole)] for i in range(batch)]
        row: dict[str, Any] = {"batch": batch}
        how = tier_engine.config(budget=128, window=1.0, batch=8, ssd_dir="made")
        tier_engine.run(model, tokenizer, how, prompts, 3)  # compiles
        for name, tiers in ways.items():
            how = tier_engine.config(
                budget=128,
                window=1.0,
                batch=8,
                dram_budget=limit,
                extent_bytes=options.extent_bytes,
                **tiers,
            )
            few = 6 if name == "naive" and batch > 3 else steps
            try:
                got = tier_engine.run(model, tokenizer, how, prompts, few, links=_links(options))
            except ValueError as error:
                row[name] = None
                print(f"batch {batch}, {name}: {error}", flush=True)
                continue
            row[name] = got["decode_tokens_per_s"]
            print(f"batch {batch}, {name}: {row[name]:.1f} tokens/s", flush=True)
        rows.append(row)
    shown = [["batch", *ways]]
    for row in rows:
        cells = ["does not fit" if row[name] is None else f"{row[name]:.1f}" for name in ways]
        shown.append([str(row["batch"]), *cells])
    return {"dram_bytes": limit, "prompt_tokens": 700, "rows": rows}, shown


def fig12(options: argparse.Namespace) -> tuple[dict[str, Any], Shown]:
    """Where each chunk of a prompt is when decode starts, 25 % of the pages in DRAM."""
    from benchmarks.tier_places import places

    model, tokenizer = _demo()
    held = places(model, tokenizer, _prompt(tokenizer, 3000), options.extent_bytes)
    count = {name: int((held == i).sum()) for i, name in enumerate(("ssd", "dram", "hbm"))}
    total = sum(count.values())
    shown = [["only on SSD", "DRAM", "HBM"]]
    shown.append([f"{100 * count[name] / total:.1f} %" for name in ("ssd", "dram", "hbm")])
    rows = ["".join(map(str, row)) for row in held.tolist()]
    return {"chunks": count, "places": rows}, shown


PRECISIONS = {
    "model": {},
    "int8": {"dram_dtype": "int8"},
    "int4": {"dram_dtype": "int4"},
    "int8, SSD int4": {"dram_dtype": "int8", "ssd_dtype": "int4"},
    "SSD int4": {"ssd_dtype": "int4"},
}


def precision(options: argparse.Namespace) -> tuple[dict[str, Any], Shown]:
    """Pages kept as int8 and int4: bytes, tokens/s, needles found at six depths, agreement."""
    model, tokenizer = _demo()
    rows: dict[str, dict[str, Any]] = {
        name: {"found": 0, "same": 0, "tokens": 0} for name in PRECISIONS
    }
    depths = (0.05, 0.2, 0.4, 0.6, 0.75, 0.9)
    for i, depth in enumerate(depths):
        number = str(1234567 + 987654 * i)
        prompt = needle_prompt(
            lambda text: tokenizer.encode_chat(text), 2500, depth, number, PLACES[i], seed=i
        )
        expected: list[int] = []
        with shared_prefill():
            for name, tiers in PRECISIONS.items():
                how = tier_engine.config(
                    budget=256,
                    window=1.0,
                    ssd_dir="made",
                    extent_bytes=options.extent_bytes,
                    **tiers,
                )
                got = tier_engine.run(model, tokenizer, how, [prompt], 32, share=0.25)
                tokens = got["tokens"][0]
                expected = expected or tokens
                row = rows[name]
                row["found"] += number in tokenizer.decode(tokens)
                agreed = [a == b for a, b in zip(tokens, expected, strict=True)]
                row["same"] += agreed.index(False) if False in agreed else len(agreed)
                row["tokens"] += len(tokens)
                row["last"] = tier_engine.summary(got)
    shown = [["", "needles", "same tokens", "MiB on SSD", "MiB in DRAM", "to HBM MiB", "tokens/s"]]
    for name, row in rows.items():
        last = row["last"]
        shown.append(
            [
                name,
                f"{row['found']} of {len(depths)}",
                f"{100 * row['same'] / row['tokens']:.0f} %",
                f"{last['ssd_peak_bytes'] / MIB:.1f}",
                f"{last['dram_peak_bytes'] / MIB:.1f}",
                f"{last['hbm_bytes_per_step'] / MIB:.3f}",
                f"{last['tokens_per_s']:.1f}",
            ]
        )
    return {"rows": rows}, shown


def _first(
    model: Any, tokenizer: Any, how: Any, prompt: list[int], path: Path | None = None
) -> tuple[float, tuple[int, ...]]:
    """Seconds to the first token, of a prompt or of the session saved at ``path``; 9 tokens."""
    with Engine(model, tokenizer, how) as engine:
        start = time.perf_counter()
        known = None if path is None else engine.load_session(path)
        ids = prompt if known is None else known.all_tokens
        events = engine.stream_ids([ids], max_new_tokens=9, ignore_eos=True, session=known)
        tokens = list(events)[-1].generation.token_ids
        return time.perf_counter() - start - engine.stats()["decode_s"], tokens


def session(options: argparse.Namespace) -> tuple[dict[str, Any], Shown]:
    """The time to the first token of a prompt of 7K tokens: prefilled, and opened again."""
    model, tokenizer = _demo()
    prompt = _prompt(tokenizer, 7000)
    rows = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        path = Path(folder) / "session"
        for name, tiers in (("resident", None), ("tiered", {"ssd_dir": folder})):
            how = tier_engine.config(window=2.0 if tiers else None, **(tiers or {}))

            prefilled, expected = _first(model, tokenizer, how, prompt)
            with Engine(model, tokenizer, how) as engine:
                list(engine.stream_ids([prompt], max_new_tokens=0, save_session=path))
                saved = engine.stats()
            _first(model, tokenizer, how, prompt, path)  # compiles
            opened, got = _first(model, tokenizer, how, prompt, path)
            if got != expected:
                raise RuntimeError(f"{name}: the opened session generated other tokens")
            rows[name] = {
                "prefill_s": prefilled,
                "open_s": opened,
                "save_s": saved["save_s"],
                "bytes": saved["sessions"][0]["saved_bytes"],
            }
    shown = [["", "prefill s", "open s", "faster", "save s", "MiB"]]
    for name, row in rows.items():
        shown.append(
            [
                name,
                f"{row['prefill_s']:.2f}",
                f"{row['open_s']:.2f}",
                f"{row['prefill_s'] / row['open_s']:.0f} x",
                f"{row['save_s']:.2f}",
                f"{row['bytes'] / MIB:.0f}",
            ]
        )
    return {"tokens": len(prompt), "rows": rows}, shown


FIGURES: dict[str, Callable[[argparse.Namespace], tuple[dict[str, Any], Shown]]] = {
    "read": read,
    "fig5": fig5,
    "fig12": fig12,
    "fig21a": fig21a,
    "fig21b": fig21b,
    "warm": warm,
    "precision": precision,
    "session": session,
}


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.tiers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("figure", choices=[*FIGURES, "all"])
    made.add_argument("--output", type=Path, default=RESULTS, metavar="DIR")
    made.add_argument(
        "--traces",
        type=Path,
        default=Path(tempfile.gettempdir()) / "kvdrive-traces",
        metavar="DIR",
        help="where traces are kept (default: %(default)s)",
    )
    made.add_argument("--directory", metavar="DIR", help="of the disk to measure (default: /tmp)")
    made.add_argument("--extent-bytes", type=int, default=4096, metavar="N")
    made.add_argument("--steps", type=int, default=None, metavar="N")
    made.add_argument("--cold", action="store_true", help="empty the page cache before each step")
    made.add_argument("--ssd-link", type=parse_link, default=None, metavar="GB/s,us")
    made.add_argument("--pcie-link", type=parse_link, default=None, metavar="GB/s,us")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Make the figures asked for; 0."""
    options = parser().parse_args(argv)
    for name in FIGURES if options.figure == "all" else [options.figure]:
        start = time.perf_counter()
        figures, shown = FIGURES[name](options)
        print(table(shown[0], shown[1:]))
        linked = options.ssd_link is not None or options.pcie_link is not None
        suffix = ("_cold" if options.cold else "") + ("_linked" if linked else "")
        path = options.output / f"tiers_{name}{suffix}.json"
        result = {
            "environment": environment(dtype="float32"),
            "command": f"python -m benchmarks.tiers {name}{' --cold' if options.cold else ''}",
            "ssd_link": repr(options.ssd_link),
            "pcie_link": repr(options.pcie_link),
            "seconds": time.perf_counter() - start,
            **figures,
        }
        write_result(path, result)
        if name in PLOTS:
            PLOTS[name](result, path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
