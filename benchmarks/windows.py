"""The window in figures: what caching saves, which policy and which sizes save most.

    python -m benchmarks.windows fig3       bytes per step and HBM by window size (paper figure 3)
    python -m benchmarks.windows fig7       overlap of one step's best M with the next's best K
    python -m benchmarks.windows fig8       bytes saved by window size, per layer and head
    python -m benchmarks.windows fig15      windows by layer and head against uniform ones
    python -m benchmarks.windows table3     policies under the selection rules of four systems
    python -m benchmarks.windows policies   policies over eight texts, two budgets, two sizes
    python -m benchmarks.windows cost       time of directory and eviction by window size
    python -m benchmarks.windows all        all of them

From traces of the bundled model (`window_traces.py`), recorded when they are first needed: a minute
each, about half an hour for all; then seconds. Every replay goes through the engine's own directory
(tests/test_window_replay.py: its hits are the engine's, chunk for chunk). Hit rates and bytes do
not depend on the machine. Writes JSON, and a PNG where there is something to see.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import RESULTS, environment, table, write_result
from benchmarks.window_plots import PLOTS
from benchmarks.window_traces import DEFAULT_RULE, RULES, SKIP, STEPS, TEXTS, TOKENS, Wanted, each
from kvdrive_jax.index.selection import select
from kvdrive_jax.window.allocation import MULTIPLES, exact, greedy, slots_of
from kvdrive_jax.window.directory import Directory, empty_directory, observe, place
from kvdrive_jax.window.eviction import POLICIES, policy, smooths
from kvdrive_jax.window.layout import WindowLayout
from kvdrive_jax.window.measure import profile_of
from kvdrive_jax.window.profile import merge
from kvdrive_jax.window.replay import BELADY, Replay, replay
from kvdrive_jax.window.trace import Trace, with_budget

RATIOS = (1 / 64, 1 / 16)
"""Budgets of the paper, 1.56 and 6.25 % of the context."""
COMPARED = ("lru", "lfu", "fifo", "lookahead", "smoothed", BELADY)
DEFAULT = "smoothed"


def at_ratio(trace: Trace, ratio: float) -> Trace:
    """The trace with a budget that is a share of its prompt."""
    return with_budget(trace, math.ceil(trace.info.prompt_tokens * ratio))


def run(trace: Trace, multiple: float, eviction: str) -> Replay:
    """Uniform windows over a trace."""
    slots = slots_of(multiple, trace.info.selected)
    layout = WindowLayout.uniform(trace.layers, trace.kv_heads, slots, trace.info.selected)
    return replay(trace, layout, eviction, skip=SKIP)


def bytes_per_step(trace: Trace, result: Replay) -> float:
    """Bytes fetched by a mean step."""
    return float(result.missed.sum()) / len(result.missed) * trace.info.page_bytes


def hbm_bytes(trace: Trace, multiple: float) -> int:
    """Bytes of HBM that uniform windows take; those of size 0 share a landing area."""
    slots = slots_of(multiple, trace.info.selected)
    layout = WindowLayout.uniform(trace.layers, trace.kv_heads, slots, trace.info.selected)
    return layout.rows * trace.info.page_bytes


def fig3(folder: Path) -> dict[str, Any]:
    """Bytes per step and HBM for windows of x0 to x3, two budgets, two contexts."""
    rows = []
    wanted = [Wanted(text, tokens=n) for n in (3900, 7900) for text in ("licence", "code")]
    for want, whole in each(wanted, folder):
        for ratio in RATIOS:
            trace = at_ratio(whole, ratio)
            for eviction in (DEFAULT, BELADY):
                for multiple in (0.0, 1.0, 2.0, 3.0):
                    result = run(trace, multiple, eviction)
                    rows.append(
                        {
                            "text": want.text,
                            "prompt_tokens": trace.info.prompt_tokens,
                            "budget_ratio": ratio,
                            "eviction": eviction,
                            "window": multiple,
                            "bytes_per_step": bytes_per_step(trace, result),
                            "hbm_bytes": hbm_bytes(trace, multiple),
                            "hit_rate": result.hit_rate,
                        }
                    )
    saved = {}
    for row in rows:
        key = (row["text"], row["prompt_tokens"], row["budget_ratio"], row["eviction"])
        saved.setdefault(key, {})[row["window"]] = row["bytes_per_step"]
    print(
        table(
            ("text, tokens, budget, policy", "x0 MiB", "x1", "x2", "x3", "x0 / x3"),
            [
                (
                    f"{text} {tokens} {100 * ratio:.2f} % {eviction}",
                    *(f"{sizes[m] / 2**20:.2f}" for m in sizes),
                    f"{sizes[0.0] / sizes[3.0]:.1f}",
                )
                for (text, tokens, ratio, eviction), sizes in saved.items()
            ],
        )
    )
    return {"rows": rows}


def fig7(folder: Path) -> dict[str, Any]:
    """How much of a step's best M is among the next step's best K."""
    (want, trace), *_ = each([Wanted("licence")], folder)
    chunk = trace.info.chunk_size
    curves: dict[str, Any] = {}
    for tokens in (256, 512):
        count = min(tokens // chunk, trace.depth)
        depths = np.unique(np.linspace(1, min(trace.depth, 1200 // chunk), 40).astype(int))
        found = np.zeros((len(depths), trace.layers, trace.kv_heads))
        for step in range(SKIP, trace.steps - 1):
            ranks = _ranks(trace, step)
            coming = np.take_along_axis(ranks, trace.ids[step + 1, ..., :count], axis=-1)
            found += (coming[None] < depths[:, None, None, None]).sum(axis=-1)
        curves[str(tokens)] = {
            "m_tokens": (depths * chunk).tolist(),
            "found_tokens": (found / (trace.steps - 1 - SKIP) * chunk).tolist(),
        }
    for tokens, curve in curves.items():
        mean = np.array(curve["found_tokens"]).mean(axis=(1, 2))
        at = int(np.searchsorted(curve["m_tokens"][:-1], int(tokens) * 1.25))
        print(
            f"K = {tokens}: of the next step's best {tokens} tokens, {mean[at]:.0f} are among this "
            f"step's best {curve['m_tokens'][at]}, {mean[-1]:.0f} among {curve['m_tokens'][-1]}"
        )
    return {"text": want.text, "prompt_tokens": trace.info.prompt_tokens, "curves": curves}


def _ranks(trace: Trace, step: int) -> np.ndarray[Any, Any]:
    """Rank of every chunk in a step: [L, K, N]."""
    shape = (trace.layers, trace.kv_heads, trace.info.chunk_capacity + 1)
    ranks = np.full(shape, trace.depth, np.int32)
    np.put_along_axis(ranks, trace.ids[step], np.arange(trace.depth)[None, None], axis=-1)
    return ranks[..., :-1]


def fig8(folder: Path) -> dict[str, Any]:
    """Bytes per step that each window size saves, for every layer and head."""
    (want, whole), *_ = each([Wanted("licence")], folder)
    trace = at_ratio(whole, RATIOS[1])
    profile = profile_of(trace, DEFAULT, skip=SKIP)
    gain = profile.hits[..., -1] - profile.hits[..., 1]
    layer, head = np.unravel_index(int(gain.argmax()), gain.shape)
    print(
        f"from x1 to x6, layer {layer} head {head} saves most, {gain.max():.1f} chunks a step of "
        f"{profile.selected:.0f}; the least is {gain.min():.1f}, the mean {gain.mean():.1f}"
    )
    return {
        "text": want.text,
        "prompt_tokens": trace.info.prompt_tokens,
        "budget_ratio": RATIOS[1],
        "eviction": DEFAULT,
        "windows": list(MULTIPLES),
        "saved_bytes_per_step": (profile.hits * trace.info.page_bytes).tolist(),
    }


def fig15(folder: Path) -> dict[str, Any]:
    """Windows by layer and head against uniform ones in equal HBM, on the text left out."""
    found = list(each([Wanted(text) for text in TEXTS], folder))
    rows, greedy_to_exact = [], []
    for ratio in RATIOS:
        # One budget for all, so that their profiles can be merged.
        tokens = math.ceil(np.mean([t.info.prompt_tokens for _, t in found]) * ratio)
        traces = {want.text: with_budget(trace, tokens) for want, trace in found}
        profiles = {text: profile_of(trace, DEFAULT, skip=SKIP) for text, trace in traces.items()}
        for text, trace in traces.items():
            others = merge([profile for name, profile in profiles.items() if name != text])
            for multiple in (1.5, 2.0, 3.0):
                selected = trace.info.selected
                limit = trace.layers * trace.kv_heads * slots_of(multiple, selected)
                made = {
                    "from other texts": greedy(others.hits, MULTIPLES, selected, limit),
                    "from this text": greedy(profiles[text].hits, MULTIPLES, selected, limit),
                }
                best = exact(others.hits, MULTIPLES, selected, limit)
                greedy_to_exact.append(made["from other texts"].hits / best.hits)
                same = run(trace, multiple, DEFAULT)
                row = {"text": text, "budget_ratio": ratio, "window": multiple}
                row["uniform_bytes_per_step"] = bytes_per_step(trace, same)
                for name, allocation in made.items():
                    other = replay(trace, allocation.layout, DEFAULT, skip=SKIP)
                    row[f"{name}, bytes_per_step"] = bytes_per_step(trace, other)
                    row[f"{name}, saved"] = 1 - other.missed.sum() / same.missed.sum()
                    row[f"{name}, rows"] = allocation.rows
                row["rows"] = limit
                rows.append(row)
    print(
        table(
            ("budget, window", "saved, mean", "least", "most", "from its own text"),
            [
                (
                    f"{100 * ratio:.2f} % x{multiple:g}",
                    *(f"{100 * f(saved):.1f} %" for f in (np.mean, min, max)),
                    f"{100 * np.mean(own):.1f} %",
                )
                for ratio in RATIOS
                for multiple in (1.5, 2.0, 3.0)
                for saved, own in [_columns(rows, ratio, multiple)]
            ],
        )
    )
    print(f"greedy serves at least {100 * min(greedy_to_exact):.3f} % of what the exact one does")
    return {"eviction": DEFAULT, "rows": rows, "least greedy / exact": min(greedy_to_exact)}


def _columns(
    rows: list[dict[str, Any]], ratio: float, multiple: float
) -> tuple[list[float], list[float]]:
    of = [row for row in rows if (row["budget_ratio"], row["window"]) == (ratio, multiple)]
    return (
        [row["from other texts, saved"] for row in of],
        [row["from this text, saved"] for row in of],
    )


def _compare(
    wanted: Sequence[Wanted], folder: Path, ratios: Sequence[float], sizes: Sequence[float]
) -> list[dict[str, Any]]:
    """Hit rates of every policy, and the share of the gap from LRU to Belady that each closes."""
    rows = []
    for want, whole in each(list(wanted), folder):
        for ratio in ratios:
            trace = at_ratio(whole, ratio)
            for multiple in sizes:
                rates = {name: run(trace, multiple, name).hit_rate for name in COMPARED}
                gap = rates[BELADY] - rates["lru"]
                rows.append(
                    {
                        "rule": want.rule,
                        "text": want.text,
                        "prompt_tokens": trace.info.prompt_tokens,
                        "budget_ratio": ratio,
                        "window": multiple,
                        "hit_rate": rates,
                        "gap_closed": {
                            name: (rate - rates["lru"]) / gap for name, rate in rates.items()
                        },
                    }
                )
    return rows


def _show(rows: list[dict[str, Any]], keys: tuple[str, ...]) -> None:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    lines = []
    for key, group in groups.items():
        rates = {name: np.mean([row["hit_rate"][name] for row in group]) for name in COMPARED}
        closed = {name: np.mean([row["gap_closed"][name] for row in group]) for name in COMPARED}
        label = " ".join(
            f"{100 * part:.2f} %" if isinstance(part, float) and part < 1 else str(part)
            for part in key
        )
        lines.append(
            (
                label,
                *(f"{100 * rates[name]:.2f} ({100 * closed[name]:+.0f})" for name in COMPARED),
            )
        )
    print(table((" ".join(keys), *(f"{name} % (gap %)" for name in COMPARED)), lines))


def table3(folder: Path) -> dict[str, Any]:
    """Policies under the selection rules of KVDrive, Quest and ShadowKV, windows of x2."""
    wanted = [
        Wanted(text, rule=rule) for rule in RULES for text in ("licence", "needle", "summary")
    ]
    rows = _compare(wanted, folder, RATIOS, (2.0,))
    _show(rows, ("rule", "budget_ratio"))
    return {"rows": rows}


def policies(folder: Path) -> dict[str, Any]:
    """Policies over all texts."""
    rows = _compare([Wanted(text) for text in TEXTS], folder, RATIOS, (2.0, 3.0))
    _show(rows, ("text", "budget_ratio", "window"))
    _show(rows, ("budget_ratio", "window"))
    return {"rows": rows}


def cost(folder: Path) -> dict[str, Any]:
    """Time of look-up, policy and update of one layer, by context, policy and window size."""
    selected, kv_heads, layers = 128, 3, 30
    rows = []
    for chunks in (2048, 8192):
        for name in ("smoothed", "lookahead", "lru"):
            for multiple in (1, 2, 4, 8):
                seconds = _directory_seconds(name, kv_heads, chunks, selected, multiple)
                rows.append(
                    {
                        "context_tokens": 4 * chunks,
                        "eviction": name,
                        "window": multiple,
                        "layer_s": seconds,
                        "step_s": layers * seconds,
                    }
                )
    print(
        table(
            ("context, policy, window", "a layer, us", f"a step of {layers} layers, ms"),
            [
                (
                    f"{row['context_tokens']:,} {row['eviction']} x{row['window']}",
                    f"{1e6 * row['layer_s']:.0f}",
                    f"{1e3 * row['step_s']:.1f}",
                )
                for row in rows
            ],
        )
    )
    return {"selected": selected, "kv_heads": kv_heads, "rows": rows}


def _directory_seconds(
    name: str, kv_heads: int, chunks: int, selected: int, multiple: int
) -> float:
    """Median of 60 steps over scores that drift; dispatch included."""
    slots = selected * multiple
    directory = empty_directory(1, kv_heads, chunks, slots, slots, smooths=smooths(name))

    @partial(jax.jit, donate_argnames="directory")
    def step(directory: Directory, ids: jax.Array, scores: jax.Array) -> Any:
        directory = observe(directory, scores, ids)
        return place(directory, ids, policy(name)(directory, scores))

    rng = np.random.default_rng(0)
    shape = (1, kv_heads, chunks)
    base = rng.standard_normal(shape, np.float32)
    drift = [jnp.asarray(base + 0.3 * rng.standard_normal(shape, np.float32)) for _ in range(20)]
    n_chunks = jnp.array([chunks], jnp.int32)
    inputs = [(select(scores, n_chunks, selected), scores) for scores in drift]
    taken = []
    for number in range(80):
        start = time.perf_counter()
        directory, slots_of_ids, miss = step(directory, *inputs[number % 20])
        jax.block_until_ready((directory, slots_of_ids, miss))
        taken.append(time.perf_counter() - start)
    return float(np.median(taken[20:]))


FIGURES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "fig3": fig3,
    "fig7": fig7,
    "fig8": fig8,
    "fig15": fig15,
    "table3": table3,
    "policies": policies,
    "cost": cost,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Make the figures that were asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.windows",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("figure", choices=(*FIGURES, "all"))
    parser.add_argument(
        "--traces", default="build/traces", type=Path, help="where traces are kept and looked for"
    )
    parser.add_argument("--output", default=RESULTS, type=Path, help="folder of JSON and PNG")
    options = parser.parse_args(argv)
    assert set(COMPARED) - {BELADY} <= set(POLICIES)
    for name in FIGURES if options.figure == "all" else (options.figure,):
        print(f"== {name}", flush=True)
        result = {
            "command": f"python -m benchmarks.windows {name}",
            "environment": environment(dtype="float32"),
            "settings": {"model": "demo", "rule": DEFAULT_RULE, "tokens": TOKENS, "steps": STEPS},
            "skipped_steps": SKIP,
            **FIGURES[name](options.traces),
        }
        write_result(options.output / f"windows_{name}.json", result)
        if name in PLOTS:
            PLOTS[name](result, options.output / f"windows_{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
