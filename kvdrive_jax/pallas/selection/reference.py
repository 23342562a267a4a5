"""The best chunks of every row in plain XLA: the specification of the selection kernels.

`top_chunks` says what is selected. `top_chunks_by_bisection` says the same without a sort, as the
kernels do it: on a GPU `lax.top_k` sorts the whole row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LOWEST = int(np.iinfo(np.int32).min)
"""Below the image of every score."""


def top_chunks(
    scores: jax.Array, n_chunks: jax.Array, count: int, limit: jax.Array | None = None
) -> jax.Array:
    """The best `count` of the first n_chunks [B] of scores [B, K, N] float32, not NaN.

    Ties go to the lowest id; -0.0 equals 0.0. Returns [B, K, P] int32 ids by descending score, -1
    where a session has fewer than P chunks, or where `limit` [B, K] says that fewer are wanted.
    """
    taken = min(count, scores.shape[-1])
    real = jnp.arange(scores.shape[-1], dtype=jnp.int32) < n_chunks[:, None, None]
    scores = jnp.where(real, jnp.where(scores == 0, 0.0, scores), -jnp.inf)
    _, best = lax.top_k(scores, taken)
    most = n_chunks[:, None] if limit is None else jnp.minimum(n_chunks[:, None], limit)
    best = jnp.where(jnp.arange(taken) < most[..., None], best.astype(jnp.int32), -1)
    missing = [(0, 0), (0, 0), (0, count - taken)]
    return jnp.pad(best, missing, constant_values=-1)


def top_chunks_by_bisection(scores: jax.Array, n_chunks: jax.Array, count: int) -> jax.Array:
    """The set that `top_chunks` gives, in ascending order of id, without a sort."""
    batch, kv_heads, chunks = scores.shape
    ids = jnp.arange(chunks, dtype=jnp.int32)
    keys = jnp.where(ids < n_chunks[:, None, None], ordered(scores), LOWEST)
    target = jnp.clip(n_chunks, 0, min(count, chunks))[:, None, None]

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = between(low, high)
        enough = (keys >= middle).sum(axis=-1, keepdims=True, dtype=jnp.int32) >= target
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    shape = (batch, kv_heads, 1)
    start = (jnp.full(shape, LOWEST + 1, jnp.int32), jnp.full(shape, -(LOWEST + 1), jnp.int32))
    threshold, _ = lax.fori_loop(0, 32, halve, start)
    above, level = keys > threshold, keys == threshold
    need = target - above.sum(axis=-1, keepdims=True, dtype=jnp.int32)
    kept = above | (level & (jnp.cumsum(level, axis=-1, dtype=jnp.int32) <= need))
    place = jnp.where(kept, jnp.cumsum(kept, axis=-1, dtype=jnp.int32) - 1, count)
    row = jnp.arange(batch * kv_heads, dtype=jnp.int32).reshape(batch, kv_heads, 1)
    # A place of its own for each of those that are dropped, so that all places differ.
    flat = jnp.where(kept, row * count + place, batch * kv_heads * count + row * chunks + ids)
    out = jnp.full((batch * kv_heads * count,), -1, jnp.int32)
    chosen = out.at[flat.reshape(-1)].set(
        jnp.broadcast_to(ids, scores.shape).reshape(-1), mode="drop", unique_indices=True
    )
    return chosen.reshape(batch, kv_heads, count)


def top_clusters(
    scores: jax.Array, cluster_of_chunk: jax.Array, n_chunks: jax.Array, count: int
) -> jax.Array:
    """`top_chunks` where a chunk scores what its cluster does: clusters in rank order until there
    are exactly P chunks, those of one score in ascending order of id.

    scores: [B, K, C] float32; cluster_of_chunk: [B, K, N] int32 below C.
    """
    per_chunk = jnp.take_along_axis(scores, cluster_of_chunk, axis=-1, mode="promise_in_bounds")
    return top_chunks(per_chunk, n_chunks, count)


def ordered(scores: jax.Array) -> jax.Array:
    """int32 in the order of float32 scores; -0.0 and 0.0 are one, NaN is not allowed."""
    bits = lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


def between(low: jax.Array, high: jax.Array) -> jax.Array:
    """The middle of two int32, rounded down; does not overflow."""
    return (low & high) + ((low ^ high) >> 1)
