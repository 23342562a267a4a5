"""KVDrive: an index and a window in HBM, everything else in DRAM and on SSD.

Runs in one of two ways, which give the same tokens: *resident*, when the windows hold every
chunk, so that nothing is fetched; and *tiered*, through select, fetch and compute of every layer as
the schedule says.

In flight at any time: pages of the layer before, on their way from the device (prefill); miss
lists, on their way to the host, and pages on their way back (decode). Only the engine's thread
calls JAX; the page store's workers see NumPy views.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvdrive_jax.config import Precision
from kvdrive_jax.methods.base import BatchMethod, BatchRows, Drawn, Draws, Tools, int32
from kvdrive_jax.methods.kvdrive_burst import draw_burst
from kvdrive_jax.methods.kvdrive_decode import TieredStages
from kvdrive_jax.methods.kvdrive_saved import Kept, from_arrays, to_arrays
from kvdrive_jax.methods.kvdrive_state import BatchState, make_steps
from kvdrive_jax.methods.kvdrive_tiers import BatchTiers, page_geometry
from kvdrive_jax.pipeline.direct import committed
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
from kvdrive_jax.pipeline.miss_lists import Bell
from kvdrive_jax.pipeline.parts import Arrangement, candidates, cut
from kvdrive_jax.pipeline.prefill import PromptLayer
from kvdrive_jax.pipeline.stages import (
    Near,
    Ranked,
    StageSpec,
    Step,
    append_rows,
    flush_stage,
    grow_resident,
    resident_layer,
)
from kvdrive_jax.plan import Plan
from kvdrive_jax.saved import SavedSession
from kvdrive_jax.tiers.archive import Arrays

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
            speculative=not plan.resident and tools.config.pipeline.schedule == "speculative",
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
        self._rope: dict[tuple[int, int], tuple[jax.Array, jax.Array]] = {}
        self._stages: TieredStages | None = None
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
            bell = Bell()
            if not plan.resident:
                self._tiers = BatchTiers(tools, plan, rows.counts, self.failed, bell)
            self.arrangement = self._first_arrangement()
            cohorts = cut(shape.batch, self.arrangement)
            self._state = BatchState(tools, plan, cohorts)
            if self._tiers is not None:
                self._tiers.arrange(cohorts)
                if self._tiers.direct:
                    self._state.commit()
                self._stages = TieredStages(tools, self._spec, self._state, self._tiers, bell)
        except BaseException:
            self.close()
            raise

    # How the batch is cut

    def _first_arrangement(self) -> Arrangement:
        """What is fixed; else two micro-batches, so that one is selected while the other's pages
        come."""
        batch, pipeline = self.plan.shape.batch, self.tools.config.pipeline
        if self._whole:
            return Arrangement(batch)
        cohorts = min(pipeline.cohorts or 1, batch)
        half = -(-batch // cohorts // 2) or 1
        return Arrangement(min(pipeline.micro_batch or half, batch), cohorts)

    @property
    def _whole(self) -> bool:
        """Whether nothing could be gained by cutting the batch."""
        no_fetch = self._tiers is None or self._tiers.direct
        return no_fetch or self.tools.config.pipeline.schedule == "sequential"

    def arrangements(self) -> list[Arrangement]:
        """What `arrange` may be given; any of them gives the same tokens."""
        pipeline, batch = self.tools.config.pipeline, self.plan.shape.batch
        if self._whole:
            return [self.arrangement]
        # Cutting windows anew holds them twice: where prefill had room, there is some now.
        room = self.plan.bytes_of("hbm", "prefill")
        fits = self.plan.bytes_of("hbm", "windows") <= room
        now = self.arrangement.cohorts
        found = candidates(batch, micro_batch=pipeline.micro_batch, cohorts=pipeline.cohorts)
        return [one for one in found if fits or one.cohorts == now]

    def arrange(self, arrangement: Arrangement) -> None:
        """Cut the batch anew, between two steps."""
        if arrangement == self.arrangement:
            return
        if arrangement not in self.arrangements():
            raise ValueError(f"arrangement must be one of {self.arrangements()}, got {arrangement}")
        assert self._tiers is not None
        assert self._stages is not None
        cohorts = cut(self.plan.shape.batch, arrangement)
        # Nothing may still read a staging buffer that is given back.
        jax.block_until_ready((self._state.near, self._state.windows))
        self._state.arrange(cohorts)
        self._tiers.arrange(cohorts)
        self._state.windows = self._tiers.compile(self._state.windows)
        self._stages.arrange()
        self.arrangement = arrangement

    # Prefill

    def absorb(self, row: int, layer: int, prompt: PromptLayer) -> None:
        shape = self.plan.shape
        n_chunks = shape.prompt_chunks[row]
        self._n_chunks[row] = n_chunks
        count = int32(n_chunks)
        parts = take_apart(
            self._spec,
            prompt,
            int32(int(self.rows.length[row])),
            count,
            grouped=self._on_ssd,
            near_capacity=shape.near_capacity,
            chunk_capacity=shape.chunk_capacity,
        )
        self._insert(row, layer, parts.near)
        place = self._state.places[row]
        index = self._state.index[place.part]
        index[layer] = insert_index(self._spec, index[layer], int32(place.part_row), parts.piece)
        if self.tools.saves:
            groups = None if parts.groups is None else np.asarray(parts.groups)
            self._kept[row, layer] = Kept(np.asarray(parts.importance), groups)
        if self.plan.resident:
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
            self._state.windows = self._tiers.compile(self._state.windows)

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
        state, place = self._state, self._state.places[row]
        window = None
        if self.plan.resident:
            size = kv_heads * self.plan.shape.chunk_capacity
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
        geometry = page_geometry(self.tools)
        if self.plan.resident:
            geometry = replace(geometry, dram="model", ssd="model")
        made = from_arrays(
            saved.layer(layer, geometry.format(geometry.dram)),
            self._state.index[self._state.places[row].part][layer],
            dram_shape=geometry.dram_shape,
            dram_dtype=geometry.dram_dtype,
            chunk_capacity=self.plan.shape.chunk_capacity,
        )
        self._n_chunks[row], self._flushes[row] = saved.chunks, saved.flushes
        place = self._state.places[row]
        self._insert(row, layer, made.near)
        index = self._state.index[place.part]
        index[layer] = insert_state(index[layer], int32(place.part_row), made.ranking)
        if self.tools.saves:
            self._kept[row, layer] = made.kept
        if self.plan.resident:
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

    # Decode

    def layers(self, hidden: jax.Array) -> jax.Array:
        if self._tiers is not None and self._tiers.direct:
            hidden = committed(hidden)
        near_rows = self._make_room()
        steps = make_steps(
            self.rows,
            self._state.cohorts,
            self._present_chunks(),
            np.minimum(near_rows, self.plan.shape.near_capacity - 1),
            self._rope,
        )
        self.count_step()
        if self._stages is None:
            hidden, ranked = self._resident_step(hidden, steps[0, self.plan.shape.batch])
        else:
            taken = np.minimum(self._present_chunks(), self._spec.selected)
            hidden, ranked = self._stages.step(hidden, steps, taken, self.rows.active)
        if self._recorder is not None:
            self._recorder.step(ranked, self.rows.active)
        return hidden

    def _near_rows(self) -> np.ndarray[Any, Any]:
        """[B] the near row that each session's next token takes."""
        return self.rows.length - self._n_chunks * self._spec.chunk_size

    def _make_room(self) -> np.ndarray[Any, Any]:
        """The same, once near buffers that are full are flushed."""
        near_rows = self._near_rows()
        if np.any(near_rows[self.rows.active] >= self.plan.shape.near_capacity):
            self._flush(near_rows)
            near_rows = self._near_rows()
        return near_rows

    def _present_chunks(self) -> np.ndarray[Any, Any]:
        """[B] chunks to choose from: ended sessions are carried along with none."""
        return np.where(self.rows.active, self._n_chunks, 0)

    def count_step(self) -> None:
        n_chunks, near_rows = self._present_chunks(), self._near_rows()
        taken = np.minimum(n_chunks, self._spec.selected)
        attended = self._attended_chunks(n_chunks, taken)
        config = self.tools.model.config
        counted = config.num_layers * config.num_kv_heads
        for row, count in enumerate(self.rows.counts):
            if self.rows.active[row]:
                count.steps += 1
                chunks = float(attended[row]) * self._spec.chunk_size
                count.attended_tokens += int(near_rows[row]) + 1 + chunks
            count.selected_chunks += int(taken[row]) * counted

    def burst(self, draws: Draws, limit: int) -> Drawn | None:
        # Rankings are recorded, and sessions saved, between any two steps.
        if self._stages is not None or self._recorder is not None or self.tools.saves:
            return None
        near_rows, capacity = self._make_room(), self.plan.shape.near_capacity
        room = capacity - int(near_rows[self.rows.active].max())
        return draw_burst(
            self.tools,
            self._spec,
            self._state,
            self.rows,
            draws,
            n_chunks=self._present_chunks(),
            near_row=np.minimum(near_rows, capacity - 1),
            limit=min(limit, room),
        )

    def _resident_step(
        self, hidden: jax.Array, step: Step
    ) -> tuple[jax.Array, list[Ranked | None]]:
        state, ranked, tokens = self._state, [], []
        near = state.near[0]
        with self.tools.clock.measure("compute"):
            for layer, leaves in enumerate(self.tools.model.layers):
                hidden, token, best = resident_layer(
                    self._spec,
                    leaves,
                    hidden,
                    step,
                    near[layer],
                    state.index[0][layer],
                    state.windows[0],
                    int32(layer),
                )
                tokens += [token.k, token.v]
                ranked.append(best)
            buffers = append_rows([a for pair in near for a in pair], tokens, step.near_row)
            state.near[0] = [Near(*buffers[i : i + 2]) for i in range(0, len(buffers), 2)]
        return hidden, ranked

    def note_step(self, logits: jax.Array) -> None:
        if self._stages is None:
            super().note_step(logits)
        else:
            self._stages.finish(logits)

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

    def _flush(self, near_rows: np.ndarray[Any, Any]) -> None:
        """Turn the oldest unflushed tokens of full near buffers into chunks (index and store)."""
        shape = self.plan.shape
        # A session is flushed when its own buffer is full, so that neighbours never change what it
        # can select.
        full = self.rows.active & (near_rows >= shape.near_capacity)
        n_new = np.where(full, shape.flush_chunks, 0)
        state = self._state
        state.unstack_index()
        for cohort in state.cohorts:
            at = cohort.rows
            if not n_new[at].any():
                continue
            new, before = int32(n_new[at]), int32(self._n_chunks[at])
            near, parts = state.near[cohort.number], cohort.micro_batches
            for layer in range(len(near)):
                pages, near[layer], indexes = flush_stage(
                    self._spec,
                    near[layer],
                    tuple(state.index[part.number][layer] for part in parts),
                    new,
                    before,
                    flush_chunks=shape.flush_chunks,
                )
                for part, index in zip(parts, indexes, strict=True):
                    state.index[part.number][layer] = index
                if self._tiers is None:
                    state.windows[0] = grow_resident(
                        state.windows[0],
                        pages,
                        new,
                        before,
                        int32(layer),
                        chunks=shape.chunk_capacity,
                    )
                    continue
                host = np.asarray(pages)
                for row in np.flatnonzero(n_new[at]).tolist():
                    first, count = cohort.first + row, int(n_new[cohort.first + row])
                    self._tiers.append(first, layer, host[row], int(self._n_chunks[first]), count)
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
        if self._stages is not None:
            self._stages.close()
            self._stages = None
        self.__dict__.pop("_state", None)
        for name in self._reserved:
            self.tools.ledger.release("hbm", name)
        self._reserved = []
