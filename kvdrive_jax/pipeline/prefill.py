"""Prefill of one session, layer by layer: one layer's K and V in HBM at a time.

The whole prompt goes through layer l before layer l + 1 starts, so the device holds the hidden
states of the prompt, one layer's keys and values being made, and the pages of the layer before
on their way out. Inside a layer, queries go in blocks: memory is bounded, attention exact.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvdrive_jax.models.model import ModelDef
from kvdrive_jax.pallas.prompt import PromptImplementation, attend_block, attend_prompt

BLOCK_Q = 512
BLOCK_K = 512


class PromptLayer(NamedTuple):
    """What one layer leaves behind for one prompt.

    k, v: [K, T, D], post-RoPE, rows >= length are padding; q_observed: [W, H, D], the queries of
    the last W prompt tokens in order (rows of positions below 0 are zero).
    """

    k: jax.Array
    v: jax.Array
    q_observed: jax.Array


@partial(jax.jit, static_argnames="model_def")
def embed_prompt(model_def: ModelDef, ends: tuple[jax.Array, ...], tokens: jax.Array) -> jax.Array:
    """Hidden states [T, E] of tokens [T]."""
    return model_def.merge_ends(ends).embed(tokens)


@partial(jax.jit, static_argnames="model_def")
def last_logits(
    model_def: ModelDef, ends: tuple[jax.Array, ...], hidden: jax.Array, length: jax.Array
) -> jax.Array:
    """Logits [1, V] float32 of the last valid row of hidden [T, E]."""
    row = lax.dynamic_slice_in_dim(hidden, length - 1, 1, axis=0)
    return model_def.merge_ends(ends).logits(row)


@partial(
    jax.jit,
    static_argnames=("model_def", "observed", "implementation", "interpret"),
    donate_argnames=("hidden", "before"),
)
def prefill_layer(
    model_def: ModelDef,
    leaves: tuple[jax.Array, ...],
    hidden: jax.Array,
    length: jax.Array,
    inv_freq: jax.Array,
    attention_factor: jax.Array,
    first: jax.Array | None = None,
    before: tuple[jax.Array, jax.Array] | None = None,
    *,
    observed: int,
    implementation: PromptImplementation,
    interpret: bool = False,
) -> tuple[jax.Array, PromptLayer]:
    """One layer over a prompt, or over what follows tokens whose keys and values are known.

    hidden: [T, E], donated; length: int32 scalar; inv_freq: [R/2]; attention_factor: scalar.
    first: int32 scalar, how many tokens are known (None: none), whole blocks of them; then hidden
    [T', E] begins with the next, and before: k, v [K, T, D], donated, has theirs.
    implementation: of attention, as ``prompt_implementation`` names it, not cuDNN with ``first``;
    interpret: its kernel.
    Returns the next hidden [T, E] and the layer's PromptLayer. Work is proportional to the
    length rounded up to a block, not to T.
    """
    config = model_def.config
    layer = model_def.merge_layer(leaves)
    tokens = hidden.shape[0] if before is None else before[0].shape[1]
    start = jnp.int32(0) if first is None else first
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    block_q, block_k = min(BLOCK_Q, hidden.shape[0]), min(BLOCK_K, tokens)
    blocks = (length - start + block_q - 1) // block_q

    def project(
        index: jax.Array, hidden: jax.Array, parts: PromptLayer
    ) -> tuple[jax.Array, jax.Array, PromptLayer]:
        x = lax.dynamic_slice_in_dim(hidden, index * block_q, block_q, axis=0)
        at = start + index * block_q
        positions = at + jnp.arange(block_q, dtype=jnp.int32)
        q, k, v = layer.attention_inputs(x, positions, inv_freq, attention_factor)
        k_all = lax.dynamic_update_slice_in_dim(parts.k, k.transpose(1, 0, 2), at, axis=1)
        v_all = lax.dynamic_update_slice_in_dim(parts.v, v.transpose(1, 0, 2), at, axis=1)
        row = positions - (length - observed)
        row = jnp.where((row >= 0) & (row < observed), row, observed)
        seen = parts.q_observed.at[row].set(q, mode="drop")
        return x, q, PromptLayer(k_all, v_all, seen)

    def finish(index: jax.Array, x: jax.Array, attended: jax.Array, hidden: jax.Array) -> jax.Array:
        y = layer.after_attention(x, attended.astype(x.dtype))
        return lax.dynamic_update_slice_in_dim(hidden, y, index * block_q, axis=0)

    empty = jnp.zeros((kv_heads, tokens, dim), hidden.dtype)
    known_k, known_v = (empty, empty) if before is None else before
    parts = PromptLayer(
        known_k,
        known_v,
        jnp.zeros((observed, heads, dim), hidden.dtype),
    )
    if implementation != "cudnn":
        # Bound here, where the type checker knows that it is not cuDNN.
        kernel = implementation

        def block(
            index: jax.Array, carry: tuple[jax.Array, PromptLayer]
        ) -> tuple[jax.Array, PromptLayer]:
            hidden, parts = carry
            x, q, parts = project(index, hidden, parts)
            attended = attend_block(
                q,
                parts.k,
                parts.v,
                start + index * block_q,
                block_k=block_k,
                implementation=kernel,
                interpret=interpret,
            )
            return finish(index, x, attended, hidden), parts

        return lax.fori_loop(0, blocks, block, (hidden, parts))

    def collect(
        index: jax.Array, carry: tuple[jax.Array, PromptLayer]
    ) -> tuple[jax.Array, PromptLayer]:
        queries, parts = carry
        _, q, parts = project(index, hidden, parts)
        return lax.dynamic_update_slice_in_dim(queries, q, index * block_q, axis=0), parts

    queries = jnp.zeros((tokens, heads, dim), hidden.dtype)
    queries, parts = lax.fori_loop(0, blocks, collect, (queries, parts))
    attended = attend_prompt(
        queries, parts.k.transpose(1, 0, 2), parts.v.transpose(1, 0, 2), length
    )

    def apply(index: jax.Array, hidden: jax.Array) -> jax.Array:
        x = lax.dynamic_slice_in_dim(hidden, index * block_q, block_q, axis=0)
        rows = lax.dynamic_slice_in_dim(attended, index * block_q, block_q, axis=0)
        return finish(index, x, rows, hidden)

    return lax.fori_loop(0, blocks, apply, hidden), parts


def prefill_bytes(
    *, tokens: int, width: int, kv_heads: int, heads: int, head_dim: int, itemsize: int, ffn: int
) -> int:
    """Device bytes that prefill of one prompt of padded length ``tokens`` needs beside weights.

    Hidden states (2 T E: the donated input may be copied once), keys and values of the layer being
    made (2 T K D), the pages of the layer before (2 T K D), and one block's logits and activations.
    """
    block_q, block_k = min(BLOCK_Q, tokens), min(BLOCK_K, tokens)
    lasting = 2 * tokens * width * itemsize + 4 * tokens * kv_heads * head_dim * itemsize
    logits = 2 * heads * block_q * block_k * 4
    block = block_q * (4 * width + 3 * ffn + 3 * (heads + 2 * kv_heads) * head_dim) * 4
    return lasting + logits + block
