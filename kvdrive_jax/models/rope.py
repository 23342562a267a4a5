"""Rotary position embedding: which frequencies a model turns its heads by, and the turning.

Five kinds of scaling are known (`ROPE_TYPES`). The frequencies are computed once per session on the
host, in float32 and in the order of operations that checkpoints were trained and are usually run
with, because one unit in the last place of a frequency is a visible angle at position 100,000. Only
`longrope` depends on the session: it has one set of factors for lengths up to the original context
and one for longer ones, chosen by the *final* length, so that a generation that crosses the
original context never mixes keys of both kinds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """How positions become angles.

    Attributes:
        type: one of `ROPE_TYPES`.
        theta: base of the geometric series of frequencies.
        rotary_dim: leading elements of a head that are rotated (even); the rest passes through.
        factor: context extension factor (linear, llama3, yarn).
        original_max_positions: context length before the extension (llama3, yarn, longrope).
        low_freq_factor, high_freq_factor: band between scaled and unscaled frequencies (llama3).
        beta_fast, beta_slow: the same band, in rotations over the original context (yarn).
        truncate: round that band to whole dimensions (yarn).
        attention_factor: multiplies cosine and sine, so scores by its square (yarn, longrope).
        short_factor, long_factor: one divisor per frequency (longrope).

    Raises:
        ValueError: unknown type, odd `rotary_dim`, factors of the wrong number, values out of
            range.
    """

    type: str = "default"
    theta: float = 10000.0
    rotary_dim: int
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.type not in ROPE_TYPES:
            raise ValueError(
                f"rope type: expected one of {', '.join(ROPE_TYPES)}, got {self.type!r}"
            )
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(
                f"rotary_dim: expected an even number of at least 2, got {self.rotary_dim}"
            )
        if not self.theta > 0:
            raise ValueError(f"rope theta: expected a positive number, got {self.theta}")
        if not self.factor > 0:
            raise ValueError(f"rope factor: expected a positive number, got {self.factor}")
        if self.type in ("llama3", "yarn", "longrope") and self.original_max_positions < 1:
            raise ValueError(
                f"original_max_position_embeddings: rope type {self.type!r} expects a positive "
                f"integer, got {self.original_max_positions}"
            )
        if self.type == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "rope type 'llama3' expects low_freq_factor < high_freq_factor, got "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )
        if self.type == "longrope":
            for name in ("short_factor", "long_factor"):
                factors = getattr(self, name)
                if len(factors) != self.rotary_dim // 2:
                    raise ValueError(
                        f"rope {name}: expected {self.rotary_dim // 2} numbers (rotary_dim / 2), "
                        f"got {len(factors)}"
                    )


def parse_rope(raw: Mapping[str, Any], *, head_dim: int, max_positions: int) -> RopeConfig:
    """Reads the RoPE settings of a Hugging Face config.json.

    Both spellings are understood: `rope_parameters` (with theta and partial rotary factor inside)
    and the older `rope_scaling` beside `rope_theta`; the kind is `rope_type` or the older `type`.

    Args:
        raw: the parsed config.json.
        head_dim: D, elements of one head.
        max_positions: the model's maximum context, which some kinds derive their factor from.

    Raises:
        ValueError: an unknown kind, or a kind whose settings are incomplete or inconsistent.
        NotImplementedError: settings that differ between layers.
    """
    settings: dict[str, Any] = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    nested = sorted(key for key, value in settings.items() if isinstance(value, Mapping))
    if nested:
        raise NotImplementedError(
            "rope settings that differ between kinds of layers are not supported: "
            f"{', '.join(nested)}"
        )

    def setting(name: str, default: Any) -> Any:
        for source in (settings, raw):
            if source.get(name) is not None:
                return source[name]
        return default

    kind = str(settings.get("rope_type") or settings.get("type") or "default")
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope type: expected one of {', '.join(ROPE_TYPES)}, got {kind!r}")
    rotary_dim = int(head_dim * float(setting("partial_rotary_factor", 1.0)))
    fields: dict[str, Any] = {
        "type": kind,
        "theta": float(setting("rope_theta", 10000.0)),
        "rotary_dim": rotary_dim,
    }
    if kind == "default":
        return RopeConfig(**fields)

    required = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": (),
        "longrope": ("short_factor", "long_factor"),
    }[kind]
    missing = [name for name in required if settings.get(name) is None]
    if missing:
        raise ValueError(
            f"rope type {kind!r} expects {', '.join(missing)}, which config.json lacks"
        )
    # A value beside the rope settings wins over one inside them: Phi-3 states the true one there.
    original = raw.get("original_max_position_embeddings")
    if original is None:
        original = settings.get("original_max_position_embeddings", max_positions)
    original = int(original)
    fields["original_max_positions"] = original
    factor = settings.get("factor")
    if factor is None:
        if original < 1:
            raise ValueError(
                f"original_max_position_embeddings: expected a positive integer, got {original}"
            )
        factor = max_positions / original
    factor = float(factor)

    if kind == "linear":
        fields["factor"] = factor
    elif kind == "llama3":
        fields |= {
            "factor": factor,
            "low_freq_factor": float(settings["low_freq_factor"]),
            "high_freq_factor": float(settings["high_freq_factor"]),
        }
    elif kind == "yarn":
        fields |= {
            "factor": factor,
            "beta_fast": float(settings.get("beta_fast") or 32),
            "beta_slow": float(settings.get("beta_slow") or 1),
            "truncate": bool(settings.get("truncate", True)),
            "attention_factor": _yarn_attention_factor(settings, factor),
        }
    else:
        attention_factor = settings.get("attention_factor")
        if attention_factor is None:
            attention_factor = (
                1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
            )
        fields |= {
            "attention_factor": float(attention_factor),
            "short_factor": tuple(float(value) for value in settings["short_factor"]),
            "long_factor": tuple(float(value) for value in settings["long_factor"]),
        }
    return RopeConfig(**fields)


def _yarn_attention_factor(settings: Mapping[str, Any], factor: float) -> float:
    """YaRN's temperature: stated, or from the factor and, where given, two mscales."""
    stated = settings.get("attention_factor")
    if stated is not None:
        return float(stated)

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return temperature(float(mscale)) / temperature(float(mscale_all_dim))
    return temperature(1.0)


def inverse_frequencies(
    rope: RopeConfig, final_length: int
) -> tuple[npt.NDArray[np.float32], float]:
    """Angle per position of each rotated pair, for a session of a given length.

    Args:
        rope: the model's RoPE settings.
        final_length: T at the end of the session, prompt and generated tokens together. Only
            `longrope` looks at it.

    Returns:
        float32 [rotary_dim / 2] inverse frequencies, and the factor on cosine and sine.
    """
    one = np.float32(1.0)
    exponents = np.arange(0, rope.rotary_dim, 2).astype(np.float32) / np.float32(rope.rotary_dim)
    # The power is taken in float64 and rounded once: float32 powers differ between libraries in the
    # last place.
    periods = np.power(np.float64(rope.theta), exponents.astype(np.float64)).astype(np.float32)
    if rope.type == "longrope":
        is_long = final_length > rope.original_max_positions
        factors = np.asarray(rope.long_factor if is_long else rope.short_factor, np.float32)
        return one / (factors * periods), rope.attention_factor
    frequencies = one / periods
    if rope.type == "linear":
        frequencies = frequencies / np.float32(rope.factor)
    elif rope.type == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.type == "yarn":
        stretched = one / (np.float32(rope.factor) * periods)
        keep = one - _yarn_ramp(rope)
        frequencies = stretched * (one - keep) + frequencies * keep
    return frequencies, rope.attention_factor


def _llama3(rope: RopeConfig, frequencies: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Llama 3.1: long waves are stretched, short ones kept, those between are interpolated."""
    original, factor = np.float32(rope.original_max_positions), np.float32(rope.factor)
    low, high = np.float32(rope.low_freq_factor), np.float32(rope.high_freq_factor)
    wavelengths = np.float32(2 * math.pi) / frequencies
    scaled = np.where(wavelengths > original / low, frequencies / factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    between = (np.float32(1) - smooth) * scaled / factor + smooth * scaled
    is_between = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return np.where(is_between, between, scaled).astype(np.float32)


def _yarn_ramp(rope: RopeConfig) -> npt.NDArray[np.float32]:
    """0 where a pair turns often within the original context (kept), 1 where seldom."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    pairs = np.arange(rope.rotary_dim // 2, dtype=np.float32)
    ramp = (pairs - np.float32(low)) / np.float32(high - low)
    return np.clip(ramp, np.float32(0), np.float32(1))


def rotate(
    x: jax.Array,
    positions: jax.Array,
    inv_freq: jax.Array,
    attention_factor: jax.Array | float,
) -> jax.Array:
    """Rotates heads by their positions; pairs are (i, i + rotary_dim/2), as Hugging Face
    checkpoints store them.

    Args:
        x: [..., heads, D].
        positions: int32 [...].
        inv_freq: float32, broadcastable to [..., rotary_dim/2]. May differ between sessions of a
        batch.
        attention_factor: float32, broadcastable to [...].

    Returns:
        [..., heads, D] in the dtype of `x`; angles and products are float32, elements past
        rotary_dim are unchanged.
    """
    half = inv_freq.shape[-1]
    frequencies = jnp.broadcast_to(inv_freq, (*positions.shape, half))
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    scale = jnp.broadcast_to(jnp.asarray(attention_factor, jnp.float32), positions.shape)
    cos = (jnp.cos(angles) * scale[..., None])[..., None, :]
    sin = (jnp.sin(angles) * scale[..., None])[..., None, :]
    first = x[..., :half].astype(jnp.float32)
    second = x[..., half : 2 * half].astype(jnp.float32)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([*(t.astype(x.dtype) for t in turned), x[..., 2 * half :]], axis=-1)
