"""The DRAM tier of one session that DRAM cannot hold whole: page rows that chunks come and go in.

Rows belong to groups: one for each (layer, kv head), or a single one for all, in which rows go to
the heads whose pages are read from SSD most (paper 7.3). When a group has no free row, the pages
of least worth leave it, many at once. Worth is the step in which a page was last read, or ranked
close to being selected; before the first of these it is the page's importance (paper 7.1).

Any thread may call. One lock guards maps and rows: what `take` copies is never overwritten.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdrive_jax.tiers.pages import Bytes, Ids, PageGeometry, Wide, touched_bytes

LEAVE_ONE_IN = 32
"""Share of a group that leaves at once, so that the search for the least worth is paid rarely."""

ROW_BYTES = 8 + 4 + 4
"""Bytes of metadata per row: owner, worth, and its place in the list of free rows."""

FREE = np.float32(np.inf)


class DramCache:
    """Pages of one session, [L * K * rows_per_pair] rows of bytes.

    pooled: one group for all (layer, kv head) pairs, not one for each. scored: worth is told by
    importance and rank as well, not by the last read alone (LRU).
    """

    def __init__(
        self,
        geometry: PageGeometry,
        chunk_capacity: int,
        rows_per_pair: int,
        *,
        pooled: bool,
        scored: bool,
    ) -> None:
        self._heads, self._capacity, self._scored = geometry.kv_heads, chunk_capacity, scored
        pairs = geometry.layers * geometry.kv_heads
        rows = pairs * rows_per_pair
        self.rows_per_pair = rows_per_pair
        self._groups = 1 if pooled else pairs
        self._group_rows = rows // self._groups
        page = geometry.dram_page_bytes
        self._slab = touched_bytes(rows * page, "the DRAM cache").reshape(rows, page)
        self._row_of = np.full(pairs * chunk_capacity, -1, np.int32)
        self._owner = np.full(rows, -1, np.int64)
        self._worth = np.full(rows, FREE, np.float32)
        self._free = np.arange(rows, dtype=np.int32).reshape(self._groups, self._group_rows)
        self._n_free = [self._group_rows] * self._groups
        self._step = 0.0
        self._lock = threading.Lock()

    @property
    def page_bytes(self) -> int:
        """Bytes of one page as it is kept here."""
        return self._slab.shape[1]

    @property
    def pages(self) -> int:
        """Pages held now."""
        return len(self._slab) - sum(self._n_free)

    def key(self, layer: int, head: Ids | int, chunk: Ids | Wide) -> Wide:
        """Numbers [M] of chunks among all of the session, by which the other methods know them."""
        pair = layer * self._heads + np.asarray(head, np.int64)
        return np.asarray(pair * self._capacity + chunk, np.int64)

    def advance(self) -> None:
        """A step is over: what is read or ranked from now on is worth more."""
        self._step += 1.0

    def put(self, key: Wide, pages: Bytes, source: Wide, worth: npt.NDArray[np.floating]) -> None:
        """Pages ``pages[source]`` of one (layer, kv head), best first, as prefill leaves them.
        worth: [M] in [0, 1)."""
        with self._lock:
            group = 0 if self._groups == 1 or not len(key) else int(key[0]) // self._capacity
            rows = self._rows(group, len(key))
        # Fewer where others were faster.
        key, source, worth = key[: len(rows)], source[: len(rows)], worth[: len(rows)]
        self._slab[rows] = pages[source]
        with self._lock:
            self._publish(key, rows, worth - 1 if self._scored else np.full(len(key), -1.0))

    def install(self, key: Wide, pages: Bytes) -> None:
        """Keep pages [M, page_bytes] of one layer that were read from SSD, or are new; those that
        are here already are left out, and those that there is no room for."""
        if self._groups == 1:
            self._install(0, key, np.arange(len(key))[: self._group_rows], pages)
            return
        order = np.argsort(key, kind="stable")
        group = key[order] // self._capacity
        edges = np.flatnonzero(np.diff(group, prepend=-1, append=self._groups)).tolist()
        for first, last in itertools.pairwise(edges):
            self._install(int(group[first]), key, order[first:last][: self._group_rows], pages)

    def _install(self, group: int, key: Wide, at: Wide, pages: Bytes) -> None:
        with self._lock:
            at = at[self._row_of[key[at]] < 0]
            at = at[np.unique(key[at], return_index=True)[1]]
            rows = self._rows(group, len(at))
            at = at[: len(rows)]
        self._slab[rows] = pages[at]
        with self._lock:
            # Another thread may have brought the same page meanwhile.
            fresh = self._row_of[key[at]] < 0
            self._publish(key[at[fresh]], rows[fresh], np.full(int(fresh.sum()), self._step))
            self._give_back(group, rows[~fresh])

    def take(self, key: Wide, target: Bytes) -> npt.NDArray[np.intp]:
        """Pages [M, page_bytes] into ``target``; returns which of the M are not here."""
        with self._lock:
            rows = self._row_of.take(key)
            absent = np.flatnonzero(rows < 0)
            if len(absent) < len(rows):
                # Absent pages get row 0 here and their own bytes later: cheaper than a second copy.
                self._slab.take(rows, axis=0, out=target, mode="clip")
            self._worth[rows[rows >= 0]] = self._step
        return absent

    def holds(self, key: Wide) -> npt.NDArray[np.bool_]:
        """Which chunks are here."""
        with self._lock:
            held: npt.NDArray[np.bool_] = self._row_of[key] >= 0
        return held

    def rank(self, key: Wide) -> Wide:
        """Chunks [M] that ranked close to being selected: worth keeping, where worth is told by
        rank. Returns those that are not here."""
        with self._lock:
            rows = self._row_of.take(key)
            here = rows >= 0
            if self._scored:
                self._worth[rows[here]] = self._step
        return key[~here]

    def _rows(self, at: int, count: int) -> Ids:
        """``count`` rows of group ``at`` that nobody has, or as many as there are; pages of least
        worth leave for them."""
        if not count:
            return np.empty(0, np.int32)
        if self._n_free[at] < count:
            self._leave(at, count - self._n_free[at])
        count = min(count, self._n_free[at])
        left = self._n_free[at] = self._n_free[at] - count
        return self._free[at, left : left + count].copy()

    def _leave(self, group: int, count: int) -> None:
        first = group * self._group_rows
        worth = self._worth[first : first + self._group_rows]
        # Rows without a page, or whose page is on its way, are worth infinity.
        held = int(np.count_nonzero(worth < FREE))
        count = min(held, max(count, self._group_rows // LEAVE_ONE_IN))
        if not count:
            return
        rows = first + np.argpartition(worth, count - 1)[:count].astype(np.int32)
        self._row_of[self._owner[rows]] = -1
        self._owner[rows], self._worth[rows] = -1, FREE
        self._give_back(group, rows)

    def _give_back(self, group: int, rows: Ids) -> None:
        n = self._n_free[group]
        self._free[group, n : n + len(rows)] = rows
        self._n_free[group] = n + len(rows)

    def _publish(self, key: Wide, rows: Ids, worth: npt.NDArray[Any]) -> None:
        self._row_of[key], self._owner[rows], self._worth[rows] = rows, key, worth


def cache_bytes(rows: int, page_bytes: int) -> int:
    """Bytes of a cache of so many rows, its map of chunks apart."""
    return rows * (page_bytes + ROW_BYTES)
