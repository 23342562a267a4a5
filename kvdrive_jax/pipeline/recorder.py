"""Keeps what a run ranks, step by step, and makes traces of it.

Recording waits for the device at the end of every step and holds the traces in host memory until
they are taken; it changes no token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kvdrive_jax.config import RetrievalConfig
from kvdrive_jax.pipeline.stages import Ranked
from kvdrive_jax.shapes import BatchShape
from kvdrive_jax.window.trace import Trace, TraceInfo
from kvdrive_jax.window.warm import rank_chunks

rank = jax.jit(rank_chunks, static_argnames="count")


class TraceRecorder:
    """Records the sessions of one call after another.

    model: its name, for people; multiple: M, the chunks told per step and head, as a multiple of
    the budget, at least 1; inf for all of them: then a replay of any policy equals the engine.
    """

    def __init__(self, model: str, multiple: float = math.inf) -> None:
        if not multiple >= 1:
            raise ValueError(f"trace_depth must be at least 1 budget, got {multiple}")
        self._model = model
        self._multiple = multiple
        self._traces: list[Trace] = []
        self._infos: list[TraceInfo] = []
        self._warm: list[list[Any]] = []
        self._ids: list[list[Any]] = []
        self._scores: list[list[Any]] = []

    def depth(self, shape: BatchShape) -> int:
        """M of a batch."""
        return math.ceil(min(shape.chunk_capacity, self._multiple * shape.selected))

    def begin(
        self, shape: BatchShape, retrieval: RetrievalConfig, *, digest: str, page_bytes: int
    ) -> None:
        """A batch of sessions begins; what is told until `end` is theirs, by row."""
        self._infos = [
            TraceInfo(
                model=self._model,
                digest=digest,
                text=f"prompt {row}",
                prompt_tokens=tokens,
                chunk_size=retrieval.chunk_size,
                selected=shape.selected,
                chunk_capacity=shape.chunk_capacity,
                page_bytes=page_bytes,
                index=retrieval.index,
                group_rule=retrieval.group_rule,
            )
            for row, tokens in enumerate(shape.prompt_tokens)
        ]
        self._warm, self._ids, self._scores = ([[] for _ in self._infos] for _ in range(3))

    def prompt(self, row: int, layer: int, importance: jax.Array, n_chunks: jax.Array) -> None:
        """Importance [K, N] of the chunks of a prompt; layers come in turn."""
        count = importance.shape[-1]
        self._warm[row].append(np.asarray(rank(importance, n_chunks, count=count)))

    def step(self, ranked: Sequence[Ranked | None], active: np.ndarray[Any, Any]) -> None:
        """The ranking of every layer in one step."""
        layers = [layer for layer in ranked if layer is not None]
        ids = np.stack([np.asarray(layer.ids) for layer in layers], axis=1)  # [B, L, K, M]
        scores = np.stack([np.asarray(layer.scores) for layer in layers], axis=1)
        ids = np.where(np.isneginf(scores), -1, ids)
        for row in np.flatnonzero(active):
            self._ids[row].append(ids[row])
            self._scores[row].append(scores[row])

    def end(self) -> None:
        """The batch is over: its sessions become traces, those without a step excepted."""
        recorded = zip(self._infos, self._warm, self._ids, self._scores, strict=True)
        self._traces += [
            Trace(info=info, ids=np.stack(ids), scores=np.stack(scores), warm=np.stack(warm))
            for info, warm, ids, scores in recorded
            if ids
        ]
        self._infos, self._warm, self._ids, self._scores = [], [], [], []

    def take(self) -> list[Trace]:
        """The traces made so far, which are then no longer held."""
        traces, self._traces = self._traces, []
        return traces
