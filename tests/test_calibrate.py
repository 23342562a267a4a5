"""Calibration: what it chooses, when it measures, what it keeps; no token depends on it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrive_jax import (
    Engine,
    KVDriveConfig,
    PipelineConfig,
    RetrievalConfig,
    TierConfig,
    WindowConfig,
    calibration,
)
from kvdrive_jax.budgets import Budgets
from kvdrive_jax.calibration import Calibrator, alike, check_calibrate
from kvdrive_jax.methods.kvdrive import KVDrive
from kvdrive_jax.pipeline import calibrate_store
from kvdrive_jax.pipeline.calibrate import (
    Search,
    WindowCosts,
    best_window,
    cluster_count,
    miss_rate,
)
from kvdrive_jax.pipeline.calibrate_measure import WindowCase, measure_windows
from kvdrive_jax.pipeline.calibrate_store import (
    ArrangementResult,
    CalibrationKey,
    CalibrationStore,
    Timed,
    read_results,
    write_results,
)
from kvdrive_jax.pipeline.parts import Arrangement, candidates
from kvdrive_jax.tiers.pages import PageGeometry
from kvdrive_jax.window.hits import MEASURED
from kvdrive_jax.window.sizing import WindowShape
from tests.tiny import CharacterTokenizer, random_prompt, tiny_config, tiny_model

Cost = Callable[[Arrangement], float]

COSTS = WindowCosts(
    multiples=(1.0, 4.0, 8.0), lookup_s=(1e-4, 2e-4, 3e-4), fetch_s=1e-5, page_s=1e-6
)
KEY = CalibrationKey(
    machine="a machine",
    model="digest",
    dtype="float32",
    batch=3,
    chunk_capacity=192,
    selected=12,
    retrieval="moments",
    window="auto",
    pages="DRAM",
    links="as it is",
    schedule="overlapped",
)
FOUND = ArrangementResult(
    chosen=Timed(micro_batch=2, cohorts=1, step_s=0.01),
    others=(Timed(micro_batch=1, cohorts=2, step_s=0.02),),
)


def run(search: Search, cost: Cost, noise: Any = None, first_s: float = 0.0) -> Search:
    """To its end, with made-up times; the first step of each arrangement takes first_s longer."""
    seen = set()
    while (used := search.next()) is not None:
        seconds = cost(used) * (1.0 if noise is None else 1 + noise())
        search = search.note(used, seconds + first_s * (used not in seen))
        seen.add(used)
    return search


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_choice_is_within_five_per_cent_of_the_grid(data: st.DataObject) -> None:
    """Times that fall and then rise along micro-batches, differently by cohorts, with noise."""
    batch = data.draw(st.integers(2, 17))
    grid = candidates(batch)
    rows = {
        cohorts: (
            data.draw(st.floats(0.7, 1.3)),
            data.draw(st.floats(-0.5, math.log2(batch) + 0.5)),
            data.draw(st.floats(0.02, 0.4)),
        )
        for cohorts in (1, 2)
    }
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))

    def cost(one: Arrangement) -> float:
        base, at, bend = rows[one.cohorts]
        return 0.02 * base * (1 + bend * (math.log2(one.micro_batch) - at) ** 2)

    start = data.draw(st.sampled_from(grid))
    search = Search(candidates=tuple(grid), start=start)
    ended = run(search, cost, noise=lambda: abs(rng.normal(0, 0.005)), first_s=0.1)
    assert cost(ended.best) <= 1.05 * min(map(cost, grid))
    assert ended.spent_s < search.limit_s


@given(st.floats(0.001, 3), st.floats(0, 3), st.integers(2, 16))
@settings(max_examples=20, deadline=None)
def test_a_search_ends_in_time(step_s: float, first_s: float, batch: int) -> None:
    """What is begun is ended, and nothing is begun that would not end in time."""
    grid = candidates(batch)
    search = Search(candidates=tuple(grid), start=grid[-1], limit_s=7.0)
    ended = run(search, lambda one: step_s * (1 + 0.01 * one.micro_batch), first_s=first_s)
    assert ended.spent_s < 7.0 + 2.5 * 1.2 * step_s + first_s
    assert ended.best in grid


def test_a_search_ends_with_its_steps() -> None:
    grid = tuple(candidates(8))
    ended = run(Search(candidates=grid, start=grid[0], most_steps=11), lambda _: 0.01)
    assert len(ended.log) == 11


def test_the_first_step_after_a_change_does_not_count() -> None:
    one, two = Arrangement(2), Arrangement(1)
    search = Search(candidates=(one, two), start=one)
    for used, seconds in ((one, 9.0), (one, 2.0), (two, 8.0), (two, 3.0), (one, 7.0), (one, 1.0)):
        search = search.note(used, seconds, 0.5)
    assert (search.times(one), search.times(two)) == ([2.0, 1.0], [3.0])
    assert search.best == one
    assert search.spent_s == 23.5


def test_one_candidate_needs_no_search() -> None:
    only = Arrangement(4)
    assert Search(candidates=(only,), start=only).next() is None
    with pytest.raises(ValueError, match="start must be one of"):
        Search(candidates=(only,), start=Arrangement(2))


# Windows


@given(
    st.floats(0, 1e-3),
    st.floats(0, 1e-3),
    st.floats(0, 1e-4),
    st.integers(1, 4096),
    st.floats(1, 40),
)
@settings(max_examples=20, deadline=None)
def test_no_window_is_cheaper_by_more_than_noise(
    flat: float, slope: float, page_s: float, pages: int, largest: float
) -> None:
    costs = WindowCosts(
        multiples=(1.0, 2.0), lookup_s=(flat, flat + slope), fetch_s=1e-5, page_s=page_s
    )
    chosen = best_window(costs, MEASURED, 1 / 20, pages, largest)
    every = np.linspace(1, largest, 200)
    total = costs.lookup(every) + costs.fetch(pages * miss_rate(MEASURED, 1 / 20, every))
    assert 1 <= chosen.multiple <= largest
    assert chosen.lookup_s + chosen.fetch_s <= 1.05 * total.min() + slope / 4


def test_windows_grow_with_what_a_page_costs() -> None:
    sizes = [
        best_window(dataclasses.replace(COSTS, page_s=page_s), MEASURED, 0.05, 1000, 100).multiple
        for page_s in (0.0, 1e-7, 1e-6, 1e-5, 1e-3)
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] == 1
    assert sizes[-1] > 50


def test_noise_never_makes_a_larger_window_look_cheaper() -> None:
    noisy = dataclasses.replace(COSTS, lookup_s=(3e-4, 1e-4, 2e-4))
    looked = noisy.lookup(np.array([1.0, 4.0, 8.0, 20.0]))
    assert (np.diff(looked) >= 0).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"multiples": (1.0,), "lookup_s": (1.0,)}, "multiples must be two or more"),
        ({"multiples": (4.0, 1.0, 8.0)}, "multiples must be two or more"),
        ({"lookup_s": (1.0, 2.0)}, "lookup_s must be 3 numbers"),
        ({"page_s": math.nan}, "finite"),
        ({"fetch_s": -1.0}, "at least 0"),
    ],
)
def test_costs_that_are_none_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(COSTS, **fields)


def case(**fields: Any) -> WindowCase:
    geometry = PageGeometry(
        layers=3, kv_heads=2, chunk_size=4, head_dim=16, dtype=np.dtype("float32")
    )
    given = {"batch": 2, "chunk_capacity": 96, "selected": 7, "eviction": "smoothed"}
    return WindowCase(geometry=geometry, **{**given, **fields})


def test_windows_are_measured_on_this_machine() -> None:
    costs = measure_windows(case(), 4.0, limit_s=60)
    assert costs is not None
    assert costs.multiples == (1.0, 2.0, 4.0)
    assert min(costs.lookup_s) > 0
    assert costs.page_s + costs.fetch_s > 0


def test_measuring_ends_in_time() -> None:
    ticks = iter(range(10**6))
    assert measure_windows(case(), 4.0, limit_s=60, clock=lambda: 1.0 * next(ticks)) is None


def test_the_number_of_clusters_follows_the_context() -> None:
    """Paper figure 18: as many tokens for each at 60K as at 120K."""
    assert cluster_count(122_880, 15) == 8192
    assert cluster_count(61_440, 15) == 4096
    assert cluster_count(17, 16) == 2


# What is kept


@pytest.mark.parametrize("result", [COSTS, FOUND])
def test_what_is_found_is_kept(tmp_path: Path, result: Any) -> None:
    path = tmp_path / "calibration.json"
    CalibrationStore(str(path)).put(KEY, result)
    other = dataclasses.replace(KEY, batch=4)
    CalibrationStore(str(path)).put(other, COSTS)
    again = CalibrationStore(str(path))
    assert again.get(KEY) == result
    assert again.get(other) == COSTS
    assert again.get(dataclasses.replace(KEY, machine="another")) is None


def test_what_several_add_to_one_file_at_once_is_all_kept(tmp_path: Path) -> None:
    path = str(tmp_path / "calibration.json")
    keys = [dataclasses.replace(KEY, batch=batch) for batch in range(1, 13)]
    stores = [CalibrationStore(path) for _ in keys]  # none of them knows of the others
    with ThreadPoolExecutor(len(keys)) as threads:
        list(threads.map(lambda store, key: store.put(key, FOUND), stores, keys))
    assert read_results(path) == dict.fromkeys(keys, FOUND)


def test_a_model_without_digest_is_not_kept_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    store, key = CalibrationStore(str(path)), dataclasses.replace(KEY, model="")
    store.put(key, FOUND)
    assert store.get(key) == FOUND
    assert not path.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is no calibration file"),
        ("[]", "its version must be 1, got None"),
        ('{"version": 2, "entries": []}', "its version must be 1, got 2"),
        ('{"version": 1}', "has no 'entries'"),
        ('{"version": 1, "entries": [3]}', "an entry must be dict"),
        ('{"version": 1, "entries": [{"key": {}}]}', "has no 'machine'"),
        ('{"version": 1, "multiples": [0.0], "hits": []}', "has no 'entries'"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as raised:
        check_calibrate(config(calibrate=str(path)))
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step_s", 0),
        ("micro_batch", True),
        ("cohorts", 0),
        ("step_s", "fast"),
        ("step_s", math.nan),
    ],
)
def test_values_that_cannot_be_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    path = tmp_path / "calibration.json"
    write_results(str(path), {KEY: FOUND})
    values = json.loads(path.read_text())
    values["entries"][0]["arrangement"]["chosen"][name] = value
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="is no calibration file"):
        read_results(str(path))


def test_a_damaged_cache_costs_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    store = CalibrationStore("auto")
    store.put(KEY, FOUND)
    (path,) = Path(calibrate_store.cache_folder("calibration")).glob("*.json")
    path.write_text("{")
    assert CalibrationStore("auto").get(KEY) is None
    assert "calibrating again" in capsys.readouterr().err
    CalibrationStore("auto").put(KEY, FOUND)
    assert CalibrationStore("auto").get(KEY) == FOUND
    path.unlink()


@pytest.mark.parametrize("where", ["", "missing/file.json", "."])
def test_a_file_that_cannot_be_is_refused(tmp_path: Path, where: str) -> None:
    with pytest.raises(ValueError, match="calibrate must be"):
        check_calibrate(config(calibrate=where and str(tmp_path / where)))


def test_method_full_has_nothing_to_calibrate(tmp_path: Path) -> None:
    check_calibrate(KVDriveConfig(method="full", pipeline=PipelineConfig(calibrate="no/file")))


# In the engine

MODEL = tiny_model()
TOKENIZER: Any = CharacterTokenizer()
RAGGED = [random_prompt(n, seed=n) for n in (401, 1, 233, 90)]
NEW = 24


def config(window: float | None = 1, tiers: TierConfig | None = None, **pipeline: Any) -> Any:
    return KVDriveConfig(
        batch_size=4,
        retrieval=RetrievalConfig(budget=48, flush_tokens=16),
        window=WindowConfig(multiple=window),
        tiers=tiers or TierConfig(),
        pipeline=PipelineConfig(**pipeline),
    )


def tokens(engine: Engine, new: int = NEW) -> list[tuple[int, ...]]:
    done = {
        event.session: event.generation.token_ids
        for event in engine.stream_ids(RAGGED, max_new_tokens=new, ignore_eos=True)
        if event.generation is not None
    }
    return [done[number] for number in sorted(done)]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Arrangement]:
    """Calibration as users get it, and the arrangements that it changes to."""
    monkeypatch.setattr(calibration, "FEWEST_STEPS", 16)
    real, seen = KVDrive.arrange, []

    def arrange(self: KVDrive, arrangement: Arrangement) -> None:
        seen.append(arrangement)
        real(self, arrangement)

    monkeypatch.setattr(KVDrive, "arrange", arrange)
    return seen


def test_no_token_depends_on_calibration(
    tmp_path: Path, measured: list[Arrangement], capsys: pytest.CaptureFixture[str]
) -> None:
    """Searched, taken from a file, and off; a very short run takes what is known, or nothing."""
    path = tmp_path / "calibration.json"
    searching = config(calibrate=str(path), cohorts=1)
    with Engine(MODEL, TOKENIZER, config(calibrate="off")) as engine:
        same = tokens(engine)
    assert measured == []
    with Engine(MODEL, TOKENIZER, searching) as engine:
        tokens(engine, new=15)
        assert measured == []
        assert not path.exists()
    with Engine(MODEL, TOKENIZER, searching, quiet=False) as engine:
        assert tokens(engine) == same
        assert measured
        searched = read_results(str(path))
        measured.clear()
        assert tokens(engine) == same
        assert len(measured) <= 1
    ((key, found),) = searched.items()
    assert isinstance(found, ArrangementResult)
    assert key.batch == 4
    assert found.chosen.arrangement in (Arrangement(4), Arrangement(2))
    told = [line for line in capsys.readouterr().err.splitlines() if "a step" in line]
    assert "calibrated in" in told[0]
    assert str(found.chosen.arrangement) in told[0]
    assert "as calibrated before" in told[1]

    slow = ArrangementResult(chosen=Timed(micro_batch=4, cohorts=1, step_s=1.0), others=())
    write_results(str(path), {key: slow})
    measured.clear()
    with Engine(MODEL, TOKENIZER, searching) as engine:
        assert tokens(engine) == same
    assert measured == [Arrangement(4)]


def test_a_search_that_compared_nothing_is_not_kept(
    tmp_path: Path,
    measured: list[Arrangement],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def only_the_start(search: Search) -> Arrangement | None:
        return search.start if len(search.log) < 4 else None

    monkeypatch.setattr(Search, "next", only_the_start)
    path = tmp_path / "calibration.json"
    with Engine(MODEL, TOKENIZER, config(calibrate=str(path), cohorts=1), quiet=False) as engine:
        tokens(engine)
    assert not path.exists() or not read_results(str(path))
    assert "nothing else could be tried" in capsys.readouterr().err


def test_nobody_is_alone_who_was_not() -> None:
    """One row rounds differently than several."""
    every = candidates(8)
    assert alike(8, Arrangement(4), every) == [one for one in every if one.micro_batch > 1]
    assert alike(3, Arrangement(2), candidates(3)) == [Arrangement(2)]
    assert alike(2, Arrangement(1), candidates(2)) == [Arrangement(1)]
    assert alike(1, Arrangement(1), candidates(1)) == [Arrangement(1)]


def test_what_is_fixed_is_not_searched(tmp_path: Path, measured: list[Arrangement]) -> None:
    fixed = config(calibrate=str(tmp_path / "file.json"), micro_batch=2, cohorts=1)
    with Engine(MODEL, TOKENIZER, fixed) as engine:
        tokens(engine)
    assert measured == []


def test_windows_are_as_large_as_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[Arrangement]
) -> None:
    asked = []

    def measure(case: WindowCase, largest: float, link: Any) -> WindowCosts:
        asked.append(largest)
        return dataclasses.replace(COSTS, page_s=page_s)

    monkeypatch.setattr(calibration, "measure_windows", measure)
    with Engine(MODEL, TOKENIZER, config(3)) as engine:
        tight = TierConfig(hbm_budget=engine.plan([401, 1, 233], NEW).used("hbm"))
    path = str(tmp_path / "file.json")
    plans = {}
    for page_s in (0.0, 1.0):
        for calibrate in ("off", path):
            with Engine(MODEL, TOKENIZER, config(None, tight, calibrate=calibrate)) as engine:
                plans[page_s, calibrate] = engine.plan([401, 1, 233], NEW)
                engine.plan([401, 1, 233], NEW)
                assert engine.stats()["tiers"]["hbm"]["peak_bytes"] > 0
                assert set(engine._ledger.accounts("hbm")) == {"weights"}
        Path(path).unlink()
    largest = plans[0.0, "off"].window
    assert largest == 3
    assert plans[1.0, path].window == pytest.approx(largest, abs=0.5)
    assert plans[0.0, path].window == 1
    assert "as large as pays" in plans[0.0, path].window_line()
    assert asked == [largest, largest]


def test_windows_are_not_held_down_where_pages_may_be_on_ssd(
    monkeypatch: pytest.MonkeyPatch, measured: list[Arrangement]
) -> None:
    monkeypatch.setattr(calibration, "measure_windows", lambda *_: COSTS)
    shape = WindowShape(layers=3, kv_heads=2, selected=12, chunk_capacity=192)
    pages = 3 * 3 * 2 * 192 * 2 * 4 * 16 * 4
    for dram, known in ((pages, True), (pages - 1, False)):
        budgets = Budgets(hbm=10**9, dram=dram, ssd=10**9)
        model = tiny_config()
        calibrator = Calibrator(config(None), model, np.dtype("float32"), "", budgets)
        most = calibrator.most_window(3, NEW)
        assert most is not None
        assert (most(shape, 4.0, None) is not None) == known
