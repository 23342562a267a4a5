"""Page write as a Triton kernel: whole pages, one row of the window each, nothing else touched."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kvdrive_jax.pallas.common import triton_call


def spans(size: int) -> list[tuple[int, int]]:
    """(start, length) of powers of two that cover ``size`` elements, largest first.

    Triton's tiles are powers of two; pages of head dim 80 or 96 are not. Spans need no masked
    lanes and never leave the row.
    """
    found, start = [], 0
    while start < size:
        length = 1 << (size - start).bit_length() - 1
        found.append((start, length))
        start += length
    return found


def warps_for(row_bytes: int) -> int:
    """Warps that move one row with 16 bytes per lane: 1, 2 or 4."""
    return 4 if row_bytes >= 2048 else 2 if row_bytes >= 1024 else 1


def read_row(ref: Any, row: jax.Array, valid: jax.Array) -> list[jax.Array]:
    """Row ``row`` of ref [R, E] as its spans; zeros, and nothing read, where not ``valid``."""
    return [
        plt.load(
            ref.at[row, pl.ds(start, length)],
            mask=jnp.broadcast_to(valid, (length,)),
            other=jnp.zeros((), ref.dtype),
        )
        for start, length in spans(ref.shape[-1])
    ]


def write_row(ref: Any, row: jax.Array, values: list[jax.Array], valid: jax.Array) -> None:
    """The spans of `read_row` into row ``row`` of ref [R, E], where ``valid``."""
    for (start, length), value in zip(spans(ref.shape[-1]), values, strict=True):
        plt.store(ref.at[row, pl.ds(start, length)], value, mask=jnp.broadcast_to(valid, (length,)))


def write_rows(
    window: jax.Array,
    pages: jax.Array,
    target: jax.Array,
    *,
    pages_per_program: int,
    interpret: bool,
) -> jax.Array:
    """See ``reference.write_rows``. window is aliased to the result."""
    rows, count = window.shape[0], pages.shape[0]

    def body(target_ref: Any, pages_ref: Any, _: Any, out_ref: Any) -> None:
        first = pl.program_id(0) * pages_per_program
        moved = []
        # All loads before the first store, so that they are in flight together.
        for i in range(pages_per_program):
            page = jnp.minimum(first + i, count - 1)
            row = target_ref[page]
            valid = (first + i < count) & (row >= 0) & (row < rows)
            moved.append((jnp.where(valid, row, 0), valid, read_row(pages_ref, page, valid)))
        for row, valid, values in moved:
            write_row(out_ref, row, values, valid)

    whole = pl.BlockSpec(memory_space=pl.ANY)
    return triton_call(
        body,
        out_shape=jax.ShapeDtypeStruct(window.shape, window.dtype),
        grid=(pl.cdiv(count, pages_per_program),),
        in_specs=[whole, whole, whole],
        out_specs=whole,
        num_warps=warps_for(window.shape[1] * window.dtype.itemsize),
        num_stages=1,
        interpret=interpret,
        name="page_write",
        input_output_aliases={2: 0},
    )(target, pages, window)
