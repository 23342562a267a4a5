"""The model of time in figures: predictions of the paper's, and how well it predicts here.

    python -m benchmarks.time_model fig11     attention on CPU and GPU, by hit rate (the paper's)
    python -m benchmarks.time_model fig13     throughput on an L20, predicted
    python -m benchmarks.time_model fig14     on H20 and RTX 4090, predicted
    python -m benchmarks.time_model fig24     from one session to 16, predicted
    python -m benchmarks.time_model hits      hit rates by window, for predictions, from traces
    python -m benchmarks.time_model validate  predicted and measured steps on this CPU

fig13, fig14 and fig24 run nothing: they are predictions by `kvdrive_jax.plan`, and say so. hits
replays the traces of `benchmarks.windows` (recorded when missing, a minute each). validate is
`time_validate.py`. Writes JSON, and a PNG where there is something to see.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, environment, table, write_result
from benchmarks.time_plots import PLOTS
from kvdrive_jax.plan.hardware import HARDWARE, SUSTAINED, sustained
from kvdrive_jax.plan.names import model_named
from kvdrive_jax.plan.predict import Prediction, compare, default_budgets
from kvdrive_jax.plan.work import Case
from kvdrive_jax.window.hits import MEASURED

BUDGET = 1 / 64
"""1.56 % of the context, as in most of the paper's figures."""
SSD_BYTES = 2 * 10**12
CONTEXTS = (30720, 61440, 122880)
WINDOWS = (1.0, 2.0, 3.0, 4.0)


def predicted(
    models: Sequence[str],
    machines: Sequence[str],
    contexts: Sequence[int],
    batches: Sequence[int],
) -> list[dict[str, Any]]:
    """Rows of all combinations and methods."""
    rows = []
    for machine in machines:
        peak = HARDWARE[machine]
        budgets = default_budgets(peak, ssd=SSD_BYTES)
        for model in models:
            for context in contexts:
                for batch in batches:
                    case = Case(
                        model=model_named(model),
                        context=context,
                        batch=batch,
                        budget=math.ceil(BUDGET * context),
                    )
                    for method, found in compare(case, peak, budgets=budgets).items():
                        rows.append(
                            {
                                "hardware": machine,
                                "model": model,
                                "context": context,
                                "batch": batch,
                                "method": method,
                                **_plain(found),
                            }
                        )
    return rows


def _plain(found: Prediction) -> dict[str, Any]:
    if found.simulation is None:
        return {"tokens_per_s": None, "refused": found.refused}
    return {
        "tokens_per_s": found.tokens_per_s,
        "step_ms": 1e3 * found.step_s,
        "stages_ms": {name: 1e3 * value for name, value in found.simulation.stages.items()},
        "bound_ms": 1e3 * found.simulation.bound,
        "window": found.window,
        "setting": None if found.window is None else f"{found.fetch}, {found.arrangement}",
        "hit_rate": found.hit_rate,
        "from_ssd": found.from_ssd,
    }


def _show(rows: list[dict[str, Any]]) -> None:
    print("PREDICTIONS, not measurements: tokens/s of all sessions together")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = (row["hardware"], row["model"], row["context"], row["batch"])
        groups.setdefault(key, {})[row["method"]] = row
    lines = []
    for (machine, model, context, batch), of in groups.items():
        own = of["kvdrive"]
        window = own.get("window")
        lines.append(
            (
                f"{machine} {model} {context:,} x {batch}",
                *(_rate(of[method]["tokens_per_s"]) for method in methods),
                "" if own["tokens_per_s"] is None else f"x{window:g}" if window else "all",
                own.get("setting") or "",
            )
        )
    print(table(("case", *methods, "window", "setting of kvdrive"), lines))


def _rate(value: float | None) -> str:
    return "does not fit" if value is None else f"{value:,.1f}"


def _assumed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "kind": "PREDICTION, nothing was run on this hardware",
        "assumed": {
            "budget": "1/64 of the context",
            "share of peak that is sustained": SUSTAINED,
            "hit rates": MEASURED.source,
            "ssd_bytes": SSD_BYTES,
            "hardware": {
                name: {
                    key: value
                    for key, value in vars(sustained(HARDWARE[name])).items()
                    if key != "source"
                }
                for name in dict.fromkeys(row["hardware"] for row in rows)
            },
        },
        "rows": rows,
    }


def fig13(options: argparse.Namespace) -> dict[str, Any]:
    """L20: models, contexts and batches."""
    models = ("llama-3-8b", "qwen3-8b", "phi-4-mini")
    rows = predicted(models, ("l20",), CONTEXTS, (1, 2, 4, 8))
    _show(rows)
    return _assumed(rows)


def fig14(options: argparse.Namespace) -> dict[str, Any]:
    """H20 and RTX 4090."""
    rows = predicted(("llama-3-8b",), ("h20", "rtx4090"), CONTEXTS, (1, 2, 4, 8))
    _show(rows)
    return _assumed(rows)


def fig24(options: argparse.Namespace) -> dict[str, Any]:
    """One session to 16."""
    rows = predicted(("llama-3-8b",), ("l20", "h20"), (61440, 122880), (1, 2, 4, 6, 8, 12, 16))
    _show(rows)
    own = [row for row in rows if row["method"] == "kvdrive"]
    for machine, context in dict.fromkeys((row["hardware"], row["context"]) for row in own):
        rates = [
            row["tokens_per_s"]
            for row in own
            if (row["hardware"], row["context"]) == (machine, context)
            and row["tokens_per_s"] is not None
        ]
        print(
            f"{machine}, {context:,} tokens: the largest batch that fits gives "
            f"{rates[-1] / rates[0]:.1f} x one session's tokens/s"
        )
    return _assumed(rows)


def fig11(options: argparse.Namespace) -> dict[str, Any]:
    """Roofs of decode attention on the host's CPU, and on a GPU that must fetch what its window
    lacks; and what this CPU reaches."""
    gpu = HARDWARE[options.gpu]
    from benchmarks.time_probe import attention_points

    points = attention_points()
    intensity = np.geomspace(0.25, 4096, 200)
    roofs: dict[str, Any] = {
        "CPU": np.minimum(gpu.host_operations, intensity * gpu.host_bandwidth),
    }
    for hits in (0.0, 0.8, 0.9):
        link = gpu.pcie / (1 - hits)
        roofs[f"GPU, {hits:.0%} hits"] = np.minimum(gpu.tensor, intensity * min(link, gpu.hbm))
    case = Case(model=model_named("llama-3-8b"), context=122880, batch=1)
    # Two products of G query heads with keys and values that are read once.
    own = 2.0 * case.model.group_size / case.itemsize
    at = {name: float(np.interp(own, intensity, roof) / 1e9) for name, roof in roofs.items()}
    crossing = gpu.host_operations / gpu.pcie
    print(f"{gpu.name}; Llama-3-8B's decode attention has {own:g} operations per byte of KV")
    print(table(("roof", "Gop/s there"), [(name, f"{value:,.1f}") for name, value in at.items()]))
    print(
        f"below {crossing:,.0f} operations per byte the CPU's roof is above that of a GPU that "
        "fetches everything"
    )
    print(
        table(
            ("measured on this CPU", "op/byte", "Gop/s", "GB/s"),
            [
                (
                    point["name"],
                    f"{point['intensity']:g}",
                    f"{point['operations_per_s'] / 1e9:.1f}",
                    f"{point['bytes_per_s'] / 1e9:.1f}",
                )
                for point in points
            ],
        )
    )
    return {
        "kind": "roofs from data sheets; points measured on this CPU",
        "gpu": gpu.name,
        "gpu_source": gpu.source,
        "model": "llama-3-8b",
        "intensity_of_model": own,
        "roofs_there_gops": at,
        "crossing_without_hits": crossing,
        "intensity": intensity.tolist(),
        "roofs": {name: roof.tolist() for name, roof in roofs.items()},
        "points": points,
    }


def hits(options: argparse.Namespace) -> dict[str, Any]:
    """Hit rates by window size, mean over all texts, two budgets."""
    from benchmarks.window_traces import SKIP, TEXTS, Wanted, each
    from benchmarks.windows import DEFAULT, RATIOS, at_ratio, run

    rows = []
    for want, whole in each([Wanted(text) for text in TEXTS], options.traces):
        for ratio in RATIOS:
            trace = at_ratio(whole, ratio)
            rows += [
                {
                    "text": want.text,
                    "prompt_tokens": trace.info.prompt_tokens,
                    "budget_ratio": ratio,
                    "window": multiple,
                    "hit_rate": run(trace, multiple, DEFAULT).hit_rate,
                }
                for multiple in WINDOWS
            ]
    mean = {
        ratio: [
            float(
                np.mean(
                    [
                        row["hit_rate"]
                        for row in rows
                        if (row["budget_ratio"], row["window"]) == (ratio, multiple)
                    ]
                )
            )
            for multiple in WINDOWS
        ]
        for ratio in RATIOS
    }
    print(
        table(
            ("budget", *(f"x{multiple:g}" for multiple in WINDOWS)),
            [
                (f"{100 * ratio:.2f} %", *(f"{100 * rate:.1f}" for rate in rates))
                for ratio, rates in mean.items()
            ],
        )
    )
    return {
        "eviction": DEFAULT,
        "skipped_steps": SKIP,
        "windows": WINDOWS,
        "mean": [{"budget_ratio": ratio, "hit_rates": rates} for ratio, rates in mean.items()],
        "rows": rows,
    }


def validate(options: argparse.Namespace) -> dict[str, Any]:
    """See `time_validate`."""
    from benchmarks import time_validate

    return time_validate.validate(options)


FIGURES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "fig11": fig11,
    "fig13": fig13,
    "fig14": fig14,
    "fig24": fig24,
    "hits": hits,
    "validate": validate,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Make what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.time_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("--gpu", default="a100", choices=HARDWARE, help="of fig11")
    parser.add_argument(
        "--traces", default="build/traces", type=Path, help="of hits: where traces are kept"
    )
    parser.add_argument("--steps", default=16, type=int, help="of validate: steps of each setting")
    parser.add_argument("--shape", default="llama-3-8b", help="of validate: of the stack")
    parser.add_argument("--layers", default=2, type=int, help="of validate")
    parser.add_argument("--repeats", default=2, type=int, help="of validate: runs of each setting")
    parser.add_argument("--only", type=int, help="of validate: so many of its stacks")
    parser.add_argument("--output", default=RESULTS, type=Path, help="folder of JSON and PNG")
    options = parser.parse_args(argv)
    made = FIGURES[options.figure](options)
    result = {
        "command": f"python -m benchmarks.time_model {options.figure}",
        "environment": environment(dtype="float32"),
        **made,
    }
    write_result(options.output / f"time_{options.figure}.json", result)
    if options.figure in PLOTS:
        PLOTS[options.figure](result, options.output / f"time_{options.figure}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
