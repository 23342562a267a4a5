"""What is kept of every chunk so that those a step does not select can be estimated.

`estimate.py` says what a group of keys contributes; this file keeps the groups: their mean keys,
which the index often has already, and their mean values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvdrive_jax.config import Estimate
from kvdrive_jax.index.chunk_means import ChunksForm
from kvdrive_jax.index.chunks import representatives
from kvdrive_jax.index.clusters import ClusterForm
from kvdrive_jax.index.estimate import attend_groups
from kvdrive_jax.index.form import IndexForm
from kvdrive_jax.index.kmeans import totals
from kvdrive_jax.index.moments import MomentsForm
from kvdrive_jax.index.planes import PlaneIndex
from kvdrive_jax.index.quantise import Plane, PlaneSpec
from kvdrive_jax.pallas.attention import Partial, attend_weighted, why_not_decode
from kvdrive_jax.pallas.scoring.products import MAGNITUDE_LIMIT, group_queries
from kvdrive_jax.pallas.scoring.reference import vector_logits

MEAN_BITS = 4
"""Bits of mean values, and of mean keys where the index has none."""


class LayerIndex(NamedTuple):
    """Everything that selection and estimation read of one layer.

    ranking: of the index form; keys: what has the groups' mean keys, None where `ranking` does;
    values: their mean values, None when nothing is estimated.
    """

    ranking: Any
    keys: Any = None
    values: Any = None


@dataclass(frozen=True)
class Retrieval:
    """How one layer's chunks are ranked, and those not selected estimated; hashable.

    Attributes:
        form: ranks chunks.
        estimate: ``none``; or what stands for the unselected, ``chunks`` by themselves or
            ``clusters`` of them.
        clusters: how they are grouped where `form` does not group.
    """

    form: IndexForm
    estimate: Estimate
    clusters: ClusterForm

    @property
    def _means(self) -> IndexForm:
        """The form with the groups' mean keys."""
        # A two-level index keeps its chunks elsewhere, and in whole spans.
        kind = ClusterForm if self.estimate == "clusters" else (ChunksForm, MomentsForm)
        if isinstance(self.form, kind):
            return self.form
        if self.estimate == "clusters":
            return self.clusters
        return ChunksForm(self.form.chunk_size, MEAN_BITS)

    @property
    def _apart(self) -> bool:
        """Whether mean keys must be kept beside the ranking."""
        return self.estimate != "none" and self._means is not self.form

    def cluster_capacity(self, chunk_capacity: int, flush_events: int, flush_chunks: int) -> int:
        """C to pass to `empty`, as `IndexForm.cluster_capacity`."""
        grouping = self.form if self.estimate == "none" else self._means
        return grouping.cluster_capacity(chunk_capacity, flush_events, flush_chunks)

    def nbytes(
        self, batch: int, kv_heads: int, head_dim: int, chunk_capacity: int, cluster_capacity: int
    ) -> int:
        """Bytes of what `empty` makes for one layer, to the byte."""
        sizes = (batch, kv_heads, head_dim, chunk_capacity, cluster_capacity)
        total = self.form.nbytes(*sizes)
        if self._apart:
            total += self._means.nbytes(*sizes)
        if self.estimate == "chunks":
            total += batch * kv_heads * PlaneSpec(MEAN_BITS).nbytes(head_dim, chunk_capacity)
        elif self.estimate == "clusters":
            total += batch * kv_heads * cluster_capacity * head_dim * 2
        return total

    def empty(
        self, batch: int, kv_heads: int, head_dim: int, chunk_capacity: int, cluster_capacity: int
    ) -> LayerIndex:
        """B sessions without chunks."""
        sizes = (batch, kv_heads, head_dim, chunk_capacity, cluster_capacity)
        ranking = self.form.empty(*sizes)
        keys = self._means.empty(*sizes) if self._apart else None
        values: Any = None
        if self.estimate == "chunks":
            values = PlaneSpec(MEAN_BITS).empty(batch, kv_heads, head_dim, chunk_capacity)
        elif self.estimate == "clusters":
            values = jnp.zeros((batch, kv_heads, cluster_capacity, head_dim), jnp.bfloat16)
        return LayerIndex(ranking, keys, values)

    def build(self, keys: jax.Array, values: jax.Array, n_chunks: jax.Array) -> LayerIndex:
        """A piece from the chunks' keys and values [K, N, c, D], of which n_chunks are real."""
        ranking = self.form.build(keys, n_chunks)
        means = self._means.build(keys, n_chunks) if self._apart else None
        mean_values: Any = None
        if self.estimate == "chunks":
            spec, vectors = PlaneSpec(MEAN_BITS), representatives(values)
            mean_values = spec.quantise(vectors, *spec.ranges(vectors, n_chunks))
        elif self.estimate == "clusters":
            clusters = ranking if means is None else means
            count = clusters.sizes.shape[1]
            real = jnp.arange(keys.shape[1]) < n_chunks
            ids = jnp.where(real, clusters.cluster_of_chunk, count)
            sums, sizes = totals(representatives(values), ids, count)
            mean_values = (sums / jnp.maximum(sizes, 1)[..., None]).astype(jnp.bfloat16)
        return LayerIndex(ranking, means, mean_values)

    def insert(self, index: LayerIndex, row: jax.Array | int, piece: LayerIndex) -> LayerIndex:
        """`index`, which may be donated, with the session in `row` replaced."""
        ranking = self.form.insert(index.ranking, row, piece.ranking)
        keys = self._means.insert(index.keys, row, piece.keys) if self._apart else None
        values: Any = None
        if self.estimate == "chunks":
            values = PlaneSpec(MEAN_BITS).insert(index.values, row, piece.values)
        elif self.estimate == "clusters":
            values = index.values.at[row, :, : piece.values.shape[1]].set(piece.values)
        return LayerIndex(ranking, keys, values)

    def append(
        self,
        index: LayerIndex,
        keys: jax.Array,
        values: jax.Array,
        n_new: jax.Array,
        n_chunks_before: jax.Array,
    ) -> LayerIndex:
        """`index`, which may be donated, with n_new [B] of the chunks [B, K, F, c, D] added."""
        ranking = self.form.append(index.ranking, keys, n_new, n_chunks_before)
        means = None
        if self._apart:
            means = self._means.append(index.keys, keys, n_new, n_chunks_before)
        mean_values: Any = None
        if self.estimate == "chunks":
            mean_values = PlaneSpec(MEAN_BITS).append(
                index.values, representatives(values), n_new, n_chunks_before
            )
        elif self.estimate == "clusters":
            grown = (ranking if means is None else means).cluster_of_chunk
            add = jax.vmap(_add_cluster_values)
            mean_values = add(index.values, grown, representatives(values), n_new, n_chunks_before)
        return LayerIndex(ranking, means, mean_values)

    def rest(
        self, index: LayerIndex, queries: jax.Array, selected: jax.Array, n_chunks: jax.Array
    ) -> Partial | None:
        """Attention to the chunks that are not selected, estimated; None when nothing is.

        queries: [B, H, D]; selected: [B, K, P] int32 chunk ids, -1 for none; n_chunks: [B] int32.
        Returns a partial with leading [B, H], finite for finite keys and values; means are of keys
        and values cut to `MAGNITUDE_LIMIT`.
        """
        if self.estimate == "none":
            return None
        keys = index.ranking if index.keys is None else index.keys
        if self.estimate == "clusters":
            return _cluster_rest(keys, index.values, queries, selected, self._means.chunk_size)
        return self._chunk_rest(keys, index.values, queries, selected, n_chunks)

    def _chunk_rest(
        self,
        keys: PlaneIndex,
        values: Plane,
        queries: jax.Array,
        selected: jax.Array,
        n_chunks: jax.Array,
    ) -> Partial:
        batch, kv_heads, _, total = keys.planes[0].codes.shape
        dim = queries.shape[-1]
        spec = self._means.specs()[0]  # type: ignore[attr-defined]
        grouped = group_queries(queries, kv_heads, dim)
        logits = spec.product(keys.planes[0], grouped) * dim**-0.5
        left = jnp.broadcast_to(
            jnp.arange(total) < n_chunks[:, None, None], (batch, kv_heads, total)
        )
        left = _scatter(left, selected, False)
        counts = jnp.where(left, float(self.form.chunk_size), 0.0)
        return attend_groups(
            logits, counts, lambda weights: PlaneSpec(MEAN_BITS).weighted_sum(values, weights)
        )


def _cluster_rest(
    clusters: Any, values: jax.Array, queries: jax.Array, selected: jax.Array, chunk: int
) -> Partial:
    groups = jnp.take_along_axis(
        clusters.cluster_of_chunk, jnp.maximum(selected, 0), axis=-1, mode="promise_in_bounds"
    )
    taken = _scatter_add(jnp.zeros_like(clusters.sizes), groups, (selected >= 0).astype(jnp.int32))
    counts = ((clusters.sizes - taken) * chunk).astype(jnp.float32)
    group = queries.shape[1] // values.shape[1]
    if why_not_decode(queries.dtype, queries.shape[2], group) is None:
        # XLA would pad a copy of all values, in every step, for the same.
        bounded = jnp.clip(queries, -MAGNITUDE_LIMIT, MAGNITUDE_LIMIT)
        return attend_weighted(bounded, clusters.centroids, values, counts)
    logits = vector_logits(queries, clusters.centroids)

    def weighted_sum(weights: jax.Array) -> jax.Array:
        return jnp.einsum(
            "bkgc,bkcd->bkgd",
            weights.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )

    return attend_groups(logits, counts, weighted_sum)


def _add_cluster_values(
    old: jax.Array, cluster_of_chunk: jax.Array, vectors: jax.Array, n: jax.Array, start: jax.Array
) -> jax.Array:
    """Mean values [K, C, D] of the clusters that n chunks from `start` on make up."""
    count = old.shape[1]
    offset = jnp.arange(vectors.shape[1], dtype=jnp.int32)
    ids = jnp.take(cluster_of_chunk, start + offset, axis=1, mode="clip")
    sums, sizes = totals(vectors, jnp.where(offset < n, ids, count), count)
    new = (sums / jnp.maximum(sizes, 1)[..., None]).astype(old.dtype)
    return jnp.where((sizes > 0)[..., None], new, old)


def _scatter(table: jax.Array, at: jax.Array, value: bool) -> jax.Array:
    """table[b, k, at[b, k, i]] = value; negative indices write nothing."""
    return table.reshape(-1).at[_flat(table, at)].set(value, mode="drop").reshape(table.shape)


def _scatter_add(table: jax.Array, at: jax.Array, values: jax.Array) -> jax.Array:
    flat = table.reshape(-1).at[_flat(table, at)].add(values.reshape(-1), mode="drop")
    return flat.reshape(table.shape)


def _flat(table: jax.Array, at: jax.Array) -> jax.Array:
    width = table.shape[-1]
    rows = table.size // max(width, 1)
    base = jnp.arange(rows, dtype=jnp.int32).reshape(*table.shape[:-1], 1) * width
    return jnp.where(at < 0, table.size, base + at).reshape(-1)
