"""The compiled stages of decode: select, write, compute, flush, and the resident layer.

Each is one compiled function for all layers. State is passed in and returned; what a stage
replaces is donated, so nothing is copied between steps. Row r of every array is session r of the
batch; rows of ended sessions have ``n_chunks`` 0 and are carried along unseen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvdrive_jax.config import GroupRule
from kvdrive_jax.index.rest import LayerIndex, Retrieval
from kvdrive_jax.index.selection import select
from kvdrive_jax.models.model import ModelDef
from kvdrive_jax.pallas.attention import Partial, attend_step
from kvdrive_jax.pallas.page_write import write_pages
from kvdrive_jax.window.directory import Directory, place
from kvdrive_jax.window.eviction import lookahead

Leaves = tuple[jax.Array, ...]


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """What the compiled stages are specialised to; hashable.

    selected is P, sink the number of first rows of the near buffer that are never flushed.
    """

    model_def: ModelDef
    retrieval: Retrieval
    rule: GroupRule
    selected: int
    sink: int
    chunk_size: int


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


def _token(spec: StageSpec, leaves: Leaves, hidden: jax.Array, step: Step) -> Token:
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
    leaves: Leaves,
    hidden: jax.Array,
    token: Token,
    step: Step,
    near: Near,
    window: jax.Array,
    slots: jax.Array,
    rest: Partial | None,
) -> jax.Array:
    """Attention over sink, the pages in ``slots`` [B, K, P] and local, and what is estimated
    of the rest, then feed-forward."""
    attended = attend_step(
        *token, near.k, near.v, step.near_row, window=window, slots=slots, rest=rest
    )
    return spec.model_def.merge_layer(leaves).after_attention(hidden, attended.astype(hidden.dtype))


class Selected(NamedTuple):
    """Outcome of select: the new token; slots [B, K, P] int32 (-1: none); missing [2, B, K, P]
    int32: chunk ids that must be fetched (-1: none) and the slots they go to; rest: the estimated
    attention to what is not selected, or None."""

    token: Token
    slots: jax.Array
    missing: jax.Array
    rest: Partial | None


def _select(
    spec: StageSpec, token: Token, step: Step, index: LayerIndex
) -> tuple[jax.Array, jax.Array, Partial | None]:
    """Chunk ids [B, K, P] (-1: none), scores [B, K, N], and the estimate of the rest."""
    retrieval = spec.retrieval
    scores = retrieval.form.scores(index.ranking, token.q, step.n_chunks, spec.rule)
    ids = select(scores, step.n_chunks, spec.selected)
    return ids, scores, retrieval.rest(index, token.q, ids, step.n_chunks)


@partial(jax.jit, static_argnames="spec", donate_argnames="directory")
def select_stage(
    spec: StageSpec,
    leaves: Leaves,
    hidden: jax.Array,
    step: Step,
    index: LayerIndex,
    directory: Directory,
) -> tuple[Selected, Directory]:
    """Queries of one layer, the chunks they want, and which of them must be fetched.

    hidden: [B, E]. Ties go to the lowest chunk; victims are chosen by lookahead (paper 5.1).
    """
    token = _token(spec, leaves, hidden, step)
    ids, scores, rest = _select(spec, token, step, index)
    directory, slots, miss = place(directory, ids, lookahead(directory, scores))
    missing = jnp.stack([jnp.where(miss, ids, -1), jnp.where(miss, slots, -1)])
    return Selected(token, slots, missing, rest), directory


@partial(jax.jit, donate_argnames="window")
def write_stage(window: jax.Array, pages: jax.Array, target: jax.Array) -> jax.Array:
    """Fetched pages into their slots.

    window: [B, K, S, 2, c, D], donated; pages: [M, 2, c, D]; target: [M] int32, flat slot
    (b K + k) S + s, or B K S for rows that hold no page.
    """
    return write_pages(window, pages, target)


@partial(jax.jit, static_argnames="spec")
def compute_stage(
    spec: StageSpec,
    leaves: Leaves,
    hidden: jax.Array,
    selected: Selected,
    step: Step,
    near: Near,
    window: jax.Array,
) -> jax.Array:
    """Attention over sink, selection and local, then the feed-forward part: hidden [B, E]."""
    return _attend(
        spec, leaves, hidden, selected.token, step, near, window, selected.slots, selected.rest
    )


@partial(jax.jit, static_argnames="spec")
def resident_layer(
    spec: StageSpec,
    leaves: Leaves,
    hidden: jax.Array,
    step: Step,
    near: Near,
    index: LayerIndex,
    window: jax.Array,
) -> tuple[jax.Array, Token]:
    """Select and compute of one layer whose window holds every chunk at the slot of its id."""
    token = _token(spec, leaves, hidden, step)
    ids, _, rest = _select(spec, token, step, index)
    return _attend(spec, leaves, hidden, token, step, near, window, ids, rest), token


@partial(jax.jit, static_argnames=("spec", "flush_chunks"), donate_argnames=("near", "index"))
def flush_stage(
    spec: StageSpec,
    near: Near,
    index: LayerIndex,
    n_new: jax.Array,
    n_chunks: jax.Array,
    *,
    flush_chunks: int,
) -> tuple[jax.Array, Near, LayerIndex]:
    """The oldest chunks of the near buffer as pages, indexed; the rest moves down.

    n_new, n_chunks: [B] int32, chunks to flush and chunks before. Returns pages
    [B, K, F, 2, c, D], of which the first n_new are valid, the near buffer and the index.
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
    pages = jnp.stack([keys, values], axis=3)
    index = spec.retrieval.append(index, keys, values, n_new, n_chunks)
    return pages, Near(shift(near.k), shift(near.v)), index


@partial(jax.jit, donate_argnames="window")
def grow_resident(
    window: jax.Array, pages: jax.Array, n_new: jax.Array, n_chunks: jax.Array
) -> jax.Array:
    """Flushed pages into a window that holds every chunk at the slot of its id."""
    batch, _, capacity = window.shape[:3]
    offset = jnp.arange(pages.shape[2])[None, :]
    slot = jnp.where(offset < n_new[:, None], n_chunks[:, None] + offset, capacity)
    rows = jnp.arange(batch)[:, None]
    moved = pages.transpose(0, 2, 1, 3, 4, 5)
    return window.at[rows, :, slot].set(moved, mode="drop")
