"""Memory of a prefill: what the plan says beforehand, and what a process really took.

    python -m benchmarks.prefill_memory

One process per row. *Weights*: growth while the model loads. *Run*: from the loaded model to the
peak of one prompt's prefill, no token generated, the second time (the first compiles, which is
reported apart). On a CPU, device memory and host memory are the same memory, so the plan's HBM and
DRAM accounts are added up.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import (
    MIB,
    RESULTS,
    environment,
    numbers,
    peak_bytes,
    reset_peak,
    resident_bytes,
    table,
    write_result,
)
from benchmarks.worker import Worker

# Freed memory goes back to the system at once, so that what one phase leaves does not hide what the
# next one needs. Slower, which does not matter here.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

METHODS = ("full", "resident", "tiered")


class Probe:
    """A fresh process that runs one prompt and watches its own memory."""

    def measure(self, model: str, config: dict[str, Any], tokens: int) -> dict[str, Any]:
        """Bytes planned and held, for one prompt of ``tokens`` tokens."""
        import jax
        import jax.numpy as jnp

        from benchmarks.haystack import filler_tokens
        from benchmarks.probes import OneLetterTokenizer
        from kvdrive_jax import Engine
        from kvdrive_jax.config import config_from_dict
        from kvdrive_jax.models.tokenizer import Tokenizer
        from kvdrive_jax.models.weights import load_pretrained

        ids = filler_tokens(Tokenizer.from_pretrained(model).encode, tokens)
        jax.block_until_ready(jnp.zeros(1) + 1)  # the backend starts before memory is counted
        start = reset_peak()
        loaded = load_pretrained(model, "float32")
        jax.block_until_ready(loaded.layers)
        load_peak, weights = peak_bytes() - start, resident_bytes() - start
        limit = 2**40
        settings = config_from_dict(
            {
                "dtype": "float32",
                "batch_size": 1,
                "tiers": {"hbm_budget": limit, "dram_budget": limit},
                **config,
            }
        )
        tokenizer: Any = OneLetterTokenizer()
        with Engine(loaded, tokenizer, settings) as engine:
            plan = engine.plan([tokens], 0)
            growth = []
            for _ in range(2):
                before = reset_peak()
                list(engine.stream_ids([ids], max_new_tokens=0))
                growth.append(peak_bytes() - before)
        lines = {f"{line.tier}: {line.name}": line.nbytes for line in plan.lines if line.nbytes}
        planned_weights = lines.pop("hbm: weights")
        return {
            "padded_tokens": plan.shape.prompt_capacity,
            "everything_in_hbm": plan.resident,
            "weights": {
                "planned_bytes": planned_weights,
                "measured_bytes": weights,
                "peak_while_loading_bytes": load_peak,
            },
            "run": {
                "planned_bytes": sum(lines.values()),
                "terms_bytes": lines,
                "measured_bytes": growth[1],
                "measured_with_compiling_bytes": growth[0],
            },
        }


def settings(method: str, tokens: int, budget: int, window: float) -> dict[str, Any]:
    """Configuration of one method."""
    if method == "full":
        return {"method": "full"}
    multiple = window if method == "tiered" else 2.0 * max(1, tokens / budget)
    return {"retrieval": {"budget": budget}, "window": {"multiple": multiple}}


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.prefill_memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--model", default="demo", help="demo, a .gguf file, or a folder")
    made.add_argument("--contexts", type=numbers, default=[1024, 4096, 7168])
    made.add_argument("--methods", default="full,tiered", help=f"some of {','.join(METHODS)}")
    made.add_argument("--budget", type=int, default=512)
    made.add_argument("--window", type=float, default=2.0)
    made.add_argument("--output", type=Path, default=RESULTS / "prefill_memory.json")
    return made


def terms(part: dict[str, Any]) -> str:
    """One row's formula, term by term, in MiB."""
    return " + ".join(f"{name} {size / MIB:,.1f}" for name, size in part.items())


def title(row: dict[str, Any]) -> str:
    """A row's method and length; a short prompt may fit the windows that were asked for."""
    fits = row["method"] == "tiered" and row["everything_in_hbm"]
    return f"{row['method']} {row['tokens']:,}{' (fits its windows)' if fits else ''}"


def report(rows: list[dict[str, Any]]) -> str:
    """Planned and measured side by side, in MiB, then the terms of each plan."""

    def cells(row: dict[str, Any]) -> list[str]:
        weights, run = row["weights"], row["run"]
        planned = weights["planned_bytes"] + run["planned_bytes"]
        measured = weights["measured_bytes"] + run["measured_bytes"]
        sizes = [
            weights["planned_bytes"],
            weights["measured_bytes"],
            run["planned_bytes"],
            run["measured_bytes"],
            planned,
            measured,
        ]
        return [
            title(row),
            *(f"{size / MIB:,.1f}" for size in sizes),
            f"{measured / planned:.2f}",
        ]

    header = ["MiB", "weights", "measured", "run", "measured", "sum", "measured", "ratio"]
    formulas = [f"{title(row)}: {terms(row['run']['terms_bytes'])}" for row in rows]
    return "\n".join([table(header, [cells(row) for row in rows]), "", "run, planned:", *formulas])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    options = parser().parse_args(argv)
    methods = options.methods.split(",")
    if not set(methods) <= set(METHODS):
        raise ValueError(f"methods must be some of {', '.join(METHODS)}, got {options.methods!r}")
    record = environment(dtype="float32")
    rows = []
    for method in methods:
        for tokens in options.contexts:
            config = settings(method, tokens, options.budget, options.window)
            with Worker("benchmarks.prefill_memory:Probe", env=ENVIRONMENT) as worker:
                found = worker.call("measure", options.model, config, tokens)
            rows.append({"method": method, "tokens": tokens, **found})
            run = rows[-1]["run"]
            print(
                f"{method} {tokens:,}: planned {run['planned_bytes'] / MIB:,.1f} MiB beside the "
                f"weights, measured {run['measured_bytes'] / MIB:,.1f}",
                flush=True,
            )
    print(f"\n{report(rows)}")
    write_result(
        options.output,
        {
            "benchmark": "prefill_memory",
            "environment": record,
            "model": Path(options.model).name,
            "settings": {"budget": options.budget, "window": options.window},
            "rows": rows,
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
