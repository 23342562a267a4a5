"""The two halves of a k-means round, and the means that it groups."""

from kvdrive_jax.pallas.kmeans.api import KmeansTuning, assign, totals, why_not
from kvdrive_jax.pallas.kmeans.reference import chunk_means

__all__ = ["KmeansTuning", "assign", "chunk_means", "totals", "why_not"]
