"""The compiled stages of decode: select, write, compute, flush, and the resident layer.

Each is one compiled function for all layers. State is passed in and returned; what a stage
replaces is donated, so nothing is copied between steps. Row r of every array is session r of the
batch; rows of ended sessions have ``n_chunks`` 0 and are carried along unseen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvdrive_jax.config import Attend, GroupRule, Precision
from kvdrive_jax.index.rest import LayerIndex, Retrieval
from kvdrive_jax.index.selection import select
from kvdrive_jax.models.model import ModelDef
from kvdrive_jax.pallas.attention import Partial, attend_step
from kvdrive_jax.pallas.page_codec import decode_pages, encode_pages
from kvdrive_jax.pallas.page_write import write_pages
from kvdrive_jax.pipeline.miss_lists import hand_over
from kvdrive_jax.window.directory import Directory, held_slots, in_window, observe, place, pool_rows
from kvdrive_jax.window.eviction import policy

Leaves = tuple[jax.Array, ...]


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """What the compiled stages are specialised to; hashable.

    selected is P, sink the number of first rows of the near buffer that are never flushed. ranked
    is how many of the best chunks a step tells, 0 for none; likely how many it considers likely to
    be selected next, 0 for none; pages says what pages are kept as in DRAM. speculative: select is
    given the input of the layer before, so that compute makes the token anew.
    """

    model_def: ModelDef
    retrieval: Retrieval
    rule: GroupRule
    selected: int
    sink: int
    chunk_size: int
    eviction: str
    attend: Attend = "selection"
    ranked: int = 0
    likely: int = 0
    pages: Precision = "model"
    speculative: bool = False


class Near(NamedTuple):
    """Sink, local and unflushed tokens of one layer, in order: k, v [B, K, W, D]."""

    k: jax.Array
    v: jax.Array


class Step(NamedTuple):
    """Where every session stands in one step; shared by all layers.

    position: [B] int32, of the token being decoded; n_chunks: [B] int32 (0 for ended sessions);
    near_row: [B] int32, the near row the new token takes; inv_freq: [B, R/2];
    attention_factor: [B].
    """

    position: jax.Array
    n_chunks: jax.Array
    near_row: jax.Array
    inv_freq: jax.Array
    attention_factor: jax.Array


class Token(NamedTuple):
    """The new token in one layer: q [B, H, D]; k, v [B, K, D], post-RoPE.

    It attends to itself from here; ``append_rows`` puts it into the near buffers of all layers at
    the end of the step. (A buffer that is updated and attended to by one program is copied whole,
    several times, by XLA on CPU.)
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array


def _token(spec: StageSpec, leaves: tuple[Any, ...], hidden: jax.Array, step: Step) -> Token:
    layer = spec.model_def.merge_layer(leaves)
    return Token(
        *layer.attention_inputs(hidden, step.position, step.inv_freq, step.attention_factor)
    )


@partial(jax.jit, donate_argnames="buffers")
def append_rows(buffers: list[jax.Array], rows: list[jax.Array], at: jax.Array) -> list[jax.Array]:
    """Each of rows [B, K, D] into its buffer [B, K, T, D], donated, at position at [B]."""
    sessions = jnp.arange(at.shape[0])
    return [
        buffer.at[sessions, :, at].set(row, mode="drop")
        for buffer, row in zip(buffers, rows, strict=True)
    ]


def _attend(
    spec: StageSpec,
    leaves: tuple[Any, ...],
    hidden: jax.Array,
    token: Token,
    step: Step,
    near: Near,
    window: jax.Array,
    slots: jax.Array,
    rest: Partial | None,
) -> jax.Array:
    """Attention over sink, the pages in rows ``slots`` [B, K, P] of the window and local, and what
    is estimated of the rest, then feed-forward."""
    attended = attend_step(
        *token, near.k, near.v, step.near_row, window=window, slots=slots, rest=rest
    )
    return spec.model_def.merge_layer(leaves).after_attention(hidden, attended.astype(hidden.dtype))


class Ranked(NamedTuple):
    """The best chunks of a step, best first: ids [B, K, M] int32, scores [B, K, M] float32, -inf
    for ids that are padding."""

    ids: jax.Array
    scores: jax.Array


class Selected(NamedTuple):
    """Outcome of select: the new token; slots [B, K, P] int32, rows of the window that are attended
    to (-1: none); missing [2, B, K, P] int32: chunk ids that must be fetched (-1: none) and the
    rows they go to; rest: the estimated attention to what is not attended, or None; ranked: what
    ``StageSpec.ranked`` asks for, or None; likely: [B, K, M] int32, those of the best
    ``StageSpec.likely`` chunks that no window holds (-1: none), or None."""

    token: Token
    slots: jax.Array
    missing: jax.Array
    rest: Partial | None
    ranked: Ranked | None
    likely: jax.Array | None


def _score(spec: StageSpec, token: Token, step: Step, index: LayerIndex) -> jax.Array:
    form = spec.retrieval.form
    return form.scores(index.ranking, token.q, step.n_chunks, spec.rule)


def _ranked(spec: StageSpec, scores: jax.Array) -> Ranked | None:
    if not spec.ranked:
        return None
    best, ids = lax.top_k(scores, spec.ranked)
    return Ranked(ids.astype(jnp.int32), best)


@partial(jax.jit, static_argnames="spec", donate_argnames="directory")
def select_stage(
    spec: StageSpec,
    leaves: Leaves,
    hidden: jax.Array,
    step: Step,
    index: LayerIndex,
    directory: Directory,
    ticket: jax.Array | None = None,
) -> tuple[Selected, Directory]:
    """Queries of one layer, the chunks they want, and which of them must be fetched.

    hidden: [B, E], of one micro-batch as everything else; ticket: of ``miss_lists.Callbacks``, to
    which the miss list is handed over. Ties go to the lowest chunk; victims are chosen by
    ``spec.eviction`` (paper 5.1).
    """
    token = _token(spec, leaves, hidden, step)
    scores = _score(spec, token, step, index)
    ids = select(scores, step.n_chunks, spec.selected)
    directory = observe(directory, scores, ids)
    priority = policy(spec.eviction)(directory, scores)
    directory, slots, miss = place(directory, ids, priority)
    rows = pool_rows(directory, slots)
    missing = jnp.stack([jnp.where(miss, ids, -1), jnp.where(miss, rows, -1)])
    if ticket is not None:
        hand_over(ticket, missing)
    attended = ids
    if spec.attend == "resident":
        in_slots, attended = held_slots(directory, slots, ids)
        rows = pool_rows(directory, in_slots)
    rest = spec.retrieval.rest(index, token.q, attended, step.n_chunks)
    likely = None
    if spec.likely:
        best = select(scores, step.n_chunks, spec.likely)
        likely = jnp.where(in_window(directory, best), -1, best)
    return Selected(token, rows, missing, rest, _ranked(spec, scores), likely), directory


def for_dram(pages: jax.Array, precision: Precision) -> jax.Array:
    """Pages [..., 2, c, D] as DRAM keeps them."""
    return pages if precision == "model" else encode_pages(pages, precision)


def from_dram(
    pages: jax.Array, precision: Precision, page_shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """Pages as DRAM keeps them as [..., 2, c, D] of ``dtype``."""
    if precision == "model":
        return pages
    _, chunk_size, head_dim = page_shape
    return decode_pages(pages, precision, chunk_size=chunk_size, head_dim=head_dim, dtype=dtype)


@partial(jax.jit, donate_argnames="window", static_argnames="precision")
def write_stage(
    window: jax.Array, pages: jax.Array, target: jax.Array, precision: Precision = "model"
) -> jax.Array:
    """Fetched pages into their slots.

    window: [B, R, 2, c, D], donated; pages: [M, 2, c, D], or as DRAM keeps them, [M, bytes] uint8;
    target: [M] int32, flat row b R + r, or B R for pages that are none.
    """
    return write_pages(window, from_dram(pages, precision, window.shape[2:], window.dtype), target)


class Attended(NamedTuple):
    """What compute is told of one micro-batch's selection; see `Selected`."""

    token: Token
    slots: jax.Array
    rest: Partial | None


@partial(jax.jit, static_argnames="spec")
def compute_stage(
    spec: StageSpec,
    leaves: Leaves,
    hidden: Sequence[jax.Array],
    selections: Sequence[Attended],
    step: Step,
    near: Near,
    window: jax.Array,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, jax.Array] | None]:
    """Attention over sink, selection and local, then the feed-forward part, of one cohort.

    hidden: [b, E] of each micro-batch, and so are the selections; step, near, window: of the
    cohort. Returns hidden of each micro-batch; and the new tokens' k, v [B, K, D], None where they
    are those of a single selection.
    """
    sizes = [part.shape[0] for part in hidden]
    whole = _joined(hidden)
    if spec.speculative:
        token = _token(spec, leaves, whole, step)
    else:
        token = Token(*map(_joined, zip(*(part.token for part in selections), strict=True)))
    slots = _joined([part.slots for part in selections])
    rests = [part.rest for part in selections if part.rest is not None]
    rest = Partial(*map(_joined, zip(*rests, strict=True))) if rests else None
    whole = _attend(spec, leaves, whole, token, step, near, window, slots, rest)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    parts = tuple(whole[end - size : end] for size, end in zip(sizes, ends, strict=True))
    # What is handed through a program unchanged is copied by it.
    made = spec.speculative or len(selections) > 1
    return parts, (token.k, token.v) if made else None


def _joined(parts: Sequence[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


@partial(jax.jit, static_argnames="spec")
def resident_layer(
    spec: StageSpec,
    leaves: Leaves,
    hidden: jax.Array,
    step: Step,
    near: Near,
    index: LayerIndex,
    window: jax.Array,
    layer: jax.Array,
) -> tuple[jax.Array, Token, Ranked | None]:
    """Select and compute of one layer whose window holds every chunk.

    window: [B, L K N, 2, c, D], of all layers: chunk j of head k in row (layer K + k) N + j.
    layer: int32 scalar.
    """
    return resident_step(spec, leaves, hidden, step, near, index, window, layer)


def resident_step(
    spec: StageSpec,
    leaves: tuple[Any, ...],
    hidden: jax.Array,
    step: Step,
    near: Near,
    index: LayerIndex,
    window: jax.Array,
    layer: jax.Array,
) -> tuple[jax.Array, Token, Ranked | None]:
    """`resident_layer` inside a compiled function; leaves may be ``OneOf``."""
    token = _token(spec, leaves, hidden, step)
    scores = _score(spec, token, step, index)
    kv_heads, chunks = scores.shape[1:]
    if spec.attend == "resident":
        every = jnp.arange(chunks, dtype=jnp.int32)
        ids = jnp.where(every < step.n_chunks[:, None, None], every, -1)
        ids = jnp.broadcast_to(ids, scores.shape)
    else:
        ids = select(scores, step.n_chunks, spec.selected)
    rest = spec.retrieval.rest(index, token.q, ids, step.n_chunks)
    first = (layer * kv_heads + jnp.arange(kv_heads, dtype=jnp.int32)[:, None]) * chunks
    slots = jnp.where(ids < 0, -1, first + ids)
    hidden = _attend(spec, leaves, hidden, token, step, near, window, slots, rest)
    return hidden, token, _ranked(spec, scores)


@partial(jax.jit, static_argnames=("spec", "flush_chunks"), donate_argnames=("near", "indexes"))
def flush_stage(
    spec: StageSpec,
    near: Near,
    indexes: tuple[LayerIndex, ...],
    n_new: jax.Array,
    n_chunks: jax.Array,
    *,
    flush_chunks: int,
) -> tuple[jax.Array, Near, tuple[LayerIndex, ...]]:
    """The oldest chunks of the near buffer as pages, indexed; the rest moves down.

    near: of one cohort; indexes: of its micro-batches, in order; n_new, n_chunks: [B] int32, chunks
    to flush and chunks before. Returns pages [B, K, F, *dram_shape], as ``spec.pages`` says, of
    which the first n_new are valid, the near buffer and the indexes.
    """
    tokens = flush_chunks * spec.chunk_size

    def leave(array: jax.Array) -> jax.Array:
        batch, kv_heads, _, dim = array.shape
        span = array[:, :, spec.sink : spec.sink + tokens]
        return span.reshape(batch, kv_heads, flush_chunks, spec.chunk_size, dim)

    def shift(array: jax.Array) -> jax.Array:
        capacity = array.shape[2]
        rows = jnp.arange(capacity)[None, :]
        source = jnp.where(rows < spec.sink, rows, rows + n_new[:, None] * spec.chunk_size)
        source = jnp.minimum(source, capacity - 1)
        return jnp.take_along_axis(array, source[:, None, :, None], axis=2)

    keys, values = leave(near.k), leave(near.v)
    pages = for_dram(jnp.stack([keys, values], axis=3), spec.pages)
    grown, first = [], 0
    for index in indexes:
        rows = slice(first, first + jax.tree.leaves(index)[0].shape[0])
        grown.append(
            spec.retrieval.append(index, keys[rows], values[rows], n_new[rows], n_chunks[rows])
        )
        first = rows.stop
    return pages, Near(shift(near.k), shift(near.v)), tuple(grown)


@partial(jax.jit, static_argnames="chunks", donate_argnames="window")
def grow_resident(
    window: jax.Array,
    pages: jax.Array,
    n_new: jax.Array,
    n_chunks: jax.Array,
    layer: jax.Array,
    *,
    chunks: int,
) -> jax.Array:
    """Flushed pages of a layer into a window that holds every chunk, as in ``resident_layer``, of
    which each head has ``chunks``."""
    batch, kv_heads, count = pages.shape[:3]
    offset = jnp.arange(count)
    first = (layer * kv_heads + jnp.arange(kv_heads)[:, None]) * chunks
    row = first + (n_chunks[:, None] + offset)[:, None]
    row = jnp.where((offset < n_new[:, None])[:, None], row, window.shape[1])
    return window.at[jnp.arange(batch)[:, None, None], row].set(pages, mode="drop")
