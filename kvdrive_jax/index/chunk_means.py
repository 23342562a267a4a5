"""Index form ``chunks``: the mean of every chunk's keys."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from kvdrive_jax.index.planes import PlanesForm
from kvdrive_jax.index.quantise import Plane, PlaneSpec


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

    def chunk_logits(self, planes: tuple[Plane, ...], queries: jax.Array) -> jax.Array:
        (means,) = planes
        return self.specs()[0].product(means, queries) * queries.shape[-1] ** -0.5
