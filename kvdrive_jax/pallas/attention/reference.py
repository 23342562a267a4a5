"""Attention in plain XLA: the specification of every attention kernel.

All entry points speak (o, l, m) partials, so that attention over any two sets of keys (sink,
selected chunks, recent tokens, and later tiers or estimates) merges with one combiner.
"""

from __future__ import annotations

from functools import partial
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


def attend_one(q: jax.Array, k: jax.Array, v: jax.Array) -> Partial:
    """Decode attention of one token per session to one key each, its own.

    q: [B, H, D]; k, v: [B, K, D]. Returns a Partial with leading [B, H].
    """
    batch, heads, dim = q.shape
    group = heads // k.shape[1]
    key, value = (jnp.repeat(x.astype(jnp.float32), group, axis=1) for x in (k, v))
    m = (q.astype(jnp.float32) * key).sum(axis=-1) * dim**-0.5
    return Partial(value, jnp.ones((batch, heads), jnp.float32), m)


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
