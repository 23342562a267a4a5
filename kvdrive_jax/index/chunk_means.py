"""Index form ``chunks``: the mean of every chunk's keys."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from kvdrive_jax.index.planes import PlanesForm
from kvdrive_jax.index.quantise import PlaneSpec
from kvdrive_jax.pallas.scoring import Recipe


@dataclass(frozen=True)
class ChunksForm(PlanesForm):
    """A chunk fits as well as the mean of its keys: q.mean / sqrt(D)."""

    @property
    def name(self) -> str:
        """As `--index` has it."""
        return "chunks"

    def specs(self) -> tuple[PlaneSpec, ...]:
        return (PlaneSpec(self.bits),)

    def channels(self, head_dim: int) -> tuple[int, ...]:
        return (head_dim,)

    def vectors(self, keys: jax.Array) -> tuple[jax.Array, ...]:
        return (keys.mean(axis=-2),)

    def recipe(self) -> Recipe:
        return Recipe(bits=self.bits, chunk_size=self.chunk_size)
