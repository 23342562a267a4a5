"""How the scoring kernels cut a stored vector into tensor-core dots, and float32 into bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kvdrive_jax.pallas.common import tile
from kvdrive_jax.pallas.scoring.products import WORD_BITS, word_count
from kvdrive_jax.pallas.scoring.reference import Recipe, Rule


@dataclass(frozen=True)
class Plan:
    """What is static about one call.

    vectors: whether the codes are row-major vectors [X, C] with sizes, not planes [W, N];
    group: G; channels, spread_channels: of the two vectors; chunks: N; parts: bfloat16 numbers per
    weight, 1 or 3; block: chunks per tile; blocks: tiles per program; rule: None for logits.
    """

    recipe: Recipe
    rule: Rule | None
    vectors: bool
    group: int
    channels: int
    spread_channels: int
    chunks: int
    parts: int
    block: int
    blocks: int

    @property
    def heads(self) -> int:
        """Rows per part: a power of two, and all parts together fill a dot's 16."""
        return tile(self.group, 16 if self.parts == 1 else 4)

    @property
    def rows(self) -> int:
        return self.heads * (1 if self.parts == 1 else 4)

    @property
    def programs(self) -> int:
        """Per kv head."""
        return pl.cdiv(self.chunks, self.block * self.blocks)

    @property
    def softmax(self) -> bool:
        return self.rule in ("softmax-sum", "softmax-max")


class Layout:
    """How the channels of one vector are cut into dots of `rows` channels each."""

    def __init__(self, bits: int, channels: int) -> None:
        self.bits, self.channels = bits, channels
        if bits == 16:
            self.rows = 64
            while self.rows > 16 and channels % self.rows:
                self.rows //= 2
            self.tiles = pl.cdiv(channels, self.rows)
            return
        self.words = word_count(channels, bits)
        self.padded = tile(self.words)
        # A dot wants 16 channels: where a place of all words has fewer, it takes several places.
        self.fold = max(1, 16 // self.padded)
        self.rows = self.padded * self.fold
        self.tiles = max(1, WORD_BITS // bits // self.fold)

    def channel(self, step: int) -> tuple[jax.Array, jax.Array]:
        """The channel of each row of dot `step`, and whether it is one."""
        row = jnp.arange(self.rows, dtype=jnp.int32)
        if self.bits == 16:
            channel = step * self.rows + row
            return channel, channel < self.channels
        word = row % self.padded
        channel = (step * self.fold + row // self.padded) * self.words + word
        return channel, (word < self.words) & (channel < self.channels)

    def unpack(self, words: jax.Array, step: int, *, exact: bool) -> jax.Array:
        """words [padded, n] uint32 -> code / 2^bits of dot `step`, [rows, n] float32; one more than
        that unless `exact`."""
        if self.fold > 1:
            place = jnp.arange(self.fold, dtype=jnp.uint32)[:, None, None]
            shift = jnp.minimum(place * self.bits, WORD_BITS - 1)
            words = lax.broadcast_in_dim(words, (self.fold, *words.shape), (1, 2))
            words = lax.shift_right_logical(words, jnp.broadcast_to(shift, words.shape))
            words = words.reshape(self.rows, words.shape[-1])
        # One shift takes a code from its place to just under the exponent.
        down = step * self.fold * self.bits - (23 - self.bits)
        moved = words >> jnp.uint32(down) if down >= 0 else words << jnp.uint32(-down)
        mantissa = moved & jnp.uint32((2**self.bits - 1) << (23 - self.bits))
        unit = lax.bitcast_convert_type(mantissa | jnp.uint32(0x3F800000), jnp.float32)
        return unit - 1.0 if exact else unit


class Weights:
    """The left side of one vector's dots, and what its sums need afterwards.

    tiles: [rows, channels] bfloat16 each; sums: [rows] float32 over all channels; largest: [rows]
    float32, by which the weights were divided before they were squared, or None.
    """

    def __init__(self, plan: Plan, layout: Layout, weight: Any, *, square: bool) -> None:
        part = (jnp.arange(plan.rows, dtype=jnp.int32) // plan.heads)[:, None]
        self.tiles: list[jax.Array] = []
        self.largest: Any = None
        none = jnp.zeros((plan.rows, layout.rows), jnp.float32)
        if square:
            largest = none
            for step in range(layout.tiles):
                largest = jnp.maximum(largest, weight(*layout.channel(step)))
            largest = largest.max(axis=1)
            self.largest = jnp.where(largest > 0, largest, 1.0)
        # Added up elementwise and reduced once: a reduction is a chain of shuffles.
        sums = none
        for step in range(layout.tiles):
            wide = weight(*layout.channel(step))
            if square:
                share = wide / self.largest[:, None]
                wide = share * share
            if plan.parts > 1:
                wide = nth_part(wide, part)
            self.tiles.append(wide.astype(jnp.bfloat16))
            sums = sums + wide
        self.sums = sums.sum(axis=1)


def truncate(wide: jax.Array) -> jax.Array:
    """The first 8 bits of each float32, in float32."""
    bits = lax.bitcast_convert_type(wide, jnp.int32) & jnp.int32(-65536)
    return lax.bitcast_convert_type(bits, jnp.float32)


def nth_part(wide: jax.Array, part: jax.Array) -> jax.Array:
    """Of the three bfloat16 numbers that sum to `wide`, the one each row has; 0 from part 3 on."""
    first = truncate(wide)
    rest = wide - first
    second = truncate(rest)
    nth = jnp.where(part == 0, first, jnp.where(part == 1, second, rest - second))
    return jnp.where(part < 3, nth, 0.0)


def parts_of(wide: jax.Array, count: int) -> list[jax.Array]:
    """`count` bfloat16 arrays that sum to float32 `wide`."""
    parts = []
    for _ in range(count - 1):
        parts.append(truncate(wide))
        wide = wide - parts[-1]
    return [part.astype(jnp.bfloat16) for part in (*parts, wide)]
