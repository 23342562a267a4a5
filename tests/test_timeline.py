"""Spans of time: sums that add up to the wall time, and the trace file made of them."""

from __future__ import annotations

import itertools
import json
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrive_jax import Engine, KVDriveConfig, PipelineConfig, RetrievalConfig, WindowConfig
from kvdrive_jax.config import TierConfig
from kvdrive_jax.telemetry import StageClock
from kvdrive_jax.timeline import CAUSES, LANES, READ_AHEAD, Span, StepSums, Timeline
from kvdrive_jax.timeline_file import events, write_timeline
from tests.tiny import CharacterTokenizer, random_prompt, tiny_model

TICK = 1 / 1024
LANE = st.sampled_from(LANES)


SPAN = st.tuples(
    LANE,
    st.sampled_from(["select", "compute", READ_AHEAD]),
    st.integers(-20, 60),
    st.integers(0, 30),
    st.integers(0, 9),
)
STEP = st.tuples(st.integers(0, 5), st.integers(0, 60), st.lists(SPAN, max_size=10))


def laid_out(drawn: list[Any]) -> tuple[list[tuple[int, int]], list[list[Span]]]:
    """Steps one after another, and the spans recorded before the end of each, in ticks."""
    steps, spans, now = [], [], 30
    for gap, length, mine in drawn:
        start, now = now + gap, now + gap + length
        steps.append((start, now))
        spans.append(
            [
                Span(lane, name, start + begin, start + begin + took, nbytes=nbytes)
                for lane, name, begin, took, nbytes in mine
            ]
        )
    return steps, spans


def record(timeline: Timeline, steps: list[tuple[int, int]], spans: list[list[Span]]) -> None:
    for (start, end), mine in zip(steps, spans, strict=True):
        for span in mine:
            moved = span._replace(start=span.start * TICK, end=span.end * TICK)
            timeline.span(*moved)
        timeline.end_step(start * TICK, end * TICK)


def counted_by_tick(steps: list[tuple[int, int]], spans: list[list[Span]]) -> dict[str, int]:
    """The same sums, one tick of time after another."""
    told: dict[str, int] = defaultdict(int)
    for (start, end), mine in zip(steps, spans, strict=True):
        for tick in range(start, end):
            here = {
                span.lane
                for span in mine
                if span.start <= tick < span.end
                and (span.lane, span.name) != ("SSD->DRAM", READ_AHEAD)
            }
            order = ("device", *CAUSES[:-1])
            told[next((lane for lane in order if lane in here), "engine")] += 1
    return told


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, min_size=1, max_size=3))
def test_busy_and_stalls_add_up_to_the_wall_time(drawn: list[Any]) -> None:
    steps, spans = laid_out(drawn)
    timeline = Timeline()
    record(timeline, steps, spans)
    sums = timeline.sums()
    assert timeline.totals()["steps"] == len(steps)
    assert sums.wall_s == sum(end - start for start, end in steps) * TICK
    assert sums.device_s + sum(sums.stalls.values()) == sums.wall_s  # ticks are exact
    expected = counted_by_tick(steps, spans)
    assert sums.device_s == expected["device"] * TICK
    assert sums.stalls == {cause: expected[cause] * TICK for cause in CAUSES}


@settings(max_examples=40, deadline=None)
@given(st.lists(STEP, min_size=1, max_size=3))
def test_spans_of_one_thread_never_overlap_in_the_trace(drawn: list[Any]) -> None:
    steps, spans = laid_out(drawn)
    timeline = Timeline(keep=1000)
    record(timeline, steps, spans)
    written = json.loads(json.dumps(list(events(timeline.spans(), timeline.steps, {}))))
    by_thread = defaultdict(list)
    for event in written:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["ts"] >= 0
            start = int(event["ts"] * 1000)  # as a viewer reads it
            by_thread[event["tid"]].append((start, start + int(event["dur"] * 1000)))
    assert sum(map(len, by_thread.values())) == len(steps) + sum(map(len, spans))
    for mine in by_thread.values():
        for (_, before), (after, _) in itertools.pairwise(sorted(mine)):
            assert after >= before
    named = {e["tid"]: e["args"]["name"] for e in written if e["name"] == "thread_name"}
    assert len(set(named.values())) == len(named)
    assert set(by_thread) <= set(named)


def a_step(timeline: Timeline, at: float, *, warm_up: bool = False) -> None:
    """10 s: select 2, write 1, compute 3; stalls: SSD 1, transfer 1, gather 1, engine 1."""
    timeline.span("device", "select", at, at + 2, layer=0, micro_batch=0, hits=30, misses=10)
    timeline.span("SSD->DRAM", "read", at + 2, at + 3, layer=0, nbytes=400)
    timeline.span("host gather", "gather", at + 2, at + 4, layer=0, micro_batch=0)
    timeline.span("DRAM->HBM", "transfer", at + 4, at + 5, layer=0, micro_batch=0, nbytes=300)
    timeline.span("device", "write", at + 5, at + 6, layer=0)
    timeline.span("engine", "dispatch", at + 6, at + 7)
    timeline.span("device", "compute", at + 7, at + 10, layer=0, cohort=0)
    timeline.end_step(at, at + 10, warm_up=warm_up)


def test_sums_of_a_step() -> None:
    timeline = Timeline()
    timeline.span("device", "prefill", 0.0, 5.0)  # before the first step: in no sum
    for at, warm_up in ((10.0, True), (30.0, False), (50.0, True), (70.0, False)):
        a_step(timeline, at, warm_up=warm_up)
    sums, totals = timeline.sums(), timeline.totals()
    assert (timeline.warm_up.wall_s, timeline.warm_up.device_s) == (20, 12)
    assert (totals["warm_up_steps"], totals["warm_up_s"]) == (2, 20)
    assert (timeline.totals()["steps"], sums.wall_s, sums.device_s) == (2, 20.0, 12.0)
    assert sums.stalls == {"SSD->DRAM": 2, "DRAM->HBM": 2, "host gather": 2, "engine": 2}
    assert sums.work_s() == {"select": 4, "fetch": 6, "compute": 6, "other": 2}
    assert sums.overlap == 18 / 20  # one thing after another
    assert (sums.hits, sums.misses) == (60, 20)
    assert sums.lane("DRAM->HBM").nbytes == 600
    assert sums.lane("device").count == 6
    assert ("device", "prefill") not in sums.by_name
    assert StepSums().overlap is None
    timeline.span("host", "x", 0, 1)  # type: ignore[arg-type]
    timeline.end_step(0, 1)
    with pytest.raises(ValueError, match=r"lane must be one of device.*got 'host'"):
        timeline.sums()


def test_spans_are_forgotten_unless_a_trace_is_written() -> None:
    timeline, traced = Timeline(), Timeline(keep=3000)
    for step in range(2000):
        a_step(timeline, 10.0 * step)
        a_step(traced, 10.0 * step)
    assert len(timeline._spans) < 8192
    assert (timeline.kept, timeline.steps) == ([], [])
    assert timeline.sums().device_s == traced.sums().device_s == 2000 * 6
    assert (len(traced.spans()), traced.dropped) == (3000, 2000 * 7 - 3000)
    assert traced.spans()[0] == Span("device", "select", 0, 2, 0, 0, hits=30, misses=10)


def test_no_span_of_a_worker_is_lost_between_steps() -> None:
    timeline, each, workers = Timeline(keep=10**6), 5_000, 3

    def work() -> None:
        for _ in range(each):
            timeline.span("SSD->DRAM", "read", 1.0, 2.0, nbytes=1)

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        timeline.end_step(1.0, 2.0)
        timeline.sums()
    timeline.end_step(1.0, 2.0)
    assert timeline.sums().lane("SSD->DRAM").nbytes == each * workers
    assert len(timeline.spans()) == each * workers


def test_the_clock_leaves_out_what_a_timeline_tells() -> None:
    clock = StageClock()
    clock._recent = [("compute", 1.0, 2.0), ("stall", 2.5, 4.0)]
    assert clock.snapshot() == {"select": 0, "fetch": 0, "compute": 1.0, "stall": 1.5}
    clock.leave_out(3.0, 6.0)
    assert clock.snapshot() == {"select": 0, "fetch": 0, "compute": 1.0, "stall": 0.5}


def test_the_trace_file_is_whole_or_not_there(tmp_path: Path) -> None:
    timeline, path = Timeline(keep=9), tmp_path / "trace.json"
    a_step(timeline, 1.0)
    timeline.span("SSD->DRAM", READ_AHEAD, 11.0, 12.0, nbytes=7)  # the run was stopped in a step
    path.write_text("old")
    with pytest.raises(TypeError):
        write_timeline(timeline, str(path), {"bad": object()})
    assert path.read_text() == "old"
    assert write_timeline(timeline, str(path), {"configuration": "method kvdrive"}) == 8
    assert list(tmp_path.iterdir()) == [path]
    told: dict[str, Any] = json.loads(path.read_text())
    about = {"configuration": "method kvdrive", "spans": 8, "spans_dropped": 0}
    assert told["otherData"] == about
    found = {event["name"]: event for event in told["traceEvents"]}
    assert found["configuration"]["args"] == about
    assert found["select"]["args"] == {"layer": 0, "micro_batch": 0, "hits": 30, "misses": 10}
    assert found["transfer"]["args"] == {"layer": 0, "micro_batch": 0, "bytes": 300}
    assert found["compute"]["ts"] == 7e6
    assert found["compute"]["dur"] == pytest.approx(3e6)
    assert found["step 0"]["args"] == {"step": 0}


def test_the_numbers_of_a_run_add_up(tmp_path: Path) -> None:
    timeline = Timeline(keep=10**5)
    config = KVDriveConfig(
        batch_size=2,
        retrieval=RetrievalConfig(budget=48, flush_tokens=16),
        window=WindowConfig(multiple=1),
        pipeline=PipelineConfig(micro_batch=1, cohorts=2, calibrate="off"),
        tiers=TierConfig(ssd_dir=str(tmp_path), dram_budget=300_000, extent_bytes=4096, prefetch=2),
    )
    prompts = [random_prompt(n, seed=n) for n in (401, 233)]
    with Engine(tiny_model(), CharacterTokenizer(), config) as engine:  # type: ignore[arg-type]
        for _ in engine.stream_ids(prompts, max_new_tokens=9, ignore_eos=True, timeline=timeline):
            pass
        stats = engine.stats()
    told, spans = stats["timeline"], timeline.spans()
    assert (told["steps"], told["warm_up_steps"], len(timeline.steps)) == (7, 1, 8)
    assert told["device_busy_s"] + sum(told["stall_s"].values()) == pytest.approx(told["wall_s"])
    assert 0 < told["device_busy_s"] < told["wall_s"] < stats["decode_s"]
    assert sum(stats["stage_s"].values()) == pytest.approx(stats["decode_s"])
    layers, steps = 3, 8
    per_step = {"select": layers * 2, "compute": layers * 2, "logits": 1}
    device = [span for span in spans if span.lane == "device"]
    for name, count in per_step.items():
        assert sum(span.name == name for span in device) == count * steps
    for before, after in itertools.pairwise(device):
        assert before.end <= after.start  # the device does one thing at a time
    moved = dict.fromkeys(stats["bytes"], 0)
    for span in spans:
        if span.lane == "DRAM->HBM":
            moved["dram_to_hbm"] += span.nbytes
        elif span.lane == "SSD->DRAM":
            moved["ssd_to_dram"] += span.nbytes
    for name in ("dram_to_hbm", "ssd_to_dram"):
        assert moved[name] == stats["bytes"][name] > 0
    rates = {session["hit_rate"] for session in stats["sessions"]} - {None}
    hits, misses = (sum(max(0, getattr(s, name)) for s in spans) for name in ("hits", "misses"))
    assert min(rates) <= hits / (hits + misses) <= max(rates)
    assert any(span.name == READ_AHEAD for span in spans)
    for span in spans:
        assert span.start <= span.end
