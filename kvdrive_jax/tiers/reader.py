"""The pages of one session by id: from DRAM, what is not there from SSD, and ahead of need."""

from __future__ import annotations

import concurrent.futures as futures
import time
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np

from kvdrive_jax.config import SyncName
from kvdrive_jax.telemetry import Traffic
from kvdrive_jax.tiers.cache import DramCache
from kvdrive_jax.tiers.dram import DramSlabs
from kvdrive_jax.tiers.extents import plan_read, stored_extents
from kvdrive_jax.tiers.link import Link
from kvdrive_jax.tiers.pages import Bytes, FetchCount, Ids, PageError, PageGeometry, Wide
from kvdrive_jax.tiers.precision import transcode
from kvdrive_jax.tiers.ssd import SsdSegments
from kvdrive_jax.tiers.staging import Transit
from kvdrive_jax.timeline import READ_AHEAD, Timeline


class PageReader:
    """Gathers pages of one session; any thread may call.

    Args:
        name: of the session, for errors.
        dram: what holds pages in DRAM.
        positions: per layer [K * capacity], where each chunk is on SSD; empty without SSD.
        segments: on SSD, or None. ``drop_ssd`` forgets them.
        timeline: gets a span for every read from SSD, and every wait for what is read ahead.
    """

    def __init__(
        self,
        name: str,
        geometry: PageGeometry,
        chunk_capacity: int,
        dram: DramCache | DramSlabs,
        positions: list[Ids],
        segments: SsdSegments | None,
        *,
        sync: SyncName,
        transit: Transit,
        traffic: Traffic,
        timeline: Timeline,
        link: Link | None,
    ) -> None:
        self._name, self._heads, self._capacity = name, geometry.kv_heads, chunk_capacity
        self._dram, self._positions, self._segments = dram, positions, segments
        self._whole_layers = sync == "layerwise"
        self._transit, self._traffic, self._link = transit, traffic, link
        self._timeline = timeline
        self._convert = transcode(geometry.format(geometry.ssd), geometry.format(geometry.dram))
        self._ahead: list[futures.Future[None] | None] = [None] * geometry.layers

    def drop_ssd(self) -> SsdSegments | None:
        """From now on nothing is on SSD; returns what was."""
        segments, self._segments = self._segments, None
        return segments

    def gather(self, layer: int, head: Ids, chunk: Ids, target: Bytes, stored: int) -> FetchCount:
        """Pages of ``head`` [M], ``chunk`` [M], all below ``stored``, into ``target``
        [M, bytes of a page in DRAM]."""
        self._await_ahead(layer)
        dram, m = self._dram, len(chunk)
        index = head * self._capacity + chunk
        if isinstance(dram, DramSlabs):
            absent = dram.take(layer, index, target)
        else:
            absent = dram.take(dram.key(layer, head, chunk), target)
        self._traffic.add_pages("dram", m - len(absent))
        if not len(absent):
            return FetchCount(m, 0, 0)
        head, index = head[absent], index[absent]
        key = dram.key(layer, head, chunk[absent]) if isinstance(dram, DramCache) else index

        def arrived(at: Wide, pages: Bytes) -> None:
            target[absent[at]] = pages
            if isinstance(dram, DramCache):
                dram.install(key[at], pages)

        nbytes = self._read(layer, head, index, stored, arrived, "read")
        self._traffic.add_pages("ssd", len(absent))
        return FetchCount(m - len(absent), len(absent), nbytes)

    def _read(
        self,
        layer: int,
        head: Ids,
        index: Ids,
        stored: int,
        arrived: Callable[[Wide, Bytes], None],
        why: str,
    ) -> int:
        """Pages of chunks ``index`` [n] of kv heads ``head`` from SSD; bytes read.

        ``arrived`` gets, buffer by buffer, which of the n came, and their pages as DRAM has them.
        ``why`` names the reads in the timeline.
        """
        segments = self._segments
        if segments is None:
            raise PageError("its pages on SSD are gone", session=self._name, layer=layer)
        layout = segments.layout
        position = self._positions[layer].take(index)
        whole = None
        if self._whole_layers:
            held = self._positions[layer].reshape(self._heads, self._capacity)[:, :stored]
            whole = stored_extents(layout, held)
        plan = plan_read(layout, head, position, self._heads, whole)
        per_extent, extent_bytes = layout.pages_per_extent, layout.extent_bytes
        n = len(plan.extents)
        with self._transit.reads.borrow() as scratch:
            per_round = scratch.nbytes // extent_bytes
            for first in range(0, n, per_round):
                last = min(n, first + per_round)
                block = scratch[: (last - first) * extent_bytes]
                start = time.perf_counter()
                with nullcontext() if self._link is None else self._link.carry(block.nbytes):
                    segments.read(
                        layer,
                        plan.heads[first:last],
                        plan.extents[first:last],
                        block.reshape(last - first, extent_bytes),
                    )
                self._timeline.span(
                    "SSD->DRAM", why, start, time.perf_counter(), layer, nbytes=block.nbytes
                )
                edges = np.searchsorted(plan.place, (first * per_extent, last * per_extent))
                chosen = slice(int(edges[0]), int(edges[1]))
                pages = block.reshape(-1, layout.page_bytes)
                wanted = pages[plan.place[chosen] - first * per_extent]
                arrived(plan.order[chosen], self._convert(wanted))
        self._traffic.add("ssd_to_dram", n * extent_bytes)
        return n * extent_bytes

    # Ahead of need

    def read_ahead(
        self,
        layer: int,
        head: Ids,
        chunk: Ids,
        stored: int,
        submit: Callable[..., futures.Future[None] | None],
        failed: Callable[[PageError], None],
    ) -> None:
        """Chunks [M] that ranked close to being selected: worth keeping in DRAM, and those that
        are not there are read, by ``submit``, while the layer is not asked for.

        A layer for which that is still under way is left alone.
        """
        dram = self._dram
        if isinstance(dram, DramSlabs):
            return
        absent = dram.rank(dram.key(layer, head, chunk))
        before = self._ahead[layer]
        if not len(absent) or self._segments is None or (before and not before.done()):
            return
        self._ahead[layer] = submit(self._bring, layer, absent, stored, failed)

    def _bring(
        self, layer: int, key: Wide, stored: int, failed: Callable[[PageError], None]
    ) -> None:
        dram = self._dram
        assert isinstance(dram, DramCache)
        index = (key - layer * self._heads * self._capacity).astype(np.int32)

        def arrived(at: Wide, pages: Bytes) -> None:
            dram.install(key[at], pages)

        try:
            self._read(layer, index // self._capacity, index, stored, arrived, READ_AHEAD)
        except PageError as error:
            failed(error)
        except Exception as error:
            failure = PageError(
                f"cannot be read ahead: {type(error).__name__}: {error}",
                session=self._name,
                layer=layer,
            )
            failure.__cause__ = error
            failed(failure)
        else:
            self._traffic.add_pages("ahead", len(key))

    def _await_ahead(self, layer: int) -> None:
        """What is read ahead is likely what is asked for now: better waited for than read twice.
        What has not begun is given up."""
        ahead = self._ahead[layer]
        # It stays there: another thread may have put the next in its place.
        if ahead is not None and not ahead.cancel() and not ahead.done():
            start = time.perf_counter()
            futures.wait([ahead])
            self._timeline.span(
                "SSD->DRAM", "wait for read ahead", start, time.perf_counter(), layer
            )

    def settle(self) -> None:
        """Until nothing is being read ahead."""
        for layer in range(len(self._ahead)):
            self._await_ahead(layer)
