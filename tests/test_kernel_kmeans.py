"""The halves of a k-means round against their specification."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrive_jax.index.chunks import representatives
from kvdrive_jax.pallas.kmeans import KmeansTuning, assign, chunk_means, totals
from tests.tolerances import TOLERANCE

INTERPRET = jax.default_backend() == "cpu"
KERNEL = {"implementation": "triton", "interpret": INTERPRET}
SMALL = KmeansTuning(rows=16, block=16)
# On a GPU products are TF32, 11 bits.
SHARE = TOLERANCE["float32"] if INTERPRET else 2.0**-9


@functools.cache
def compiled(clusters: int):
    def run(vectors, directions, in_use, ids):
        return {
            "nearest": assign(vectors, directions, in_use, tuning=SMALL, **KERNEL),
            "nearest xla": assign(vectors, directions, in_use, implementation="xla"),
            "totals": totals(vectors, ids, clusters, tuning=SMALL, **KERNEL),
            "totals xla": totals(vectors, ids, clusters, implementation="xla"),
        }

    return jax.jit(run)


@pytest.mark.parametrize(
    ("total", "clusters", "dim"), [(37, 5, 80), (16, 33, 64), (50, 40, 24), (1, 1, 256)]
)
def test_as_the_specification(total, clusters, dim):
    @settings(max_examples=5, deadline=None, derandomize=True)
    @given(
        used=st.integers(1, clusters),
        kind=st.sampled_from(("normal", "equal", "large", "tiny", "zero")),
        seed=st.integers(0, 99),
    )
    def examples(used, kind, seed):
        rng = np.random.default_rng(seed)
        size = {"large": 1e15, "tiny": 1e-15, "zero": 0.0}.get(kind, 1.0)
        vectors = (rng.standard_normal((2, total, dim)) * size).astype(np.float32)
        directions = rng.standard_normal((2, clusters, dim)).astype(np.float32)
        if kind == "equal":
            directions[:] = directions[:, :1]
        in_use = np.arange(clusters) < used
        ids = rng.integers(-1, clusters + 1, (2, total)).astype(np.int32)
        found = jax.tree.map(np.asarray, compiled(clusters)(vectors, directions, in_use, ids))

        exact = np.einsum("krd,kcd->krc", vectors.astype(np.float64), directions)
        exact = np.where(in_use, exact, -np.inf)
        near = SHARE * np.abs(vectors).max(initial=0.0) * np.abs(directions).max() * dim
        for name in ("nearest", "nearest xla"):
            chosen = found[name]
            assert ((chosen >= 0) & (chosen < used)).all(), name
            got = np.take_along_axis(exact, chosen[..., None], axis=-1)[..., 0]
            assert (got >= exact.max(axis=-1) - near).all(), name
            if kind in ("equal", "zero"):
                assert (chosen == 0).all(), name

        one_hot = (ids[..., None] == np.arange(clusters)).astype(np.float64)
        sums = np.einsum("krc,krd->kcd", one_hot, vectors)
        near = TOLERANCE["float32"] * max(np.abs(vectors).sum(axis=1).max(), 1e-30)
        for name in ("totals", "totals xla"):
            np.testing.assert_array_equal(found[name][1], one_hot.sum(axis=1), err_msg=name)
            assert np.abs(found[name][0] - sums).max() <= near, name

    examples()


def test_same_bits_again(rng):
    vectors = jnp.asarray(rng.standard_normal((1, 50, 24)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, 7, (1, 50)), jnp.int32)
    run = jax.jit(lambda v, i: totals(v, i, 7, tuning=SMALL, **KERNEL)[0])
    np.testing.assert_array_equal(run(vectors, ids), run(vectors, ids))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_chunk_means_are_the_representatives(dtype, rng):
    keys = jnp.asarray(rng.standard_normal((2, 5, 4, 80)), dtype)
    np.testing.assert_array_equal(chunk_means(keys), representatives(keys))


def test_nothing():
    nothing = jnp.zeros((2, 0, 16), jnp.float32)
    sums, counts = totals(nothing, jnp.zeros((2, 0), jnp.int32), 3, **KERNEL)
    assert sums.shape == (2, 3, 16)
    assert not counts.any()
    assert assign(nothing, jnp.zeros((2, 3, 16)), jnp.ones(3, bool), **KERNEL).shape == (2, 0)


def test_refusals():
    vectors, ids = jnp.zeros((2, 4, 16), jnp.float32), jnp.zeros((2, 4), jnp.int32)
    with pytest.raises(ValueError, match="vectors must be"):
        assign(vectors.astype(jnp.bfloat16), vectors, jnp.ones(4, bool))
    with pytest.raises(ValueError, match="directions must be"):
        assign(vectors, vectors[:1], jnp.ones(4, bool))
    with pytest.raises(ValueError, match="in_use must be"):
        assign(vectors, vectors, jnp.ones(3, bool))
    with pytest.raises(ValueError, match="ids must be"):
        totals(vectors, ids[:, :3], 4)
    with pytest.raises(ValueError, match="rows must be a power of two"):
        KmeansTuning(rows=8, block=16)
    if INTERPRET:
        with pytest.raises(NotImplementedError, match="need an NVIDIA GPU"):
            totals(vectors, ids, 4, implementation="triton")
