"""Choosing tokens: the right distribution, reproducible, and each session on its own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from kvdrive_jax.sampling import SamplingConfig, all_finite, choose, nucleus, sample


def draw(logits: Any, config: SamplingConfig, sessions: Any = None, step: int = 0) -> list[int]:
    logits = jnp.asarray(logits, jnp.float32)
    sessions = jnp.arange(len(logits)) if sessions is None else jnp.asarray(sessions)
    steps = jnp.full(len(logits), step, jnp.int32)
    chosen = sample(logits, sessions, steps, config)
    assert chosen.shape == (len(logits),)
    assert chosen.dtype == jnp.int32
    return [int(token) for token in chosen]


def nucleus_by_sorting(p: npt.NDArray[np.float32], top_p: float) -> npt.NDArray[np.bool_]:
    kept = np.zeros(len(p), bool)
    mass = np.float32(0)
    for i in np.argsort(-p, kind="stable"):
        kept[i] = True
        mass += p[i]
        if mass >= np.float32(top_p):
            break
    return kept


def test_greedy_takes_the_largest_and_of_equals_the_lowest_id() -> None:
    logits = [[0, 3, 3, 1], [5, 5, 5, 5], [-4, -3, -2, -1], [-np.inf, -np.inf, 0, 0]]
    assert draw(logits, SamplingConfig()) == [1, 0, 3, 2]
    assert draw(logits, SamplingConfig(top_k=1, top_p=0.1, seed=9)) == [1, 0, 3, 2]


@pytest.mark.parametrize(
    "config",
    [
        SamplingConfig(temperature=0.5),
        SamplingConfig(temperature=1.0, top_k=3),
        SamplingConfig(temperature=1.0, top_p=0.8),
        SamplingConfig(temperature=2.0, top_k=4, top_p=0.7),
    ],
)
def test_frequencies_are_the_probabilities(config: SamplingConfig) -> None:
    logits = np.array([1.0, 0.0, 2.0, -1.0, 0.5, 2.0, 0.2], np.float32)
    p = np.exp(logits / config.temperature)
    if 0 < config.top_k < len(p):
        p[np.argsort(-p, kind="stable")[config.top_k :]] = 0
    p /= p.sum()
    if config.top_p < 1:
        p *= nucleus_by_sorting(p.astype(np.float32), config.top_p)
    p /= p.sum()
    n = 8000

    drawn = Counter(draw(np.tile(logits, (n, 1)), config))

    found = np.array([drawn[i] for i in range(len(p))]) / n
    assert not found[p == 0].any()
    # Six standard deviations of a binomial share.
    np.testing.assert_allclose(found, p, atol=6 * np.sqrt(0.25 / n))


def test_a_session_draws_the_same_whoever_is_beside_it(rng: np.random.Generator) -> None:
    config = SamplingConfig(temperature=1.5, top_k=20, top_p=0.95, seed=7)
    logits = rng.standard_normal((5, 300)).astype(np.float32)
    together = draw(logits, config, sessions=[4, 9, 2, 7, 30], step=11)
    assert draw(logits[3:4], config, [7], step=11) == [together[3]]
    mixed = [3, 0, 4, 1, 2]
    again = draw(logits[mixed], config, np.array([4, 9, 2, 7, 30])[mixed], step=11)
    assert again == [together[row] for row in mixed]


def test_streams_differ_between_sessions_steps_and_seeds() -> None:
    flat = np.zeros((64, 5000), np.float32)
    base = draw(flat, SamplingConfig(temperature=1.0))
    assert len(set(base)) > 50
    assert draw(flat, SamplingConfig(temperature=1.0)) == base
    assert draw(flat, SamplingConfig(temperature=1.0), step=1) != base
    assert draw(flat, SamplingConfig(temperature=1.0, seed=1)) != base
    assert draw(flat, SamplingConfig(temperature=1.0, seed=2**32 - 1)) != base


def test_top_k_and_top_p_change_a_draw_only_where_they_forbid_it(
    rng: np.random.Generator,
) -> None:
    logits = (3 * rng.standard_normal((40, 500))).astype(np.float32)
    free = draw(logits, SamplingConfig(temperature=1.0))
    best = np.argsort(-logits, axis=-1, kind="stable")[:, :10]
    for token, cut, allowed in zip(
        free, draw(logits, SamplingConfig(temperature=1.0, top_k=10)), best, strict=True
    ):
        assert cut in allowed
        assert cut == token or token not in allowed
    assert draw(logits, SamplingConfig(temperature=1.0, top_k=500)) == free


@pytest.mark.parametrize("vocab", [1, 2, 7, 401])
def test_nucleus_is_what_sorting_gives(vocab: int, rng: np.random.Generator) -> None:
    logits = 4 * rng.standard_normal((6, vocab))
    # Probabilities with few bits: sums are exact, whatever their order, and ties are common.
    p = np.round(np.exp(logits) * 64) + 1
    p = (p / 2.0 ** np.ceil(np.log2(p.sum(-1, keepdims=True)))).astype(np.float32)
    marked = jax.jit(nucleus)
    for top_p in (1e-6, 0.05, 0.5, 0.9, 0.999, 0.9999999):
        kept = np.asarray(marked(p, np.float32(top_p)))
        for row in range(len(p)):
            np.testing.assert_array_equal(kept[row], nucleus_by_sorting(p[row], top_p))


def test_nucleus_takes_equals_in_the_order_of_their_ids() -> None:
    p = jnp.array([[0.125, 0.25, 0.25, 0.125, 0.25]])
    marked = jax.jit(nucleus)
    kept = [np.asarray(marked(p, top_p))[0].tolist() for top_p in (0.25, 0.3, 0.75, 0.76)]
    assert kept == [
        [False, True, False, False, False],
        [False, True, True, False, False],
        [False, True, True, False, True],
        [True, True, True, False, True],
    ]


def test_extreme_temperatures_and_logits() -> None:
    logits = [[0.0, 1e30, -1e30, 5.0], [-3e4, -3e4 - 1, -np.inf, -np.inf]]
    assert draw(logits, SamplingConfig(temperature=1e-4)) == [1, 0]
    assert set(draw(logits, SamplingConfig(temperature=1e6, top_p=0.5))) <= {0, 1, 3}


def test_values_are_data_and_only_the_rule_is_compiled() -> None:
    choose.clear_cache()
    logits = np.zeros((2, 31), np.float32)
    for temperature, seed in ((0.5, 1), (0.9, 2), (1.7, 3)):
        draw(logits, SamplingConfig(temperature=temperature, top_p=temperature / 2, seed=seed))
    assert choose._cache_size() == 1


def test_works_inside_a_compiled_step(rng: np.random.Generator) -> None:
    config = SamplingConfig(temperature=0.7, top_k=5, top_p=0.9, seed=3)
    logits = jnp.asarray(rng.standard_normal((3, 50)), jnp.float32)
    ids, steps = jnp.arange(3), jnp.array([4, 5, 6])

    @jax.jit
    def step(logits: jax.Array, values: Any) -> jax.Array:
        return choose(logits, ids, steps, values, config.rule)

    inside = step(logits, config.values)
    np.testing.assert_array_equal(inside, sample(logits, ids, steps, config))


def test_rows_that_are_not_finite_are_named() -> None:
    logits = jnp.array([[0.0, 1.0], [jnp.nan, 1.0], [0.0, -jnp.inf], [2.0, 3.0]])
    assert np.asarray(all_finite(logits)).tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature: expected 0 .* got -0.1"),
        ({"temperature": 1e-9}, "temperature: .* got 1e-09"),
        ({"temperature": float("nan")}, "temperature: .* got nan"),
        ({"temperature": float("inf")}, "temperature: .* got inf"),
        ({"temperature": "hot"}, "temperature: .* got 'hot'"),
        ({"top_k": -1}, "top_k: expected 0 .* got -1"),
        ({"top_k": 2.5}, "top_k: .* got 2.5"),
        ({"top_k": True}, "top_k: .* got True"),
        ({"top_p": 0.0}, "top_p: expected a number above 0 .* got 0.0"),
        ({"top_p": 1.1}, "top_p: .* got 1.1"),
        ({"seed": -1}, "seed: expected an integer from 0 .* got -1"),
        ({"seed": 2**32}, "seed: .* got 4294967296"),
    ],
)
def test_bad_settings_are_refused_with_their_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**settings)
