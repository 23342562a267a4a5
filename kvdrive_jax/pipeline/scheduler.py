"""When things run: the seam between the stages of a layer and the order they run in.

A schedule decides when select, fetch and compute of each layer run; it never changes what they
do, so every schedule gives the same tokens. ``sequential`` runs them in turn (paper figure 10a).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax

from kvdrive_jax.pipeline.stages import Selected


class LayerStages(Protocol):
    """The three stages of one layer, as a schedule sees them."""

    def select(self, layer: int, hidden: jax.Array) -> Selected:
        """Dispatch selection; the miss list is on its way to the host when this returns."""
        ...

    def fetch(self, layer: int, selected: Selected) -> None:
        """Bring the missing pages into their slots."""
        ...

    def compute(self, layer: int, hidden: jax.Array, selected: Selected) -> jax.Array:
        """Dispatch attention and the feed-forward part: hidden [B, E]."""
        ...


def sequential(stages: LayerStages, layers: int, hidden: jax.Array) -> jax.Array:
    """Select, fetch and compute in turn, layer by layer: hidden [B, E] to hidden [B, E]."""
    for layer in range(layers):
        selected = stages.select(layer, hidden)
        stages.fetch(layer, selected)
        hidden = stages.compute(layer, hidden, selected)
    return hidden


@dataclass(frozen=True)
class Arrangement:
    """Sessions that one select and fetch work on, and parts of the batch whose compute runs
    apart."""

    micro_batch: int
    cohorts: int
