"""Pages: their geometry, what a fetch of them counts, errors that name them, memory for them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvdrive_jax.config import Precision
from kvdrive_jax.tiers.precision import PageFormat

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int32]
Wide = npt.NDArray[np.int64]

ALIGNMENT = 64
"""Bytes; a cache line, and what a device's DMA engine likes."""


class PageError(RuntimeError):
    """Pages could not be written, read or verified; says which.

    Attributes: session, layer, head, extent, path; None where the fault is not that narrow;
    others: of other sessions, where pages of several were asked for.
    """

    def __init__(
        self,
        reason: str,
        *,
        session: str,
        layer: int | None = None,
        head: int | None = None,
        extent: int | None = None,
        path: str | None = None,
    ) -> None:
        where = [f"session {session!r}"]
        where += [
            f"{word} {value}"
            for word, value in (("layer", layer), ("head", head), ("extent", extent))
            if value is not None
        ]
        if path is not None:
            where.append(f"file {path}")
        super().__init__(f"{', '.join(where)}: {reason}")
        self.session = session
        self.layer = layer
        self.head = head
        self.extent = extent
        self.path = path
        self.others: tuple[PageError, ...] = ()

    @property
    def each(self) -> tuple[PageError, ...]:
        """This one and the others, one for each session."""
        return (self, *self.others)


@dataclass(frozen=True, kw_only=True)
class PageGeometry:
    """Shape of everything in the store: L layers, K kv heads, chunks of c tokens of D values.

    ``dtype`` may be any fixed-size NumPy dtype, bfloat16 of ml_dtypes included; ``dram`` and
    ``ssd`` say what pages are kept as in those tiers.
    Raises ValueError when a number is not a positive integer.
    """

    layers: int
    kv_heads: int
    chunk_size: int
    head_dim: int
    dtype: np.dtype[Any]
    dram: Precision = "model"
    ssd: Precision = "model"

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "chunk_size", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if self.dtype.hasobject or self.dtype.itemsize == 0:
            raise ValueError(f"dtype must have a fixed size in bytes, got {self.dtype}")

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """[2, c, D]: the keys of one chunk of one (layer, kv head), then its values."""
        return (2, self.chunk_size, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in HBM."""
        return math.prod(self.page_shape) * self.dtype.itemsize

    @property
    def dram_page_bytes(self) -> int:
        """Bytes of one page in DRAM, and of one transfer to HBM."""
        return self.format(self.dram).page_bytes

    @property
    def ssd_page_bytes(self) -> int:
        """Bytes of one page on SSD."""
        return self.format(self.ssd).page_bytes

    @property
    def dram_shape(self) -> tuple[int, ...]:
        """Of one page as the store takes and gives it: ``page_shape``, or encoded bytes."""
        return self.page_shape if self.dram == "model" else (self.dram_page_bytes,)

    @property
    def dram_dtype(self) -> np.dtype[Any]:
        """Of one page as the store takes and gives it."""
        return self.dtype if self.dram == "model" else np.dtype(np.uint8)

    def format(self, precision: Precision) -> PageFormat:
        """Pages of this geometry kept as ``precision``."""
        return PageFormat(precision, self.chunk_size, self.head_dim, self.dtype)

    def check(self, name: str, pages: npt.NDArray[Any]) -> None:
        """Raise ValueError unless ``pages`` is [K, any, *dram_shape] of ``dram_dtype``."""
        expected = (self.kv_heads, "any", *self.dram_shape)
        if (
            pages.ndim != len(expected)
            or pages.shape[0] != self.kv_heads
            or pages.shape[2:] != self.dram_shape
            or pages.dtype != self.dram_dtype
        ):
            raise ValueError(
                f"{name} must be {list(expected)} of {self.dram_dtype}, "
                f"got {list(pages.shape)} of {pages.dtype}"
            )


class FetchCount(NamedTuple):
    """What one fetch moved: pages found in DRAM, pages found on SSD, bytes read from SSD."""

    dram_pages: int
    ssd_pages: int
    ssd_bytes_read: int


def page_rows(pages: npt.NDArray[Any], page_bytes: int) -> Bytes:
    """Pages [n, ...] as rows of bytes [n, page_bytes], without a copy where C-contiguous."""
    flat = np.ascontiguousarray(pages).reshape(len(pages), math.prod(pages.shape[1:]))
    return flat.view(np.uint8).reshape(len(pages), page_bytes)


def touched_bytes(nbytes: int, what: str) -> Bytes:
    """``nbytes`` of zeros, aligned to ALIGNMENT, every memory page of it already mapped.

    A first write to fresh memory costs a page fault; paid here, not in a fetch.
    Raises MemoryError saying what was asked for, when the host cannot give it.
    """
    try:
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    except MemoryError as error:
        raise MemoryError(
            f"host memory cannot hold {what} of {nbytes:,} bytes; lower --dram-budget"
        ) from error
    raw.fill(0)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]
