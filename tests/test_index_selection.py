"""Selection of chunks from scores, the group rules, and importance."""

from __future__ import annotations

from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from kvdrive_jax.index.selection import importance, select
from kvdrive_jax.pallas.scoring.reference import GROUP_RULES, combine_group

jitted_select = jax.jit(select, static_argnums=2)


def expected_selection(scores: np.ndarray, n_chunks: int, count: int) -> list[int]:
    order = sorted(range(min(n_chunks, len(scores))), key=lambda j: (-scores[j], j))[:count]
    return order + [-1] * (count - len(order))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(1, 1, 1, 1), (2, 3, 17, 5), (1, 2, 8, 20), (2, 1, 33, 33), (1, 1, 0, 3)]),
    st.sampled_from(["continuous", "few", "zeros", "equal", "infinite"]),
    st.integers(0, 10_000),
)
def test_exact_set_and_order_with_ties_to_the_lowest_id(
    shape: tuple[int, int, int, int], kind: str, seed: int
) -> None:
    batch, heads, chunks, count = shape
    rng = np.random.default_rng(seed)
    size = (batch, heads, chunks)
    scores = {
        "continuous": rng.standard_normal(size),
        "few": rng.integers(-1, 2, size) * 0.5,
        "zeros": np.where(rng.random(size) < 0.5, -0.0, 0.0),
        "equal": np.full(size, 3.25),
        "infinite": rng.choice([-np.inf, np.inf, 0.0, np.finfo(np.float32).max], size),
    }[kind].astype(np.float32)
    n_chunks = rng.integers(0, chunks + 1, batch).astype(np.int32)
    ids = np.asarray(jitted_select(jnp.asarray(scores), jnp.asarray(n_chunks), count))
    assert ids.shape == (batch, heads, count)
    assert ids.dtype == np.int32
    for b, k in np.ndindex(batch, heads):
        assert ids[b, k].tolist() == expected_selection(scores[b, k], n_chunks[b], count)


def test_padding_is_never_selected_however_high_it_scores() -> None:
    scores = jnp.array([[[0.0, -5.0, np.inf, 9.0]]], jnp.float32)
    assert np.asarray(select(scores, jnp.array([2]), 3)).tolist() == [[[0, 1, -1]]]
    assert np.asarray(select(scores, jnp.array([0]), 3)).tolist() == [[[-1, -1, -1]]]


def test_count_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="count must be at least 1 chunk, got 0"):
        select(jnp.zeros((1, 1, 4)), jnp.array([4]), 0)


@pytest.mark.parametrize("rule", GROUP_RULES)
@pytest.mark.parametrize("weighted", [False, True])
def test_group_rules_follow_their_definition(rule: str, weighted: bool) -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((2, 3, 5, 9)) * 3
    valid = rng.random((2, 3, 9)) < 0.7
    counts = rng.integers(1, 6, (2, 3, 9)) if weighted else np.ones((2, 3, 9), int)
    masked = np.where(valid[..., None, :], np.exp(logits), 0)
    softmax = masked / (masked * counts[..., None, :]).sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        expected = {
            "softmax-sum": np.log(softmax.sum(-2)),
            "softmax-max": np.log(softmax.max(-2)),
            "max": logits.max(-2),
            "mean": logits.mean(-2),
        }[rule]
    got = combine_group(
        jnp.asarray(logits, jnp.float32),
        jnp.asarray(valid),
        rule,  # type: ignore[arg-type]
        jnp.asarray(counts) if weighted else None,
    )
    np.testing.assert_allclose(got, np.where(valid, expected, -np.inf), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rule", GROUP_RULES)
def test_scores_far_below_the_best_stay_apart(rule: str) -> None:
    # In the linear domain everything but the first would underflow to the same 0.
    logits = jnp.array([[[500.0, 10.0, 20.0, -300.0], [400.0, 10.0, 30.0, -310.0]]], jnp.float32)
    got = combine_group(logits, jnp.ones((1, 4), bool), rule)  # type: ignore[arg-type]
    assert np.argsort(-np.asarray(got[0])).tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize("rule", GROUP_RULES)
def test_nothing_valid_gives_no_nan(rule: str) -> None:
    got = combine_group(jnp.zeros((1, 2, 3)), jnp.zeros((1, 3), bool), rule)  # type: ignore[arg-type]
    assert np.all(np.asarray(got) == -np.inf)


def test_unknown_group_rule_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="softmax-sum, softmax-max, max, mean; got 'sum'"):
        combine_group(jnp.zeros((1, 1, 1)), jnp.ones((1, 1), bool), "sum")  # type: ignore[arg-type]


def plain_importance(
    queries: np.ndarray, keys: np.ndarray, length: int, sink: int, c: int, n: int
) -> np.ndarray:
    heads, width, dim = queries.shape
    group = heads // keys.shape[0]
    mass = np.zeros(keys.shape[:2])
    for h in range(heads):
        for w in range(width):
            at = length - width + w
            if at < 0:
                continue
            logits = keys[h // group, : at + 1] @ queries[h, w] / np.sqrt(dim)
            weights = np.exp(logits - logits.max())
            mass[h // group, : at + 1] += weights / weights.sum()
    return mass[:, sink : sink + n * c].reshape(keys.shape[0], n, c).sum(-1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "width", "length", "tokens", "block"),
    [
        (3, 1, 80, 8, 50, 50, 16),
        (6, 2, 64, 32, 90, 128, 4096),
        (4, 4, 96, 32, 12, 33, 7),
        (2, 1, 64, 4, 1, 40, 8),
    ],
)
def test_importance_is_the_attention_of_the_last_queries(
    heads: int, kv_heads: int, dim: int, width: int, length: int, tokens: int, block: int
) -> None:
    rng = np.random.default_rng(length)
    queries = rng.standard_normal((heads, width, dim)).astype(np.float32)
    keys = rng.standard_normal((kv_heads, tokens, dim)).astype(np.float32)
    keys[:, length:] = 1e4  # padding must not matter
    sink, c, capacity = 4, 4, 40
    n = max(0, (length - sink - 8) // c)
    run = jax.jit(
        partial(importance, sink=sink, chunk_size=c, chunk_capacity=capacity, block=block)
    )
    got = np.asarray(run(jnp.asarray(queries), jnp.asarray(keys), length, n))
    assert got.shape == (kv_heads, capacity)
    expected = plain_importance(queries, keys[:, :length], length, sink, c, n)
    np.testing.assert_allclose(got[:, :n], expected, rtol=1e-4, atol=1e-6)
    assert np.all(got[:, n:] == 0)


def test_importance_is_finite_for_huge_keys() -> None:
    keys = jnp.full((1, 32, 64), jnp.finfo(jnp.float32).max).at[:, ::2].multiply(-1)
    queries = jnp.full((2, 8, 64), jnp.finfo(jnp.float32).max)
    got = importance(queries, keys, 32, 5, sink=4, chunk_size=4, chunk_capacity=6)
    assert np.all(np.isfinite(np.asarray(got)))


def test_importance_needs_whole_groups() -> None:
    with pytest.raises(ValueError, match="multiple of kv heads, got 3 and 2"):
        importance(
            jnp.zeros((3, 1, 8)), jnp.zeros((2, 4, 8)), 4, 0, sink=0, chunk_size=1, chunk_capacity=1
        )
