"""The one decoder. Families differ in configuration only.

The modules define structure; they are split once into flat leaves (`models.model`) and merged again
inside compiled functions, so no Module crosses a call on the hot path. Weights are stored
[in, out], with q, k and v side by side in one matrix and gate and up in another: one large read per
projection, which is what a decode step spends its time on. Products accumulate in float32 and norms
are computed in float32, whatever the weights' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import EllipsisType

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from kvdrive_jax.models.config import ModelConfig
from kvdrive_jax.models.packed import Packed, packed_product
from kvdrive_jax.models.rope import rotate


@dataclass(frozen=True, eq=False)
class OneOf:
    """One of several equal-shaped matrices, chosen as a program runs: in a layer's leaves it stands
    for a weight, so that one compiled layer serves all without a copy of theirs side by side.

    at: int32 scalar.
    """

    at: jax.Array
    matrices: tuple[jax.Array, ...]

    def __getitem__(self, _: EllipsisType) -> OneOf:
        return self


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32; returns the shape and dtype of `x`."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * _row(weight.astype(jnp.float32), wide)).astype(x.dtype)


def project(
    x: jax.Array, weight: jax.Array | OneOf | Packed, bias: jax.Array | None = None
) -> jax.Array:
    """x [..., in] @ weight [in, out] + bias [out]: accumulated in float32, in the dtype of `x`."""
    product = _contract(x, weight, weight_axis=0)
    if bias is not None:
        product = product + _row(bias.astype(jnp.float32), product)
    return product.astype(x.dtype)


def _contract(x: jax.Array, weight: jax.Array | OneOf | Packed, *, weight_axis: int) -> jax.Array:
    if isinstance(weight, Packed):
        return packed_product(x, weight)
    if isinstance(weight, OneOf):
        products = [
            partial(_contract, weight=one, weight_axis=weight_axis) for one in weight.matrices
        ]
        chosen: jax.Array = lax.switch(weight.at, products, x)
        return chosen
    # GPUs would round float32 operands to TF32 by default; who asks for float32 wants float32.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (weight_axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _row(vector: jax.Array, like: jax.Array) -> jax.Array:
    """A vector over the last axis, spread explicitly: rank promotion may be forbidden."""
    return jnp.broadcast_to(vector, like.shape)


def _value(parameter: nnx.Param[jax.Array] | None) -> jax.Array | None:
    return None if parameter is None else parameter[...]


class DecoderLayer(nnx.Module):
    """One transformer layer, cut where attention happens: the caller decides what attends to what.

    Parameters (E hidden, F intermediate, H/K heads, D head dim): input_norm [E], qkv [E, (H+2K)D],
    output [HD, E], post_norm [E], gate_up [E, 2F], down [F, E]; where configured qkv_bias, q_norm
    [D], k_norm [D], output_bias, gate_up_bias, down_bias.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        attended = config.num_heads * config.head_dim

        def parameter(*shape: int) -> nnx.Param[jax.Array]:
            return nnx.Param(jnp.zeros(shape, dtype))

        self.config = config
        self.input_norm = parameter(hidden)
        self.qkv = parameter(hidden, config.qkv_width)
        self.qkv_bias = parameter(config.qkv_width) if config.attention_bias else None
        self.q_norm = parameter(config.head_dim) if config.qk_norm else None
        self.k_norm = parameter(config.head_dim) if config.qk_norm else None
        self.output = parameter(attended, hidden)
        self.output_bias = parameter(hidden) if config.output_bias else None
        self.post_norm = parameter(hidden)
        self.gate_up = parameter(hidden, 2 * inner)
        self.gate_up_bias = parameter(2 * inner) if config.mlp_bias else None
        self.down = parameter(inner, hidden)
        self.down_bias = parameter(hidden) if config.mlp_bias else None

    def attention_inputs(
        self,
        hidden: jax.Array,
        positions: jax.Array,
        inv_freq: jax.Array,
        attention_factor: jax.Array | float,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Norm, q/k/v projection, bias, q/k norm and RoPE.

        Args:
            hidden: [..., E].
            positions: int32 [...].
            inv_freq: float32, broadcastable to [..., rotary_dim/2].
            attention_factor: float32, broadcastable to [...].

        Returns:
            q [..., H, D], k [..., K, D], v [..., K, D]; q is not scaled by D ** -0.5.
        """
        config = self.config
        normed = rms_norm(hidden, self.input_norm[...], config.rms_norm_eps)
        fused = project(normed, self.qkv[...], _value(self.qkv_bias))
        heads = fused.reshape(*hidden.shape[:-1], -1, config.head_dim)
        keys = config.num_heads + config.num_kv_heads
        q, k, v = (
            heads[..., : config.num_heads, :],
            heads[..., config.num_heads : keys, :],
            heads[..., keys:, :],
        )
        if self.q_norm is not None and self.k_norm is not None:
            q = rms_norm(q, self.q_norm[...], config.rms_norm_eps)
            k = rms_norm(k, self.k_norm[...], config.rms_norm_eps)
        q = rotate(q, positions, inv_freq, attention_factor)
        k = rotate(k, positions, inv_freq, attention_factor)
        return q, k, v

    def after_attention(self, hidden: jax.Array, attended: jax.Array) -> jax.Array:
        """Output projection, residual, norm, feed-forward, residual.

        Args:
            hidden: [..., E], the layer's input.
            attended: [..., H, D], what attention returned.

        Returns:
            [..., E], the layer's output.
        """
        config = self.config
        flat = attended.reshape(*hidden.shape[:-1], config.num_heads * config.head_dim)
        hidden = hidden + project(
            flat.astype(hidden.dtype), self.output[...], _value(self.output_bias)
        )
        normed = rms_norm(hidden, self.post_norm[...], config.rms_norm_eps)
        gate_up = project(normed, self.gate_up[...], _value(self.gate_up_bias))
        gate, up = (
            gate_up[..., : config.intermediate_size],
            gate_up[..., config.intermediate_size :],
        )
        return hidden + project(jax.nn.silu(gate) * up, self.down[...], _value(self.down_bias))


class Ends(nnx.Module):
    """What is before the first layer and after the last.

    Parameters: embedding [V, E], final_norm [E], and head [E, V] unless it is the embedding.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.config = config
        self.embedding = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), dtype))
        self.final_norm = nnx.Param(jnp.zeros((config.hidden_size,), dtype))
        self.head = (
            None
            if config.tied_embeddings
            else nnx.Param(jnp.zeros((config.hidden_size, config.vocab_size), dtype))
        )

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Tokens int [...] to hidden [..., E]; ids outside the vocabulary are clipped."""
        return jnp.take(self.embedding[...], tokens, axis=0, mode="clip")

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Final norm and head: hidden [..., E] to float32 [..., V]."""
        normed = rms_norm(hidden, self.final_norm[...], self.config.rms_norm_eps)
        if self.head is None:
            return _contract(normed, self.embedding[...], weight_axis=1)
        return _contract(normed, self.head[...], weight_axis=0)


class Decoder(nnx.Module):
    """The whole model: ends and L layers. Defines and is split; no compiled function takes it."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.config = config
        self.ends = Ends(config, dtype)
        self.layers = nnx.List([DecoderLayer(config, dtype) for _ in range(config.num_layers)])

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Tokens int [...] to hidden [..., E]."""
        return self.ends.embed(tokens)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Final norm and head: hidden [..., E] to float32 [..., V]."""
        return self.ends.logits(hidden)
