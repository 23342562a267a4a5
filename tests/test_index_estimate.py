"""Estimating what is not selected."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvdrive_jax.index.estimate import estimate, unselected_counts
from kvdrive_jax.pallas.attention.reference import attend, combine


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 80), (3, 1, 64), (2, 2, 96)])
def test_one_key_per_group_is_exact_attention(heads: int, kv_heads: int, dim: int) -> None:
    rng = np.random.default_rng(dim)
    q, k, v = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((2, heads, dim), (2, kv_heads, 21, dim), (2, kv_heads, 21, dim))
    )
    counts = jnp.broadcast_to(jnp.arange(21) < jnp.array([[[21]], [[9]]]), k.shape[:3])
    got, expected = estimate(q, k, v, counts), attend(q, k, v, counts)
    for name in ("o", "l", "m"):
        np.testing.assert_allclose(
            getattr(got, name), getattr(expected, name), rtol=1e-4, atol=1e-4
        )


def test_equal_keys_are_exact_and_merge_with_exact_attention() -> None:
    rng = np.random.default_rng(1)
    mean = jnp.asarray(rng.standard_normal((1, 1, 5, 64)), jnp.float32)
    keys = jnp.repeat(mean, 4, axis=2)
    values = jnp.asarray(rng.standard_normal((1, 1, 20, 64)), jnp.float32)
    q = jnp.asarray(rng.standard_normal((1, 3, 64)), jnp.float32)
    everything = attend(q, keys, values, jnp.ones((1, 1, 20), bool))
    near = attend(q, keys, values, (jnp.arange(20) < 8)[None, None])
    means = values.reshape(1, 1, 5, 4, 64).mean(3)
    rest = estimate(q, mean, means, jnp.array([[[0, 0, 4, 4, 4]]]))
    np.testing.assert_allclose(combine(near, rest), combine(everything), rtol=1e-4, atol=1e-4)


def test_nothing_left_changes_nothing_and_anything_is_finite() -> None:
    q = jnp.full((1, 3, 64), 3e38)
    keys = jnp.full((1, 1, 4, 64), 3e38).at[:, :, ::2].multiply(-1)
    values = jnp.full((1, 1, 4, 64), 1e30)
    valid = jnp.ones((1, 1, 2), bool)
    near = attend(jnp.ones((1, 3, 64)), jnp.ones((1, 1, 2, 64)), values[:, :, :2], valid)
    none = estimate(q, keys, values, jnp.zeros((1, 1, 4)))
    np.testing.assert_array_equal(combine(near, none), combine(near))
    for part in (none, estimate(q, keys, values, jnp.array([[[1, 4, 0, 2]]]))):
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(part))
    assert estimate(q, keys[:, :, :0], values[:, :, :0], jnp.zeros((1, 1, 0))).l.shape == (1, 3)


def test_counts_are_what_selection_leaves() -> None:
    selected = jnp.array([[[3, 0, -1]], [[1, -1, -1]]])
    groups = jnp.array([[[0, 0, 1, 1, 2, 9]], [[0, 1, 0, 9, 9, 9]]])
    counts = unselected_counts(selected, groups, jnp.array([5, 3]), 3, 4)
    assert np.asarray(counts).tolist() == [[[4, 4, 4]], [[8, 0, 0]]]
