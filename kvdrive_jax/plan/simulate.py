"""One decode step played through on paper: when select, fetch and compute run, and what waits.

A discrete-event simulation with the pipeline's own rules (paper section 6.1). What runs where: the
*device* executes what is dispatched, in that order, one at a time; the *engine*'s thread
dispatches; *workers* of the host gather missing pages, reading what DRAM lacks through the SSD's
link; the DRAM->HBM link carries one transfer at a time. Select of a layer is dispatched once
compute of the layer before is; a fetch begins when its miss list has arrived; compute of a cohort
is dispatched when all of its micro-batches are written.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import NamedTuple, get_args

from kvdrive_jax.config import ScheduleName
from kvdrive_jax.timeline import Lane, Span

LANES: tuple[Lane, ...] = get_args(Lane)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Seconds of select and fetch of one micro-batch in one layer.

    select, write: on the device; miss_list: until the host has the ids; ssd: of the link from SSD;
    ssd_latency: after it; gather: of one worker; transfer: of the link to HBM. Nothing of these is
    fetched where ssd, gather and transfer are 0. direct: of a fetch by the device itself, which
    needs neither list nor host.
    """

    select: float
    miss_list: float = 0.0
    ssd: float = 0.0
    ssd_latency: float = 0.0
    gather: float = 0.0
    transfer: float = 0.0
    write: float = 0.0
    direct: float = 0.0

    def __post_init__(self) -> None:
        for name in (one.name for one in fields(self)):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0 seconds, got {getattr(self, name)!r}")

    @property
    def fetches(self) -> bool:
        """Whether anything is missing."""
        return self.ssd + self.gather + self.transfer > 0

    @property
    def fetch(self) -> float:
        """From the miss list to the last byte in HBM, when nothing else is fetched."""
        if not self.fetches:
            return 0.0
        from_ssd = self.ssd + self.ssd_latency if self.ssd else 0.0
        return from_ssd + self.gather + self.transfer


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """One cohort in one layer: its micro-batches, and seconds of its compute."""

    micro_batches: tuple[MicroBatch, ...]
    compute: float

    def __post_init__(self) -> None:
        if not self.micro_batches:
            raise ValueError("micro_batches of a cohort must be at least one, got none")
        if not self.compute >= 0:
            raise ValueError(f"compute must be at least 0 seconds, got {self.compute!r}")


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Everything in a decode step, in seconds.

    layers: the cohorts of each, as many in all; first, last: on the device, before and after them;
    dispatch: of the engine's thread, for each function; workers: of the host.
    """

    layers: tuple[tuple[Cohort, ...], ...]
    first: float = 0.0
    last: float = 0.0
    dispatch: float = 0.0
    workers: int = 2

    def __post_init__(self) -> None:
        forms = {tuple(len(cohort.micro_batches) for cohort in layer) for layer in self.layers}
        if len(forms) != 1 or not all(self.layers):
            raise ValueError(
                "layers must be at least one, all of the same cohorts and micro-batches, got "
                f"{sorted(forms)}"
            )
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")
        for name in ("first", "last", "dispatch"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0 seconds, got {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What came of a step, in seconds.

    Attributes:
        wall: from the first dispatch to the end of the last function on the device.
        busy: of each lane; of the host's workers the sum.
        stages: select, fetch (link and workers) and compute, summed.
        stalls: what the idle device waited for, by lane or ``miss list``; their sum is wall less
            what the device was busy.
        critical_path: the longest chain of what depends on each other, if nothing else ran.
        bound: the least that any order could take: the critical path, or the busiest lane.
        spans: what ran when, from 0.
    """

    wall: float
    busy: dict[Lane, float]
    stages: dict[str, float]
    stalls: dict[str, float]
    critical_path: float
    bound: float
    spans: tuple[Span, ...]

    @property
    def overlap(self) -> float:
        """Sum of the stages over the wall time."""
        return sum(self.stages.values()) / self.wall if self.wall else 1.0


class _Wait(NamedTuple):
    cause: str
    start: float
    end: float


class _Clock:
    """Time, and what happens next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._coming, (self.now + seconds, next(self._order), then))

    def run(self) -> None:
        while self._coming:
            self.now, _, then = heapq.heappop(self._coming)
            then()


@dataclass
class _Lane:
    """First come, first served by so many servers."""

    clock: _Clock
    servers: int = 1
    busy: float = 0.0
    _queue: deque[Callable[[], None]] = field(default_factory=deque)

    def take(self, then: Callable[[], None]) -> None:
        """``then`` when a server is free; it must ``leave`` it."""
        if self.servers:
            self.servers -= 1
            then()
        else:
            self._queue.append(then)

    def leave(self) -> None:
        if self._queue:
            self._queue.popleft()()
        else:
            self.servers += 1

    def work(self, seconds: float, then: Callable[[float], None]) -> None:
        """``then(start)`` after so many seconds of a server."""

        def begin() -> None:
            start = self.clock.now
            self.busy += seconds
            self.clock.after(seconds, lambda: end(start))

        def end(start: float) -> None:
            then(start)
            self.leave()

        self.take(begin)


def simulate(times: StepTimes, schedule: ScheduleName = "overlapped") -> Simulation:
    """Play one step through.

    ``sequential`` is ``overlapped`` with one micro-batch and one cohort. ``speculative`` selects
    for layer l + 1 from the input of layer l, as soon as that is dispatched.

    Raises ValueError for an unknown schedule, or for ``sequential`` with more than one micro-batch.
    """
    if schedule not in get_args(ScheduleName):
        expected = ", ".join(get_args(ScheduleName))
        raise ValueError(f"schedule must be one of {expected}, got {schedule!r}")
    if schedule == "sequential" and sum(len(c.micro_batches) for c in times.layers[0]) > 1:
        raise ValueError("layers must be of one micro-batch and one cohort with sequential")
    return _Run(times, speculative=schedule == "speculative").result()


class _Run:
    def __init__(self, times: StepTimes, *, speculative: bool) -> None:
        self.times, self.speculative = times, speculative
        self.clock = _Clock()
        self.lanes = {
            lane: _Lane(self.clock, times.workers if lane == "host gather" else 1) for lane in LANES
        }
        self.spans: list[Span] = []
        self.stalls: dict[str, float] = {}
        self.device_free = 0.0
        self.fetching = 0.0
        self.left = [[len(c.micro_batches) for c in layer] for layer in times.layers]
        self.cohorts_left = len(times.layers[0])
        self.next = [0] * self.cohorts_left

    def result(self) -> Simulation:
        self.dispatch("embed", self.times.first, (), self.begin)
        self.clock.run()
        busy = {lane: self.lanes[lane].busy for lane in LANES}
        chain = critical_path(self.times, speculative=self.speculative)
        layers = [cohort for layer in self.times.layers for cohort in layer]
        parts = [part for cohort in layers for part in cohort.micro_batches]
        select = sum(part.select for part in parts)
        direct = sum(part.direct for part in parts)
        return Simulation(
            wall=self.device_free,
            busy=busy,
            stages={
                "select": select,
                "fetch": self.fetching,
                "compute": busy["device"] - select - direct,
            },
            stalls=self.stalls,
            critical_path=chain,
            bound=max(chain, *(busy[lane] / self._servers(lane) for lane in LANES)),
            spans=tuple(self.spans),
        )

    def _servers(self, lane: Lane) -> int:
        return self.times.workers if lane == "host gather" else 1

    def span(self, lane: Lane, name: str, start: float, at: tuple[int, ...] = ()) -> None:
        if self.clock.now > start:
            layer, cohort, part = (*at, -1, -1, -1)[:3]
            self.spans.append(
                Span(lane, name, start, self.clock.now, layer, micro_batch=part, cohort=cohort)
            )

    def dispatch(
        self,
        name: str,
        seconds: float,
        waited: Sequence[_Wait],
        dispatched: Callable[[], None] | None = None,
        done: Callable[[], None] | None = None,
        at: tuple[int, ...] = (),
    ) -> None:
        """Hand a function to the device, which takes so many seconds of it."""

        def handed_over(start: float) -> None:
            self.span("engine", name, start, at)
            self.lanes["device"].work(seconds, ran)
            if dispatched is not None:
                dispatched()

        def ran(start: float) -> None:
            self.span("device", name, start, at)
            self.idle(start, waited)
            self.device_free = self.clock.now
            if done is not None:
                done()

        self.lanes["engine"].work(self.times.dispatch, handed_over)

    def idle(self, until: float, waited: Sequence[_Wait]) -> None:
        """What the device waited for before ``until``; what nothing explains, the engine took."""
        gap = until - self.device_free
        for wait in waited:
            shared = min(wait.end, until) - max(wait.start, self.device_free)
            if shared > 0:
                self.stalls[wait.cause] = self.stalls.get(wait.cause, 0.0) + shared
                gap -= shared
        if gap > 1e-12:
            self.stalls["engine"] = self.stalls.get("engine", 0.0) + gap

    def begin(self) -> None:
        for cohort in range(self.cohorts_left):
            self.select(0, cohort)
            if self.speculative:
                self.select(1, cohort)

    def select(self, layer: int, cohort: int) -> None:
        if layer == len(self.times.layers):
            return
        for part, micro in enumerate(self.times.layers[layer][cohort].micro_batches):
            at = (layer, cohort, part)
            if micro.direct:
                self.dispatch("select", micro.select, (), at=at)
                self.fetching += micro.direct
                self.dispatch("fetch", micro.direct, (), partial(self.ready, at, ()), at=at)
            else:
                done = partial(self.selected, at, micro)
                self.dispatch("select", micro.select, (), done=done, at=at)

    def selected(self, at: tuple[int, int, int], micro: MicroBatch) -> None:
        self.clock.after(micro.miss_list, partial(self.fetch, at, micro, self.clock.now))

    def fetch(self, at: tuple[int, int, int], micro: MicroBatch, ended: float) -> None:
        """The miss list has arrived; a worker, the links and the device do the rest."""
        waits = [_Wait("miss list", ended, self.clock.now)]
        if not micro.fetches:
            self.ready(at, waits)
            return
        arrived = self.clock.now

        def begin() -> None:
            if micro.ssd:
                self.lanes["SSD->DRAM"].work(micro.ssd, read)
            else:
                gather()

        def read(start: float) -> None:
            self.span("SSD->DRAM", "read", start, at)
            self.clock.after(micro.ssd_latency, gather)

        def gather() -> None:
            if micro.ssd:
                waits.append(_Wait("SSD->DRAM", arrived, self.clock.now))
            start = self.clock.now
            self.clock.after(micro.gather, lambda: gathered(start))

        def gathered(start: float) -> None:
            lane = self.lanes["host gather"]
            lane.busy += micro.gather
            self.span("host gather", "gather", start, at)
            waits.append(_Wait("host gather", waits[-1].end, self.clock.now))
            lane.leave()
            self.lanes["DRAM->HBM"].work(micro.transfer, transferred)

        def transferred(start: float) -> None:
            self.span("DRAM->HBM", "transfer", start, at)
            waits.append(_Wait("DRAM->HBM", waits[-1].end, self.clock.now))
            self.fetching += micro.fetch
            self.dispatch("write", micro.write, waits, lambda: self.ready(at, waits), at=at)

        self.lanes["host gather"].take(begin)

    def ready(self, at: tuple[int, int, int], waits: Sequence[_Wait]) -> None:
        """One micro-batch has all its pages; with the last one, the cohort computes."""
        layer, cohort, _ = at
        self.left[layer][cohort] -= 1
        if layer == self.next[cohort]:
            self.compute(cohort, waits)

    def compute(self, cohort: int, waits: Sequence[_Wait]) -> None:
        layer = self.next[cohort]
        # The last may have been handed over while the one before was being dispatched.
        if layer == len(self.times.layers) or self.left[layer][cohort]:
            return
        self.next[cohort] += 1

        def dispatched() -> None:
            if layer + 1 == len(self.times.layers):
                self.finish()
            elif self.speculative:
                self.select(layer + 2, cohort)
                self.compute(cohort, ())
            else:
                self.select(layer + 1, cohort)

        seconds = self.times.layers[layer][cohort].compute
        self.dispatch("compute", seconds, waits, dispatched, at=(layer, cohort))

    def finish(self) -> None:
        self.cohorts_left -= 1
        if not self.cohorts_left:
            self.dispatch("logits", self.times.last, ())


def critical_path(times: StepTimes, *, speculative: bool = False) -> float:
    """The longest chain of what must follow each other in a step, in seconds."""
    longest = 0.0
    for cohort in range(len(times.layers[0])):
        computed = before = times.dispatch + times.first
        for layer in times.layers:
            # Speculative: from the input of the layer before.
            start = before if speculative else computed
            written = max(start + _chain(part, times) for part in layer[cohort].micro_batches)
            before, computed = computed, max(written, computed) + layer[cohort].compute
        longest = max(longest, computed)
    return longest + times.last


def _chain(part: MicroBatch, times: StepTimes) -> float:
    """From the start of select until compute can start: the engine dispatches after the fetch."""
    if part.direct:
        return part.select + part.direct
    return part.select + part.miss_list + part.fetch + times.dispatch + part.write
