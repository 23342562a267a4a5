"""Which selection runs where, and why not the other."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kvdrive_jax.pallas.common import Implementation, choose, why_not_triton
from kvdrive_jax.pallas.selection import reference, triton


@dataclass(frozen=True, kw_only=True)
class SelectionTuning:
    """segment: scores that one program holds, a power of two up to `triton.WIDEST`; chunk_width:
    chunks per step when clusters become chunks, likewise."""

    segment: int
    chunk_width: int = 4096

    def __post_init__(self) -> None:
        for name in ("segment", "chunk_width"):
            size = getattr(self, name)
            if size < 16 or size > triton.WIDEST or size & (size - 1):
                raise ValueError(
                    f"{name} must be a power of two from 16 to {triton.WIDEST}, got {size}"
                )

    @classmethod
    def default(cls, chunks: int, count: int) -> SelectionTuning:
        """One round where the row fits; else segments that leave a quarter of the row or less
        where they can, so that long rows use many SMs."""
        if chunks <= triton.WIDEST or count > 2048:
            return cls(segment=triton.WIDEST)
        return cls(segment=8192)


def why_not() -> str | None:
    """The reason the Triton kernels cannot select here, or None when they can."""
    return why_not_triton()


def select_chunks(
    scores: jax.Array,
    n_chunks: jax.Array,
    count: int,
    *,
    limit: jax.Array | None = None,
    implementation: Implementation | None = None,
    tuning: SelectionTuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The best `count` chunks of every (session, kv head).

    Args:
        scores: [B, K, N] float32, not NaN.
        n_chunks: [B] int32, how many chunks each session has, at most N. Ids from there on are
            never selected, whatever their score.
        count: P, static, at least 1.
        limit: [B, K] int32 from 0 to P, how many are wanted; None for P.
        implementation: ``xla`` (`lax.top_k`, which sorts on a GPU), ``triton`` (one kernel for rows
            of up to 16,384, one more for each further round), or None for Triton where it can.
        tuning: of the kernels.
        interpret: run the kernels in the interpreter.

    Returns:
        [B, K, P] int32 chunk ids: the best P, ties to the lowest id, and -1 after them where a
        session has fewer or fewer are wanted. The order is that of descending score with ``xla``,
        of ascending id with ``triton``; nothing may depend on it but which free slot each missing
        chunk gets.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotImplementedError: the named implementation cannot run here; says why.
    """
    if scores.ndim != 3 or scores.dtype != jnp.float32:
        raise ValueError(f"scores must be [B, K, N] float32, got {scores.dtype} {scores.shape}")
    _check(scores, n_chunks, count)
    if limit is not None and limit.shape != scores.shape[:2]:
        raise ValueError(f"limit must be {scores.shape[:2]}, got {limit.shape}")
    reason = None if interpret else why_not()
    chosen = choose("selection", implementation, reason, interpret=interpret)
    if not scores.size:
        return jnp.full((*scores.shape[:2], count), -1, jnp.int32)
    if chosen == "xla":
        return reference.top_chunks(scores, n_chunks, count, limit)
    tuning = tuning or SelectionTuning.default(scores.shape[-1], count)
    if limit is None:
        limit = jnp.full(scores.shape[:2], count, jnp.int32)
    return triton.select_chunks(
        scores, n_chunks, limit, count, segment=tuning.segment, interpret=interpret
    )


def select_clusters(
    scores: jax.Array,
    sizes: jax.Array,
    cluster_of_chunk: jax.Array,
    n_chunks: jax.Array,
    count: int,
    *,
    implementation: Implementation | None = None,
    tuning: SelectionTuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Clusters in rank order until exactly `count` chunks of every (session, kv head) are gathered.

    A chunk scores what its cluster does; of clusters with one score, the lowest chunk ids come
    first. No score per chunk is ever written.

    Args:
        scores: [B, K, C] float32, not NaN.
        sizes: [B, K, C] int32, chunks of each cluster; together a session's n_chunks.
        cluster_of_chunk: [B, K, N] int32 below C, also for padding.
        n_chunks: [B] int32, at most N.
        count: P, static, at least 1.
        implementation, tuning, interpret: as for `select_chunks`.

    Returns:
        [B, K, P] int32, as of `select_chunks`.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotImplementedError: the named implementation cannot run here; says why.
    """
    if scores.ndim != 3 or scores.dtype != jnp.float32:
        raise ValueError(f"scores must be [B, K, C] float32, got {scores.dtype} {scores.shape}")
    _check(scores, n_chunks, count)
    if sizes.shape != scores.shape:
        raise ValueError(f"sizes must be {scores.shape}, got {sizes.shape}")
    if cluster_of_chunk.ndim != 3 or cluster_of_chunk.shape[:2] != scores.shape[:2]:
        raise ValueError(
            f"cluster_of_chunk must be [B, K, N] with {scores.shape[:2]} first, "
            f"got {cluster_of_chunk.shape}"
        )
    reason = None if interpret else why_not()
    chosen = choose("selection", implementation, reason, interpret=interpret)
    if not scores.size or not cluster_of_chunk.size:
        return jnp.full((*scores.shape[:2], count), -1, jnp.int32)
    if chosen == "xla":
        return reference.top_clusters(scores, cluster_of_chunk, n_chunks, count)
    # A row of several tiles is read again in each pass: smaller tiles leave registers for that.
    one_tile = scores.shape[-1] <= triton.WIDEST
    tuning = tuning or SelectionTuning(segment=triton.WIDEST // (1 if one_tile else 2))
    return triton.select_clusters(
        scores,
        sizes,
        cluster_of_chunk,
        n_chunks,
        count,
        segment=tuning.segment,
        chunk_width=tuning.chunk_width,
        interpret=interpret,
    )


def _check(scores: jax.Array, n_chunks: jax.Array, count: int) -> None:
    if n_chunks.shape != scores.shape[:1]:
        raise ValueError(f"n_chunks must be {scores.shape[:1]}, got {n_chunks.shape}")
    if count < 1:
        raise ValueError(f"count must be at least 1 chunk, got {count}")
