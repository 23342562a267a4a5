"""The resident step: all layers, the logits and the next token in one program, several steps of it
per dispatch.

For batches whose windows hold every chunk, so that no step waits for the host. A burst ends after
so many steps, or as soon as every session has drawn a token that ends it; what else ends a session
(stop strings, cancelling) only the host knows, and it drops what comes after.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvdrive_jax import compat
from kvdrive_jax.index.rest import LayerIndex
from kvdrive_jax.models.decoder import OneOf
from kvdrive_jax.models.packed import Packed
from kvdrive_jax.pipeline.stages import Leaves, Near, StageSpec, Step, append_rows, resident_step
from kvdrive_jax.sampling import SamplingRule, SamplingValues, all_finite, choose

MOST_STEPS = 32
"""Steps of one burst, at most."""

EOS_CAPACITY = 8
"""End-of-sequence tokens come padded to a multiple of this, so that their number compiles nothing
anew."""


def padded_eos(tokens: Iterable[int]) -> np.ndarray[Any, Any]:
    """End-of-sequence tokens as an array [X] int32 whose length is hardly ever another."""
    known = sorted(tokens)
    padding = -len(known) % EOS_CAPACITY if known else EOS_CAPACITY
    return np.array([*known, *[-1] * padding], np.int32)


class Sequences(NamedTuple):
    """Where every session of the batch stands between two steps.

    token: [B] int32, the token that the next step decodes; position: [B] int32, where it stands;
    near_row: [B] int32, the near row it takes; drawn: [B] int32, tokens drawn from its random
    stream; active: [B] bool, whether it has not ended.
    """

    token: jax.Array
    position: jax.Array
    near_row: jax.Array
    drawn: jax.Array
    active: jax.Array


class Held(NamedTuple):
    """What a burst reads and does not change.

    layers: L leaves; ends: leaves; indexes: one for each layer, or one of all (`stack_layers`), as
    `scans` says; window: [B, L K N, 2, c, D], as of ``stages.resident_layer``; n_chunks: [B] int32;
    inv_freq: [B, R/2]; attention_factor: [B]; numbers: [B] int32, of the sessions' random streams;
    eos: [X] int32, -1 for none.
    """

    layers: tuple[Leaves, ...]
    ends: Leaves
    indexes: tuple[LayerIndex, ...] | LayerIndex
    window: jax.Array
    n_chunks: jax.Array
    inv_freq: jax.Array
    attention_factor: jax.Array
    numbers: jax.Array
    eos: jax.Array


class Burst(NamedTuple):
    """What came of a burst: tokens [S, B] int32, drawn from logits that were all finite [S, B]
    bool, of which the first ``steps``, an int32 scalar, were made."""

    tokens: jax.Array
    finite: jax.Array
    steps: jax.Array


class _State(NamedTuple):
    step: jax.Array
    at: Sequences
    near: Any
    tokens: jax.Array
    finite: jax.Array


def scans() -> bool:
    """Whether a burst goes through the layers in a loop, which compiles one of them, or in a
    program that has them all: what a loop chooses from, a GPU would wait for."""
    return compat.platform() == "cpu"


@jax.jit
def stack_layers(layers: Sequence[Any]) -> Any:
    """Arrays of all layers as one [L, ...]."""
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)


@partial(jax.jit, static_argnames="count")
def split_layers(stacked: Any, count: int) -> list[Any]:
    """`stack_layers`, backwards: ``count`` layers."""
    return [jax.tree.map(lambda array, i=i: array[i], stacked) for i in range(count)]


@partial(jax.jit, static_argnames=("spec", "rule"), donate_argnames="near")
def resident_burst(
    spec: StageSpec,
    held: Held,
    near: tuple[Near, ...],
    at: Sequences,
    limit: jax.Array,
    values: SamplingValues,
    rule: SamplingRule,
) -> tuple[Burst, tuple[Near, ...]]:
    """Up to ``limit`` steps of all sessions, at most `MOST_STEPS`.

    Tokens are those of as many single steps. limit: int32 scalar; no session may reach the end of
    its near buffer, of L layers, which is donated, before that many steps. A session that has
    ended stays where it is.
    """
    ends = spec.model_def.merge_ends(held.ends)
    through = _scanned if scans() else _unrolled

    def going(state: _State) -> jax.Array:
        return (state.step < limit) & state.at.active.any()

    def advance(state: _State) -> _State:
        at = state.at
        step = Step(
            position=at.position,
            n_chunks=jnp.where(at.active, held.n_chunks, 0),
            near_row=at.near_row,
            inv_freq=held.inv_freq,
            attention_factor=held.attention_factor,
        )
        hidden = lax.optimization_barrier(ends.embed(at.token))
        hidden, written = through(spec, held, hidden, step, state.near)
        logits = lax.optimization_barrier(ends.logits(hidden))
        drawn = choose(logits, held.numbers, at.drawn, values, rule)
        finite = all_finite(logits)
        moved = at.active.astype(jnp.int32)
        active = at.active & finite & (drawn[:, None] != held.eos).all(axis=-1)
        return _State(
            state.step + 1,
            Sequences(
                token=jnp.where(active, drawn, at.token),
                position=at.position + moved,
                near_row=at.near_row + moved,
                drawn=at.drawn + moved,
                active=active,
            ),
            written,
            lax.dynamic_update_index_in_dim(state.tokens, drawn, state.step, axis=0),
            lax.dynamic_update_index_in_dim(state.finite, finite, state.step, axis=0),
        )

    batch = at.token.shape[0]
    state = _State(
        jnp.zeros((), jnp.int32),
        at,
        stack_layers(near) if scans() else near,
        jnp.zeros((MOST_STEPS, batch), jnp.int32),
        jnp.zeros((MOST_STEPS, batch), bool),
    )
    state = lax.while_loop(going, advance, state)
    after = split_layers(state.near, len(near)) if scans() else state.near
    return Burst(state.tokens, state.finite, state.step), tuple(after)


def _unrolled(
    spec: StageSpec, held: Held, hidden: jax.Array, step: Step, near: tuple[Near, ...]
) -> tuple[jax.Array, tuple[Near, ...]]:
    """Hidden [B, E] through all layers, and near buffers with the new token."""
    rows = []
    parts = zip(held.layers, near, held.indexes, strict=True)
    for layer, (leaves, beside, index) in enumerate(parts):
        number = jnp.int32(layer)
        hidden, token, _ = resident_step(
            spec, leaves, hidden, step, beside, index, held.window, number
        )
        # Layers are kept apart, as where each is a program: what is fused is rounded otherwise.
        hidden, *new = lax.optimization_barrier((hidden, token.k, token.v))
        rows += new
    # Rows wait for the last layer, or else near buffers would be copied: nothing would say that all
    # reading is done when they are written.
    hidden, rows = lax.optimization_barrier((hidden, rows))
    buffers = append_rows([array for pair in near for array in pair], rows, step.near_row)
    return hidden, tuple(Near(*buffers[i : i + 2]) for i in range(0, len(buffers), 2))


def _scanned(
    spec: StageSpec, held: Held, hidden: jax.Array, step: Step, near: Near
) -> tuple[jax.Array, Near]:
    """The same with one layer compiled: near k, v [L, B, K, W, D]."""
    kinds = list(zip(*held.layers, strict=True))

    def leaf(arrays: tuple[Any, ...], layer: jax.Array) -> Any:
        # Vectors are stacked; matrices stay where they are.
        if isinstance(arrays[0], Packed):
            return replace(arrays[0], layer=layer)
        if arrays[0].ndim > 1:
            return OneOf(layer, arrays)
        return lax.dynamic_index_in_dim(jnp.stack(arrays), layer, keepdims=False)

    def through(hidden: jax.Array, part: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        layer, beside, index = part
        leaves = tuple(leaf(arrays, layer) for arrays in kinds)
        hidden, token, _ = resident_step(
            spec, leaves, hidden, step, beside, index, held.window, layer
        )
        return hidden, (token.k, token.v)

    numbers = jnp.arange(len(held.layers), dtype=jnp.int32)
    hidden, rows = lax.scan(through, hidden, (numbers, near, held.indexes))
    sessions = jnp.arange(hidden.shape[0])

    def append(buffer: jax.Array, row: jax.Array) -> jax.Array:
        return buffer.at[sessions, :, step.near_row].set(row, mode="drop")

    written = [jax.vmap(append)(buffer, row) for buffer, row in zip(near, rows, strict=True)]
    return hidden, Near(*written)
