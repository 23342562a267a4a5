"""The pages of one session into DRAM and onto SSD."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvdrive_jax.tiers.cache import DramCache
from kvdrive_jax.tiers.dram import DramSlabs
from kvdrive_jax.tiers.extents import cluster_order
from kvdrive_jax.tiers.pages import Ids, PageGeometry, page_rows
from kvdrive_jax.tiers.placement import rank_chunks, resident_chunks
from kvdrive_jax.tiers.ssd import SsdSegments
from kvdrive_jax.tiers.staging import Transit

Array = npt.NDArray[Any]


class PageWriter:
    """Stores pages of one session; called by workers.

    Args:
        dram: what holds pages in DRAM; warm: whether a prompt's pages go there at once.
        positions: per layer [K * capacity], where each chunk is on SSD; written here.
    """

    def __init__(
        self,
        geometry: PageGeometry,
        chunk_capacity: int,
        dram: DramCache | DramSlabs,
        positions: list[Ids],
        *,
        warm: bool,
        transit: Transit,
    ) -> None:
        self._page_bytes, self._capacity = geometry.dram_page_bytes, chunk_capacity
        self._dram, self._positions = dram, positions
        self._warm, self._transit = warm, transit

    def prompt(
        self,
        segments: SsdSegments | None,
        layer: int,
        head: int,
        pages: Array,
        n_chunks: int,
        clusters: npt.NDArray[np.integer] | None,
        importance: npt.NDArray[np.floating] | None,
        above: int,
    ) -> int:
        """Pages [N, *dram_shape] of one (layer, kv head) of a prompt; bytes written to SSD.

        ``above`` as in ``SessionPages.offload``.
        """
        dram, rows = self._dram, page_rows(pages, self._page_bytes)
        if isinstance(dram, DramSlabs):
            # There is nothing to choose where everything is held, which is the common case.
            ranked = rank_chunks(importance if dram.rows < n_chunks else None, n_chunks)
            dram.put(layer, head, rows, np.sort(resident_chunks(ranked, dram.rows, 0)))
        elif self._warm:
            ranked = rank_chunks(importance, n_chunks)
            # What leaves a window must come from somewhere: only where DRAM is no larger than the
            # windows does it hold others than they.
            skipped = above if dram.rows_per_pair <= above else 0
            chunks = resident_chunks(ranked, dram.rows_per_pair, skipped)
            worth = 1 - (np.arange(len(chunks)) + 1) / (n_chunks + 1)
            dram.put(dram.key(layer, head, chunks), rows, chunks, worth)
        if segments is None:
            return 0
        order = cluster_order(clusters, n_chunks)
        start = head * self._capacity
        self._positions[layer][start : start + n_chunks][order] = np.arange(
            n_chunks, dtype=np.int32
        )
        with self._transit.writes.borrow() as scratch:
            return segments.write_prompt(layer, head, rows, order, scratch)

    def piece(self, segments: SsdSegments | None, layer: int, piece: int, pages: Array) -> int:
        """Pages [K, F, *dram_shape] of one flush of a layer; bytes written to SSD."""
        if segments is None:
            return 0
        with self._transit.writes.borrow() as scratch:
            return segments.write_piece(layer, piece, pages, scratch)
