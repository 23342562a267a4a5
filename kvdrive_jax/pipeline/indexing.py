"""What becomes of one layer of a prompt: pages, near tokens, a piece of index, importance."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvdrive_jax.index.chunks import split_into_chunks
from kvdrive_jax.index.clusters import ClusterIndex
from kvdrive_jax.index.rest import LayerIndex
from kvdrive_jax.index.selection import importance
from kvdrive_jax.pallas.page_write import write_pages
from kvdrive_jax.pipeline.prefill import PromptLayer
from kvdrive_jax.pipeline.stages import Near, StageSpec, for_dram, from_dram
from kvdrive_jax.window.directory import Directory, insert_row
from kvdrive_jax.window.warm import rank_chunks, warm_slots


class PromptParts(NamedTuple):
    """One layer of one session, taken apart.

    pages: [K, N, 2, c, D], rows from the session's chunk count on are padding; stored: the same as
    DRAM keeps them; near: k, v [K, W, D]; piece: its index; importance: [K, N] float32 (paper 7.1),
    0 for padding; groups: [K, N] int32, the cluster of each chunk, for layout on SSD (None: no SSD
    tier, or an index without).
    """

    pages: jax.Array
    stored: jax.Array
    near: Near
    piece: LayerIndex
    importance: jax.Array
    groups: jax.Array | None


@partial(jax.jit, static_argnames=("spec", "grouped", "near_capacity", "chunk_capacity"))
def take_apart(
    spec: StageSpec,
    prompt: PromptLayer,
    length: jax.Array,
    n_chunks: jax.Array,
    *,
    grouped: bool,
    near_capacity: int,
    chunk_capacity: int,
) -> PromptParts:
    """Pages, near tokens, index and importance of one layer of a prompt.

    length, n_chunks: int32 scalars; grouped: whether the groups of an index that has some are
    wanted; near_capacity: W; chunk_capacity: N.
    """
    sink, chunk = spec.sink, spec.chunk_size

    def near(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, ((0, 0), (0, near_capacity), (0, 0)))
        rest = lax.dynamic_slice_in_dim(
            padded, sink + n_chunks * chunk, near_capacity - sink, axis=1
        )
        return jnp.concatenate([padded[:, :sink], rest], axis=1)

    keys, values = (
        split_into_chunks(array, sink=sink, chunk_size=chunk, chunk_capacity=chunk_capacity)
        for array in (prompt.k, prompt.v)
    )
    piece = spec.retrieval.build(keys, values, n_chunks)
    clusters = [part for part in piece if grouped and isinstance(part, ClusterIndex)]
    groups = clusters[0].cluster_of_chunk if clusters else None
    pages = jnp.stack([keys, values], axis=2)
    return PromptParts(
        pages,
        for_dram(pages, spec.pages),
        Near(near(prompt.k), near(prompt.v)),
        piece,
        importance(
            prompt.q_observed.transpose(1, 0, 2),
            prompt.k,
            length,
            n_chunks,
            sink=sink,
            chunk_size=chunk,
            chunk_capacity=chunk_capacity,
        ),
        groups,
    )


def put_together(
    pages: np.ndarray[Any, Any],
    near: Sequence[np.ndarray[Any, Any]],
    *,
    sink: int,
    tokens: int,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Keys and values [K, tokens, D] of the first tokens of a session: `take_apart`, backwards.

    pages: [K, N, 2, c, D], all of its chunks; near: k, v [K, W, D].
    """

    def join(near: np.ndarray[Any, Any], which: int) -> np.ndarray[Any, Any]:
        kv_heads, _, dim = near.shape
        chunks = pages[:, :, which].reshape(kv_heads, -1, dim)
        return np.concatenate([near[:, :sink], chunks, near[:, sink:]], axis=1)[:, :tokens]

    return join(near[0], 0), join(near[1], 1)


as_pages = jax.jit(from_dram, static_argnames=("precision", "page_shape", "dtype"))


@partial(jax.jit, donate_argnames="state")
def insert_state(state: Any, row: jax.Array, values: Any) -> Any:
    """A session's arrays [...] in place of row ``row`` of arrays [B, ...], donated."""
    return jax.tree.map(
        lambda array, value: lax.dynamic_update_index_in_dim(array, value, row, axis=0),
        state,
        values,
    )


@partial(jax.jit, static_argnames="spec", donate_argnames="index")
def insert_index(
    spec: StageSpec, index: LayerIndex, row: jax.Array, piece: LayerIndex
) -> LayerIndex:
    """One session's index into row ``row`` of a micro-batch's (donated)."""
    inserted: LayerIndex = spec.retrieval.insert(index, row, piece)
    return inserted


@jax.jit
def add_importance(total: jax.Array, importance: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Importance [N] summed over heads and layers, one layer [K, N] more; and the same for each of
    its heads [K, N]."""
    total = total + importance.sum(axis=0)
    return total, jnp.broadcast_to(total, importance.shape)


@partial(jax.jit, donate_argnames="window")
def insert_resident(
    window: jax.Array, row: jax.Array, layer: jax.Array, pages: jax.Array
) -> jax.Array:
    """All pages [K, N, 2, c, D] of a session's layer into its rows of window [B, L K N, 2, c, D],
    donated."""
    flat = pages.reshape(1, -1, *window.shape[2:])
    zero = jnp.zeros((), jnp.int32)
    return lax.dynamic_update_slice(window, flat, (row, layer * flat.shape[1], zero, zero, zero))


@partial(jax.jit, donate_argnames=("window", "directory"))
def warm_window(
    window: jax.Array,
    directory: Directory,
    row: jax.Array,
    at_row: jax.Array,
    pages: jax.Array,
    importance: jax.Array,
    n_chunks: jax.Array,
) -> tuple[jax.Array, Directory]:
    """Fill a session's windows of one layer with its most important chunks (paper 7.1).

    window: [B, R, 2, c, D], the pool of all windows of a cohort, and directory, of a micro-batch,
    are donated; row, at_row: the session's in the one and in the other; pages: [K, N, 2, c, D];
    importance: [K, N].
    """
    slots = directory.chunk_of_slot.shape[-1]
    count = min(slots, importance.shape[-1])
    ranked = rank_chunks(importance, n_chunks, count)
    directory = insert_row(directory, at_row, warm_slots(ranked, directory.capacity, slots))
    ids = directory.chunk_of_slot[at_row]
    heads = jnp.arange(ids.shape[0])[:, None]
    chosen = pages[heads, jnp.maximum(ids, 0)]
    at = directory.first[:, None] + jnp.arange(slots)
    batch, rows = window.shape[:2]
    target = jnp.where(ids < 0, batch * rows, row * rows + at)
    return (
        write_pages(window, chosen.reshape(-1, *window.shape[2:]), target.reshape(-1)),
        directory,
    )
