"""Index form ``moments``: mean and spread of every chunk's keys, scored by a bounded form.

With ``a = q.mean / sqrt(D)`` and ``s^2 = sum_d q_d^2 var_d / D``, mean and deviation of the c
logits of a chunk (channels taken as independent), a chunk holds most attention mass when one key
stands out from equal others. A key can stand out by at most sqrt(c - 1) s (Samuelson), which
gives

    score = a + log((exp(sqrt(c - 1) s) + (c - 1) exp(-s / sqrt(c - 1))) / c),

log mean exp of the logits of such a chunk: a + s^2 / 2 for small s, linear for large s, so that a
chunk of wildly different keys does not crowd out the one that holds the answer.

RoPE turns the two channels of a pair into each other as positions change, so their variances are
kept as one, at half the bytes: what it costs is within noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kvdrive_jax.index.planes import PlanesForm
from kvdrive_jax.index.quantise import PlaneSpec
from kvdrive_jax.pallas.scoring import Recipe

SPREAD_BITS = {16: 16, 8: 4, 4: 2, 2: 2}
"""Bits of the deviation for bits of the mean."""


@dataclass(frozen=True)
class MomentsForm(PlanesForm):
    """Mean and deviation of every chunk.

    Attributes:
        bits: of the mean; the deviation has fewer (`SPREAD_BITS`) unless `spread_bits` says.
        spread_bits: of the deviation; 0 for `SPREAD_BITS`.
        rotary_dim: channels that RoPE turns, the first of each head; 0 for all. Of the rest, which
            channels share a variance hardly matters.
        paired: whether the channels of a RoPE pair share one variance.
    """

    spread_bits: int = 0
    rotary_dim: int = 0
    paired: bool = True

    def __post_init__(self) -> None:
        if self.rotary_dim < 0 or self.rotary_dim % 2:
            raise ValueError(f"rotary_dim must be even and at least 0, got {self.rotary_dim}")
        super().__post_init__()

    @property
    def name(self) -> str:
        """As `--index` has it."""
        return "moments"

    def specs(self) -> tuple[PlaneSpec, ...]:
        mean = PlaneSpec(self.bits)
        if self.chunk_size == 1:
            return (mean,)  # one key has no spread
        return mean, PlaneSpec(self.spread_bits or SPREAD_BITS[self.bits], signed=False)

    def channels(self, head_dim: int) -> tuple[int, ...]:
        if self.chunk_size == 1:
            return (head_dim,)
        return head_dim, -(-head_dim // 2) if self.paired else head_dim

    def vectors(self, keys: jax.Array) -> tuple[jax.Array, ...]:
        mean = keys.mean(axis=-2)
        if self.chunk_size == 1:
            return (mean,)
        variance = jnp.square(keys - mean[..., None, :]).mean(axis=-2)
        return mean, jnp.sqrt(self.shared(variance))

    def shared(self, variance: jax.Array) -> jax.Array:
        """The variance that each pair of channels [..., D] shares, or each channel its own."""
        if not self.paired:
            return variance
        first, second = self._pairs(variance)
        odd = first.shape[-1] - second.shape[-1]
        second = jnp.concatenate([second, first[..., -1:]], axis=-1) if odd else second
        return (first + second) / 2

    def recipe(self) -> Recipe:
        if self.chunk_size == 1:
            return Recipe(bits=self.bits, chunk_size=1)
        spread_bits = self.specs()[1].bits
        return Recipe(
            bits=self.bits, spread="norm", spread_bits=spread_bits, chunk_size=self.chunk_size
        )

    def weights(self, queries: jax.Array) -> jax.Array:
        """What multiplies each deviation: |q_d|, or the length of a pair's two."""
        weights = jnp.abs(queries)
        if not self.paired:
            return weights
        first, second = self._pairs(weights)
        missing = [(0, 0)] * (weights.ndim - 1) + [(0, first.shape[-1] - second.shape[-1])]
        return jnp.hypot(first, jnp.pad(second, missing))

    def _pairs(self, channels: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First and second channels of all pairs; with an odd D the last channel has no second."""
        dim = channels.shape[-1]
        turned = min(self.rotary_dim or dim - dim % 2, dim - dim % 2)
        middle = turned + -(-(dim - turned) // 2)
        first = [channels[..., : turned // 2], channels[..., turned:middle]]
        second = [channels[..., turned // 2 : turned], channels[..., middle:]]
        return jnp.concatenate(first, axis=-1), jnp.concatenate(second, axis=-1)
