"""Extents: where a page lies on SSD, and which extents a set of pages needs. Pure arithmetic.

A segment holds the pages of one (layer, kv head) as a row of extents of ``pages_per_extent``
pages. The first ``prompt_extents`` of them hold the prompt's pages in cluster order and are packed
``shard_extents`` to a file. Behind them come ``pieces`` places of ``piece_extents`` extents for
flushed chunks; one file holds one place of all kv heads of a layer. A page's *position* is its
extent times ``pages_per_extent`` plus its place in the extent; it fits int32 (checked once, here),
and whatever is multiplied by bytes is int64 or a Python integer.

    pages_per_extent 4, prompt_extents 3, piece_extents 2, pieces 1:
    extent     0        1        2        3        4
    position   0 1 2 3  4 5 6 7  8 9 . .  12 13 .  16 17 .       (a piece starts at position 12)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvdrive_jax.tiers.pages import Ids, Wide

SHARD_BYTES = 4 << 20
"""A file of the prompt holds at most this much: it is written in one go from one buffer."""

HASH_BYTES = 8
"""Memory for the hash of an extent."""
DISK_BLOCK = 4096
"""What a file system rounds file sizes up to."""

INT32_LIMIT = 2**31


def ceil_div(value: int, by: int) -> int:
    """``value / by`` rounded up."""
    return -(-value // by)


@dataclass(frozen=True, kw_only=True)
class ExtentLayout:
    """Where pages lie in a segment. All counts are per segment unless said otherwise."""

    page_bytes: int
    pages_per_extent: int
    prompt_extents: int
    shard_extents: int
    piece_extents: int
    pieces: int

    @classmethod
    def plan(
        cls,
        *,
        page_bytes: int,
        extent_bytes: int,
        chunk_capacity: int,
        prompt_chunks: int | None,
        piece_chunks: int,
    ) -> ExtentLayout:
        """Layout for up to ``chunk_capacity`` chunks, ``prompt_chunks`` of them from the prompt
        (None: not known, any share), the others appended ``piece_chunks`` at a time.

        Extents are rounded down to whole pages, at least one, and hold no more than there can be.
        Raises ValueError when positions
        would not fit int32.
        """
        per_extent = max(1, min(extent_bytes // page_bytes, chunk_capacity))
        prompt = chunk_capacity if prompt_chunks is None else prompt_chunks
        appended = chunk_capacity if prompt_chunks is None else chunk_capacity - prompt_chunks
        prompt_extents = max(1, ceil_div(prompt, per_extent))
        # Files of one size, which are written whole: the last one is not to be mostly empty.
        most = max(1, min(prompt_extents, SHARD_BYTES // (per_extent * page_bytes)))
        shard_extents = ceil_div(prompt_extents, ceil_div(prompt_extents, most))
        layout = cls(
            page_bytes=page_bytes,
            pages_per_extent=per_extent,
            prompt_extents=prompt_extents,
            shard_extents=shard_extents,
            piece_extents=ceil_div(piece_chunks, per_extent),
            pieces=ceil_div(appended, piece_chunks),
        )
        if layout.extents * per_extent >= INT32_LIMIT:
            raise ValueError(
                f"chunk_capacity {chunk_capacity:,} needs {layout.extents:,} extents of "
                f"{per_extent} pages for one (layer, kv head), over the limit of 2**31 positions; "
                "raise chunk_size"
            )
        return layout

    @property
    def extent_bytes(self) -> int:
        """Bytes of one extent."""
        return self.pages_per_extent * self.page_bytes

    @property
    def extents(self) -> int:
        """Extents of a segment, pieces included."""
        return self.prompt_extents + self.pieces * self.piece_extents

    def piece_extent(self, piece: int) -> int:
        """First extent of a piece."""
        return self.prompt_extents + piece * self.piece_extents

    def disk_bytes(
        self, layers: int, kv_heads: int, chunk_capacity: int, prompt_chunks: int | None
    ) -> int:
        """Most bytes that all segments can take on disk, file-system rounding included."""
        files = ceil_div(self.prompt_extents, self.shard_extents)
        segment = files * file_bytes(self.shard_extents * self.extent_bytes)
        piece = file_bytes(kv_heads * self.piece_extents * self.extent_bytes)
        prompt_bytes, piece_bytes = layers * kv_heads * segment, layers * self.pieces * piece
        if prompt_chunks is None and chunk_capacity:
            # Prompt and pieces share the capacity: the total is at most the larger of all prompt
            # and all pieces, plus what a cut between the two leaves unused.
            cut = layers * (piece + kv_heads * file_bytes(self.shard_extents * self.extent_bytes))
            return max(prompt_bytes, piece_bytes) + cut
        return prompt_bytes + piece_bytes

    def hash_bytes(self, layers: int, kv_heads: int) -> int:
        """Bytes of memory for the hashes of all extents."""
        return layers * kv_heads * self.extents * HASH_BYTES


def file_bytes(content: int) -> int:
    """Bytes on disk of a file with so much in it."""
    return ceil_div(content, DISK_BLOCK) * DISK_BLOCK


@dataclass(frozen=True, kw_only=True)
class ReadPlan:
    """Which extents hold M wanted pages of one layer, each extent once, in the order of the disk.

    Attributes:
        heads, extents: int64 [n], sorted: prompt extents first, then those of pieces, each by
            head and extent, so that neighbours on disk are neighbours here.
        order: int64 [M], wanted pages in the order of the extents that hold them.
        place: int64 [M], for ``order[i]``: its page if the n extents lay behind each other.
    """

    heads: Wide
    extents: Wide
    order: Wide
    place: Wide


def stored_extents(layout: ExtentLayout, positions: Ids) -> tuple[Wide, Wide]:
    """(head, extent) [n] of every extent that holds one of the pages at ``positions`` [K, N]."""
    extents = [np.unique(row.astype(np.int64) // layout.pages_per_extent) for row in positions]
    heads = np.repeat(np.arange(len(positions), dtype=np.int64), [len(row) for row in extents])
    return heads, np.concatenate(extents)


def plan_read(
    layout: ExtentLayout,
    heads: Ids,
    positions: Ids,
    kv_heads: int,
    also: tuple[Wide, Wide] | None = None,
) -> ReadPlan:
    """The extents that hold the pages at ``positions`` [M] of ``heads`` [M] (kv head ids).

    also: (head, extent) of more extents to read, wanted or not.
    """
    per_extent = layout.pages_per_extent
    extent, offset = np.divmod(positions.astype(np.int64), per_extent)
    head = heads.astype(np.int64)
    m = len(head)
    if also is not None:
        head, extent = np.concatenate([head, also[0]]), np.concatenate([extent, also[1]])
    tail = layout.extents - layout.prompt_extents
    key = head * np.int64(layout.prompt_extents) + extent
    if tail and int(extent.max(initial=0)) >= layout.prompt_extents:
        behind = extent >= layout.prompt_extents
        split = kv_heads * layout.prompt_extents
        late = split + head * np.int64(tail) + (extent - layout.prompt_extents)
        key = np.where(behind, late, key)
    order = np.argsort(key, kind="stable").astype(np.int64, copy=False)
    key = key[order]
    first = np.empty(len(key), np.bool_)
    first[:1] = True
    np.not_equal(key[1:], key[:-1], out=first[1:])
    chosen = order[first]
    which = np.cumsum(first, dtype=np.int64) - 1
    if also is not None:
        wanted = order < m
        order, which = order[wanted], which[wanted]
    return ReadPlan(
        heads=head[chosen],
        extents=extent[chosen],
        order=order,
        place=which * per_extent + offset[order],
    )


def cluster_order(cluster_of_chunk: npt.NDArray[np.integer] | None, n_chunks: int) -> Wide:
    """Chunk ids in the order they are written: by cluster, then by id. int64 [n_chunks]."""
    if cluster_of_chunk is None:
        return np.arange(n_chunks, dtype=np.int64)
    return np.argsort(cluster_of_chunk[:n_chunks], kind="stable").astype(np.int64, copy=False)
