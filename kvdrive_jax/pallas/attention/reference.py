"""Attention in plain XLA: the specification of every attention kernel.

All entry points speak (o, l, m) partials, so that attention over any two sets of keys (sink,
selected chunks, recent tokens, and later tiers or estimates) merges with one combiner.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Finite, so that a span with no valid key stays finite and weighs nothing when combined.
MASKED = -1e30


class Partial(NamedTuple):
    """Attention over one set of keys, not yet normalised.

    o: [..., D] float32, sum of exp(logit - m) * value; l: [...] float32, sum of exp(logit - m);
    m: [...] float32, largest logit (MASKED where no key is valid).
    """

    o: jax.Array
    l: jax.Array
    m: jax.Array


def attend(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array) -> Partial:
    """Decode attention of one token per session over a set of keys.

    q: [B, H, D]; k, v: [B, K, T, D]; valid: broadcastable to [B, K, T] bool. H = K * G, query
    head h reads kv head h // G. Returns a Partial with leading [B, H].
    """
    batch, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, dim) * dim**-0.5
    logits = jnp.einsum("bkgd,bktd->bkgt", grouped, k, preferred_element_type=jnp.float32)
    mask = valid[:, :, None, :]
    m = jnp.max(jnp.where(mask, logits, MASKED), axis=-1)
    weights = jnp.where(mask, jnp.exp(logits - m[..., None]), 0.0)
    o = jnp.einsum(
        "bkgt,bktd->bkgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return Partial(
        o.reshape(batch, heads, dim),
        weights.sum(axis=-1).reshape(batch, heads),
        m.reshape(batch, heads),
    )


def combine(*partials: Partial) -> jax.Array:
    """Exact softmax attention over the union of the partials' keys: [..., D] float32.

    At least one key must be valid over all partials of a row; a row with none gives zeros.
    """
    m = partials[0].m
    for part in partials[1:]:
        m = jnp.maximum(m, part.m)
    scales = [jnp.exp(part.m - m) for part in partials]
    o = sum(part.o * s[..., None] for part, s in zip(partials, scales, strict=True))
    l = sum(part.l * s for part, s in zip(partials, scales, strict=True))
    return o / jnp.maximum(l, 1e-37)[..., None]


def attend_block(
    q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, *, block_k: int
) -> jax.Array:
    """Causal attention of one block of prompt queries at offset ``first``.

    q: [Q, H, D], query i stands at position first + i; k, v: [K, T, D] with every position up to
    first + Q - 1 filled in, T a multiple of ``block_k``. Returns [Q, H, D] float32. Memory is
    K * G * Q * block_k logits; keys after the block are never read.
    """
    queries, heads, dim = q.shape
    kv_heads = k.shape[0]
    group = heads // kv_heads
    rows = (
        (q * dim**-0.5)
        .reshape(queries, kv_heads, group, dim)
        .transpose(1, 2, 0, 3)
        .reshape(kv_heads, group * queries, dim)
    )
    position = first + jnp.tile(jnp.arange(queries), group)

    def step(block: jax.Array, carry: Partial) -> Partial:
        start = block * block_k
        keys = lax.dynamic_slice_in_dim(k, start, block_k, axis=1)
        values = lax.dynamic_slice_in_dim(v, start, block_k, axis=1)
        logits = jnp.einsum("kqd,ktd->kqt", rows, keys, preferred_element_type=jnp.float32)
        visible = start + jnp.arange(block_k)[None, :] <= position[:, None]
        logits = jnp.where(visible, logits, MASKED)
        m = jnp.maximum(carry.m, logits.max(axis=-1))
        weights = jnp.exp(logits - m[..., None])
        scale = jnp.exp(carry.m - m)
        o = jnp.einsum(
            "kqt,ktd->kqd", weights.astype(v.dtype), values, preferred_element_type=jnp.float32
        )
        return Partial(carry.o * scale[..., None] + o, carry.l * scale + weights.sum(axis=-1), m)

    start = Partial(
        jnp.zeros((kv_heads, group * queries, dim), jnp.float32),
        jnp.zeros((kv_heads, group * queries), jnp.float32),
        jnp.full((kv_heads, group * queries), MASKED, jnp.float32),
    )
    blocks = (first + queries + block_k - 1) // block_k
    done = lax.fori_loop(0, blocks, step, start)
    out = (done.o / done.l[..., None]).reshape(kv_heads, group, queries, dim)
    return out.transpose(2, 0, 1, 3).reshape(queries, heads, dim)
