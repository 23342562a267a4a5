"""What method ``kvdrive`` keeps in HBM for one batch, cut as its arrangement says.

Near buffers and windows belong to cohorts, index and directory to micro-batches: each stage gets
arrays of exactly the rows it works on, so that nothing is sliced or copied between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvdrive_jax.index.rest import LayerIndex
from kvdrive_jax.methods.base import BatchRows, Tools
from kvdrive_jax.methods.kvdrive_tiers import page_geometry
from kvdrive_jax.pipeline.direct import committed
from kvdrive_jax.pipeline.parts import Cohort
from kvdrive_jax.pipeline.resident import split_layers, stack_layers
from kvdrive_jax.pipeline.stages import Near, Step
from kvdrive_jax.plan import Plan
from kvdrive_jax.window.directory import Directory, empty_directory
from kvdrive_jax.window.eviction import smooths
from kvdrive_jax.window.history import History

Array = np.ndarray[Any, Any]


class Place(NamedTuple):
    """Where a row of the batch is: its cohort and row there, its micro-batch and row there."""

    cohort: int
    row: int
    part: int
    part_row: int


class BatchState:
    """State of all layers.

    Attributes: near and windows per cohort (near per layer as well; a window is one pool for all
    layers), index and directory per micro-batch and layer. Where every chunk has a slot there is no
    directory.
    """

    def __init__(self, tools: Tools, plan: Plan, cohorts: tuple[Cohort, ...]) -> None:
        assert plan.retrieval is not None
        config, dtype, shape = tools.model.config, tools.model.dtype, plan.shape
        kv_heads, dim = config.num_kv_heads, config.head_dim
        page = page_geometry(tools).page_shape
        layers = range(config.num_layers)
        self.near: list[list[Near]] = []
        self.windows: list[jax.Array] = []
        self.index: list[list[LayerIndex]] = []
        self.directory: list[list[Directory]] = []
        layout = plan.layout
        for cohort in cohorts:
            near = (cohort.size, kv_heads, shape.near_capacity, dim)
            self.near.append([Near(jnp.zeros(near, dtype), jnp.zeros(near, dtype)) for _ in layers])
            if layout is None:
                rows = config.num_layers * kv_heads * shape.chunk_capacity
            else:
                rows = layout.rows
            self.windows.append(jnp.zeros((cohort.size, rows, *page), dtype))
            for part in cohort.micro_batches:
                size = part.last - part.first
                self.index.append(
                    [
                        plan.retrieval.empty(
                            size, kv_heads, dim, shape.chunk_capacity, plan.cluster_capacity
                        )
                        for _ in layers
                    ]
                )
                if layout is None:
                    continue
                self.directory.append(
                    [
                        empty_directory(
                            size,
                            kv_heads,
                            shape.chunk_capacity,
                            layout.largest,
                            layout.capacity[layer],
                            layout.keeps[layer],
                            layout.first[layer],
                            smooths=smooths(tools.config.window.eviction),
                        )
                        for layer in layers
                    ]
                )
        self.cohorts = cohorts
        self._stacked: LayerIndex | None = None

    def stacked_index(self) -> LayerIndex:
        """The index of all layers as one, of a resident batch; ``index`` is empty until
        ``unstack_index``, so that nothing is held twice."""
        if self._stacked is None:
            self._stacked = stack_layers(self.index[0])
            self.index[0] = []
        return self._stacked

    def unstack_index(self) -> None:
        """Make ``index`` whole again."""
        if self._stacked is not None:
            self.index[0] = split_layers(self._stacked, len(self.near[0]))
            self._stacked = None

    @property
    def cohorts(self) -> tuple[Cohort, ...]:
        """How the batch is cut."""
        return self._cohorts

    @cohorts.setter
    def cohorts(self, cohorts: tuple[Cohort, ...]) -> None:
        self._cohorts = cohorts
        self.places = [
            Place(cohort.number, row - cohort.first, part.number, row - part.first)
            for cohort in cohorts
            for part in cohort.micro_batches
            for row in range(part.first, part.last)
        ]

    def commit(self) -> None:
        """Bind everything to the default device; see ``direct.committed``."""
        self.near, self.windows, self.index, self.directory = committed(
            (self.near, self.windows, self.index, self.directory)
        )

    def index_of(self, row: int, layer: int) -> LayerIndex:
        """The index of the micro-batch of a row, and so on."""
        return self.index[self.places[row].part][layer]

    def arrange(self, cohorts: tuple[Cohort, ...]) -> None:
        """Cut the batch anew, layer by layer, so that little is held twice (the windows, where
        cohorts change, are)."""
        before = self._cohorts
        parts = [part for cohort in cohorts for part in cohort.micro_batches]
        of_parts = [(part.first, part.last) for part in parts]
        of_cohorts = [(cohort.first, cohort.last) for cohort in cohorts]
        same = [(c.first, c.last) for c in before] == of_cohorts
        index: list[list[LayerIndex]] = [[] for _ in parts]
        directory: list[list[Directory]] = [[] for _ in parts]
        near: list[list[Near]] = [[] for _ in cohorts]
        for layer in range(len(self.near[0])):
            # Taken out, so that each layer is given up as soon as it is cut.
            indexes = recut([one.pop(0) for one in self.index], of_parts)
            for made, piece in zip(index, indexes, strict=True):
                made.append(piece)
            if self.directory:
                pieces = _recut_directories([one[layer] for one in self.directory], of_parts)
                for kept, directed in zip(directory, pieces, strict=True):
                    kept.append(directed)
            if not same:
                for row, part in zip(
                    near, recut([one[layer] for one in self.near], of_cohorts), strict=True
                ):
                    row.append(part)
        self.index, self.directory = index, directory if self.directory else []
        if not same:
            self.near = near
            self.windows = recut(self.windows, of_cohorts)
        self.cohorts = cohorts


def recut(states: Sequence[Any], cuts: Sequence[tuple[int, int]]) -> list[Any]:
    """States of consecutive rows as states of the rows first to last - 1 of each cut: fresh
    arrays [rows, ...]."""
    made: list[Any] = _recut(tuple(states), tuple(cuts))
    return made


@partial(jax.jit, static_argnames="cuts")
def _recut(states: tuple[Any, ...], cuts: tuple[tuple[int, int], ...]) -> list[Any]:
    whole = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *states)
    return [jax.tree.map(lambda array, at=slice(*cut): array[at], whole) for cut in cuts]


def _recut_directories(
    states: Sequence[Directory], cuts: Sequence[tuple[int, int]]
) -> list[Directory]:
    """As `recut`; sizes of windows and the step are the same for all sessions."""

    def of_rows(state: Directory) -> tuple[jax.Array, ...]:
        history = state.history
        maps = (state.slot_of_chunk, state.chunk_of_slot)
        return (*maps, history.entered, history.used, history.uses, history.standing)

    def joined(rows: tuple[jax.Array, ...]) -> Directory:
        to_slot, to_chunk, entered, used, uses, standing = rows
        shared = states[0]
        return Directory(
            to_slot,
            to_chunk,
            History(entered, used, uses, standing, shared.history.step.copy()),
            shared.capacity.copy(),
            shared.keeps.copy(),
            shared.first.copy(),
        )

    return [joined(rows) for rows in recut([of_rows(state) for state in states], cuts)]


def make_steps(
    rows: BatchRows,
    cohorts: tuple[Cohort, ...],
    n_chunks: Array,
    near_row: Array,
    rope: dict[tuple[int, int], tuple[jax.Array, jax.Array]],
) -> dict[tuple[int, int], Step]:
    """Where every session stands, for each range of rows that a stage works on.

    rope: inv_freq and attention_factor of each range, filled by the first step.
    """
    ranges = {(cohort.first, cohort.last) for cohort in cohorts} | {
        (part.first, part.last) for cohort in cohorts for part in cohort.micro_batches
    }
    numbers = {
        (low, high): (
            rows.length[low:high].astype(np.int32),
            n_chunks[low:high].astype(np.int32),
            near_row[low:high].astype(np.int32),
        )
        for low, high in ranges
    }
    placed: dict[tuple[int, int], Any] = jax.device_put(numbers)
    for low, high in ranges - rope.keys():
        rope[low, high] = (rows.inv_freq[low:high], rows.attention_factor[low:high])
    return {
        at: Step(position, count, row, *rope[at]) for at, (position, count, row) in placed.items()
    }
