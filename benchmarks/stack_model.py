"""Models that layer stacks are made of: few layers of any shape, new tokens given.

The projections of a new token are computed, and cost what they cost; then a recorded token's
queries, keys and values take their place, so that selections recur from step to step as they do in
a real model and never depend on random weights.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.stack_kv import HeadShape, StackKV
from kvdrive_jax.methods.base import int32
from kvdrive_jax.models.config import ModelConfig
from kvdrive_jax.models.decoder import DecoderLayer
from kvdrive_jax.models.model import Leaves, Model, ModuleDef, define
from kvdrive_jax.models.presets import preset
from kvdrive_jax.models.rope import RopeConfig
from kvdrive_jax.models.weights import load_pretrained

VOCABULARY = 64
SHAPES = ("llama-3-8b", "smollm2", "tiny")


class RecordedLayer:
    """A decoder layer whose new token is a recorded one; its own is computed too."""

    def __init__(self, layer: DecoderLayer, bank: Leaves) -> None:
        self._layer = layer
        *self._bank, self._base = bank

    def attention_inputs(
        self,
        hidden: jax.Array,
        positions: jax.Array,
        inv_freq: jax.Array,
        attention_factor: jax.Array,
    ) -> tuple[jax.Array, ...]:
        """As ``DecoderLayer.attention_inputs``, for hidden [b, E]: some rows of the batch.

        attention_factor: [b], which row of the batch each is (`row_numbers`).
        """
        own = self._layer.attention_inputs(hidden, positions, inv_freq, attention_factor)
        row = attention_factor.astype(jnp.int32) - 1
        step = jnp.clip(positions - self._base[row], 0, self._bank[0].shape[1] - 1)
        # A choice by value: XLA can neither leave the projection out nor change a recorded bit.
        return tuple(
            jnp.where(jnp.isfinite(real), recorded[row, step], real)
            for real, recorded in zip(own, self._bank, strict=True)
        )

    def after_attention(self, hidden: jax.Array, attended: jax.Array) -> jax.Array:
        """As ``DecoderLayer.after_attention``."""
        return self._layer.after_attention(hidden, attended)


def row_numbers(batch: int) -> jax.Array:
    """[B] float32, for ``BatchRows.attention_factor``: 1 for the first row. It is the one value
    that stages take along for each row and that recorded tokens do not need for what it is."""
    return jnp.arange(1, batch + 1, dtype=jnp.float32)


@dataclass(frozen=True)
class RecordedDef(ModuleDef):
    """A layer's structure whose leaves go on with the bank: q [B, S, H, D], k and v [B, S, K, D],
    base [B] int32."""

    def merge(self, leaves: Leaves) -> Any:
        """The layer, inside a compiled function."""
        own = len(self.names)
        return RecordedLayer(super().merge(leaves[:own]), leaves[own:])


def stack_config(shape: str, layers: int, positions: int) -> ModelConfig:
    """``layers`` layers of a model's shape, a tiny vocabulary. ValueError for another shape."""
    if shape == "llama-3-8b":
        whole = preset("Llama-3-8B-Instruct-Gradient-1048k")
    elif shape == "tiny":
        whole = ModelConfig(
            architecture="llama",
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_layers=layers,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            rms_norm_eps=1e-5,
            max_positions=positions,
            rope=RopeConfig(theta=1e4, rotary_dim=32),
        )
    else:
        raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    return dataclasses.replace(
        whole, num_layers=layers, vocab_size=VOCABULARY, max_positions=positions
    )


def random_model(config: ModelConfig, dtype: Any, seed: int = 0) -> Model:
    """Random weights of the size that keeps activations near one."""
    static, layer, ends = define(config, dtype)
    draw = np.random.default_rng(seed)

    def make(leaf: Any) -> jax.Array:
        if len(leaf.shape) == 1:
            return jnp.ones(leaf.shape, leaf.dtype)
        values = draw.standard_normal(leaf.shape, np.float32)
        values *= leaf.shape[0] ** -0.5
        return jnp.asarray(values.astype(leaf.dtype))

    layers = tuple(tuple(make(leaf) for leaf in layer) for _ in range(config.num_layers))
    return Model(static, layers, tuple(make(leaf) for leaf in ends), f"stack-{seed}")


def stack_model(shape: str, layers: int, dtype: str, positions: int) -> Model:
    """The model of a stack; ``smollm2`` is the bundled one, its first layers with their weights."""
    if shape != "smollm2":
        return random_model(stack_config(shape, layers, positions), dtype)
    whole = load_pretrained("demo", dtype)
    config = dataclasses.replace(
        whole.config,
        num_layers=min(layers, whole.config.num_layers),
        max_positions=max(positions, whole.config.max_positions),
    )
    static = dataclasses.replace(whole.static, config=config)
    return Model(static, whole.layers[: config.num_layers], whole.ends, whole.digest)


def head_shape(model: Model) -> HeadShape:
    """What KV must have."""
    config = model.config
    return HeadShape(
        layers=config.num_layers,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=model.dtype,
    )


def with_recorded(model: Model, source: StackKV) -> Model:
    """The model with a bank of recorded tokens in each layer."""
    definition = RecordedDef(model.layer_def.graph, model.layer_def.tree, model.layer_def.names)
    static = dataclasses.replace(model.static, layer_def=definition)
    base = int32(np.array(source.base))
    layers = tuple(
        (*leaves, *(jnp.asarray(array) for array in source.bank(layer)), base)
        for layer, leaves in enumerate(model.layers)
    )
    return Model(static, layers, model.ends, model.digest)
