"""Scores of chunks or clusters in plain XLA: the specification of the scoring kernels.

The index forms say what each kind of vector means (`index.quantise`, `index.moments`,
`index.bounds`); this is what remains of it at decode: products, a spread term, the group rule.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from kvdrive_jax.config import GroupRule as Rule
from kvdrive_jax.pallas.scoring.products import (
    bfloat16_parts,
    channel_major_product,
    group_queries,
    packed_product,
)

Spread = Literal["none", "norm", "product"]
GROUP_RULES: tuple[str, ...] = get_args(Rule)
BITS = (16, 8, 4, 2)


class Codes(NamedTuple):
    """One vector per chunk, as an index form stores it.

    codes: [B, K, W, N] uint32, packed by `products.pack`, or [B, K, C, N] bfloat16, float16 or
    float32; stretch: [B, K, N] bfloat16; scale: [B, K, C] float32; middle: [B, K, C] float32, for
    first planes only. All but the codes may have size 0 where the codes are floats.
    """

    codes: jax.Array
    stretch: jax.Array
    scale: jax.Array
    middle: jax.Array


@dataclass(frozen=True)
class Recipe:
    """How a chunk's logits follow from its one or two vectors; hashable.

    Attributes:
        bits: of the first vector, whose product with the query is the logit; 16 for floats.
        spread: what the second vector adds, in units of the logit: nothing; the length of
            (weight x deviation), turned into log mean exp of `chunk_size` keys (``norm``, index
            form moments); the product of weight and half-width (``product``, form bounds).
        spread_bits: of the second vector, which is never negative.
        chunk_size: keys per chunk; only ``norm`` uses it.
    """

    bits: int = 16
    spread: Spread = "none"
    spread_bits: int = 16
    chunk_size: int = 4

    def __post_init__(self) -> None:
        if self.spread not in get_args(Spread):
            raise ValueError(
                f"spread must be one of {', '.join(get_args(Spread))}; got {self.spread!r}"
            )
        for name in ("bits", "spread_bits"):
            if getattr(self, name) not in BITS:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(str, BITS))}; got {getattr(self, name)}"
                )
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {self.chunk_size}")


def plane_logits(
    queries: jax.Array,
    first: Codes,
    second: Codes | None,
    weights: jax.Array | None,
    recipe: Recipe,
) -> jax.Array:
    """How well each chunk fits each query head.

    Args:
        queries: [B, H, D] any float dtype, post-RoPE, unscaled.
        first: D channels.
        second: C2 channels, None without spread.
        weights: [B, K, G, C2] float32 >= 0, what multiplies each channel of `second`.
        recipe: how they make a logit.

    Returns:
        [B, K, G, N] float32, finite for finite input; of no meaning for padding.
    """
    scale = queries.shape[-1] ** -0.5
    grouped = group_queries(queries, first.codes.shape[1], queries.shape[-1])
    logits = plane_product(grouped, first, recipe.bits, signed=True) * scale
    if second is None or weights is None:
        return logits
    if recipe.spread == "product":
        return logits + plane_product(weights, second, recipe.spread_bits, signed=False) * scale
    deviation = plane_norm(weights, second, recipe.spread_bits) * scale
    return bounded_logits(logits, deviation, recipe.chunk_size)


def vector_logits(queries: jax.Array, vectors: jax.Array) -> jax.Array:
    """q.x / sqrt(D) for queries [B, H, D] and vectors [B, K, X, D]: [B, K, G, X] float32.

    bfloat16 vectors are never widened in memory (see `products`).
    """
    grouped = group_queries(queries, vectors.shape[1], vectors.shape[3])
    if vectors.dtype == jnp.bfloat16:
        parts = 1 if queries.dtype == jnp.bfloat16 else 3
        stacked = jnp.concatenate(bfloat16_parts(grouped, parts), axis=2)
        logits: jax.Array = jnp.einsum(
            "bkgd,bkxd->bkgx", stacked, vectors, preferred_element_type=jnp.float32
        )
        logits = logits.reshape(*grouped.shape[:2], parts, -1, vectors.shape[2]).sum(axis=2)
    else:
        wide = vectors.astype(jnp.float32)
        logits = jnp.einsum("bkgd,bkxd->bkgx", grouped, wide, precision=lax.Precision.HIGHEST)
    return logits * vectors.shape[3] ** -0.5


def combine_group(
    logits: jax.Array,
    valid: jax.Array,
    rule: Rule,
    counts: jax.Array | None = None,
) -> jax.Array:
    """One score per kv head from the logits of the query heads that share it.

    Works in the log domain, so that no score underflows into a tie with others.

    Args:
        logits: [..., G, X] float32, q.x / sqrt(D) for X clusters or chunks. Finite.
        valid: [..., X] bool; what is not valid weighs nothing and scores -inf.
        rule: how the G heads are combined. ``softmax-sum``: log of the sum over heads of each
            head's softmax over X (an average of what the heads attend to). ``softmax-max``: log of
            the largest. ``mean`` and ``max``: of the logits themselves.
        counts: [..., X], how many keys each x stands for; weighs the softmax's denominator.
            One each if absent.

    Returns:
        [..., X] float32.
    """
    check_group_rule(rule)
    if rule == "max":
        combined = logits.max(axis=-2)
    elif rule == "mean":
        combined = logits.mean(axis=-2)
    else:
        masked = jnp.where(valid[..., None, :], logits, -jnp.inf)
        top = _finite(masked.max(axis=-1, keepdims=True))
        weights = jnp.exp(masked - top)
        if counts is not None:
            weights = weights * counts[..., None, :].astype(jnp.float32)
        offset = top + jnp.log(weights.sum(axis=-1, keepdims=True))
        # A head at a time: XLA on CPU takes twice as long to reduce over an axis of a few.
        heads = range(logits.shape[-2])
        shares = [masked[..., head, :] - offset[..., head, :] for head in heads]
        combined = functools.reduce(jnp.maximum, shares)
        if rule == "softmax-sum":
            best = _finite(combined)
            combined = best + jnp.log(sum(jnp.exp(share - best) for share in shares))
    return jnp.where(valid, combined, -jnp.inf)


def check_group_rule(rule: str) -> None:
    """Raises ValueError, naming the choices, unless `rule` is a group rule."""
    if rule not in GROUP_RULES:
        raise ValueError(f"group_rule must be one of {', '.join(GROUP_RULES)}; got {rule!r}")


def bounded_logits(mean: jax.Array, deviation: jax.Array, count: int) -> jax.Array:
    """The largest log mean exp of `count` numbers with this mean and deviation; overflow-safe."""
    if count == 1:
        return mean
    reach = math.sqrt(count - 1)
    others = (count - 1) * jnp.exp(-(reach + 1 / reach) * deviation)
    # log instead of log1p: `others` lies between 0 and count - 1, and it is twice as fast on CPU.
    return mean + reach * deviation + jnp.log((1 + others) / count)


def plane_product(queries: jax.Array, plane: Codes, bits: int, *, signed: bool) -> jax.Array:
    if bits == 16:
        return channel_major_product(queries, _floats(plane.codes))
    steps = 2**bits - 1
    weights = queries * plane.scale[:, :, None]
    stretch = plane.stretch.astype(jnp.float32)[:, :, None]
    if not signed:
        return packed_product(weights / steps, plane.codes, bits, square=False) * stretch
    offset = weights.sum(axis=-1, keepdims=True)
    product = packed_product(weights * (2 / steps), plane.codes, bits, square=False) - offset
    common = jnp.einsum("bkgc,bkc->bkg", queries, plane.middle, precision=lax.Precision.HIGHEST)
    return product * stretch + common[..., None]


def plane_norm(weights: jax.Array, plane: Codes, bits: int) -> jax.Array:
    """sqrt(sum_d (w_d x_d)^2), overflow-safe."""
    if bits != 16:
        weights = weights * plane.scale[:, :, None]
    largest = weights.max(axis=-1, keepdims=True)
    largest = jnp.where(largest > 0, largest, 1.0)
    shares = jnp.square(weights / largest)
    if bits == 16:
        squares = jnp.square(plane.codes.astype(jnp.float32))
        return jnp.sqrt(channel_major_product(shares, squares)) * largest
    squares = packed_product(shares, plane.codes, bits, square=True)
    stretch = plane.stretch.astype(jnp.float32)[:, :, None]
    return jnp.sqrt(squares) * (largest / (2**bits - 1)) * stretch


def _floats(codes: jax.Array) -> jax.Array:
    return codes if codes.dtype == jnp.bfloat16 else codes.astype(jnp.float32)


def _finite(maximum: jax.Array) -> jax.Array:
    """0 in place of the -inf that is the maximum of nothing, so that nothing becomes NaN."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)
