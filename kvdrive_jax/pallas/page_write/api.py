"""Which page write runs where, and why not the other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kvdrive_jax.pallas.common import Implementation, choose, why_not_triton
from kvdrive_jax.pallas.page_write import reference, triton


@dataclass(frozen=True, kw_only=True)
class WriteTuning:
    """pages_per_program: pages that one program moves, all of them in flight at once."""

    pages_per_program: int

    def __post_init__(self) -> None:
        if self.pages_per_program < 1:
            raise ValueError(f"pages_per_program must be at least 1, got {self.pages_per_program}")

    @classmethod
    def default(cls, row_bytes: int) -> WriteTuning:
        """Up to 8 KiB in flight per program: more would not fit its registers."""
        return cls(pages_per_program=max(1, min(4, 8192 // row_bytes)))


def why_not(dtype: Any) -> str | None:
    """The reason the Triton kernel cannot write pages of this dtype here, or None when it can."""
    return why_not_triton(dtype)


def require_int32_rows(window: jax.Array, entries: int) -> None:
    """Raises ValueError unless rows are int32: B R of them, and `entries` places past them.

    The specification sends entries without a page to such places. Bytes have no such limit: offsets
    into arrays of more than 4 GiB are 64-bit.
    """
    most = 2**31 - 1 - entries
    if math.prod(window.shape[:2]) > most:
        raise ValueError(
            f"window must have at most {most} rows B R with {entries} entries, got {window.shape}"
        )


def write_pages(
    window: jax.Array,
    pages: jax.Array,
    target: jax.Array,
    *,
    implementation: Implementation | None = None,
    tuning: WriteTuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Fetched pages into their slots, in place where the caller donates the window.

    Args:
        window: [B, R, 2, c, D] of bfloat16, float16 or float32.
        pages: [M, 2, c, D] of the same dtype.
        target: [M] int32, flat row b R + r of each page, no row twice; outside 0 .. B R - 1 for
            entries that hold no page.
        implementation: ``xla``, ``triton``, or None for Triton where it can. Both write in place
            and launch one kernel; Triton moves 16 bytes per lane where XLA's scatter moves 8, and
            reads no row that holds no page.
        tuning: of the kernel.
        interpret: run the kernel in the interpreter.

    Returns:
        The window, bit for bit the pages where they were written and as it was elsewhere.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotImplementedError: the named implementation cannot run here; says why.
    """
    if window.ndim != 5 or pages.shape[1:] != window.shape[2:] or pages.dtype != window.dtype:
        raise ValueError(
            "window must be [B, R, 2, c, D] and pages [M, 2, c, D] of one dtype, got "
            f"{window.dtype} {window.shape} and {pages.dtype} {pages.shape}"
        )
    if target.shape != pages.shape[:1] or target.dtype != jnp.int32:
        raise ValueError(
            f"target must be int32 {pages.shape[:1]}, got {target.dtype} {target.shape}"
        )
    require_int32_rows(window, len(pages))
    reason = None if interpret else why_not(window.dtype)
    chosen = choose("page write", implementation, reason, interpret=interpret)
    if not pages.size or not window.size:
        return window
    elements = math.prod(window.shape[2:])
    rows, flat = window.reshape(-1, elements), pages.reshape(-1, elements)
    if tuning is None:
        tuning = WriteTuning.default(elements * window.dtype.itemsize)
    if chosen == "xla":
        out = reference.write_rows(rows, flat, target)
    else:
        out = triton.write_rows(
            rows,
            flat,
            target,
            pages_per_program=tuning.pages_per_program,
            interpret=interpret,
        )
    return out.reshape(window.shape)
