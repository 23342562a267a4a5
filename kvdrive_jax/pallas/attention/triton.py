"""Decode attention as a Triton kernel: split over the keys, read in place, one pass.

The bytes of the keys and values are the floor, so the kernel reads each once, wherever it lies: a
page by the slot it is in, a row by its position. A program serves all query heads of one (session,
kv head) over one share of the keys and leaves an (o, l, m) partial; the shares are merged by
`merge.merge_parts`. Products run on tensor cores with the group padded to 16 rows, because a
multiply-add per query head, key and channel would cost more than the bytes from 4 heads on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kvdrive_jax.pallas.attention.reference import MASKED, Partial
from kvdrive_jax.pallas.attention.tiles import (
    DOT,
    Parts,
    add_weighted,
    load_rows,
    logits_of,
    partial_shapes,
    store_rows,
)
from kvdrive_jax.pallas.common import tile, triton_call

# Programs that keep the memory of the largest GPU busy: about four for each of its 132 SMs.
PROGRAMS = 512
# Bytes of keys, and as many of values, that a program asks for at once.
TILE_BYTES = 16 * 1024
# The most tiles that one program should walk.
TILES = 64


@dataclass(frozen=True, kw_only=True)
class DecodeTuning:
    """Knobs of decode attention.

    block: keys per tile, a power of two of at least 16; splits: most programs that share the keys
    of one (session, kv head); num_warps, num_stages: as Triton has them.
    """

    block: int
    splits: int
    num_warps: int = 4
    num_stages: int = 2


def decode_tuning(rows: int, tokens: int, head_dim: int, itemsize: int) -> DecodeTuning:
    """The default for `rows` = B K rows of at most `tokens` keys in products of so many bytes."""
    fit = 1 << ((TILE_BYTES // (head_dim * itemsize)).bit_length() - 1)
    block = max(DOT, min(fit, 128, tile(tokens)))
    # Long programs are cut shorter, so that the last ones do not run on a GPU left empty.
    splits = max(1, PROGRAMS // max(rows, 1), pl.cdiv(tokens, block * TILES))
    # float32 products run on plain cores, out of registers, and spill from four warps; so does a
    # second tile in flight where even the smallest is large.
    return DecodeTuning(
        block=block,
        splits=splits,
        num_warps=8 if itemsize == 4 else 4,
        num_stages=2 if fit > DOT else 1,
    )


class Pages(NamedTuple):
    """Keys in pages: window [B, R, 2, c, D], slots [B, K, P] int32, rows of it (-1: none)."""

    window: jax.Array
    slots: jax.Array

    @property
    def kv_heads(self) -> int:
        return int(self.slots.shape[1])

    @property
    def tokens(self) -> int:
        """The most keys there can be."""
        return int(self.slots.shape[2] * self.window.shape[3])


class Rows(NamedTuple):
    """Keys in order: k, v [B, K, T, D]; length [B] int32, valid ones; counts [B, K, T] or None,
    keys that each row stands for, 0 for a row that is not there."""

    k: jax.Array
    v: jax.Array
    length: jax.Array
    counts: jax.Array | None = None

    @property
    def kv_heads(self) -> int:
        return int(self.k.shape[1])

    @property
    def tokens(self) -> int:
        """The most keys there can be."""
        return int(self.k.shape[2])


def operand_dtype(q: jax.Array, sources: Sequence[Pages | Rows]) -> Any:
    """What products are made of: the widest of queries, keys and values."""
    keys = [(x.window,) if isinstance(x, Pages) else (x.k, x.v) for x in sources]
    return jnp.result_type(q, *(array for arrays in keys for array in arrays))


class _Carry(NamedTuple):
    """A `Partial` being made, o in parts."""

    o: Parts
    l: jax.Array
    m: jax.Array


class _Keys(NamedTuple):
    """One tile: where its keys and values are, which of them exist, and what each counts for."""

    key_rows: jax.Array
    value_rows: jax.Array
    present: jax.Array
    counts: jax.Array | None = None


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Static side of one set of keys: its refs among the kernel's, and its share of programs."""

    kind: type
    refs: int
    tokens: int
    chunk: int
    first_split: int
    splits: int


def attend_parts(
    q: jax.Array, *sources: Pages | Rows, tuning: DecodeTuning, interpret: bool
) -> Partial:
    """Attention of q [B, H, D] over the union of `sources`, in X parts.

    One launch. Returns o [B, K, X, G, D]; l, m [B, K, X, G].
    """
    batch, heads, dim = q.shape
    static: list[_Source] = []
    operands: list[jax.Array] = []
    specs: list[pl.BlockSpec] = []
    splits = 0
    kv_heads = sources[0].kv_heads
    for source in sources:
        if isinstance(source, Pages):
            chunk = source.window.shape[3]
            arrays = [source.window.reshape(batch, 1, -1, dim), source.slots]
        else:
            chunk = 1
            arrays = [source.k, source.v, source.length.astype(jnp.int32)]
            arrays += [] if source.counts is None else [source.counts]
        blocks = pl.cdiv(source.tokens, tuning.block)
        # As many programs as leave none without a tile.
        share = pl.cdiv(blocks, pl.cdiv(blocks, min(tuning.splits, blocks)))
        static.append(
            _Source(
                kind=type(source),
                refs=len(arrays),
                tokens=source.tokens,
                chunk=chunk,
                first_split=splits,
                splits=share,
            )
        )
        splits += share
        operands += arrays
        specs += [_whole(array) for array in arrays]
    group = heads // kv_heads
    grouped = q.reshape(batch, kv_heads, group, dim)
    shape = (batch, kv_heads, splits, group)
    parts = triton_call(
        partial(
            _body,
            sources=tuple(static),
            operand=operand_dtype(q, sources),
            block=tuning.block,
            scale=dim**-0.5,
            interpret=interpret,
        ),
        out_shape=partial_shapes(*shape, dim),
        grid=(splits, kv_heads, batch),
        in_specs=[_whole(grouped), *specs],
        out_specs=(
            pl.BlockSpec((None, None, None, group, dim), lambda s, k, b: (b, k, s, 0, 0)),
            pl.BlockSpec((None, None, None, group), lambda s, k, b: (b, k, s, 0)),
            pl.BlockSpec((None, None, None, group), lambda s, k, b: (b, k, s, 0)),
        ),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        interpret=interpret,
        name="decode_attention",
    )(grouped, *operands)
    return Partial(*parts)


def _whole(array: jax.Array) -> pl.BlockSpec:
    """All that one (session, kv head) has of `array`, only addressed; what heads share has one."""
    if array.ndim == 1:
        return pl.BlockSpec((1,), lambda s, k, b: (b,))
    rest, shared = array.shape[2:], array.shape[1] == 1
    return pl.BlockSpec(
        (None, None, *rest), lambda s, k, b: (b, 0 if shared else k, *(0 for _ in rest))
    )


def _body(
    q_ref: Any,
    *refs: Any,
    sources: tuple[_Source, ...],
    operand: Any,
    block: int,
    scale: float,
    interpret: bool,
) -> None:
    *key_refs, o_ref, l_ref, m_ref = refs
    group, dim = q_ref.shape
    # Rows past the group repeat its last head, and are stored over it with the same numbers.
    rows = jnp.minimum(jnp.arange(tile(group, DOT)), group - 1)
    q = tuple(x.astype(operand) for x in load_rows(q_ref, rows, dim, interpret=interpret))
    carry = _Carry(
        tuple(jnp.zeros(x.shape, jnp.float32) for x in q),
        jnp.zeros(rows.shape, jnp.float32),
        jnp.full(rows.shape, MASKED, jnp.float32),
    )
    for source in sources:
        mine, key_refs = key_refs[: source.refs], key_refs[source.refs :]
        tokens: Any = source.tokens
        locate: Callable[[jax.Array], _Keys]
        if source.kind is Pages:
            k_ref = v_ref = mine[0]
            locate = partial(_page_keys, mine[1], source.chunk)
        else:
            k_ref, v_ref, length_ref, *counts = mine
            tokens = jnp.minimum(length_ref[0], source.tokens)
            locate = partial(_row_keys, tokens, *counts)

        def step(
            index: jax.Array, carry: _Carry, k_ref=k_ref, v_ref=v_ref, locate=locate
        ) -> _Carry:
            keys = locate(index * block + jnp.arange(block))
            k = load_rows(k_ref, keys.key_rows, dim, keys.present, interpret=interpret)
            logits = logits_of(q, k) * scale
            valid = keys.present
            if keys.counts is not None:
                counts = keys.counts.astype(jnp.float32)
                valid = valid & (counts > 0)
                logits = logits + jnp.log(jnp.where(valid, counts, 1.0))[None, :]
            logits = jnp.where(valid[None, :], logits, MASKED)
            m = jnp.maximum(carry.m, logits.max(axis=1))
            weights = jnp.where(valid[None, :], jnp.exp(logits - m[:, None]), 0.0)
            shrink = jnp.exp(carry.m - m)
            v = load_rows(v_ref, keys.value_rows, dim, keys.present, interpret=interpret)
            v = tuple(x.astype(operand) for x in v)
            o = add_weighted(carry.o, shrink, weights, v)
            return _Carry(o, carry.l * shrink + weights.sum(axis=1), m)

        carry = lax.fori_loop(*_share(source, pl.cdiv(tokens, block)), step, carry)
    store_rows(o_ref, rows, carry.o)
    l_ref[rows] = carry.l
    m_ref[rows] = carry.m


def _share(source: _Source, blocks: Any) -> tuple[jax.Array, jax.Array]:
    """First and last tile of `source` that this program walks: none, where it serves another."""
    share = pl.cdiv(blocks, source.splits)
    split = pl.program_id(0) - source.first_split
    first = split * share
    last = jnp.where(
        (split >= 0) & (split < source.splits), jnp.minimum(first + share, blocks), first
    )
    return first, last


def _page_keys(slots_ref: Any, chunk: int, token: jax.Array) -> _Keys:
    """Where the tokens of the selected chunks are in a window of rows [R 2 c, D]."""
    count = slots_ref.shape[0]
    slot = slots_ref[jnp.minimum(token // chunk, count - 1)]
    key = slot * (2 * chunk) + token % chunk
    return _Keys(key, key + chunk, (slot >= 0) & (token < count * chunk))


def _row_keys(tokens: jax.Array, *refs_and_token: Any) -> _Keys:
    """Rows as they are, and their counts where there are any."""
    *counts_ref, token = refs_and_token
    counts = counts_ref[0][jnp.minimum(token, tokens - 1)] if counts_ref else None
    return _Keys(token, token, token < tokens, counts)
