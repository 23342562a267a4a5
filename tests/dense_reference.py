"""A whole-prompt forward pass with plain causal attention, for comparison with every other path."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from kvdrive_jax.models.model import Leaves, Model, ModelDef
from kvdrive_jax.models.rope import inverse_frequencies

QUERY_BLOCK = 1024


def dense_logits(
    model: Model,
    tokens: np.ndarray | jax.Array | list[int],
    *,
    positions: np.ndarray | jax.Array | None = None,
    final_length: int | None = None,
    last: int | None = None,
) -> jax.Array:
    """Logits of every position.

    Args:
        tokens: int [T] or [B, T].
        positions: int, the shape of tokens; 0 ... T-1 where not given. Attention is causal by
        order, not by position.
        final_length: length that RoPE factors are chosen by; the largest position plus one where
        not given.
        last: only the last so many positions.

    Returns:
        float32 [T or last, V], with B in front if the tokens had it.
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1], dtype=jnp.int32), tokens.shape)
    positions = jnp.asarray(positions, jnp.int32)
    inv_freq, factor = inverse_frequencies(
        model.config.rope, final_length or int(positions.max()) + 1
    )
    hidden = _embed(model.static, model.ends, tokens)
    for leaves in model.layers:
        hidden = _layer(model.static, leaves, hidden, positions, jnp.asarray(inv_freq), factor)
    return _logits(model.static, model.ends, hidden if last is None else hidden[..., -last:, :])


@functools.partial(jax.jit, static_argnums=0)
def _embed(static: ModelDef, ends: Leaves, tokens: jax.Array) -> jax.Array:
    return static.merge_ends(ends).embed(tokens)


@functools.partial(jax.jit, static_argnums=0)
def _layer(
    static: ModelDef,
    leaves: Leaves,
    hidden: jax.Array,
    positions: jax.Array,
    inv_freq: jax.Array,
    factor: float,
) -> jax.Array:
    layer = static.merge_layer(leaves)
    q, k, v = layer.attention_inputs(hidden, positions, inv_freq, factor)
    length = q.shape[-3]
    if length <= QUERY_BLOCK:
        return layer.after_attention(hidden, causal_attention(q, k, v))
    blocks = -(-length // QUERY_BLOCK)
    pad = [(0, 0)] * (q.ndim - 3) + [(0, blocks * QUERY_BLOCK - length), (0, 0), (0, 0)]
    padded = jnp.pad(q, pad).reshape(*q.shape[:-3], blocks, QUERY_BLOCK, *q.shape[-2:])
    done = jax.lax.map(
        lambda block: causal_attention(block[0], k, v, block[1] * QUERY_BLOCK),
        (jnp.moveaxis(padded, -4, 0), jnp.arange(blocks)),
    )
    attended = jnp.moveaxis(done, 0, -4).reshape(*q.shape[:-3], -1, *q.shape[-2:])
    return layer.after_attention(hidden, attended[..., :length, :, :])


def causal_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, start: jax.Array | int = 0
) -> jax.Array:
    """q [..., t, H, D] against k, v [..., T, K, D] in float32; query i sees keys to start + i."""
    group = q.shape[-2] // k.shape[-2]
    grouped = q.reshape(*q.shape[:-2], k.shape[-2], group, q.shape[-1]).astype(jnp.float32)
    scores = jnp.einsum("...tkgd,...skd->...kgts", grouped, k.astype(jnp.float32))
    scores = scores / math.sqrt(q.shape[-1])
    rows = start + jnp.arange(q.shape[-3])
    visible = jnp.arange(k.shape[-3])[None, :] <= rows[:, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    out = jnp.einsum("...kgts,...skd->...tkgd", weights, v.astype(jnp.float32))
    return out.reshape(q.shape).astype(q.dtype)


@functools.partial(jax.jit, static_argnums=0)
def _logits(static: ModelDef, ends: Leaves, hidden: jax.Array) -> jax.Array:
    return static.merge_ends(ends).logits(hidden)
