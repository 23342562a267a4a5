"""The SSD tier: one private directory per store, and the checksummed extents of each session.

TensorStore's zarr3 driver holds raw bytes; every extent carries a crc32c, the index of every file
too, and an extent that is not there is an error, never a fill value. Two arrays per session:
``prompt`` [L, K, extents, extent_bytes], several extents of one segment to a file, and ``pieces``
of the same form for flushed chunks, one piece of all kv heads of a layer to a file. Files are not
synced: this tier is a cache and ends with its process.

Any thread may read; each (layer, head, piece) is written once, before anyone may ask for it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorstore as ts

from kvdrive_jax.tiers.extents import ExtentLayout, ceil_div
from kvdrive_jax.tiers.pages import Bytes, PageError, PageGeometry, Wide, page_rows

IO_CONCURRENCY = 8
"""Reads and writes in flight at once: the queue depth that the disk sees."""

PROBE_BYTES = 4096


class SsdDirectory:
    """``kvdrive-<pid>-<random>`` under ``parent``, removed on close and when Python exits.

    Raises ValueError, before anything else happens, when ``parent`` is missing, not a directory,
    or cannot be written (shown by writing, syncing and reading a small file).
    """

    def __init__(self, parent: str) -> None:
        self.parent = parent
        if not Path(parent).exists():
            raise ValueError(f"ssd_dir {parent!r} does not exist: create it or name another")
        if not Path(parent).is_dir():
            raise ValueError(f"ssd_dir {parent!r} is not a directory: name one")
        try:
            self.path = Path(tempfile.mkdtemp(prefix=f"kvdrive-{os.getpid()}-", dir=parent))
        except OSError as error:
            raise ValueError(
                f"ssd_dir {parent!r} cannot be written ({error.strerror}): name another"
            ) from error
        self._finalizer = weakref.finalize(self, _remove_tree, self.path, os.getpid())
        self.context = _io_context()
        try:
            _probe(self.path / "probe")
        except OSError as error:
            self.close()
            raise ValueError(
                f"ssd_dir {parent!r} cannot hold a file of {PROBE_BYTES} bytes "
                f"({error.strerror or error}): free some space or name another"
            ) from error

    def check_free(self, nbytes: int, promised: int) -> None:
        """Raise ValueError unless the file system has ``nbytes`` free beside the ``promised``."""
        stat = os.statvfs(self.path)
        free = stat.f_bavail * stat.f_frsize
        if nbytes + promised > free:
            raise ValueError(
                f"ssd_dir {self.parent!r} has {free:,} bytes free, but this session needs "
                f"{nbytes:,} and open sessions still need {promised:,}: "
                "free some space or name another directory"
            )

    def close(self) -> None:
        """Remove the directory and everything in it; idempotent. OSError says what remained."""
        if self._finalizer.alive:
            self._finalizer()
            if self.path.exists():
                shutil.rmtree(self.path)


def _probe(path: Path) -> None:
    data = os.urandom(PROBE_BYTES)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if path.read_bytes() != data:
        raise OSError("what was read is not what was written")
    path.unlink()


def _remove_tree(path: Path, owner: int) -> None:
    # A forked child inherits the finalizer, but not the files.
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)


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
    extent = [1, 1, 1, shape[3]]
    checksum = {"name": "crc32c"}
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "metadata": {
            "shape": shape,
            "data_type": "uint8",
            "fill_value": 0,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": file_shape}},
            "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}},
            "codecs": [
                {
                    "name": "sharding_indexed",
                    "configuration": {
                        "chunk_shape": extent,
                        "codecs": [{"name": "bytes"}, checksum],
                        "index_codecs": [little, checksum],
                        "index_location": "end",
                    },
                }
            ],
        },
        # Extents of zeros are written, and absent ones are errors: zeros never stand in for data.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


class SsdSegments:
    """The segments of one session in the directory ``path``, which this makes and removes.

    Raises PageError when the directory or its arrays cannot be made.
    """

    def __init__(
        self,
        path: Path,
        geometry: PageGeometry,
        layout: ExtentLayout,
        context: ts.Context,
        session: str,
    ) -> None:
        self.path, self.layout, self._session = path, layout, session
        self._heads = geometry.kv_heads
        extent = layout.extent_bytes
        lead = [geometry.layers, geometry.kv_heads]
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

    def file_of(self, layer: int, head: int, extent: int) -> Path:
        """The file that holds an extent of a segment."""
        layout = self.layout
        if extent < layout.prompt_extents:
            return self.path / "prompt" / f"{layer}.{head}.{extent // layout.shard_extents}.0"
        piece = (extent - layout.prompt_extents) // layout.piece_extents
        return self.path / "pieces" / f"{layer}.0.{piece}.0"

    def write_prompt(
        self, layer: int, head: int, pages: npt.NDArray[Any], order: Wide, scratch: Bytes
    ) -> int:
        """Write ``pages[order]`` ([N, 2, c, D] by chunk id) from position 0 on. Returns bytes."""
        layout = self.layout
        rows = page_rows(pages, layout.page_bytes)
        per_file = layout.shard_extents * layout.pages_per_extent
        written = 0
        for start in range(0, len(order), per_file):
            chosen = order[start : start + per_file]
            count = ceil_div(len(chosen), layout.pages_per_extent)
            block = scratch[: count * layout.extent_bytes].reshape(-1, layout.page_bytes)
            np.take(rows, chosen, axis=0, out=block[: len(chosen)], mode="clip")
            block[len(chosen) :] = 0
            first = start // layout.pages_per_extent
            target = self._prompt[layer][head, first : first + count]
            self._write(target, block.reshape(count, -1), layer, head, first)
            written += block.nbytes
        return written

    def write_piece(self, layer: int, piece: int, pages: npt.NDArray[Any], scratch: Bytes) -> int:
        """Write ``pages`` [K, F, 2, c, D] as one piece of a layer. Returns bytes."""
        layout = self.layout
        n_new = pages.shape[1]
        count = ceil_div(n_new, layout.pages_per_extent)
        block = scratch[: self._heads * count * layout.extent_bytes]
        by_page = block.reshape(self._heads, -1, layout.page_bytes)
        for head in range(self._heads):
            by_page[head, :n_new] = page_rows(pages[head], layout.page_bytes)
        by_page[:, n_new:] = 0
        first = piece * layout.piece_extents
        target = self._pieces[layer][:, first : first + count]
        self._write(
            target, block.reshape(self._heads, count, -1), layer, None, layout.piece_extent(piece)
        )
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
                path=str(self.file_of(layer, head or 0, extent)),
            ) from error

    def read(self, layer: int, heads: Wide, extents: Wide, target: Bytes) -> None:
        """Read extents (prompt extents first) of one layer into ``target`` [n, extent_bytes].

        All go to the disk in one batch, neighbours in one read. If that fails, each is read again
        alone; raises PageError naming the first that fails again.
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
                        path=str(self.file_of(layer, head, extent)),
                    ) from error

    def _read_batch(self, layer: int, heads: Wide, extents: Wide, target: Bytes) -> None:
        prompt = int(np.searchsorted(extents >= self.layout.prompt_extents, True))
        reads = []
        if prompt:
            source = self._prompt[layer].vindex[heads[:prompt], extents[:prompt]]
            reads.append(ts.array(target[:prompt], copy=False, write=True).write(source))
        if prompt < len(extents):
            tail = extents[prompt:] - self.layout.prompt_extents
            source = self._pieces[layer].vindex[heads[prompt:], tail]
            reads.append(ts.array(target[prompt:], copy=False, write=True).write(source))
        # Wait for all before raising: none may write into ``target`` after this returns.
        errors = [error for error in (read.exception() for read in reads) if error is not None]
        if errors:
            raise errors[0]

    def remove(self) -> None:
        """Remove the session's files; what is gone already is fine."""
        shutil.rmtree(self.path, ignore_errors=True)
