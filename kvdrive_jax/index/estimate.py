"""What the chunks that were not selected would have contributed, from what stands for them.

RetroInfer's estimation zone (arXiv 2505.02922) for any index form: a group of n keys, a chunk or a
cluster, contributes n exp(q.mean key / sqrt(D)) of mass with its mean value. That is never more
than its true mass (the exponential is convex), and exact when all keys of the group are equal, or
there is one. Larger masses (with the spread of the keys) make the output worse: they give weight
to the mean value that belongs to one key's own.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from kvdrive_jax.index.chunks import MAGNITUDE_LIMIT
from kvdrive_jax.pallas.attention.reference import MASKED, Partial
from kvdrive_jax.pallas.scoring.products import group_queries


def attend_groups(
    logits: jax.Array, counts: jax.Array, weighted_sum: Callable[[jax.Array], jax.Array]
) -> Partial:
    """Attention over groups of keys, each taken as so many copies of its mean.

    Args:
        logits: [B, K, G, X] float32, q.mean key / sqrt(D), finite.
        counts: [B, K, X] float32, keys that each group stands for and that nothing else attends
            to; 0 for padding and for what is selected.
        weighted_sum: of mean values: [B, K, G, X] float32 -> [B, K, G, D] float32.

    Returns:
        A partial with leading [B, H].
    """
    present = counts[:, :, None] > 0
    logits = logits + jnp.log(jnp.where(present, counts[:, :, None], 1.0))
    m = jnp.where(present, logits, MASKED).max(axis=-1, initial=MASKED)
    weights = jnp.where(present, jnp.exp(logits - m[..., None]), 0.0)
    o = weighted_sum(weights)
    batch, kv_heads, group = m.shape
    heads = kv_heads * group
    return Partial(
        o.reshape(batch, heads, -1),
        weights.sum(axis=-1).reshape(batch, heads),
        m.reshape(batch, heads),
    )


def estimate(
    queries: jax.Array, mean_keys: jax.Array, mean_values: jax.Array, counts: jax.Array
) -> Partial:
    """Attention over groups of keys, each taken as so many copies of its mean.

    Args:
        queries: [B, H, D], post-RoPE, unscaled.
        mean_keys: [B, K, X, D], any float dtype.
        mean_values: [B, K, X, D], any float dtype.
        counts: [B, K, X], keys that each group stands for and that nothing else attends to; 0 for
            padding and for what is selected.

    Returns:
        A partial with leading [B, H], to be combined with those of exact attention; finite for
        finite input.
    """
    _, kv_heads, _, dim = mean_keys.shape
    grouped = group_queries(queries, kv_heads, dim) * dim**-0.5
    keys = jnp.clip(mean_keys.astype(jnp.float32), -MAGNITUDE_LIMIT, MAGNITUDE_LIMIT)
    logits = jnp.einsum("bkgd,bkxd->bkgx", grouped, keys, precision=lax.Precision.HIGHEST)

    def weighted_sum(weights: jax.Array) -> jax.Array:
        return jnp.einsum(
            "bkgx,bkxd->bkgd",
            weights,
            mean_values.astype(jnp.float32),
            precision=lax.Precision.HIGHEST,
        )

    return attend_groups(logits, counts.astype(jnp.float32), weighted_sum)


def unselected_counts(
    selected: jax.Array, group_of_chunk: jax.Array, n_chunks: jax.Array, groups: int, chunk: int
) -> jax.Array:
    """Keys of each group that no selected chunk covers: [B, K, X] int32.

    Args:
        selected: [B, K, P] int32 chunk ids, -1 for none.
        group_of_chunk: [B, K, N] int32 in 0 .. X - 1; the chunk's own id where each is its own.
        n_chunks: [B] int32.
        groups: X.
        chunk: c, tokens per chunk.
    """
    batch, kv_heads, total = group_of_chunk.shape
    rows, heads = jnp.ix_(jnp.arange(batch), jnp.arange(kv_heads))
    left = jnp.broadcast_to(jnp.arange(total) < n_chunks[:, None, None], group_of_chunk.shape)
    at = jnp.where(selected >= 0, selected, total)
    left = left.at[rows[..., None], heads[..., None], at].set(False, mode="drop")
    counts = jnp.zeros((batch, kv_heads, groups), jnp.int32)
    return counts.at[rows[..., None], heads[..., None], group_of_chunk].add(
        left.astype(jnp.int32) * chunk
    )
