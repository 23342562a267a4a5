"""Calibration against exhaustive search: every window, micro-batch and number of cohorts of a grid.

    python -m benchmarks.calibration

A stack of the bundled model's layers over KV of real heads (`stack.py`), with two imitated links:
as slow against this machine's memory as PCIe 4.0 x16 is against an A100's, and four times as slow.
For each link, first the calibration as the engine makes it: the largest window that pays is
measured before there is a batch, the arrangement found on the first decode steps, compilation
included. Then every point of the grid, all of them checked to compute the same and to have moved
bytes. The choice is judged by its time in the grid. Windows between those of the grid
count as the nearest one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.common import RESULTS, environment, numbers, table, write_result
from benchmarks.pipeline_cases import (
    BUDGET,
    FREE,
    PCIE_BYTES_PER_S,
    Figures,
    Machine,
    about,
    configure,
    make_stack,
    memory_bandwidth,
    opened,
)
from benchmarks.stack import Session, Stack
from benchmarks.stack_model import SHAPES
from benchmarks.stack_run import StackRun, same_outputs
from kvdrive_jax.budgets import Budgets
from kvdrive_jax.calibration import Calibrator, alike
from kvdrive_jax.config import KVDriveConfig
from kvdrive_jax.methods.kvdrive import KVDrive
from kvdrive_jax.pipeline.calibrate_store import read_results
from kvdrive_jax.pipeline.parts import Arrangement
from kvdrive_jax.telemetry import host_memory_bytes
from kvdrive_jax.tiers.link import Link, Links
from kvdrive_jax.window.sizing import WindowShape

WINDOWS = (1.0, 1.5, 2.0, 3.0)
SLOWER = (1.0, 4.0)
ROUNDS, STEPS = 3, 10
WITHIN = 1.05


class _Case:
    """One link: its calibrator, what that chose, and the times of the grid."""

    def __init__(
        self, options: argparse.Namespace, stack: Stack, config: KVDriveConfig, bytes_per_s: float
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self.file = str(Path(options.scratch) / f"{bytes_per_s:.0f}.json")
        memory = host_memory_bytes()
        self.calibrator = Calibrator(
            replace(config, pipeline=replace(config.pipeline, calibrate=self.file)),
            stack.weights.config,
            stack.weights.dtype,
            stack.weights.digest,
            Budgets(hbm=memory, dram=memory, ssd=0),
            links=Links(dram_to_hbm=Link(bytes_per_s)),
            quiet=False,
        )
        start = time.perf_counter()
        shape = stack.plan(config).shape
        model = stack.weights.config
        most = self.calibrator.most_window(len(stack.contexts), stack.steps)
        assert most is not None
        pays = most(
            WindowShape(
                layers=model.num_layers,
                kv_heads=model.num_kv_heads,
                selected=shape.selected,
                chunk_capacity=shape.chunk_capacity,
            ),
            max(WINDOWS),
            None,
        )
        self.window_s = time.perf_counter() - start
        self.pays = max(WINDOWS) if pays is None else pays
        self.window = min(WINDOWS, key=lambda size: abs(size - self.pays))
        self.arrangement = Arrangement(len(stack.contexts))
        self.search_s = 0.0
        self.grid: dict[tuple[float, Arrangement], StackRun] = {}

    def search(self, session: Session, link: Link) -> None:
        """The search of a batch that has just begun."""
        link.bytes_per_s = self.bytes_per_s
        method = session.method
        assert isinstance(method, KVDrive)
        calibration = self.calibrator.begin(method, session.plan)
        start = time.perf_counter()
        session.run(calibration=calibration)
        self.search_s = time.perf_counter() - start
        self.arrangement = method.arrangement


def _measure(session: Session, case: _Case, link: Link) -> None:
    """Every arrangement once; of all rounds the best of each counts."""
    link.bytes_per_s = case.bytes_per_s
    batch = len(session.contexts)
    runs: dict[str, StackRun] = {}
    method = session.method
    # As calibration does: a session computed alone is no choice.
    for one in alike(batch, Arrangement(-(-batch // 2)), method.arrangements()):
        method.arrange(one)
        run = session.run(STEPS)
        if not run.bytes["dram_to_hbm"]:
            raise RuntimeError(f"{one} moved nothing: every chunk was in its window")
        runs[str(one)] = run
        before = case.grid.get((session.plan.window, one))
        if before is None or run.median_s < before.median_s:
            case.grid[session.plan.window, one] = run
    same_outputs(runs, session.dtype)


def compare(options: argparse.Namespace, machine: Machine) -> Figures:
    """All cases of both links."""
    batch, context = options.batch[0], options.context[0]
    stack = make_stack(options, [context] * batch)
    link = Link(FREE)
    config = configure(options, batch)
    cases = [
        _Case(options, stack, config, PCIE_BYTES_PER_S / machine.scale / slower)
        for slower in SLOWER
    ]
    with ExitStack() as together:
        sessions = {}
        for window in WINDOWS:
            sized = configure(options, batch, window=window)
            sessions[window] = together.enter_context(opened(stack, sized, Links(dram_to_hbm=link)))
        for case in cases:
            case.search(sessions[case.window], link)
        # In turn, so that a machine whose speed drifts is as slow for all of them.
        for _ in range(ROUNDS):
            for session in sessions.values():
                for case in cases:
                    _measure(session, case, link)
    return {**about(options, stack), "links": [_judged(case) for case in cases]}


def _judged(case: _Case) -> Figures:
    runs = {f"x{window:g}, {one}": run for (window, one), run in case.grid.items()}
    times = {name: run.median_s for name, run in runs.items()}
    best = min(times, key=lambda name: times[name])
    chosen = f"x{case.window:g}, {case.arrangement}"
    found = read_results(case.file)
    print(f"link of {case.bytes_per_s / 1e6:.0f} MB/s: windows pay up to x{case.pays:.3g}")
    rows = [[name, f"{1e3 * value:.1f}", f"{value / times[best]:.3f}",
             "chosen" if name == chosen else "best" if name == best else ""]
            for name, value in sorted(times.items(), key=lambda item: item[1])]  # fmt: skip
    print(table(["setting", "ms a step", "of the best", ""], rows))
    ratio = times[chosen] / times[best]
    verdict = "within" if ratio <= WITHIN else "NOT within"
    print(f"chosen {chosen}: {ratio:.3f} of the best, {best}; {verdict} 5 %")
    return {
        "link_bytes_per_s": case.bytes_per_s,
        "chosen": chosen,
        "window_pays_up_to": case.pays,
        "best": best,
        "chosen_over_best": ratio,
        "windows_measured_in_s": case.window_s,
        "search_in_s": case.search_s,
        "results_kept": len(found),
        "grid_ms": {name: 1e3 * value for name, value in times.items()},
        "mib_per_step": {
            name: run.bytes["dram_to_hbm"] / len(run.step_s) / 2**20 for name, run in runs.items()
        },
        "hit_rate": {name: run.hit_rate for name, run in runs.items()},
    }


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.calibration",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--output", type=Path, default=RESULTS, metavar="DIR")
    made.add_argument("--shape", choices=SHAPES, default="smollm2")
    made.add_argument("--layers", type=int, default=6, metavar="L")
    made.add_argument("--context", type=numbers, default=[16384], metavar="T")
    made.add_argument("--batch", type=numbers, default=[8], metavar="B")
    made.add_argument("--dtype", default="float32", help="of weights and KV")
    made.add_argument("--kv", choices=("real", "random"), default="real")
    made.add_argument("--budget", type=float, default=BUDGET, help="a ratio of the context")
    made.add_argument("--window", type=float, default=2.0, help=argparse.SUPPRESS)
    made.add_argument("--steps", type=int, default=48, metavar="N", help="of a search")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; 0, or 1 where a choice is further than 5 % from the best."""
    options = parser().parse_args(argv)
    start, before = time.perf_counter(), environment(dtype=options.dtype)
    machine = Machine(memory_bandwidth())
    print(machine.line())
    with tempfile.TemporaryDirectory() as scratch:
        options.scratch = scratch
        figures = compare(options, machine)
    result = {
        "environment": before,
        "command": "python -m benchmarks.calibration",
        "machine": machine.to_dict(),
        "context": options.context[0],
        "batch": options.batch[0],
        "windows": list(WINDOWS),
        "seconds": time.perf_counter() - start,
        **figures,
    }
    write_result(options.output / "calibration.json", result)
    ratios = [one["chosen_over_best"] for one in figures["links"]]
    return 0 if max(ratios) <= WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())
