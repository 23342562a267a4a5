"""Traces, and that a replay of them is what the engine does, chunk for chunk."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from kvdrive_jax.config import KVDriveConfig, PipelineConfig, RetrievalConfig, WindowConfig
from kvdrive_jax.engine import Engine
from kvdrive_jax.pipeline.fetcher import Fetcher
from kvdrive_jax.pipeline.recorder import TraceRecorder
from kvdrive_jax.window.eviction import POLICIES
from kvdrive_jax.window.layout import WindowLayout
from kvdrive_jax.window.measure import profile_of
from kvdrive_jax.window.profile import write_profile
from kvdrive_jax.window.replay import BELADY, next_uses, replay
from kvdrive_jax.window.trace import Trace, TraceInfo, read_traces, with_budget, write_traces
from tests.tiny import CharacterTokenizer, random_prompt, tiny_model

MODEL = tiny_model()
TOKENIZER: Any = CharacterTokenizer()
PROMPTS = [random_prompt(n, seed=n) for n in (403, 150)]
NEW = 90
RETRIEVAL = RetrievalConfig(budget=64, flush_tokens=32)


@contextmanager
def fetched_chunks() -> Iterator[list[np.ndarray[Any, Any]]]:
    """The miss list of every fetch, [B, K, P] chunk ids, in the order of layers and steps."""
    seen: list[np.ndarray[Any, Any]] = []
    real = Fetcher.gather

    def gather(self: Fetcher, layer: int, sessions: Any, missing: Any, *rest: Any) -> Any:
        seen.append(np.array(missing[0]))
        return real(self, layer, sessions, missing, *rest)

    with patch.object(Fetcher, "gather", gather):
        yield seen


def record(window: WindowConfig, **config: Any) -> tuple[list[Trace], Any, list[Any], Any]:
    """Traces of PROMPTS, the plan, what was fetched, and the generations' tokens."""
    recorder = TraceRecorder("tiny")
    whole = PipelineConfig(schedule="sequential")  # one miss list for the whole batch
    settings = KVDriveConfig(retrieval=RETRIEVAL, window=window, pipeline=whole, **config)
    with Engine(MODEL, TOKENIZER, settings) as engine, fetched_chunks() as fetched:
        plan = engine.plan([len(prompt) for prompt in PROMPTS], NEW)
        events = engine.stream_ids(PROMPTS, max_new_tokens=NEW, ignore_eos=True, recorder=recorder)
        done = {e.session: e.generation.token_ids for e in events if e.generation is not None}
    return recorder.take(), plan, fetched, done


# Runs that several tests look at, and none changes.
recorded = functools.cache(record)


@pytest.fixture(scope="module")
def profile_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    traces, *_ = recorded(WindowConfig(multiple=2))
    profile = profile_of(traces[0], "smoothed")
    # So that windows of no size, of one and of several occur.
    hits = np.array(profile.hits)
    hits[0, 0, 1:] = 0.0
    hits[2, 1] *= 5
    path = tmp_path_factory.mktemp("profile") / "tiny.json"
    write_profile(dataclasses.replace(profile, hits=hits), path)
    return str(path)


def check_same(traces: list[Trace], plan: Any, fetched: list[Any], eviction: str) -> None:
    """Every miss of the engine is one of the replay's, step by step, layer by layer."""
    layers = MODEL.config.num_layers
    assert len(traces) == len(PROMPTS)
    for row, trace in enumerate(traces):
        assert trace.steps == NEW - 1
        result = replay(trace, plan.layout, eviction)
        engine = np.array([misses[row] >= 0 for misses in fetched]).sum(axis=-1)
        engine = engine.reshape(-1, layers, trace.kv_heads)
        np.testing.assert_array_equal(result.missed, engine)
        np.testing.assert_array_equal(result.selected, (trace.selection >= 0).sum(axis=-1))
        chosen = set(zip(*np.nonzero(engine), strict=True))
        for step, layer, head in list(chosen)[:50]:
            missing = fetched[step * layers + layer][row, head]
            assert set(missing[missing >= 0]) <= set(trace.selection[step, layer, head])


@pytest.mark.parametrize("eviction", POLICIES)
def test_replay_equals_the_engine(eviction: Any) -> None:
    """Through warm-up, flushes, and a batch whose sessions have different lengths."""
    multiple = None if eviction in ("none", "last-step") else 1.7
    traces, plan, fetched, _ = record(WindowConfig(multiple=multiple, eviction=eviction))
    check_same(traces, plan, fetched, eviction)


def test_windows_by_layer_and_head_change_no_token(profile_file: str) -> None:
    uniform, _, _, wanted = recorded(WindowConfig(multiple=2))
    window = WindowConfig(multiple=2, profile=profile_file)
    traces, plan, fetched, made = record(window)
    slots = np.array(plan.layout.slots)
    assert len(set(slots.ravel().tolist())) > 1
    assert plan.layout.rows <= slots.size * 2 * plan.shape.selected
    check_same(traces, plan, fetched, "smoothed")
    assert made == wanted
    for a, b in zip(traces, uniform, strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)


def test_tracing_is_the_same_with_everything_in_hbm() -> None:
    tiered, _, _, wanted = record(WindowConfig(multiple=1))
    resident, plan, fetched, made = recorded(WindowConfig())
    assert plan.resident
    assert not fetched
    assert made == wanted
    for a, b in zip(tiered, resident, strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.warm, b.warm)
        np.testing.assert_allclose(a.scores, b.scores, rtol=1e-4, atol=1e-4)


def test_attending_to_the_whole_window_is_full_attention_where_it_holds_everything() -> None:
    _, _, _, wanted = recorded(WindowConfig())
    *_, resident = record(WindowConfig(attend="resident"))
    with Engine(MODEL, TOKENIZER, KVDriveConfig(method="full")) as engine:
        full = {
            e.session: e.generation.token_ids
            for e in engine.stream_ids(PROMPTS, max_new_tokens=NEW, ignore_eos=True)
            if e.generation is not None
        }
    assert resident == full
    assert wanted != full  # else the budget would have been no restriction


def test_attending_to_the_window_counts_what_is_attended_to() -> None:
    for multiple in (0, 2):
        window = WindowConfig(multiple=multiple, attend="resident")
        settings = KVDriveConfig(retrieval=RETRIEVAL, window=window)
        with Engine(MODEL, TOKENIZER, settings) as engine:
            for _ in engine.stream_ids(PROMPTS[:1], max_new_tokens=2, ignore_eos=True):
                pass
            mean = engine.stats()["sessions"][0]["attended_tokens_mean"]
        near = len(PROMPTS[0]) - 4 * ((len(PROMPTS[0]) - 68) // 4)
        assert mean == near + 1 + 64 * max(multiple, 1)


def random_trace(seed: int, *, steps: int = 60, depth: int | None = None) -> Trace:
    """Scores that drift, so that selections overlap from step to step."""
    rng = np.random.default_rng(seed)
    layers, heads, chunks, selected = 2, 3, 37, 5
    noise = rng.standard_normal((steps, layers, heads, chunks))
    scores = np.zeros_like(noise)
    for step in range(1, steps):
        scores[step] = 0.8 * scores[step - 1] + noise[step]
    scores = scores.astype(np.float32)
    ids = np.argsort(-scores, axis=-1, kind="stable")[..., : depth or chunks].astype(np.int32)
    warm = np.argsort(rng.random((layers, heads, chunks)), axis=-1)[..., :20].astype(np.int32)
    info = TraceInfo(
        model="random",
        digest="d",
        text="noise",
        prompt_tokens=4 * chunks,
        chunk_size=4,
        selected=selected,
        chunk_capacity=chunks,
        page_bytes=256,
        index="moments",
        group_rule="softmax-sum",
    )
    return Trace(info=info, ids=ids, scores=np.take_along_axis(scores, ids, -1), warm=warm)


@pytest.mark.parametrize("slots", [5, 8, 13, 30])
def test_nothing_beats_knowing_the_future(slots: int) -> None:
    for seed in range(4):
        trace = random_trace(seed)
        layout = WindowLayout.uniform(2, 3, slots, 5)
        best = replay(trace, layout, BELADY).missed.sum(axis=0)
        for eviction in ("smoothed", "lookahead", "lru", "lfu", "fifo"):
            assert (best <= replay(trace, layout, eviction).missed.sum(axis=0)).all()


def test_belady_is_what_an_exhaustive_search_finds() -> None:
    """Three chunks' worth of window, two selected a step: every choice of victims is tried."""
    trace = random_trace(11, steps=9)
    small = dataclasses.replace(trace, ids=trace.ids % 6, warm=trace.warm[..., :0])
    order = [[dict.fromkeys(head) for head in layer] for step in small.ids for layer in step]
    ids = np.array([[list(head)[:2] for head in layer] for layer in order], np.int32)
    ids = ids.reshape(9, 2, 3, 2)
    info = dataclasses.replace(trace.info, selected=2, chunk_capacity=6)
    small = Trace(info=info, ids=ids, scores=np.zeros(ids.shape, np.float32), warm=small.warm)
    result = replay(small, WindowLayout.uniform(2, 3, 3, 2), BELADY)
    for layer, head in np.ndindex(2, 3):
        states = {frozenset(): 0}
        for step in range(9):
            wanted = frozenset(ids[step, layer, head].tolist())
            after: dict[frozenset[int], int] = {}
            for held, misses in states.items():
                cost = misses + len(wanted - held)
                for kept in [(), *((chunk,) for chunk in held - wanted)]:
                    state = wanted | frozenset(kept)
                    after[state] = min(cost, after.get(state, 999))
            states = after
        assert result.missed[:, layer, head].sum() == min(states.values())


def test_next_uses() -> None:
    selection = np.array([[3, 1], [1, 2], [3, 1]], np.int32).reshape(3, 1, 1, 2)
    first, after = next_uses(selection, 5)
    assert first.tolist() == [[[3, 0, 1, 0, 3]]]
    assert after.reshape(3, 2).tolist() == [[2, 1], [2, 3], [3, 3]]


def test_a_shallow_trace_is_enough_for_policies_without_scores() -> None:
    deep, shallow = random_trace(5), random_trace(5, depth=6)
    layout = WindowLayout.uniform(2, 3, 9, 5)
    for eviction in ("lru", "lfu", "fifo", BELADY):
        a, b = (replay(trace, layout, eviction).missed for trace in (deep, shallow))
        np.testing.assert_array_equal(a, b)
    assert abs(replay(deep, layout, "lookahead").hit_rate - 0.7) < 0.3


def test_traces_come_back_from_their_file(tmp_path: Path) -> None:
    traces = [random_trace(1), random_trace(2, depth=7)]
    write_traces(traces, tmp_path / "t.npz")
    for a, b in zip(read_traces(tmp_path / "t.npz"), traces, strict=True):
        assert a.info == b.info
        for name in ("ids", "scores", "warm"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert [path.name for path in tmp_path.iterdir()] == ["t.npz"]


def test_files_that_are_no_trace_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    with pytest.raises(ValueError, match="no such file"):
        read_traces(path)
    path.write_bytes(b"not a zip")
    with pytest.raises(ValueError, match=r"trace .*t.npz cannot be used"):
        read_traces(path)
    write_traces([random_trace(1)], path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cannot be used"):
        read_traces(path)
    path.write_bytes(whole)
    with np.load(path) as arrays:
        kept = dict(arrays)
    for change, why in (
        ({"header": np.array(json.dumps({"version": 9, "traces": []}))}, "version must be 1"),
        ({"ids0": kept["ids0"] + 100}, "ids must be chunks below 37"),
        ({"scores0": kept["scores0"][:3]}, "ids and scores must be"),
        ({"warm0": kept["warm0"][:1]}, "warm must be"),
        ({"ids0": np.array([{}], object)}, "cannot be used"),
    ):
        np.savez(path, **{**kept, **change})
        with pytest.raises(ValueError, match=why):
            read_traces(path)


def test_another_budget_is_refused_where_the_trace_does_not_tell_it() -> None:
    trace = random_trace(3, depth=9)
    assert with_budget(trace, 28).info.selected == 7
    with pytest.raises(ValueError, match="budget must be at most 36 tokens"):
        with_budget(trace, 40)


def test_bad_calls_are_refused() -> None:
    trace = random_trace(3)
    with pytest.raises(ValueError, match="eviction must be one of"):
        replay(trace, WindowLayout.uniform(2, 3, 9, 5), "mru")
    with pytest.raises(ValueError, match="2 layers and 3 kv heads"):
        replay(trace, WindowLayout.uniform(3, 2, 9, 5), "lru")
    with pytest.raises(ValueError, match="selection of 5 chunks"):
        replay(trace, WindowLayout.uniform(2, 3, 9, 4), "lru")
    with pytest.raises(ValueError, match="at least 1 budget"):
        TraceRecorder("m", 0.5)
    with (
        Engine(MODEL, TOKENIZER, KVDriveConfig(method="full")) as engine,
        pytest.raises(NotImplementedError, match="method full has none"),
    ):
        engine.stream_ids(PROMPTS, recorder=TraceRecorder("m"))
