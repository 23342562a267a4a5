"""The model of time: the simulated step, by hand and by property; predictions; the command."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrive_jax.plan.hardware import HARDWARE, Hardware, hardware, sustained
from kvdrive_jax.plan.simulate import Cohort, MicroBatch, StepTimes, simulate

PART = MicroBatch(select=2.0, miss_list=0.5, gather=1.0, transfer=3.25, write=0.5)  # fetch: 4.25
BATCH = Cohort(micro_batches=(PART,), compute=4.0)


def times(*cohorts: Cohort, layers: int = 3, **more: Any) -> StepTimes:
    return StepTimes(layers=(cohorts,) * layers, **more)


def test_sequential_is_the_sum() -> None:
    found = simulate(times(BATCH, first=1.0, last=2.0), "sequential")
    assert found.wall == pytest.approx(1 + 3 * (2 + 0.5 + 4.25 + 0.5 + 4) + 2)
    assert found.critical_path == pytest.approx(found.wall)
    assert found.busy["device"] == pytest.approx(1 + 3 * 6.5 + 2)
    assert found.stages == pytest.approx({"select": 6, "fetch": 12.75, "compute": 1 + 13.5 + 2})
    assert found.stalls == pytest.approx(
        {"miss list": 1.5, "host gather": 3.0, "DRAM->HBM": 3 * 3.25}
    )


def test_one_micro_batch_overlaps_nothing() -> None:
    step = times(BATCH, first=1.0, last=2.0, dispatch=0.1)
    assert simulate(step).wall == pytest.approx(simulate(step, "sequential").wall)


def test_dispatch_is_paid_where_the_device_waits_for_it() -> None:
    """Once at the start; then after every transfer, where the device has nothing left to do."""
    found = simulate(times(BATCH, dispatch=0.1), "sequential")
    assert found.wall == pytest.approx(0.1 + 0.1 + 3 * (2 + 0.5 + 4.25 + 0.1 + 0.5 + 4) - 0.1 + 0.1)
    assert found.busy["engine"] == pytest.approx(0.1 * (1 + 3 * 3 + 1))


def test_without_fetches_the_device_decides() -> None:
    part = MicroBatch(select=1.0)
    found = simulate(times(Cohort(micro_batches=(part,) * 3, compute=2.0), layers=5))
    assert found.wall == found.busy["device"] == found.bound == 5 * (3 + 2)
    assert found.stalls == {}


def test_micro_batches_hide_fetch_behind_select() -> None:
    """Two halves: the second is selected while the first is fetched; the link is never idle."""
    half = MicroBatch(select=2.0, transfer=2.0)
    found = simulate(times(Cohort(micro_batches=(half, half), compute=1.0), layers=1))
    assert found.wall == 2 + 2 + 2 + 1
    whole = MicroBatch(select=4.0, transfer=4.0)
    assert simulate(times(Cohort(micro_batches=(whole,), compute=1.0), layers=1)).wall == 9


def test_two_cohorts_hide_fetch_behind_compute() -> None:
    """Fetch as long as the device's work of the other cohort: only the first one shows."""
    half = Cohort(micro_batches=(MicroBatch(select=1.0, transfer=4.0),), compute=3.0)
    layers = 6
    found = simulate(times(half, half, layers=layers))
    # Cohort 0 from 1 to 5 on the link, 1 from 5 to 9, and so on: the link is the bottleneck.
    assert found.wall == 1 + 2 * layers * 4 + 3
    whole = Cohort(micro_batches=(MicroBatch(select=2.0, transfer=8.0),), compute=6.0)
    assert simulate(times(whole, layers=layers)).wall == layers * 16
    assert found.bound == found.busy["DRAM->HBM"]


def test_workers_gather_side_by_side_and_the_ssd_reads_one_at_a_time() -> None:
    part = MicroBatch(select=0.0, gather=4.0, transfer=1.0)
    cohort = Cohort(micro_batches=(part,) * 4, compute=0.0)
    # Two at once: at 4 and at 8 two come out; then two transfers one after the other.
    assert simulate(times(cohort, layers=1)).wall == 10
    assert simulate(times(cohort, layers=1, workers=1)).wall == 17
    cold = replace(part, ssd=3.0, ssd_latency=1.0, gather=0.0)
    found = simulate(times(replace(cohort, micro_batches=(cold,) * 4), layers=1))
    assert found.busy["SSD->DRAM"] == 12
    # While one worker waits out the latency of its read, the other one's keeps the SSD busy.
    assert found.wall == 4 * 3 + 1 + 1


def test_speculative_fetches_during_compute() -> None:
    cohort = Cohort(micro_batches=(MicroBatch(select=1.0, transfer=3.0),), compute=3.0)
    found = simulate(times(cohort, layers=4), "speculative")
    # Only the first fetch shows: the second one runs while layer 0 computes from 4 to 7, and so on.
    assert found.wall == 1 + 3 + 3 + (1 + 3) + (1 + 3) + 3
    assert simulate(times(cohort, layers=4)).wall == 4 * 7


seconds = st.floats(0, 10, allow_nan=False)
parts = st.builds(
    MicroBatch,
    select=seconds,
    miss_list=seconds,
    ssd=seconds,
    ssd_latency=seconds,
    gather=seconds,
    transfer=seconds,
    write=seconds,
)


@st.composite
def steps(draw: st.DrawFn) -> StepTimes:
    form = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    layers = tuple(
        tuple(
            Cohort(micro_batches=tuple(draw(parts) for _ in range(count)), compute=draw(seconds))
            for count in form
        )
        for _ in range(draw(st.integers(1, 4)))
    )
    return StepTimes(
        layers=layers,
        first=draw(seconds),
        last=draw(seconds),
        dispatch=draw(st.floats(0, 1)),
        workers=draw(st.integers(1, 3)),
    )


@settings(max_examples=60, deadline=None)
@given(steps(), st.sampled_from(["overlapped", "speculative"]))
def test_no_step_beats_its_bound_nor_loses_to_the_sum(step: StepTimes, schedule: Any) -> None:
    found = simulate(step, schedule)
    near = 1e-9
    assert found.wall >= found.bound - near
    assert found.bound >= found.critical_path
    assert found.wall >= found.busy["host gather"] / step.workers - near
    parts = [part for layer in step.layers for cohort in layer for part in cohort.micro_batches]
    latencies = sum(part.miss_list + part.ssd_latency for part in parts)
    assert found.wall <= sum(found.busy.values()) + latencies + near
    assert found.wall - found.busy["device"] == pytest.approx(sum(found.stalls.values()), abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(steps())
def test_one_thing_at_a_time_in_each_lane(step: StepTimes) -> None:
    found = simulate(step)
    for lane in ("device", "engine", "DRAM->HBM", "SSD->DRAM"):
        spans = sorted((s.start, s.end) for s in found.spans if s.lane == lane)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(spans))
        assert sum(end - start for start, end in spans) == pytest.approx(found.busy[lane])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MicroBatch(select=-1.0), "select"),
        (lambda: Cohort(micro_batches=(), compute=1.0), "micro_batches"),
        (lambda: times(BATCH, layers=0), "layers"),
        (lambda: times(BATCH, workers=0), "workers"),
        (lambda: simulate(times(BATCH), "backwards"), "schedule"),  # type: ignore[arg-type]
        (lambda: simulate(times(BATCH, BATCH), "sequential"), "one micro-batch"),
        (lambda: hardware("h2000"), "h200"),
        (lambda: replace(HARDWARE["l20"], pcie=0.0), "pcie of L20"),
        (lambda: replace(HARDWARE["l20"], dispatch=-1.0), "dispatch of L20"),
    ],
)
def test_bad_values(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_sustained_is_slower_never_smaller() -> None:
    for peak in HARDWARE.values():
        reached = sustained(peak)
        assert isinstance(reached, Hardware)
        assert reached.hbm < peak.hbm
        assert reached.pcie < peak.pcie
        assert reached.memory == peak.memory
