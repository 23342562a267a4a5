"""Selection as Triton kernels: bisection for the threshold, then a running count for the places.

One program holds a segment of a row in its registers, halves the range of the scores' int32 images
until as many are above as are wanted, and writes the ids of those at their running count. A row of
several segments takes rounds: the best P of each segment, then the best P of what is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kvdrive_jax.pallas.common import places, tile, triton_call
from kvdrive_jax.pallas.selection.reference import LOWEST, between, ordered

HIGHEST = -(LOWEST + 1)
# Counts of chunks above and at the threshold share an int32 while they are added up.
_SHARED = 16
WIDEST = 1 << 14
"""Most scores that one program looks at at a time: 32 registers of each of 512 threads."""


def warps_for(width: int) -> int:
    """So many that a thread holds 32 scores."""
    return max(1, width // 1024)


def _threshold(
    count_from: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array, target: jax.Array
) -> jax.Array:
    """The largest t in [low, high) with count_from(t) >= target, or any with exactly target."""

    def unsettled(bounds: tuple[jax.Array, jax.Array]) -> jax.Array:
        low, high = bounds
        return high - 1 > low

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = between(low, high)
        count = count_from(middle)
        return (
            jnp.where(count >= target, middle, low),
            jnp.where(count == target, middle + 1, jnp.where(count > target, high, middle)),
        )

    return lax.while_loop(unsettled, halve, (low, high))[0]


def _over(tiles: int, step: Callable[[Any, Any], Any], start: Any) -> Any:
    """`step` over all tiles of a row; without a loop where there is one."""
    return step(0, start) if tiles == 1 else lax.fori_loop(0, tiles, step, start)


def _emit(
    keys: jax.Array,
    ids: jax.Array,
    threshold: jax.Array,
    need: jax.Array,
    before: tuple[jax.Array, jax.Array],
    outs: list[tuple[Any, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
    """Writes what is selected of one tile at its places; `before`: above and at the threshold."""
    above, level = keys > threshold, keys == threshold
    marks = above.astype(jnp.int32) + (level.astype(jnp.int32) << _SHARED)
    running = jnp.cumsum(marks)
    n_above = (running & ((1 << _SHARED) - 1)) + before[0]
    n_level = (running >> _SHARED) + before[1]
    place = n_above + jnp.minimum(n_level, need) - 1
    for ref, values in outs:
        count = ref.shape[-1]
        kept = (above | (level & (n_level <= need))) & (place < count)
        plt.store(ref.at[jnp.where(kept, place, count)], values, mask=kept)
    total = marks.sum()
    return before[0] + (total & ((1 << _SHARED) - 1)), before[1] + (total >> _SHARED)


def _fill(ref: Any, filled: jax.Array) -> None:
    count = ref.shape[-1]
    at = jnp.arange(tile(count), dtype=jnp.int32)
    plt.store(
        ref.at[places(0, at.shape[0])],
        jnp.full(at.shape, -1, jnp.int32),
        mask=(at >= filled) & (at < count),
    )


@dataclass(frozen=True)
class Round:
    """What is static about one round.

    entries: per row; count: P; width: entries per tile; tiles: per program; listed: whether each
    entry has an id of its own, -1 for none, instead of its place; last: whether no round follows,
    and so no scores are needed.
    """

    entries: int
    count: int
    width: int
    tiles: int
    listed: bool
    last: bool

    @property
    def step(self) -> int:
        """Entries written at a time: places and addresses take more registers than keys."""
        return min(self.width, WIDEST // 2)

    @property
    def segments(self) -> int:
        """Programs per row."""
        return pl.cdiv(self.entries, self.width * self.tiles)


def rounds_of(entries: int, count: int, segment: int) -> list[Round]:
    """The rounds that leave `count` of `entries` per row, with tiles of up to `segment` scores."""
    found: list[Round] = []
    # A round must at least halve what there is, or it is not worth its launch.
    while entries > segment and 2 * count <= segment:
        found.append(Round(entries, count, segment, 1, bool(found), False))
        entries = found[-1].segments * count
    width = min(tile(entries, 16), segment)
    found.append(Round(entries, count, width, pl.cdiv(entries, width), bool(found), True))
    return found


def _chunks_body(
    plan: Round, scores_ref: Any, valid_ref: Any, limit_ref: Any, out_ref: Any, *more: Any
) -> None:
    first = pl.program_id(2) * (plan.width * plan.tiles)
    n_chunks = None if plan.listed else valid_ref[pl.program_id(0)]

    def read(i: Any, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Scores, ids, and keys of one tile of `width`."""
        start = first + i * width
        ids = start + jnp.arange(width, dtype=jnp.int32)
        inside = ids < plan.entries
        span = pl.ds(start, width)
        scores = plt.load(scores_ref.at[span], mask=inside, other=0.0)
        if plan.listed:
            ids = plt.load(valid_ref.at[span], mask=inside, other=-1)
            valid = ids >= 0
        else:
            valid = inside & (ids < n_chunks)
        return scores, ids, jnp.where(valid, ordered(scores), LOWEST)

    # Keys alone are held; what is written is read again.
    held = read(0, plan.width)[2] if plan.tiles == 1 else None

    def keys_of(i: Any) -> jax.Array:
        return read(i, plan.width)[2] if held is None else held

    def survey(i: Any, so_far: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        keys = keys_of(i)
        valid = keys > LOWEST
        return (
            jnp.minimum(so_far[0], jnp.where(valid, keys, HIGHEST).min()),
            jnp.maximum(so_far[1], keys.max()),
            so_far[2] + valid.astype(jnp.int32).sum(),
        )

    def count_if(test: Callable[[jax.Array], jax.Array]) -> jax.Array:
        def add(i: Any, total: jax.Array) -> jax.Array:
            return total + test(keys_of(i)).astype(jnp.int32).sum()

        counted: jax.Array = _over(plan.tiles, add, jnp.int32(0))
        return counted

    start = (jnp.int32(HIGHEST), jnp.int32(LOWEST), jnp.int32(0))
    low, high, valid = _over(plan.tiles, survey, start)
    target = jnp.minimum(valid, plan.count)
    if plan.last:
        target = jnp.minimum(target, limit_ref[pl.program_id(0), pl.program_id(1)])
    threshold = _threshold(lambda t: count_if(lambda keys: keys >= t), low, high + 1, target)
    need = target - count_if(lambda keys: keys > threshold)

    def emit(i: Any, before: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        scores, ids, keys = read(i, plan.step)
        outs = [(out_ref, ids), *((ref, scores) for ref in more)]
        return _emit(keys, ids, threshold, need, before, outs)

    steps = plan.tiles * plan.width // plan.step
    _over(steps, emit, (jnp.int32(0), jnp.int32(0)))
    _fill(out_ref, target)


def select_chunks(
    scores: jax.Array,
    n_chunks: jax.Array,
    limit: jax.Array,
    count: int,
    *,
    segment: int,
    interpret: bool,
) -> jax.Array:
    """[B, K, N] float32, [B] and [B, K] int32 -> [B, K, P] int32 in ascending order, -1 last."""
    batch, kv_heads, chunks = scores.shape
    valid = n_chunks
    for plan in rounds_of(chunks, count, segment):
        row = pl.BlockSpec((None, None, plan.entries), lambda b, k, i: (b, k, 0))
        out = pl.BlockSpec((None, None, None, count), lambda b, k, i: (b, k, i, 0))
        shape = (batch, kv_heads, plan.segments, count)
        dtypes = [jnp.int32] if plan.last else [jnp.int32, jnp.float32]
        outs = triton_call(
            lambda *refs, plan=plan: _chunks_body(plan, *refs),
            out_shape=[jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes],
            grid=(batch, kv_heads, plan.segments),
            in_specs=[row, row if plan.listed else pl.BlockSpec(), pl.BlockSpec()],
            out_specs=[out] * len(dtypes),
            num_warps=warps_for(plan.width),
            num_stages=1,
            interpret=interpret,
            name="select_chunks",
        )(scores, valid, limit)
        valid = outs[0].reshape(batch, kv_heads, -1)
        scores = valid if plan.last else outs[1].reshape(batch, kv_heads, -1)
    return valid


@dataclass(frozen=True)
class Expansion:
    """What is static about `select_clusters`: C, N and P, scores per tile, chunks per tile."""

    clusters: int
    chunks: int
    count: int
    width: int
    chunk_width: int


def _clusters_body(
    plan: Expansion, scores_ref: Any, sizes_ref: Any, members_ref: Any, valid_ref: Any, out_ref: Any
) -> None:
    tiles = pl.cdiv(plan.clusters, plan.width)
    n_chunks = jnp.minimum(valid_ref[pl.program_id(0)], plan.chunks)

    def read(i: Any) -> tuple[jax.Array, jax.Array]:
        """Keys and sizes of one tile of clusters."""
        start = i * plan.width
        inside = start + jnp.arange(plan.width, dtype=jnp.int32) < plan.clusters
        span = places(start, plan.width)
        sizes = plt.load(sizes_ref.at[span], mask=inside, other=0)
        keys = ordered(plt.load(scores_ref.at[span], mask=inside, other=0.0))
        return jnp.where(sizes > 0, keys, LOWEST), sizes

    held = read(0) if tiles == 1 else None

    def survey(i: Any, so_far: tuple[Any, Any]) -> tuple[Any, Any]:
        keys, _ = read(i) if held is None else held
        lowest = jnp.where(keys > LOWEST, keys, HIGHEST).min()
        return jnp.minimum(so_far[0], lowest), jnp.maximum(so_far[1], keys.max())

    def chunks_if(test: Callable[[jax.Array], jax.Array]) -> jax.Array:
        def add(i: Any, total: jax.Array) -> jax.Array:
            keys, sizes = read(i) if held is None else held
            return total + jnp.where(test(keys), sizes, 0).sum()

        counted: jax.Array = _over(tiles, add, jnp.int32(0))
        return counted

    low, high = _over(tiles, survey, (jnp.int32(HIGHEST), jnp.int32(LOWEST)))
    target = jnp.minimum(n_chunks, plan.count)
    threshold = _threshold(lambda t: chunks_if(lambda keys: keys >= t), low, high + 1, target)
    need = target - chunks_if(lambda keys: keys > threshold)

    def emit(i: Any, before: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start = i * plan.chunk_width
        ids = start + jnp.arange(plan.chunk_width, dtype=jnp.int32)
        inside = ids < plan.chunks
        cluster = plt.load(members_ref.at[pl.ds(start, plan.chunk_width)], mask=inside, other=0)
        scores = plt.load(scores_ref.at[cluster], mask=inside, other=0.0)
        keys = jnp.where(ids < n_chunks, ordered(scores), LOWEST)
        return _emit(keys, ids, threshold, need, before, [(out_ref, ids)])

    # No further than the session's chunks go.
    tiles_used = lax.div(n_chunks + plan.chunk_width - 1, plan.chunk_width)
    lax.fori_loop(0, tiles_used, emit, (jnp.int32(0), jnp.int32(0)))
    _fill(out_ref, target)


def select_clusters(
    scores: jax.Array,
    sizes: jax.Array,
    cluster_of_chunk: jax.Array,
    n_chunks: jax.Array,
    count: int,
    *,
    segment: int,
    chunk_width: int,
    interpret: bool,
) -> jax.Array:
    """[B, K, C] float32 and int32, [B, K, N] int32, [B] int32 -> [B, K, P] int32, ascending."""
    batch, kv_heads, clusters = scores.shape
    chunks = cluster_of_chunk.shape[-1]
    width = min(tile(clusters, 16), segment)
    plan = Expansion(clusters, chunks, count, width, min(tile(chunks, 16), chunk_width))

    def row(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, size), lambda b, k: (b, k, 0))

    ids: jax.Array = triton_call(
        lambda *refs: _clusters_body(plan, *refs),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, count), jnp.int32),
        grid=(batch, kv_heads),
        in_specs=[row(clusters), row(clusters), row(chunks), pl.BlockSpec()],
        out_specs=row(count),
        num_warps=warps_for(max(width, plan.chunk_width)),
        num_stages=1,
        interpret=interpret,
        name="select_clusters",
    )(scores, sizes, cluster_of_chunk, n_chunks)
    return ids
