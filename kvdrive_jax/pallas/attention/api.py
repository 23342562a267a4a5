"""Which decode attention runs where, and why not the other."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from kvdrive_jax.pallas import common
from kvdrive_jax.pallas.attention import reference, triton
from kvdrive_jax.pallas.attention.merge import finish_parts, merge_parts
from kvdrive_jax.pallas.attention.reference import Partial
from kvdrive_jax.pallas.attention.tiles import why_not_tiles
from kvdrive_jax.pallas.common import Implementation

# Query heads of one kv head that fit one tile.
LARGEST_GROUP = 64
# Keys and values of one session in the window: their places are int32. (Bytes are not: offsets
# into arrays of more than 4 GiB are 64-bit.)
LARGEST_WINDOW = 2**31 - 1


def why_not_decode(
    dtype: Any, head_dim: int, group: int = 1, *, interpret: bool = False
) -> str | None:
    """The reason the Triton kernels cannot serve decode attention here, or None when they can."""
    reason = why_not_tiles(head_dim)
    if not interpret:
        reason = common.why_not_triton(dtype) or reason
    if reason is None and group > LARGEST_GROUP:
        reason = f"at most {LARGEST_GROUP} query heads per kv head, not {group}"
    return reason


def attend_pages(
    q: jax.Array,
    window: jax.Array,
    slots: jax.Array,
    *,
    implementation: Implementation | None = None,
    tuning: triton.DecodeTuning | None = None,
    interpret: bool = False,
) -> Partial:
    """Decode attention over the pages in some rows of the window, read where they are.

    Args:
        q: [B, H, D], post-RoPE, unscaled; query head h reads kv head h // G.
        window: [B, R, 2, c, D], a page being keys, then values; the rows of all kv heads (and of
            other layers, where they share a pool). Other rows are not read.
        slots: [B, K, P] int32, rows of the window, in any order, -1 for none. P may be 0.
        implementation: None picks Triton where it can.
        tuning: knobs of the kernel, None for `decode_tuning`.
        interpret: run the kernel in the interpreter.

    Returns:
        A Partial with leading [B, H]; o = l = 0 and m = MASKED where no slot is given.

    Raises:
        ValueError: shapes do not fit.
        NotImplementedError: the named implementation cannot do the case; says why.
    """
    _check_pages(q, window, slots)
    source = triton.Pages(window, slots)
    return _run(q, source, implementation=implementation, tuning=tuning, interpret=interpret)


def attend_rows(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    length: jax.Array,
    *,
    implementation: Implementation | None = None,
    tuning: triton.DecodeTuning | None = None,
    interpret: bool = False,
) -> Partial:
    """Decode attention over the first keys of each session: full attention, or the near buffer.

    Args:
        q: [B, H, D], post-RoPE, unscaled.
        k: [B, K, T, D]; rows from the length on are not read into the result.
        v: [B, K, T, D], likewise.
        length: [B] int32, valid rows; 0 gives an empty Partial.
        implementation, tuning, interpret: as in `attend_pages`.

    Returns:
        A Partial with leading [B, H].

    Raises:
        ValueError, NotImplementedError: as in `attend_pages`.
    """
    _check_rows(q, k, v, length)
    source = triton.Rows(k, v, length)
    return _run(q, source, implementation=implementation, tuning=tuning, interpret=interpret)


def attend_weighted(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    counts: jax.Array,
    *,
    implementation: Implementation | None = None,
    tuning: triton.DecodeTuning | None = None,
    interpret: bool = False,
) -> Partial:
    """Decode attention over keys each of which stands for a number of equal ones.

    Args:
        q: [B, H, D], post-RoPE, unscaled.
        k: [B, K, T, D], for instance the mean key of a cluster. float32 keys or queries make all
            products float32.
        v: [B, K, T, D].
        counts: [B, K, T], any integer or float dtype: the weight of each key before softmax; 0
            for one that is not there.
        implementation, tuning, interpret: as in `attend_pages`.

    Returns:
        A Partial with leading [B, H].

    Raises:
        ValueError, NotImplementedError: as in `attend_pages`.
    """
    _check_rows(q, k, v, None)
    if counts.shape != k.shape[:3]:
        raise ValueError(f"counts must be {k.shape[:3]} for k {k.shape}, got {counts.shape}")
    everything = jnp.full((q.shape[0],), k.shape[2], jnp.int32)
    source = triton.Rows(k, v, everything, counts)
    return _run(q, source, implementation=implementation, tuning=tuning, interpret=interpret)


def attend_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    near_k: jax.Array,
    near_v: jax.Array,
    near_length: jax.Array,
    *,
    window: jax.Array | None = None,
    slots: jax.Array | None = None,
    rest: Partial | None = None,
    implementation: Implementation | None = None,
    tuning: triton.DecodeTuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """All attention of one decode step, in two launches.

    The same as `combine` of `attend_pages`, `attend_rows`, `attend_one` and what else there is.

    Args:
        q: [B, H, D], post-RoPE, unscaled.
        k: [B, K, D], the token's own, always attended.
        v: [B, K, D], likewise.
        near_k: [B, K, T, D], sink and local; with full attention, everything.
        near_v: [B, K, T, D].
        near_length: [B] int32, valid rows of them.
        window: [B, R, 2, c, D], None where nothing is selected.
        slots: [B, K, P] int32, rows of it, -1 for none; with `window` or not at all.
        rest: a Partial with leading [B, H] of all other keys, for instance an estimate.
        implementation, tuning, interpret: as in `attend_pages`.

    Returns:
        [B, H, D] float32.

    Raises:
        ValueError, NotImplementedError: as in `attend_pages`.
    """
    _check_rows(q, near_k, near_v, near_length)
    own = (q.shape[0], near_k.shape[1], q.shape[2])
    if k.shape != own or v.shape != own:
        raise ValueError(f"k and v must be {own}, got {k.shape} and {v.shape}")
    if (window is None) != (slots is None):
        raise ValueError("window and slots go together: got one of them")
    keys = [near_k, near_v]
    sources: list[triton.Pages | triton.Rows] = [triton.Rows(near_k, near_v, near_length)]
    if window is not None and slots is not None:
        _check_pages(q, window, slots)
        if slots.shape[1] != near_k.shape[1]:
            raise ValueError(
                f"slots must be of {near_k.shape[1]} kv heads as near_k, got {slots.shape}"
            )
        keys.append(window)
        # First, for they are the longer work.
        sources.insert(0, triton.Pages(window, slots))
    sources = [source for source in sources if source.tokens]
    if _choose(implementation, interpret, k.shape[1], q, *keys) == "xla" or not sources:
        partials = [_specified(q, source) for source in sources]
        others = [] if rest is None else [rest]
        return reference.combine(*partials, reference.attend_one(q, k, v), *others)
    parts = _parts(q, *sources, tuning=tuning, interpret=interpret)
    return finish_parts(parts, q, k, v, rest, interpret=interpret)


def _nothing(q: jax.Array) -> Partial:
    return Partial(
        jnp.zeros(q.shape, jnp.float32),
        jnp.zeros(q.shape[:2], jnp.float32),
        jnp.full(q.shape[:2], reference.MASKED, jnp.float32),
    )


def _specified(q: jax.Array, source: triton.Pages | triton.Rows) -> Partial:
    if isinstance(source, triton.Pages):
        return reference.attend_pages(q, source.window, source.slots)
    if source.counts is not None:
        return reference.attend_weighted(q, source.k, source.v, source.counts)
    return reference.attend_rows(q, source.k, source.v, source.length)


def _parts(
    q: jax.Array,
    *sources: triton.Pages | triton.Rows,
    tuning: triton.DecodeTuning | None,
    interpret: bool,
) -> Partial:
    tuning = tuning or triton.decode_tuning(
        q.shape[0] * sources[0].kv_heads,
        max(source.tokens for source in sources),
        q.shape[2],
        triton.operand_dtype(q, sources).itemsize,
    )
    return triton.attend_parts(q, *sources, tuning=tuning, interpret=interpret)


def _run(
    q: jax.Array,
    source: triton.Pages | triton.Rows,
    *,
    implementation: Implementation | None,
    tuning: triton.DecodeTuning | None,
    interpret: bool,
) -> Partial:
    keys = (source.window,) if isinstance(source, triton.Pages) else (source.k, source.v)
    chosen = _choose(implementation, interpret, source.kv_heads, q, *keys)
    if not source.tokens:
        return _nothing(q)
    if chosen == "xla":
        return _specified(q, source)
    parts = _parts(q, source, tuning=tuning, interpret=interpret)
    return merge_parts(parts, interpret=interpret)


def _choose(
    implementation: Implementation | None,
    interpret: bool,
    kv_heads: int,
    q: jax.Array,
    *keys: jax.Array,
) -> Implementation:
    dtype = jnp.result_type(q, *keys)
    group = q.shape[1] // kv_heads
    reason = why_not_decode(dtype, q.shape[2], group, interpret=interpret)
    return common.choose("decode attention", implementation, reason, interpret=interpret)


def _check_queries(q: jax.Array, kv_heads: int, dim: int, batch: int) -> None:
    if q.ndim != 3 or q.shape[0] != batch or q.shape[1] % kv_heads or q.shape[2] != dim:
        raise ValueError(f"q must be [{batch}, G * {kv_heads}, {dim}], got {q.shape}")


def _check_pages(q: jax.Array, window: jax.Array, slots: jax.Array) -> None:
    if window.ndim != 5 or window.shape[2] != 2:
        raise ValueError(f"window must be [B, R, 2, c, D], got {window.shape}")
    if math.prod(window.shape[1:4]) > LARGEST_WINDOW:
        raise ValueError(
            f"window must have at most {LARGEST_WINDOW} keys and values R 2 c per session, "
            f"got {window.shape}"
        )
    if slots.ndim != 3 or slots.shape[0] != window.shape[0] or slots.dtype != jnp.int32:
        raise ValueError(
            f"slots must be [{window.shape[0]}, K, P] int32, got {slots.shape} {slots.dtype}"
        )
    _check_queries(q, slots.shape[1], window.shape[4], window.shape[0])


def _check_rows(q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array | None) -> None:
    if k.ndim != 4 or k.shape != v.shape:
        raise ValueError(f"k and v must be [B, K, T, D] alike, got {k.shape} and {v.shape}")
    if length is not None and length.shape != k.shape[:1]:
        raise ValueError(f"length must be [{k.shape[0]}], got {length.shape}")
    _check_queries(q, k.shape[1], k.shape[3], k.shape[0])
