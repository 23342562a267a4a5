"""How well steps are predicted on this CPU, with links of set speed, for `time_model`.

First the machine is probed: stacks of sizes that are not validated (`time_probe`). Then other
stacks run in every arrangement, with links that make fetches as long as select and compute, half
and twice that. A prediction knows the probe, the link, the chunks that were missed (counted) and
what is to be done; the pipeline's rules do the rest (`plan.simulate`).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.common import MIB, model_shape, table
from benchmarks.stack import Session, Stack
from benchmarks.stack_run import StackRun, same_outputs
from benchmarks.time_probe import Probe, Size, configuration, probe
from kvdrive_jax.config import PipelineConfig, ScheduleName
from kvdrive_jax.pipeline.parts import Arrangement
from kvdrive_jax.plan.costs import Missing, step_times
from kvdrive_jax.plan.simulate import Simulation, simulate
from kvdrive_jax.tiers.link import Link, Links

GOAL = 0.15


@dataclass(frozen=True, kw_only=True)
class Group:
    """Settings that share a stack: arrangements, each with links that make the fetches of a
    sequential step so many times as long as its select and compute."""

    size: Size
    batch: int
    arrangements: tuple[tuple[Arrangement, tuple[float, ...]], ...]
    schedule: ScheduleName = "overlapped"


def _each(*arrangements: tuple[int, int], links: tuple[float, ...] = (1.0,)) -> Any:
    return tuple((Arrangement(*one), links) for one in arrangements)


GROUPS = (
    Group(
        size=Size(context=6000),
        batch=8,
        arrangements=(
            *_each((8, 1), (2, 1), (4, 2), links=(0.5, 1.0, 2.0)),
            *_each((4, 1), (1, 1), (2, 2), (1, 2)),
        ),
    ),
    Group(
        size=Size(context=8000, window=1.0),
        batch=4,
        arrangements=_each((4, 1), (2, 1), (1, 1), (2, 2), (1, 2)),
    ),
    Group(
        size=Size(context=6000, budget=1 / 32),
        batch=4,
        arrangements=_each((4, 1), (2, 1), (2, 2)),
    ),
    Group(size=Size(context=8000), batch=1, arrangements=_each((1, 1), links=(0.5, 1.0))),
    Group(
        size=Size(context=6000, window=0.0),
        batch=3,
        arrangements=_each((3, 1), (1, 1), (2, 2)),
    ),
    Group(
        size=Size(context=6000),
        batch=4,
        arrangements=_each((4, 1), (2, 1)),
        schedule="speculative",
    ),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class ProbedCosts:
    """`StageCosts` of a probe, for stacks of so many chunks, selected and in all. Pages are written
    within compute, as the probe saw it."""

    probe: Probe
    chunks: int
    selected: int

    def select(self, rows: int) -> float:
        """See `StageCosts`."""
        return self.probe.select(rows, self.chunks, self.selected)

    def write(self, pages: float) -> float:
        """Nothing: see above."""
        return 0.0

    def compute(self, rows: int) -> float:
        """See `StageCosts`."""
        return self.probe.compute(rows, self.chunks, self.selected)

    def ends(self, rows: int) -> tuple[float, float]:
        """See `StageCosts`."""
        first = self.probe.begin(rows, self.chunks, self.selected)
        last = self.probe.end(rows, self.chunks, self.selected)
        return max(0.0, first - 2 * self.probe.hardware.dispatch), last


class Predictor:
    """Steps of the stacks of one group."""

    def __init__(self, probed: Probe, stack: Stack, group: Group) -> None:
        shape = stack.plan(config_of(group)).shape
        config = stack.weights.config
        self._probe, self._group, self._layers = probed, group, config.num_layers
        self.page_bytes = 2 * 4 * config.head_dim * stack.weights.dtype.itemsize
        self.costs = ProbedCosts(probe=probed, chunks=shape.chunk_capacity, selected=shape.selected)
        self.most = shape.selected * config.num_kv_heads

    @property
    def device_s(self) -> float:
        """Select and compute of a sequential step."""
        batch = self._group.batch
        return self._layers * (self.costs.select(batch) + self.costs.compute(batch))

    def step(self, arrangement: Arrangement, link: float, missed: float) -> Simulation:
        """A step that misses ``missed`` pages in all, behind a link of so many bytes/s."""
        batch = self._group.batch
        each = missed / self._layers / batch
        missing = Missing(pages=(each,) * self._layers, page_bytes=self.page_bytes)
        hardware = replace(self._probe.hardware, pcie=link)
        times = step_times(self.costs, hardware, missing, batch, arrangement)
        return simulate(times, self._group.schedule)


def config_of(group: Group) -> Any:
    """Of its stack."""
    return configuration(group.size, group.batch, pipeline=PipelineConfig(schedule=group.schedule))


def missed_per_step(run: StackRun) -> float:
    """Pages of all sessions and layers."""
    return sum(run.missed) / len(run.step_s)


def run_group(
    session: Session, predictor: Predictor, group: Group, link: Link, repeats: int
) -> list[dict[str, Any]]:
    """Every setting of a group: as predicted, and as it went."""
    link.bytes_per_s = 1e15
    moved = missed_per_step(session.run()) * predictor.page_bytes
    rows, runs = [], {}
    for arrangement, factors in group.arrangements:
        session.arrange(arrangement.micro_batch, arrangement.cohorts)
        for factor in factors:
            link.bytes_per_s = moved / (factor * predictor.device_s)
            session.run(4)
            tried = [session.run() for _ in range(repeats)]
            run = min(tried, key=lambda one: one.median_s)
            runs[f"{arrangement}, {factor}"] = run
            if not run.bytes["dram_to_hbm"]:
                raise RuntimeError(f"{arrangement} moved nothing")
            found = predictor.step(arrangement, link.bytes_per_s, missed_per_step(run))
            measured = {name: 1e3 * value for name, value in run.stage_s().items()}
            rows.append(
                {
                    "context": group.size.context,
                    "batch": group.batch,
                    "budget": group.size.budget,
                    "window": group.size.window,
                    "schedule": "sequential"
                    if arrangement == Arrangement(group.batch) and group.schedule == "overlapped"
                    else group.schedule,
                    "micro_batch": arrangement.micro_batch,
                    "cohorts": arrangement.cohorts,
                    "link_bytes_per_s": link.bytes_per_s,
                    "mib_per_step": run.bytes["dram_to_hbm"] / len(run.step_s) / MIB,
                    "predicted_ms": 1e3 * found.wall,
                    "measured_ms": 1e3 * run.median_s,
                    "error": found.wall / run.median_s - 1,
                    "bound_ms": 1e3 * found.bound,
                    "predicted_stages_ms": {n: 1e3 * v for n, v in found.stages.items()},
                    "measured_stages_ms": measured,
                    "all_medians_ms": [1e3 * one.median_s for one in tried],
                }
            )
            print(_line(rows[-1]), flush=True)
    if group.schedule != "speculative":
        same_or_close(runs)
    return rows


def same_or_close(runs: dict[str, StackRun]) -> None:
    """Every arrangement must compute the same: bit for bit, or where a product of one row is
    another program than one of several, as close as float32 is."""
    first = next(iter(runs.values()))
    try:
        same_outputs(runs)
    except RuntimeError:
        for name, run in runs.items():
            if not np.allclose(run.logits, first.logits, atol=1e-3):
                raise RuntimeError(f"{name} computed something else") from None


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['context']:>6} x {row['batch']}  {row['schedule']:11} micro-batch "
        f"{row['micro_batch']} cohorts {row['cohorts']}  link {row['link_bytes_per_s'] / 1e6:7.1f} "
        f"MB/s  predicted {row['predicted_ms']:8.1f} ms  measured {row['measured_ms']:8.1f} ms  "
        f"{100 * row['error']:+.1f} %"
    )


def validate(options: argparse.Namespace) -> dict[str, Any]:
    """Probe, then predict and run every setting."""
    probed, model = probe(options.shape, options.layers, options.steps)
    cpu = probed.hardware
    print(
        f"probed in {probed.seconds:.0f} s: dispatch {1e6 * cpu.dispatch:.0f} us, gather "
        f"{cpu.gather / 1e9:.1f} GB/s + {1e6 * cpu.gather_latency:.0f} us, miss list "
        f"{1e6 * cpu.miss_list:.0f} us, sleep late by {1e6 * cpu.pcie_latency:.0f} us",
        flush=True,
    )
    rows: list[dict[str, Any]] = []
    for group in GROUPS[: options.only]:
        stack = Stack(
            options.shape,
            options.layers,
            [group.size.context] * group.batch,
            steps=options.steps,
            model=model,
        )
        link = Link(1e15)
        predictor = Predictor(probed, stack, group)
        with stack.open(config_of(group), Links(dram_to_hbm=link)) as session:
            rows += run_group(session, predictor, group, link, options.repeats)
    errors = np.array([abs(row["error"]) for row in rows])
    within = int((errors <= GOAL).sum())
    print(
        table(
            ("settings", "mean error", "largest", f"within {GOAL:.0%}"),
            [(str(len(rows)), f"{errors.mean():.1%}", f"{errors.max():.1%}", str(within))],
        )
    )
    points = {name: [vars(point) for point in of] for name, of in probed.points.items()}
    return {
        "shape": {"name": options.shape, **model_shape(model.config)},
        "kv": "of real heads, see benchmarks/stack_kv.py",
        "probe": {
            "seconds": probed.seconds,
            "points": points,
            "hardware": vars(cpu),
        },
        "settings": len(rows),
        "mean_error": float(errors.mean()),
        "largest_error": float(errors.max()),
        "within_goal": within,
        "rows": rows,
    }
