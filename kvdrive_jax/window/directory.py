"""Which chunks are in HBM and in which slots: the map chunk -> slot and slot -> chunk.

One directory serves one layer. It lives on the device, so that selected ids never wait for the CPU
(the paper's CPU look-up grows with the window, figure 16). It moves no byte: `place` says which
selected chunks are missing and which slot each of them gets; whoever fetches them writes the slots.

Three things hold at every moment, per (session, kv head): the two maps are each other's inverse, no
slot from `capacity` on is ever used, and where `keeps` is False both maps are empty.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvdrive_jax.pallas.selection import select_chunks
from kvdrive_jax.window.history import History, advance, empty_history, forget_row, smooth


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Directory:
    """The windows of one layer.

    Attributes:
        slot_of_chunk: [B, K, N] int32, -1 for a chunk that is not in its window.
        chunk_of_slot: [B, K, S] int32, -1 for an empty slot.
        history: of what is in each slot, for policies.
        capacity: [K] or [B, K] int32, usable slots of each kv head, at most S and at least the
            number of chunks selected in a step.
        keeps: [K] or [B, K] bool; False for a window of size 0: its slots hold one step's selection
            and nothing is left of it to the next.
        first: [K] or [B, K] int32, the row of each head's slot 0 in the pool of all windows.
    """

    slot_of_chunk: jax.Array
    chunk_of_slot: jax.Array
    history: History
    capacity: jax.Array
    keeps: jax.Array
    first: jax.Array


def empty_directory(
    batch: int,
    kv_heads: int,
    chunk_capacity: int,
    slots: int,
    capacity: jax.typing.ArrayLike,
    keeps: jax.typing.ArrayLike = True,
    first: jax.typing.ArrayLike = 0,
    *,
    smooths: bool = False,
) -> Directory:
    """A directory with nothing in it.

    Args:
        batch, kv_heads: B and K.
        chunk_capacity: N, the most chunks a session can have.
        slots: S, slots per (session, kv head).
        capacity: usable slots, one number, [K] or [B, K] int32.
        keeps: False for windows of size 0; one bool, [K] or [B, K].
        first: rows of slots 0 in the pool; one number, [K] or [B, K] int32.
        smooths: whether scores are smoothed over steps, for the policy that reads that.
    """
    if slots < 1:
        raise ValueError(f"slots must be at least 1, got {slots}")

    def per_head(value: jax.typing.ArrayLike, dtype: Any) -> jax.Array:
        array = jnp.asarray(value, dtype)
        return jnp.broadcast_to(array, array.shape if array.ndim == 2 else (kv_heads,)).copy()

    return Directory(
        slot_of_chunk=jnp.full((batch, kv_heads, chunk_capacity), -1, jnp.int32),
        chunk_of_slot=jnp.full((batch, kv_heads, slots), -1, jnp.int32),
        history=empty_history(batch, kv_heads, slots, chunk_capacity if smooths else 0),
        capacity=per_head(capacity, jnp.int32),
        keeps=per_head(keeps, bool),
        first=per_head(first, jnp.int32),
    )


def pool_rows(directory: Directory, slots: jax.Array) -> jax.Array:
    """Rows of the pool [B, K, P] of slots [B, K, P], -1 where those are."""
    return jnp.where(slots < 0, -1, directory.first[..., None] + slots)


def in_window(directory: Directory, ids: jax.Array) -> jax.Array:
    """Whether chunks [B, K, M] are in their window; False for -1."""
    slots = jnp.take_along_axis(directory.slot_of_chunk, jnp.maximum(ids, 0), axis=-1)
    return (slots >= 0) & (ids >= 0)


def observe(directory: Directory, scores: jax.Array, ids: jax.Array) -> Directory:
    """Takes note of a step's scores [B, K, N] and selection [B, K, P], before `place`."""
    return replace(directory, history=smooth(directory.history, scores, ids))


def place(
    directory: Directory, ids: jax.Array, priority: jax.Array
) -> tuple[Directory, jax.Array, jax.Array]:
    """Gives every selected chunk a slot.

    A hit keeps its slot. Misses take the empty slots first, then those of the lowest priority, ties
    to the lowest slot; never one that was selected in this step. Which miss gets which of them is
    not said.

    Args:
        directory: the maps before the step.
        ids: [B, K, P] int32 selected chunks, each at most once, -1 for padding. P <= S.
        priority: [B, K, S] float32 worth of what is in each slot (see `eviction`), not NaN. Read
            only for slots in use.

    Returns:
        The directory after the step; slots [B, K, P] int32, where each selected chunk is or is to
        be written, -1 for padding; miss [B, K, P] bool, which of them must be fetched. Were
        `capacity` below the number of selected chunks, those left without a slot get -1.
    """
    batch, kv_heads, slots = directory.chunk_of_slot.shape
    count = ids.shape[-1]
    if count > slots:
        raise ValueError(f"a window must hold one step's selection: {count} chunks, {slots} slots")
    if directory.slot_of_chunk.shape[-1] == 0:
        return directory, jnp.full_like(ids, -1), jnp.zeros(ids.shape, bool)

    found = _look_up(directory.slot_of_chunk, jnp.maximum(ids, 0))
    found = jnp.where(ids >= 0, found, -1)
    hit = found >= 0
    miss = (ids >= 0) & ~hit

    held = _write(jnp.zeros((batch, kv_heads, slots), bool), found, True)
    victims = find_victims(directory, priority, held, miss.sum(axis=-1), count)

    nth = jnp.maximum(jnp.cumsum(miss, axis=-1) - 1, 0)
    target = jnp.where(miss, _look_up(victims, nth), -1)
    kept = jnp.where(directory.keeps[..., None], target, -1)
    evicted = jnp.where(kept >= 0, _look_up(directory.chunk_of_slot, jnp.maximum(kept, 0)), -1)
    arriving = jnp.where(kept >= 0, ids, -1)

    # One write for both: what leaves was not selected, so the two sets of chunks are disjoint.
    slot_of_chunk = _write(
        directory.slot_of_chunk,
        jnp.concatenate([evicted, arriving], axis=-1),
        jnp.concatenate([jnp.full_like(kept, -1), kept], axis=-1),
    )
    chunk_of_slot = _write(directory.chunk_of_slot, kept, ids)
    arrived = chunk_of_slot != directory.chunk_of_slot
    after = replace(
        directory,
        slot_of_chunk=slot_of_chunk,
        chunk_of_slot=chunk_of_slot,
        history=advance(directory.history, held | arrived, arrived),
    )
    return after, jnp.where(hit, found, target), miss


def find_victims(
    directory: Directory, priority: jax.Array, held: jax.Array, wanted: jax.Array, count: int
) -> jax.Array:
    """Slots [B, K, P] int32 for the first ``wanted`` [B, K] of P = ``count`` misses, -1 for none:
    the empty ones first, then those of the lowest priority [B, K, S]; none that is ``held``
    [B, K, S]."""
    batch, _, slots = directory.chunk_of_slot.shape
    free = ~held & (jnp.arange(slots) < directory.capacity[..., None])
    return select_chunks(
        _eviction_order(directory.chunk_of_slot, priority, free),
        jnp.full((batch,), slots, jnp.int32),
        count,
        limit=jnp.minimum(wanted, free.sum(axis=-1)).astype(jnp.int32),
    )


def held_slots(
    directory: Directory, slots: jax.Array, ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Everything in the windows after `place`, beside what a window that keeps nothing was lent.

    slots, ids: [B, K, P] int32, as `place` returned and got them. Returns slots and chunk ids
    [B, K, S + P] int32, -1 for none, each chunk at most once.
    """
    every = jnp.arange(directory.chunk_of_slot.shape[-1], dtype=jnp.int32)
    held = jnp.where(directory.chunk_of_slot < 0, -1, every)
    lent = ~directory.keeps[..., None]
    return (
        jnp.concatenate([held, jnp.where(lent, slots, -1)], axis=-1),
        jnp.concatenate([directory.chunk_of_slot, jnp.where(lent, ids, -1)], axis=-1),
    )


def insert_row(directory: Directory, row: jax.Array | int, ids: jax.Array) -> Directory:
    """Replaces the windows of one session, as at the end of its prefill.

    Args:
        directory: may be donated.
        row: int32 scalar, the session's place in the batch.
        ids: [K, S] int32, the chunk in each slot, -1 for empty; each chunk at most once per head.
            Slots from the head's capacity on must be empty, and are made so, as are those of a
            head that keeps nothing.
    """
    kv_heads, slots = directory.chunk_of_slot.shape[1:]
    if ids.shape != (kv_heads, slots):
        raise ValueError(f"ids must be [kv_heads, slots] {(kv_heads, slots)}, got {ids.shape}")
    at = jnp.arange(slots, dtype=jnp.int32)
    capacity, keeps = (x if x.ndim == 1 else x[row] for x in (directory.capacity, directory.keeps))
    usable = (at < capacity[:, None]) & keeps[:, None]
    ids = jnp.where(usable, ids.astype(jnp.int32), -1)
    absent = jnp.full((1, *directory.slot_of_chunk.shape[1:]), -1, jnp.int32)
    slot_of_chunk = _write(absent, ids[None], jnp.broadcast_to(at, ids[None].shape))
    return replace(
        directory,
        slot_of_chunk=directory.slot_of_chunk.at[row].set(slot_of_chunk[0]),
        chunk_of_slot=directory.chunk_of_slot.at[row].set(ids),
        history=forget_row(directory.history, row),
    )


def clear_row(directory: Directory, row: jax.Array | int) -> Directory:
    """Empties the windows of one session that leaves the batch."""
    return replace(
        directory,
        slot_of_chunk=directory.slot_of_chunk.at[row].set(-1),
        chunk_of_slot=directory.chunk_of_slot.at[row].set(-1),
        history=forget_row(directory.history, row),
    )


def _eviction_order(chunk_of_slot: jax.Array, priority: jax.Array, free: jax.Array) -> jax.Array:
    """[B, K, S] float32: the largest is evicted first, -inf never."""
    bound = float(np.finfo(np.float32).max)
    order = -jnp.clip(priority, -bound, bound)
    order = jnp.where(order == 0, 0.0, order)  # -0.0 and 0.0 must tie
    order = jnp.where(chunk_of_slot < 0, jnp.inf, order)
    return jnp.where(free, order, -jnp.inf)


def _look_up(table: jax.Array, at: jax.Array) -> jax.Array:
    """table[b, k, at[b, k, i]]. Every index must be in range: on CPU that is 5 x cheaper."""
    return jnp.take_along_axis(table, at, axis=-1, mode="promise_in_bounds")


def _write(table: jax.Array, at: jax.Array, values: jax.Array | bool) -> jax.Array:
    """table[b, k, at[b, k, i]] = values[b, k, i]; negative indices write nothing."""
    width = table.shape[-1]
    rows = table.size // width
    base = jnp.arange(rows, dtype=jnp.int32).reshape(*table.shape[:-1], 1) * width
    flat = jnp.where(at < 0, table.size, base + at).reshape(-1)
    values = values.reshape(-1) if isinstance(values, jax.Array) else values
    return table.reshape(-1).at[flat].set(values, mode="drop").reshape(table.shape)
