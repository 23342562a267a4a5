"""Schedules, micro-batches and ways of the miss list change when things run, never the tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrive_jax import Engine, KVDriveConfig, PipelineConfig, RetrievalConfig, WindowConfig
from kvdrive_jax.methods.kvdrive import KVDrive
from kvdrive_jax.methods.kvdrive_tiers import BatchTiers
from kvdrive_jax.pipeline.parts import Arrangement, Cohort, MicroBatch, candidates, cut
from kvdrive_jax.pipeline.scheduler import run_layers
from kvdrive_jax.tiers.link import Link, Links
from kvdrive_jax.tiers.pages import PageError
from kvdrive_jax.tiers.session_pages import SessionPages
from tests.tiny import CharacterTokenizer, compiles, random_prompt, tiny_model

MODEL = tiny_model()
TOKENIZER: Any = CharacterTokenizer()
RAGGED = [random_prompt(n, seed=n) for n in (401, 1, 233)]
NEW = 24


def decode(
    pipeline: PipelineConfig,
    *,
    links: Links | None = None,
    window: float = 1,
    prompts: Sequence[Any] = RAGGED,
    ignore_eos: bool = True,
    **tiers: Any,
) -> tuple[list[tuple[int, ...]], dict[str, Any]]:
    """Tokens of a batch of all prompts, and the statistics."""
    config = KVDriveConfig(
        batch_size=len(prompts),
        retrieval=RetrievalConfig(budget=48, flush_tokens=16),
        window=WindowConfig(multiple=window),
        pipeline=pipeline,
        **tiers,
    )
    with Engine(MODEL, TOKENIZER, config, links=links) as engine:
        done = {
            event.session: event.generation.token_ids
            for event in engine.stream_ids(prompts, max_new_tokens=NEW, ignore_eos=ignore_eos)
            if event.generation is not None
        }
        stats = engine.stats()
        for tier in ("dram", "ssd"):
            assert engine._ledger.accounts(tier) == {}
    return [done[number] for number in range(len(prompts))], stats


@functools.cache
def expected() -> tuple[list[tuple[int, ...]], dict[str, Any]]:
    return decode(PipelineConfig(schedule="sequential"))


@pytest.mark.parametrize(
    "pipeline",
    [
        PipelineConfig(micro_batch=2),
        PipelineConfig(micro_batch=1, cohorts=2, miss_list="callback"),
        PipelineConfig(micro_batch=1, cohorts=3),
    ],
    ids=str,
)
def test_micro_batches_change_no_token(pipeline: PipelineConfig) -> None:
    tokens, stats = decode(pipeline)
    same, before = expected()
    assert tokens == same
    for session, other in zip(stats["sessions"], before["sessions"], strict=True):
        assert session["hit_rate"] == other["hit_rate"]
    assert stats["bytes"] == before["bytes"]
    assert stats["bytes"]["dram_to_hbm"] > 0


def test_a_slow_link_changes_no_token() -> None:
    links = Links(dram_to_hbm=Link(bytes_per_s=2e8, latency_s=1e-4))
    tokens, _ = decode(PipelineConfig(micro_batch=2), links=links)
    assert tokens == expected()[0]


def test_sessions_leave_when_they_end() -> None:
    """Each at another step: the end-of-text tokens are those that it would make anyway."""
    same = expected()[0]
    ends = {tokens[3 + 4 * row] for row, tokens in enumerate(same)}
    with patch.object(Engine, "model_eos", lambda _: frozenset(ends)):
        tokens, _ = decode(PipelineConfig(micro_batch=2, cohorts=2), ignore_eos=False)
    for mine, whole in zip(tokens, same, strict=True):
        stop = next((at for at, token in enumerate(whole) if token in ends), NEW - 1)
        assert mine == whole[: stop + 1] or mine == whole[:stop]
    assert min(map(len, tokens)) < NEW - 1


def test_arranging_between_steps_changes_no_token() -> None:
    """Every step another arrangement, flushes in between; nothing of a shape compiles twice."""
    real, seen = KVDrive.layers, []

    def layers(self: KVDrive, hidden: Any) -> Any:
        every = self.arrangements()
        seen.append(every[len(seen) % len(every)])
        self.arrange(seen[-1])
        return real(self, hidden)

    with patch.object(KVDrive, "layers", layers):
        tokens, _ = decode(PipelineConfig())
        first, seen[:] = len(set(seen)), []
        with compiles() as compiled:
            again, _ = decode(PipelineConfig())
    assert tokens == again == expected()[0]
    assert first > 3
    assert compiled == []


def test_an_arrangement_that_is_none_is_refused() -> None:
    with (
        patch.object(KVDrive, "layers", lambda self, _: self.arrange(Arrangement(3, 5))),
        pytest.raises(ValueError, match="arrangement must be one of"),
    ):
        decode(PipelineConfig())


def test_speculative_selects_by_the_layer_before() -> None:
    """Other tokens where it selects; the same where everything is in the windows and attended."""
    tokens, stats = decode(PipelineConfig(schedule="speculative", micro_batch=2))
    assert stats["bytes"]["dram_to_hbm"] > 0
    assert [len(t) for t in tokens] == [len(t) for t in expected()[0]]
    # The first token follows from the prompt alone.
    assert [t[0] for t in tokens] == [t[0] for t in expected()[0]]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 6))
def test_cuts_cover_the_batch(batch: int, micro_batch: int, cohorts: int) -> None:
    made = cut(batch, Arrangement(micro_batch, cohorts))
    parts = [part for cohort in made for part in cohort.micro_batches]
    assert [row for part in parts for row in range(part.first, part.last)] == list(range(batch))
    assert [part.number for part in parts] == list(range(len(parts)))
    assert len(made) == min(cohorts, batch)
    for cohort in made:
        assert (cohort.micro_batches[0].first, cohort.micro_batches[-1].last) == (
            cohort.first,
            cohort.last,
        )
        sizes = [part.last - part.first for part in cohort.micro_batches]
        assert max(sizes) <= micro_batch
        assert min(sizes) >= max(sizes) - 1
        assert min(sizes) >= 1


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 33))
def test_candidates_are_few_and_fit(batch: int) -> None:
    found = candidates(batch)
    assert Arrangement(batch) in found
    assert len(found) <= 2 * (batch.bit_length() + 1)
    assert all(1 <= one.micro_batch <= batch and one.cohorts <= min(2, batch) for one in found)
    assert candidates(batch, micro_batch=2, cohorts=1) == [Arrangement(min(2, batch))]


class _Recorded:
    """Stages that only say in which order they were asked; fetches land after some waits."""

    def __init__(self, waits: Sequence[int]) -> None:
        self.said: list[tuple[str, int, int]] = []
        self.hidden: dict[tuple[int, int], int] = {}
        self._waits, self._begun = list(waits), 0

    def select(self, layer: int, part: MicroBatch, hidden: int) -> list[int]:
        self.said.append(("select", layer, part.number))
        self.hidden[layer, part.number] = hidden
        self._begun += 1
        return [self._waits[self._begun % len(self._waits)], layer, part.number]

    def advance(self, fetch: list[int]) -> bool:
        if fetch[0] == 1:
            fetch[0] = 0
            self.said.append(("land", fetch[1], fetch[2]))
            return True
        return False

    def landed(self, fetch: list[int]) -> bool:
        return fetch[0] == 0

    def compute(self, layer: int, cohort: Cohort, hidden: int, fetches: Sequence[Any]) -> int:
        assert all(self.landed(fetch) for fetch in fetches)
        assert [fetch[2] for fetch in fetches] == [part.number for part in cohort.micro_batches]
        self.said.append(("compute", layer, cohort.number))
        return hidden + 1

    def wait(self, fetches: Sequence[list[int]]) -> None:
        assert fetches, "waits for nothing"
        for fetch in fetches:
            fetch[0] = max(fetch[0] - 1, 1) if fetch[0] else 0


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 4),
    st.lists(st.integers(0, 5), min_size=1, max_size=7),
    st.booleans(),
)
def test_schedules_keep_the_order_of_what_depends(
    batch: int, micro_batch: int, cohorts: int, layers: int, waits: list[int], speculative: bool
) -> None:
    stages = _Recorded(waits)
    made = cut(batch, Arrangement(micro_batch, cohorts))
    ends = run_layers(stages, made, layers, [0] * len(made), speculative=speculative)
    assert ends == [layers] * len(made)
    # By the input of its own layer, or of the one before.
    for (layer, _), hidden in stages.hidden.items():
        assert hidden == (max(layer - 1, 0) if speculative else layer)
    parts = sum(len(cohort.micro_batches) for cohort in made)
    assert len(stages.hidden) == layers * parts
    assert len(set(stages.said)) == len(stages.said)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"schedule": "fast"}, "schedule must be one of"),
        ({"micro_batch": 0}, "micro_batch must be a positive integer, got 0"),
        ({"cohorts": -1}, "cohorts must be a positive integer"),
        ({"miss_list": "mail"}, "miss_list must be one of"),
    ],
)
def test_what_is_no_pipeline_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PipelineConfig(**values)


def test_speculation_has_no_estimate() -> None:
    with pytest.raises(ValueError, match="estimate must be none with schedule speculative"):
        KVDriveConfig(
            retrieval=RetrievalConfig(estimate="chunks"),
            pipeline=PipelineConfig(schedule="speculative"),
        )


def test_speculation_has_windows() -> None:
    with pytest.raises(ValueError, match="window must be above 0 everywhere with schedule specul"):
        decode(PipelineConfig(schedule="speculative"), window=0)


def test_sessions_that_fail_together_all_end() -> None:
    """Two of a micro-batch lose their pages in one gather; the third goes on as ever."""
    real, asked = SessionPages.gather, [0, 0, 0]

    def gather(self: SessionPages, layer: int, head: Any, chunk: Any, target: Any) -> Any:
        row = int(self.name)
        asked[row] += layer == 0
        if row != 1 and asked[row] >= 4:
            target[:] = 0
            raise PageError("lost", session=self.name, layer=layer)
        return real(self, layer, head, chunk, target)

    prompts = [*RAGGED[::2], RAGGED[0]]
    whole, _ = decode(PipelineConfig(), prompts=prompts)
    config = KVDriveConfig(
        batch_size=3,
        retrieval=RetrievalConfig(budget=48, flush_tokens=16),
        window=WindowConfig(multiple=1),
    )
    with (
        patch.object(SessionPages, "gather", gather),
        Engine(MODEL, TOKENIZER, config) as engine,
    ):
        ended = {
            event.session: event.generation
            for event in engine.stream_ids(prompts, max_new_tokens=NEW, ignore_eos=True)
            if event.generation is not None
        }
    assert [ended[row].finish_reason for row in range(3)] == ["error", "length", "error"]
    assert ended[1].token_ids == whole[1]


def test_what_prefill_lost_is_an_error_where_nothing_is_generated() -> None:
    def wait(self: BatchTiers) -> None:
        self._failed[1] = "lost"

    config = KVDriveConfig(
        batch_size=3,
        retrieval=RetrievalConfig(budget=48, flush_tokens=16),
        window=WindowConfig(multiple=1),
    )
    with patch.object(BatchTiers, "wait", wait), Engine(MODEL, TOKENIZER, config) as engine:
        events = engine.stream_ids(RAGGED, max_new_tokens=0)
        ended = {e.session: e.generation for e in events if e.generation is not None}
    assert [ended[row].finish_reason for row in range(3)] == ["length", "error", "length"]
    assert ended[1].error == "lost"


def test_a_fetch_that_cannot_be_submitted_leaves_nothing_waiting() -> None:
    """As when Ctrl-C comes at that moment: closing must not wait for it."""
    real, calls = ThreadPoolExecutor.submit, [0]

    def submit(self: Any, *args: Any, **more: Any) -> Any:
        if self._thread_name_prefix == "kvdrive-fetch":
            calls[0] += 1
            if calls[0] == 3:
                raise KeyboardInterrupt
        return real(self, *args, **more)

    with (
        patch.object(ThreadPoolExecutor, "submit", submit),
        pytest.raises(KeyboardInterrupt),
    ):
        decode(PipelineConfig(micro_batch=2))


def test_callbacks_of_a_closed_batch_are_dropped() -> None:
    from kvdrive_jax.pipeline.miss_lists import Bell, Callbacks, _deliver

    lists = Callbacks(Bell())
    ticket, missing = lists.ticket(3, 1), np.arange(4).reshape(2, 1, 1, 2)
    nothing: Any = (None, None)
    _deliver(ticket, missing)
    lists.ticket(3, 0)
    assert lists.arrived(3, 0, *nothing) is None
    arrived = lists.arrived(3, 1, *nothing)
    assert arrived is not None
    assert (arrived == missing).all()
    assert lists.arrived(3, 1, *nothing) is None
    lists.close()
    _deliver(ticket, missing)
    assert lists.arrived(3, 1, *nothing) is None
