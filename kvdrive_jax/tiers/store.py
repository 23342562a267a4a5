"""The store: pages of all sessions below HBM. Ids in, pages out.

Threads. One thread, the caller's, opens, offloads, appends and closes; it and the fetch workers
read. Offloads and appends are finished by offload workers; a fetch of a layer waits for what is
pending on that layer. Workers touch NumPy and TensorStore only. An error in a worker marks its
session failed, removes that session's files, and is raised at the next ``poll`` or at that
session's next ``wait`` or fetch; other sessions go on.

Bytes. A session reserves its slabs, maps and disk space when it is opened; the buffers that all
sessions pass through are reserved while any is open. Pages handed in and not yet stored count as
staging: when more than that are in flight, ``offload`` and ``append`` wait.
"""

from __future__ import annotations

import concurrent.futures as futures
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvdrive_jax.config import TierConfig
from kvdrive_jax.telemetry import BudgetError, Ledger, Traffic, host_memory_bytes
from kvdrive_jax.tiers.directory import SsdDirectory
from kvdrive_jax.tiers.dram import SlabAllocator
from kvdrive_jax.tiers.link import Link
from kvdrive_jax.tiers.pages import Bytes, FetchCount, Ids, PageError, PageGeometry, page_rows
from kvdrive_jax.tiers.placement import SessionPlan, plan_session
from kvdrive_jax.tiers.session_pages import SessionPages
from kvdrive_jax.tiers.shared import Shared
from kvdrive_jax.tiers.staging import Transit
from kvdrive_jax.timeline import Timeline

Array = npt.NDArray[Any]
Result = TypeVar("Result")
Job = Callable[[futures.Future[Any]], None]
IdArray = npt.NDArray[np.integer[Any]]


class PageStore:
    """All pages below HBM, of all open sessions, within the budgets of ``ledger``.

    ``workers`` threads write and as many fetch. ``pending_bytes`` bounds the pages handed in and
    not yet stored (None: one layer of the largest open session). ``allocate`` gives the memory of
    the DRAM tier (None: ordinary memory). ``link`` imitates a slower SSD.
    ``timeline`` gets a span for every read from SSD.

    Raises ValueError when ``tiers.ssd_dir`` cannot be used.
    """

    def __init__(
        self,
        geometry: PageGeometry,
        tiers: TierConfig,
        ledger: Ledger,
        traffic: Traffic,
        *,
        workers: int = 2,
        pending_bytes: int | None = None,
        allocate: SlabAllocator | None = None,
        link: Link | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self.geometry, self._tiers, self._ledger = geometry, tiers, ledger
        directory = None if tiers.ssd_dir is None else SsdDirectory(str(tiers.ssd_dir))
        self._lock = threading.Lock()
        self._failures: list[PageError] = []
        self._sessions: list[SessionPages] = []
        self._notices: list[str] = []
        if directory is not None and directory.reclaimed_bytes:
            self._notices.append(
                f"ssd_dir {tiers.ssd_dir}: removed {directory.reclaimed_bytes:,} bytes that killed "
                "processes had left"
            )
        self._opened = 0
        self._closed = False
        self._workers = workers
        self._reading_ahead = 0
        self._fetchers = futures.ThreadPoolExecutor(workers, "kvdrive-fetch")
        self._shared = Shared(
            geometry=geometry,
            tiers=tiers,
            ledger=ledger,
            traffic=traffic,
            transit=Transit(ledger, workers, pending_bytes),
            offloaders=futures.ThreadPoolExecutor(workers, "kvdrive-offload"),
            directory=directory,
            failed=self._failed,
            seen=self._seen,
            notice=self._notices.append,
            closed=self._forget,
            read_ahead=self._read_ahead,
            timeline=timeline or Timeline(),
            link=link,
            allocate=allocate,
        )

    def plan(
        self,
        chunk_capacity: int,
        dram_bytes: int | None,
        ssd: bool,
        *,
        prompt_chunks: int | None = None,
        piece_chunks: int = 64,
    ) -> SessionPlan:
        """What ``open`` with these arguments would reserve; see ``placement.plan_session``."""
        return plan_session(
            self.geometry,
            self._tiers,
            chunk_capacity=chunk_capacity,
            dram_bytes=dram_bytes,
            ssd=ssd,
            prompt_chunks=prompt_chunks,
            piece_chunks=piece_chunks,
        )

    def open(
        self,
        chunk_capacity: int,
        dram_bytes: int | None,
        ssd: bool,
        name: str,
        *,
        prompt_chunks: int | None = None,
        piece_chunks: int = 64,
    ) -> SessionPages:
        """Room for a session of up to ``chunk_capacity`` chunks per (layer, kv head).

        ``dram_bytes`` is its share of DRAM, maps included (None: what the budget has left, at most
        everything). ``prompt_chunks``, where known, and ``piece_chunks``, the chunks of one flush,
        make the reservation on disk exact.

        Raises BudgetError when a budget cannot hold it, ValueError when ``ssd`` is asked for
        without ``ssd_dir`` or the disk has too little space; nothing stays reserved then.
        """
        shared, transit = self._shared, self._shared.transit
        if self._closed:
            raise RuntimeError("the page store is closed")
        if ssd and shared.directory is None:
            raise ValueError("an SSD tier needs ssd_dir: say where it may write with --ssd-dir")

        def plan_for(share: int | None) -> SessionPlan:
            return self.plan(
                chunk_capacity, share, ssd, prompt_chunks=prompt_chunks, piece_chunks=piece_chunks
            )

        others = [session.plan for session in self._sessions]
        plan = plan_for(dram_bytes)
        budget = self._ledger.budget("dram")
        if dram_bytes is None and budget is not None:
            left = budget - self._ledger.used("dram")
            if plan.dram_bytes + transit.growth([*others, plan]) > left:
                # What does not fit is read back from SSD, through buffers that count as well.
                partial = plan_for(plan.dram_bytes - 1) if ssd and plan.dram_bytes else plan
                plan = plan_for(max(0, left - transit.growth([*others, partial])))
                # With less DRAM come smaller buffers, which leave a little more of it.
                more = plan_for(max(0, left - transit.growth([*others, plan])))
                if more.dram_bytes + transit.growth([*others, more]) <= left:
                    plan = more
        needed, free = plan.dram_bytes + transit.growth([*others, plan]), host_memory_bytes()
        if needed > free:
            raise BudgetError(
                f"session {name!r} needs {needed:,} bytes of host memory, {free:,} are available; "
                "lower --dram-budget"
            )
        if plan.layout is not None and shared.directory is not None:
            promised = sum(session.disk_promised for session in self._sessions)
            shared.directory.check_free(plan.ssd_bytes, promised)
        try:
            transit.fit([*others, plan])
            session = SessionPages(shared, plan, name, self._opened)
        except BaseException:
            transit.fit(others)
            raise
        self._opened += 1
        self._sessions.append(session)
        return session

    def fetch(
        self,
        layer: int,
        rows: Sequence[SessionPages],
        row: IdArray,
        head: IdArray,
        chunk: IdArray,
        out: Array,
    ) -> FetchCount:
        """Gather M pages of one layer into ``out[:M]``.

        Args:
            rows: the sessions of the batch. row, head, chunk: integer [M]; page i is ``chunk[i]``
                of kv head ``head[i]`` of session ``rows[row[i]]``. Fastest as int32, by row.
            out: [>= M, *dram_shape], C-contiguous, of ``dram_dtype``.

        Raises ValueError for ids that are not stored, PageError when pages cannot be read or the
        session failed earlier, with ``others`` where several did; ``out`` then still holds the
        pages of all other sessions.
        """
        m = len(chunk)
        if m == 0:
            return FetchCount(0, 0, 0)
        row, head, chunk, target = self._check_fetch(row, head, chunk, out)
        last = int(row.view(np.uint32).max())
        if last >= len(rows):
            raise ValueError(f"row must be in 0..{len(rows) - 1}, got {row.min()}..{row.max()}")
        if last == 0:
            return rows[0].gather(layer, head, chunk, target)
        ordered = bool((row[1:] >= row[:-1]).all())
        edges = np.searchsorted(row, np.arange(len(rows) + 1)).tolist() if ordered else []
        counts: list[FetchCount] = []
        failures: list[PageError] = []
        for i, session in enumerate(rows):
            mine: Any = slice(edges[i], edges[i + 1]) if ordered else np.flatnonzero(row == i)
            heads, chunks = head[mine], chunk[mine]
            if not len(chunks):
                continue
            block = target[mine]
            try:
                counts.append(session.gather(layer, heads, chunks, block))
            except PageError as error:
                failures.append(error)
                continue
            if not ordered:
                target[mine] = block
        if failures:
            failures[0].others = tuple(failures[1:])
            raise failures[0]
        dram, ssd, read = (sum(column) for column in zip(*counts, strict=True))
        return FetchCount(dram, ssd, read)

    def _check_fetch(
        self, row: IdArray, head: IdArray, chunk: IdArray, out: Array
    ) -> tuple[Ids, Ids, Ids, Bytes]:
        geometry, m = self.geometry, len(chunk)
        ids: list[Ids] = []
        for name, array in (("row", row), ("head", head), ("chunk", chunk)):
            if array.shape != (m,) or array.dtype.kind not in "iu":
                raise ValueError(
                    f"{name} must be integer [{m}], got {array.dtype} {list(array.shape)}"
                )
            narrow = array.astype(np.int32, copy=False)
            if narrow is not array and not np.array_equal(narrow, array):
                raise ValueError(f"{name} must fit int32, got {array.min()}..{array.max()}")
            ids.append(narrow)
        if (
            len(out) < m
            or out.shape[1:] != geometry.dram_shape
            or out.dtype != geometry.dram_dtype
            or not out.flags.c_contiguous
            or not out.flags.writeable
        ):
            raise ValueError(
                f"out must be a writeable, C-contiguous [>= {m}, "
                f"{', '.join(map(str, geometry.dram_shape))}] of {geometry.dram_dtype}, "
                f"got {list(out.shape)} of {out.dtype}"
            )
        return ids[0], ids[1], ids[2], page_rows(out, geometry.dram_page_bytes)[:m]

    def submit(
        self, rows: Sequence[SessionPages | None], done: futures.Future[Result], job: Job
    ) -> None:
        """Run ``job(done)`` on a fetch worker; it must finish ``done``, itself or through another
        thread, unless it raises: that is then the future's error. The sessions ``rows`` are not
        closed before ``done`` is finished."""
        for session in rows:
            if session is not None:
                session.track(done)

        def run() -> None:
            try:
                job(done)
            except BaseException as error:
                done.set_exception(error)

        try:
            self._fetchers.submit(run)
        except BaseException as error:
            # Whoever closes the sessions waits for it.
            if not done.done():
                done.set_exception(error)
            raise

    def submit_fetch(
        self,
        layer: int,
        rows: Sequence[SessionPages],
        row: IdArray,
        head: IdArray,
        chunk: IdArray,
        out: Array,
    ) -> futures.Future[FetchCount]:
        """``fetch`` on a worker. Its errors are those of the future; ``out`` is the worker's until
        the future is done."""
        fetched: futures.Future[FetchCount] = futures.Future()

        def job(done: futures.Future[FetchCount]) -> None:
            done.set_result(self.fetch(layer, rows, row, head, chunk, out))

        self.submit(rows, fetched, job)
        return fetched

    def begin_step(self) -> None:
        """A decode step begins: what it reads and ranks is worth more to DRAM than before."""
        for session in self._sessions:
            session.begin_step()

    def rank(self, layer: int, rows: Sequence[SessionPages | None], ids: Ids) -> None:
        """What ranked close to being selected in one layer of a step; see ``SessionPages.rank``.
        ids: [B, K, M] int32, -1 for none; rows: the batch, None for ended
        sessions."""
        for session, ranked in zip(rows, ids, strict=True):
            if session is not None:
                session.rank(layer, ranked)

    def notices(self) -> list[str]:
        """What the user should be told since the last call."""
        told = []
        while self._notices:  # workers add to it
            told.append(self._notices.pop(0))
        return told

    def _read_ahead(self, job: Any, *args: Any) -> futures.Future[None] | None:
        # Reading ahead must not pile up behind a slow disk: what cannot begin soon is left out.
        with self._lock:
            if self._reading_ahead >= 2 * self._workers or self._closed:
                return None
            self._reading_ahead += 1
        future: futures.Future[None] = futures.Future()
        self._fetchers.submit(self._run_ahead, future, job, *args)
        return future

    def _run_ahead(self, future: futures.Future[None], job: Any, *args: Any) -> None:
        # What was given up counts until a worker has come to it: it is kept in the queue till then.
        try:
            if future.set_running_or_notify_cancel():
                try:
                    job(*args)
                except BaseException as error:
                    future.set_exception(error)
                    raise
                future.set_result(None)
        finally:
            with self._lock:
                self._reading_ahead -= 1

    def poll(self) -> None:
        """Raise the oldest worker error that nobody has seen yet."""
        with self._lock:
            if not self._failures:
                return
            failure = self._failures.pop(0)
        raise failure

    def close(self) -> None:
        """Close every session, stop the workers, remove everything made on disk; idempotent."""
        self._closed = True
        for session in list(self._sessions):
            session.close()
        self._shared.offloaders.shutdown()
        self._fetchers.shutdown()
        if self._shared.directory is not None:
            self._shared.directory.close()

    def __enter__(self) -> PageStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _failed(self, error: PageError) -> None:
        with self._lock:
            self._failures.append(error)

    def _seen(self, error: PageError) -> None:
        with self._lock:
            if error in self._failures:
                self._failures.remove(error)

    def _forget(self, session: SessionPages) -> None:
        self._sessions.remove(session)
        if session.failure is not None:
            self._seen(session.failure)
        self._shared.transit.fit([other.plan for other in self._sessions])
