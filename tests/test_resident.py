"""Bursts of the resident step: the tokens of single steps, whatever ends a session and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.probes import single_steps
from kvdrive_jax import batch
from kvdrive_jax.config import KVDriveConfig, RetrievalConfig
from kvdrive_jax.engine import Engine
from kvdrive_jax.methods import kvdrive_burst
from kvdrive_jax.methods.base import Drawn
from kvdrive_jax.methods.kvdrive import KVDrive
from kvdrive_jax.models.model import Model
from kvdrive_jax.pipeline import resident
from kvdrive_jax.pipeline.recorder import TraceRecorder
from kvdrive_jax.sampling import SamplingConfig
from kvdrive_jax.session import Generation
from tests.tiny import CharacterTokenizer, random_prompt, tiny_model

MODEL = tiny_model(layers=2)
TOKENIZER: Any = CharacterTokenizer()
RAGGED = [random_prompt(n, seed=n) for n in (301, 133, 1)]
SPARSE = RetrievalConfig(budget=64, flush_tokens=32)
NOISY = SamplingConfig(temperature=1.0, top_k=40, top_p=0.95, seed=3)


def generate(
    new_tokens: int = 100,
    *,
    prompts: Sequence[Sequence[int]] = RAGGED,
    model: Model = MODEL,
    **options: Any,
) -> tuple[list[Generation], dict[str, Any]]:
    """Generations without what differs between two runs, and the statistics."""
    with Engine(model, TOKENIZER, KVDriveConfig(retrieval=SPARSE)) as engine:
        events = engine.stream_ids(prompts, max_new_tokens=new_tokens, **options)
        ended = [event.generation for event in events if event.generation is not None]
        stats = engine.stats()
    for generation in ended:
        generation.stats.pop("ttft_s")
    return ended, stats


@contextmanager
def bursts() -> Iterator[list[int]]:
    """Steps of every burst; all that are asked for are as long as they may be."""
    lengths: list[int] = []
    real = KVDrive.burst

    def burst(self: KVDrive, draws: Any, limit: int) -> Drawn | None:
        drawn = real(self, draws, limit)
        assert drawn is not None
        lengths.append(len(drawn.tokens))
        return drawn

    with (
        patch.object(KVDrive, "burst", burst),
        patch.object(batch.Pace, "took", lambda self, *_: setattr(self, "steps", 1000)),
    ):
        yield lengths


@pytest.mark.parametrize("unrolled", [False, True])
def test_bursts_give_the_tokens_and_the_counts_of_single_steps(unrolled: bool) -> None:
    with single_steps():
        expected, stats = generate(ignore_eos=True)
    with ExitStack() as stack:
        if unrolled:  # as on a GPU
            for module in (resident, kvdrive_burst):
                stack.enter_context(patch.object(module, "scans", lambda: False))
        lengths = stack.enter_context(bursts())
        got, again = generate(ignore_eos=True)
    assert got == expected
    # 99 steps; each session is flushed when its own buffer is full, and no burst crosses that.
    assert sum(lengths) == 99
    assert max(lengths) == resident.MOST_STEPS
    assert again["bytes"] == stats["bytes"]


def test_sessions_that_draw_an_end_leave_the_others_alone() -> None:
    with single_steps():
        expected, _ = generate(sampling=NOISY)
    with bursts() as lengths:
        got, _ = generate(sampling=NOISY)
    assert got == expected
    ends = [len(generation.token_ids) for generation in got]
    assert {generation.finish_reason for generation in got} == {"eos"}
    # A burst ends with the last session, though it could have gone on.
    assert sum(lengths) == max(ends) < 99
    compiled = resident.resident_burst._cache_size()
    other, _ = generate(sampling=replace(NOISY, seed=4, temperature=0.8))
    assert other != got
    assert resident.resident_burst._cache_size() == compiled


def test_what_the_host_ends_within_a_burst_is_dropped_from_there() -> None:
    plain, _ = generate(ignore_eos=True)
    stop = plain[0].text[41:45]
    with single_steps():
        expected, _ = generate(ignore_eos=True, stop=[stop])
    with bursts():
        got, _ = generate(ignore_eos=True, stop=[stop])
        assert got == expected
        assert "stop" in {generation.finish_reason for generation in got}
        with Engine(MODEL, TOKENIZER, KVDriveConfig(retrieval=SPARSE)) as engine:
            stream: Any = engine.stream_ids(RAGGED, max_new_tokens=100, ignore_eos=True)
            for _ in range(60):
                next(stream)
            stream.close()
            counted = [session["new_tokens"] for session in engine.stats()["sessions"]]
    # Cancelled between two steps of a burst: what was drawn beyond is not counted.
    assert counted == [20, 20, 20]


def test_as_many_tokens_as_asked_for() -> None:
    new_tokens = batch.BURST_FROM
    with bursts() as lengths:
        got, stats = generate(new_tokens, ignore_eos=True)
    assert [len(generation.token_ids) for generation in got] == [new_tokens] * len(RAGGED)
    assert sum(lengths) == new_tokens - 1
    assert stats["decode_s"] > 0
    assert {session["finish_reason"] for session in stats["sessions"]} == {"length"}


def poisoned(token: int) -> Model:
    """A model that fails when it goes through a token."""
    ends = list(MODEL.ends)
    at = MODEL.ends_def.names.index("embedding")
    ends[at] = ends[at].at[token].set(jnp.nan)
    return replace(MODEL, ends=tuple(ends))


def test_logits_that_are_not_finite_end_a_session_and_no_other() -> None:
    few = [[1 + token % 9 for token in prompt] for prompt in RAGGED]
    plain, _ = generate(prompts=few, ignore_eos=True)
    drawn = [generation.token_ids for generation in plain]
    # A token that only one session goes through, some time after its prompt.
    token = next(
        token
        for row, tokens in enumerate(drawn)
        for token in tokens
        if token > 9 and all(token not in other for other in drawn[:row] + drawn[row + 1 :])
    )
    model = poisoned(token)
    with single_steps():
        expected, _ = generate(prompts=few, model=model, ignore_eos=True)
    with bursts():
        got, _ = generate(prompts=few, model=model, ignore_eos=True)
    assert got == expected
    assert [generation.finish_reason for generation in got].count("error") == 1


@pytest.mark.parametrize("few", [True, False])
def test_short_answers_and_recorded_ones_take_single_steps(few: bool) -> None:
    recorder = None if few else TraceRecorder("tiny")
    with patch.object(kvdrive_burst, "resident_burst", side_effect=AssertionError):
        generate(10 if few else 70, ignore_eos=True, recorder=recorder)


def test_pace_ignores_the_burst_that_may_have_compiled() -> None:
    pace = batch.Pace()
    taken: list[int] = []
    for seconds, steps in ((9.0, 1), (0.02, 1), (0.1, 5), (3.0, 4)):
        pace.took(seconds, steps)
        taken.append(pace.steps)
    assert taken == [1, 5, 5, 1]


def test_padded_eos_has_one_length_for_a_few_tokens() -> None:
    def check(tokens: Sequence[int], expected: Sequence[int]) -> None:
        np.testing.assert_array_equal(resident.padded_eos(tokens), expected)

    check([], [-1] * 8)
    check([7, 3], [3, 7] + [-1] * 6)
    check(range(8), range(8))
    check(range(9), [*range(9)] + [-1] * 7)
