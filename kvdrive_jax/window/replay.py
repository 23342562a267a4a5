"""Any policy and window size over a trace, without the model: the engine's directory, in a loop.

All layers go through at once, as sessions of one directory. What a replay counts is what the engine
fetches, chunk for chunk, as long as the policy needs no score below the trace's depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from kvdrive_jax.window.directory import Directory, empty_directory, insert_row, observe, place
from kvdrive_jax.window.eviction import lookahead, policy, smooths
from kvdrive_jax.window.layout import WindowLayout
from kvdrive_jax.window.trace import Trace
from kvdrive_jax.window.warm import warm_slots

BELADY = "belady"
"""The policy that knows the future: what is selected again last goes first. Only a replay has it,
as the ceiling of what any policy can do."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a window would have done.

    selected, missed: [steps, L, K] int32, chunks selected, and those that were not in their window.
    """

    selected: npt.NDArray[np.int32]
    missed: npt.NDArray[np.int32]

    @property
    def hit_rate(self) -> float:
        """Hits / selected chunks."""
        total = int(self.selected.sum())
        return 1 - int(self.missed.sum()) / total if total else 0.0

    @property
    def hits(self) -> npt.NDArray[np.float64]:
        """[L, K] mean hits per step."""
        mean: npt.NDArray[np.float64] = (self.selected - self.missed).mean(axis=0)
        return mean


def replay(trace: Trace, layout: WindowLayout, eviction: str, *, skip: int = 0) -> Replay:
    """Windows of the sizes of ``layout`` under a policy of `eviction.POLICIES`, or `BELADY`.

    skip: first steps that are run but not counted.

    Raises ValueError for another policy, or a layout of another shape.
    """
    if eviction != BELADY:
        policy(eviction)
    if (layout.layers, layout.kv_heads) != (trace.layers, trace.kv_heads):
        raise ValueError(
            f"layout must be of {trace.layers} layers and {trace.kv_heads} kv heads, got "
            f"{layout.layers} and {layout.kv_heads}"
        )
    if layout.selected != trace.info.selected:
        raise ValueError(
            f"layout must be for a selection of {trace.info.selected} chunks, got {layout.selected}"
        )
    directory = warm_directory(trace, layout, eviction)
    ids, scores = jnp.asarray(trace.ids), jnp.asarray(trace.scores)
    if eviction == BELADY:
        first, after = next_uses(trace.selection, trace.info.chunk_capacity)
        missed = _belady(directory, ids[..., : layout.selected], jnp.asarray(first), after)
    else:
        missed = _replay(directory, ids, scores, count=layout.selected, eviction=eviction)
    selected = (trace.selection >= 0).sum(axis=-1, dtype=np.int32)
    return Replay(selected=selected[skip:], missed=np.asarray(missed)[skip:])


def warm_directory(trace: Trace, layout: WindowLayout, eviction: str) -> Directory:
    """Windows as the trace's prompt leaves them: all layers as sessions of one directory."""
    directory = empty_directory(
        trace.layers,
        trace.kv_heads,
        trace.info.chunk_capacity,
        layout.largest,
        layout.capacity,
        layout.keeps,
        smooths=eviction != BELADY and smooths(eviction),
    )
    if not trace.warm.shape[-1]:
        return directory
    ids = warm_slots(jnp.asarray(trace.warm), directory.capacity, layout.largest)
    return _insert(directory, ids)


@jax.jit
def _insert(directory: Directory, ids: jax.Array) -> Directory:
    """insert_row of every layer: ids [L, K, S]."""

    def one(layer: jax.Array, directory: Directory) -> Directory:
        return insert_row(directory, layer, ids[layer])

    return lax.fori_loop(0, ids.shape[0], one, directory)


@partial(jax.jit, static_argnames=("count", "eviction"))
def _replay(
    directory: Directory, ids: jax.Array, scores: jax.Array, *, count: int, eviction: str
) -> jax.Array:
    """Missed chunks [steps, L, K] int32."""
    layers, kv_heads, chunks = directory.slot_of_chunk.shape
    at = (jnp.arange(layers)[:, None, None], jnp.arange(kv_heads)[:, None])

    def step(directory: Directory, ranked: tuple[jax.Array, jax.Array]) -> Any:
        ids, scores = ranked
        # What the trace does not rank has at most the lowest score that it tells; where it tells
        # fewer than it could, there are no more.
        lowest = jnp.where(ids[..., -1:] < 0, -jnp.inf, scores[..., -1:])
        unranked = jnp.broadcast_to(lowest, (layers, kv_heads, chunks))
        known = unranked.at[(*at, jnp.where(ids < 0, chunks, ids))].set(scores, mode="drop")
        selected = ids[..., :count]
        directory = observe(directory, known, selected)
        priority = policy(eviction)(directory, known)
        directory, _, miss = place(directory, selected, priority)
        return directory, miss.sum(axis=-1, dtype=jnp.int32)

    return lax.scan(step, directory, (ids, scores))[1]


@jax.jit
def _belady(directory: Directory, ids: jax.Array, first: jax.Array, after: jax.Array) -> jax.Array:
    """Missed chunks [steps, L, K] int32; first, after as in `next_uses`."""
    layers, kv_heads, chunks = directory.slot_of_chunk.shape
    at = (jnp.arange(layers)[:, None, None], jnp.arange(kv_heads)[:, None])

    def step(carry: tuple[Directory, jax.Array], now: tuple[jax.Array, jax.Array]) -> Any:
        directory, coming = carry
        ids, after = now
        coming = coming.at[(*at, jnp.where(ids < 0, chunks, ids))].set(after, mode="drop")
        directory, _, miss = place(directory, ids, lookahead(directory, -coming))
        return (directory, coming), miss.sum(axis=-1, dtype=jnp.int32)

    return lax.scan(step, (directory, first), (ids, after))[1]


def next_uses(
    selection: npt.NDArray[np.int32], chunk_capacity: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """When each chunk is selected: first [L, K, N] the first step, after [steps, L, K, P] the next
    step after each selection of it; the number of steps for never."""
    steps, layers, kv_heads, _ = selection.shape
    coming = np.full((layers, kv_heads, chunk_capacity + 1), steps, np.float32)
    after = np.empty(selection.shape, np.float32)
    at = (np.arange(layers)[:, None, None], np.arange(kv_heads)[:, None])
    for step in range(steps - 1, -1, -1):
        chunks = np.where(selection[step] < 0, chunk_capacity, selection[step])
        after[step] = coming[(*at, chunks)]
        coming[(*at, chunks)] = step
    return coming[..., :chunk_capacity], after
