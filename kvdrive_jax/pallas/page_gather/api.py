"""Which page gather runs where, and why not the other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kvdrive_jax.pallas.common import Implementation, choose, why_not_triton
from kvdrive_jax.pallas.page_gather import reference, triton
from kvdrive_jax.pallas.page_write.api import require_int32_rows


@dataclass(frozen=True, kw_only=True)
class GatherTuning:
    """pages_per_program: entries of the miss list that one program serves, all of their pages in
    flight at once. Most entries are hits and move nothing."""

    pages_per_program: int

    def __post_init__(self) -> None:
        if self.pages_per_program < 1:
            raise ValueError(f"pages_per_program must be at least 1, got {self.pages_per_program}")

    @classmethod
    def default(cls, row_bytes: int) -> GatherTuning:
        """Up to 8 KiB in flight per program: more would not fit its registers."""
        return cls(pages_per_program=max(1, min(4, 8192 // row_bytes)))


def why_not(dtype: Any) -> str | None:
    """The reason the Triton kernel cannot gather pages of this dtype here, or None when it can."""
    return why_not_triton(dtype)


def in_host_memory(array: jax.Array) -> bool:
    """Whether an array, traced or not, lies in host memory (`pinned_host`)."""
    return jax.typeof(array).memory_space == jax.memory.Space.Host


def gather_pages(
    window: jax.Array,
    source: jax.Array,
    missing: jax.Array,
    first: jax.Array,
    table: jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
    tuning: GatherTuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Missing pages from one slab of page rows into their slots, in place where the caller
    donates the window. Only the rows of missing pages are read.

    Args:
        window: [B, R, 2, c, D] of bfloat16, float16 or float32.
        source: [X, 2 c D] of the same dtype, rows of all sessions of a layer; in device memory or
            `pinned_host`.
        missing: [2, B, K, P] int32, as the select stage yields it: chunk ids and the rows they go
            to, -1 for nothing. No row of a session twice.
        first: [B, K] int32, the row of chunk 0 of each (session, kv head).
        table: [B, K, N] int32, the row of each chunk, counted from ``first``; -1 for a chunk that
            is not in the source, whose slot is left as it is. None where chunk j is row j.
        implementation: ``xla`` (sources in device memory only), ``triton``, or None for Triton
            where it can.
        tuning: of the kernel.
        interpret: run the kernel in the interpreter, which takes no source in host memory.

    Returns:
        The window, bit for bit the pages where they were written and as it was elsewhere.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotImplementedError: no, or not the named, implementation can run here; says why.
    """
    _check(window, source, missing, first, table)
    reason = None if interpret else why_not(window.dtype)
    chosen = choose("page gather", implementation, reason, interpret=interpret)
    if in_host_memory(source):
        if interpret:
            raise NotImplementedError("page gather: the interpreter takes no pinned_host operand")
        if chosen == "xla":
            why = f" ({reason})" if reason else ""
            raise NotImplementedError(
                f"page gather: XLA cannot gather from pinned_host with ids on the device{why}"
            )
    if not missing.size or not source.size or not window.size:
        return window
    elements = math.prod(window.shape[2:])
    flat = window.reshape(*window.shape[:2], elements)
    if tuning is None:
        tuning = GatherTuning.default(elements * window.dtype.itemsize)
    if chosen == "xla":
        out = reference.gather_rows(flat, source, missing, first, table)
    else:
        out = triton.gather_rows(
            flat,
            source,
            missing,
            first,
            table,
            pages_per_program=tuning.pages_per_program,
            interpret=interpret,
        )
    return out.reshape(window.shape)


def _check(
    window: jax.Array,
    source: jax.Array,
    missing: jax.Array,
    first: jax.Array,
    table: jax.Array | None,
) -> None:
    if (
        window.ndim != 5
        or source.ndim != 2
        or source.shape[1] != math.prod(window.shape[2:])
        or source.dtype != window.dtype
    ):
        raise ValueError(
            "window must be [B, R, 2, c, D] and source [X, 2 c D] of one dtype, got "
            f"{window.dtype} {window.shape} and {source.dtype} {source.shape}"
        )
    if missing.ndim != 4 or missing.shape[:2] != (2, window.shape[0]) or missing.dtype != jnp.int32:
        raise ValueError(
            f"missing must be int32 {(2, window.shape[0], 'K', 'P')}, got {missing.dtype} "
            f"{missing.shape}"
        )
    require_int32_rows(window, math.prod(missing.shape[1:]))
    rows = missing.shape[1:3]
    if first.shape != rows or first.dtype != jnp.int32:
        raise ValueError(f"first must be int32 {rows}, got {first.dtype} {first.shape}")
    if table is not None and (
        table.ndim != 3 or table.shape[:2] != rows or not table.shape[2] or table.dtype != jnp.int32
    ):
        raise ValueError(
            f"table must be int32 {(*rows, 'N')} with N at least 1, got {table.dtype} {table.shape}"
        )
