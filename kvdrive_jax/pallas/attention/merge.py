"""The combiner as a Triton kernel: what several programs left of one row's attention, as one.

With a decode step's own key and an estimate of the rest, if there is one, it also finishes the
step, so that all attention of a step is two launches.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kvdrive_jax.pallas.attention.reference import Partial
from kvdrive_jax.pallas.attention.tiles import DOT, Parts, columns, partial_shapes
from kvdrive_jax.pallas.common import tile, triton_call


def merge_parts(parts: Partial, *, interpret: bool) -> Partial:
    """One partial, with leading [B, H], from those of `triton.attend_parts`."""
    batch, _, _, _, dim = parts.o.shape
    o, l, m = _merge(parts, None, None, interpret=interpret)
    return Partial(o.reshape(batch, -1, dim), l.reshape(batch, -1), m.reshape(batch, -1))


def finish_parts(
    parts: Partial,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rest: Partial | None,
    *,
    interpret: bool,
) -> jax.Array:
    """Attention over the keys of `triton.attend_parts`, the token's own k, v [B, K, D] and those of
    `rest`, a Partial with leading [B, H]: [B, H, D] float32."""
    out: jax.Array = _merge(parts, (q, k, v), rest, interpret=interpret)
    return out.reshape(q.shape)


def _merge(
    parts: Partial,
    own: tuple[jax.Array, jax.Array, jax.Array] | None,
    rest: Partial | None,
    *,
    interpret: bool,
) -> Any:
    """The merge as one launch: as XLA reductions it is four."""
    batch, kv_heads, splits, group, dim = parts.o.shape
    operands = list(parts)
    specs = [
        pl.BlockSpec((None, None, splits, None, dim), lambda g, k, b: (b, k, 0, g, 0)),
        pl.BlockSpec((None, None, splits, None), lambda g, k, b: (b, k, 0, g)),
        pl.BlockSpec((None, None, splits, None), lambda g, k, b: (b, k, 0, g)),
    ]
    row = pl.BlockSpec((None, None, None, dim), lambda g, k, b: (b, k, g, 0))
    scalar = pl.BlockSpec((None, None, 1), lambda g, k, b: (b, k, g))
    shapes: Any = partial_shapes(batch, kv_heads, group, dim)
    out_specs: Any = (row, scalar, scalar)
    if own is not None:
        q, key, value = own
        operands += [q.reshape(batch, kv_heads, group, dim), key, value]
        one = pl.BlockSpec((None, None, dim), lambda g, k, b: (b, k, 0))
        specs += [row, one, one]
        shapes, out_specs = shapes[0], row
    if rest is not None:
        operands += [x.reshape(batch, kv_heads, group, *x.shape[2:]) for x in rest]
        specs += [row, scalar, scalar]
    return triton_call(
        partial(_merge_body, scale=dim**-0.5, own=own is not None, rest=rest is not None),
        out_shape=shapes,
        grid=(group, kv_heads, batch),
        in_specs=specs,
        out_specs=out_specs,
        num_warps=4,
        num_stages=2,
        interpret=interpret,
        name="decode_attention_merge",
    )(*operands)


def _merge_body(
    o_ref: Any, l_ref: Any, m_ref: Any, *refs: Any, scale: float, own: bool, rest: bool
) -> None:
    splits, dim = o_ref.shape
    parts = columns(dim)
    m = jnp.max(m_ref[jnp.minimum(jnp.arange(tile(splits)), splits - 1)])
    # Others that join, each one o in parts with its l and m.
    others: list[tuple[Parts, Any, jax.Array]] = []
    left = list(refs)
    if own:
        q_ref, k_ref, v_ref, *left = left
        products = [q_ref[x].astype(jnp.float32) * k_ref[x].astype(jnp.float32) for x in parts]
        logit = jnp.asarray(sum(x.sum() for x in products)) * scale
        others.append((tuple(v_ref[x].astype(jnp.float32) for x in parts), 1.0, logit))
    if rest:
        rest_o_ref, rest_l_ref, rest_m_ref, *left = left
        others.append((tuple(rest_o_ref[x] for x in parts), rest_l_ref[0], rest_m_ref[0]))
    for _, _, other_m in others:
        m = jnp.maximum(m, other_m)
    o: Parts = tuple(jnp.zeros((x.size,), jnp.float32) for x in parts)
    l = jnp.zeros((), jnp.float32)
    for other_o, other_l, other_m in others:
        weight = jnp.exp(other_m - m)
        o = tuple(a + weight * b for a, b in zip(o, other_o, strict=True))
        l = l + weight * other_l

    def step(index: jax.Array, carry: tuple[Parts, jax.Array]) -> tuple[Parts, jax.Array]:
        o, l = carry
        rows = index * DOT + jnp.arange(DOT)
        real = rows < splits
        rows = jnp.minimum(rows, splits - 1)
        weights = jnp.where(real, jnp.exp(m_ref[rows] - m), 0.0)
        o = tuple(
            a + (o_ref[rows, x] * weights[:, None]).sum(axis=0)
            for a, x in zip(o, parts, strict=True)
        )
        return o, l + (l_ref[rows] * weights).sum()

    o, l = lax.fori_loop(0, pl.cdiv(splits, DOT), step, (o, l))
    if own:
        o = tuple(x / l for x in o)
    for x, value in zip(parts, o, strict=True):
        left[0][x] = value
    if not own:
        left[1][0] = l
        left[2][0] = m
