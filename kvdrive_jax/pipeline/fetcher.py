"""Fetch: missing pages from the store, through staging, into their slots (the staged way).

Belongs to the engine's thread. A staging buffer is lent to one fetch until the next: a miss
list that has arrived proves that the pages of the one before are in their slots. Padding of a
transfer is never copied by the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np

from kvdrive_jax.pipeline.stages import write_stage
from kvdrive_jax.telemetry import Ledger, RowCounts, Traffic
from kvdrive_jax.tiers.link import Link
from kvdrive_jax.tiers.pages import PageError, PageGeometry
from kvdrive_jax.tiers.staging import Staging, StagingRing
from kvdrive_jax.tiers.store import PageStore, SessionPages

STAGING_BUFFERS = 2


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


class Fetcher:
    """Fetches for one batch.

    most: the largest number of pages that one layer can miss; link: imitates a slower way to HBM.
    """

    def __init__(
        self,
        store: PageStore,
        geometry: PageGeometry,
        most: int,
        ledger: Ledger,
        traffic: Traffic,
        link: Link | None = None,
    ) -> None:
        self._link = link
        self._store, self._geometry, self._traffic = store, geometry, traffic
        self._sizes = transfer_sizes(most)
        self._ring = StagingRing(STAGING_BUFFERS, most, geometry, ledger)
        self._lent: Staging | None = None

    def compile(self, window: jax.Array) -> jax.Array:
        """Compile the write of every transfer size now, not when a step first needs it.

        window: [B, R, 2, c, D], donated and returned unchanged.
        """
        for size in self._sizes:
            pages = np.zeros((size, *self._geometry.dram_shape), self._geometry.dram_dtype)
            nowhere = np.full(size, window.shape[0] * window.shape[1], np.int32)
            window = write_stage(window, pages, nowhere, self._geometry.dram)
        return window

    def fetch(
        self,
        layer: int,
        sessions: Sequence[SessionPages | None],
        missing: np.ndarray[Any, Any],
        window: jax.Array,
        counts: Sequence[RowCounts],
    ) -> tuple[jax.Array, PageError | None]:
        """Pages of one layer's miss list into its window.

        sessions: the batch's, None for those that ended; missing: [2, B, K, P] int32, chunk ids
        (-1: none) and the rows they go to; window: [B, R, 2, c, D], donated; counts: of the
        sessions.
        Returns the window, and the error of a session whose pages could not be read: the pages of
        all others are in their slots, that session's are not.
        """
        batch, rows = window.shape[:2]
        kv_heads = missing.shape[2]
        chunks, slots = missing[0].reshape(-1), missing[1].reshape(-1)
        at = np.flatnonzero(chunks >= 0)
        if not at.size:
            return window, None
        # The pages of the fetch before are in their slots: this miss list came after them.
        self._give_back()
        owner = at // missing.shape[-1]
        row, head = owner // kv_heads, owner % kv_heads
        size = next(size for size in self._sizes if size >= at.size)
        staging = self._ring.acquire()
        pages = staging.buffer[:size]
        failure = self._read(layer, sessions, row, head, chunks[at], pages)
        target = np.full(size, batch * rows, np.int32)
        target[: at.size] = row * rows + slots[at]
        nbytes = at.size * self._geometry.dram_page_bytes
        with nullcontext() if self._link is None else self._link.carry(nbytes):
            window = write_stage(window, pages, target, self._geometry.dram)
        self._lent = staging
        self._traffic.add("dram_to_hbm", nbytes)
        for session, missed in enumerate(np.bincount(row, minlength=batch)):
            counts[session].missed_chunks += int(missed)
        return window, failure

    def _read(
        self,
        layer: int,
        sessions: Sequence[SessionPages | None],
        row: np.ndarray[Any, Any],
        head: np.ndarray[Any, Any],
        chunks: np.ndarray[Any, Any],
        pages: np.ndarray[Any, Any],
    ) -> PageError | None:
        still_open = [session for session in sessions if session is not None]
        place = np.cumsum([session is not None for session in sessions], dtype=np.int32) - 1
        try:
            self._store.fetch(layer, still_open, place[row], head.astype(np.int32), chunks, pages)
        except PageError as error:
            return error
        return None

    def _give_back(self) -> None:
        if self._lent is not None:
            self._ring.release(self._lent)
            self._lent = None

    def close(self) -> None:
        """Give the staging buffers back; only once the device has finished."""
        self._give_back()
        self._ring.close()
