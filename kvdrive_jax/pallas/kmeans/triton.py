"""The two halves of a k-means round as Triton kernels; neither writes a product or a one-hot."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kvdrive_jax.pallas.common import places, tile, triton_call

_LOWEST = float(np.finfo(np.float32).min)


def _dot(left: jax.Array, right: jax.Array, contract: int) -> jax.Array:
    return lax.dot_general(
        left, right, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32
    )


def _split(wide: jax.Array) -> list[jax.Array]:
    """Three bfloat16 arrays that sum to float32 `wide` exactly."""
    parts = []
    for _ in range(2):
        bits = lax.bitcast_convert_type(wide, jnp.int32) & jnp.int32(-65536)
        parts.append(lax.bitcast_convert_type(bits, jnp.float32))
        wide = wide - parts[-1]
    return [part.astype(jnp.bfloat16) for part in (*parts, wide)]


def _columns(dim: int) -> list[tuple[int, int]]:
    """(start, width) of blocks of columns, each of a power of two that a dot takes."""
    width = tile(dim, 16)
    while width > 16 and dim % width:
        width //= 2
    width = min(width, 64) if dim % width == 0 else 16
    return [(start, width) for start in range(0, dim, width)]


def _assign_body(total: int, clusters: int, dim: int, rows: int, block: int, *refs: Any) -> None:
    vectors_ref, directions_ref, used_ref, out_ref = refs
    start = pl.program_id(1) * rows
    mine = start + jnp.arange(rows, dtype=jnp.int32) < total
    column = [(c, c + jnp.arange(w, dtype=jnp.int32) < dim, w) for c, w in _columns(dim)]
    vectors = [
        plt.load(
            vectors_ref.at[pl.ds(start, rows), places(c, w)], mask=mine[:, None] & real, other=0.0
        )
        for c, real, w in column
    ]

    def one_block(i: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first = i * block
        ids = first + jnp.arange(block, dtype=jnp.int32)
        inside = ids < clusters
        used = plt.load(used_ref.at[pl.ds(first, block)], mask=inside, other=0) > 0
        products = jnp.zeros((rows, block), jnp.float32)
        for (c, real, w), part in zip(column, vectors, strict=True):
            directions = plt.load(
                directions_ref.at[pl.ds(first, block), places(c, w)],
                mask=inside[:, None] & real,
                other=0.0,
            )
            products = products + _dot(part, directions, 1)
        products = jnp.where(used, products, -jnp.inf)
        top = products.max(axis=1)
        nearest = jnp.where(products == top[:, None], ids, clusters).min(axis=1)
        # Strictly better: an equal product of a later block has a higher id.
        better = top > best[0]
        return jnp.where(better, top, best[0]), jnp.where(better, nearest, best[1])

    none = (jnp.full((rows,), -jnp.inf, jnp.float32), jnp.zeros((rows,), jnp.int32))
    _, ids = lax.fori_loop(0, pl.cdiv(clusters, block), one_block, none)
    plt.store(out_ref.at[pl.ds(start, rows)], ids, mask=mine)


def assign(
    vectors: jax.Array,
    directions: jax.Array,
    in_use: jax.Array,
    *,
    rows: int,
    block: int,
    num_warps: int,
    interpret: bool,
) -> jax.Array:
    """As `reference.assign`; `rows` vectors per program, `block` directions per step."""
    heads, total, dim = vectors.shape
    clusters = directions.shape[1]
    ids: jax.Array = triton_call(
        lambda *refs: _assign_body(total, clusters, dim, rows, block, *refs),
        out_shape=jax.ShapeDtypeStruct((heads, total), jnp.int32),
        grid=(heads, pl.cdiv(total, rows)),
        in_specs=[
            pl.BlockSpec((None, total, dim), lambda k, i: (k, 0, 0)),
            pl.BlockSpec((None, clusters, dim), lambda k, i: (k, 0, 0)),
            pl.BlockSpec(),
        ],
        out_specs=pl.BlockSpec((None, total), lambda k, i: (k, 0)),
        num_warps=num_warps,
        num_stages=2,
        interpret=interpret,
        name="kmeans_assign",
    )(vectors, directions, in_use.astype(jnp.int32))
    return ids


def _totals_body(total: int, clusters: int, dim: int, rows: int, block: int, *refs: Any) -> None:
    vectors_ref, ids_ref, sums_ref, counts_ref = refs
    first = pl.program_id(1) * block
    mine = first + jnp.arange(block, dtype=jnp.int32)
    width = tile(dim, 16)
    real = jnp.arange(width, dtype=jnp.int32) < dim

    def one_block(i: jax.Array, done: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start = i * rows
        inside = start + jnp.arange(rows, dtype=jnp.int32) < total
        ids = plt.load(ids_ref.at[pl.ds(start, rows)], mask=inside, other=-1)
        member = mine[:, None] == ids[None]

        def add(done: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            sums, counts = done
            vectors = plt.load(
                vectors_ref.at[pl.ds(start, rows), places(0, width)],
                mask=inside[:, None] & real[None],
                other=0.0,
            )
            one_hot = member.astype(jnp.float32).astype(jnp.bfloat16)
            for part in _split(vectors):
                sums = sums + _dot(one_hot, part, 0)
            return sums, counts + member.astype(jnp.int32).sum(axis=1)

        # Neighbours in the text share clusters: most programs want none of most blocks.
        wanted = member.astype(jnp.int32).max() > 0
        return lax.cond(wanted, add, lambda done: done, done)

    none = (jnp.zeros((block, width), jnp.float32), jnp.zeros((block,), jnp.int32))
    sums, counts = lax.fori_loop(0, pl.cdiv(total, rows), one_block, none)
    inside = mine < clusters
    plt.store(
        sums_ref.at[pl.ds(first, block), places(0, width)], sums, mask=inside[:, None] & real[None]
    )
    plt.store(counts_ref.at[pl.ds(first, block)], counts, mask=inside)


def totals(
    vectors: jax.Array,
    ids: jax.Array,
    clusters: int,
    *,
    rows: int,
    block: int,
    num_warps: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """As `reference.totals`; `block` clusters per program, `rows` vectors per step, in order."""
    heads, total, dim = vectors.shape
    sums, counts = triton_call(
        lambda *refs: _totals_body(total, clusters, dim, rows, block, *refs),
        out_shape=[
            jax.ShapeDtypeStruct((heads, clusters, dim), jnp.float32),
            jax.ShapeDtypeStruct((heads, clusters), jnp.int32),
        ],
        grid=(heads, pl.cdiv(clusters, block)),
        in_specs=[
            pl.BlockSpec((None, total, dim), lambda k, i: (k, 0, 0)),
            pl.BlockSpec((None, total), lambda k, i: (k, 0)),
        ],
        out_specs=[
            pl.BlockSpec((None, clusters, dim), lambda k, i: (k, 0, 0)),
            pl.BlockSpec((None, clusters), lambda k, i: (k, 0)),
        ],
        num_warps=num_warps,
        num_stages=1,
        interpret=interpret,
        name="kmeans_totals",
    )(vectors, ids)
    return sums, counts
