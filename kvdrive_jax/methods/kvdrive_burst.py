"""Bursts of a resident batch: what the compiled burst is given, and what comes of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvdrive_jax.methods.base import BatchRows, Drawn, Draws, Tools, int32
from kvdrive_jax.methods.kvdrive_state import BatchState
from kvdrive_jax.pipeline.resident import MOST_STEPS, Held, Sequences, resident_burst, scans
from kvdrive_jax.pipeline.stages import StageSpec

Array = np.ndarray[Any, Any]


def draw_burst(
    tools: Tools,
    spec: StageSpec,
    state: BatchState,
    rows: BatchRows,
    draws: Draws,
    *,
    n_chunks: Array,
    near_row: Array,
    limit: int,
) -> Drawn:
    """At most ``limit`` steps of a resident batch; its near buffers take the new tokens.

    n_chunks, near_row: [B], chunks to choose from, and the near row of each next token. No session
    may fill its near buffer in so many steps.
    """
    model = tools.model
    held = Held(
        layers=model.layers,
        ends=model.ends,
        indexes=state.stacked_index() if scans() else tuple(state.index[0]),
        window=state.windows[0],
        n_chunks=int32(n_chunks),
        inv_freq=rows.inv_freq,
        attention_factor=rows.attention_factor,
        numbers=draws.numbers,
        eos=draws.eos,
    )
    at = Sequences(
        token=int32(np.array(draws.last)),
        position=int32(rows.length),
        near_row=int32(near_row),
        drawn=int32(np.array(draws.drawn)),
        active=jnp.asarray(rows.active),
    )
    sampling = draws.sampling
    with tools.clock.measure("compute"):
        burst, near = resident_burst(
            spec,
            held,
            tuple(state.near[0]),
            at,
            int32(min(limit, MOST_STEPS)),
            sampling.values,
            sampling.rule,
        )
        state.near[0] = list(near)
        tokens, finite, steps = jax.device_get(burst)
    return Drawn(tokens[:steps], finite[:steps])
