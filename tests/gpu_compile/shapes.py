"""Real shapes: what the engine would hold for a published model, a context and a batch.

Every array is a `jax.ShapeDtypeStruct`: sizes come from the same plan that the engine follows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvdrive_jax.budgets import Budgets
from kvdrive_jax.config import KVDriveConfig, RetrievalConfig, TierConfig, WindowConfig
from kvdrive_jax.models.config import ModelConfig
from kvdrive_jax.models.model import Model, abstract_model
from kvdrive_jax.models.presets import PRESETS
from kvdrive_jax.models.rope import RopeConfig
from kvdrive_jax.pipeline.prefill import PromptLayer
from kvdrive_jax.pipeline.stages import Near, StageSpec, Step
from kvdrive_jax.plan import Plan, plan_batch
from kvdrive_jax.window.directory import Directory, empty_directory
from kvdrive_jax.window.eviction import smooths

Struct = jax.ShapeDtypeStruct

MODELS = {
    "llama-3-8b": "Llama-3-8B-Instruct-Gradient-1048k",
    "qwen3-8b": "Qwen3-8B",
    "qwen3-14b": "Qwen3-14B",
    "phi-4-mini": "Phi-4-mini-instruct",
}
CONTEXTS = {"32K": 32768, "128K": 131072, "1M": 1048576}
ODD_TOKENS = 4101


class OddModel(NamedTuple):
    """What makes tiles difficult."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: Any
    chunk_size: int


ODD = {
    "g3-d64-f32-c4": OddModel(9, 3, 64, jnp.float32, 4),
    "g7-d80-f16-c1": OddModel(14, 2, 80, jnp.float16, 1),
    "g16-d96-bf16-c2": OddModel(16, 1, 96, jnp.bfloat16, 2),
    "g1-d256-f32-c8": OddModel(2, 2, 256, jnp.float32, 8),
}
BUDGET = 2048
NEW_TOKENS = 256
_ENOUGH = Budgets(hbm=2**50, dram=2**50, ssd=2**50)


def model_config(name: str) -> ModelConfig:
    """A published model, allowed any context: its shapes are what counts here; or an odd one."""
    if name in ODD:
        odd = ODD[name]
        return replace(
            model_config("llama-3-8b"),
            num_heads=odd.heads,
            num_kv_heads=odd.kv_heads,
            head_dim=odd.head_dim,
            hidden_size=odd.heads * odd.head_dim,
            rope=RopeConfig(rotary_dim=odd.head_dim),
        )
    config = PRESETS[MODELS[name]]
    return replace(config, max_positions=max(config.max_positions, 2 * CONTEXTS["1M"]))


@functools.cache
def _abstract_model(name: str) -> Model:
    return abstract_model(model_config(name), ODD[name].dtype if name in ODD else jnp.bfloat16)


@dataclass(frozen=True)
class Shape:
    """One model, context, batch and index; everything else follows.

    Attributes:
        model: a key of `MODELS` or of `ODD`.
        context: a key of `CONTEXTS`, or ``odd``.
        batch: B.
        index, estimate, scan_one_in: as the options of the same names.
    """

    model: str
    context: str
    batch: int
    index: str = "clusters"
    estimate: str = "none"
    scan_one_in: int = 1

    @property
    def label(self) -> str:
        """For tables and test ids."""
        return f"{self.model}-{self.context}-b{self.batch}"

    @property
    def tokens(self) -> int:
        """Tokens of every prompt."""
        return CONTEXTS.get(self.context, ODD_TOKENS) - NEW_TOKENS

    @property
    def config(self) -> ModelConfig:
        """The model's."""
        return model_config(self.model)

    @property
    def weights(self) -> Model:
        """The model, without weights."""
        return _abstract_model(self.model)

    @property
    def layer(self) -> tuple[Any, ...]:
        """Leaves of one layer."""
        return self.weights.layers[0]

    @functools.cached_property
    def settings(self) -> KVDriveConfig:
        """What a user would have asked for: windows of twice the budget, an SSD tier."""
        return KVDriveConfig(
            retrieval=RetrievalConfig(
                budget=BUDGET,
                index=self.index,
                estimate=self.estimate,
                scan_one_in=self.scan_one_in,
                chunk_size=ODD[self.model].chunk_size if self.model in ODD else 4,
            ),
            window=WindowConfig(multiple=2.0),
            tiers=TierConfig(),
        )

    @functools.cached_property
    def plan(self) -> Plan:
        """Of the kvdrive method."""
        return plan_batch(
            self.config,
            self.dtype,
            1,
            self.settings,
            (self.tokens,) * self.batch,
            NEW_TOKENS,
            budgets=_ENOUGH,
        )

    @functools.cached_property
    def spec(self) -> StageSpec:
        """What the stages are specialised to."""
        retrieval = self.settings.retrieval
        assert self.plan.retrieval is not None
        return StageSpec(
            model_def=self.weights.static,
            retrieval=self.plan.retrieval,
            rule=retrieval.group_rule,
            selected=self.plan.shape.selected,
            sink=retrieval.sink,
            chunk_size=retrieval.chunk_size,
            eviction=self.settings.window.eviction,
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of weights and KV."""
        return self.weights.dtype

    def array(self, *sizes: int, dtype: Any = None) -> Struct:
        """An array that is not there, of the model's dtype unless another is given."""
        return Struct(sizes, dtype or self.dtype)

    def ids(self, *sizes: int) -> Struct:
        """An int32 array that is not there."""
        return Struct(sizes, jnp.int32)

    @property
    def hidden(self) -> Struct:
        """[B, E]."""
        return self.array(self.batch, self.config.hidden_size)

    @property
    def queries(self) -> Struct:
        """[B, H, D]."""
        return self.array(self.batch, self.config.num_heads, self.config.head_dim)

    @property
    def step(self) -> Step:
        """Where the sessions stand."""
        rows = self.ids(self.batch)
        rotary = self.config.rope.rotary_dim // 2
        return Step(
            position=rows,
            n_chunks=rows,
            near_row=rows,
            inv_freq=self.array(self.batch, rotary, dtype=jnp.float32),
            attention_factor=self.array(self.batch, dtype=jnp.float32),
        )

    @property
    def near(self) -> Near:
        """Sink, local and unflushed tokens of one layer."""
        config = self.config
        size = (self.batch, config.num_kv_heads, self.plan.shape.near_capacity, config.head_dim)
        return Near(self.array(*size), self.array(*size))

    def pages(self, *sizes: int) -> Struct:
        """[..., 2, c, D]."""
        return self.array(*sizes, 2, self.spec.chunk_size, self.config.head_dim)

    @property
    def pool(self) -> Struct:
        """All windows of all layers, of one where they hold every chunk: [B, R, 2, c, D]."""
        layout = self.plan.layout
        return self.resident if layout is None else self.pages(self.batch, layout.rows)

    @property
    def resident(self) -> Struct:
        """A window that holds every chunk of all layers: [B, L K N, 2, c, D]."""
        config = self.config
        rows = config.num_layers * config.num_kv_heads * self.plan.shape.chunk_capacity
        return self.pages(self.batch, rows)

    @property
    def directory(self) -> Directory:
        """Of one layer."""
        shape, slots = self.plan.shape, self.plan.window_slots
        return jax.eval_shape(
            lambda: empty_directory(
                self.batch,
                self.config.num_kv_heads,
                shape.chunk_capacity,
                slots,
                slots,
                smooths=smooths(self.spec.eviction),
            )
        )

    @property
    def layer_index(self) -> Any:
        """The index of one layer, all sessions."""
        config, shape = self.config, self.plan.shape
        retrieval = self.spec.retrieval
        return jax.eval_shape(
            lambda: retrieval.empty(
                self.batch,
                config.num_kv_heads,
                config.head_dim,
                shape.chunk_capacity,
                self.plan.cluster_capacity,
            )
        )

    @property
    def prompt_layer(self) -> PromptLayer:
        """What prefill of one layer leaves."""
        config, tokens = self.config, self.plan.shape.prompt_capacity
        keys = self.array(config.num_kv_heads, tokens, config.head_dim)
        observed = self.settings.retrieval.observation
        return PromptLayer(keys, keys, self.array(observed, config.num_heads, config.head_dim))
