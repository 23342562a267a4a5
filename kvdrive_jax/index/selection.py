"""From scores to selected chunks, and how much the prompt's last queries cared for each chunk.

Every index form ranks chunks: it returns scores [B, K, N] that are finite for the chunks a session
has and -inf for padding. Everything here works on such scores and knows no index form.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kvdrive_jax.pallas.scoring.products import MAGNITUDE_LIMIT
from kvdrive_jax.pallas.selection import select_chunks


def select(scores: jax.Array, n_chunks: jax.Array, count: int) -> jax.Array:
    """The best `count` chunks of every (session, kv head).

    Args:
        scores: [B, K, N] float32, not NaN.
        n_chunks: [B] int32, how many chunks each session has. Ids from there on are never selected,
            whatever their score.
        count: P, a static number; at least 1.

    Returns:
        [B, K, P] int32 chunk ids, ties to the lowest id; -1 where a session has fewer than P
        chunks. By descending score, or on a GPU by ascending id: only the set matters.
    """
    return select_chunks(scores, n_chunks, count)


def importance(
    queries: jax.Array,
    keys: jax.Array,
    length: jax.Array,
    n_chunks: jax.Array,
    *,
    sink: int,
    chunk_size: int,
    chunk_capacity: int,
    block: int = 4096,
) -> jax.Array:
    """How much the last queries of a prompt attend to each of its chunks.

    The SnapKV score that ranks chunks for placement at the end of prefill (paper 7.1): softmax of
    each query over all keys up to its own position, summed over queries and over the heads of the
    group, then over the tokens of each chunk. Goes through the keys twice in blocks, so that no
    [H, W, T] array exists.

    Args:
        queries: [H, W, D], post-RoPE; query w sits at position length - W + w. Queries at negative
            positions (a prompt shorter than W) count nothing.
        keys: [K, T, D], post-RoPE, in token order; from `length` on they may hold any finite value.
        length: int32 scalar, tokens in the prompt.
        n_chunks: int32 scalar, chunks of the prompt.
        sink, chunk_size: the geometry of chunks.
        chunk_capacity: N.
        block: keys per pass; bounds memory at H x W x block floats.

    Returns:
        [K, N] float32; 0 from `n_chunks` on.
    """
    heads, width, dim = queries.shape
    kv_heads, tokens, _ = keys.shape
    if heads % kv_heads:
        raise ValueError(f"query heads must be a multiple of kv heads, got {heads} and {kv_heads}")
    block = min(block, tokens)
    blocks = -(-tokens // block)
    grouped = _bounded(queries).reshape(kv_heads, -1, dim) * dim**-0.5
    query_at = jnp.tile(length - width + jnp.arange(width), heads // kv_heads)[:, None]

    def logits_of(i: jax.Array) -> jax.Array:
        # The last block starts early enough to be whole; what an earlier one had is masked.
        first = jnp.minimum(i * block, tokens - block)
        part = _bounded(lax.dynamic_slice_in_dim(keys, first, block, axis=1))
        key_at = first + jnp.arange(block)
        logits = jnp.einsum("kqd,ktd->kqt", grouped, part, precision=lax.Precision.HIGHEST)
        seen = (key_at >= i * block) & (key_at <= query_at) & (key_at < length)
        return jnp.where(seen, logits, -jnp.inf)

    def add_block(
        state: tuple[jax.Array, jax.Array], i: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        top, total = state
        logits = logits_of(i)
        higher = jnp.maximum(top, logits.max(axis=-1))
        safe = _finite(higher)
        total = total * jnp.exp(top - safe) + jnp.exp(logits - safe[..., None]).sum(axis=-1)
        return (higher, total), None

    start = (
        jnp.full(grouped.shape[:2], -jnp.inf, jnp.float32),
        jnp.zeros(grouped.shape[:2], jnp.float32),
    )
    (top, total), _ = lax.scan(add_block, start, jnp.arange(blocks))
    # A query that sees no key has total 0 and weight exp(-inf) = 0 below.
    offset = _finite(top) + jnp.log(jnp.where(total > 0, total, 1.0))

    def mass_of(i: jax.Array) -> jax.Array:
        return jnp.exp(logits_of(i) - offset[..., None]).sum(axis=1)

    mass = lax.map(mass_of, jnp.arange(blocks))  # [blocks, K, block]
    whole = mass[:-1].swapaxes(0, 1).reshape(kv_heads, -1)
    per_token = jnp.concatenate([whole, mass[-1][:, blocks * block - tokens :]], axis=1)
    region = per_token[:, sink : sink + chunk_capacity * chunk_size]
    missing = chunk_capacity * chunk_size - region.shape[1]
    per_chunk = jnp.pad(region, [(0, 0), (0, max(missing, 0))])
    per_chunk = per_chunk.reshape(kv_heads, chunk_capacity, chunk_size).sum(axis=-1)
    return jnp.where(jnp.arange(chunk_capacity) < n_chunks, per_chunk, 0.0)


def _finite(maximum: jax.Array) -> jax.Array:
    """0 in place of the -inf that is the maximum of nothing, so that nothing becomes NaN."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)


def _bounded(vectors: jax.Array) -> jax.Array:
    return jnp.clip(vectors.astype(jnp.float32), -MAGNITUDE_LIMIT, MAGNITUDE_LIMIT)
