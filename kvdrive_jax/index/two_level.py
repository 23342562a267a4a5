"""Two-level scanning: coarse moments pick a share of the chunks, fine moments rank those.

An index is read in every step, whole. Here spans of consecutive chunks have moments of their own,
a sixteenth of the bytes; a step reads all of them, takes the best one in so many spans, and reads
the fine index of those only. What is not scanned ranks below everything that is, by its span.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvdrive_jax.config import GroupRule
from kvdrive_jax.index.moments import MomentsForm
from kvdrive_jax.index.planes import PlaneIndex
from kvdrive_jax.index.quantise import Plane
from kvdrive_jax.pallas.scoring.reference import combine_group
from kvdrive_jax.pallas.selection import select_chunks

SPAN = 16
"""Chunks per span."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TwoLevelIndex:
    """The index of one layer: of chunks, in whole spans, and of spans; `chunks` is N. A piece, of
    one session, has no B."""

    fine: PlaneIndex
    coarse: PlaneIndex
    chunks: int = field(metadata={"static": True})


@dataclass(frozen=True)
class TwoLevelForm:
    """Moments over chunks, of which a share is read per step; hashable.

    Attributes:
        fine: the moments of chunks.
        one_in: of so many spans, one is scanned per step; at least 1.
    """

    fine: MomentsForm
    one_in: int = 4

    def __post_init__(self) -> None:
        if self.one_in < 1:
            raise ValueError(f"one_in must be at least 1, got {self.one_in}")
        if self.fine.chunk_size == 1:
            raise ValueError(
                f"scan_one_in = {self.one_in} needs a chunk_size of at least 2 tokens, got 1"
            )

    @property
    def name(self) -> str:
        """As `--index` has it."""
        return "moments"

    @property
    def chunk_size(self) -> int:
        """c, tokens per chunk."""
        return self.fine.chunk_size

    def spans(self, chunks: int) -> int:
        """Spans that hold so many chunks."""
        return -(-chunks // SPAN)

    def scanned(self, spans: Any) -> Any:
        """How many of so many spans a step scans; at least one, if there is one."""
        return (spans + self.one_in - 1) // self.one_in

    def cluster_capacity(self, chunk_capacity: int, flush_events: int, flush_chunks: int) -> int:
        """Nothing is grouped: as many as chunks."""
        return chunk_capacity

    def _room(self, chunks: int) -> int:
        return self.spans(chunks) * SPAN

    def nbytes(
        self, batch: int, kv_heads: int, head_dim: int, chunk_capacity: int, cluster_capacity: int
    ) -> int:
        """Bytes of one layer's index in HBM."""
        room, spans = self._room(chunk_capacity), self.spans(chunk_capacity)
        fine = self.fine.nbytes(batch, kv_heads, head_dim, room, cluster_capacity)
        return fine + self.fine.nbytes(batch, kv_heads, head_dim, spans, cluster_capacity)

    def bytes_per_token(self, head_dim: int) -> float:
        """Bytes of index per token and kv head."""
        return self.fine.bytes_per_token(head_dim) * (1 + 1 / SPAN)

    def bytes_scanned(self, head_dim: int, n_chunks: int) -> int:
        """Bytes that one step reads per kv head."""
        coarse = self.fine.bytes_scanned(head_dim, self.spans(n_chunks))
        return coarse + self.fine.bytes_scanned(head_dim, self.scanned(self.spans(n_chunks)) * SPAN)

    def empty(
        self, batch: int, kv_heads: int, head_dim: int, chunk_capacity: int, cluster_capacity: int
    ) -> TwoLevelIndex:
        """An index of B sessions without chunks."""
        sizes = (batch, kv_heads, head_dim)
        return TwoLevelIndex(
            self.fine.empty(*sizes, self._room(chunk_capacity), cluster_capacity),
            self.fine.empty(*sizes, self.spans(chunk_capacity), cluster_capacity),
            chunk_capacity,
        )

    def build(self, keys: jax.Array, n_chunks: jax.Array) -> TwoLevelIndex:
        """A piece from the chunks [K, N, c, D] of a prompt, of which n_chunks (int32) are real."""
        chunks = keys.shape[1]
        padded = jnp.pad(keys, [(0, 0), (0, self._room(chunks) - chunks), (0, 0), (0, 0)])
        mean, deviation = self.fine.vectors(padded)
        pooled = self._pool(mean, deviation, n_chunks - jnp.arange(self.spans(chunks)) * SPAN)
        return TwoLevelIndex(
            self.fine.build(padded, n_chunks),
            self.fine.piece(pooled, (n_chunks + SPAN - 1) // SPAN),
            chunks,
        )

    def insert(
        self, index: TwoLevelIndex, row: jax.Array | int, piece: TwoLevelIndex
    ) -> TwoLevelIndex:
        """`index`, which may be donated, with the session in `row` replaced."""
        return TwoLevelIndex(
            self.fine.insert(index.fine, row, piece.fine),
            self.fine.insert(index.coarse, row, piece.coarse),
            index.chunks,
        )

    def append(
        self, index: TwoLevelIndex, keys: jax.Array, n_new: jax.Array, n_chunks_before: jax.Array
    ) -> TwoLevelIndex:
        """`index`, which may be donated, with n_new [B] of the chunks [B, K, F, c, D] added.

        The spans that grow are pooled again, from the fine index.
        """
        fine = self.fine.append(index.fine, keys, n_new, n_chunks_before)
        after = n_chunks_before + n_new
        total = index.coarse.planes[0].codes.shape[-1]
        touched = min(total, self.spans(keys.shape[2]) + 1)
        first = jnp.minimum(n_chunks_before // SPAN, total - touched)

        def pooled(
            planes: tuple[Plane, ...], first: jax.Array, after: jax.Array
        ) -> list[jax.Array]:
            parts = [_window(plane, first * SPAN, touched * SPAN) for plane in planes]
            mean, deviation = self.fine.restored(tuple(parts))
            left = after - (first + jnp.arange(touched)) * SPAN
            return list(self._pool(mean, deviation, left))

        vectors = jax.vmap(pooled)(fine.planes, first, after)
        grown = (after + SPAN - 1) // SPAN - first
        written = jnp.where(n_new > 0, jnp.maximum(grown, 0), 0)
        coarse = self.fine.append_vectors(index.coarse, vectors, written, first)
        return TwoLevelIndex(fine, coarse, index.chunks)

    def scores(
        self, index: TwoLevelIndex, queries: jax.Array, n_chunks: jax.Array, rule: GroupRule
    ) -> jax.Array:
        """As `IndexForm.scores`; what is not scanned ranks below what is."""
        fine, coarse = index.fine.planes, index.coarse.planes
        batch, kv_heads, _, total = fine[0].codes.shape
        if not total:
            return jnp.zeros((batch, kv_heads, 0), jnp.float32)
        spans = total // SPAN
        in_span = jnp.clip(n_chunks[:, None] - jnp.arange(spans) * SPAN, 0, SPAN)  # [B, spans]
        real = jnp.broadcast_to(in_span[:, None] > 0, (batch, kv_heads, spans))
        recipe = replace(self.fine.recipe(), chunk_size=self.chunk_size * SPAN)
        held = (n_chunks + SPAN - 1) // SPAN
        by_span = self.fine.score(coarse, queries, held, rule, recipe)
        taken = self.scanned(spans)
        # As many as the session's own length asks for, whatever room its neighbours need.
        own = jnp.broadcast_to(self.scanned(held)[:, None], (batch, kv_heads))
        best = select_chunks(by_span, held, taken, limit=own)
        picked = tuple(_pick(plane, jnp.maximum(best, 0)) for plane in fine)
        everything = jnp.full((batch,), taken * SPAN, jnp.int32)
        logits = self.fine.score(picked, queries, everything, None)
        ids = (best[..., None] * SPAN + jnp.arange(SPAN)).reshape(batch, kv_heads, -1)
        present = (ids < n_chunks[:, None, None]) & (ids >= 0)
        ranked = combine_group(jnp.where(present[:, :, None], logits, 0.0), present, rule)
        # Moved so far down that the best of the rest is below the worst that was scanned.
        worst = jnp.where(present, ranked, jnp.inf).min(axis=-1, keepdims=True)
        worst = jnp.where(jnp.isfinite(worst), worst, 0.0)
        above = by_span.max(axis=-1, keepdims=True) - worst
        lower = jnp.maximum(above, 0.0) + jnp.maximum(1.0, 1e-5 * jnp.abs(worst))
        rest = jnp.repeat(jnp.where(real, by_span - lower, 0.0), SPAN, axis=-1)
        chunk = jnp.arange(total, dtype=jnp.int32)
        rest = jnp.where(chunk < n_chunks[:, None, None], rest, -jnp.inf)
        rows = jnp.arange(batch * kv_heads, dtype=jnp.int32).reshape(batch, kv_heads, 1) * total
        at = jnp.where(present, rows + ids, rest.size).reshape(-1)
        every = rest.reshape(-1).at[at].set(ranked.reshape(-1), mode="drop").reshape(rest.shape)
        return every[..., : index.chunks]

    def _pool(
        self, mean: jax.Array, deviation: jax.Array, left: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Moments of spans from those of chunks [K, spans x SPAN, ...]; `left` [spans], chunks that
        are real from each span's first on."""
        kv_heads, chunks, _ = mean.shape
        spans = chunks // SPAN
        real = (jnp.arange(SPAN) < left[:, None])[None, :, :, None]
        count = jnp.maximum(real.sum(axis=2), 1).astype(jnp.float32)

        def by_span(array: jax.Array) -> jax.Array:
            # What stands where no chunk is may not even be finite.
            split = array.reshape(kv_heads, spans, SPAN, array.shape[-1])
            return jnp.where(real, split, 0.0)

        mean = by_span(mean)
        centre = mean.sum(axis=2) / count
        between = self.fine.shared(jnp.square(mean - centre[:, :, None]))
        within = jnp.square(by_span(deviation))
        variance = jnp.where(real, within + between, 0.0).sum(axis=2) / count
        return centre, jnp.sqrt(variance)


def _window(plane: Plane, start: jax.Array, length: int) -> Plane:
    """`length` chunks of a piece, from `start` on."""
    stretch = plane.stretch
    if stretch.shape[-1]:
        stretch = lax.dynamic_slice_in_dim(stretch, start, length, axis=-1)
    codes = lax.dynamic_slice_in_dim(plane.codes, start, length, axis=-1)
    return Plane(codes, stretch, plane.scale, plane.middle)


def _pick(plane: Plane, spans: jax.Array) -> Plane:
    """The chunks of so many spans [B, K, X], in their order."""

    def gather(array: jax.Array) -> jax.Array:
        by_span = array.reshape(*array.shape[:-1], -1, SPAN)
        at = spans.reshape(*spans.shape[:2], *(1,) * (by_span.ndim - 4), spans.shape[-1], 1)
        found = jnp.take_along_axis(by_span, at, axis=-2, mode="promise_in_bounds")
        return found.reshape(*array.shape[:-1], -1)

    stretch = gather(plane.stretch) if plane.stretch.shape[-1] else plane.stretch
    return Plane(gather(plane.codes), stretch, plane.scale, plane.middle)
