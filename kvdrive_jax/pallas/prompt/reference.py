"""Causal attention of prompt queries in plain XLA: the specification of the prompt kernel."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from kvdrive_jax.pallas.attention.reference import MASKED, Partial


def attend_block(
    q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, *, block_k: int
) -> jax.Array:
    """Causal attention of one block of prompt queries at offset ``first``.

    q: [Q, H, D], query i stands at position first + i; k, v: [K, T, D] with every position up to
    first + Q - 1 filled in, T a multiple of ``block_k``, ``first`` a multiple of Q. Returns
    [Q, H, D] float32. Memory is H * Q * block_k logits; keys after the block are never read.
    """
    queries, heads, dim = q.shape
    kv_heads = k.shape[0]
    group = heads // kv_heads
    parts = _row_parts(group * queries)
    # The rows of one kv head, as `parts` products of their own: [K * parts, G * Q / parts, D].
    rows = (
        (q * dim**-0.5)
        .reshape(queries, kv_heads, group, dim)
        .transpose(1, 2, 0, 3)
        .reshape(kv_heads * parts, -1, dim)
    )
    position = (first + jnp.tile(jnp.arange(queries), group)).reshape(parts, -1)
    position = jnp.tile(position, (kv_heads, 1))[:, :, None]

    def step(block: jax.Array, carry: Partial, *, masked: bool) -> Partial:
        start = block * block_k
        keys = lax.dynamic_slice_in_dim(k, start, block_k, axis=1)
        values = lax.dynamic_slice_in_dim(v, start, block_k, axis=1)
        if parts > 1:
            keys, values = jnp.repeat(keys, parts, axis=0), jnp.repeat(values, parts, axis=0)
        logits = jnp.einsum("kqd,ktd->kqt", rows, keys, preferred_element_type=jnp.float32)
        if masked:
            logits = jnp.where(start + jnp.arange(block_k) <= position, logits, MASKED)
        m = jnp.maximum(carry.m, logits.max(axis=-1))
        weights = jnp.exp(logits - m[..., None])
        scale = jnp.exp(carry.m - m)
        o = jnp.einsum(
            "kqt,ktd->kqd", weights.astype(v.dtype), values, preferred_element_type=jnp.float32
        )
        return Partial(carry.o * scale[..., None] + o, carry.l * scale + weights.sum(axis=-1), m)

    done = Partial(
        jnp.zeros(rows.shape, jnp.float32),
        jnp.zeros(rows.shape[:2], jnp.float32),
        jnp.full(rows.shape[:2], MASKED, jnp.float32),
    )
    # Only blocks that reach past the first query need a mask.
    unmasked = first // block_k
    blocks = (first + queries + block_k - 1) // block_k
    done = lax.fori_loop(0, unmasked, partial(step, masked=False), done)
    done = lax.fori_loop(unmasked, blocks, partial(step, masked=True), done)
    out = (done.o / done.l[..., None]).reshape(kv_heads, group, queries, dim)
    return out.transpose(2, 0, 1, 3).reshape(queries, heads, dim)


def _row_parts(rows: int) -> int:
    """Into how many products the rows of one kv head are cut: a power of two.

    On a CPU products of some 600 to 1,200 rows run best, and an even number of them keeps two
    cores busy when the number of kv heads is odd (20 % at 7K tokens of SmolLM2).
    """
    return 1 << max(0, (rows // 600).bit_length() - 1)
