"""Fetch: missing pages from the store, through staging, into their slots (the staged way).

Of one micro-batch. `gather` fills a staging buffer and may run on a worker: NumPy only. `write`
belongs to the engine's thread and puts the pages into their slots. A buffer is used again as it is:
a miss list that has arrived proves that the pages of the layer before (with two buffers: of the one
before that) are in their slots. Padding of a transfer is never copied by the host.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from kvdrive_jax.config import ScheduleName
from kvdrive_jax.pipeline.stages import write_stage
from kvdrive_jax.telemetry import Ledger, RowCounts, Traffic
from kvdrive_jax.tiers.link import Link
from kvdrive_jax.tiers.pages import PageError, PageGeometry
from kvdrive_jax.tiers.staging import StagingRing
from kvdrive_jax.tiers.store import PageStore, SessionPages
from kvdrive_jax.timeline import Timeline

Array = np.ndarray[Any, Any]


def staging_buffers(schedule: ScheduleName) -> int:
    """Staging buffers of each micro-batch: fetches of it that can be under way together."""
    return 2 if schedule == "speculative" else 1


def transfer_sizes(most: int) -> tuple[int, ...]:
    """Page counts that a transfer is padded to: powers of four from 16, and ``most``.

    Few, so that every one can be compiled before the first step.
    """
    sizes = []
    size = 16
    while size < most:
        sizes.append(size)
        size *= 4
    return (*sizes, most)


@dataclass(frozen=True, eq=False)
class Gathered:
    """Pages of one layer's miss list in staging.

    pages: [M, *dram_shape], of which those from ``count`` on are padding; target: [M] int32, flat
    rows of the window; missed: pages of each session; failure: of a session whose pages could not
    be read: those of all others are here.
    """

    pages: Array
    target: Array
    count: int
    missed: list[int]
    failure: PageError | None


class Fetcher:
    """Fetches of one micro-batch.

    most: the largest number of pages that one layer can miss; first: its first row in the windows;
    buffers: fetches that can be under way together; name: of its staging in the ledger; link:
    imitates a slower way to HBM.
    """

    def __init__(
        self,
        store: PageStore,
        geometry: PageGeometry,
        most: int,
        ledger: Ledger,
        traffic: Traffic,
        link: Link | None = None,
        *,
        first: int = 0,
        buffers: int = 1,
        name: str = "staging ring",
        number: int = 0,
        timeline: Timeline | None = None,
    ) -> None:
        self._link = link
        self._store, self._geometry, self._traffic = store, geometry, traffic
        self._first, self._number = first, number
        self._timeline = timeline or Timeline()
        self._sizes = transfer_sizes(most)
        self._ring = StagingRing(buffers, most, geometry, ledger, name=name)
        self._staging = [self._ring.acquire() for _ in range(buffers)]

    def compile(self, window: jax.Array) -> jax.Array:
        """Compile the write of every transfer size now, not when a step first needs it.

        window: [B, R, 2, c, D], donated and returned unchanged.
        """
        for size in self._sizes:
            pages = np.zeros((size, *self._geometry.dram_shape), self._geometry.dram_dtype)
            nowhere = np.full(size, window.shape[0] * window.shape[1], np.int32)
            window = write_stage(window, pages, nowhere, self._geometry.dram)
        return window

    def gather(
        self,
        layer: int,
        sessions: Sequence[SessionPages | None],
        missing: Array,
        window_shape: Sequence[int],
    ) -> Gathered | None:
        """Pages of one layer's miss list into staging; None where none miss.

        sessions: the micro-batch's, None for those that ended; missing: [2, B, K, P] int32, chunk
        ids (-1: none) and the rows they go to; window_shape: of the windows they go to.
        """
        start = time.perf_counter()
        batch, rows = window_shape[:2]
        kv_heads = missing.shape[2]
        chunks, slots = missing[0].reshape(-1), missing[1].reshape(-1)
        at = np.flatnonzero(chunks >= 0)
        if not at.size:
            return None
        owner = at // missing.shape[-1]
        row, head = owner // kv_heads, owner % kv_heads
        size = next(size for size in self._sizes if size >= at.size)
        # By layer, not by who comes first: two layers that are gathered together have two buffers.
        pages = self._staging[layer % len(self._staging)].buffer[:size]
        failure = self._read(layer, sessions, row, head, chunks[at], pages)
        target = np.full(size, batch * rows, np.int32)
        target[: at.size] = (self._first + row) * rows + slots[at]
        nbytes = at.size * self._geometry.dram_page_bytes
        missed = np.bincount(row, minlength=len(sessions)).tolist()
        gathered = time.perf_counter()
        self._timeline.span(
            "host gather", "gather", start, gathered, layer, self._number, nbytes=nbytes
        )
        return Gathered(pages, target, int(at.size), missed, failure)

    def carry(self, layer: int, gathered: Gathered) -> None:
        """As long as the imitated link takes; any thread."""
        if self._link is None:
            return
        start = time.perf_counter()
        nbytes = gathered.count * self._geometry.dram_page_bytes
        with self._link.carry(nbytes):
            pass  # the pages move when the device takes them: this is when it could
        self._timeline.span(
            "DRAM->HBM", "transfer", start, time.perf_counter(), layer, self._number, nbytes=nbytes
        )

    def write(
        self, layer: int, gathered: Gathered, window: jax.Array, counts: Sequence[RowCounts]
    ) -> jax.Array:
        """What was gathered into the window [B, R, 2, c, D], donated; counts: of the sessions."""
        start = time.perf_counter()
        window = write_stage(window, gathered.pages, gathered.target, self._geometry.dram)
        nbytes = gathered.count * self._geometry.dram_page_bytes
        if self._link is None:
            self._timeline.span(
                "DRAM->HBM", "transfer", start, time.perf_counter(), layer, self._number,
                nbytes=nbytes,
            )  # fmt: skip
        self._traffic.add("dram_to_hbm", nbytes)
        for count, missed in zip(counts, gathered.missed, strict=True):
            count.missed_chunks += missed
        return window

    def fetch(
        self,
        layer: int,
        sessions: Sequence[SessionPages | None],
        missing: Array,
        window: jax.Array,
        counts: Sequence[RowCounts],
    ) -> tuple[jax.Array, PageError | None]:
        """`gather`, `carry` and `write` in turn: the window, and the failure of a session, if
        there was one."""
        gathered = self.gather(layer, sessions, missing, window.shape)
        if gathered is None:
            return window, None
        self.carry(layer, gathered)
        return self.write(layer, gathered, window, counts), gathered.failure

    def _read(
        self,
        layer: int,
        sessions: Sequence[SessionPages | None],
        row: Array,
        head: Array,
        chunks: Array,
        pages: Array,
    ) -> PageError | None:
        still_open = [session for session in sessions if session is not None]
        place = np.cumsum([session is not None for session in sessions], dtype=np.int32) - 1
        try:
            self._store.fetch(layer, still_open, place[row], head.astype(np.int32), chunks, pages)
        except PageError as error:
            return error
        return None

    def close(self) -> None:
        """Give the staging buffers back; only once the device has finished."""
        self._ring.close()
