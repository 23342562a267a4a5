"""Spans of time: what ran when, in which lane, for which layer and micro-batch; and their sums.

Recording a span is one append to a list. A step's spans wait until a few thousand are there, are
added up together, and are dropped, unless they are kept for a trace.

Adding up. The device lane says when the device was busy in a step; each other moment of the step is
a stall, and has one cause, the first of ``CAUSES`` that was under way then: reading from SSD before
the transfer to HBM before the gathering on the host, and where none of them was, the engine (what
it dispatches and decides, and waiting for what is no span, such as a miss list on its way). What is
read ahead of need is no cause: nobody waits for it. So busy time and stalls add up to the wall
time of the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

Lane = Literal["device", "engine", "host gather", "DRAM->HBM", "SSD->DRAM"]
Cause = Literal["SSD->DRAM", "DRAM->HBM", "host gather", "engine"]
Work = Literal["select", "fetch", "compute", "other"]
Seconds = npt.NDArray[np.float64]

LANES: tuple[Lane, ...] = get_args(Lane)
CAUSES: tuple[Cause, ...] = get_args(Cause)
READ_AHEAD = "read ahead"
"""Name of the spans of SSD->DRAM that no fetch waits for."""

KEPT_SPANS = 400_000
"""Most spans kept for a trace, some 80 MB of host memory and as many on disk."""
_TOGETHER = 4096
_RANK: dict[Lane, int] = {
    "device": 0,
    "SSD->DRAM": 1,
    "DRAM->HBM": 2,
    "host gather": 3,
    "engine": 4,
}
_NO_CAUSE = 4


class Span(NamedTuple):
    """Seconds of ``time.perf_counter`` from start to end; -1 where a number does not apply."""

    lane: Lane
    name: str
    start: float
    end: float
    layer: int = -1
    micro_batch: int = -1
    cohort: int = -1
    nbytes: int = 0
    hits: int = -1
    misses: int = -1


@dataclass
class SpanSum:
    """Of all spans of one lane and name: seconds (of the device: inside steps), bytes, count."""

    seconds: float = 0.0
    nbytes: int = 0
    count: int = 0


class StepSums:
    """What the spans of decode steps add up to, in seconds.

    wall_s: how long the steps took together; device_s: of that, how long the device was busy;
    stalls: the rest by cause; by_name: of each lane and name; hits, misses: of all spans that tell
    them.
    """

    def __init__(self) -> None:
        self.wall_s = 0.0
        self.device_s = 0.0
        self.stalls: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
        self.by_name: dict[tuple[Lane, str], SpanSum] = {}
        self.hits = 0
        self.misses = 0
        self._numbers = _Numbers()

    def add(self, spans: list[tuple[Any, ...]], steps: list[tuple[int, float, float]]) -> None:
        """Add steps, each (how many of ``spans`` are its own, start, end), in order of time."""
        counts = [count for count, _, _ in steps]
        first = np.array([start for _, start, _ in steps])
        last = np.array([end for _, _, end in steps])
        wall = float((last - first).sum())
        self.wall_s += wall
        covered = np.zeros(_NO_CAUSE)
        if spans:
            lanes, names, starts, ends, _, _, _, nbytes, hits, misses = zip(*spans, strict=True)
            start, end, step_start = np.array(starts), np.array(ends), np.repeat(first, counts)
            key = np.array(list(map(self._numbers.__getitem__, zip(lanes, names, strict=True))))
            rank = np.array(self._numbers.ranks)[key]
            within = end > step_start  # else of prefill, or from between two steps
            from_ = np.maximum(start, step_start)
            until = np.minimum(end, np.repeat(last, counts))
            within &= (until > from_) | (rank != 0)
            seconds = np.where(rank == 0, until - from_, end - start)
            self._count(key, np.where(within, seconds, 0.0), np.array(nbytes), within)
            self.hits += int(np.maximum(np.array(hits)[within], 0).sum())
            self.misses += int(np.maximum(np.array(misses)[within], 0).sum())
            at = np.flatnonzero(within & (until > from_) & (rank < _NO_CAUSE))
            at = at[np.argsort(from_[at], kind="stable")]
            from_, until, rank = from_[at], until[at], rank[at]
            for most in range(_NO_CAUSE):
                chosen = rank <= most
                covered[most] = _union(from_[chosen], until[chosen])
        self.device_s += float(covered[0])
        more = np.diff(covered, append=wall)
        for cause, stall in zip(CAUSES, more.tolist(), strict=True):
            self.stalls[cause] += max(stall, 0.0)  # rounding may leave it a hair below 0

    def _count(
        self,
        key: npt.NDArray[np.integer[Any]],
        seconds: Seconds,
        nbytes: npt.NDArray[np.integer[Any]],
        within: npt.NDArray[np.bool_],
    ) -> None:
        """Add one batch of spans to ``by_name``."""
        names, size = self._numbers.names, len(self._numbers.names)
        took = np.bincount(key, seconds, size).tolist()
        moved = np.bincount(key, np.where(within, nbytes, 0), size).tolist()
        found = np.bincount(key, within, size).tolist()
        for name, more, some, count in zip(names, took, moved, found, strict=True):
            if count:
                total = self.by_name.setdefault(name, SpanSum())
                total.seconds += more
                total.nbytes += int(some)
                total.count += int(count)

    def named(self, lane: Lane, name: str) -> SpanSum:
        """All spans of a lane that have this name."""
        return self.by_name.get((lane, name), SpanSum())

    def lane(self, lane: Lane, *, but: str | None = None) -> SpanSum:
        """All spans of a lane, without those named ``but``."""
        total = SpanSum()
        for (where, name), part in self.by_name.items():
            if where == lane and name != but:
                total.seconds += part.seconds
                total.nbytes += part.nbytes
                total.count += part.count
        return total

    def work_s(self) -> dict[Work, float]:
        """Seconds of work per stage, whether it overlapped or not: select, compute and other are
        the device's; fetch is host gather, reads from SSD in it included, and transfer."""
        named = self.by_name.items()
        device = {name: part.seconds for (lane, name), part in named if lane == "device"}
        select, compute = device.pop("select", 0.0), device.pop("compute", 0.0)
        fetch = self.lane("host gather").seconds + self.lane("DRAM->HBM").seconds
        return {
            "select": select,
            "fetch": fetch,
            "compute": compute,
            "other": sum(device.values()),
        }

    @property
    def overlap(self) -> float | None:
        """Overlap efficiency: seconds of work of all stages / wall time; None without steps."""
        return sum(self.work_s().values()) / self.wall_s if self.wall_s > 0 else None


class _Numbers(dict[tuple[Lane, str], int]):
    """Numbers (lane, name) pairs in the order in which they turn up."""

    def __init__(self) -> None:
        self.names: list[tuple[Lane, str]] = []
        self.ranks: list[int] = []

    def __missing__(self, key: tuple[Lane, str]) -> int:
        lane = key[0]
        if lane not in _RANK:
            raise ValueError(f"lane must be one of {', '.join(LANES)}, got {lane!r}")
        self[key] = len(self.names)
        self.names.append(key)
        ahead = key == ("SSD->DRAM", READ_AHEAD)
        self.ranks.append(_NO_CAUSE if ahead else _RANK[lane])
        return self[key]


def _union(start: Seconds, end: Seconds) -> float:
    """Length of the union of intervals, given by their starts in ascending order."""
    if not len(start):
        return 0.0
    reached = np.maximum.accumulate(end)
    open_from = np.maximum(start[1:], reached[:-1])
    return float(end[0] - start[0] + np.maximum(end[1:] - open_from, 0.0).sum())


class Timeline:
    """Collects spans of one call; any thread may add, the engine's thread does all else.

    keep: how many spans to keep for a trace; what comes after them is counted in ``dropped``.
    on_step: is told start and end of each step. What is not like the steps that follow (the first
    may compile) is added up apart, in ``warm_up``.
    """

    def __init__(
        self, keep: int = 0, *, on_step: Callable[[float, float], None] | None = None
    ) -> None:
        self.keep, self.on_step = keep, on_step
        self.warm_up = StepSums()
        self.kept: list[tuple[Any, ...]] = []
        self.steps: list[tuple[float, float]] = []
        self.dropped = 0
        self._spans: list[tuple[Any, ...]] = []
        self._append = self._spans.append
        self._taken = 0
        self._open: list[tuple[int, float, float]] = []
        self._warms_up = True
        self._warm_up_steps = self._steps = 0
        self._sums = StepSums()

    def span(
        self,
        lane: Lane,
        name: str,
        start: float,
        end: float,
        layer: int = -1,
        micro_batch: int = -1,
        cohort: int = -1,
        nbytes: int = 0,
        hits: int = -1,
        misses: int = -1,
    ) -> None:
        """Add one span."""
        # A plain tuple: a Span takes several times as long to make.
        self._append((lane, name, start, end, layer, micro_batch, cohort, nbytes, hits, misses))

    def end_step(self, start: float, end: float, steps: int = 1, *, warm_up: bool = False) -> None:
        """A decode step from ``start`` to ``end`` is over, or ``steps`` that ran as one; warm_up:
        steady steps are not like it."""
        if warm_up != self._warms_up:
            self._fold()
            self._warms_up = warm_up
        count = len(self._spans) - self._taken
        self._taken += count
        self._open.append((count, start, end))
        if self.keep:
            self.steps.append((start, end))
        if self.on_step is not None:
            self.on_step(start, end)
        if warm_up:
            self._warm_up_steps += steps
        else:
            self._steps += steps
        if self._taken >= _TOGETHER or len(self._open) >= _TOGETHER:
            self._fold()

    def sums(self) -> StepSums:
        """Of all steps that have ended, without those of the warm-up."""
        self._fold()
        return self._sums

    def totals(self) -> dict[str, Any]:
        """The same as plain values: ``timeline`` of the statistics."""
        sums = self.sums()
        lanes: dict[str, SpanSum] = {lane: sums.lane(lane, but=READ_AHEAD) for lane in LANES}
        lanes[READ_AHEAD] = sums.named("SSD->DRAM", READ_AHEAD)
        return {
            "warm_up_steps": self._warm_up_steps,
            "warm_up_s": self.warm_up.wall_s,
            "steps": self._steps,
            "wall_s": sums.wall_s,
            "device_busy_s": sums.device_s,
            "stall_s": dict(sums.stalls),
            "work_s": dict(sums.work_s()),
            "overlap_efficiency": sums.overlap,
            "lanes": {
                name: {"seconds": lane.seconds, "bytes": lane.nbytes, "spans": lane.count}
                for name, lane in lanes.items()
            },
            "hits": sums.hits,
            "misses": sums.misses,
        }

    def spans(self) -> list[Span]:
        """Those kept for a trace, and those that came since the last step."""
        self._fold()
        rest = self._spans[: max(0, self.keep - len(self.kept))]
        return [*map(Span._make, self.kept), *map(Span._make, rest)]

    def _fold(self) -> None:
        """Add up the steps that have ended, all of one kind, and forget them."""
        spans, steps = self._spans[: self._taken], self._open
        del self._spans[: self._taken]  # workers may be adding to its end
        self._taken, self._open = 0, []
        if self.keep:
            room = self.keep - len(self.kept)
            self.kept += spans[:room]
            self.dropped += len(spans[room:])
        if steps:
            (self.warm_up if self._warms_up else self._sums).add(spans, steps)
