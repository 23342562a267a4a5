"""The SSD tier: the extents of each session, in files that TensorStore writes.

Two zarr3 arrays of raw bytes per session: ``prompt`` [L, K, extents, extent_bytes], several extents
of one segment to a file, and ``pieces`` of the same form for flushed chunks, one piece of all kv
heads of a layer to a file. Files are not synced: this tier is a cache and ends with its process.

Reads do not go through TensorStore, which costs 40 us for every extent and a copy, and gives a
third of what the disk can: without codecs extent j of a file lies at byte j * extent_bytes, and
``preadv`` brings it to where it is wanted. `benchmarks/tiers.py read` compares the two. A hash of
every extent stays in memory; what is read counts only when it has that hash, so that stale and
misplaced bytes are found as well as damaged ones.

Any thread may read; each (layer, head, piece) is written once, before anyone may ask for it.
"""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorstore as ts
import xxhash

from kvdrive_jax.tiers.extents import ExtentLayout, ceil_div
from kvdrive_jax.tiers.pages import Bytes, PageError, PageGeometry, Wide, page_rows
from kvdrive_jax.tiers.precision import transcode

IO_CONCURRENCY = 8
"""Writes in flight at once."""


@functools.cache
def _io_context() -> ts.Context:
    """Settings of all arrays of a store: own concurrency, no locks, no syncs, no RAM cache."""
    return ts.Context(
        {
            "file_io_concurrency": {"limit": IO_CONCURRENCY},
            "file_io_locking": {"mode": "none"},
            "file_io_sync": False,
            "cache_pool": {"total_bytes_limit": 0},
            "data_copy_concurrency": {"limit": max(2, min(8, os.cpu_count() or 2))},
        }
    )


def _array_spec(path: Path, shape: list[int], file_shape: list[int]) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "metadata": {
            "shape": shape,
            "data_type": "uint8",
            "fill_value": 0,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": file_shape}},
            "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}},
            "codecs": [{"name": "bytes"}],
        },
        # Extents of zeros are written: an absent file is an error.
        "store_data_equal_to_fill_value": True,
    }


def hashes(blocks: Bytes) -> npt.NDArray[np.uint64]:
    """xxh3 [n] of rows of bytes [n, extent_bytes]."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, blocks), np.uint64, len(blocks))


class SsdSegments:
    """The segments of one session in the directory ``path``, which this makes and removes.

    Raises PageError when the directory or its arrays cannot be made.
    """

    def __init__(
        self,
        path: Path,
        geometry: PageGeometry,
        layout: ExtentLayout,
        session: str,
    ) -> None:
        self.path, self.layout, self._session = path, layout, session
        self._heads, context = geometry.kv_heads, _io_context()
        self._dram_page = geometry.dram_page_bytes
        self._encode = (
            None
            if geometry.dram == geometry.ssd
            else transcode(geometry.format(geometry.dram), geometry.format(geometry.ssd))
        )
        extent = layout.extent_bytes
        lead = [geometry.layers, geometry.kv_heads]
        self._hashes = np.zeros((*lead, layout.extents), np.uint64)
        prompt_files = [1, 1, layout.shard_extents, extent]
        piece_files = [1, geometry.kv_heads, layout.piece_extents, extent]
        shape = [*lead, layout.prompt_extents, extent]
        tail = [*lead, layout.pieces * layout.piece_extents, extent]
        try:
            path.mkdir()
            self._prompt = self._create("prompt", shape, prompt_files, context)
            self._pieces = self._create("pieces", tail, piece_files, context) if tail[2] else []
        except (OSError, ValueError, RuntimeError) as error:
            self.remove()
            raise PageError(
                f"cannot make its files: {error}", session=session, path=str(path)
            ) from error

    def _create(
        self, name: str, shape: list[int], file_shape: list[int], context: ts.Context
    ) -> list[ts.TensorStore]:
        spec = _array_spec(self.path / name, shape, file_shape)
        array = ts.open(spec, context=context, create=True).result()
        return [array[layer] for layer in range(shape[0])]

    def file_of(self, layer: int, head: int, extent: int) -> str:
        """The file that holds an extent of a segment."""
        layout = self.layout
        # Text, not Path: this is done for every read, and Path takes as long as the read.
        if extent < layout.prompt_extents:
            return f"{self.path}/prompt/{layer}.{head}.{extent // layout.shard_extents}.0"
        piece = (extent - layout.prompt_extents) // layout.piece_extents
        return f"{self.path}/pieces/{layer}.0.{piece}.0"

    def write_prompt(self, layer: int, head: int, rows: Bytes, order: Wide, scratch: Bytes) -> int:
        """Write pages ``rows[order]`` ([N, bytes in DRAM] by chunk id) from position 0 on. Returns
        bytes."""
        layout = self.layout
        per_file = layout.shard_extents * layout.pages_per_extent
        written = 0
        for start in range(0, len(order), per_file):
            chosen = order[start : start + per_file]
            count = ceil_div(len(chosen), layout.pages_per_extent)
            block = scratch[: count * layout.extent_bytes].reshape(-1, layout.page_bytes)
            if self._encode is None:
                np.take(rows, chosen, axis=0, out=block[: len(chosen)], mode="clip")
            else:
                block[: len(chosen)] = self._encode(rows[chosen])
            block[len(chosen) :] = 0
            first = start // layout.pages_per_extent
            target = self._prompt[layer][head, first : first + count]
            extents = block.reshape(count, -1)
            self._hashes[layer, head, first : first + count] = hashes(extents)
            self._write(target, extents, layer, head, first)
            written += block.nbytes
        return written

    def write_piece(self, layer: int, piece: int, pages: npt.NDArray[Any], scratch: Bytes) -> int:
        """Write ``pages`` [K, F, *dram_shape] as one piece of a layer. Returns bytes."""
        layout = self.layout
        n_new = pages.shape[1]
        count = ceil_div(n_new, layout.pages_per_extent)
        block = scratch[: self._heads * count * layout.extent_bytes]
        by_page = block.reshape(self._heads, -1, layout.page_bytes)
        for head in range(self._heads):
            rows = page_rows(pages[head], self._dram_page)
            by_page[head, :n_new] = rows if self._encode is None else self._encode(rows)
        by_page[:, n_new:] = 0
        first, extent = piece * layout.piece_extents, layout.piece_extent(piece)
        target = self._pieces[layer][:, first : first + count]
        extents = block.reshape(self._heads, count, -1)
        for head in range(self._heads):
            self._hashes[layer, head, extent : extent + count] = hashes(extents[head])
        self._write(target, extents, layer, None, extent)
        return block.nbytes

    def _write(
        self, target: ts.TensorStore, data: Bytes, layer: int, head: int | None, extent: int
    ) -> None:
        try:
            target.write(data).result()
        except (OSError, ValueError, RuntimeError) as error:
            raise PageError(
                f"write failed: {error}",
                session=self._session,
                layer=layer,
                head=head,
                extent=extent,
                path=self.file_of(layer, head or 0, extent),
            ) from error

    def read(self, layer: int, heads: Wide, extents: Wide, target: Bytes) -> None:
        """Read extents (prompt extents first) of one layer into ``target`` [n, extent_bytes].

        All go to the disk at once, neighbours in one read. If that fails, each is read again alone;
        raises PageError naming the first that fails again.
        """
        try:
            self._read_batch(layer, heads, extents, target)
        except (OSError, ValueError, RuntimeError):
            for i in range(len(extents)):
                one = slice(i, i + 1)
                try:
                    self._read_batch(layer, heads[one], extents[one], target[one])
                except (OSError, ValueError, RuntimeError) as error:
                    head, extent = int(heads[i]), int(extents[i])
                    raise PageError(
                        f"read failed twice: {error}",
                        session=self._session,
                        layer=layer,
                        head=head,
                        extent=extent,
                        path=self.file_of(layer, head, extent),
                    ) from error

    def _read_batch(self, layer: int, heads: Wide, extents: Wide, target: Bytes) -> None:
        layout, size = self.layout, self.layout.extent_bytes
        files, place = self._places(heads, extents)
        # One more than a file holds: a run never goes on in the next file.
        stride = max(layout.shard_extents, self._heads * layout.piece_extents) + 1
        key = files * stride + place
        new = np.empty(len(key), np.bool_)
        new[:1] = True
        np.not_equal(key[1:], key[:-1] + 1, out=new[1:])
        first = np.flatnonzero(new)
        count = np.append(first[1:], len(key)) - first
        columns = (files[first], heads[first], extents[first], place[first] * size, first, count)
        runs = list(zip(*(column.tolist() for column in columns), strict=True))
        flat = target.reshape(-1).data
        opened: dict[int, int] = {}
        try:
            for file, head, extent, offset, _, n in runs:
                if file not in opened:
                    path = self.file_of(layer, head, extent)
                    opened[file] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                # The disk gets all requests before the first is waited for.
                _will_need(opened[file], offset, n * size)
            for file, _, _, offset, at, n in runs:
                got = os.preadv(opened[file], [flat[at * size : (at + n) * size]], offset)
                if got != n * size:
                    raise OSError(f"{got:,} of {n * size:,} bytes at {offset:,} can be read")
        finally:
            for handle in opened.values():
                os.close(handle)
        if not np.array_equal(hashes(target), self._hashes[layer, heads, extents]):
            raise OSError("the bytes read are not those that were written")

    def _places(self, heads: Wide, extents: Wide) -> tuple[Wide, Wide]:
        """For each of n > 0 extents a number of its file in the layer, and its place there."""
        layout = self.layout
        file, place = np.divmod(extents, layout.shard_extents)
        per_segment = ceil_div(layout.prompt_extents, layout.shard_extents)
        file = heads * per_segment + file
        if int(extents[-1]) >= layout.prompt_extents:  # those of pieces come last
            piece, within = np.divmod(extents - layout.prompt_extents, layout.piece_extents)
            behind = extents >= layout.prompt_extents
            file = np.where(behind, self._heads * per_segment + piece, file)
            place = np.where(behind, heads * layout.piece_extents + within, place)
        return file, place

    def remove(self) -> None:
        """Remove the session's files; what is gone already is fine."""
        shutil.rmtree(self.path, ignore_errors=True)


def _will_need(handle: int, offset: int, nbytes: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, offset, nbytes, os.POSIX_FADV_WILLNEED)
