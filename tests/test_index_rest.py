"""What is kept to estimate the unselected: built, grown and inserted as the index is."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvdrive_jax.config import Estimate
from kvdrive_jax.index.clusters import ClusterForm
from kvdrive_jax.index.estimate import estimate, unselected_counts
from kvdrive_jax.index.form import make_form
from kvdrive_jax.index.rest import LayerIndex, Retrieval
from kvdrive_jax.pallas.attention.reference import Partial, attend, combine

B, K, G, N, F, CHUNK, DIM = 2, 2, 3, 37, 9, 4, 24
KINDS = [kind for kind in get_args(Estimate) if kind != "none"]


# `how` is a static argument, so that a shape compiles once for all tests.
build = jax.jit(Retrieval.build, static_argnums=0)
insert = jax.jit(Retrieval.insert, static_argnums=0)
append = jax.jit(Retrieval.append, static_argnums=0)
rest_of = jax.jit(Retrieval.rest, static_argnums=0)
estimated = jax.jit(estimate)


def retrieval(index: str, kind: Any) -> Retrieval:
    return Retrieval(make_form(index), kind, ClusterForm())


def data(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def filled(how: Retrieval) -> tuple[LayerIndex, jax.Array, jax.Array, jax.Array]:
    """Two sessions: built, put into a batch, one of them grown; keys, values, chunks of each."""
    room = N + F
    keys, values = (data(seed, (B, K, room, CHUNK, DIM)) for seed in (1, 2))
    # Chunks that hang together, so that means say something.
    keys = keys + data(3, (B, K, room, 1, DIM))
    prompt, new = jnp.array([N, 11]), jnp.array([0, 7])
    index = how.empty(B, K, DIM, room, how.cluster_capacity(N, 1, F))
    for row in range(B):
        piece = build(how, keys[row, :, :N], values[row, :, :N], prompt[row])
        index = insert(how, index, row, piece)
    fresh = [
        jnp.stack([x[row, :, n : n + F] for row, n in enumerate((N, 11))]) for x in (keys, values)
    ]
    index = append(how, index, *fresh, new, prompt)
    return index, keys, values, prompt + new


@pytest.mark.parametrize(
    ("index", "kind"),
    [
        ("clusters", "chunks"),
        ("moments", "chunks"),
        ("clusters", "clusters"),
        ("bounds:bf16", "clusters"),
    ],
)
def test_rest_is_the_estimate_from_true_means(index: str, kind: str) -> None:
    how = retrieval(index, kind)
    state, keys, values, n_chunks = filled(how)
    sizes = (B, K, DIM, N + F, how.cluster_capacity(N, 1, F))
    assert sum(x.nbytes for x in jax.tree.leaves(state)) == how.nbytes(*sizes)
    queries = data(5, (B, K * G, DIM))
    selected = jnp.broadcast_to(jnp.array([7, 0, 3, -1], jnp.int32), (B, K, 4))
    found = rest_of(how, state, queries, selected, n_chunks)

    mean_keys, mean_values = keys.mean(axis=3), values.mean(axis=3)
    groups = jnp.broadcast_to(jnp.arange(N + F), (B, K, N + F))
    counted = partial(unselected_counts, selected, groups, n_chunks, N + F, CHUNK)
    if kind == "chunks":
        expected = estimated(queries, mean_keys, mean_values, counted())
    else:
        clusters = state.ranking if state.keys is None else state.keys
        of = clusters.cluster_of_chunk
        real = jnp.arange(N + F) < n_chunks[:, None, None]
        one_hot = (of[..., None] == jnp.arange(clusters.sizes.shape[-1])) & real[..., None]
        count = one_hot.sum(axis=2)
        np.testing.assert_array_equal(count, clusters.sizes)
        weights = one_hot / jnp.maximum(count, 1)[:, :, None]
        left = unselected_counts(selected, of, n_chunks, clusters.sizes.shape[-1], CHUNK)
        expected = estimated(
            queries,
            jnp.einsum("bkng,bknd->bkgd", weights, mean_keys),
            jnp.einsum("bkng,bknd->bkgd", weights, mean_values),
            left,
        )
    tolerance = 0.25 if kind == "chunks" else 0.03  # 4 bits, bfloat16
    assert found is not None
    got, wanted = combine(found), combine(expected)
    assert float(jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted)) < tolerance
    np.testing.assert_allclose(
        found.m + jnp.log(found.l), expected.m + jnp.log(expected.l), atol=2 * tolerance
    )


@pytest.mark.parametrize("kind", KINDS)
def test_estimating_helps_and_nothing_left_changes_nothing(kind: str) -> None:
    how = retrieval("moments", kind)
    state, keys, values, n_chunks = filled(how)
    queries = 0.5 * data(5, (B, K * G, DIM))
    real = jnp.arange((N + F) * CHUNK) < n_chunks[:, None, None] * CHUNK
    k, v = (x.reshape(B, K, -1, DIM) for x in (keys, values))

    def near(chunks: int) -> Partial:
        return attend(queries, k, v, real & (jnp.arange((N + F) * CHUNK) < chunks * CHUNK))

    exact = combine(near(N + F))
    few = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), (B, K, 6))
    rest = rest_of(how, state, queries, few, n_chunks)
    assert rest is not None
    error = jnp.linalg.norm(combine(near(6), rest) - exact)
    assert error < 0.7 * jnp.linalg.norm(combine(near(6)) - exact)

    everything = jnp.arange(N + F, dtype=jnp.int32)
    everything = jnp.where(everything < n_chunks[:, None, None], everything, -1)
    everything = jnp.broadcast_to(everything, (B, K, N + F))
    nothing = rest_of(how, state, queries, everything, n_chunks)
    assert nothing is not None
    np.testing.assert_array_equal(combine(near(N + F), nothing), exact)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0.0, 3e38])
def test_any_finite_keys_and_values_give_a_finite_rest(kind: str, size: float) -> None:
    how = retrieval("moments", kind)
    keys = jnp.full((1, N, CHUNK, DIM), size).at[:, ::2].multiply(-1)
    index = how.empty(1, 1, DIM, N, how.cluster_capacity(N, 0, 0))
    index = insert(how, index, 0, build(how, keys, keys, jnp.int32(N)))
    queries = jnp.full((1, G, DIM), size)
    selected = jnp.array([[[3, -1]]], jnp.int32)
    rest = rest_of(how, index, queries, selected, jnp.array([N]))
    assert rest is not None
    assert all(bool(jnp.isfinite(x).all()) for x in (rest.l, rest.m, combine(rest)))
