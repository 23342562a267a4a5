"""What this CPU takes for the stages of a layer stack, measured at a few sizes; and for attention.

A probe runs short stacks of sizes of their own, with a link that takes as long as select and
compute (with one that holds nothing up, caches stay warm and threads awake), and reads off the
device's lane how long select and compute took for micro-batches and cohorts of several sizes.
`Fitted` is what comes in between: straight lines by rows, and for each row by chunks ranked and
selected.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import nnls

from benchmarks.pipeline_cases import FREE
from benchmarks.stack import Session, Stack
from benchmarks.stack_run import StackRun
from kvdrive_jax.config import KVDriveConfig, RetrievalConfig, TierConfig, WindowConfig
from kvdrive_jax.models.model import Model
from kvdrive_jax.pallas.attention import attend_rows
from kvdrive_jax.pipeline.parts import Arrangement
from kvdrive_jax.plan.hardware import Hardware
from kvdrive_jax.plan.probe import seconds, this_cpu
from kvdrive_jax.telemetry import host_memory_bytes
from kvdrive_jax.tiers.link import Link, Links

Array = np.ndarray[Any, Any]
PROBED_ROWS = {
    8: (Arrangement(8), Arrangement(4, 2)),
    2: (Arrangement(2), Arrangement(1, 2)),
    1: (Arrangement(1),),
}
"""Batches, and how they are cut: stages of 8, 4, 2 and 1 sessions."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of a stack: tokens of each session, budget as a share of them, window."""

    context: int
    budget: float = 1 / 64
    window: float = 2.0


PROBED = (Size(context=4000), Size(context=10000), Size(context=4000, budget=1 / 16))


def configuration(size: Size, batch: int, **pipeline: Any) -> KVDriveConfig:
    """Of a stack of this size; one memory is both tiers."""
    memory = host_memory_bytes()
    return KVDriveConfig(
        dtype="float32",
        batch_size=batch,
        retrieval=RetrievalConfig(budget=size.budget),
        window=WindowConfig(multiple=size.window),
        tiers=TierConfig(hbm_budget=memory, dram_budget=memory),
        **pipeline,
    )


@dataclass(frozen=True, kw_only=True)
class Point:
    """Seconds of a call: rows, chunks ranked (N) and selected (P) of each kv head."""

    rows: int
    chunks: int
    selected: int
    seconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Line:
    """Seconds by rows, straight between those probed and on beyond the last; for each row so much
    more for each chunk ranked and selected."""

    rows: tuple[int, ...]
    base: tuple[float, ...]
    per_chunk: float
    per_selected: float

    def __call__(self, rows: int, chunks: int, selected: int) -> float:
        """Seconds of a call."""
        at, base = np.array(self.rows, float), np.array(self.base)
        value = float(np.interp(rows, at, base))
        if rows > at[-1]:
            value += (rows - at[-1]) * (base[-1] - base[-2]) / (at[-1] - at[-2])
        return value + rows * (self.per_chunk * chunks + self.per_selected * selected)

    @classmethod
    def through(cls, points: Sequence[Point], *, by_chunks: bool) -> Line:
        """Least squares of relative errors; nothing takes less for more rows or chunks."""
        rows = tuple(sorted({point.rows for point in points}))
        table = np.zeros((len(points), len(rows) + 2))
        for line, point in zip(table, points, strict=True):
            line[: rows.index(point.rows) + 1] = 1  # what each size takes more than the one before
            line[len(rows) :] = point.rows * point.chunks * by_chunks, point.rows * point.selected
        values = np.array([point.seconds for point in points])
        found = nnls(table / values[:, None], np.ones(len(values)))[0]
        return cls(
            rows=rows,
            base=tuple(np.cumsum(found[: len(rows)]).tolist()),
            per_chunk=float(found[-2]),
            per_selected=float(found[-1]),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """What was measured: stages by size, and the host.

    select, compute: of one call; begin, end: of the engine's thread and the device before the first
    select and after the last compute, by rows; hardware: this CPU, gather and dispatch as the
    stacks showed them; points: what the lines go through.
    """

    select: Line
    compute: Line
    begin: Line
    end: Line
    hardware: Hardware
    points: dict[str, list[Point]]
    seconds: float


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))


def _calls(run: StackRun, name: str) -> float:
    """Median seconds of one call of a stage, over layers, parts and steps. Not of the last layer,
    whose end is noticed only when the step has ended, if there are others."""
    spans = [
        span
        for step in run.spans
        for span in step.spans
        if span.lane == "device" and span.name == name
    ]
    last = max(span.layer for span in spans)
    return _median([s.end - s.start for s in spans if s.layer < last or last == 0])


def _ends(run: StackRun, compute: float) -> tuple[float, float]:
    """Median seconds before the first device span, and after compute of the last layer, which takes
    ``compute``."""
    begins, ends = [], []
    for step in run.spans:
        layers = [s for s in step.spans if s.lane == "device" and s.layer >= 0]
        begins.append(min(s.start for s in layers) - step.start)
        ends.append(step.end - max(s.start for s in layers) - compute)
    return max(0.0, _median(begins)), max(0.0, _median(ends))


def probe(
    shape: str, layers: int, steps: int, *, model: Model | None = None,
    sizes: Sequence[Size] = PROBED,
) -> tuple[Probe, Model]:  # fmt: skip
    """Measure stacks of these sizes; the weights that were used, to go on with."""
    start = time.perf_counter()
    found: dict[str, list[Point]] = {name: [] for name in ("select", "compute", "begin", "end")}
    gathers: list[tuple[float, float]] = []
    handing: list[float] = []
    lists: list[float] = []
    for size, batch in itertools.product(sizes, PROBED_ROWS):
        stack = Stack(shape, layers, [size.context] * batch, steps=steps, model=model)
        model = stack.weights
        config = configuration(size, batch)
        planned = stack.plan(config).shape
        link = Link(FREE)
        with stack.open(config, Links(dram_to_hbm=link)) as session:
            free = session.run()
            stages, moved = free.stage_s(), free.bytes["dram_to_hbm"] / len(free.step_s)
            link.bytes_per_s = max(1.0, moved) / (stages["select"] + stages["compute"])
            for arrangement in PROBED_ROWS[batch]:
                run = _arranged(session, arrangement)
                rows = arrangement.micro_batch
                taken = {"select": _calls(run, "select"), "compute": _calls(run, "compute")}
                if rows == batch:
                    taken["begin"], taken["end"] = _ends(run, taken["compute"])
                    lists.append(_between(run))
                for name, value in taken.items():
                    found[name].append(
                        Point(
                            rows=rows,
                            chunks=planned.chunk_capacity,
                            selected=planned.selected,
                            seconds=value,
                        )
                    )
                spans = [span for step in run.spans for span in step.spans]
                gathers += [
                    (span.nbytes, span.end - span.start)
                    for span in spans
                    if span.lane == "host gather"
                ]
                handing += [
                    span.end - span.start
                    for span in spans
                    if span.lane == "engine" and span.name.startswith("dispatch")
                ]
        print(f"probed {batch} sessions of {size.context:,} tokens", flush=True)
    nbytes, took = (np.array(column) for column in zip(*gathers, strict=True))
    weighed = np.stack([nbytes / took, 1 / took], axis=1)
    per_byte, fixed = nnls(weighed, np.ones(len(took)))[0]
    # Means where the rare long one counts: what is handed over is added up.
    dispatch = float(np.mean(handing))
    cpu = this_cpu()
    hardware = Hardware(
        **{
            **vars(cpu),
            "gather": 1 / max(float(per_byte), 1e-12),
            "gather_latency": float(fixed),
            "dispatch": dispatch,
            "miss_list": float(np.mean(lists)),
            "pcie_latency": oversleep(),
        }
    )
    lines = {
        "select": Line.through(found["select"], by_chunks=True),
        "compute": Line.through(found["compute"], by_chunks=False),
        "begin": Line.through(found["begin"], by_chunks=False),
        "end": Line.through(found["end"], by_chunks=False),
    }
    return (
        Probe(
            **lines,
            hardware=hardware,
            points=found,
            seconds=time.perf_counter() - start,
        ),
        model,
    )  # fmt: skip


def _arranged(session: Session, arrangement: Arrangement) -> StackRun:
    session.arrange(arrangement.micro_batch, arrangement.cohorts)
    return session.run()


def _between(run: StackRun) -> float:
    """Mean seconds between the end of a select and the start of its gather, with one
    micro-batch: until the miss list is seen."""
    waits: list[float] = []
    for step in run.spans:
        gathered = {s.layer: s.start for s in step.spans if s.lane == "host gather"}
        waits += [
            max(0.0, gathered[span.layer] - span.end)
            for span in step.spans
            if span.lane == "device" and span.name == "select" and span.layer in gathered
        ]
    return float(np.mean(waits)) if waits else 0.0


def oversleep() -> float:
    """Seconds by which a thread sleeps longer than it asked for."""
    late = []
    for _ in range(50):
        start = time.perf_counter()
        time.sleep(2e-3)
        late.append(time.perf_counter() - start - 2e-3)
    return _median(late)


def attention_points(tokens: int = 32768) -> list[dict[str, Any]]:
    """Decode attention of this CPU over keys and values that no cache holds, for groups of query
    heads: operations and bytes per second, checked against NumPy."""
    kv_heads, dim = 8, 128
    draw = np.random.default_rng(0)
    k, v = (
        jnp.asarray(draw.standard_normal((1, kv_heads, tokens, dim), np.float32)) for _ in range(2)
    )
    length = jnp.array([tokens], jnp.int32)
    attended: Callable[..., Any] = jax.jit(lambda q, k, v, n: attend_rows(q, k, v, n))
    points = []
    for group in (1, 4, 8, 16):
        q = jnp.asarray(draw.standard_normal((1, kv_heads * group, dim), np.float32))
        part = attended(q, k, v, length)
        _check(part, q, k, v, group)
        taken = seconds(lambda q=q: jax.block_until_ready(attended(q, k, v, length)))
        nbytes, operations = k.nbytes + v.nbytes, 4.0 * q.size * tokens
        points.append(
            {
                "name": f"{group} query heads for one kv head, float32",
                "tokens": tokens,
                "intensity": operations / nbytes,
                "operations_per_s": operations / taken,
                "bytes_per_s": nbytes / taken,
                "seconds": taken,
            }
        )
    return points


def _check(part: Any, q: jax.Array, k: jax.Array, v: jax.Array, group: int) -> None:
    head = np.asarray(q[0, group - 1], np.float64)
    keys, values = np.asarray(k[0, 0], np.float64), np.asarray(v[0, 0], np.float64)
    logits = keys @ head * len(head) ** -0.5
    weights = np.exp(logits - logits.max())
    wanted = weights @ values / weights.sum()
    made = np.asarray(part.o[0, group - 1]) / float(part.l[0, group - 1])
    if not np.allclose(made, wanted, atol=1e-4):
        raise RuntimeError(f"attention is off by {np.abs(made - wanted).max():g}")
