"""How sessions come into a batch of method ``kvdrive``, from prefill or disk, and back to disk.

What comes in goes four ways: near tokens and index into HBM, the most important pages into the
windows, all pages to the store (or, where every chunk has a slot, into the window alone).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvdrive_jax.methods.base import Tools, int32
from kvdrive_jax.methods.kvdrive_saved import Kept, from_arrays, to_arrays
from kvdrive_jax.methods.kvdrive_state import BatchState
from kvdrive_jax.methods.kvdrive_tiers import BatchTiers, page_geometry
from kvdrive_jax.pipeline.indexing import (
    PromptParts,
    add_importance,
    as_pages,
    insert_index,
    insert_resident,
    insert_state,
    take_apart,
    warm_window,
)
from kvdrive_jax.pipeline.prefill import PromptLayer
from kvdrive_jax.pipeline.stages import Near, StageSpec
from kvdrive_jax.plan import Plan
from kvdrive_jax.saved import SavedSession
from kvdrive_jax.tiers.archive import Arrays


class Intake:
    """Of one batch.

    tiers: None where every chunk has a slot; n_chunks: [B], chunks of each session, which this
    sets.
    """

    def __init__(
        self,
        tools: Tools,
        plan: Plan,
        spec: StageSpec,
        state: BatchState,
        tiers: BatchTiers | None,
        n_chunks: np.ndarray[Any, Any],
    ) -> None:
        self._tools, self._plan, self._spec = tools, plan, spec
        self._state, self._tiers, self._n_chunks = state, tiers, n_chunks
        self._recorder = tools.recorder
        self._warm_up = tools.config.tiers.warm_up
        self._on_ssd = tiers is not None and tools.config.tiers.ssd_dir is not None
        self._importance: dict[int, jax.Array] = {}
        self._kept: dict[tuple[int, int], Kept] = {}
        self._pending: list[tuple[int, int, PromptParts]] = []

    def absorb(self, row: int, layer: int, prompt: PromptLayer, length: int) -> None:
        """One layer of a prompt of ``length`` tokens; its pages go to the store in `settle`."""
        shape = self._plan.shape
        n_chunks = shape.prompt_chunks[row]
        self._n_chunks[row] = n_chunks
        count = int32(n_chunks)
        parts = take_apart(
            self._spec,
            prompt,
            int32(length),
            count,
            grouped=self._on_ssd,
            near_capacity=shape.near_capacity,
            chunk_capacity=shape.chunk_capacity,
        )
        self._insert(row, layer, parts.near)
        place = self._state.places[row]
        index = self._state.index[place.part]
        index[layer] = insert_index(self._spec, index[layer], int32(place.part_row), parts.piece)
        if self._tools.saves:
            groups = None if parts.groups is None else np.asarray(parts.groups)
            self._kept[row, layer] = Kept(np.asarray(parts.importance), groups)
        if self._plan.resident:
            if self._recorder is not None:
                self._recorder.prompt(row, layer, parts.importance, count)
            self._fill(row, layer, parts.pages)
        else:
            ranked = self._warm(row, layer, parts.pages, parts.importance)
            self._pending.append((row, layer, parts._replace(importance=ranked)))
        jax.block_until_ready((parts, self._state.windows, index[layer]))

    def _insert(self, row: int, layer: int, near: Near) -> None:
        """A session's near tokens into those of its cohort."""
        place = self._state.places[row]
        state = self._state.near[place.cohort]
        state[layer] = insert_state(state[layer], int32(place.row), near)

    def _fill(self, row: int, layer: int, pages: jax.Array | np.ndarray[Any, Any]) -> None:
        """All pages of a session's layer into the window that holds every chunk."""
        windows = self._state.windows
        windows[0] = insert_resident(windows[0], int32(row), int32(layer), pages)

    def _warm(self, row: int, layer: int, pages: jax.Array, importance: jax.Array) -> jax.Array:
        """Fill a session's windows of one layer; the importance [K, N] that was gone by."""
        count = int32(0 if self._warm_up == "none" else int(self._n_chunks[row]))
        if self._warm_up == "aggregated":
            total = self._importance.get(row, jnp.zeros(importance.shape[-1], jnp.float32))
            self._importance[row], importance = add_importance(total, importance)
        if self._recorder is not None:
            self._recorder.prompt(row, layer, importance, count)
        state, place = self._state, self._state.places[row]
        directory = state.directory[place.part]
        state.windows[place.cohort], directory[layer] = warm_window(
            state.windows[place.cohort],
            directory[layer],
            int32(place.row),
            int32(place.part_row),
            pages,
            importance,
            count,
        )
        return importance

    def settle(self) -> None:
        """Hand the pages of what was absorbed to the store."""
        for row, layer, parts in self._pending:
            assert self._tiers is not None
            self._tiers.offload(
                row,
                layer,
                np.asarray(parts.stored),
                int(self._n_chunks[row]),
                None if parts.groups is None else np.asarray(parts.groups),
                np.asarray(parts.importance),
                self._warmed(layer),
            )
        self._pending = []

    def _warmed(self, layer: int) -> list[int]:
        """[K] how many of a prompt's most important chunks the windows of a layer start with."""
        layout = self._plan.layout
        assert layout is not None
        held: list[int] = np.where(layout.keeps[layer], layout.capacity[layer], 0).tolist()
        return held

    def forget(self, row: int) -> None:
        """The session has ended: nothing of it is handed over any more."""
        self._pending = [item for item in self._pending if item[0] != row]

    def save(self, row: int, layer: int) -> Arrays:
        """One layer of a session, for `restore`."""
        n, kv_heads = int(self._n_chunks[row]), self._tools.model.config.num_kv_heads
        state, place = self._state, self._state.places[row]
        window = None
        if self._plan.resident:
            size = kv_heads * self._plan.shape.chunk_capacity
            rows = np.asarray(state.windows[0][row, layer * size : (layer + 1) * size])
            pages = rows.reshape(kv_heads, -1, *rows.shape[1:])[:, :n]
        else:
            assert self._tiers is not None
            pages = self._tiers.pages(row, layer, n)
            window = np.asarray(state.directory[place.part][layer].chunk_of_slot[place.part_row])
        near = jax.tree.map(lambda array: array[place.row], state.near[place.cohort][layer])
        index = jax.tree.map(lambda array: array[place.part_row], state.index[place.part][layer])
        return to_arrays(near, index, pages, self._kept[row, layer], window)

    def restore(self, row: int, layer: int, saved: SavedSession) -> None:
        """One layer of a saved session, as if it had been absorbed."""
        geometry = page_geometry(self._tools)
        if self._plan.resident:
            geometry = replace(geometry, dram="model", ssd="model")
        made = from_arrays(
            saved.layer(layer, geometry.format(geometry.dram)),
            self._state.index[self._state.places[row].part][layer],
            dram_shape=geometry.dram_shape,
            dram_dtype=geometry.dram_dtype,
            chunk_capacity=self._plan.shape.chunk_capacity,
        )
        self._n_chunks[row] = saved.chunks
        place = self._state.places[row]
        self._insert(row, layer, made.near)
        index = self._state.index[place.part]
        index[layer] = insert_state(index[layer], int32(place.part_row), made.ranking)
        if self._tools.saves:
            self._kept[row, layer] = made.kept
        if self._plan.resident:
            self._fill(row, layer, made.stored)
            return
        pages = as_pages(made.stored, geometry.dram, geometry.page_shape, geometry.dtype)
        importance = self._warm(row, layer, pages, jnp.asarray(made.kept.importance))
        assert self._tiers is not None
        self._tiers.offload(
            row,
            layer,
            made.stored,
            saved.chunks,
            made.kept.groups,
            np.asarray(importance),
            self._warmed(layer),
        )
