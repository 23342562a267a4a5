"""Encoded pages in plain XLA. `kvdrive_jax.tiers.precision` does the same in NumPy, bit for bit,
and says what a row holds and why.

So that every backend agrees with it, what decides a code is exact or rounded once: scales are
bfloat16, codes times scales fit float32, reciprocals come from integer division (GPUs divide
floats to within 2 ulp only), no product feeds a sum that rounds (backends fuse those or not), and
no scale is so small that subnormals, which backends may flush, could change a code.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

EncodedPrecision = Literal["int8", "int4"]
DTYPES = ("float32", "bfloat16", "float16")

# As in `kvdrive_jax.tiers.precision`, which explains them.
LIMIT = 2.0**120
FLOOR = 27 << 7
NAN = 0x7FC0
FINEST, COARSEST = 4, 8
ZERO_STEP = 3


def encode_pages(pages: jax.Array, precision: EncodedPrecision) -> jax.Array:
    """Pages [..., 2, c, D] of float32, bfloat16 or float16 -> rows [..., page_bytes] uint8.

    Raises ValueError for other dtypes and shapes, an odd D and an unknown precision.
    """
    if pages.ndim < 3 or pages.shape[-3] != 2 or 0 in pages.shape[-2:]:
        raise ValueError(f"pages must be [..., 2, c, D], got {list(pages.shape)}")
    _check(precision, pages.shape[-1], pages.dtype)
    wide = pages.astype(jnp.float32)
    ordinary = jnp.abs(wide) < LIMIT
    wide = jnp.where(ordinary, wide, 0.0)
    keys, values = wide[..., 0, :, :], wide[..., 1, :, :]
    low, high = keys.min(axis=-2), keys.max(axis=-2)
    largest, largest_value = jnp.maximum(high, -low), jnp.abs(values).max(axis=-1)
    if precision == "int8":
        key_pattern = _pattern(largest * np.float32(1 / 127))
        value_pattern = _pattern(largest_value * np.float32(1 / 127))
    else:
        spread = (high - low) * np.float32(1 / 13)
        key_pattern = _pattern(jnp.maximum(spread, largest * np.float32(1 / 28)))
        value_pattern = _pattern(largest_value * np.float32(1 / 7))
    base, step, nibble = _nibbles(key_pattern)
    key_pattern = base + (nibble << (step + FINEST))
    inverse = _reciprocal(key_pattern)
    key_codes = jnp.rint(keys * inverse[..., None, :])
    value_codes = jnp.rint(values * _reciprocal(value_pattern)[..., None])
    # Whatever the finite ones need: no code survives a scale that is NaN.
    odd_keys = ~ordinary[..., 0, :, :].all(axis=(-2, -1))
    header = jnp.where(odd_keys[..., None], NAN, base | step)
    nibble = jnp.where(odd_keys[..., None], 0, nibble)
    value_pattern = jnp.where(ordinary[..., 1, :, :].all(axis=-1), value_pattern, NAN)
    if precision == "int8":
        codes = jnp.stack([key_codes, value_codes], axis=-3).astype(jnp.int8)
        half = nibble.shape[-1] // 2
        channels = nibble[..., :half] | nibble[..., half:] << 4
        packed = lax.bitcast_convert_type(codes, jnp.uint8)
    else:
        middle = (low + high + _number(key_pattern)) * (inverse * np.float32(1 / 6))
        zero = jnp.clip(jnp.rint(middle), -8, 7)
        key_codes = jnp.clip(key_codes - ZERO_STEP * zero[..., None, :], -8, 7)
        channels = nibble | (zero.astype(jnp.int32) + 8) << 4
        packed = key_codes.astype(jnp.int32) + 8 | (value_codes.astype(jnp.int32) + 8) << 4
    lead = pages.shape[:-3]
    scales = jnp.concatenate([value_pattern, header], axis=-1).astype(jnp.uint16)
    parts = [
        packed.astype(jnp.uint8).reshape(*lead, -1),
        channels.astype(jnp.uint8),
        lax.bitcast_convert_type(scales, jnp.uint8).reshape(*lead, -1),
    ]
    used = sum(part.shape[-1] for part in parts)
    parts.append(jnp.zeros((*lead, -used % 4), jnp.uint8))
    return jnp.concatenate(parts, axis=-1)


def decode_pages(
    rows: jax.Array,
    precision: EncodedPrecision,
    *,
    chunk_size: int,
    head_dim: int,
    dtype: Any,
) -> jax.Array:
    """Rows [..., page_bytes] uint8 of `encode_pages` -> pages [..., 2, c, D] of `dtype`.

    Raises ValueError when the rows cannot be of such pages.
    """
    _check(precision, head_dim, dtype)
    page = 2 * chunk_size * head_dim
    codes_end = page if precision == "int8" else page // 2
    channels_end = codes_end + (head_dim // 2 if precision == "int8" else head_dim)
    scales_end = channels_end + 2 * chunk_size + 2
    expected = scales_end + -scales_end % 4
    if rows.ndim < 1 or rows.shape[-1] != expected or rows.dtype != jnp.uint8:
        raise ValueError(
            f"rows must be [..., {expected}] of uint8, got {list(rows.shape)} of {rows.dtype}"
        )
    lead = rows.shape[:-1]
    codes = rows[..., :codes_end].reshape(*lead, -1, chunk_size, head_dim)
    channels = rows[..., codes_end:channels_end]
    scales = rows[..., channels_end:scales_end].reshape(*lead, -1, 2)
    patterns = lax.bitcast_convert_type(scales, jnp.uint16).astype(jnp.int32)
    if precision == "int8":
        numbers = lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.int32)
        nibble = jnp.concatenate([channels & 15, channels >> 4], axis=-1).astype(jnp.int32)
    else:
        zero = (channels >> 4).astype(jnp.int32) - 8
        keys = (codes & 15).astype(jnp.int32) - 8 + ZERO_STEP * zero[..., None, None, :]
        values = (codes >> 4).astype(jnp.int32) - 8
        numbers = jnp.concatenate([keys, values], axis=-3)
        nibble = (channels & 15).astype(jnp.int32)
    header = patterns[..., -1:]
    key_scale = _number((header & ~7) + (nibble << (header & 7) + FINEST))
    value_scale = _number(patterns[..., :-1])
    shape = (*lead, chunk_size, head_dim)
    scale = jnp.stack(
        [
            jnp.broadcast_to(key_scale[..., None, :], shape),
            jnp.broadcast_to(value_scale[..., None], shape),
        ],
        axis=-3,
    )
    return _round(numbers.astype(jnp.float32) * scale, dtype)


def _check(precision: str, head_dim: int, dtype: Any) -> None:
    if precision not in ("int8", "int4"):
        raise ValueError(f"precision must be int8 or int4, got {precision!r}")
    if jnp.dtype(dtype).name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {jnp.dtype(dtype).name}")
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even, got {head_dim}")


def _pattern(scale: jax.Array) -> jax.Array:
    """Upper half of the bits of float32 |`scale`|, rounded up: a bfloat16, as int32. Zeros have a
    sign."""
    upper = (lax.bitcast_convert_type(jnp.abs(scale), jnp.uint32) + 0xFFFF) >> 16
    return jnp.maximum(upper.astype(jnp.int32), FLOOR)


def _number(pattern: jax.Array) -> jax.Array:
    """The float32 whose upper half `pattern` is."""
    return lax.bitcast_convert_type(pattern.astype(jnp.uint32) << 16, jnp.float32)


def _nibbles(pattern: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """base and step [..., 1], nibble [..., D] so that base + (nibble << step + FINEST) is at least
    pattern [..., D], and less than 1 << step + FINEST above it or base."""
    top = pattern.max(axis=-1, keepdims=True)
    low = jnp.where(pattern > FLOOR, pattern, top).min(axis=-1, keepdims=True)
    base = jnp.maximum(low, top - (15 << COARSEST) + 7) & ~7
    step = sum(((top - base) > 15 << k).astype(jnp.int32) for k in range(FINEST, COARSEST))
    assert isinstance(step, jax.Array)
    shift = step + FINEST
    above = jnp.maximum(pattern - base, 0)
    return base, step, above + (jnp.left_shift(1, shift) - 1) >> shift


def _reciprocal(pattern: jax.Array) -> jax.Array:
    """float32 nearest to 1 / `_number`(pattern)."""
    significand = (pattern & 127 | 128).astype(jnp.uint32)
    quotient = ((jnp.uint32(2**31) + significand // 2) // significand).astype(jnp.float32)
    power = lax.bitcast_convert_type((254 - (pattern >> 7)) << 23, jnp.float32)
    return quotient * np.float32(2.0**-24) * power


def _round(wide: jax.Array, dtype: Any) -> jax.Array:
    """float32 rounded to `dtype`; what reads the result sees it rounded even when XLA drops the
    cast and a cast back. float16 is cut to its range: scales round up, and could leave it."""
    if jnp.dtype(dtype) == jnp.bfloat16:
        wide = lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)
    elif jnp.dtype(dtype) == jnp.float16:
        wide = jnp.clip(wide, -65504.0, 65504.0)
        # reduce_precision makes zeros of subnormals, which are multiples of 2^-24.
        small = jnp.rint(wide * np.float32(2.0**24)) * np.float32(2.0**-24)
        normal = lax.reduce_precision(wide, exponent_bits=5, mantissa_bits=10)
        wide = jnp.where(jnp.abs(wide) < 2.0**-14, small, normal)
    return wide.astype(dtype)
