"""KVDrive: an index and a window in HBM, everything else in DRAM and on SSD.

Runs in one of two ways, which give the same tokens: *resident*, when the windows hold every
chunk, so that nothing is fetched; and *tiered*, through select, fetch and compute of every layer as
the schedule says.

In flight at any time: pages of the layer before, on their way from the device (prefill); miss
lists, on their way to the host, and pages on their way back (decode). Only the engine's thread
calls JAX; the page store's workers see NumPy views.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from kvdrive_jax.config import Precision
from kvdrive_jax.methods.base import BatchMethod, BatchRows, Drawn, Draws, Tools, int32
from kvdrive_jax.methods.kvdrive_burst import draw_burst
from kvdrive_jax.methods.kvdrive_decode import TieredStages
from kvdrive_jax.methods.kvdrive_intake import Intake
from kvdrive_jax.methods.kvdrive_state import BatchState, make_steps
from kvdrive_jax.methods.kvdrive_tiers import BatchTiers, page_geometry
from kvdrive_jax.pipeline.direct import committed
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
        self._flushes = [0] * shape.batch
        self._n_chunks = np.zeros(shape.batch, np.int64)
        self._tiers: BatchTiers | None = None
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
            self._intake = Intake(tools, plan, self._spec, self._state, self._tiers, self._n_chunks)
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
        come, unless a session would be alone in one: products of one row are rounded otherwise."""
        batch, pipeline = self.plan.shape.batch, self.tools.config.pipeline
        if self._whole:
            return Arrangement(batch)
        cohorts = min(pipeline.cohorts or 1, batch)
        size = -(-batch // cohorts)
        half = -(-size // 2) if batch // cohorts >= 4 else size
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

    # Sessions come in, and go to disk

    def absorb(self, row: int, layer: int, prompt: PromptLayer) -> None:
        self._intake.absorb(row, layer, prompt, int(self.rows.length[row]))

    def settle(self) -> None:
        self._intake.settle()

    def finish_prefill(self) -> None:
        self._intake.settle()
        if self._tiers is not None:
            self._tiers.wait()
            self._state.windows = self._tiers.compile(self._state.windows)

    @property
    def saved_precision(self) -> Precision:
        return self._spec.pages

    def saved_chunks(self, row: int) -> tuple[int, int]:
        return int(self._n_chunks[row]), self._flushes[row]

    def save(self, row: int, layer: int) -> Arrays:
        return self._intake.save(row, layer)

    def restore(self, row: int, layer: int, saved: SavedSession) -> None:
        self._flushes[row] = saved.flushes
        self._intake.restore(row, layer, saved)

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
        self._intake.forget(row)
        if self._tiers is not None:
            self._tiers.retire(row)

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.end()
        if self._tiers is not None:
            self._tiers.close()
            self._tiers = None
        if self._stages is not None:
            self._stages.close()
            self._stages = None
        # What it holds on the device is given back; not all is there if the start failed.
        for name in ("_intake", "_state"):
            self.__dict__.pop(name, None)
        for name in self._reserved:
            self.tools.ledger.release("hbm", name)
        self._reserved = []
