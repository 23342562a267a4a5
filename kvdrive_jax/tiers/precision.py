"""How pages are kept in DRAM and on SSD: as the model made them, or as int8 or int4 codes.

A row is one page, c tokens of D channels, and ends in zeros up to a multiple of 4 bytes:

    int8  codes [2, c, D] int8; a scale per key channel, nibbles [D / 2]; then as int4
    int4  codes [c, D], keys in low nibbles, values in high ones; scale (low nibble) and zero (high
          nibble) per key channel [D]; scale per token of values [c] uint16; header uint16

Keys are scaled per channel, as a few channels are far larger than the rest. A chunk has as many of
these scales as a token has channels, so they must be small: a scale is ``base + (nibble <<
shift)``, read as the upper half of a float32. The header is base, with shift - 4 in its low 3 bits,
as fine as the page allows and 30 octaves wide at most; smaller channels get the smallest scale.
Scales are rounded up: nothing is clipped, and no error exceeds half a scale.

Rotated keys hardly change within a chunk in slow channels, and there the 16 levels of int4 lie
about a zero, ``3 * zero`` scales. The nibble that this takes from the scale is well spent: on keys
of the bundled model the error is 40 % less than with 8 bits of scale and no zero.

An infinite or NaN key makes all keys of its page NaN, such a value its token's values; magnitudes
from 2^120 on count as infinite. No scale is below 2^-100.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from kvdrive_jax.config import Precision as Precision

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Words = npt.NDArray[Any]

DTYPES = ("float32", "bfloat16", "float16")
LIMIT = np.float32(2.0**120)  # magnitudes from here on count as infinite
FLOOR, NAN = 27 << 7, 0x7FC0  # upper halves of the bits of the smallest scale, and of NaN
FINEST, COARSEST = 4, 8  # shifts of the nibbles that scale keys
ZERO_STEP = 3  # scales between zeros: with fewer they do not reach far, with more codes go unused

_BLOCK_VALUES = 1 << 17  # converted at once: what lies between stays in a core's cache


@dataclass(frozen=True)
class PageFormat:
    """A page of c tokens of D values of the model's dtype, kept as `precision` says.

    Raises ValueError for what cannot be: codes need an even D, and float32, bfloat16 or float16.
    """

    precision: Precision
    chunk_size: int
    head_dim: int
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if self.precision not in get_args(Precision):
            known = ", ".join(get_args(Precision))
            raise ValueError(f"precision must be one of {known}, got {self.precision!r}")
        sizes = self.chunk_size, self.head_dim
        if min(sizes) < 1:
            raise ValueError(
                "chunk_size and head_dim must be positive, got {} and {}".format(*sizes)
            )
        if self.precision == "model":
            return
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for {self.precision}, got {self.head_dim}")
        if self.dtype.name not in DTYPES:
            raise ValueError(
                f"dtype must be one of {', '.join(DTYPES)} for {self.precision}, "
                f"got {self.dtype.name}"
            )

    @property
    def page_bytes(self) -> int:
        """Bytes of a row."""
        values = 2 * self.chunk_size * self.head_dim
        if self.precision == "model":
            return values * self.dtype.itemsize
        return self._header + 2 + -(self._header + 2) % 4

    @property
    def _channels(self) -> int:
        """Where the nibbles of channels start."""
        return self.chunk_size * self.head_dim * (2 if self.precision == "int8" else 1)

    @property
    def _tokens(self) -> int:
        """Where the scales of tokens start."""
        return self._channels + self.head_dim // (2 if self.precision == "int8" else 1)

    @property
    def _header(self) -> int:
        return self._tokens + 2 * self.chunk_size


def transcode(source: PageFormat, target: PageFormat) -> Callable[[Bytes], Bytes]:
    """What makes rows [n, source.page_bytes] to rows [n, target.page_bytes], both uint8.

    From int4 to int8 every number stays as it is; from int8 to int4 a row becomes what its decoded
    page is encoded as. Rows of the same format are given back, not copied. Safe in many threads.
    Raises ValueError when the formats are not of the same pages.
    """
    middle = replace(source, precision="model")
    if middle != replace(target, precision="model"):
        raise ValueError(f"target must be of the same pages as {source}, got {target}")
    block = max(1, _BLOCK_VALUES // (2 * source.chunk_size * source.head_dim))

    def convert(rows: Bytes) -> Bytes:
        if rows.ndim != 2 or rows.shape[1] != source.page_bytes or rows.dtype != np.uint8:
            got = f"{list(rows.shape)} of {rows.dtype}"
            raise ValueError(f"rows must be [n, {source.page_bytes}] of uint8, got {got}")
        if source == target:
            return rows
        out = np.empty((len(rows), target.page_bytes), np.uint8)
        for first in range(0, len(rows), block):
            part, made = rows[first : first + block], out[first : first + block]
            if (source.precision, target.precision) == ("int4", "int8"):
                _widen(part, source, target, made)
                continue
            if source.precision != "model" and target.precision != "model":
                part, coded = np.empty((len(part), middle.page_bytes), np.uint8), part
                _decode(coded, source, part)
            if target.precision == "model":
                _decode(part, source, made)
            else:
                _encode(part, target, made)
        return out

    return convert


def _decode(rows: Bytes, form: PageFormat, out: Bytes) -> None:
    """Rows [n, form.page_bytes] into the bytes of pages [n, 2, c, D]."""
    shape = (len(rows), 2, form.chunk_size, form.head_dim)
    nibble, zero = _channel_nibbles(rows, form)
    header = rows[:, form._header : form._header + 2].view("<u2")
    key_scale = _number((header & 0xFFF8) + (nibble.astype(np.uint16) << (header & 7) + FINEST))
    value_scale = _number(rows[:, form._tokens : form._header].view("<u2"))
    wide = np.empty(shape, np.float32)
    if form.precision == "int8":
        codes = rows[:, : form._channels].view(np.int8).reshape(shape)
        keys, values = codes[:, 0], codes[:, 1]
    else:
        keys, values = _int4_numbers(rows, form, zero)
    np.multiply(keys, key_scale[:, None], out=wide[:, 0])
    np.multiply(values, value_scale[..., None], out=wide[:, 1])
    if form.dtype == np.float16:
        np.clip(wide, -65504, 65504, out=wide)
    np.copyto(out.view(form.dtype).reshape(shape), wide, casting="unsafe")


def _encode(rows: Bytes, form: PageFormat, out: Bytes) -> None:
    """Bytes of pages [n, 2, c, D] into rows [n, form.page_bytes]."""
    count, size = len(rows), form.chunk_size
    pages = rows.view(form.dtype).reshape(count, 2, size, form.head_dim)
    wide = pages.astype(np.float32)
    ordinary = np.abs(wide) < LIMIT
    if not (all_ordinary := ordinary.all()):
        wide[~ordinary] = 0
    keys, values = wide[:, 0], wide[:, 1]
    tokens = [keys[:, t] for t in range(size)]
    low, high = reduce(np.minimum, tokens).copy(), reduce(np.maximum, tokens).copy()
    largest, largest_value = np.maximum(high, -low), _largest(values)
    wanted = largest * np.float32(1 / 127 if form.precision == "int8" else 1 / 28)
    if form.precision == "int4":
        wanted = np.maximum(wanted, (high - low) * np.float32(1 / 13))
    most = 127 if form.precision == "int8" else 7
    value_pattern = _pattern(largest_value * np.float32(1 / most))
    base, step, nibble = _nibbles(_pattern(wanted))
    scale = _number(base + (nibble << step + FINEST))
    inverse = 1 / scale
    keys *= inverse[:, None]
    values *= (1 / _number(value_pattern))[..., None]
    np.rint(wide, out=wide)
    header = base | step
    if not all_ordinary:
        odd = ~ordinary[:, 0].all(axis=(1, 2))
        header[odd], nibble[odd] = NAN, 0
        value_pattern[~ordinary[:, 1].all(axis=2)] = NAN
    channels = out[:, form._channels : form._tokens]
    if form.precision == "int8":
        half = form.head_dim // 2
        channels[...] = nibble[:, :half] | nibble[:, half:] << 4
        out[:, : form._channels].view(np.int8)[...] = wide.reshape(count, -1)
    else:
        zero = np.clip(np.rint((low + high + scale) * (inverse * np.float32(1 / 6))), -8, 7)
        channels[...] = nibble | (zero.astype(np.int32) + 8) << 4
        keys -= (ZERO_STEP * zero)[:, None]
        np.maximum(np.minimum(keys, 7, out=keys), -8, out=keys)
        wide += 8
        codes = wide.astype(np.uint8)
        codes[:, 1] <<= 4
        out[:, : form._channels] = (codes[:, 0] | codes[:, 1]).reshape(count, -1)
    out[:, form._tokens : form._header].view("<u2")[...] = value_pattern
    out[:, form._header : form._header + 2].view("<u2")[...] = header
    out[:, form._header + 2 :] = 0


def _widen(rows: Bytes, source: PageFormat, target: PageFormat, out: Bytes) -> None:
    """int4 rows into int8 rows of the same numbers and scales."""
    nibble, zero = _channel_nibbles(rows, source)
    codes = out[:, : target._channels].view(np.int8)
    codes = codes.reshape(len(rows), 2, source.chunk_size, source.head_dim)
    codes[:, 0], codes[:, 1] = _int4_numbers(rows, source, zero)
    half = source.head_dim // 2
    out[:, target._channels : target._tokens] = nibble[:, :half] | nibble[:, half:] << 4
    out[:, target._tokens : target._header + 2] = rows[:, source._tokens : source._header + 2]
    out[:, target._header + 2 :] = 0


def _channel_nibbles(rows: Bytes, form: PageFormat) -> tuple[Words, Words]:
    """Low and high nibbles [n, D] of the channels: scales and zeros. int8 has no zeros."""
    channels = rows[:, form._channels : form._tokens]
    low, high = channels & 15, channels >> 4
    if form.precision == "int8":
        return np.concatenate([low, high], axis=1), high[:, :0]
    return low, high


def _int4_numbers(rows: Bytes, form: PageFormat, zero: Words) -> tuple[Words, Words]:
    """Keys and values [n, c, D] int8 of int4 rows, in scales."""
    codes = rows[:, : form._channels].reshape(len(rows), form.chunk_size, form.head_dim)
    keys, values = (codes & 15).view(np.int8), (codes >> 4).view(np.int8)
    keys += (ZERO_STEP * zero.view(np.int8) - (8 * ZERO_STEP + 8))[:, None]
    values -= 8
    return keys, values


def _largest(values: Floats) -> Floats:
    """Largest magnitude [n, c] of [n, c, D], by halves: NumPy is slow to reduce many short rows."""
    found: Floats = np.abs(values)
    while found.shape[-1] % 2 == 0:
        half = found.shape[-1] // 2
        found = np.maximum(found[..., :half], found[..., half:])
    return found.max(axis=-1)


def _pattern(scale: Floats) -> Words:
    """Upper half of the bits of |`scale`|, rounded up: a bfloat16, as int32. Zeros have a sign."""
    upper = np.abs(scale).view(np.uint32) + np.uint32(0xFFFF) >> 16
    return np.maximum(upper.view(np.int32), FLOOR)


def _number(pattern: Words) -> Floats:
    """The float32 whose upper half `pattern` is."""
    return (pattern.astype(np.uint32) << 16).view(np.float32)


def _nibbles(pattern: Words) -> tuple[Words, Words, Words]:
    """base and step [n, 1], nibble [n, D] so that base + (nibble << step + FINEST) is at least
    pattern [n, D], and less than 1 << step + FINEST above it or base."""
    top = pattern.max(axis=-1, keepdims=True)
    low = np.where(pattern > FLOOR, pattern, top).min(axis=-1, keepdims=True)
    base = np.maximum(low, top - (15 << COARSEST) + 7) & ~7
    thresholds = 15 << np.arange(FINEST, COARSEST, dtype=np.int32)
    step = (top - base > thresholds).sum(axis=-1, keepdims=True, dtype=np.int32)
    shift = step + FINEST
    above = np.maximum(pattern - base, 0)
    return base, step, above + (np.left_shift(1, shift, dtype=np.int32) - 1) >> shift
