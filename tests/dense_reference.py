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
        q, k, v = _inputs(model.static, leaves, hidden, positions, jnp.asarray(inv_freq), factor)
        blocks = [
            _attend(q[..., start : start + QUERY_BLOCK, :, :], k, v, start)
            for start in range(0, q.shape[-3], QUERY_BLOCK)
        ]
        hidden = _after(model.static, leaves, hidden, jnp.concatenate(blocks, axis=-3))
    return _logits(model.static, model.ends, hidden if last is None else hidden[..., -last:, :])


@functools.partial(jax.jit, static_argnums=0)
def _embed(static: ModelDef, ends: Leaves, tokens: jax.Array) -> jax.Array:
    return static.merge_ends(ends).embed(tokens)


@functools.partial(jax.jit, static_argnums=0)
def _inputs(
    static: ModelDef,
    leaves: Leaves,
    hidden: jax.Array,
    positions: jax.Array,
    inv_freq: jax.Array,
    factor: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return static.merge_layer(leaves).attention_inputs(hidden, positions, inv_freq, factor)


@jax.jit
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, start: int) -> jax.Array:
    """q [..., t, H, D] against all of k, v [..., T, K, D]; query i sees keys up to start + i."""
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
def _after(static: ModelDef, leaves: Leaves, hidden: jax.Array, attended: jax.Array) -> jax.Array:
    return static.merge_layer(leaves).after_attention(hidden, attended)


@functools.partial(jax.jit, static_argnums=0)
def _logits(static: ModelDef, ends: Leaves, hidden: jax.Array) -> jax.Array:
    return static.merge_ends(ends).logits(hidden)
