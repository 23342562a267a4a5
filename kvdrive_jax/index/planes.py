"""What the forms that keep vectors of every chunk have in common: all but vectors and scores.

Such a form reduces each chunk's keys to a few vectors (its mean; mean and deviation; ...), keeps
each kind in a plane of its own, and scores every chunk by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kvdrive_jax.config import GroupRule
from kvdrive_jax.index.chunks import MAGNITUDE_LIMIT
from kvdrive_jax.index.quantise import Plane, PlaneSpec
from kvdrive_jax.pallas.scoring import Recipe, score_planes
from kvdrive_jax.pallas.scoring.products import group_queries


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlaneIndex:
    """The index of one layer: one plane per kind of vector. A piece, of one session, has no B."""

    planes: tuple[Plane, ...]


@dataclass(frozen=True)
class PlanesForm:
    """Base of the forms that score each chunk by vectors of its own; hashable.

    Attributes:
        chunk_size: tokens per chunk.
        bits: of the vectors, one of `quantise.BITS`; 16 is bfloat16.
    """

    chunk_size: int = 4
    bits: int = 16

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1 token, got {self.chunk_size}")
        self.specs()  # refuses unknown bits

    # What a form says

    def specs(self) -> tuple[PlaneSpec, ...]:
        """How each of its planes is stored."""
        raise NotImplementedError

    def channels(self, head_dim: int) -> tuple[int, ...]:
        """Channels of each plane."""
        raise NotImplementedError

    def vectors(self, keys: jax.Array) -> tuple[jax.Array, ...]:
        """keys [..., N, c, D] float32 -> the vectors [..., N, C] float32 of each plane."""
        raise NotImplementedError

    def recipe(self) -> Recipe:
        """How the planes make a logit."""
        raise NotImplementedError

    def weights(self, queries: jax.Array) -> jax.Array | None:
        """What multiplies the channels of the second plane, for queries [B, K, G, D] float32."""
        return None

    # What follows from it

    def cluster_capacity(self, chunk_capacity: int, flush_events: int, flush_chunks: int) -> int:
        """Nothing is grouped: as many as chunks."""
        return chunk_capacity

    def nbytes(
        self, batch: int, kv_heads: int, head_dim: int, chunk_capacity: int, cluster_capacity: int
    ) -> int:
        """Bytes of one layer's index in HBM."""
        planes = zip(self.specs(), self.channels(head_dim), strict=True)
        per_head = sum(spec.nbytes(channels, chunk_capacity) for spec, channels in planes)
        return batch * kv_heads * per_head

    def bytes_per_token(self, head_dim: int) -> float:
        """Bytes of index per token and kv head."""
        planes = zip(self.specs(), self.channels(head_dim), strict=True)
        return sum(spec.bytes_per_chunk(channels) for spec, channels in planes) / self.chunk_size

    def bytes_scanned(self, head_dim: int, n_chunks: int) -> int:
        """Bytes that one step reads per kv head."""
        return round(self.bytes_per_token(head_dim) * self.chunk_size * n_chunks)

    def empty(
        self, batch: int, kv_heads: int, head_dim: int, chunk_capacity: int, cluster_capacity: int
    ) -> PlaneIndex:
        """An index of B sessions without chunks."""
        return PlaneIndex(
            tuple(
                spec.empty(batch, kv_heads, channels, chunk_capacity)
                for spec, channels in zip(self.specs(), self.channels(head_dim), strict=True)
            )
        )

    def build(self, keys: jax.Array, n_chunks: jax.Array) -> PlaneIndex:
        """Indexes one session's prompt in one layer.

        Args:
            keys: [K, N, c, D] post-RoPE keys of the chunks; padding may hold any finite value and
                changes nothing.
            n_chunks: int32 scalar, the real ones.

        Returns:
            A piece with room for N chunks.
        """
        return self.piece(self._checked(keys, 4), n_chunks)

    def piece(self, vectors: Sequence[jax.Array], count: jax.Array) -> PlaneIndex:
        """A piece from vectors [K, N, C] float32 of each plane, of which `count` are real."""
        return PlaneIndex(
            tuple(
                spec.quantise(part, *spec.ranges(part, count))
                for spec, part in zip(self.specs(), vectors, strict=True)
            )
        )

    def insert(self, index: PlaneIndex, row: jax.Array | int, piece: PlaneIndex) -> PlaneIndex:
        """Replaces the index of one session. `index` may be donated; `piece` may be smaller."""
        return PlaneIndex(
            tuple(
                spec.insert(plane, row, part)
                for spec, plane, part in zip(self.specs(), index.planes, piece.planes, strict=True)
            )
        )

    def append(
        self, index: PlaneIndex, keys: jax.Array, n_new: jax.Array, n_chunks_before: jax.Array
    ) -> PlaneIndex:
        """Adds the chunks of a flush; what is there stays as it is.

        Args:
            index: may be donated. What does not fit its capacity would be lost.
            keys: [B, K, F, c, D].
            n_new: [B] int32, real ones among the F; 0 leaves a session's index as it is.
            n_chunks_before: [B] int32, the id of the first new chunk.
        """
        return self.append_vectors(index, self._checked(keys, 5), n_new, n_chunks_before)

    def append_vectors(
        self, index: PlaneIndex, vectors: Sequence[jax.Array], n_new: jax.Array, n_before: jax.Array
    ) -> PlaneIndex:
        """As `append`, from vectors [B, K, F, C] float32 of each plane."""
        return PlaneIndex(
            tuple(
                spec.append(plane, part, n_new, n_before)
                for spec, plane, part in zip(self.specs(), index.planes, vectors, strict=True)
            )
        )

    def restored(self, planes: tuple[Plane, ...]) -> tuple[jax.Array, ...]:
        """The vectors [..., N, C] float32 that planes hold."""
        return tuple(spec.restore(plane) for spec, plane in zip(self.specs(), planes, strict=True))

    def scores(
        self, index: PlaneIndex, queries: jax.Array, n_chunks: jax.Array, rule: GroupRule
    ) -> jax.Array:
        """Ranks every chunk.

        Args:
            index: of B sessions.
            queries: [B, H, D], post-RoPE, unscaled.
            n_chunks: [B] int32.
            rule: how the G = H / K query heads of a kv head are combined (see `combine_group`).

        Returns:
            [B, K, N] float32, finite for chunks a session has, -inf for padding.
        """
        return self.score(index.planes, queries, n_chunks, rule)

    def score(
        self,
        planes: tuple[Plane, ...],
        queries: jax.Array,
        n_chunks: jax.Array,
        rule: GroupRule | None,
        recipe: Recipe | None = None,
    ) -> jax.Array:
        """As `scores`, or without a rule the logits [B, K, G, N] of each head.

        recipe: for planes whose vectors stand for more keys than a chunk has.
        """
        first, *others = planes
        grouped = group_queries(queries, first.codes.shape[1], queries.shape[-1])
        second = others[0] if others else None
        weights = self.weights(grouped) if others else None
        recipe = recipe or self.recipe()
        return score_planes(queries, first, second, weights, n_chunks, recipe, rule)

    def _checked(self, keys: jax.Array, ndim: int) -> tuple[jax.Array, ...]:
        if keys.ndim != ndim or keys.shape[-2] != self.chunk_size:
            lead = "B, K" if ndim == 5 else "K"
            raise ValueError(
                f"keys must be [{lead}, N, {self.chunk_size}, D], got shape {keys.shape}"
            )
        return self.vectors(jnp.clip(keys.astype(jnp.float32), -MAGNITUDE_LIMIT, MAGNITUDE_LIMIT))
