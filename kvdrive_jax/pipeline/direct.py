"""Fetch: missing pages straight from pinned host memory into their slots (the direct way).

A kernel on the device reads the miss list and gathers the pages across PCIe: ids never come to
the host, and no thread of the host touches a page. What is not in DRAM is left to the staged way.

The pages lie in a `PinnedArena`: JAX arrays in pinned host memory, which kernels take as operands
where they are, and whose bytes the store's workers write through NumPy views. That is more than
JAX promises (its arrays do not change), so `why_not_direct` tries it out before it is relied on:
known bytes are written, gathered, compared, overwritten and gathered again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from kvdrive_jax import compat
from kvdrive_jax.config import FetchName
from kvdrive_jax.pallas import page_gather
from kvdrive_jax.pallas.page_gather import gather_pages
from kvdrive_jax.pallas.page_gather.reference import source_rows
from kvdrive_jax.pipeline.fetcher import Fetcher
from kvdrive_jax.telemetry import RowCounts, Traffic
from kvdrive_jax.tiers.pages import Bytes, Ids, PageError, PageGeometry


class _Memory:
    """Lets NumPy see, and write, the bytes of an array, and keeps the array alive."""

    def __init__(self, array: jax.Array) -> None:
        self._array = array
        self.__array_interface__ = {
            "data": (array.unsafe_buffer_pointer(), False),
            "shape": (array.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


class PinnedArena:
    """Page rows of all sessions of a batch, one slab per layer, in pinned host memory.

    Args:
        geometry: of the pages.
        rows: R, pages per layer, of all sessions together.
        memory_kind: of JAX; anything but ``pinned_host`` is for tests on a CPU.

    Attributes:
        arrays: per layer [R, 2 c D], operands of kernels.

    Raises RuntimeError or MemoryError when so much memory cannot be pinned.
    """

    def __init__(
        self, geometry: PageGeometry, rows: int, *, memory_kind: str = "pinned_host"
    ) -> None:
        if rows < 1:
            raise ValueError(f"rows must be at least 1, got {rows}")
        self._page_bytes = geometry.page_bytes
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=memory_kind)
        shape = (rows, math.prod(geometry.page_shape))
        self.arrays = [
            jax.device_put(np.zeros(shape, geometry.dtype), sharding)
            for _ in range(geometry.layers)
        ]
        jax.block_until_ready(self.arrays)
        self._views: list[Bytes] = [
            np.asarray(_Memory(array)).reshape(rows, self._page_bytes) for array in self.arrays
        ]
        self._taken = [0] * geometry.layers

    def take(self, layer: int, rows: int) -> Bytes:
        """The next ``rows`` rows of a layer: uint8 [rows, page_bytes], to be written."""
        first = self._taken[layer]
        if first + rows > len(self._views[layer]):
            raise ValueError(
                f"layer {layer} of the arena has {len(self._views[layer]) - first} rows left, "
                f"got a request for {rows}"
            )
        self._taken[layer] = first + rows
        return self._views[layer][first : first + rows]

    def first_row(self, layer: int, slab: Bytes) -> int:
        """Where a slab that `take` gave begins, in rows; 0 for one without rows."""
        if not len(slab):
            return 0
        row, rest = divmod(slab.ctypes.data - self._views[layer].ctypes.data, self._page_bytes)
        if rest or not 0 <= row <= len(self._views[layer]) - len(slab):
            raise ValueError(f"the slab is not one of layer {layer} of this arena")
        return row


class DramPages(Protocol):
    """What the direct way asks of a session's pages."""

    failure: PageError | None

    def stored(self, layer: int) -> int:
        """Chunks of each kv head handed in for a layer."""
        ...

    def dram_rows(self, layer: int) -> tuple[Bytes, Ids | None]:
        """The slab of a layer, [K * rows, page_bytes]; and the row in it of each chunk
        [K * capacity], -1 for those not in DRAM, or None where chunk j of head k is row
        k * rows + j."""
        ...


def committed(tree: Any) -> Any:
    """Arrays bound to the default device, nothing copied.

    What is computed from an arena is bound to its device, and a function compiled for arrays that
    are not is compiled again for those that are. So all state is bound from the start.
    """
    return jax.device_put(tree, jax.sharding.SingleDeviceSharding(jax.devices()[0]))


@dataclass(frozen=True, kw_only=True)
class _Where:
    """Rows of one layer: first [B, K], table [B, K, N] or None; made when ``stored`` was so."""

    stored: tuple[int, ...]
    first: jax.Array
    table: jax.Array | None


@partial(jax.jit, donate_argnames=("window", "moved"))
def gather_stage(
    window: jax.Array,
    moved: jax.Array,
    source: jax.Array,
    missing: jax.Array,
    first: jax.Array,
    table: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Missing pages of one layer into the window; see `gather_pages`.

    moved: [B] int32, donated, pages moved so far; grows by those of each session. Also returns
    what is left of ``missing`` [2, B, K, P], or None where the source holds every page.
    """
    window = gather_pages(window, source, missing, first, table)
    chunks, slots = missing
    here = (source_rows(chunks, first, table) >= 0) & (slots >= 0)
    moved = moved + here.sum(axis=(1, 2), dtype=jnp.int32)
    left = None if table is None else jnp.where(here, -1, missing)
    return window, moved, left


class DirectFetcher:
    """Fetches for one batch from the arena that the store's DRAM slabs were taken from.

    staged: fetches what is not in DRAM. Belongs to the engine's thread.
    """

    def __init__(
        self, arena: PinnedArena, staged: Fetcher, geometry: PageGeometry, traffic: Traffic
    ) -> None:
        self._arena, self._staged = arena, staged
        self._geometry, self._traffic = geometry, traffic
        self._where: list[_Where | None] = [None] * geometry.layers
        self._moved: jax.Array | None = None
        self._counts: Sequence[RowCounts] = ()

    def compile(
        self, window: jax.Array, sessions: Sequence[DramPages | None], selected: int
    ) -> jax.Array:
        """Compile what `fetch` will run, now, not when a step first needs it.

        window: [B, R, 2, c, D], `committed`, donated and returned unchanged; selected: P.
        """
        where = self._rows(0, sessions)
        kv_heads = self._geometry.kv_heads
        missing = committed(jnp.full((2, window.shape[0], kv_heads, selected), -1, jnp.int32))
        moved = self._none_moved(window)
        window, _, _ = gather_stage(
            window, moved, self._arena.arrays[0], missing, where.first, where.table
        )
        return window if where.table is None else self._staged.compile(window)

    def fetch(
        self,
        layer: int,
        sessions: Sequence[Any],
        missing: jax.Array,
        window: jax.Array,
        counts: Sequence[RowCounts],
    ) -> tuple[jax.Array, PageError | None]:
        """Pages of one layer's miss list into its window; as ``Fetcher.fetch``, but ``missing``
        is an array on the device, and nothing waits for it unless pages are on SSD.
        """
        failure = next((s.failure for s in sessions if s is not None and s.failure), None)
        if layer == 0:
            # The step before is over, so this waits for nothing.
            self.settle()
        self._counts = counts
        if self._moved is None:
            self._moved = self._none_moved(window)
        where = self._rows(layer, sessions)
        window, self._moved, left = gather_stage(
            window, self._moved, self._arena.arrays[layer], missing, where.first, where.table
        )
        if left is None:
            return window, failure
        window, unread = self._staged.fetch(layer, sessions, np.asarray(left), window, counts)
        if failure is not None and unread is not None and unread is not failure:
            failure.others = unread.each
        return window, failure or unread

    def settle(self) -> None:
        """Count what was moved, in the sessions' counts and the traffic; waits for the device."""
        if self._moved is None:
            return
        moved = np.asarray(self._moved).tolist()
        self._moved = None
        for count, pages in zip(self._counts, moved, strict=True):
            count.missed_chunks += pages
        self._traffic.add("dram_to_hbm", sum(moved) * self._geometry.page_bytes)

    def close(self) -> None:
        """Count what was moved and give the staging buffers back; once the device has finished."""
        self.settle()
        self._staged.close()

    @staticmethod
    def _none_moved(window: jax.Array) -> jax.Array:
        moved: jax.Array = committed(jnp.zeros(window.shape[0], jnp.int32))
        return moved

    def _rows(self, layer: int, sessions: Sequence[DramPages | None]) -> _Where:
        """Where the pages of a layer are; made anew when sessions stored more, or ended."""
        stored = tuple(-1 if s is None else s.stored(layer) for s in sessions)
        known = self._where[layer]
        if known is not None and known.stored == stored:
            return known
        kv_heads = self._geometry.kv_heads
        first = np.zeros((len(sessions), kv_heads), np.int32)
        rows: list[Ids | None] = [None] * len(sessions)
        partly = known is not None and known.table is not None
        for at, session in enumerate(sessions):
            if session is None:
                continue
            slab, row_of_chunk = session.dram_rows(layer)
            first[at] = self._arena.first_row(layer, slab)
            per_head = np.arange(kv_heads, dtype=np.int32) * (len(slab) // kv_heads)
            if row_of_chunk is None:
                rows[at] = (per_head[:, None] + np.arange(len(slab) // kv_heads)).astype(np.int32)
            else:
                partly = True
                rows[at] = row_of_chunk.reshape(kv_heads, -1)
        table = None
        if partly:
            width = self._table_width(known, rows)
            table = np.full((len(sessions), kv_heads, width), -1, np.int32)
            for at, row in enumerate(rows):
                if row is not None:
                    table[at, :, : row.shape[1]] = row
        else:
            for at, row in enumerate(rows):
                if row is not None:
                    first[at] += row[:, 0]
        where = _Where(
            stored=stored,
            first=committed(first),
            table=None if table is None else committed(table),
        )
        self._where[layer] = where
        return where

    @staticmethod
    def _table_width(known: _Where | None, rows: Sequence[Ids | None]) -> int:
        # As wide as it ever was: a session that ends must not change a compiled shape.
        before = 0 if known is None or known.table is None else known.table.shape[-1]
        return max([before, 1, *(row.shape[1] for row in rows if row is not None)])


@functools.cache
def why_not_direct(geometry: PageGeometry) -> str | None:
    """The reason pages cannot be gathered from pinned host memory here, or None when they can.

    Tried out, once per geometry: known bytes are written to pinned host memory, gathered by the
    device and compared, then others in the same place.
    """
    reason = page_gather.why_not(geometry.dtype)
    if geometry.dram != "model":
        reason = f"pages in DRAM are {geometry.dram}"
    if reason is not None:
        return reason
    try:
        return _probe(geometry)
    except Exception as error:
        # Whatever goes wrong here is the answer: there is another way to fetch.
        lines = str(error).splitlines()
        return f"the probe failed: {type(error).__name__}: {lines[0] if lines else ''}"


def _probe(geometry: PageGeometry, memory_kind: str = "pinned_host") -> str | None:
    chunks, slots = 64, 8
    one_layer = PageGeometry(
        layers=1,
        kv_heads=1,
        chunk_size=geometry.chunk_size,
        head_dim=geometry.head_dim,
        dtype=geometry.dtype,
    )
    arena = PinnedArena(one_layer, chunks, memory_kind=memory_kind)
    slab = arena.take(0, chunks)
    rng = np.random.default_rng(0)
    window = jnp.zeros((1, slots, *geometry.page_shape), geometry.dtype)
    first = jnp.zeros((1, 1), jnp.int32)
    gather = jax.jit(gather_pages, donate_argnums=0)
    for attempt in ("first", "overwritten"):
        values = rng.standard_normal((chunks, math.prod(geometry.page_shape)), np.float32)
        slab[...] = values.astype(geometry.dtype).view(np.uint8)
        wanted = rng.permutation(chunks)[:slots].astype(np.int32)
        missing = jnp.asarray(np.stack([wanted, np.arange(slots, dtype=np.int32)])[:, None, None])
        window = gather(window, arena.arrays[0], missing, first)
        got = np.asarray(window).reshape(slots, -1).view(np.uint8)
        if not np.array_equal(got, slab[wanted]):
            return f"the probe's {attempt} bytes came back changed"
    return None


@dataclass(frozen=True, kw_only=True)
class FetchWay:
    """The chosen way: ``arena`` for direct, None for staged; ``notice``, a line for the user."""

    arena: PinnedArena | None
    notice: str | None = None


def choose_fetch(wanted: FetchName, geometry: PageGeometry, rows: int, *, cached: bool) -> FetchWay:
    """The way that was asked for; ``auto`` is direct where it works and pages stay where they are.

    rows: pages of one layer that DRAM will hold, of all sessions together; cached: whether pages
    come and go there.

    Raises NotImplementedError when ``direct`` cannot be had, with the reason.
    """
    if wanted == "staged" or (wanted == "auto" and (not rows or cached)):
        return FetchWay(arena=None)
    reason = "no page is in DRAM" if not rows else why_not_direct(geometry)
    if reason is None:
        try:
            return FetchWay(arena=PinnedArena(geometry, rows))
        except (RuntimeError, MemoryError) as error:
            size = rows * geometry.page_bytes * geometry.layers
            lines = str(error).splitlines()
            reason = f"{size:,} bytes of host memory cannot be pinned: {lines[0] if lines else ''}"
    if wanted == "direct":
        raise NotImplementedError(f"fetch direct: {reason}")
    if compat.platform() == "cpu":
        return FetchWay(arena=None)  # as expected; nothing to tell
    return FetchWay(arena=None, notice=f"fetch: staged, because direct does not work: {reason}")
