"""The paper's index: chunk representatives grouped by k-means, one centroid per 16 tokens or so.

Built per layer from the prompt's keys, grown when the recent ring is flushed, scored against a
query in one pass. The grouping follows RetroInfer, which the paper builds on: segment-wise
spherical k-means on centred keys. `kmeans.py` has the algorithm, this file the index.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from kvdrive_jax.config import GroupRule
from kvdrive_jax.index import kmeans
from kvdrive_jax.index.chunks import representatives
from kvdrive_jax.pallas.scoring import score_vectors

DTYPES = ("bfloat16", "float32")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ClusterIndex:
    """The index of one layer. A piece, the index of one session alone, has no B.

    Attributes:
        centroids: [B, K, C, D], mean of the members' representatives.
        sizes: [B, K, C] int32, members in chunks; 0 for an empty or unused cluster.
        cluster_of_chunk: [B, K, N] int32, in range also for padding.
        used: [B] int32, clusters handed out so far; the next flush continues there.
    """

    centroids: jax.Array
    sizes: jax.Array
    cluster_of_chunk: jax.Array
    used: jax.Array


@dataclass(frozen=True)
class ClusterForm:
    """How clusters are made and scored; hashable, for use as a static argument.

    Attributes:
        tokens_per_cluster: about how many tokens share a centroid. At or below `chunk_size`, every
            chunk is its own cluster.
        chunk_size: tokens per chunk.
        segment_tokens: k-means runs inside stretches of so many consecutive tokens.
        rounds: k-means rounds for a prompt, the final one included.
        append_rounds: the same for the few chunks of a flush.
        dtype: of the centroids in HBM, "bfloat16" or "float32". Scores are float32 either way.
    """

    tokens_per_cluster: int = 16
    chunk_size: int = 4
    segment_tokens: int = 8192
    rounds: int = 4
    append_rounds: int = 4
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in (
            "tokens_per_cluster", "chunk_size", "segment_tokens", "rounds", "append_rounds",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.segment_tokens < self.chunk_size:
            raise ValueError(
                f"segment_tokens must hold a chunk of {self.chunk_size} tokens, "
                f"got {self.segment_tokens}"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")
        kmeans.check_segment(self.segment_chunks, self._clusters_per_segment)

    @property
    def name(self) -> str:
        """As `--index` has it."""
        return "clusters"

    @property
    def segment_chunks(self) -> int:
        """Chunks per segment."""
        return self.segment_tokens // self.chunk_size

    @property
    def _clusters_per_segment(self) -> int:
        return int(self._clusters_of(self.segment_chunks))

    def _clusters_of(self, chunks: int | jax.Array) -> int | jax.Array:
        """Clusters for so many chunks of one segment."""
        if self.tokens_per_cluster <= self.chunk_size:
            return chunks
        whole = chunks * self.chunk_size + self.tokens_per_cluster - 1
        return whole // self.tokens_per_cluster

    def cluster_count(self, chunks: int) -> int:
        """Clusters that `build` makes for so many chunks."""
        full, rest = divmod(chunks, self.segment_chunks)
        return full * self._clusters_per_segment + int(self._clusters_of(rest))

    def cluster_capacity(self, chunk_capacity: int, flush_events: int, flush_chunks: int) -> int:
        """C that holds a prompt of `chunk_capacity` chunks and `flush_events` flushes of at most
        `flush_chunks` chunks each; at least 1."""
        flushed = flush_events * int(self._clusters_of(flush_chunks))
        return max(1, self.cluster_count(chunk_capacity) + flushed)

    def nbytes(
        self, batch: int, kv_heads: int, head_dim: int, chunk_capacity: int, cluster_capacity: int
    ) -> int:
        """Bytes of one layer's index in HBM."""
        per_cluster = head_dim * jnp.dtype(self.dtype).itemsize + 4
        per_head = cluster_capacity * per_cluster + chunk_capacity * 4
        return batch * kv_heads * per_head + batch * 4

    def bytes_per_token(self, head_dim: int) -> float:
        """Bytes of index per token and kv head: centroid and size, and each chunk's cluster id."""
        per_cluster = head_dim * jnp.dtype(self.dtype).itemsize + 4
        return per_cluster / max(self.tokens_per_cluster, self.chunk_size) + 4 / self.chunk_size

    def bytes_scanned(self, head_dim: int, n_chunks: int) -> int:
        """Bytes that one step reads per kv head."""
        per_cluster = head_dim * jnp.dtype(self.dtype).itemsize + 4
        return self.cluster_count(n_chunks) * per_cluster + n_chunks * 4

    def empty(
        self, batch: int, kv_heads: int, head_dim: int, chunk_capacity: int, cluster_capacity: int
    ) -> ClusterIndex:
        """An index of B sessions without chunks."""
        return ClusterIndex(
            centroids=jnp.zeros((batch, kv_heads, cluster_capacity, head_dim), self.dtype),
            sizes=jnp.zeros((batch, kv_heads, cluster_capacity), jnp.int32),
            cluster_of_chunk=jnp.zeros((batch, kv_heads, chunk_capacity), jnp.int32),
            used=jnp.zeros((batch,), jnp.int32),
        )

    def build(self, keys: jax.Array, n_chunks: jax.Array) -> ClusterIndex:
        """Indexes one session's prompt in one layer.

        Args:
            keys: [K, N, c, D] post-RoPE keys of the chunks, or their representatives [K, N, D];
                padding may hold any finite value and changes nothing.
            n_chunks: int32 scalar, the real ones.

        Returns:
            A piece with C = max(1, cluster_count(N)).
        """
        return self._group(_representatives(keys, 3), n_chunks, self.rounds)

    def insert(
        self, index: ClusterIndex, row: jax.Array | int, piece: ClusterIndex
    ) -> ClusterIndex:
        """Replaces the index of one session. `index` may be donated; `piece` may be smaller."""
        for name in ("sizes", "cluster_of_chunk"):
            have, need = getattr(index, name).shape[-1], getattr(piece, name).shape[-1]
            if need > have:
                raise ValueError(f"piece has room for {need} {name}, the index only for {have}")
        clusters = piece.centroids.shape[1]
        chunks = piece.cluster_of_chunk.shape[1]
        # Sizes are cleared first: the clusters of the session that was here must not be seen.
        return ClusterIndex(
            centroids=index.centroids.at[row, :, :clusters].set(piece.centroids),
            sizes=index.sizes.at[row].set(0).at[row, :, :clusters].set(piece.sizes),
            cluster_of_chunk=index.cluster_of_chunk.at[row]
            .set(0)
            .at[row, :, :chunks]
            .set(piece.cluster_of_chunk),
            used=index.used.at[row].set(piece.used),
        )

    def append(
        self,
        index: ClusterIndex,
        keys: jax.Array,
        n_new: jax.Array,
        n_chunks_before: jax.Array,
    ) -> ClusterIndex:
        """Adds the chunks of a flush as clusters of their own; the old clusters stay as they are.

        Args:
            index: may be donated. Its capacity must hold the new chunks and clusters (see
                `cluster_capacity`); what does not fit would be lost.
            keys: [B, K, F, c, D] or representatives [B, K, F, D].
            n_new: [B] int32, real ones among the F; 0 leaves a session's index as it is.
            n_chunks_before: [B] int32, the id of the first new chunk.
        """
        pieces = jax.vmap(lambda reps, n: self._group(reps, n, self.append_rounds))(
            _representatives(keys, 4), n_new
        )
        nowhere = jnp.int32(2**30)

        def grow(
            old: ClusterIndex, piece: ClusterIndex, n: jax.Array, start: jax.Array
        ) -> ClusterIndex:
            ids = jnp.arange(piece.sizes.shape[-1], dtype=jnp.int32)
            clusters = jnp.where(ids < piece.used, old.used + ids, nowhere)
            chunk_ids = jnp.arange(piece.cluster_of_chunk.shape[-1], dtype=jnp.int32)
            chunks = jnp.where(chunk_ids < n, start + chunk_ids, nowhere)
            return ClusterIndex(
                centroids=old.centroids.at[:, clusters].set(piece.centroids, mode="drop"),
                sizes=old.sizes.at[:, clusters].set(piece.sizes, mode="drop"),
                cluster_of_chunk=old.cluster_of_chunk.at[:, chunks].set(
                    piece.cluster_of_chunk + old.used, mode="drop"
                ),
                used=old.used + piece.used,
            )

        return jax.vmap(grow)(index, pieces, n_new, n_chunks_before)

    def scores(
        self, index: ClusterIndex, queries: jax.Array, n_chunks: jax.Array, rule: GroupRule
    ) -> jax.Array:
        """Ranks every chunk by its cluster.

        Args:
            index: of B sessions.
            queries: [B, H, D], post-RoPE, unscaled.
            n_chunks: [B] int32.
            rule: how the G = H / K query heads of a kv head are combined (see `combine_group`).

        Returns:
            [B, K, N] float32, finite for chunks a session has, -inf for padding.
        """
        per_cluster = score_vectors(queries, index.centroids, index.sizes, rule)
        per_chunk = jnp.take_along_axis(
            per_cluster, index.cluster_of_chunk, axis=-1, mode="promise_in_bounds"
        )
        real = jnp.arange(per_chunk.shape[-1], dtype=jnp.int32) < n_chunks[:, None, None]
        return jnp.where(real, per_chunk, -jnp.inf)

    def _group(self, reps: jax.Array, n_chunks: jax.Array, rounds: int) -> ClusterIndex:
        """reps [K, N, D] float32 -> a piece."""
        kv_heads, chunks, dim = reps.shape
        capacity = max(1, self.cluster_count(chunks))
        full, rest = jnp.divmod(n_chunks, self.segment_chunks)
        used = jnp.asarray(full * self._clusters_per_segment + self._clusters_of(rest), jnp.int32)
        ids = jnp.arange(chunks, dtype=jnp.int32)
        if chunks == 0 or self.tokens_per_cluster <= self.chunk_size:
            centroids = jnp.zeros((kv_heads, capacity, dim), jnp.float32).at[:, :chunks].set(reps)
            sizes = (jnp.arange(capacity) < n_chunks).astype(jnp.int32)
            members = jnp.broadcast_to(ids, (kv_heads, chunks))
            sizes = jnp.broadcast_to(sizes, (kv_heads, capacity))
        else:
            segment = min(self.segment_chunks, chunks)
            centroids, sizes, members = kmeans.segmented(
                reps,
                n_chunks,
                segment_chunks=segment,
                segment_clusters=int(self._clusters_of(segment)),
                clusters=capacity,
                clusters_of=self._clusters_of,
                rounds=rounds,
            )
            members = jnp.where(ids < n_chunks, members, 0)
        return ClusterIndex(centroids.astype(self.dtype), sizes, members, used)


def cluster_order(cluster_of_chunk: npt.NDArray[np.int32], n_chunks: int) -> npt.NDArray[np.int32]:
    """The chunks of one session in cluster order, for laying out their pages; runs on the host.

    Args:
        cluster_of_chunk: [K, N], a piece's.
        n_chunks: the real ones.

    Returns:
        [K, n_chunks] int32 chunk ids, cluster by cluster, ascending inside each.
    """
    return np.argsort(cluster_of_chunk[:, :n_chunks], axis=1, kind="stable").astype(np.int32)


def _representatives(keys: jax.Array, ndim: int) -> jax.Array:
    """Chunk keys with `ndim` + 1 axes, or representatives with `ndim`, -> representatives."""
    if keys.ndim not in (ndim, ndim + 1):
        raise ValueError(f"keys must have {ndim} or {ndim + 1} axes, got shape {keys.shape}")
    return representatives(keys if keys.ndim == ndim + 1 else keys[..., None, :])
