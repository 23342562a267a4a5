"""Flash attention of prompt queries at an offset, as a Triton kernel.

A program serves one query head over one tile of queries and walks the keys up to its own last
position (FlashAttention-2, arXiv 2307.08691). Programs of one kv head share its keys through the
L2 cache, so a group needs no packing. Only the tiles around the diagonal are masked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kvdrive_jax.pallas.attention.reference import MASKED
from kvdrive_jax.pallas.attention.tiles import (
    DOT,
    Parts,
    add_weighted,
    load_rows,
    logits_of,
    store_rows,
)
from kvdrive_jax.pallas.common import tile, triton_call

# Programs that large tiles must leave: about one for each processor of a GPU.
PROGRAMS = 100


@dataclass(frozen=True, kw_only=True)
class PromptTuning:
    """Knobs of prompt attention.

    block_q, block_k: queries and keys per tile, powers of two of at least 16; num_warps,
    num_stages: as Triton has them.
    """

    block_q: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 2


def prompt_tuning(queries: int, heads: int, head_dim: int, itemsize: int) -> PromptTuning:
    """The default for a block of so many queries and query heads."""
    if itemsize == 4:
        # float32 products run on plain cores, out of registers: small tiles, many threads.
        block_q, block_k, warps = 32 if head_dim > 128 else 64, 16, 8
    elif head_dim > 128:
        block_q, block_k, warps = 64, 32, 8
    elif queries * heads >= 128 * PROGRAMS:
        block_q, block_k, warps = 128, 64, 8
    else:
        block_q, block_k, warps = 64, 64, 4
    if queries < block_q:
        block_q = max(DOT, tile(queries))
    return PromptTuning(block_q=block_q, block_k=block_k, num_warps=warps)


class _Carry(NamedTuple):
    """A partial being made, o in parts; m in units of the raw product."""

    o: Parts
    l: jax.Array
    m: jax.Array


def attend_block(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    first: jax.Array,
    *,
    tuning: PromptTuning,
    interpret: bool,
) -> jax.Array:
    """As `reference.attend_block`, for any number of keys and any offset."""
    queries, heads, dim = q.shape
    kv_heads, tokens, _ = k.shape
    group = heads // kv_heads
    tiles = pl.cdiv(queries, tuning.block_q)
    keys = pl.BlockSpec((None, tokens, dim), lambda t, g, h: (h, 0, 0))
    rows = pl.BlockSpec((queries, None, None, dim), lambda t, g, h: (0, h, g, 0))
    shape = (queries, kv_heads, group, dim)
    out = triton_call(
        partial(
            _body,
            tiles=tiles,
            operand=jnp.result_type(q, k, v),
            tuning=tuning,
            interpret=interpret,
        ),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=(tiles, group, kv_heads),
        in_specs=[pl.BlockSpec((1,), lambda t, g, h: (0,)), rows, keys, keys],
        out_specs=rows,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        interpret=interpret,
        name="prompt_attention",
    )(jnp.asarray(first, jnp.int32).reshape(1), q.reshape(shape), k, v)
    return out.reshape(q.shape)


def _body(
    first_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    o_ref: Any,
    *,
    tiles: int,
    operand: Any,
    tuning: PromptTuning,
    interpret: bool,
) -> None:
    queries, dim = q_ref.shape
    block_q, block_k = tuning.block_q, tuning.block_k
    # The tiles with the most keys start first, so that none is left to run alone at the end.
    start = (tiles - 1 - pl.program_id(0)) * block_q
    # Rows past the last query repeat it, and are stored over it with the same numbers.
    rows = jnp.minimum(start + jnp.arange(block_q), queries - 1)
    first = first_ref[0]
    position = first + rows
    end = first + jnp.minimum(start + block_q, queries)
    q = tuple(x.astype(operand) for x in load_rows(q_ref, rows, dim, interpret=interpret))
    # exp(x) is exp2(x log2 e), and the scale of the product costs nothing on top.
    unit = dim**-0.5 * math.log2(math.e)

    def step(index: jax.Array, carry: _Carry, *, masked: bool) -> _Carry:
        key = index * block_k + jnp.arange(block_k)
        # A key after the last query may be memory that nothing was written to.
        real = key < end if masked else None
        k = load_rows(k_ref, key, dim, real, interpret=interpret)
        logits = logits_of(q, k)
        if masked:
            logits = jnp.where(key[None, :] <= position[:, None], logits, MASKED)
        m = jnp.maximum(carry.m, logits.max(axis=1))
        weights = jnp.exp2((logits - m[:, None]) * unit)
        shrink = jnp.exp2((carry.m - m) * unit)
        v = load_rows(v_ref, key, dim, real, interpret=interpret)
        v = tuple(x.astype(operand) for x in v)
        o = add_weighted(carry.o, shrink, weights, v)
        return _Carry(o, carry.l * shrink + weights.sum(axis=1), m)

    carry = _Carry(
        tuple(jnp.zeros(x.shape, jnp.float32) for x in q),
        jnp.zeros((block_q,), jnp.float32),
        jnp.full((block_q,), MASKED, jnp.float32),
    )
    unmasked = (first + start) // block_k
    carry = lax.fori_loop(0, unmasked, partial(step, masked=False), carry)
    carry = lax.fori_loop(unmasked, pl.cdiv(end, block_k), partial(step, masked=True), carry)
    store_rows(o_ref, rows, tuple(part / carry.l[:, None] for part in carry.o))
