"""Page gather as a Triton kernel. The source may be `pinned_host`: the kernel then reads it
across PCIe, page by page, without a copy of anything else."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvdrive_jax.pallas.common import triton_call
from kvdrive_jax.pallas.page_write.triton import read_row, warps_for, write_row


def gather_rows(
    window: jax.Array,
    source: jax.Array,
    missing: jax.Array,
    first: jax.Array,
    table: jax.Array | None,
    *,
    pages_per_program: int,
    interpret: bool,
) -> jax.Array:
    """See ``reference.gather_rows``. window is aliased to the result."""
    batch, slots, elements = window.shape
    kv_heads, count, sources = missing.shape[2], missing.shape[3], source.shape[0]
    ids = missing.reshape(2, batch * kv_heads, count)
    tables = [] if table is None else [table.reshape(batch * kv_heads, -1)]

    def body(ids_ref: Any, first_ref: Any, source_ref: Any, *refs: Any) -> None:
        out_ref = refs[-1]
        head = pl.program_id(1)
        begin, start = pl.program_id(0) * pages_per_program, first_ref[head]
        moved = []
        # All loads before the first store: a page from the host is microseconds away.
        for i in range(pages_per_program):
            entry = jnp.minimum(begin + i, count - 1)
            chunk, slot = ids_ref[0, head, entry], ids_ref[1, head, entry]
            valid = (begin + i < count) & (chunk >= 0) & (slot >= 0) & (slot < slots)
            row = chunk
            if tables:
                chunks = tables[0].shape[-1]
                row = refs[0][head, jnp.clip(chunk, 0, chunks - 1)]
                valid = valid & (row >= 0)
            row = start + row
            valid = valid & (row >= 0) & (row < sources)
            values = read_row(source_ref, jnp.where(valid, row, 0), valid)
            at = head // kv_heads * slots + jnp.where(valid, slot, 0)
            moved.append((at, valid, values))
        for at, valid, values in moved:
            write_row(out_ref, at, values, valid)

    whole = pl.BlockSpec(memory_space=pl.ANY)
    operands = [ids, first.reshape(-1), source, *tables, window.reshape(-1, elements)]
    out = triton_call(
        body,
        out_shape=jax.ShapeDtypeStruct(operands[-1].shape, window.dtype),
        # Entries on the first axis: it is the one that may be long.
        grid=(pl.cdiv(count, pages_per_program), batch * kv_heads),
        in_specs=[whole] * len(operands),
        out_specs=whole,
        num_warps=warps_for(elements * window.dtype.itemsize),
        num_stages=1,
        interpret=interpret,
        name="page_gather",
        input_output_aliases={len(operands) - 1: 0},
    )(*operands)
    return out.reshape(window.shape)
