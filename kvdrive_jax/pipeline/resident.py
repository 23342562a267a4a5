"""The resident step: all layers, the logits and the next token in one program, several steps of it
per dispatch.

For batches whose windows hold every chunk, so that no step waits for the host. A burst ends after
so many steps, or as soon as every session has drawn a token that ends it; what else ends a session
(stop strings, cancelling) only the host knows, and it drops what comes after.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvdrive_jax.index.rest import LayerIndex
from kvdrive_jax.pipeline.stages import Leaves, Near, StageSpec, Step, append_rows, resident_layer
from kvdrive_jax.sampling import SamplingRule, SamplingValues, all_finite, choose

MOST_STEPS = 32
"""Steps of one burst, at most."""

EOS_CAPACITY = 8
"""End-of-sequence tokens come padded to a multiple of this, so that their number compiles nothing
anew."""


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
    """What a burst reads and does not change, by layer where it is a tuple.

    n_chunks: [B] int32; inv_freq: [B, R/2]; attention_factor: [B]; numbers: [B] int32, of the
    sessions' random streams; eos: [X] int32, -1 for none.
    """

    layers: tuple[Leaves, ...]
    ends: Leaves
    index: tuple[LayerIndex, ...]
    window: tuple[jax.Array, ...]
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
    near: tuple[Near, ...]
    tokens: jax.Array
    finite: jax.Array


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
        rows = []
        for leaves, near, index, window in zip(
            held.layers, state.near, held.index, held.window, strict=True
        ):
            hidden, token, _ = resident_layer(spec, leaves, hidden, step, near, index, window)
            # Layers are kept apart, as where each is a program: what is fused is rounded otherwise.
            hidden, *new = lax.optimization_barrier((hidden, token.k, token.v))
            rows += new
        logits = lax.optimization_barrier(ends.logits(hidden))
        # Rows wait for the logits, or else near buffers would be copied: nothing says that all
        # reading is done when they are written.
        logits, rows = lax.optimization_barrier((logits, rows))
        buffers = [array for near in state.near for array in near]
        buffers = append_rows(buffers, rows, at.near_row)
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
            tuple(Near(*buffers[i : i + 2]) for i in range(0, len(buffers), 2)),
            lax.dynamic_update_index_in_dim(state.tokens, drawn, state.step, axis=0),
            lax.dynamic_update_index_in_dim(state.finite, finite, state.step, axis=0),
        )

    batch = at.token.shape[0]
    state = _State(
        jnp.zeros((), jnp.int32),
        at,
        near,
        jnp.zeros((MOST_STEPS, batch), jnp.int32),
        jnp.zeros((MOST_STEPS, batch), bool),
    )
    state = lax.while_loop(going, advance, state)
    return Burst(state.tokens, state.finite, state.step), state.near
