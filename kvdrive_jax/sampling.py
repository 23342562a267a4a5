"""The next token from logits, on the device.

Each session draws from a stream of its own, a function of the seed, the session's number and its
step, so neither its neighbours in a batch nor its place in it change what it draws. Noise is added
to the logits and the largest taken (Gumbel), so that with one seed a change of top-k or top-p
changes a draw only where it forbids it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_LEAST_TEMPERATURE = 1e-4  # below this the quotient of two logits' difference may overflow


@dataclass(frozen=True)
class SamplingRule:
    """What of a configuration shapes the compiled program: hashable, for static arguments."""

    greedy: bool
    top_k: int
    nucleus: bool


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingValues:
    """What of a configuration is data: a change of these compiles nothing.

    Attributes:
        temperature, top_p: float32 scalars.
        seed: uint32 scalar.
    """

    temperature: jax.Array | np.float32
    top_p: jax.Array | np.float32
    seed: jax.Array | np.uint32


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are chosen.

    Attributes:
        temperature: 0 takes the likeliest token; otherwise logits are divided by it.
        top_k: only the k likeliest tokens; 0 means all.
        top_p: only the likeliest tokens whose probability adds up to at least this (after top_k); 1
            means all.
        seed: of the random streams, 0 to 2**32 - 1.

    Raises:
        ValueError: a value out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        t = self.temperature
        if not _is_real(t) or not math.isfinite(t) or (t != 0 and t < _LEAST_TEMPERATURE):
            raise ValueError(
                f"temperature: expected 0 (greedy) or a finite number of at least "
                f"{_LEAST_TEMPERATURE}, got {t!r}"
            )
        if not _is_integer(self.top_k) or not 0 <= self.top_k < 2**31:
            raise ValueError(
                f"top_k: expected 0 (all tokens) or a positive integer, got {self.top_k!r}"
            )
        if not _is_real(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p: expected a number above 0 and up to 1 (all tokens), got {self.top_p!r}"
            )
        if not _is_integer(self.seed) or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: expected an integer from 0 to {2**32 - 1}, got {self.seed!r}")

    @property
    def rule(self) -> SamplingRule:
        """The static half, for a compiled step."""
        if self.temperature == 0:
            return SamplingRule(True, 0, False)
        return SamplingRule(False, int(self.top_k), self.top_p < 1)

    @property
    def values(self) -> SamplingValues:
        """The data half, for a compiled step."""
        return SamplingValues(
            np.float32(self.temperature), np.float32(self.top_p), np.uint32(self.seed)
        )


def sample(
    logits: jax.Array, sessions: jax.Array, steps: jax.Array, config: SamplingConfig
) -> jax.Array:
    """Chooses one token per row.

    Args:
        logits: float32 [B, V].
        sessions: int32 [B], a number of each session that it keeps for life.
        steps: int32 [B], tokens that the session drew before.

    Returns:
        int32 [B]. Equal logits go to the lowest id.
    """
    chosen: jax.Array = choose(logits, sessions, steps, config.values, config.rule)
    return chosen


@functools.partial(jax.jit, static_argnames="rule")
def choose(
    logits: jax.Array,
    sessions: jax.Array,
    steps: jax.Array,
    values: SamplingValues,
    rule: SamplingRule,
) -> jax.Array:
    """`sample` with the configuration in its two halves, for use inside a compiled step."""
    if rule.greedy:
        return _first_largest(logits)
    vocab = logits.shape[-1]
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / values.temperature
    noise = _gumbel(values.seed, sessions, steps, vocab)
    top_k = min(rule.top_k, vocab)
    ids = None
    if 0 < top_k < vocab:
        scaled, ids = lax.top_k(scaled, top_k)
        noise = jnp.take_along_axis(noise, ids, axis=-1)
    if rule.nucleus:
        scaled = jnp.where(nucleus(jax.nn.softmax(scaled, axis=-1), values.top_p), scaled, -jnp.inf)
    best = _first_largest(scaled + noise)
    return best if ids is None else jnp.take_along_axis(ids, best[:, None], axis=-1)[:, 0]


def nucleus(probabilities: jax.Array, top_p: jax.Array | np.float32 | float) -> jax.Array:
    """Marks the fewest tokens, likeliest first and of equals the lowest id first, that add up to at
    least ``top_p``.

    No sort: the bit patterns of non-negative floats are in the order of their values, so the least
    probability that gets in is found by halving, one pass over the row for each of 31 bits.

    Args:
        probabilities: float32 [B, V], rows add up to one.
        top_p: scalar in (0, 1].

    Returns:
        bool [B, V], at least one per row.
    """
    bits = lax.bitcast_convert_type(probabilities, jnp.int32)

    def mass(threshold: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(bits >= threshold[:, None], probabilities, 0), axis=-1)

    def halve(i: jax.Array, threshold: jax.Array) -> jax.Array:
        tried = threshold | (jnp.int32(1) << (30 - i))
        return jnp.where(mass(tried) >= top_p, tried, threshold)

    least = lax.fori_loop(0, 31, halve, jnp.zeros(bits.shape[0], jnp.int32))[:, None]
    above = bits > least
    # Of the tokens at the threshold, as many as are needed, in the order of their ids.
    missing = top_p - jnp.sum(jnp.where(above, probabilities, 0), axis=-1, keepdims=True)
    at = bits == least
    before = jnp.cumsum(at, axis=-1) - 1
    kept: jax.Array = above | (at & ((before == 0) | (before * probabilities < missing)))
    return kept


def all_finite(logits: jax.Array) -> jax.Array:
    """Tells for each row of ``logits [B, V]`` whether it is free of NaN and infinity: bool [B]."""
    return jnp.all(jnp.isfinite(logits), axis=-1)


def _first_largest(x: jax.Array) -> jax.Array:
    """Argmax over the last axis of [B, V], the lowest id of equals: int32 [B].

    Two plain reductions: XLA's argmax on CPU is slower.
    """
    ids = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    last = x.shape[-1] - 1  # also the answer for a row with NaN, which equals nothing
    first: jax.Array = jnp.min(
        jnp.where(x == jnp.max(x, axis=-1, keepdims=True), ids, last), axis=-1
    )
    return first


def _gumbel(
    seed: jax.Array | np.uint32, sessions: jax.Array, steps: jax.Array, vocab: int
) -> jax.Array:
    """Noise [B, V], each row from the key of its own session and step."""
    root = jax.random.key(seed, impl="threefry2x32")

    def row(session: jax.Array, step: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(root, session), step)
        return jax.random.gumbel(key, (vocab,), jnp.float32)

    return jax.vmap(row)(sessions, steps)


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
