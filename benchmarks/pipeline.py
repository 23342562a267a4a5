"""The pipeline in figures: select, fetch and compute on a stack of Llama-3-8B's layers.

    python -m benchmarks.pipeline fig4      time split of three ways to select, in turn
    python -m benchmarks.pipeline fig10     one step of each schedule, as a timeline
    python -m benchmarks.pipeline fig16     windows of 2, 3 and 4 times the budget
    python -m benchmarks.pipeline fig17     chunks of 1, 4 and 8 tokens
    python -m benchmarks.pipeline fig18     2,048, 4,096 and 8,192 cluster centres
    python -m benchmarks.pipeline fig24     throughput by batch
    python -m benchmarks.pipeline aims      fetch as long as select and compute: what overlap gains
    python -m benchmarks.pipeline overhead  host time for each (layer, micro-batch)
    python -m benchmarks.pipeline all       all of them

KV has the statistics of real heads (`stack_kv.py`: texts are read by the bundled model when first
needed, several minutes for all). Links are as slow against this machine's memory as PCIe 4.0 x16
and NVMe are against an A100's, so that ratios mean something. Every figure first checks that all
arrangements compute the same (bit for bit where as many sessions compute together, else to within
rounding) and that bytes moved. Writes JSON, and a PNG.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.common import RESULTS, environment, numbers, table, write_result
from benchmarks.pipeline_aims import aims, overhead
from benchmarks.pipeline_cases import BUDGET, Figures, Machine, Shown, memory_bandwidth
from benchmarks.pipeline_paper import fig4, fig10, fig16, fig17, fig18, fig24
from benchmarks.pipeline_plots import PLOTS
from benchmarks.stack_model import SHAPES

FIGURES: dict[str, Callable[[argparse.Namespace, Machine], tuple[Figures, Shown]]] = {
    "fig4": fig4,
    "fig10": fig10,
    "fig16": fig16,
    "fig17": fig17,
    "fig18": fig18,
    "fig24": fig24,
    "aims": aims,
    "overhead": overhead,
}
LAYERS = {"fig10": 2, "aims": 2, "overhead": 30}
"""Where a figure has more layers than one."""


def _budget(text: str) -> float | int:
    value = float(text)
    return value if value < 1 else int(value)


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("figure", choices=[*FIGURES, "all"])
    made.add_argument("--output", type=Path, default=RESULTS, metavar="DIR")
    made.add_argument(
        "--shape",
        choices=SHAPES,
        default=None,
        help="of layers (default: llama-3-8b; smollm2, the bundled model, for overhead)",
    )
    made.add_argument("--layers", type=int, default=None, metavar="L")
    made.add_argument("--context", type=numbers, default=None, metavar="T[,T...]")
    made.add_argument("--batch", type=numbers, default=None, metavar="B[,B...]")
    made.add_argument("--dtype", default="float32", help="of weights and KV")
    made.add_argument("--kv", choices=("real", "random"), default="real")
    made.add_argument("--budget", type=_budget, default=BUDGET, help="tokens, or a ratio below 1")
    made.add_argument("--window", type=float, default=2.0, metavar="X", help="times the budget")
    made.add_argument("--steps", type=int, default=9, metavar="N", help="the first 3 not timed")
    return made


def _given(options: argparse.Namespace) -> list[str]:
    """Options that are not the defaults, as they are typed."""
    given = []
    for name, value in vars(options).items():
        if name in ("figure", "output") or value == parser().get_default(name):
            continue
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        given += [f"--{name}", text]
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Make the figures asked for; 0."""
    options = parser().parse_args(argv)
    machine = Machine(memory_bandwidth())
    print(machine.line())
    for name in FIGURES if options.figure == "all" else [options.figure]:
        start = time.perf_counter()
        chosen = argparse.Namespace(**vars(options))
        chosen.shape = options.shape or ("smollm2" if name == "overhead" else "llama-3-8b")
        chosen.layers = options.layers or LAYERS.get(name, 1)
        before = environment(dtype=options.dtype)
        figures, shown = FIGURES[name](chosen, machine)
        print(table(shown[0], shown[1:]))
        path = options.output / f"pipeline_{name}.json"
        result = {
            "environment": before,
            "command": " ".join(["python -m benchmarks.pipeline", name, *_given(options)]),
            "machine": machine.to_dict(),
            "steps": options.steps,
            "seconds": time.perf_counter() - start,
            **figures,
        }
        write_result(path, result)
        if name in PLOTS:
            PLOTS[name](result, path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
