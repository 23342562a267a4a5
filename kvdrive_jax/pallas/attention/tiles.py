"""How attention kernels cut keys and values into tiles: columns in powers of two, rows by id."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

# The least number of rows and columns of an operand of a tensor-core product.
DOT = 16
Parts = tuple[jax.Array, ...]


def columns(dim: int) -> tuple[Any, ...]:
    """`dim` as slices of falling power-of-two widths: 80 is 64 and 16.

    Triton knows only powers of two. A tile of 128 with a mask would do too, but would spend
    registers and products on columns that do not exist.
    """
    slices = []
    start = 0
    while start < dim:
        width = 1 << ((dim - start).bit_length() - 1)
        slices.append(pl.ds(start, width))
        start += width
    return tuple(slices)


def why_not_tiles(head_dim: int) -> str | None:
    """The reason no kernel can tile this head dim, or None."""
    if head_dim % DOT or not 0 < head_dim <= 256:
        return f"head dims are multiples of {DOT} up to 256, not {head_dim}"
    return None


def load_rows(
    ref: Any, rows: jax.Array, dim: int, mask: jax.Array | None = None, *, interpret: bool
) -> Parts:
    """Rows `rows` [R] of ref [T, D] as one tile per slice of `columns`; zeros where `mask` is
    False, where nothing is read."""
    if mask is None:
        return tuple(ref[rows, part] for part in columns(dim))
    # Within the array also where nothing is read, for the interpreter reads it.
    rows = jnp.where(mask, rows, 0)
    if interpret:  # jax 0.10.2 cannot interpret a masked load by index
        return tuple(
            jnp.where(mask[:, None], ref[rows, part], jnp.zeros((), ref.dtype))
            for part in columns(dim)
        )
    return tuple(
        plt.load(
            ref.at[rows, part],
            mask=jnp.broadcast_to(mask[:, None], (rows.shape[0], part.size)),
            other=jnp.zeros((), ref.dtype),
        )
        for part in columns(dim)
    )


def store_rows(ref: Any, rows: jax.Array, parts: Parts) -> None:
    """The parts of `load_rows` into rows `rows` of ref [T, D].

    A row may be written more than once, with the same numbers.
    """
    for part, value in zip(columns(ref.shape[-1]), parts, strict=True):
        ref[rows, part] = value


def logits_of(q: Parts, k: Parts) -> jax.Array:
    """q [M, D] . k [N, D], both in parts: [M, N] float32."""
    total = jnp.zeros((), jnp.float32)
    for a, b in zip(q, k, strict=True):
        total = total + _dot(a, b.astype(a.dtype), (1, 1))
    return total


def add_weighted(o: Parts, scale: jax.Array, weights: jax.Array, v: Parts) -> Parts:
    """o [M, D] scale [M] + weights [M, N] . v [N, D], o and v in parts: float32, in parts."""
    return tuple(
        a * scale[:, None] + _dot(weights.astype(b.dtype), b, (1, 0))
        for a, b in zip(o, v, strict=True)
    )


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    # float32 stays float32: TF32 would lose 13 bits of every key.
    return lax.dot_general(
        a, b, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def partial_shapes(*shape: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of a Partial whose o has this shape."""
    o = jax.ShapeDtypeStruct(shape, jnp.float32)
    rest = jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
    return o, rest, rest
