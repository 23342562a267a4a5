"""One vector of channels per chunk, stored in 16, 8, 4 or 2 bits a channel.

Channel d of chunk n is ``middle[d] + scale[d] * stretch[n] * code[d, n]``, the codes evenly spaced
from -1 to 1, or from 0 to 1 for what is never negative (a deviation, a half-width; its middle is
0). ``middle`` and ``scale`` are the middle and half the width of the full range a channel has over
the prompt's chunks: nothing is clipped, because rare chunks far out carry much of the attention.
``stretch`` fits the range to each chunk: below 1 for the many chunks that use a part of it, above 1
for a chunk appended later that lies beyond it. So no chunk is ever clipped, no scale ever changes,
and what is in the index stays as it is when chunks are appended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvdrive_jax.pallas.scoring import Codes
from kvdrive_jax.pallas.scoring.products import WORD_BITS, pack, unpack, word_count
from kvdrive_jax.pallas.scoring.reference import plane_product

BITS = (16, 8, 4, 2)
"""Bits a channel can be stored in; 16 is bfloat16."""

# No channel's scale is below this share of the largest one: a chunk beyond the range of a channel
# that hardly varies must not cost all others their precision, nor overflow them.
_SMALLEST_SCALE = 1 / 256
_TINY = 1e-20


Plane = Codes
"""The vectors of one layer, N of them in C channels; a piece, of one session alone, has no B. For
16 bits all but the codes have size 0, and so has the middle of what is never negative."""


@dataclass(frozen=True)
class PlaneSpec:
    """How one kind of vector is stored; hashable.

    Attributes:
        bits: per channel, one of `BITS`.
        signed: False for vectors that are never negative.
    """

    bits: int
    signed: bool = True

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}; got {self.bits}")

    @property
    def _steps(self) -> int:
        return int(2**self.bits - 1)

    def nbytes(self, channels: int, chunks: int) -> int:
        """Bytes of one kv head."""
        if self.bits == 16:
            return 2 * channels * chunks
        ranges = 4 * channels * (2 if self.signed else 1)
        return self.bytes_per_chunk(channels) * chunks + ranges

    def bytes_per_chunk(self, channels: int) -> int:
        """Bytes that each chunk adds, per kv head."""
        return 2 * channels if self.bits == 16 else 4 * word_count(channels, self.bits) + 2

    def empty(self, batch: int, kv_heads: int, channels: int, chunks: int) -> Plane:
        """Room for `chunks` vectors of each of B sessions."""
        lead = (batch, kv_heads)
        if self.bits == 16:
            codes = jnp.zeros((*lead, channels, chunks), jnp.bfloat16)
            # An array of its own for each: one that is there twice cannot be donated.
            scale, low, high = (
                jnp.zeros((*lead, 0), dtype) for dtype in (jnp.bfloat16, jnp.float32, jnp.float32)
            )
            return Plane(codes, scale, low, high)
        return Plane(
            jnp.zeros((*lead, word_count(channels, self.bits), chunks), jnp.uint32),
            jnp.zeros((*lead, chunks), jnp.bfloat16),
            jnp.zeros((*lead, channels), jnp.float32),
            jnp.zeros((*lead, channels if self.signed else 0), jnp.float32),
        )

    def ranges(self, vectors: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        """scale and middle of the first `count` of vectors [K, N, C] float32."""
        heads, total, channels = vectors.shape
        real = (jnp.arange(total) < count)[:, None]
        if self.bits == 16 or not total:
            channels *= self.bits != 16
            zero = jnp.zeros((heads, channels), jnp.float32)
            return zero, zero if self.signed else zero[:, :0]
        high = jnp.where(real, vectors, -jnp.inf).max(axis=1)
        high = jnp.where(count > 0, high, 0.0)
        if self.signed:
            low = jnp.where(real, vectors, jnp.inf).min(axis=1)
            low = jnp.where(count > 0, low, 0.0)
            middle, scale = low / 2 + high / 2, high / 2 - low / 2
            offset = jnp.abs(middle).max(axis=-1, keepdims=True) / 16
        else:
            middle, scale, offset = high[:, :0], high, jnp.zeros((heads, 1), jnp.float32)
        # The offset gives the identical chunks of a short prompt a range that later ones fit in.
        largest = jnp.maximum(scale.max(axis=-1, keepdims=True), offset)
        return jnp.maximum(scale, jnp.maximum(largest * _SMALLEST_SCALE, _TINY)), middle

    def quantise(self, vectors: jax.Array, scale: jax.Array, middle: jax.Array) -> Plane:
        """A piece of all of vectors [K, N, C] float32; `scale` and `middle` as of `ranges`."""
        if self.bits == 16:
            codes = jnp.swapaxes(vectors, -1, -2).astype(jnp.bfloat16)
            none = jnp.zeros((vectors.shape[0], 0), jnp.float32)
            return Plane(codes, none.astype(jnp.bfloat16), none, none)
        centred = vectors - middle[:, None] if self.signed else vectors
        # A piece that has no range yet holds no chunk.
        relative = centred / jnp.maximum(scale, _TINY)[:, None]
        largest = jnp.abs(relative).max(axis=-1, initial=0.0)
        # Rounded up, so that the largest channel stays inside: bfloat16 is off by 2^-9 at most.
        stretch = (largest * (1 + 2.0**-8)).astype(jnp.bfloat16)
        unit = relative / jnp.maximum(stretch.astype(jnp.float32), _TINY)[..., None]
        if self.signed:
            unit = unit / 2 + 0.5
        codes = jnp.clip(jnp.round(unit * self._steps), 0, self._steps).astype(jnp.uint32)
        return Plane(pack(jnp.swapaxes(codes, -1, -2), self.bits), stretch, scale, middle)

    def insert(self, plane: Plane, row: jax.Array | int, piece: Plane) -> Plane:
        """Replaces the vectors of one session by a piece of at most as many."""
        have, need = plane.codes.shape[-1], piece.codes.shape[-1]
        if need > have:
            raise ValueError(f"piece has room for {need} chunks, the index only for {have}")
        spread = piece.stretch.shape[-1]
        return Plane(
            plane.codes.at[row, :, :, :need].set(piece.codes),
            plane.stretch.at[row, :, :spread].set(piece.stretch),
            plane.scale.at[row].set(piece.scale),
            plane.middle.at[row].set(piece.middle),
        )

    def append(
        self, plane: Plane, vectors: jax.Array, n_new: jax.Array, n_before: jax.Array
    ) -> Plane:
        """Adds vectors [B, K, F, C], of which n_new [B] are real, after the first n_before [B].

        A session's first chunks set its ranges; later ones keep them, and stretch beyond.
        """

        def grow(old: Plane, vectors: jax.Array, new: jax.Array, before: jax.Array) -> Plane:
            first = (before == 0) & (new > 0)
            scale, middle = (
                jnp.where(first, fresh, kept)
                for fresh, kept in zip(
                    self.ranges(vectors, new), (old.scale, old.middle), strict=True
                )
            )
            piece = self.quantise(vectors, scale, middle)
            offset = jnp.arange(vectors.shape[1], dtype=jnp.int32)
            at = jnp.where(offset < new, before + offset, jnp.int32(2**30))
            stretch = old.stretch
            if self.bits != 16:
                stretch = stretch.at[:, at].set(piece.stretch, mode="drop")
            codes = old.codes.at[:, :, at].set(piece.codes, mode="drop")
            return Plane(codes, stretch, scale, middle)

        return jax.vmap(grow)(plane, vectors, n_new, n_before)

    def restore(self, plane: Plane) -> jax.Array:
        """The vectors as they are stored: [B, K, N, C] float32."""
        if self.bits == 16:
            return jnp.swapaxes(plane.codes.astype(jnp.float32), -1, -2)
        codes = unpack(plane.codes, self.bits, plane.scale.shape[-1])
        unit = jnp.swapaxes(codes, -1, -2).astype(jnp.float32) / self._steps
        if self.signed:
            unit = unit * 2 - 1
        stretch = plane.stretch.astype(jnp.float32)[..., None]
        vectors = unit * plane.scale[..., None, :] * stretch
        return vectors + plane.middle[..., None, :] if self.signed else vectors

    def product(self, plane: Plane, queries: jax.Array) -> jax.Array:
        """queries [B, K, G, C] float32 with every vector: [B, K, G, N] float32."""
        return plane_product(queries, plane, self.bits, signed=self.signed)

    def weighted_sum(self, plane: Plane, weights: jax.Array) -> jax.Array:
        """Sum over chunks of weight x vector: weights [B, K, G, N] >= 0 -> [B, K, G, C] float32.

        What stands in a chunk that a session does not have must weigh 0.
        """
        if self.bits == 16:
            return jnp.einsum(
                "bkgn,bkcn->bkgc",
                weights.astype(plane.codes.dtype),
                plane.codes,
                preferred_element_type=jnp.float32,
            )
        channels = plane.scale.shape[-1]
        stretched = weights * plane.stretch.astype(jnp.float32)[:, :, None]
        mask = jnp.uint32(2**self.bits - 1)
        # A place of all words at a time: the codes of one place are widened, summed and forgotten.
        sums = [
            jnp.einsum(
                "bkgn,bkwn->bkgw",
                stretched,
                ((plane.codes >> jnp.uint32(place)) & mask).astype(jnp.float32),
                precision=lax.Precision.HIGHEST,
            )
            for place in range(0, WORD_BITS, self.bits)
        ]
        total = jnp.concatenate(sums, axis=-1)[..., :channels] / self._steps
        if self.signed:
            total = 2 * total - stretched.sum(axis=-1, keepdims=True)
        total = total * plane.scale[:, :, None]
        if self.signed:
            total = total + plane.middle[:, :, None] * weights.sum(axis=-1, keepdims=True)
        return total


def parse_bits(text: str | int, name: str = "bits") -> int:
    """Bits from ``bf16``, ``8``, ``4`` or ``2``; ValueError with the choices otherwise."""
    known: dict[str, Any] = {"bf16": 16, "8": 8, "4": 4, "2": 2}
    if str(text) not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {str(text)!r}")
    return int(known[str(text)])
