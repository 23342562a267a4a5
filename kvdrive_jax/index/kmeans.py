"""Segment-wise spherical k-means, deterministic and free of sorts.

As in RetroInfer: subtract the mean; start from the vectors at evenly spaced places; in each segment
of consecutive vectors, assign each to the centroid direction with the largest inner product and
move each centroid to the direction of its members' mean; in a last round assign every vector
against all centroids and take plain means. Ties go to the lower id; an empty cluster keeps its
direction, and ends with size 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from kvdrive_jax.pallas import kmeans as kernels

# Bytes of one block of vector-centroid products: what a CPU keeps in its cache (blocks of 32 MB are
# 5 x slower), and enough work for a GPU.
CPU_TILE_BYTES = 4 << 20
GPU_TILE_BYTES = 64 << 20


def check_segment(chunks: int, clusters: int) -> None:
    """Refuses segments whose starting places would leave int32."""
    if 2 * chunks * clusters >= 2**31:
        raise ValueError(
            f"segment_tokens must give at most 2^30 pairs of chunk and cluster, "
            f"got {chunks} chunks x {clusters} clusters"
        )


def segmented(
    vectors: jax.Array,
    count: jax.Array,
    *,
    segment_chunks: int,
    segment_clusters: int,
    clusters: int,
    clusters_of: Callable[[jax.Array], jax.Array | int],
    rounds: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Groups the first `count` of N vectors.

    Args:
        vectors: [K, N, D] float32; what is not among the first `count` changes nothing.
        count: int32 scalar.
        segment_chunks: vectors per segment.
        segment_clusters: clusters of a full segment.
        clusters: C, the clusters of all segments; ids of a partly filled segment are its first.
        clusters_of: clusters for a number of vectors in one segment.
        rounds: of assignment, the last one included.

    Returns:
        centroids [K, C, D] float32, sizes [K, C] int32, ids [K, N] int32 (C for vectors past
        `count`).
    """
    heads, total, dim = vectors.shape
    segments = -(-total // segment_chunks)
    real = jnp.arange(segments * segment_chunks) < count
    mean = jnp.where(real[:total, None], vectors, 0.0).sum(axis=1) / jnp.maximum(count, 1)
    # One copy in segment order serves every round: at long contexts a second one would be felt.
    padded = jnp.pad(vectors, [(0, 0), (0, segments * segment_chunks - total), (0, 0)])
    centred = jnp.where(real[:, None], padded - mean[:, None], 0.0)
    centred = centred.reshape(heads, segments, segment_chunks, dim).swapaxes(0, 1)
    counts = jnp.clip(count - jnp.arange(segments) * segment_chunks, 0, segment_chunks)

    def one_segment(args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        part, n = args
        in_use = jnp.arange(segment_clusters) < clusters_of(n)
        return _directions(part, n, in_use, rounds - 1), in_use

    directions, in_use = lax.map(one_segment, (centred, counts))
    directions = directions.swapaxes(0, 1).reshape(heads, -1, dim)[:, :clusters]
    in_use = in_use.reshape(-1)[:clusters]

    def last_round(
        done: tuple[jax.Array, jax.Array], args: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        part, n = args
        ids = _assign(part, directions, in_use)
        ids = jnp.where(jnp.arange(segment_chunks) < n, ids, clusters)
        sums, sizes = totals(part, ids, clusters)
        return (done[0] + sums, done[1] + sizes), ids

    nothing = (
        jnp.zeros((heads, clusters, dim), jnp.float32),
        jnp.zeros((heads, clusters), jnp.int32),
    )
    (sums, sizes), ids = lax.scan(last_round, nothing, (centred, counts))
    ids = ids.swapaxes(0, 1).reshape(heads, -1)[:, :total]
    filled = (sizes > 0)[..., None]
    # An empty cluster keeps its direction; nothing reads it.
    offsets = jnp.where(filled, sums / jnp.maximum(sizes, 1)[..., None], directions)
    return offsets + mean[:, None], sizes, ids


def _directions(vectors: jax.Array, count: jax.Array, in_use: jax.Array, rounds: int) -> jax.Array:
    """`rounds` of spherical k-means in one segment: [K, R, D] -> unit vectors [K, C, D]."""
    clusters = in_use.shape[0]
    real = jnp.arange(vectors.shape[1]) < count
    used = jnp.maximum(in_use.sum(), 1)
    starts = ((2 * jnp.arange(clusters) + 1) * count) // (2 * used)
    starts = jnp.minimum(starts, vectors.shape[1] - 1)  # those not in use may point anywhere
    first = _unit(vectors[:, starts])

    def one_round(_: int, directions: jax.Array) -> jax.Array:
        ids = jnp.where(real, _assign(vectors, directions, in_use), clusters)
        sums, sizes = totals(vectors, ids, clusters)
        return jnp.where((sizes > 0)[..., None], _unit(sums), directions)

    directions: jax.Array = lax.fori_loop(0, rounds, one_round, first)
    return directions


def _assign(vectors: jax.Array, directions: jax.Array, in_use: jax.Array) -> jax.Array:
    """[K, N] int32: the cluster in use with the largest inner product, ties to the lowest id."""
    if kernels.why_not() is None:
        return kernels.assign(vectors, directions, in_use)
    ids: jax.Array = lax.platform_dependent(
        vectors,
        directions,
        in_use,
        cpu=partial(_assign_in_tiles, tile_bytes=CPU_TILE_BYTES),
        default=partial(_assign_in_tiles, tile_bytes=GPU_TILE_BYTES),
    )
    return ids


def _assign_in_tiles(
    vectors: jax.Array, directions: jax.Array, in_use: jax.Array, *, tile_bytes: int
) -> jax.Array:
    heads, total, dim = vectors.shape
    clusters = directions.shape[1]
    bias = jnp.where(in_use, 0.0, -jnp.inf)
    # float32 ids and two max passes instead of argmax: XLA vectorises max on CPU (4 x faster).
    negative_ids = -jnp.arange(clusters, dtype=jnp.float32)

    def nearest(block: jax.Array) -> jax.Array:
        products = jnp.einsum("krd,kcd->krc", block, directions) + bias
        best = products.max(axis=-1, keepdims=True)
        first = jnp.where(products == best, negative_ids, -jnp.inf).max(axis=-1)
        return (-first).astype(jnp.int32)

    rows, blocks = _tiles(heads, total, clusters, tile_bytes)
    if blocks == 1:
        return nearest(vectors)
    padded = jnp.pad(vectors, [(0, 0), (0, blocks * rows - total), (0, 0)])
    ids: jax.Array = lax.map(nearest, padded.reshape(heads, blocks, rows, dim).swapaxes(0, 1))
    return ids.swapaxes(0, 1).reshape(heads, -1)[:, :total]


def _tiles(heads: int, total: int, clusters: int, tile_bytes: int) -> tuple[int, int]:
    """Rows per block and blocks, as even as can be."""
    most = max(8, tile_bytes // (4 * heads * clusters))
    blocks = -(-total // most)
    return -(-total // blocks), blocks


def totals(vectors: jax.Array, ids: jax.Array, clusters: int) -> tuple[jax.Array, jax.Array]:
    """Sums [K, C, D] and counts [K, C] of the members of each cluster; id C counts nowhere."""
    if kernels.why_not() is None:
        return kernels.totals(vectors, ids, clusters)
    heads = vectors.shape[0]
    flat = jnp.where(
        ids < clusters, jnp.arange(heads)[:, None] * clusters + ids, heads * clusters
    ).reshape(-1)
    counts = jnp.zeros(heads * clusters, jnp.int32).at[flat].add(1, mode="drop")
    # Scattered additions are fast and in order on CPU. On GPU they are atomic, so that their order,
    # and with it the last bit, changes from run to run: there a matmul does it.
    sums = lax.platform_dependent(
        vectors,
        ids,
        cpu=lambda v, i: _scattered_sums(v, i, clusters),
        default=lambda v, i: _matmul_sums(v, i, clusters),
    )
    return sums, counts.reshape(heads, clusters)


def _scattered_sums(vectors: jax.Array, ids: jax.Array, clusters: int) -> jax.Array:
    heads, _, dim = vectors.shape
    flat = jnp.where(ids < clusters, jnp.arange(heads)[:, None] * clusters + ids, heads * clusters)
    sums = jnp.zeros((heads * clusters, dim), jnp.float32)
    sums = sums.at[flat.reshape(-1)].add(vectors.reshape(-1, dim), mode="drop")
    return sums.reshape(heads, clusters, dim)


def _matmul_sums(vectors: jax.Array, ids: jax.Array, clusters: int) -> jax.Array:
    heads, total, dim = vectors.shape
    rows, blocks = _tiles(heads, total, clusters, GPU_TILE_BYTES)
    padded = jnp.pad(vectors, [(0, 0), (0, blocks * rows - total), (0, 0)])
    padded_ids = jnp.pad(ids, [(0, 0), (0, blocks * rows - total)], constant_values=clusters)

    def add_block(sums: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        block = lax.dynamic_slice_in_dim(padded, i * rows, rows, axis=1)
        members = lax.dynamic_slice_in_dim(padded_ids, i * rows, rows, axis=1)
        one_hot = (members[..., None] == jnp.arange(clusters)).astype(jnp.float32)
        more = jnp.einsum("krc,krd->kcd", one_hot, block, precision=lax.Precision.HIGHEST)
        return sums + more, None

    sums, _ = lax.scan(
        add_block, jnp.zeros((heads, clusters, dim), jnp.float32), jnp.arange(blocks)
    )
    return sums


def _unit(vectors: jax.Array) -> jax.Array:
    """Vectors of length 1; the zero vector stays zero."""
    # Scaled by the largest component first, so that squares neither overflow nor underflow.
    largest = jnp.abs(vectors).max(axis=-1, keepdims=True)
    scaled = vectors / jnp.where(largest > 0, largest, 1.0)
    norm = jnp.sqrt((scaled * scaled).sum(axis=-1, keepdims=True))
    return scaled / jnp.maximum(norm, 1e-30)
