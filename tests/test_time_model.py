"""The model of time: the simulated step, by hand and by property; predictions; the command."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common import RESULTS
from benchmarks.time_probe import Line, Point
from kvdrive_jax.budgets import Budgets
from kvdrive_jax.models.presets import LLAMA_3_8B_GRADIENT_1048K
from kvdrive_jax.pipeline import parts as parts_of
from kvdrive_jax.pipeline.parts import Arrangement
from kvdrive_jax.pipeline.scheduler import run_layers
from kvdrive_jax.plan.__main__ import main
from kvdrive_jax.plan.costs import FloorCosts, Missing, step_times
from kvdrive_jax.plan.hardware import HARDWARE, Hardware, hardware, sustained
from kvdrive_jax.plan.predict import best, compare, default_budgets, plan_case, predict
from kvdrive_jax.plan.simulate import Cohort, MicroBatch, StepTimes, simulate
from kvdrive_jax.plan.work import Case, full_attention, parameter_count
from kvdrive_jax.window.hits import MEASURED, HitRates, dram_hit_rate
from kvdrive_jax.window.profile import Profile, ProfiledText, ProfileKey

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


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("cohorts", [1, 3])
def test_what_takes_no_time_ends_at_once(layers: int, cohorts: int) -> None:
    nothing = Cohort(micro_batches=(MicroBatch(select=0.0),) * 2, compute=0.0)
    for schedule in ("overlapped", "speculative"):
        assert simulate(times(*[nothing] * cohorts, layers=layers), schedule).wall == 0  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(steps())
def test_one_thing_at_a_time_in_each_lane(step: StepTimes) -> None:
    found = simulate(step)
    for lane in ("device", "engine", "DRAM->HBM", "SSD->DRAM"):
        spans = sorted((s.start, s.end) for s in found.spans if s.lane == lane)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(spans))
        assert sum(end - start for start, end in spans) == pytest.approx(found.busy[lane])


@dataclass(eq=False)
class Fetch:
    """Of `Played`: what is under way for one micro-batch, and until when."""

    cost: MicroBatch
    until: float
    at: str = "list"


class Played:
    """Stages of the real scheduler on a clock of its own: what each takes comes from ``step``."""

    def __init__(self, step: StepTimes) -> None:
        self.step, self.now, self.device = step, 0.0, step.first
        self.links = dict.fromkeys(("ssd", "hbm"), 0.0)
        self.workers = [0.0] * step.workers

    def run_on_device(self, seconds: float) -> float:
        self.device = max(self.device, self.now) + seconds
        return self.device

    def select(self, layer: int, part: parts_of.MicroBatch, hidden: parts_of.Cohort) -> Fetch:
        first = hidden.micro_batches[0].number
        cost = self.step.layers[layer][hidden.number].micro_batches[part.number - first]
        return Fetch(cost, self.run_on_device(cost.select) + cost.miss_list)

    def advance(self, fetch: Fetch) -> bool:
        if self.now < fetch.until:
            return False
        cost = fetch.cost
        if fetch.at == "list" and cost.fetches:
            worker = self.workers.index(min(self.workers))
            free = max(self.now, self.workers[worker])
            if cost.ssd:
                free = self.links["ssd"] = max(free, self.links["ssd"]) + cost.ssd
                free += cost.ssd_latency
            self.workers[worker] = fetch.until = free + cost.gather
            fetch.at = "gathered"
        elif fetch.at == "gathered":
            start = max(self.now, self.links["hbm"])
            fetch.until = self.links["hbm"] = start + cost.transfer
            fetch.at = "carried"
        else:
            if fetch.at == "carried":
                self.run_on_device(cost.write)
            fetch.at, fetch.until = "landed", math.inf
        return True

    def landed(self, fetch: Fetch) -> bool:
        return fetch.at == "landed"

    def compute(
        self, layer: int, cohort: parts_of.Cohort, hidden: parts_of.Cohort, fetches: Any
    ) -> parts_of.Cohort:
        self.run_on_device(self.step.layers[layer][cohort.number].compute)
        return hidden

    def wait(self, fetches: Any) -> None:
        self.now = min(fetch.until for fetch in fetches)


@settings(max_examples=100, deadline=None)
@given(steps(), st.integers(0, 2**32 - 1), st.booleans())
def test_it_plays_by_the_rules_of_the_scheduler(step: StepTimes, seed: int, ahead: bool) -> None:
    """The real `run_layers` over the same seconds ends at the same moment."""
    draw = np.random.default_rng(seed)

    def other(part: MicroBatch) -> MicroBatch:  # seconds of which no two are the same
        select, miss_list, ssd, gather, transfer = draw.random(5).tolist()
        fetches = draw.random() < 0.8
        return MicroBatch(
            select=select,
            miss_list=miss_list,
            ssd=ssd * fetches * bool(part.ssd),
            ssd_latency=0.1,
            gather=gather * fetches,
            transfer=transfer * fetches,
            write=0.2,
        )

    step = replace(step, dispatch=0.0, layers=tuple(
        tuple(
            Cohort(
                micro_batches=tuple(map(other, cohort.micro_batches)), compute=3 * draw.random()
            )
            for cohort in layer
        )
        for layer in step.layers
    ))  # fmt: skip
    cohorts, number = [], 0
    for at, cohort in enumerate(step.layers[0]):
        rows = range(number, number + len(cohort.micro_batches))
        cut = tuple(parts_of.MicroBatch(row, at, row, row + 1) for row in rows)
        cohorts.append(parts_of.Cohort(at, rows.start, rows.stop, cut))
        number = rows.stop
    played = Played(step)
    run_layers(played, cohorts, len(step.layers), cohorts, speculative=ahead)
    found = simulate(step, "speculative" if ahead else "overlapped")
    assert found.wall == pytest.approx(played.device + step.last)


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


# Predictions

L20 = sustained(HARDWARE["l20"])
SSD = default_budgets(L20, ssd=10**12)
CASE = Case(model=LLAMA_3_8B_GRADIENT_1048K, context=65536, batch=4, budget=1024, hit_rate=0.8)


def test_step_is_made_of_what_is_missing() -> None:
    missing = Missing.of(CASE, from_ssd=0.25, read_bytes=4096)
    assert missing.pages == (pytest.approx(8 * 256 * 0.2),) * 32
    costs = FloorCosts(case=CASE, hardware=L20)
    step = step_times(costs, L20, missing, 4, Arrangement(1, 2))
    assert [len(cohort.micro_batches) for cohort in step.layers[0]] == [2, 2]
    part = step.layers[3][1].micro_batches[0]
    pages = 8 * 256 * 0.2
    assert part.transfer == pytest.approx(pages * 2048 / L20.pcie + L20.pcie_latency)
    assert part.ssd == pytest.approx(0.25 * pages * 4096 / L20.ssd)
    assert part.write == pytest.approx(2 * pages * 2048 / L20.hbm)
    assert costs.select(4) < 4 * costs.select(1)
    assert step.layers[0][0].compute == costs.compute(2)
    # Everything in its window: no fetch, no latency of one.
    none = step_times(costs, L20, Missing(pages=(0.0,), page_bytes=2048), 4, Arrangement(4))
    assert not none.layers[0][0].micro_batches[0].fetches


def test_direct_fetches_are_the_device_s() -> None:
    missing = Missing.of(CASE)
    costs = FloorCosts(case=CASE, hardware=L20)
    found = simulate(step_times(costs, L20, missing, 4, Arrangement(4), direct=True))
    assert found.busy["host gather"] == found.busy["DRAM->HBM"] == 0
    assert found.wall == pytest.approx(found.busy["device"], rel=0.02)
    assert found.stages["fetch"] > 32 * 4 * missing.pages[0] * 2048 / L20.pcie


def test_more_bandwidth_is_never_slower() -> None:
    for name in ("hbm", "pcie", "gather", "ssd"):
        rates = [
            predict(
                CASE,
                replace(L20, **{name: factor * getattr(L20, name)}),
                budgets=Budgets(hbm=SSD.hbm, dram=10 * 10**9, ssd=SSD.ssd),
                arrangement=Arrangement(2, 2),
            ).tokens_per_s
            for factor in (0.25, 0.5, 1, 2, 4)
        ]
        assert rates == sorted(rates), name
        assert rates[0] < rates[-1], name


def test_best_is_the_best_of_what_was_tried() -> None:
    found = best(CASE, L20, budgets=SSD, hits=None)
    assert found.refused is None
    for arrangement in (Arrangement(4), Arrangement(2), Arrangement(1, 2)):
        one = predict(
            replace(CASE, window=1.0), L20, budgets=SSD, arrangement=arrangement, hits=None
        )
        assert found.step_s <= one.step_s
    assert found.simulation is not None
    assert found.tokens_per_s == 4 / found.simulation.wall


def test_hits_come_from_the_window_that_fits() -> None:
    wide, narrow = (predict(replace(CASE, window=w), L20, budgets=SSD) for w in (3.0, 1.0))
    assert wide.hit_rate > narrow.hit_rate
    assert wide.nbytes["DRAM->HBM"] < narrow.nbytes["DRAM->HBM"]
    everything = predict(replace(CASE, batch=1, window=100.0), L20, budgets=SSD)
    assert everything.window is None
    assert everything.nbytes == {}


def test_full_and_layerwise() -> None:
    found = compare(CASE, HARDWARE["h200"], budgets=default_budgets(HARDWARE["h200"]))
    reached = sustained(HARDWARE["h200"])
    attend = 32 * full_attention(CASE).seconds(reached)
    assert attend < found["full"].step_s < 2 * attend
    whole = found["layerwise"].nbytes["DRAM->HBM"]
    assert whole == 4 * 65536 * 2 * 32 * 8 * 128 * 2
    assert found["layerwise"].step_s == pytest.approx(whole / reached.pcie, rel=0.1)
    # The paper: below one token a second for each session, far below the others.
    assert found["layerwise"].tokens_per_s < 0.1 * found["kvdrive"].tokens_per_s


def test_what_does_not_fit_is_refused_with_the_arithmetic() -> None:
    small = Budgets(hbm=18 << 30, dram=4 << 30, ssd=0)
    for method in ("kvdrive", "full", "layerwise"):
        found = predict(CASE, L20, budgets=small, method=method)  # type: ignore[arg-type]
        assert found.refused is not None
        assert "GiB" in found.refused
        assert found.tokens_per_s == 0
        assert math.isinf(found.step_s)
    assert best(CASE, L20, budgets=small).refused is not None


def test_plan_is_the_engine_s() -> None:
    plan = plan_case(CASE, SSD)
    assert plan.shape.batch == 4
    assert plan.shape.final_tokens == (65536,) * 4
    assert plan.bytes_of("hbm", "weights") == 2 * parameter_count(CASE.model)
    assert parameter_count(CASE.model) == 8_030_261_248


def test_measured_hits_rise_with_window_and_budget() -> None:
    for budget in (1 / 128, 1 / 64, 1 / 30, 1 / 16, 1 / 4):
        rates = [MEASURED.rate(budget, window) for window in (0, 1, 1.7, 2, 3, 4, 20)]
        assert rates == sorted(rates)
        assert rates[0] == 0
        assert 0.6 < rates[1] < rates[-1] < 1
    assert MEASURED.rate(1 / 64, 2) < MEASURED.rate(1 / 32, 2) < MEASURED.rate(1 / 16, 2)
    made = json.loads((RESULTS / "time_hits.json").read_text())
    assert made["windows"] == list(MEASURED.multiples[1:])
    for row, mean in zip(MEASURED.rates, made["mean"], strict=True):
        assert row[1:] == pytest.approx(mean["hit_rates"], abs=1e-3)
    assert [dram_hit_rate(share) for share in (0, 0.125, 0.25, 1)] == [0, 0.35, 0.7, 1]


def test_hits_of_a_profile() -> None:
    profile = Profile(
        key=ProfileKey(
            digest="d", chunk_size=4, budget=64, index="moments", group_rule="mean",
            eviction="smoothed",
        ),
        model="some",
        multiples=(0.0, 1.0, 3.0),
        hits=np.array([[[0.0, 8.0, 16.0], [0.0, 12.0, 16.0]]]),
        selected=16.0,
        texts=(ProfiledText(name="t", tokens=100, steps=3),),
    )  # fmt: skip
    found = HitRates.of_profile(profile)
    assert [found.rate(0.01, window) for window in (0, 1, 2, 3, 9)] == [0, 0.625, 0.8125, 1, 1]
    assert "some" in found.source


def test_line_finds_what_made_its_points() -> None:
    def cost(rows: int, chunks: int, selected: int) -> float:
        return {1: 3.0, 2: 3.5, 4: 6.0}.get(rows, 6.0 + (rows - 4) * 1.25) + rows * (
            1e-3 * chunks + 2e-2 * selected
        )

    points = [
        Point(rows=rows, chunks=chunks, selected=selected, seconds=cost(rows, chunks, selected))
        for rows in (1, 2, 4)
        for chunks, selected in ((1000, 16), (4000, 64), (1000, 50))
    ]
    line = Line.through(points, by_chunks=True)
    for rows in (1, 2, 3, 4, 8):
        wanted = cost(rows, 2000, 30) if rows != 3 else (cost(2, 2000, 30) + cost(4, 2000, 30)) / 2
        assert line(rows, 2000, 30) == pytest.approx(wanted)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "qwen3-8b", "--context", "32K", "--batch", "2", "--window", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("PREDICTIONS")
    assert "2 session(s) of 32,768 tokens" in out
    assert "window x2" in out
    assert "full: " in out
    assert "layerwise: " in out
    choices = ["--schedule", "sequential", "--budget", "0.0156", "--hit-rate", "0.8"]
    assert main(["--hardware", "l20", "--context", "16K", "--window", "1", *choices]) == 0
    assert "sequential, micro-batch 8, 1 cohort(s)" in capsys.readouterr().out
    assert main(["--hbm-budget", "1GiB"]) == 1
    assert "kvdrive: cannot run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt"], "llama-3-8b"),
        (["--hardware", "b200"], "h200"),
        (["--context", "many"], "'many'"),
        (["--budget", "-1"], "budget"),
        (["--batch", "0"], "batch must be at least 1, got 0"),
        (["--context", "0"], "context: expected tokens such as"),
        (["--window", "-1"], "window"),
        (["--index", "nonsense"], "nonsense"),
        (["--hit-rate", "1.5"], "hit_rate"),
        (["--hbm-budget", "lots"], "lots"),
        (["--schedule", "sequential", "--micro-batch", "2", "--window", "2"], "one micro-batch"),
        (["--profile", "/nowhere"], "/nowhere"),
    ],
)
def test_command_refuses(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
