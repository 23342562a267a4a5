"""The pages of one session in DRAM and on SSD: stored by workers, gathered by id."""

from __future__ import annotations

import concurrent.futures as futures
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdrive_jax.telemetry import Tier
from kvdrive_jax.tiers.cache import DramCache
from kvdrive_jax.tiers.dram import DramSlabs
from kvdrive_jax.tiers.extents import ceil_div
from kvdrive_jax.tiers.pages import (
    Bytes,
    FetchCount,
    Ids,
    PageError,
    page_rows,
)
from kvdrive_jax.tiers.placement import SessionPlan
from kvdrive_jax.tiers.reader import PageReader
from kvdrive_jax.tiers.shared import Shared
from kvdrive_jax.tiers.ssd import SsdSegments
from kvdrive_jax.tiers.writer import PageWriter

Array = npt.NDArray[Any]


ACCOUNTS: tuple[tuple[Tier, str], ...] = (
    ("dram", "page slabs"),
    ("dram", "maps"),
    ("ssd", "extents"),
)


class SessionPages:
    """The pages of one session; made by ``PageStore.open``.

    Called from one thread, ``PageStore.submit`` apart.

    Attributes: name; plan (what is reserved); failure (why it cannot be used, or None).
    """

    def __init__(self, shared: Shared, plan: SessionPlan, name: str, serial: int) -> None:
        self.name, self.plan = name, plan
        self.failure: PageError | None = None
        self._shared = shared
        geometry, ledger, tiers = shared.geometry, shared.ledger, shared.tiers
        self._heads, self._capacity = geometry.kv_heads, plan.chunk_capacity
        self._account = f"session {name} (#{serial})"
        self._count = [0] * geometry.layers
        self._offloaded = [False] * geometry.layers
        self._piece = [0] * geometry.layers
        self._pending: list[list[futures.Future[None]]] = [[] for _ in range(geometry.layers)]
        self._fetches: set[futures.Future[Any]] = set()
        self._lock = threading.Lock()
        self._outstanding = 0
        self._written = 0
        self._closed = self._released = False
        self._segments: SsdSegments | None = None
        self._dropped: SsdSegments | None = None
        self._positions: list[Ids] = []
        ledger.reserve("dram", f"{self._account}: page slabs", plan.slab_bytes)
        try:
            ledger.reserve("dram", f"{self._account}: maps", plan.map_bytes)
            ledger.reserve("ssd", f"{self._account}: extents", plan.ssd_bytes)
            self._dram: DramCache | DramSlabs
            if plan.cached:
                self._dram = DramCache(
                    geometry,
                    plan.chunk_capacity,
                    plan.rows,
                    pooled=tiers.sync == "adaptive",
                    scored=tiers.dram_eviction == "ranked",
                )
            else:
                self._dram = DramSlabs(geometry, plan.chunk_capacity, plan.rows, shared.allocate)
            if plan.layout is not None and shared.directory is not None:
                entries = self._heads * self._capacity
                self._positions = [np.full(entries, -1, np.int32) for _ in self._count]
                path = shared.directory.path / f"session-{serial:06d}"
                self._segments = SsdSegments(path, geometry, plan.layout, name)
            self._writer = PageWriter(
                geometry,
                plan.chunk_capacity,
                self._dram,
                self._positions,
                warm=tiers.warm_up != "none",
                transit=shared.transit,
            )
            self._reader = PageReader(
                name,
                geometry,
                plan.chunk_capacity,
                self._dram,
                self._positions,
                self._segments,
                sync=tiers.sync,
                transit=shared.transit,
                traffic=shared.traffic,
                timeline=shared.timeline,
                link=shared.link,
            )
        except BaseException:
            self._release()
            raise

    @property
    def disk_promised(self) -> int:
        """Bytes on disk that are reserved and not yet written."""
        return 0 if self._segments is None else max(0, self.plan.ssd_bytes - self._written)

    def stored(self, layer: int) -> int:
        """Chunks of each kv head handed in for a layer: their ids are 0 .. stored - 1."""
        return self._count[layer]

    def in_dram(self, layer: int) -> npt.NDArray[np.bool_]:
        """Which chunks of a layer DRAM holds now: [K, capacity]."""
        dram, heads = self._dram, np.arange(self._heads, dtype=np.int32)[:, None]
        chunks = np.arange(self._capacity)
        if isinstance(dram, DramCache):
            return dram.holds(dram.key(layer, heads, chunks))
        if dram.row_of_chunk is None:
            return (chunks < self._count[layer])[None].repeat(self._heads, axis=0)
        return dram.row_of_chunk[layer].reshape(self._heads, -1) >= 0

    def dram_rows(self, layer: int) -> tuple[Bytes, Ids | None]:
        """Where a layer's pages are in DRAM, for slabs that the device reads: the slab
        [K * rows, page_bytes]; and the row in it of each chunk [K * capacity] (-1: not in DRAM),
        None where chunk j of kv head k is row k * rows + j.
        """
        dram = self._dram
        if not isinstance(dram, DramSlabs):
            raise ValueError(f"session {self.name!r} has no slabs: its pages move within DRAM")
        table = dram.row_of_chunk
        return dram.slabs[layer], None if table is None else table[layer]

    def offload(
        self,
        layer: int,
        pages: Array,
        n_chunks: int,
        cluster_of_chunk: npt.NDArray[np.integer] | None,
        importance: npt.NDArray[np.floating] | None,
        above: Sequence[int] | None = None,
    ) -> None:
        """Store the prompt's pages of one layer, in the background.

        Waits while too many bytes are in flight. The arrays are read until ``wait``, or a fetch of
        the layer, returns; they must not change before.

        Args:
            pages: [K, N, *dram_shape] by chunk id; what lies at ``n_chunks`` and beyond is padding.
            cluster_of_chunk: integer [K, N], the order on SSD (by cluster, then id); None: by id.
            importance: [K, N], which chunks DRAM holds if not all; None: the first.
            above: [K], how many of the most important a window holds, which DRAM leaves to it
                where it is no larger; None: none.

        Raises ValueError for shapes and counts that do not fit, or a layer offloaded before;
        PageError when the session failed.
        """
        self._check_usable()
        self._check_layer(layer)
        self._shared.geometry.check("pages", pages)
        if self._offloaded[layer] or self._count[layer]:
            raise ValueError(f"layer {layer} of session {self.name!r} was offloaded already")
        layout = self.plan.layout
        limit = min(pages.shape[1], self._capacity)
        if layout is not None:
            limit = min(limit, layout.prompt_extents * layout.pages_per_extent)
        if not 0 <= n_chunks <= limit:
            raise ValueError(
                f"n_chunks must be in 0..{limit} (pages {list(pages.shape)}, chunk capacity "
                f"{self._capacity}), got {n_chunks}"
            )
        for name, array in (("cluster_of_chunk", cluster_of_chunk), ("importance", importance)):
            if array is not None and (
                array.ndim != 2 or len(array) != self._heads or array.shape[1] < n_chunks
            ):
                raise ValueError(
                    f"{name} must be [{self._heads}, >= {n_chunks}], got {list(array.shape)}"
                )
        self._offloaded[layer] = True
        if n_chunks == 0:
            return
        self._count[layer] = n_chunks
        if isinstance(self._dram, DramSlabs):
            self._dram.used[layer] = min(n_chunks, self._dram.rows)
        nbytes = n_chunks * self._shared.geometry.dram_page_bytes
        self._shared.traffic.add("hbm_to_dram", self._heads * nbytes)
        for head in range(self._heads):
            clusters = None if cluster_of_chunk is None else cluster_of_chunk[head]
            weights = None if importance is None else importance[head]
            better = 0 if above is None else min(int(above[head]), n_chunks)
            self._submit(
                layer,
                head,
                nbytes,
                self._store_prompt,
                pages[head],
                n_chunks,
                clusters,
                weights,
                better,
            )

    def append(self, layer: int, pages: Array, first_chunk: int, n_new: int) -> None:
        """Store ``n_new`` flushed chunks of one layer, ids ``first_chunk`` and up.

        ``pages`` [K, F, *dram_shape], F >= n_new. DRAM takes what it can before this returns; SSD,
        where there is one, takes all in the background (see ``offload``).

        Raises ValueError when ids do not follow those stored or exceed the capacity, PageError when
        the session failed.
        """
        self._check_usable()
        self._check_layer(layer)
        self._shared.geometry.check("pages", pages)
        if not 0 <= n_new <= pages.shape[1]:
            raise ValueError(f"n_new must be in 0..{pages.shape[1]}, got {n_new}")
        if first_chunk != self._count[layer] or first_chunk + n_new > self._capacity:
            raise ValueError(
                f"chunks {first_chunk}..{first_chunk + n_new - 1} of layer {layer} must follow the "
                f"{self._count[layer]} stored and stay below the capacity of {self._capacity}"
            )
        if n_new == 0:
            return
        layout, segments = self.plan.layout, self._segments
        step, places = n_new, 0
        if layout is not None:
            step = layout.piece_extents * layout.pages_per_extent
            places = ceil_div(n_new, step)
            if self._piece[layer] + places > layout.pieces:
                raise ValueError(
                    f"layer {layer} of session {self.name!r} has no place on SSD for {n_new} more "
                    f"chunks: {layout.pieces} pieces of up to {step} chunks were reserved; open "
                    "the session with the chunks of one flush as piece_chunks"
                )
        page_bytes = self._shared.geometry.dram_page_bytes
        self._shared.traffic.add("hbm_to_dram", self._heads * n_new * page_bytes)
        if isinstance(self._dram, DramSlabs):
            self._dram.append(layer, pages, first_chunk, n_new)
        else:
            chunk = np.arange(first_chunk, first_chunk + n_new)
            for head in range(self._heads):
                key = self._dram.key(layer, head, chunk)
                self._dram.install(key, page_rows(pages[head, :n_new], page_bytes))
        if layout is None or segments is None:
            self._count[layer] = first_chunk + n_new
            return
        by_head = self._positions[layer].reshape(self._heads, self._capacity)
        for start in range(0, n_new, step):
            part = pages[:, start : min(n_new, start + step)]
            piece = self._piece[layer]
            self._piece[layer] += 1
            count = part.shape[1]
            position = layout.piece_extent(piece) * layout.pages_per_extent
            first = first_chunk + start
            by_head[:, first : first + count] = np.arange(position, position + count)
            self._submit(
                layer, None, self._heads * count * page_bytes, self._store_piece, piece, part
            )
        # Last: who sees it finds what is pending.
        self._count[layer] = first_chunk + n_new

    def wait(self) -> None:
        """Until everything handed in is stored; raises the PageError of what could not be."""
        for layer in range(len(self._pending)):
            self._settle(layer)
        self._check_usable()

    def close(self) -> None:
        """Wait for submitted fetches, give up what is not stored yet, release every reservation,
        delete the files; idempotent."""
        if self._released:
            return
        futures.wait(list(self._fetches))
        self._closed = True
        if "_reader" in self.__dict__:  # else an earlier close was interrupted
            self._reader.settle()
        futures.wait([job for jobs in self._pending for job in jobs])
        self._release()
        self._shared.closed(self)
        self._released = True

    def gather(self, layer: int, head: Ids, chunk: Ids, target: Bytes) -> FetchCount:
        """Pages of ``head`` [M], ``chunk`` [M] into ``target`` [M, page_bytes]; see
        ``PageStore.fetch``."""
        self._check_layer(layer)
        # First: what is appended from here on may not be written when it is read.
        heads, count = self._heads, self._count[layer]
        if self._pending[layer]:
            self._settle(layer)
        if self.failure is not None or self._closed:
            self._check_usable()
        # Negative ids are large as unsigned ones.
        if int(head.view(np.uint32).max()) >= heads or int(chunk.view(np.uint32).max()) >= count:
            raise ValueError(
                f"layer {layer} of session {self.name!r} holds kv heads 0..{heads - 1} and chunks "
                f"0..{count - 1}, got heads {head.min()}..{head.max()} and chunks "
                f"{chunk.min()}..{chunk.max()}"
            )
        return self._reader.gather(layer, head, chunk, target, count)

    def begin_step(self) -> None:
        """What is read and ranked from now on is worth more to DRAM than before."""
        if isinstance(self._dram, DramCache):
            self._dram.advance()

    def rank(self, layer: int, ids: Ids) -> None:
        """Chunks that ranked close to being selected in a step, [K, M], -1 for none: DRAM keeps
        them longest, and what is on SSD alone is read ahead."""
        if self.failure is not None or self._closed or not isinstance(self._dram, DramCache):
            return
        self._check_layer(layer)
        head, at = np.nonzero(ids >= 0)
        chunk = ids[head, at]
        if not len(chunk) or not all(job.done() for job in list(self._pending[layer])):
            return
        stored = self._count[layer]
        if int(chunk.max()) >= stored:
            raise ValueError(f"ids must be below {stored}, got {chunk.max()}")
        self._reader.read_ahead(
            layer, head.astype(np.int32), chunk, stored, self._shared.read_ahead, self._fail
        )

    def track(self, fetch: futures.Future[Any]) -> None:
        """Keep the session from closing under a fetch."""
        self._fetches.add(fetch)
        fetch.add_done_callback(self._fetches.discard)

    # Workers.

    def _submit(
        self, layer: int, head: int | None, nbytes: int, job: Callable[..., None], *args: Any
    ) -> None:
        self._shared.transit.enter(nbytes)
        with self._lock:
            self._outstanding += 1
        try:
            future = self._shared.offloaders.submit(self._run, layer, head, nbytes, job, *args)
        except BaseException:
            self._finish(nbytes)
            raise
        with self._lock:
            self._pending[layer].append(future)

    def _run(
        self, layer: int, head: int | None, nbytes: int, job: Callable[..., None], *args: Any
    ) -> None:
        try:
            if self.failure is None and not self._closed:
                job(layer, head, *args)
        except PageError as error:
            self._fail_or_leave_ssd(error)
        except Exception as error:
            failure = PageError(
                f"cannot be stored: {type(error).__name__}: {error}",
                session=self.name,
                layer=layer,
                head=head,
            )
            failure.__cause__ = error
            self._fail(failure)
        finally:
            self._finish(nbytes)

    def _store_prompt(self, layer: int, head: int, *what: Any) -> None:
        # Another worker may drop the segments: they are asked for once.
        written = self._writer.prompt(self._segments, layer, head, *what)
        self._count_written(written)

    def _store_piece(self, layer: int, head: int | None, piece: int, pages: Array) -> None:
        written = self._writer.piece(self._segments, layer, piece, pages)
        self._count_written(written)

    def _count_written(self, nbytes: int) -> None:
        self._shared.traffic.add("dram_to_ssd", nbytes)
        with self._lock:
            self._written += nbytes

    def _fail_or_leave_ssd(self, error: PageError) -> None:
        """A write to SSD failed: where DRAM holds everything, the session goes on without SSD."""
        if self.plan.rows < self._capacity or error.path is None:
            self._fail(error)
            return
        if self._drop_ssd():
            self._shared.notice(f"{error}; its pages are all in DRAM, it goes on without SSD")

    def _fail(self, error: PageError) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
            idle = self._outstanding == 0  # else the last to finish does it
        self._shared.failed(error)
        if idle:
            self._remove_files()

    def _finish(self, nbytes: int) -> None:
        self._shared.transit.leave(nbytes)
        with self._lock:
            self._outstanding -= 1
            last = self._outstanding == 0
            gone = self.failure is not None or self._dropped is not None
        if last and gone:
            self._remove_files()

    def _settle(self, layer: int) -> None:
        futures.wait(list(self._pending[layer]))
        with self._lock:
            self._pending[layer] = [job for job in self._pending[layer] if not job.done()]

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < len(self._count):
            raise ValueError(f"layer must be in 0..{len(self._count) - 1}, got {layer}")

    def _check_usable(self) -> None:
        if self.failure is not None:
            self._shared.seen(self.failure)
            raise PageError(
                f"the session failed: {self.failure}",
                session=self.name,
                layer=self.failure.layer,
                head=self.failure.head,
                extent=self.failure.extent,
            ) from self.failure
        if self._closed:
            raise RuntimeError(f"session {self.name!r} is closed")

    def _drop_ssd(self) -> bool:
        """From now on nothing is on SSD; whether something was. Files are removed when nobody
        writes any more: a write under way would make them again."""
        with self._lock:
            segments, self._segments = self._segments, None
            self._dropped = self._dropped or segments
        self._reader.drop_ssd()
        return segments is not None

    def _remove_files(self) -> None:
        self._drop_ssd()
        with self._lock:
            segments, self._dropped = self._dropped, None
        if segments is not None:
            segments.remove()
            self._shared.ledger.release("ssd", f"{self._account}: extents")

    def _release(self) -> None:
        """Give back whatever is held; what the constructor did not reach is not."""
        ledger = self._shared.ledger
        if self._segments is not None:
            self._segments.remove()
            self._segments = None
        for tier, what in ACCOUNTS:
            with suppress(KeyError):
                ledger.release(tier, f"{self._account}: {what}")
        self._positions = []
        for name in ("_dram", "_reader", "_writer"):
            self.__dict__.pop(name, None)
