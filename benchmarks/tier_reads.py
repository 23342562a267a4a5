"""Reads of random extents: the store's way, TensorStore's, and plain preadv, for `tiers.py`."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from kvdrive_jax.tiers.extents import ExtentLayout
from kvdrive_jax.tiers.pages import PageGeometry, touched_bytes
from kvdrive_jax.tiers.ssd import SsdSegments

PAGE = 2048
HEADS = 4


def drop_cached(directory: Path) -> None:
    """What is in the page cache of the files below ``directory`` goes, as far as it is on disk."""
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def compare(
    extent_bytes: int, total_bytes: int, requests: int, rounds: int, *, cold: bool
) -> dict[str, Any]:
    """GB/s of each way for the same random requests, in turns; the best of ``rounds``."""
    geometry = PageGeometry(
        layers=1, kv_heads=HEADS, chunk_size=4, head_dim=128, dtype=np.dtype(np.uint16)
    )
    chunks = total_bytes // HEADS // PAGE
    layout = ExtentLayout.plan(
        page_bytes=PAGE,
        extent_bytes=extent_bytes,
        chunk_capacity=chunks,
        prompt_chunks=chunks,
        piece_chunks=64,
    )
    rng = np.random.default_rng(0)
    pages = rng.integers(0, 256, (HEADS, chunks, PAGE), np.uint8)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        segments = SsdSegments(directory / "session", geometry, layout, "read")
        scratch = np.empty(layout.shard_extents * layout.extent_bytes, np.uint8)
        order = np.arange(chunks)
        for head in range(HEADS):
            segments.write_prompt(0, head, pages[head], order, scratch)
        sharded = _sharded(directory / "sharded", pages, layout)
        target = touched_bytes(requests * extent_bytes, "a target").reshape(requests, -1)

        def ours(heads: Any, extents: Any) -> None:
            segments.read(0, heads, extents, target)

        def tensorstore(heads: Any, extents: Any) -> None:
            ts.array(target, copy=False, write=True).write(sharded.vindex[heads, extents]).result()

        def preadv(heads: Any, extents: Any) -> None:
            opened: dict[str, int] = {}
            for i, (head, extent) in enumerate(zip(heads.tolist(), extents.tolist(), strict=True)):
                path = segments.file_of(0, head, extent)
                if path not in opened:
                    opened[path] = os.open(path, os.O_RDONLY)
                at = extent % layout.shard_extents * extent_bytes
                os.preadv(opened[path], [target[i].data], at)
            for handle in opened.values():
                os.close(handle)

        ways: dict[str, Callable[[Any, Any], None]] = {
            "store": ours,
            "tensorstore": tensorstore,
            "preadv": preadv,
        }
        best = dict.fromkeys(ways, float("inf"))
        flat = pages.reshape(HEADS, -1)[:, : layout.prompt_extents * extent_bytes]
        for _ in range(rounds):
            chosen = np.sort(rng.choice(HEADS * (layout.prompt_extents - 1), requests, False))
            heads, extents = np.divmod(chosen, layout.prompt_extents - 1)
            for way, read in ways.items():
                if cold:
                    drop_cached(directory)
                target[...] = 0
                start = time.perf_counter()
                read(heads, extents)
                best[way] = min(best[way], time.perf_counter() - start)
                for i in (0, requests - 1):
                    at = extents[i] * extent_bytes
                    if not np.array_equal(target[i], flat[heads[i], at : at + extent_bytes]):
                        raise RuntimeError(f"{way} read something else than was written")
    moved = requests * extent_bytes / 1e9
    return {
        "extent_bytes": extent_bytes,
        "requests": requests,
        "cold": cold,
        "GB_per_s": {way: moved / seconds for way, seconds in best.items()},
    }


def _sharded(path: Path, pages: Any, layout: ExtentLayout) -> Any:
    """The same extents as a sharded zarr3 array with a checksum for each."""
    extents, size = layout.prompt_extents, layout.extent_bytes
    checksum = {"name": "crc32c"}
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    array = ts.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{path}/"},
            "metadata": {
                "shape": [HEADS, extents, size],
                "data_type": "uint8",
                "chunk_grid": {
                    "name": "regular",
                    "configuration": {"chunk_shape": [1, layout.shard_extents, size]},
                },
                "codecs": [
                    {
                        "name": "sharding_indexed",
                        "configuration": {
                            "chunk_shape": [1, 1, size],
                            "codecs": [{"name": "bytes"}, checksum],
                            "index_codecs": [little, checksum],
                        },
                    }
                ],
            },
        },
        context=ts.Context(
            {
                "file_io_concurrency": {"limit": 8},
                "file_io_locking": {"mode": "none"},
                "file_io_sync": False,
                "cache_pool": {"total_bytes_limit": 0},
            }
        ),
        create=True,
    ).result()
    whole = np.zeros((HEADS, extents * size), np.uint8)
    flat = pages.reshape(HEADS, -1)
    whole[:, : flat.shape[1]] = flat[:, : whole.shape[1]]
    array.write(whole.reshape(HEADS, extents, size)).result()
    return array
