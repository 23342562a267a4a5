"""Weights in int8 blocks, for CPUs, in about half of the memory of float32 with its embedding.

Every 32 inputs of an output share a scale, as in llama.cpp's Q8_0. Four codes share a word, so that
the loop over outputs unpacks and sums whole vectors of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import EllipsisType

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 32
"""Inputs that share a scale."""

PER_WORD = 4
MIDDLE = 128
FEW_ROWS = 8
"""Rows up to which codes are multiplied as they are; more are worth widening the weight once."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """A matrix [in, out]; in a layer's leaves it stands for a weight.

    codes: [in / 32, 8, out] uint32, weights / scale + 128 of four inputs, the first in the lowest
    byte; scale: [in / 32, out] float32; inputs: in; layer: where codes and scale have a leading L,
    the one that is meant, an int32 scalar.
    """

    codes: jax.Array
    scale: jax.Array
    inputs: int = field(metadata={"static": True})
    layer: jax.Array | None = None

    def __getitem__(self, _: EllipsisType) -> Packed:
        return self

    @property
    def ndim(self) -> int:
        """Axes of the matrix."""
        return 2

    @property
    def size(self) -> int:
        """Weights."""
        return self.inputs * self.codes.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the one matrix."""
        layers = 1 if self.layer is None else self.codes.shape[0]
        return (self.codes.nbytes + self.scale.nbytes) // layers


@jax.jit
def packed_nbytes(shape: tuple[int, ...]) -> int:
    """Bytes of a weight [in, out] as int8 with its scales."""
    inputs, outputs = shape
    return -(-inputs // BLOCK) * (BLOCK + 4) * outputs


def pack(weight: jax.Array) -> Packed:
    """A weight [in, out] as int8: off by at most 1/254 of the largest of its block."""
    inputs, outputs = weight.shape
    blocks = -(-inputs // BLOCK)
    wide = jnp.pad(weight.astype(jnp.float32), ((0, blocks * BLOCK - inputs), (0, 0)))
    wide = wide.reshape(blocks, BLOCK, outputs)
    scale = jnp.abs(wide).max(axis=1) / (MIDDLE - 1)
    unit = wide / jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)[:, None]
    codes = (jnp.round(unit) + MIDDLE).astype(jnp.uint32)
    codes = codes.reshape(blocks, BLOCK // PER_WORD, PER_WORD, outputs)
    shifts = 8 * jnp.arange(PER_WORD, dtype=jnp.uint32)[:, None]
    return Packed((codes << shifts).sum(axis=2, dtype=jnp.uint32), scale, inputs)


def _block_row(array: jax.Array, layer: jax.Array | None, word: int | None = None) -> jax.Array:
    """[in / 32, out] of codes or scale. Each is sliced out by itself, so that the loop that uses it
    reads it where it is."""
    if layer is not None and word is None:
        return lax.dynamic_index_in_dim(array, layer, keepdims=False)
    if layer is None:
        return array if word is None else array[:, word]
    _, blocks, _, outputs = array.shape
    zero = jnp.zeros((), jnp.int32)
    row = lax.dynamic_slice(array, (layer, zero, jnp.int32(word), zero), (1, blocks, 1, outputs))
    return row.reshape(blocks, outputs)


def restore(packed: Packed) -> jax.Array:
    """The weight as it is multiplied: [in, out] float32."""
    if packed.layer is not None:
        codes, scale = (
            lax.dynamic_index_in_dim(array, packed.layer, keepdims=False)
            for array in (packed.codes, packed.scale)
        )
        packed = Packed(codes, scale, packed.inputs)
    blocks, words, outputs = packed.codes.shape
    shifts = 8 * jnp.arange(PER_WORD, dtype=jnp.uint32)[:, None]
    codes = (packed.codes[:, :, None] >> shifts) & jnp.uint32(255)
    wide = (codes.astype(jnp.int32) - MIDDLE).astype(jnp.float32)
    wide = wide.reshape(blocks, words * PER_WORD, outputs) * packed.scale[:, None]
    return wide.reshape(-1, outputs)[: packed.inputs]


def packed_product(x: jax.Array, packed: Packed) -> jax.Array:
    """x [..., in] @ the weight: [..., out] float32."""
    lead = x.shape[:-1]
    rows = x.reshape(-1, packed.inputs).astype(jnp.float32)
    if rows.shape[0] > FEW_ROWS:
        product = lax.dot(rows, restore(packed), precision=lax.Precision.HIGHEST)
        return product.reshape(*lead, -1)
    blocks, words, outputs = packed.codes.shape[-3:]
    padding = blocks * BLOCK - packed.inputs
    split = jnp.pad(rows, ((0, 0), (0, padding))).reshape(-1, blocks, BLOCK)
    total: jax.Array | None = None
    for word in range(words):
        codes = _block_row(packed.codes, packed.layer, word)[None]
        for place in range(PER_WORD):
            weight = split[:, :, word * PER_WORD + place, None]
            if place < PER_WORD - 1:
                # Left where it is, and the input made smaller: exact, and one operation less.
                code = codes & jnp.uint32(255 << 8 * place)
                weight = weight * 2.0 ** (-8 * place)
            else:
                code = codes >> jnp.uint32(8 * place)
            term = weight * code.astype(jnp.int32).astype(jnp.float32)
            total = term if total is None else total + term
    assert total is not None
    total = (total - MIDDLE * split.sum(axis=-1, keepdims=True)) * _block_row(
        packed.scale, packed.layer
    )[None]
    # XLA would make one kernel of this sum with as many of the products above as it knows, and
    # write the others to memory: several times slower than the loop that this leaves whole.
    total = jnp.where(total == total, total, jnp.nan)
    return total.sum(axis=1).reshape(*lead, outputs)
