"""Which k-means halves run where, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kvdrive_jax.pallas.common import Implementation, choose, why_not_triton
from kvdrive_jax.pallas.kmeans import reference, triton


@dataclass(frozen=True, kw_only=True)
class KmeansTuning:
    """rows: vectors per tile; block: clusters per tile; both powers of two from 16."""

    rows: int
    block: int
    num_warps: int = 4

    def __post_init__(self) -> None:
        for name in ("rows", "block"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name} must be a power of two of at least 16, got {size}")

    @classmethod
    def for_assign(cls, dim: int) -> KmeansTuning:
        """Tiles whose products, rows x block, fit the registers."""
        return cls(rows=64, block=64, num_warps=4) if dim <= 128 else cls(rows=32, block=64)

    @classmethod
    def for_totals(cls, dim: int) -> KmeansTuning:
        """Tiles whose sums, block x head dim, fit the registers."""
        return cls(rows=32, block=32 if dim <= 128 else 16)


def why_not() -> str | None:
    """The reason the Triton kernels cannot run here, or None when they can."""
    return why_not_triton()


def assign(
    vectors: jax.Array,
    directions: jax.Array,
    in_use: jax.Array,
    *,
    implementation: Implementation | None = None,
    tuning: KmeansTuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The direction with the largest inner product, for every vector.

    Args:
        vectors: [K, N, D] float32.
        directions: [K, C, D] float32.
        in_use: [C] bool, at least one: which of the directions may be taken.
        implementation: ``xla``, ``triton``, or None for Triton where it can. Triton never writes
            the [K, N, C] products. On a GPU both multiply in TF32, as JAX does by default, so that
            they may differ where two directions are that close.
        tuning: of the kernel.
        interpret: run the kernel in the interpreter.

    Returns:
        [K, N] int32 below C, ties to the lowest id.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotImplementedError: the named implementation cannot run here; says why.
    """
    _check_vectors(vectors)
    heads, _, dim = vectors.shape
    if directions.ndim != 3 or (directions.shape[0], directions.shape[2]) != (heads, dim):
        raise ValueError(f"directions must be [{heads}, C, {dim}], got {directions.shape}")
    if in_use.shape != directions.shape[1:2]:
        raise ValueError(f"in_use must be {directions.shape[1:2]}, got {in_use.shape}")
    reason = None if interpret else why_not()
    chosen = choose("k-means assign", implementation, reason, interpret=interpret)
    if not vectors.size or not directions.size:
        return jnp.zeros(vectors.shape[:2], jnp.int32)
    if chosen == "xla":
        return reference.assign(vectors, directions, in_use)
    tuning = tuning or KmeansTuning.for_assign(dim)
    return triton.assign(
        vectors,
        directions,
        in_use,
        rows=tuning.rows,
        block=tuning.block,
        num_warps=tuning.num_warps,
        interpret=interpret,
    )


def totals(
    vectors: jax.Array,
    ids: jax.Array,
    clusters: int,
    *,
    implementation: Implementation | None = None,
    tuning: KmeansTuning | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Sum and number of the vectors of each cluster; the same bits in every run.

    Args:
        vectors: [K, N, D] float32.
        ids: [K, N] int32, the cluster of each vector; outside 0 .. C - 1 it counts nowhere.
        clusters: C, static.
        implementation: ``xla``, ``triton``, or None for Triton where it can. Triton adds in order
            of N within tiles and over them, in float32, and writes no one-hot.
        tuning: of the kernel.
        interpret: run the kernel in the interpreter.

    Returns:
        sums [K, C, D] float32 and counts [K, C] int32.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotImplementedError: the named implementation cannot run here; says why.
    """
    _check_vectors(vectors)
    heads, total, dim = vectors.shape
    if ids.shape != (heads, total) or ids.dtype != jnp.int32:
        raise ValueError(f"ids must be int32 {(heads, total)}, got {ids.dtype} {ids.shape}")
    if clusters < 1:
        raise ValueError(f"clusters must be at least 1, got {clusters}")
    reason = None if interpret else why_not()
    chosen = choose("k-means totals", implementation, reason, interpret=interpret)
    if not vectors.size:
        nothing = jnp.zeros((heads, clusters, dim), jnp.float32)
        return nothing, jnp.zeros((heads, clusters), jnp.int32)
    if chosen == "xla":
        return reference.totals(vectors, ids, clusters)
    tuning = tuning or KmeansTuning.for_totals(dim)
    return triton.totals(
        vectors,
        ids,
        clusters,
        rows=tuning.rows,
        block=tuning.block,
        num_warps=tuning.num_warps,
        interpret=interpret,
    )


def _check_vectors(vectors: jax.Array) -> None:
    if vectors.ndim != 3 or vectors.dtype != jnp.float32:
        raise ValueError(f"vectors must be [K, N, D] float32, got {vectors.dtype} {vectors.shape}")
