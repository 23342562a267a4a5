"""Full attention: every key and value in HBM, every token attended to. The yardstick."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from kvdrive_jax.methods.base import BatchMethod, BatchRows, Tools, int32
from kvdrive_jax.models.model import ModelDef
from kvdrive_jax.pallas.attention import attend_step
from kvdrive_jax.pipeline.prefill import PromptLayer
from kvdrive_jax.pipeline.stages import Token, append_rows
from kvdrive_jax.plan import Plan


@partial(jax.jit, donate_argnames=("keys", "values"))
def _insert(
    keys: jax.Array, values: jax.Array, row: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Prompt keys and values [K, T', D] into row ``row`` of caches [B, K, T, D]."""
    fits = min(k.shape[1], keys.shape[2])
    zero = jnp.zeros((), jnp.int32)
    at = (row, zero, zero, zero)
    return (
        jax.lax.dynamic_update_slice(keys, k[None, :, :fits], at),
        jax.lax.dynamic_update_slice(values, v[None, :, :fits], at),
    )


@partial(jax.jit, static_argnames="model_def")
def _layer(
    model_def: ModelDef,
    leaves: tuple[jax.Array, ...],
    hidden: jax.Array,
    position: jax.Array,
    inv_freq: jax.Array,
    attention_factor: jax.Array,
    keys: jax.Array,
    values: jax.Array,
) -> tuple[jax.Array, Token]:
    layer = model_def.merge_layer(leaves)
    token = Token(*layer.attention_inputs(hidden, position, inv_freq, attention_factor))
    attended = attend_step(*token, keys, values, position)
    return layer.after_attention(hidden, attended.astype(hidden.dtype)), token


class FullAttention(BatchMethod):
    """Method ``full``. HBM: caches [B, K, T, D] per layer."""

    def __init__(self, tools: Tools, plan: Plan, rows: BatchRows) -> None:
        super().__init__(tools, plan, rows)
        config, shape = tools.model.config, plan.shape
        size = (shape.batch, config.num_kv_heads, shape.cache_tokens, config.head_dim)
        tools.ledger.reserve("hbm", "kv cache", plan.bytes_of("hbm", "kv cache"))
        dtype = tools.model.dtype
        self._caches = [
            (jnp.zeros(size, dtype), jnp.zeros(size, dtype)) for _ in range(config.num_layers)
        ]

    def absorb(self, row: int, layer: int, prompt: PromptLayer) -> None:
        keys, values = self._caches[layer]
        self._caches[layer] = _insert(keys, values, int32(row), prompt.k, prompt.v)

    def finish_prefill(self) -> None:
        jax.block_until_ready(self._caches)

    def layers(self, hidden: jax.Array) -> jax.Array:
        rows, model = self.rows, self.tools.model
        with self.tools.clock.measure("compute"):
            position = int32(rows.length)
            tokens = []
            for leaves, (keys, values) in zip(model.layers, self._caches, strict=True):
                hidden, token = _layer(
                    model.static,
                    leaves,
                    hidden,
                    position,
                    rows.inv_freq,
                    rows.attention_factor,
                    keys,
                    values,
                )
                tokens += [token.k, token.v]
            arrays = append_rows([x for cache in self._caches for x in cache], tokens, position)
            self._caches = [(arrays[i], arrays[i + 1]) for i in range(0, len(arrays), 2)]
        for row, count in enumerate(rows.counts):
            if rows.active[row]:
                count.steps += 1
                count.attended_tokens += int(rows.length[row]) + 1
        return hidden

    def close(self) -> None:
        if self._caches:
            self._caches = []
            self.tools.ledger.release("hbm", "kv cache")
