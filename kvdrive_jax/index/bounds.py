"""Index form ``bounds``: the smallest box around every chunk's keys (Quest, arXiv 2406.10774).

A chunk fits as well as the best key the box could hold: the largest q.k / sqrt(D) over all k with
every channel between the chunk's minimum and maximum. Kept as centre and half-width, which say the
same as minimum and maximum and need two products instead of a maximum per channel.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kvdrive_jax.index.planes import PlanesForm
from kvdrive_jax.index.quantise import PlaneSpec
from kvdrive_jax.pallas.scoring import Recipe


@dataclass(frozen=True)
class BoundsForm(PlanesForm):
    """Per-channel minimum and maximum. Quest's page of 16 tokens is `chunk_size` 16."""

    @property
    def name(self) -> str:
        """As `--index` has it."""
        return "bounds"

    def specs(self) -> tuple[PlaneSpec, ...]:
        return PlaneSpec(self.bits), PlaneSpec(self.bits, signed=False)

    def channels(self, head_dim: int) -> tuple[int, ...]:
        return head_dim, head_dim

    def vectors(self, keys: jax.Array) -> tuple[jax.Array, ...]:
        low, high = keys.min(axis=-2), keys.max(axis=-2)
        return (low + high) / 2, (high - low) / 2

    def recipe(self) -> Recipe:
        return Recipe(
            bits=self.bits, spread="product", spread_bits=self.bits, chunk_size=self.chunk_size
        )

    def weights(self, queries: jax.Array) -> jax.Array:
        return jnp.abs(queries)
