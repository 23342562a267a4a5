"""Ways to look into an engine or to give it a prompt's KV, without another path through it.

Each is a context manager that stands in for one function the engine calls; everything else is the
engine's own code. Sessions one at a time (batch size 1).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from kvdrive_jax import batch
from kvdrive_jax.methods.base import BatchMethod, Drawn, Draws
from kvdrive_jax.methods.kvdrive import KVDrive
from kvdrive_jax.models.model import ModelDef
from kvdrive_jax.pipeline.prefill import PromptLayer


class OneLetterTokenizer:
    """Turns every token into one letter, so that a stream has one event for each of them."""

    has_template = False
    eos_token_ids: frozenset[int] = frozenset()
    drops_first_space = False

    def piece(self, token_id: int) -> bytes:
        """The bytes of a token."""
        return b"x"


class _SharedPrefill:
    """``prefill_layer`` that computes each layer of one prompt once and then remembers it."""

    def __init__(self) -> None:
        self._real = batch.prefill_layer
        self._layers: list[PromptLayer] = []
        self._inputs: list[tuple[Any, ...]] = []
        self._last: jax.Array | None = None
        self._calls = 0

    def __call__(
        self,
        static: ModelDef,
        leaves: tuple[jax.Array, ...],
        hidden: jax.Array,
        length: jax.Array,
        inv_freq: jax.Array,
        factor: jax.Array,
        **options: Any,
    ) -> tuple[jax.Array, PromptLayer]:
        layers = static.config.num_layers
        layer = self._calls % layers
        inputs = (id(leaves), hidden.shape, int(length), np.asarray(inv_freq).tobytes(), options)
        self._calls += 1
        if self._calls <= layers:
            hidden, prompt = self._real(static, leaves, hidden, length, inv_freq, factor, **options)
            self._inputs.append(inputs)
            self._layers.append(prompt)
            self._last = hidden
            return hidden, prompt
        if inputs != self._inputs[layer]:
            raise RuntimeError(
                f"shared prefill: layer {layer} is asked for another prompt or model"
            )
        assert self._last is not None
        return (self._last if layer == layers - 1 else hidden), self._layers[layer]


@contextmanager
def shared_prefill() -> Iterator[None]:
    """Prefill of one prompt, computed for the first engine that asks and given to the others.

    Engines must share model, prompt and ``observation``; RuntimeError otherwise. What differs
    between methods begins after it: index, offload, decode.
    """
    with patch.object(batch, "prefill_layer", _SharedPrefill()):
        yield


@partial(jax.jit, static_argnames=("static", "tokens", "observed"))
def _random_layer(key: jax.Array, static: ModelDef, tokens: int, observed: int) -> PromptLayer:
    config = static.config
    keys = jax.random.split(key, 3)
    size = (config.num_kv_heads, tokens, config.head_dim)
    return PromptLayer(
        jax.random.normal(keys[0], size, static.dtype),
        jax.random.normal(keys[1], size, static.dtype),
        jax.random.normal(keys[2], (observed, config.num_heads, config.head_dim), static.dtype),
    )


@contextmanager
def synthetic_prefill(seed: int = 0) -> Iterator[None]:
    """Standard normal keys, values and queries in place of a prompt's, of the same shapes.

    For contexts whose prefill would take too long: indexing, offload and decode are real, and cost
    what they cost for any content, except that the hit rate is that of random keys.
    """
    calls = iter(range(1_000_000))

    def prefill_layer(
        static: ModelDef,
        leaves: tuple[jax.Array, ...],
        hidden: jax.Array,
        *_: jax.Array,
        observed: int,
        **options: Any,
    ) -> tuple[jax.Array, PromptLayer]:
        key = jax.random.fold_in(jax.random.key(seed), next(calls))
        return hidden, _random_layer(key, static, hidden.shape[0], observed)

    with patch.object(batch, "prefill_layer", prefill_layer):
        yield


@contextmanager
def single_steps() -> Iterator[None]:
    """Each step by itself, as where bursts would not pay: one event after another, with logits."""
    with patch.object(batch, "BURST_FROM", math.inf):
        yield


@contextmanager
def recorded_bursts() -> Iterator[list[tuple[float, int]]]:
    """When each burst began, in seconds of ``time.perf_counter``, and its steps."""
    seen: list[tuple[float, int]] = []
    real = KVDrive.burst

    def burst(self: KVDrive, draws: Draws, limit: int) -> Drawn | None:
        start = time.perf_counter()
        drawn = real(self, draws, limit)
        if drawn is not None:
            seen.append((start, len(drawn.tokens)))
        return drawn

    with patch.object(KVDrive, "burst", burst):
        yield seen


@contextmanager
def forced_tokens(ids: Sequence[int]) -> Iterator[None]:
    """The engine takes these tokens, whatever its logits say; give it as many new tokens."""
    coming = iter(ids)

    def next_tokens(logits: jax.Array, *_: Any) -> tuple[jax.Array, jax.Array]:
        return jnp.array([next(coming)], jnp.int32), jnp.isfinite(logits).all(axis=-1)

    with single_steps(), patch.object(batch, "_next_tokens", next_tokens):
        yield


@contextmanager
def recorded_logits() -> Iterator[list[np.ndarray[Any, Any]]]:
    """Logits [V] of the prompt's last token and of every step after it, as the engine made them."""
    seen: list[np.ndarray[Any, Any]] = []
    last, step = batch.last_logits, BatchMethod.step

    def keep(logits: jax.Array) -> jax.Array:
        seen.append(np.asarray(logits[0].astype(jnp.float32)))
        return logits

    def last_logits(*arguments: Any) -> jax.Array:
        return keep(last(*arguments))

    def step_logits(self: BatchMethod, tokens: jax.Array) -> jax.Array:
        return keep(step(self, tokens))

    with (
        single_steps(),
        patch.object(batch, "last_logits", last_logits),
        patch.object(BatchMethod, "step", step_logits),
    ):
        yield seen
