"""The tiers below HBM as one batch of method ``kvdrive`` uses them: its store, sessions, fetches.

A failure of the store is that of one session, noted in ``failed``; the others go on. Belongs to the
engine's thread, the only one that calls JAX; the store's workers see NumPy views.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from kvdrive_jax.methods.base import Tools
from kvdrive_jax.pipeline.direct import DirectFetcher, choose_fetch
from kvdrive_jax.pipeline.fetcher import Fetcher
from kvdrive_jax.pipeline.stages import Selected
from kvdrive_jax.plan import WORKERS, Plan
from kvdrive_jax.telemetry import RowCounts
from kvdrive_jax.tiers.pages import PageError, PageGeometry
from kvdrive_jax.tiers.store import PageStore, SessionPages

Array = np.ndarray[Any, Any]


def page_geometry(tools: Tools) -> PageGeometry:
    """The pages of this model and configuration."""
    config = tools.model.config
    return PageGeometry(
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        chunk_size=tools.config.retrieval.chunk_size,
        head_dim=config.head_dim,
        dtype=np.dtype(tools.model.dtype),
        dram=tools.config.tiers.dram_dtype,
        ssd=tools.config.tiers.ssd_precision,
    )


class BatchTiers:
    """DRAM and SSD of one batch, opened as planned.

    Attributes: sessions (their pages, None once retired); direct (whether the device reads DRAM).
    """

    def __init__(self, tools: Tools, plan: Plan, failed: dict[int, str]) -> None:
        self.geometry = page_geometry(tools)
        self.sessions: list[SessionPages | None] = [None] * plan.shape.batch
        self._selected, self._failed = plan.shape.selected, failed
        self._fetcher: Fetcher | DirectFetcher | None = None
        rows = self.geometry.kv_heads * sum(session.rows for session in plan.sessions)
        cached = any(session.cached for session in plan.sessions)
        way = choose_fetch(tools.config.tiers.fetch, self.geometry, rows, cached=cached)
        if way.notice is not None:
            print(way.notice, file=sys.stderr)
        arena, self.direct = way.arena, way.arena is not None
        self._store = PageStore(
            self.geometry,
            tools.config.tiers,
            tools.ledger,
            tools.traffic,
            workers=WORKERS,
            link=tools.links.ssd_to_dram,
            allocate=None if arena is None else arena.take,
            timeline=tools.timeline,
        )
        try:
            fetcher = Fetcher(
                self._store,
                self.geometry,
                self._selected * plan.shape.batch * self.geometry.kv_heads,
                tools.ledger,
                tools.traffic,
                tools.links.dram_to_hbm,
            )
            self._fetcher = fetcher
            if arena is not None:
                self._fetcher = DirectFetcher(arena, fetcher, self.geometry, tools.traffic)
            for row, session in enumerate(plan.sessions):
                self.sessions[row] = self._store.open(
                    session.chunk_capacity,
                    session.dram_bytes,
                    session.layout is not None,
                    str(row),
                    prompt_chunks=plan.shape.prompt_chunks[row],
                    piece_chunks=plan.shape.flush_chunks,
                )
        except BaseException:
            self.close()
            raise

    @contextmanager
    def _contained(self, row: int) -> Iterator[None]:
        try:
            yield
        except PageError as error:
            self._failed[row] = str(error)

    def _usable(self, row: int) -> SessionPages | None:
        return None if row in self._failed else self.sessions[row]

    def offload(
        self,
        row: int,
        layer: int,
        stored: Array,
        n_chunks: int,
        groups: Array | None,
        importance: Array,
        above: Sequence[int],
    ) -> None:
        """A prompt's pages of one layer; see ``SessionPages.offload``."""
        session = self._usable(row)
        if session is not None:
            with self._contained(row):
                session.offload(layer, stored, n_chunks, groups, importance, above)

    def append(self, row: int, layer: int, pages: Array, first_chunk: int, n_new: int) -> None:
        """Flushed chunks of one layer; see ``SessionPages.append``."""
        session = self._usable(row)
        if session is not None:
            with self._contained(row):
                session.append(layer, pages, first_chunk, n_new)

    def wait(self) -> None:
        """Until everything handed in is stored; tells the user what there is to tell."""
        for line in self._store.notices():
            print(line, file=sys.stderr)
        for row in range(len(self.sessions)):
            session = self._usable(row)
            if session is not None:
                with self._contained(row):
                    session.wait()

    def compile(self, window: jax.Array) -> jax.Array:
        """Compile what ``fetch`` will run, now; window: [B, R, 2, c, D], donated."""
        if isinstance(self._fetcher, DirectFetcher):
            return self._fetcher.compile(window, self.sessions, self._selected)
        assert self._fetcher is not None
        return self._fetcher.compile(window)

    def begin_step(self) -> None:
        """A decode step begins."""
        self._store.begin_step()

    def fetch(
        self, layer: int, selected: Selected, window: jax.Array, counts: Sequence[RowCounts]
    ) -> jax.Array:
        """Missing pages of one layer into the window [B, R, 2, c, D], donated."""
        if isinstance(self._fetcher, DirectFetcher):
            window, failure = self._fetcher.fetch(
                layer, self.sessions, selected.missing, window, counts
            )
        else:
            assert self._fetcher is not None
            missing = np.asarray(selected.missing)
            window, failure = self._fetcher.fetch(layer, self.sessions, missing, window, counts)
            if selected.likely is not None:
                self._store.rank(layer, self.sessions, np.asarray(selected.likely))
        if failure is not None:
            self._failed[int(failure.session)] = str(failure)
        return window

    def pages(self, row: int, layer: int, n_chunks: int) -> Array:
        """The first chunks of a session's layer, [K, n, *dram_shape]; PageError when they cannot
        be read."""
        geometry, session = self.geometry, self.sessions[row]
        assert session is not None
        pages = np.empty((geometry.kv_heads, n_chunks, *geometry.dram_shape), geometry.dram_dtype)
        head, chunk = (
            ids.astype(np.int32).ravel() for ids in np.indices((geometry.kv_heads, n_chunks))
        )
        flat = pages.reshape(-1, *geometry.dram_shape)
        self._store.fetch(layer, [session], np.zeros_like(head), head, chunk, flat)
        return pages

    def retire(self, row: int) -> None:
        """The session of ``row`` has ended."""
        if isinstance(self._fetcher, DirectFetcher):
            self._fetcher.settle()
        session, self.sessions[row] = self.sessions[row], None
        if session is not None:
            session.close()

    def close(self) -> None:
        """Give back everything."""
        for row in range(len(self.sessions)):
            self.retire(row)
        if self._fetcher is not None:
            self._fetcher.close()
        self._store.close()
