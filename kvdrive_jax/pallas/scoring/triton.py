"""Scores of chunks or clusters as Triton kernels that read the index once.

All products are tensor-core dots of bfloat16 whose results are exact in float32: a float32 weight
is three bfloat16 numbers, stacked as rows of one dot; a packed code of up to 8 bits, or its square
up to 4 bits, is one; what is wider is two or three. Codes are unpacked in registers, by putting
their bits under the exponent of 1.0: no conversion from int, which GPUs do at a quarter rate.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kvdrive_jax.pallas.common import places, tile, triton_call
from kvdrive_jax.pallas.scoring.layout import Layout, Plan, Weights, parts_of
from kvdrive_jax.pallas.scoring.products import MAGNITUDE_LIMIT
from kvdrive_jax.pallas.scoring.reference import Codes, Rule, bounded_logits

# Below every logit, and finite, so that nothing becomes NaN where no chunk is valid.
_LOWEST = float(np.finfo(np.float32).min)


def _score_body(plan: Plan, *refs: Any) -> None:
    queue = list(refs)

    def take(present: bool = True) -> Any:
        return queue.pop(0) if present else None

    recipe, spread = plan.recipe, plan.recipe.spread != "none"
    valid_ref, q_ref, codes_ref = take(), take(), take()
    stretch_ref, scale_ref, middle_ref = (take(recipe.bits < 16) for _ in range(3))
    weight_ref, spread_ref = take(spread), take(spread)
    spread_stretch_ref, spread_scale_ref = (
        take(spread and recipe.spread_bits < 16) for _ in range(2)
    )
    out_ref, top_ref, total_ref = take(), take(plan.softmax), take(plan.softmax)

    batch, program = pl.program_id(0), pl.program_id(2)
    head = jnp.arange(plan.rows, dtype=jnp.int32) % plan.heads

    def by_row(ref: Any, channel: jax.Array, real: jax.Array) -> jax.Array:
        shape = (plan.rows, channel.shape[0])
        at = (
            jnp.broadcast_to(jnp.minimum(head, plan.group - 1)[:, None], shape),
            jnp.broadcast_to(channel[None], shape),
        )
        mask = (head < plan.group)[:, None] & real[None]
        return plt.load(ref.at[at], mask=mask, other=0.0).astype(jnp.float32)

    def by_channel(ref: Any, channel: jax.Array, real: jax.Array) -> jax.Array:
        return plt.load(ref.at[channel], mask=real, other=0.0)[None]

    def query(channel: jax.Array, real: jax.Array) -> jax.Array:
        return jnp.clip(by_row(q_ref, channel, real), -MAGNITUDE_LIMIT, MAGNITUDE_LIMIT)

    def first_weight(channel: jax.Array, real: jax.Array) -> jax.Array:
        q = query(channel, real)
        return q if recipe.bits == 16 else q * by_channel(scale_ref, channel, real)

    def spread_weight(channel: jax.Array, real: jax.Array) -> jax.Array:
        w = by_row(weight_ref, channel, real)
        return w if recipe.spread_bits == 16 else w * by_channel(spread_scale_ref, channel, real)

    first = Layout(recipe.bits, plan.channels)
    first_weights = Weights(plan, first, first_weight, square=False)
    common: Any = None
    if recipe.bits < 16:
        products = jnp.zeros((plan.rows, first.rows), jnp.float32)
        for step in range(first.tiles):
            at = first.channel(step)
            products = products + query(*at) * by_channel(middle_ref, *at)
        common = _heads(plan, products.sum(axis=1), total=False)
    square = recipe.spread == "norm"
    if spread:
        second = Layout(recipe.spread_bits, plan.spread_channels)
        second_weights = Weights(plan, second, spread_weight, square=square)

    count = plan.chunks if plan.vectors else valid_ref[batch]
    # Loads go by a multiple of 16, so that Triton sees whole vectors in or out of the mask.
    rounded = lax.div(count + 15, 16) * 16
    real_head = jnp.arange(plan.heads, dtype=jnp.int32) < plan.group

    def one_block(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start = (program * plan.blocks + i) * plan.block
        at = start + jnp.arange(plan.block, dtype=jnp.int32)
        inside = at < plan.chunks
        valid = inside & (at < count)
        if plan.vectors:
            sizes = plt.load(valid_ref.at[pl.ds(start, plan.block)], mask=inside, other=0)
            valid = sizes > 0
        span = (start, inside & (at < rounded))
        logits = _sums(plan, first, first_weights, codes_ref, span, square=False)
        if recipe.bits < 16:
            logits = _signed(plan, logits, first_weights, recipe.bits)
            logits = logits * _stretch(plan, stretch_ref, span) + common[:, None]
        logits = logits * plan.channels**-0.5
        if spread:
            more = _sums(plan, second, second_weights, spread_ref, span, square=square)
            more = _unsigned(plan, more, second_weights, recipe.spread_bits, square=square)
            if recipe.spread_bits < 16:
                more = more * _stretch(plan, spread_stretch_ref, span)
            more = more * plan.channels**-0.5
            logits = bounded_logits(logits, more, recipe.chunk_size) if square else logits + more
        if plan.rule in ("mean", "max"):
            if plan.rule == "mean":
                score = jnp.where(real_head[:, None], logits, 0.0).sum(axis=0) / plan.group
            else:
                score = jnp.where(real_head[:, None], logits, _LOWEST).max(axis=0)
            score = jnp.where(valid, score, -jnp.inf)
            plt.store(out_ref.at[pl.ds(start, plan.block)], score, mask=inside)
            return carry
        masked = jnp.where(valid[None], logits, -jnp.inf)
        plt.store(
            out_ref.at[places(0, plan.heads), pl.ds(start, plan.block)],
            masked,
            mask=real_head[:, None] & inside[None],
        )
        if not plan.softmax:
            return carry
        top, total = carry
        higher = jnp.maximum(top, masked.max(axis=1))
        shares = jnp.where(valid[None], jnp.exp(logits - higher[:, None]), 0.0)
        return higher, total * jnp.exp(top - higher) + shares.sum(axis=1)

    start = (jnp.full((plan.heads,), _LOWEST, jnp.float32), jnp.zeros((plan.heads,), jnp.float32))
    top, total = lax.fori_loop(0, plan.blocks, one_block, start)
    if plan.softmax:
        plt.store(top_ref.at[places(0, plan.heads), program], top, mask=real_head)
        plt.store(total_ref.at[places(0, plan.heads), program], total, mask=real_head)


def _sums(
    plan: Plan,
    layout: Layout,
    weights: Weights,
    ref: Any,
    span: tuple[jax.Array, jax.Array],
    *,
    square: bool,
) -> jax.Array:
    """Sum over channels of weight x code (floats as they are, codes as code / 2^bits, or one more:
    see `_signed`), or of its square: [heads, block] float32."""
    start, valid = span
    chunks = pl.ds(start, plan.block)
    total = jnp.zeros((plan.rows, plan.block), jnp.float32)
    words: Any = None
    if layout.bits < 16:
        row = jnp.arange(layout.padded, dtype=jnp.int32)
        mask = (row < layout.words)[:, None] & valid[None]
        words = plt.load(ref.at[places(0, layout.padded), chunks], mask=mask, other=0)
    for step in range(layout.tiles):
        contract = (0,)
        if layout.bits < 16:
            unit = layout.unpack(words, step, exact=square or layout.bits == 8)
            pieces = parts_of(unit * unit, 2 if layout.bits == 8 else 1) if square else [unit]
        else:
            real = layout.channel(step)[1]
            channels = places(step * layout.rows, layout.rows)
            if plan.vectors:
                contract = (1,)
                mask = valid[:, None] & real[None]
                value = plt.load(ref.at[chunks, channels], mask=mask, other=0)
            else:
                mask = real[:, None] & valid[None]
                value = plt.load(ref.at[channels, chunks], mask=mask, other=0)
            if square:
                value = value.astype(jnp.float32)
                value = value * value
            count = _float_parts(ref.dtype, square=square)
            pieces = [value] if count == 1 else parts_of(value.astype(jnp.float32), count)
        for piece in pieces:
            total = total + lax.dot_general(
                weights.tiles[step],
                piece.astype(jnp.bfloat16),
                (((1,), contract), ((), ())),
                preferred_element_type=jnp.float32,
            )
    return _heads(plan, total, total=True)


def _float_parts(dtype: Any, *, square: bool) -> int:
    """bfloat16 numbers that hold one float of the index, or its square."""
    if jnp.dtype(dtype) == jnp.bfloat16:
        return 2 if square else 1
    return 2 if jnp.dtype(dtype) == jnp.float16 and not square else 3


def _heads(plan: Plan, rows: jax.Array, *, total: bool) -> jax.Array:
    """[rows, ...] -> [heads, ...]: the sum over parts, or the one value they all have."""
    if plan.parts == 1:
        return rows
    parted = rows.reshape(4, plan.heads, *rows.shape[1:])
    return parted.sum(axis=0) if total else parted.max(axis=0)


def _signed(plan: Plan, sums: jax.Array, weights: Weights, bits: int) -> jax.Array:
    """Sums of weight x (2 code / steps - 1) from what `_sums` gives."""
    slope = 2.0 ** (bits + 1) / (2**bits - 1)
    below = 1.0 + (slope if bits < 8 else 0.0)
    return sums * slope - _heads(plan, weights.sums, total=True)[:, None] * below


def _unsigned(
    plan: Plan, sums: jax.Array, weights: Weights, bits: int, *, square: bool
) -> jax.Array:
    """Sums of weight x code / steps, or the root of those of its square."""
    slope = 1.0 if bits == 16 else 2.0**bits / (2**bits - 1)
    if square:
        largest = _heads(plan, weights.largest, total=False)
        return jnp.sqrt(jnp.maximum(sums, 0.0)) * (largest * slope)[:, None]
    if bits < 8:
        sums = sums - _heads(plan, weights.sums, total=True)[:, None]
    return sums * slope


def _stretch(plan: Plan, ref: Any, span: tuple[jax.Array, jax.Array]) -> jax.Array:
    start, valid = span
    stretch = plt.load(ref.at[pl.ds(start, plan.block)], mask=valid, other=0.0)
    return stretch.astype(jnp.float32)[None]


def _combine_body(
    group: int, chunks: int, programs: int, block: int, rule: Rule, *refs: Any
) -> None:
    logits_ref, top_ref, total_ref, out_ref = refs
    heads, padded = tile(group), tile(programs)
    real_head = jnp.arange(heads, dtype=jnp.int32) < group
    partials = (places(0, heads), places(0, padded))
    mask = real_head[:, None] & (jnp.arange(padded, dtype=jnp.int32) < programs)[None]
    tops = plt.load(top_ref.at[partials], mask=mask, other=_LOWEST)
    totals = plt.load(total_ref.at[partials], mask=mask, other=0.0)
    top = tops.max(axis=1)
    total = (totals * jnp.exp(tops - top[:, None])).sum(axis=1)
    whole = top + jnp.log(jnp.where(total > 0, total, 1.0))

    start = pl.program_id(2) * block
    inside = start + jnp.arange(block, dtype=jnp.int32) < chunks
    mask = real_head[:, None] & inside[None]
    logits = plt.load(
        logits_ref.at[places(0, heads), pl.ds(start, block)], mask=mask, other=-jnp.inf
    )
    shares = logits - jnp.where(real_head, whole, 0.0)[:, None]
    best = shares.max(axis=0)
    valid = best > -jnp.inf
    if rule == "softmax-sum":
        finite = jnp.where(valid, best, 0.0)
        sums = jnp.exp(shares - finite[None]).sum(axis=0)
        best = finite + jnp.log(jnp.where(valid, sums, 1.0))
    score = jnp.where(valid, best, -jnp.inf)
    plt.store(out_ref.at[pl.ds(start, block)], score, mask=inside)


def _whole(*shape: int) -> pl.BlockSpec:
    """All of one (session, kv head): addressed, not loaded."""
    zeros = (0,) * len(shape)
    return pl.BlockSpec((None, None, *shape), lambda b, k, i: (b, k, *zeros))


def score(
    plan: Plan,
    valid: jax.Array,
    queries: jax.Array,
    first: Codes,
    second: Codes | None,
    weights: jax.Array | None,
    *,
    num_warps: int,
    num_stages: int,
    combine_block: int,
    interpret: bool,
) -> jax.Array:
    """Runs the kernels of `plan`.

    valid: [B] int32 chunks, or [B, K, X] int32 sizes for vectors; queries: [B, K, G, D]; the rest
    as in the api. Returns [B, K, G, N] logits without a rule, else [B, K, N] scores.
    """
    batch, kv_heads = queries.shape[:2]
    args, specs = [valid], [_whole(plan.chunks) if plan.vectors else pl.BlockSpec()]
    args += [queries, first.codes]
    specs += [_whole(*queries.shape[2:]), _whole(*first.codes.shape[2:])]
    if plan.recipe.bits < 16:
        args += [first.stretch, first.scale, first.middle]
        specs += [_whole(plan.chunks), _whole(plan.channels), _whole(plan.channels)]
    if second is not None and weights is not None:
        args += [weights, second.codes]
        specs += [_whole(*weights.shape[2:]), _whole(*second.codes.shape[2:])]
        if plan.recipe.spread_bits < 16:
            args += [second.stretch, second.scale]
            specs += [_whole(plan.chunks), _whole(plan.spread_channels)]
    lead = (batch, kv_heads)
    shapes: list[tuple[int, ...]] = [(plan.group, plan.chunks)]
    if plan.softmax:
        shapes += [(plan.group, plan.programs)] * 2
    elif plan.rule is not None:
        shapes = [(plan.chunks,)]
    outs = triton_call(
        lambda *refs: _score_body(plan, *refs),
        out_shape=[jax.ShapeDtypeStruct((*lead, *shape), jnp.float32) for shape in shapes],
        grid=(batch, kv_heads, plan.programs),
        in_specs=specs,
        out_specs=[_whole(*shape) for shape in shapes],
        num_warps=num_warps,
        num_stages=num_stages,
        interpret=interpret,
        name="score",
    )(*args)
    if not plan.softmax:
        return outs[0]
    assert plan.rule is not None
    rule = plan.rule
    combined: jax.Array = triton_call(
        lambda *refs: _combine_body(
            plan.group, plan.chunks, plan.programs, combine_block, rule, *refs
        ),
        out_shape=jax.ShapeDtypeStruct((*lead, plan.chunks), jnp.float32),
        grid=(batch, kv_heads, pl.cdiv(plan.chunks, combine_block)),
        in_specs=[_whole(*shape) for shape in shapes],
        out_specs=_whole(plan.chunks),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        name="combine_scores",
    )(*outs)
    return combined
