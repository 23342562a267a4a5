"""Decode attention in plain XLA: the specification of every decode attention kernel.

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
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, dim)
    logits = jnp.einsum("bkgd,bktd->bkgt", grouped, k, preferred_element_type=jnp.float32)
    logits = logits * dim**-0.5
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


def attend_rows(q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array) -> Partial:
    """Decode attention over the first keys of each session.

    q: [B, H, D]; k, v: [B, K, T, D]; length: [B] int32. Returns a Partial with leading [B, H].
    """
    present = jnp.arange(k.shape[2])[None, None, :] < length[:, None, None]
    return attend(q, k, v, present)


def attend_pages(q: jax.Array, window: jax.Array, slots: jax.Array) -> Partial:
    """Decode attention over the pages in some rows of the window.

    q: [B, H, D]; window: [B, R, 2, c, D]; slots: [B, K, P] int32, -1 for none. Returns a Partial
    with leading [B, H].
    """
    batch, kv_heads, count = slots.shape
    chunk, dim = window.shape[-2:]
    # One gather takes keys and values apart: slicing them out of whole pages costs as much as the
    # attention does, and two gathers miss every page of memory twice. Fused with what follows it
    # would go element by element.
    flat = window.reshape(-1, chunk * dim)
    at = jnp.arange(batch)[:, None, None] * window.shape[1] + jnp.maximum(slots, 0)
    both = flat.at[jnp.stack([2 * at, 2 * at + 1]).reshape(-1)].get(mode="promise_in_bounds")
    both = lax.optimization_barrier(both)
    keys, values = both.reshape(2, batch, kv_heads, count * chunk, dim)
    return attend(q, keys, values, jnp.repeat(slots >= 0, chunk, axis=-1))


def attend_weighted(q: jax.Array, k: jax.Array, v: jax.Array, counts: jax.Array) -> Partial:
    """Decode attention over keys each of which stands for `counts` equal ones.

    q: [B, H, D]; k, v: [B, K, T, D]; counts: [B, K, T], 0 for a key that is not there. Returns a
    Partial with leading [B, H].
    """
    batch, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, dim).astype(jnp.float32)
    logits = jnp.einsum(
        "bkgd,bktd->bkgt", grouped, k.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    counts = counts.astype(jnp.float32)[:, :, None]
    present = counts > 0
    logits = logits * dim**-0.5 + jnp.log(jnp.where(present, counts, 1.0))
    m = jnp.where(present, logits, MASKED).max(axis=-1)
    weights = jnp.where(present, jnp.exp(logits - m[..., None]), 0.0)
    o = jnp.einsum(
        "bkgt,bktd->bkgd", weights, v.astype(jnp.float32), precision=lax.Precision.HIGHEST
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
