"""The DRAM tier of one session whose pages stay where prefill put them: slabs, one per layer.

For a session that DRAM holds whole, and for slabs that the device reads itself. A layer's slab is
one block of K x rows pages; blocks stay in the size that every allocator and driver can give. With
room for every chunk the row of a chunk is its id and there is no map. Written by workers while an
offload of that layer is pending, read by anyone after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdrive_jax.tiers.pages import Bytes, Ids, PageGeometry, Wide, page_rows, touched_bytes

SlabAllocator = Callable[[int, int], Bytes]
"""(layer, rows) -> uint8 [rows, page_bytes] to keep pages in."""


class DramSlabs:
    """Pages [L, K, rows, 2, c, D] in host memory, as rows of bytes.

    allocate: where the slabs come from; None for ordinary memory.

    Attributes:
        slabs: per layer uint8 [K * rows, page_bytes], pre-touched, 64-byte aligned.
        row_of_chunk: per layer int32 [K * chunk_capacity], the row in the layer's slab, -1 when the
            chunk is not in DRAM; None when DRAM holds every chunk (then row = chunk).
        used: per layer, rows taken of each kv head.
    """

    def __init__(
        self,
        geometry: PageGeometry,
        chunk_capacity: int,
        rows: int,
        allocate: SlabAllocator | None = None,
    ) -> None:
        self._geometry = geometry
        self.capacity, self.rows = chunk_capacity, rows
        heads, page = geometry.kv_heads, geometry.dram_page_bytes

        def ordinary(layer: int, rows: int) -> Bytes:
            return touched_bytes(rows * page, f"a DRAM slab (layer {layer})").reshape(rows, page)

        take = allocate or ordinary
        self.slabs: list[Bytes] = [take(layer, heads * rows) for layer in range(geometry.layers)]
        self.row_of_chunk: list[Ids] | None = None
        if rows < chunk_capacity:
            self.row_of_chunk = [
                np.full(heads * chunk_capacity, -1, np.int32) for _ in range(geometry.layers)
            ]
        self.used = [0] * geometry.layers

    def put(self, layer: int, head: int, source: Bytes, chunks: Wide) -> None:
        """Store ``source[chunks]`` (``source`` [N, page_bytes] by chunk id) in the first rows."""
        start, count = head * self.rows, len(chunks)
        target = self.slabs[layer][start : start + count]
        if self.row_of_chunk is None:
            target[...] = source[:count]
            return
        np.take(source, chunks, axis=0, out=target, mode="clip")
        map_start = head * self.capacity
        rows = np.arange(start, start + count, dtype=np.int32)
        self.row_of_chunk[layer][map_start : map_start + self.capacity][chunks] = rows

    def take(self, layer: int, index: Ids, target: Bytes) -> npt.NDArray[np.intp]:
        """Pages of chunks ``index`` [M] (head * capacity + chunk) into ``target`` [M, page_bytes];
        returns which of the M are not here."""
        if self.row_of_chunk is None:
            self.slabs[layer].take(index, axis=0, out=target, mode="clip")
            return np.empty(0, np.intp)
        rows = self.row_of_chunk[layer].take(index)
        absent = np.flatnonzero(rows < 0)
        if len(absent) < len(index):
            # Absent pages get row 0 here and their own bytes later: cheaper than a second copy.
            self.slabs[layer].take(rows, axis=0, out=target, mode="clip")
        return absent

    def append(self, layer: int, pages: npt.NDArray[Any], first_chunk: int, n_new: int) -> int:
        """Store as many of ``pages`` [K, F, *dram_shape], ids from ``first_chunk`` on, as there are
        free rows for. Returns how many of each kv head are in DRAM now."""
        count = min(n_new, self.rows - self.used[layer])
        if count <= 0:
            return 0
        row = self.used[layer]
        for head in range(self._geometry.kv_heads):
            start = head * self.rows + row
            source = page_rows(pages[head, :count], self._geometry.dram_page_bytes)
            self.slabs[layer][start : start + count] = source
            if self.row_of_chunk is not None:
                at = head * self.capacity + first_chunk
                self.row_of_chunk[layer][at : at + count] = np.arange(
                    start, start + count, dtype=np.int32
                )
        self.used[layer] = row + count
        return count
