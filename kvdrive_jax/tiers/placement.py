"""Placement: how many bytes a session takes in each tier, and which chunks DRAM holds.

Pure functions. ``PageStore.open`` and the engine's plan both call them, so that what is shown
before a run and what the run reserves are the same numbers. Paper section 7.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvdrive_jax.config import SyncName, TierConfig
from kvdrive_jax.telemetry import BudgetError
from kvdrive_jax.tiers.cache import cache_bytes
from kvdrive_jax.tiers.extents import INT32_LIMIT, ExtentLayout
from kvdrive_jax.tiers.pages import PageGeometry, Wide

READ_BYTES = 4 << 20
READ_EXTENTS = 256
READ_SHARE = 64
"""One read buffer holds at most this much, and this part of the session's DRAM; larger fetches go
through it in several rounds."""

METADATA_BYTES = 64 << 10
"""Directories and array descriptions of one session on disk."""

WITHOUT_DRAM: tuple[SyncName, ...] = ("blockwise", "layerwise")
"""Ways that keep no page in DRAM, for comparison."""

MAP_BYTES = 4
"""One int32 entry of a chunk map."""


@dataclass(frozen=True, kw_only=True)
class SessionPlan:
    """Bytes of one session in DRAM and on SSD, and the counts behind them."""

    chunk_capacity: int
    rows: int
    """Pages in DRAM per (layer, kv head); all of them when equal to ``chunk_capacity``."""
    cached: bool
    """Whether pages come to DRAM and leave it while the session runs."""
    slab_bytes: int
    map_bytes: int
    layout: ExtentLayout | None
    """None without an SSD tier."""
    ssd_bytes: int
    layer_bytes: int
    """Pages of one layer: the most that one offload hands over."""
    read_buffer_bytes: int
    write_buffer_bytes: int

    @property
    def dram_bytes(self) -> int:
        """Bytes in DRAM, staging (which sessions share) not counted."""
        return self.slab_bytes + self.map_bytes

    def staging_bytes(self, workers: int, pending_bytes: int | None = None) -> int:
        """Bytes of DRAM that the store needs beside the session's own to move its pages."""
        return sum(staging_needs([self], workers, pending_bytes).values())


IN_FLIGHT = "staging: offloads in flight"
READS = "staging: SSD reads"
WRITES = "staging: SSD writes"


def staging_needs(
    plans: Iterable[SessionPlan], workers: int, pending_bytes: int | None = None
) -> dict[str, int]:
    """Bytes of DRAM, by account, that a store needs to move the pages of sessions open together.

    Every account has the size that the most demanding of them needs. Read buffers are one more
    than the workers: the caller's own thread fetches too.
    """
    needs = {IN_FLIGHT: 0, READS: 0, WRITES: 0}
    for plan in plans:
        pending = plan.layer_bytes if pending_bytes is None else pending_bytes
        needs[IN_FLIGHT] = max(needs[IN_FLIGHT], pending)
        needs[READS] = max(needs[READS], (workers + 1) * plan.read_buffer_bytes)
        needs[WRITES] = max(needs[WRITES], workers * plan.write_buffer_bytes)
    return needs


def plan_session(
    geometry: PageGeometry,
    tiers: TierConfig,
    *,
    chunk_capacity: int,
    dram_bytes: int | None,
    ssd: bool,
    prompt_chunks: int | None = None,
    piece_chunks: int = 64,
) -> SessionPlan:
    """Where the pages of a session of up to ``chunk_capacity`` chunks per (layer, kv head) go.

    ``dram_bytes`` is the session's share of DRAM, maps included (None: as much as it can use).
    DRAM rows that do not hold everything are first shared equally by all (layer, kv head) pairs;
    with ``tiers.fetch`` direct they stay so, because the device reads them where they are.

    Raises ValueError for counts out of range, BudgetError when the share cannot hold the maps, or
    without SSD cannot hold everything.
    """
    if chunk_capacity < 0:
        raise ValueError(f"chunk_capacity must be at least 0, got {chunk_capacity}")
    if piece_chunks < 1:
        raise ValueError(f"piece_chunks must be at least 1, got {piece_chunks}")
    if prompt_chunks is not None and not 0 <= prompt_chunks <= chunk_capacity:
        raise ValueError(
            f"prompt_chunks must be between 0 and chunk_capacity = {chunk_capacity}, "
            f"got {prompt_chunks}"
        )
    if dram_bytes is not None and dram_bytes < 0:
        raise ValueError(f"dram_bytes must be at least 0, got {dram_bytes}")
    pairs = geometry.layers * geometry.kv_heads
    if geometry.kv_heads * chunk_capacity >= INT32_LIMIT:
        raise ValueError(
            f"{geometry.kv_heads} kv heads x chunk_capacity {chunk_capacity:,} must stay below "
            "2**31; raise chunk_size"
        )
    ssd = ssd and chunk_capacity > 0
    page = geometry.dram_page_bytes
    layer_bytes = geometry.kv_heads * chunk_capacity * page
    everything = geometry.layers * layer_bytes
    layout, ssd_bytes, read_bytes, write_bytes, ssd_maps = None, 0, 0, 0, 0
    one_map = pairs * chunk_capacity * MAP_BYTES
    if ssd:
        layout = ExtentLayout.plan(
            page_bytes=geometry.ssd_page_bytes,
            extent_bytes=tiers.extent_bytes,
            chunk_capacity=chunk_capacity,
            prompt_chunks=prompt_chunks,
            piece_chunks=piece_chunks,
        )
        ssd_bytes = METADATA_BYTES + layout.disk_bytes(
            geometry.layers, geometry.kv_heads, chunk_capacity, prompt_chunks
        )
        ssd_maps = one_map + layout.hash_bytes(geometry.layers, geometry.kv_heads)
        write_bytes = layout.extent_bytes * max(
            layout.shard_extents, geometry.kv_heads * layout.piece_extents if layout.pieces else 0
        )
    share = everything + ssd_maps if dram_bytes is None else dram_bytes
    cached, rows, map_bytes = False, chunk_capacity, ssd_maps
    if everything + ssd_maps > share:
        if layout is None:
            raise BudgetError(
                f"the session's DRAM share of {share:,} bytes cannot hold its pages, and there is "
                f"no SSD tier: {geometry.layers} layers x {geometry.kv_heads} kv heads x "
                f"{chunk_capacity:,} chunks x {page:,} bytes = {everything:,} bytes; "
                "raise --dram-budget, or give --ssd-dir"
            )
        map_bytes = ssd_maps + one_map
        if map_bytes > share:
            raise BudgetError(
                f"the session's DRAM share of {share:,} bytes cannot hold the maps of its pages: "
                f"2 maps x {pairs} (layer, kv head) pairs x {chunk_capacity:,} chunks x "
                f"{MAP_BYTES} bytes, and hashes = {map_bytes:,} bytes; raise --dram-budget"
            )
        cached = tiers.fetch != "direct"
        row_bytes = cache_bytes(1, page) if cached else page
        rows = min((share - map_bytes) // row_bytes, INT32_LIMIT - 1) // pairs
        if tiers.sync in WITHOUT_DRAM:
            cached, rows = False, 0
        # Of what is used, not of the share: that much as a share gives the same plan.
        used = map_bytes + pairs * rows * row_bytes
        most = min(READ_BYTES, used // READ_SHARE) // layout.extent_bytes
        at_once = max(1, min(READ_EXTENTS, most))
        read_bytes = layout.extent_bytes * min(at_once, geometry.kv_heads * layout.extents)
    return SessionPlan(
        chunk_capacity=chunk_capacity,
        rows=rows,
        cached=cached,
        slab_bytes=pairs * rows * (cache_bytes(1, page) if cached else page),
        map_bytes=map_bytes,
        layout=layout,
        ssd_bytes=ssd_bytes,
        layer_bytes=layer_bytes,
        read_buffer_bytes=read_bytes,
        write_buffer_bytes=write_bytes,
    )


class SessionSize(NamedTuple):
    """Chunks per (layer, kv head) that a session may come to, and those of its prompt."""

    chunk_capacity: int
    prompt_chunks: int | None = None


def plan_sessions(
    geometry: PageGeometry,
    tiers: TierConfig,
    sizes: Sequence[SessionSize],
    *,
    dram_bytes: int | None,
    ssd: bool,
    piece_chunks: int = 64,
    workers: int = 2,
    pending_bytes: int | None = None,
) -> list[SessionPlan]:
    """Plans of sessions that are open together in ``dram_bytes``, staging included.

    Whole sessions where all fit. Else what staging leaves is shared equally; who needs less than
    an equal share leaves the rest to the others. Raises BudgetError, with the arithmetic, when
    that is not possible.
    """

    def plan(size: SessionSize, share: int | None) -> SessionPlan:
        return plan_session(
            geometry,
            tiers,
            chunk_capacity=size.chunk_capacity,
            dram_bytes=share,
            ssd=ssd,
            prompt_chunks=size.prompt_chunks,
            piece_chunks=piece_chunks,
        )

    whole = [plan(size, None) for size in sizes]
    pages = sum(session.dram_bytes for session in whole)
    staging = sum(staging_needs(whole, workers, pending_bytes).values())
    if dram_bytes is None or pages + staging <= dram_bytes:
        return whole
    if not ssd:
        raise BudgetError(
            f"the DRAM budget of {dram_bytes:,} bytes cannot hold {len(sizes)} session(s), and "
            f"there is no SSD tier: {pages:,} bytes of pages and {staging:,} of staging = "
            f"{pages + staging:,} bytes; raise --dram-budget, or give --ssd-dir"
        )
    # What does not fit is read back from SSD, through buffers that count as well.
    partial = [
        plan(size, session.dram_bytes - 1) if session.dram_bytes else session
        for size, session in zip(sizes, whole, strict=True)
    ]
    staging = sum(staging_needs(partial, workers, pending_bytes).values())
    left = dram_bytes - staging
    if left < 0:
        raise BudgetError(
            f"the DRAM budget of {dram_bytes:,} bytes cannot hold the {staging:,} bytes of staging "
            "(one layer's pages in flight, and buffers for SSD reads and writes); raise "
            "--dram-budget, or lower the context or extent_bytes"
        )
    plans = list(whole)
    by_need = sorted(range(len(sizes)), key=lambda i: whole[i].dram_bytes)
    for done, i in enumerate(by_need):
        share = left // (len(sizes) - done)
        if whole[i].dram_bytes > share:
            plans[i] = plan(sizes[i], share)
        left -= plans[i].dram_bytes
    return plans


def rank_chunks(importance: npt.NDArray[np.floating] | None, n_chunks: int) -> Wide:
    """Ids of ``n_chunks`` chunks, most important first. int64 [n_chunks].

    ``importance`` [N] of one (layer, kv head); ties go to the lowest id, NaN counts least. Without
    it the first chunks come first.
    """
    if importance is None:
        return np.arange(n_chunks, dtype=np.int64)
    ranked = np.argsort(-importance[:n_chunks].astype(np.float64), kind="stable")
    return ranked.astype(np.int64, copy=False)


def resident_chunks(ranked: Wide, rows: int, above: int) -> Wide:
    """Those of ``ranked``, best first, that DRAM holds: the best ``rows`` behind the ``above``
    best, which windows hold, then those."""
    return np.concatenate([ranked[above:], ranked[:above]])[:rows]
