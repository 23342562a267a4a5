"""One layer of a saved session of method ``kvdrive``: what is kept of it, and what it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvdrive_jax.index.rest import LayerIndex
from kvdrive_jax.pipeline.stages import Near
from kvdrive_jax.tiers.archive import Arrays

Array = np.ndarray[Any, Any]


class Kept(NamedTuple):
    """Of a layer of a prompt, until the session is saved: importance [K, N], and the cluster of
    each chunk [K, N], where pages on SSD are ordered by that."""

    importance: Array
    groups: Array | None


class SavedLayer(NamedTuple):
    """What a saved layer becomes, in arrays as large as the engine's.

    near: of the session; ranking: its index; stored: [K, N, *dram_shape] pages as DRAM keeps them;
    kept: as `Kept`, with what was in the windows before everything else.
    """

    near: Near
    ranking: LayerIndex
    stored: Array
    kept: Kept


def to_arrays(
    near: Near, index: LayerIndex, pages: Array, kept: Kept, window: Array | None
) -> Arrays:
    """A layer of a session by name.

    near, index: of the session alone; pages: [K, n, *dram_shape], all of its chunks; window:
    [K, S], the chunk in each slot, or None.
    """
    kv_heads, n = pages.shape[:2]
    known = min(n, kept.importance.shape[1])
    importance = np.zeros((kv_heads, n), np.float32)
    importance[:, :known] = kept.importance[:, :known]
    arrays = {
        "pages": pages,
        "near-k": np.asarray(near.k),
        "near-v": np.asarray(near.v),
        "importance": importance,
        **{f"index-{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(index))},
    }
    if window is not None:
        arrays["window"] = window
    if kept.groups is not None:
        # Flushed chunks have none: they come last.
        groups = np.full((kv_heads, n), np.iinfo(np.int32).max, np.int32)
        groups[:, :known] = kept.groups[:, :known]
        arrays["groups"] = groups
    return arrays


def from_arrays(
    arrays: Arrays,
    index: LayerIndex,
    *,
    dram_shape: Sequence[int],
    dram_dtype: np.dtype[Any],
    chunk_capacity: int,
) -> SavedLayer:
    """A layer from ``arrays``, pages [K, n, bytes] uint8; index: the engine's, which has room.

    Raises KeyError for an array that is missing.
    """
    leaves, structure = jax.tree.flatten(index)
    fitted = [_fitted(arrays[f"index-{i}"], leaf.shape[1:]) for i, leaf in enumerate(leaves)]
    rows = arrays["pages"]
    kv_heads, n = rows.shape[:2]
    stored = np.zeros((kv_heads, chunk_capacity, rows.shape[-1]), np.uint8)
    stored[:, :n] = rows
    importance = np.zeros((kv_heads, chunk_capacity), np.float32)
    importance[:, :n] = arrays["importance"]
    if "window" in arrays:
        # What its windows held is what its windows will hold, as far as they are as large.
        head, slot = np.nonzero(arrays["window"] >= 0)
        importance[head, arrays["window"][head, slot]] += importance.max() + 1
    return SavedLayer(
        near=Near(jnp.asarray(arrays["near-k"]), jnp.asarray(arrays["near-v"])),
        ranking=jax.tree.unflatten(structure, fitted),
        stored=stored.view(dram_dtype).reshape(kv_heads, chunk_capacity, *dram_shape),
        kept=Kept(importance, arrays.get("groups")),
    )


def _fitted(saved: Array, room: tuple[int, ...]) -> Array:
    """A saved array in one of the shape ``room``: what both have, lies first."""
    if saved.shape == room:
        return saved
    made = np.zeros(room, saved.dtype)
    both = tuple(slice(0, min(sizes)) for sizes in zip(saved.shape, room, strict=True))
    made[both] = saved[both]
    return made
