"""The tiers below HBM as one batch of method ``kvdrive`` uses them: its store, sessions, fetches.

A failure of the store is that of one session, noted in ``failed``; the others go on. Belongs to the
engine's thread, the only one that calls JAX; the store's workers, which gather, and the thread that
an imitated link keeps, see NumPy views, and ring when something is done.
"""

from __future__ import annotations

import concurrent.futures as futures
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from kvdrive_jax.methods.base import Tools
from kvdrive_jax.pipeline.direct import DirectFetcher, choose_fetch
from kvdrive_jax.pipeline.fetcher import Fetcher, Gathered, staging_buffers
from kvdrive_jax.pipeline.miss_lists import Bell
from kvdrive_jax.pipeline.parts import Cohort, MicroBatch
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

    def __init__(
        self,
        tools: Tools,
        plan: Plan,
        counts: Sequence[RowCounts],
        failed: dict[int, str],
        bell: Bell,
    ) -> None:
        self.geometry = page_geometry(tools)
        self.sessions: list[SessionPages | None] = [None] * plan.shape.batch
        self._tools, self._failed, self._bell = tools, failed, bell
        self._selected, self._counts = plan.shape.selected, counts
        self._fetchers: list[Fetcher] = []
        self._cohorts: tuple[Cohort, ...] = ()
        self._direct: DirectFetcher | None = None
        self._link_thread: futures.ThreadPoolExecutor | None = None
        self._ranking: list[futures.Future[None]] = []
        rows = self.geometry.kv_heads * sum(session.rows for session in plan.sessions)
        cached = any(session.cached for session in plan.sessions)
        way = choose_fetch(tools.config.tiers.fetch, self.geometry, rows, cached=cached)
        if way.notice is not None:
            print(way.notice, file=sys.stderr)
        self._arena, self.direct = way.arena, way.arena is not None
        self._store = PageStore(
            self.geometry,
            tools.config.tiers,
            tools.ledger,
            tools.traffic,
            workers=WORKERS,
            link=tools.links.ssd_to_dram,
            allocate=None if way.arena is None else way.arena.take,
            timeline=tools.timeline,
        )
        try:
            if tools.links.dram_to_hbm is not None:
                self._link_thread = futures.ThreadPoolExecutor(1, "kvdrive-link")
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

    def arrange(self, cohorts: tuple[Cohort, ...]) -> None:
        """From now on fetches are of these micro-batches; none is under way."""
        for fetcher in self._fetchers:
            fetcher.close()
        self._fetchers = []
        tools, self._cohorts = self._tools, cohorts
        for cohort in cohorts:
            for part in cohort.micro_batches:
                self._fetchers.append(
                    Fetcher(
                        self._store,
                        self.geometry,
                        self._selected * (part.last - part.first) * self.geometry.kv_heads,
                        tools.ledger,
                        tools.traffic,
                        tools.links.dram_to_hbm,
                        first=part.first - cohort.first,
                        buffers=staging_buffers(tools.config.pipeline.schedule),
                        name=f"staging of micro-batch {part.number}",
                        number=part.number,
                        timeline=tools.timeline,
                    )
                )
        if self._arena is not None:
            self._direct = DirectFetcher(
                self._arena, self._fetchers[0], self.geometry, tools.traffic
            )

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

    def compile(self, windows: list[jax.Array]) -> list[jax.Array]:
        """Compile what fetches will run, now; windows: [B, R, 2, c, D] of each cohort, donated."""
        if self._direct is not None:
            return [self._direct.compile(windows[0], self.sessions, self._selected)]
        windows = list(windows)
        for cohort in self._cohorts:
            for part in cohort.micro_batches:
                fetcher = self._fetchers[part.number]
                windows[cohort.number] = fetcher.compile(windows[cohort.number])
        return windows

    def begin_step(self) -> None:
        """A decode step begins."""
        ranking, self._ranking = self._ranking, []
        for job in ranking:
            job.result()
        self._store.begin_step()

    def gather(
        self, layer: int, part: MicroBatch, missing: Array, window_shape: Sequence[int]
    ) -> Gathered | None:
        """Missing pages of a micro-batch into its staging, here and now."""
        fetcher, sessions = self._fetchers[part.number], self.sessions[part.rows]
        gathered = fetcher.gather(layer, sessions, missing, window_shape)
        if gathered is not None:
            fetcher.carry(layer, gathered)
        return gathered

    def submit_gather(
        self, layer: int, part: MicroBatch, missing: Array, window_shape: Sequence[int]
    ) -> futures.Future[Gathered | None]:
        """The same on a worker; it rings."""
        fetcher, sessions = self._fetchers[part.number], self.sessions[part.rows]
        link, bell = self._link_thread, self._bell
        arrived: futures.Future[Gathered | None] = futures.Future()
        arrived.add_done_callback(lambda _: bell.ring())

        def carry(gathered: Gathered) -> None:
            try:
                fetcher.carry(layer, gathered)
            except BaseException as error:
                arrived.set_exception(error)
            else:
                arrived.set_result(gathered)

        def job(done: futures.Future[Gathered | None]) -> None:
            gathered = fetcher.gather(layer, sessions, missing, window_shape)
            if gathered is None or link is None:
                done.set_result(gathered)
            else:
                link.submit(carry, gathered)

        self._store.submit(sessions, arrived, job)
        return arrived

    def write(
        self, layer: int, part: MicroBatch, gathered: Gathered, window: jax.Array
    ) -> jax.Array:
        """What was gathered into the window of its cohort [B, R, 2, c, D], donated."""
        counts = [self._counts[row] for row in range(part.first, part.last)]
        window = self._fetchers[part.number].write(layer, gathered, window, counts)
        self._note(gathered.failure)
        return window

    def fetch_directly(self, layer: int, missing: jax.Array, window: jax.Array) -> jax.Array:
        """Missing pages of one layer into the window [B, R, 2, c, D], donated, by the device."""
        assert self._direct is not None
        window, failure = self._direct.fetch(layer, self.sessions, missing, window, self._counts)
        self._note(failure)
        return window

    def rank(self, layer: int, part: MicroBatch, likely: Array) -> None:
        """What is likely to be selected next, [b, K, M], -1 for none, for DRAM to keep and to read
        ahead; beside everything else."""
        sessions = self.sessions[part.rows]
        ranked: futures.Future[None] = futures.Future()

        def job(done: futures.Future[None]) -> None:
            self._store.rank(layer, sessions, likely)
            done.set_result(None)

        self._ranking.append(ranked)
        self._store.submit(sessions, ranked, job)

    def _note(self, failure: PageError | None) -> None:
        for error in () if failure is None else failure.each:
            self._failed[int(error.session)] = str(error)

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
        if self._direct is not None:
            self._direct.settle()
        session, self.sessions[row] = self.sessions[row], None
        if session is not None:
            session.close()

    def close(self) -> None:
        """Give back everything."""
        for row in range(len(self.sessions)):
            self.retire(row)
        if self._link_thread is not None:
            self._link_thread.shutdown()
        for fetcher in self._fetchers:
            fetcher.close()
        self._fetchers = []
        self._store.close()
