"""KVDrive: an index and a window in HBM, everything else in DRAM and on SSD.

Runs in one of two ways, which give the same tokens: *resident*, when the windows hold every
chunk, so that nothing is fetched; and *tiered*, layer by layer through select, fetch, compute.

In flight at any time: pages of the layer before, on their way from the device (prefill); miss
lists, on their way to the host (decode). Only this class, on the engine's thread, calls JAX; the
page store's workers see NumPy views.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvdrive_jax.config import Precision
from kvdrive_jax.index.rest import LayerIndex
from kvdrive_jax.methods.base import BatchMethod, BatchRows, Tools, int32
from kvdrive_jax.methods.kvdrive_saved import Kept, from_arrays, to_arrays
from kvdrive_jax.methods.kvdrive_tiers import BatchTiers, page_geometry
from kvdrive_jax.pipeline.direct import committed
from kvdrive_jax.pipeline.indexing import (
    PromptParts,
    add_importance,
    as_pages,
    insert_resident,
    insert_session,
    insert_state,
    take_apart,
    warm_window,
)
from kvdrive_jax.pipeline.prefill import PromptLayer
from kvdrive_jax.pipeline.scheduler import sequential
from kvdrive_jax.pipeline.stages import (
    Near,
    Ranked,
    Selected,
    StageSpec,
    Step,
    Token,
    append_rows,
    compute_stage,
    flush_stage,
    grow_resident,
    resident_layer,
    select_stage,
)
from kvdrive_jax.plan import Plan
from kvdrive_jax.saved import SavedSession
from kvdrive_jax.tiers.archive import Arrays
from kvdrive_jax.window.directory import Directory, empty_directory
from kvdrive_jax.window.eviction import smooths

HBM_ACCOUNTS = ("index", "sink, local and recent", "windows", "directory", "fetched pages")


class KVDrive(BatchMethod):
    """Method ``kvdrive``."""

    def __init__(self, tools: Tools, plan: Plan, rows: BatchRows) -> None:
        super().__init__(tools, plan, rows)
        assert plan.retrieval is not None
        model, shape, retrieval = tools.model, plan.shape, tools.config.retrieval
        self._recorder = tools.recorder
        self._spec = StageSpec(
            model_def=model.static,
            retrieval=plan.retrieval,
            rule=retrieval.group_rule,
            selected=shape.selected,
            sink=retrieval.sink,
            chunk_size=retrieval.chunk_size,
            eviction=tools.config.window.eviction,
            attend=tools.config.window.attend,
            ranked=0 if tools.recorder is None else tools.recorder.depth(shape),
            likely=plan.likely,
            pages="model" if plan.resident else tools.config.tiers.dram_dtype,
        )
        self._warm_up = tools.config.tiers.warm_up
        self._importance: dict[int, jax.Array] = {}
        self._kept: dict[tuple[int, int], Kept] = {}
        self._flushes = [0] * shape.batch
        self._on_ssd = not plan.resident and tools.config.tiers.ssd_dir is not None
        self._n_chunks = np.zeros(shape.batch, np.int64)
        self._tiers: BatchTiers | None = None
        self._pending: list[tuple[int, int, PromptParts]] = []
        self._reserved: list[str] = []
        self._near: list[Near] = []
        # One pool for all layers, or where every chunk has a slot one window for each.
        self._window: list[jax.Array] = []
        self._index: list[LayerIndex] = []
        self._directory: list[Directory] = []
        self._step: Step | None = None
        self._tokens: list[Token] = []
        self._ranked: list[Ranked | None] = []
        if self._recorder is not None:
            self._recorder.begin(
                shape,
                retrieval,
                digest=model.digest,
                page_bytes=page_geometry(tools).page_bytes,
            )
        try:
            for name in HBM_ACCOUNTS:
                tools.ledger.reserve("hbm", name, plan.bytes_of("hbm", name))
                self._reserved.append(name)
            if not plan.resident:
                self._tiers = BatchTiers(tools, plan, self.failed)
            self._allocate()
        except BaseException:
            self.close()
            raise

    def _allocate(self) -> None:
        plan, shape = self.plan, self.plan.shape
        config, dtype = self.tools.model.config, self.tools.model.dtype
        assert plan.retrieval is not None
        sizes = (shape.batch, config.num_kv_heads)
        near = (*sizes, shape.near_capacity, config.head_dim)
        page = page_geometry(self.tools).page_shape
        layers = range(config.num_layers)
        self._near = [Near(jnp.zeros(near, dtype), jnp.zeros(near, dtype)) for _ in layers]
        self._index = [
            plan.retrieval.empty(
                *sizes, config.head_dim, shape.chunk_capacity, plan.cluster_capacity
            )
            for _ in layers
        ]
        layout = plan.layout
        if layout is None:
            rows = config.num_kv_heads * shape.chunk_capacity
            self._window = [jnp.zeros((shape.batch, rows, *page), dtype) for _ in layers]
        else:
            self._window = [jnp.zeros((shape.batch, layout.rows, *page), dtype)]
            self._directory = [
                empty_directory(
                    *sizes,
                    shape.chunk_capacity,
                    layout.largest,
                    layout.capacity[layer],
                    layout.keeps[layer],
                    layout.first[layer],
                    smooths=smooths(self._spec.eviction),
                )
                for layer in layers
            ]
        if self._tiers is not None and self._tiers.direct:
            self._near, self._window = committed((self._near, self._window))
            self._index, self._directory = committed((self._index, self._directory))

    # Prefill

    def absorb(self, row: int, layer: int, prompt: PromptLayer) -> None:
        shape = self.plan.shape
        n_chunks = shape.prompt_chunks[row]
        self._n_chunks[row] = n_chunks
        at, count = int32(row), int32(n_chunks)
        parts = take_apart(
            self._spec,
            prompt,
            int32(int(self.rows.length[row])),
            count,
            grouped=self._on_ssd,
            near_capacity=shape.near_capacity,
            chunk_capacity=shape.chunk_capacity,
        )
        self._near[layer], self._index[layer] = insert_session(
            self._spec, self._near[layer], self._index[layer], at, parts
        )
        if self.tools.saves:
            groups = None if parts.groups is None else np.asarray(parts.groups)
            self._kept[row, layer] = Kept(np.asarray(parts.importance), groups)
        if self.plan.resident:
            if self._recorder is not None:
                self._recorder.prompt(row, layer, parts.importance, count)
            self._window[layer] = insert_resident(self._window[layer], at, parts.pages)
        else:
            ranked = self._warm(row, layer, parts.pages, parts.importance)
            self._pending.append((row, layer, parts._replace(importance=ranked)))
        jax.block_until_ready((parts, self._window, self._index[layer]))

    def _warm(self, row: int, layer: int, pages: jax.Array, importance: jax.Array) -> jax.Array:
        """Fill a session's windows of one layer; the importance [K, N] that was gone by."""
        count = int32(0 if self._warm_up == "none" else int(self._n_chunks[row]))
        if self._warm_up == "aggregated":
            total = self._importance.get(row, jnp.zeros(importance.shape[-1], jnp.float32))
            self._importance[row], importance = add_importance(total, importance)
        if self._recorder is not None:
            self._recorder.prompt(row, layer, importance, count)
        self._window[0], self._directory[layer] = warm_window(
            self._window[0], self._directory[layer], int32(row), pages, importance, count
        )
        return importance

    def settle(self) -> None:
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

    def finish_prefill(self) -> None:
        self.settle()
        if self._tiers is not None:
            self._tiers.wait()
            self._window[0] = self._tiers.compile(self._window[0])

    def _warmed(self, layer: int) -> list[int]:
        """[K] how many of a prompt's most important chunks the windows of a layer start with."""
        layout = self.plan.layout
        assert layout is not None
        held: list[int] = np.where(layout.keeps[layer], layout.capacity[layer], 0).tolist()
        return held

    # Sessions on disk

    @property
    def saved_precision(self) -> Precision:
        return self._spec.pages

    def saved_chunks(self, row: int) -> tuple[int, int]:
        return int(self._n_chunks[row]), self._flushes[row]

    def save(self, row: int, layer: int) -> Arrays:
        n, kv_heads = int(self._n_chunks[row]), self.tools.model.config.num_kv_heads
        window = None
        if self.plan.resident:
            rows = np.asarray(self._window[layer][row])
            pages = rows.reshape(kv_heads, -1, *rows.shape[1:])[:, :n]
        else:
            assert self._tiers is not None
            pages = self._tiers.pages(row, layer, n)
            window = np.asarray(self._directory[layer].chunk_of_slot[row])
        near, index = self._near[layer], self._index[layer]
        return to_arrays(row, near, index, pages, self._kept[row, layer], window)

    def restore(self, row: int, layer: int, saved: SavedSession) -> None:
        geometry = page_geometry(self.tools)
        if self.plan.resident:
            geometry = replace(geometry, dram="model", ssd="model")
        made = from_arrays(
            saved.layer(layer, geometry.format(geometry.dram)),
            self._index[layer],
            dram_shape=geometry.dram_shape,
            dram_dtype=geometry.dram_dtype,
            chunk_capacity=self.plan.shape.chunk_capacity,
        )
        self._n_chunks[row], self._flushes[row] = saved.chunks, saved.flushes
        at = int32(row)
        self._near[layer] = insert_state(self._near[layer], at, made.near)
        self._index[layer] = insert_state(self._index[layer], at, made.ranking)
        if self.tools.saves:
            self._kept[row, layer] = made.kept
        if self.plan.resident:
            self._window[layer] = insert_resident(self._window[layer], at, made.stored)
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

    # Decode

    def layers(self, hidden: jax.Array) -> jax.Array:
        rows, shape = self.rows, self.plan.shape
        if self._tiers is not None and self._tiers.direct:
            hidden = committed(hidden)
        chunk = self._spec.chunk_size
        near_rows = rows.length - self._n_chunks * chunk
        if np.any(near_rows[rows.active] >= shape.near_capacity):
            self._flush(near_rows)
            near_rows = rows.length - self._n_chunks * chunk
        # Ended sessions are carried along with nothing to select and a near row that exists.
        n_chunks = np.where(rows.active, self._n_chunks, 0)
        self._step = Step(
            position=int32(rows.length),
            n_chunks=int32(n_chunks),
            near_row=int32(np.minimum(near_rows, shape.near_capacity - 1)),
            inv_freq=rows.inv_freq,
            attention_factor=rows.attention_factor,
        )
        taken = np.minimum(n_chunks, self._spec.selected)
        attended = self._attended_chunks(n_chunks, taken)
        for row, count in enumerate(rows.counts):
            if rows.active[row]:
                count.steps += 1
                count.attended_tokens += int(near_rows[row]) + 1 + float(attended[row]) * chunk
        model = self.tools.model
        counted = model.config.num_layers * model.config.num_kv_heads
        for row, count in enumerate(rows.counts):
            count.selected_chunks += int(taken[row]) * counted
        self._tokens, self._ranked = [], []
        if self.plan.resident:
            with self.tools.clock.measure("compute"):
                for layer, leaves in enumerate(model.layers):
                    hidden, token, ranked = resident_layer(
                        self._spec,
                        leaves,
                        hidden,
                        self._step,
                        self._near[layer],
                        self._index[layer],
                        self._window[layer],
                    )
                    self._tokens.append(token)
                    self._ranked.append(ranked)
        else:
            assert self._tiers is not None
            self._tiers.begin_step()
            hidden = sequential(self, model.config.num_layers, hidden)
        self._append_tokens(self._step.near_row)
        if self._recorder is not None:
            self._recorder.step(self._ranked, rows.active)
        return hidden

    def _attended_chunks(
        self, n_chunks: np.ndarray[Any, Any], selected: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        """[B] chunks that each session, which selects so many, attends to: mean over layers and
        heads."""
        layout = self.plan.layout
        if self._spec.attend == "selection":
            return selected
        if layout is None:
            return n_chunks
        held: np.ndarray[Any, Any] = np.minimum(n_chunks[:, None, None], layout.capacity)
        return held.mean(axis=(1, 2))

    def _append_tokens(self, near_row: jax.Array) -> None:
        """The new token's key and value into the near buffers of all layers."""
        buffers = append_rows(
            [array for near in self._near for array in near],
            [array for token in self._tokens for array in (token.k, token.v)],
            near_row,
        )
        self._near = [Near(*buffers[i : i + 2]) for i in range(0, len(buffers), 2)]

    def select(self, layer: int, hidden: jax.Array) -> Selected:
        assert self._step is not None
        with self.tools.clock.measure("select"):
            selected, self._directory[layer] = select_stage(
                self._spec,
                self.tools.model.layers[layer],
                hidden,
                self._step,
                self._index[layer],
                self._directory[layer],
            )
            self._tokens.append(selected.token)
            self._ranked.append(selected.ranked)
            if self._tiers is not None and self._tiers.direct:
                return selected  # the miss list stays on the device
            selected.missing.copy_to_host_async()
            if selected.likely is not None:
                selected.likely.copy_to_host_async()
        # Waits are charged to the stage that is waited for: what is queued before selection is the
        # layer before.
        with self.tools.clock.measure("compute"):
            hidden.block_until_ready()
        with self.tools.clock.measure("select"):
            selected.missing.block_until_ready()
        return selected

    def fetch(self, layer: int, selected: Selected) -> None:
        assert self._tiers is not None
        with self.tools.clock.measure("fetch"):
            self._window[0] = self._tiers.fetch(layer, selected, self._window[0], self.rows.counts)

    def compute(self, layer: int, hidden: jax.Array, selected: Selected) -> jax.Array:
        assert self._step is not None
        with self.tools.clock.measure("compute"):
            return compute_stage(
                self._spec,
                self.tools.model.layers[layer],
                hidden,
                selected,
                self._step,
                self._near[layer],
                self._window[0],
            )

    def _flush(self, near_rows: np.ndarray[Any, Any]) -> None:
        """Turn the oldest unflushed tokens of full near buffers into chunks (index and store)."""
        shape = self.plan.shape
        # A session is flushed when its own buffer is full, so that neighbours never change what it
        # can select.
        full = self.rows.active & (near_rows >= shape.near_capacity)
        n_new = np.where(full, shape.flush_chunks, 0)
        new, before = int32(n_new), int32(self._n_chunks)
        for layer in range(len(self._near)):
            pages, self._near[layer], self._index[layer] = flush_stage(
                self._spec,
                self._near[layer],
                self._index[layer],
                new,
                before,
                flush_chunks=shape.flush_chunks,
            )
            if self.plan.resident:
                self._window[layer] = grow_resident(self._window[layer], pages, new, before)
                continue
            assert self._tiers is not None
            host = np.asarray(pages)
            for row in np.flatnonzero(n_new).tolist():
                count = int(n_new[row])
                self._tiers.append(row, layer, host[row], int(self._n_chunks[row]), count)
        if self._tiers is not None:
            with self.tools.clock.measure("stall"):
                self._tiers.wait()
        self._n_chunks += n_new
        for row, new_chunks in enumerate(n_new):
            self._flushes[row] += int(new_chunks > 0)

    # The end

    def retire(self, row: int) -> None:
        self._pending = [item for item in self._pending if item[0] != row]
        if self._tiers is not None:
            self._tiers.retire(row)

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.end()
        self._pending = []
        if self._tiers is not None:
            self._tiers.close()
            self._tiers = None
        self._near, self._window, self._index, self._directory = [], [], [], []
        for name in self._reserved:
            self.tools.ledger.release("hbm", name)
        self._reserved = []
