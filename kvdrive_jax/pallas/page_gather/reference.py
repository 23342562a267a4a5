"""Page gather in plain XLA: the specification of the kernel, for sources in device memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvdrive_jax.pallas.page_write.reference import write_rows


def source_rows(chunks: jax.Array, first: jax.Array, table: jax.Array | None) -> jax.Array:
    """Row of each chunk in the source, -1 for padding and for chunks that are not in it.

    chunks: [B, K, P] int32, -1 for padding; first: [B, K] int32; table: [B, K, N] int32 or None.
    """
    rows = chunks
    if table is not None:
        rows = jnp.take_along_axis(table, jnp.maximum(chunks, 0), axis=-1, mode="clip")
        rows = jnp.where(chunks >= 0, rows, -1)
    return jnp.where(rows >= 0, first[..., None] + rows, -1)


def gather_rows(
    window: jax.Array,
    source: jax.Array,
    missing: jax.Array,
    first: jax.Array,
    table: jax.Array | None,
) -> jax.Array:
    """window [B, R, E] with source rows [X, E] in the rows that ``missing`` names.

    missing: [2, B, K, P] int32, chunk ids and rows, -1 in either for nothing; first, table as in
    `source_rows`. Rows of one session are distinct.
    """
    batch, slots, elements = window.shape
    chunks, target = missing
    rows = source_rows(chunks, first, table)
    base = jnp.arange(batch, dtype=jnp.int32)[:, None, None] * slots
    valid = (rows >= 0) & (rows < source.shape[0]) & (target >= 0) & (target < slots)
    pages = source[jnp.where(valid, rows, 0).reshape(-1)]
    at = jnp.where(valid, base + target, -1).reshape(-1)
    return write_rows(window.reshape(-1, elements), pages, at).reshape(window.shape)
