"""Needles found: a 7-digit number hidden in prose, at several depths of several contexts.

    python -m benchmarks.needle                                 full, and kvdrive with 512 and 256
    python -m benchmarks.needle --window 2 --dram-budget 64MiB --ssd-dir DIR     through all tiers

Every answer is made by an Engine, greedily, one prompt at a time. Prefill is the same for every
method, so a prompt is prefilled once and its keys and values given to each engine (--no-share: each
prefills for itself). A hit: the digits occur in the answer.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common import (
    RESULTS,
    environment,
    fractions,
    model_shape,
    names,
    numbers,
    table,
    write_result,
)
from benchmarks.haystack import PLACES, needle_prompt
from benchmarks.probes import shared_prefill
from kvdrive_jax import Engine, KVDriveConfig, RetrievalConfig, TierConfig, WindowConfig
from kvdrive_jax.config import parse_size
from kvdrive_jax.models.tokenizer import Tokenizer
from kvdrive_jax.models.weights import load_pretrained

SHOWN = 48
"""Characters of an answer that progress shows."""


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.needle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--model", default="demo", help="demo, a folder or a .gguf file")
    made.add_argument("--dtype", default="auto")
    made.add_argument(
        "--contexts", type=numbers, default=[1024, 2048, 4096, 7168], help="tokens of the prompts"
    )
    made.add_argument("--depths", type=fractions, default=[0.05, 0.2, 0.4, 0.6, 0.75, 0.9])
    made.add_argument(
        "--budgets", type=numbers, default=[512, 256], help="of kvdrive; full always runs"
    )
    made.add_argument(
        "--indexes", type=names, default=[RetrievalConfig().index], help="one kvdrive each"
    )
    made.add_argument("--new-tokens", type=int, default=24)
    made.add_argument("--chunk-size", type=int, default=RetrievalConfig().chunk_size)
    made.add_argument(
        "--window", type=float, help="multiple of the budget (default: all in HBM if it fits)"
    )
    made.add_argument("--hbm-budget", type=parse_size)
    made.add_argument("--dram-budget", type=parse_size)
    made.add_argument("--ssd-budget", type=parse_size)
    made.add_argument("--ssd-dir")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--no-share", action="store_true", help="prefill anew for every method")
    made.add_argument("--output", type=Path, default=RESULTS / "needle.json")
    return made


def configurations(options: argparse.Namespace) -> dict[str, KVDriveConfig]:
    """The methods to compare, by the name they have in the table."""
    tiers = TierConfig(
        hbm_budget=options.hbm_budget,
        dram_budget=options.dram_budget,
        ssd_budget=options.ssd_budget,
        ssd_dir=options.ssd_dir,
    )
    found = {
        "full": KVDriveConfig(
            method="full",
            dtype=options.dtype,
            batch_size=1,
            tiers=TierConfig(hbm_budget=options.hbm_budget),
        )
    }
    for index, budget in product(options.indexes, options.budgets):
        found[f"{index} {budget}"] = KVDriveConfig(
            dtype=options.dtype,
            batch_size=1,
            retrieval=RetrievalConfig(budget=budget, index=index, chunk_size=options.chunk_size),
            window=WindowConfig(multiple=options.window),
            tiers=tiers,
        )
    return found


def ask(engine: Engine, ids: Sequence[int], new_tokens: int) -> dict[str, Any]:
    """One engine's answer to one prompt, with the figures of the run."""
    answer = None
    for event in engine.stream_ids([ids], max_new_tokens=new_tokens):
        answer = event.generation or answer
    assert answer is not None
    if answer.error is not None:
        raise RuntimeError(answer.error)
    stats = engine.stats()
    return {
        "answer": answer.text,
        "prompt_tokens": len(ids),
        "new_tokens": len(answer.token_ids),
        "attended_tokens_mean": answer.stats["attended_tokens_mean"],
        "hit_rate": answer.stats["hit_rate"],
        "bytes": stats["bytes"],
    }


def found(number: str, answer: str) -> bool:
    """Whether the number's digits occur in the answer, however they are grouped."""
    return number in answer.replace(",", "").replace(" ", "")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status: 1 where full attention missed a needle."""
    options = parser().parse_args(argv)
    tokenizer = Tokenizer.from_pretrained(options.model)
    model = load_pretrained(options.model, options.dtype)
    record = environment(dtype=model.dtype.name)
    engines = {
        name: Engine(model, tokenizer, config, name=options.model)
        for name, config in configurations(options).items()
    }
    encode = engines["full"].encode
    # One prefill's keys and values for all: only where the order of engines cannot matter.
    share = nullcontext if options.no_share else shared_prefill
    runs: list[dict[str, Any]] = []
    for context in options.contexts:
        for depth in options.depths:
            rng = random.Random(f"{options.seed} {context} {depth}")
            number, place = str(rng.randrange(10**6, 10**7)), rng.choice(PLACES)
            ids = needle_prompt(encode, context, depth, number, place, seed=rng.randrange(10**9))
            start = time.perf_counter()
            line = []
            with share():
                for name, engine in engines.items():
                    run = ask(engine, ids, options.new_tokens)
                    hit = found(number, run["answer"])
                    runs.append(
                        {
                            "method": name,
                            "context": context,
                            "depth": depth,
                            "number": number,
                            "hit": hit,
                            **run,
                        }
                    )
                    line.append(f"{name}: {'hit ' if hit else 'MISS'} {run['answer'][:SHOWN]!r}")
            print(
                f"{context:6,} at {depth:.2f}, {number} "
                f"({time.perf_counter() - start:.1f} s)  {'   '.join(line)}",
                flush=True,
            )
    for engine in engines.values():
        engine.close()
    configs = {name: engine.config.to_dict() for name, engine in engines.items()}
    for config in configs.values():  # whether there was an SSD tier, not where
        config["tiers"]["ssd_dir"] = config["tiers"]["ssd_dir"] and "given"
    print(f"\n{summary(runs, list(engines), options.contexts)}")
    hits = {name: sum(r["hit"] for r in runs if r["method"] == name) for name in engines}
    write_result(
        options.output,
        {
            "benchmark": "needle",
            "environment": record,
            "model": Path(options.model).name,
            "shape": model_shape(model.config),
            "settings": {
                "contexts": options.contexts,
                "depths": options.depths,
                "new_tokens": options.new_tokens,
                "seed": options.seed,
                "configs": configs,
            },
            "hits": hits,
            "of": len(options.contexts) * len(options.depths),
            "runs": runs,
        },
    )
    return 0 if hits["full"] == len(runs) // len(engines) else 1


def summary(runs: list[dict[str, Any]], methods: list[str], contexts: list[int]) -> str:
    """Hits per method and context, and in all."""

    def cell(method: str, context: int | None) -> str:
        here = [r["hit"] for r in runs if r["method"] == method and context in (None, r["context"])]
        return f"{sum(here)}/{len(here)}"

    def mean(method: str, field: str) -> float | None:
        values = [r[field] for r in runs if r["method"] == method and r[field] is not None]
        return sum(values) / len(values) if values else None

    rows = []
    for method in methods:
        rate = mean(method, "hit_rate")
        rows.append(
            [
                method,
                *(cell(method, context) for context in contexts),
                cell(method, None),
                f"{mean(method, 'attended_tokens_mean') or 0:,.0f}",
                "-" if rate is None else f"{100 * rate:.1f} %",
            ]
        )
    header = ["hits", *(f"{context:,}" for context in contexts), "all", "attended", "hit rate"]
    return table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
