"""The best chunks of every row, without sorting it."""

from kvdrive_jax.pallas.selection.api import (
    SelectionTuning,
    select_chunks,
    select_clusters,
    why_not,
)

__all__ = ["SelectionTuning", "select_chunks", "select_clusters", "why_not"]
