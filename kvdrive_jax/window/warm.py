"""Which chunk starts in which slot: the windows at the end of prefill (paper 7.1)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rank_chunks(importance: jax.Array, n_chunks: jax.Array, count: int) -> jax.Array:
    """The most important chunks of a session, best first, ties to the lowest id.

    importance: [K, N] float32, at least 0; n_chunks: int32 scalar; count: at most N.
    Returns [K, count] int32, -1 where there are fewer chunks.
    """
    ranked = jnp.where(jnp.arange(importance.shape[-1]) < n_chunks, importance, -1.0)
    worth, ids = lax.top_k(ranked, count)
    return jnp.where(worth >= 0, ids.astype(jnp.int32), -1)


def warm_slots(ranked: jax.Array, capacity: jax.Array, slots: int) -> jax.Array:
    """What each slot starts with: the best of ``ranked``, the least of them in the lowest slot.

    So that policies that know nothing yet, and take the lowest slot, evict the least important.

    ranked: [..., K, R] int32, best first, -1 for none; capacity: [..., K] int32, usable slots.
    Returns [..., K, S] int32 chunk ids, -1 for empty.
    """
    rank = capacity[..., None] - 1 - jnp.arange(slots)
    there = (rank >= 0) & (rank < ranked.shape[-1])
    ids = jnp.take_along_axis(ranked, jnp.where(there, rank, 0), axis=-1)
    return jnp.where(there, ids, -1)
