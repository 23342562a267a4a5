"""Which scoring runs where, and why not the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvdrive_jax.pallas.common import Implementation, choose, tile, why_not_triton
from kvdrive_jax.pallas.scoring import reference, triton
from kvdrive_jax.pallas.scoring.layout import Plan
from kvdrive_jax.pallas.scoring.products import word_count
from kvdrive_jax.pallas.scoring.reference import (
    Codes,
    Recipe,
    Rule,
    check_group_rule,
)


@dataclass(frozen=True, kw_only=True)
class ScoringTuning:
    """block: chunks per tile; blocks: tiles per program, over which its preparation is spread;
    combine_block: chunks per program of the second pass of softmax rules."""

    block: int
    blocks: int
    num_warps: int
    num_stages: int
    combine_block: int = 1024

    @classmethod
    def default(cls, group: int, parts: int, rows: int, chunks: int) -> ScoringTuning:
        """For G query heads per kv head, `parts` bfloat16 numbers per weight, `rows` pairs of
        session and kv head, and N chunks: tiles whose sums fit the registers, and enough programs
        to fill 132 SMs several times over."""
        height = tile(group, 16 if parts == 1 else 4) * (1 if parts == 1 else 4)
        block = max(64, 2048 // height)
        blocks = max(1, min(8, chunks * rows // (block * 132 * 8)))
        return cls(block=block, blocks=blocks, num_warps=4, num_stages=2)


def why_not(query_dtype: Any, index_dtype: Any, *, group: int = 1) -> str | None:
    """The reason the Triton kernel cannot score this case here, or None when it can.

    Args:
        query_dtype: of the queries.
        index_dtype: of the first vector's codes, uint32 for packed ones.
        group: G.
    """
    if group > 16:
        return f"the scoring kernel takes up to 16 query heads per kv head, not {group}"
    packed = jnp.dtype(index_dtype) == jnp.uint32
    return why_not_triton(query_dtype) or (None if packed else why_not_triton(index_dtype))


def score_planes(
    queries: jax.Array,
    first: Codes,
    second: Codes | None,
    weights: jax.Array | None,
    n_chunks: jax.Array,
    recipe: Recipe,
    rule: Rule | None,
    *,
    implementation: Implementation | None = None,
    tuning: ScoringTuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Scores of every chunk by one or two vectors of its own (index forms chunks, moments, bounds).

    Args:
        queries: [B, H, D] bfloat16, float16 or float32, post-RoPE, unscaled.
        first: D channels.
        second: C2 channels; None exactly when `recipe.spread` is ``none``.
        weights: [B, K, G, C2] float32, what multiplies each channel of `second`: |q| for bounds,
            for moments as its form says. None where `second` is.
        n_chunks: [B] int32, chunks each session has.
        recipe: how the vectors are stored and what they say.
        rule: how the G = H / K heads of a kv head are combined (`reference.combine_group`); None
            for the logits of each.
        implementation: ``xla``, ``triton``, or None for Triton where it can. Triton reads the index
            once and writes nothing wide; a softmax rule costs it a second kernel over float32
            logits, because a head's sum is known only at the end.
        tuning: of the kernel.
        interpret: run the kernel in the interpreter.

    Returns:
        [B, K, N] float32, or [B, K, G, N] without a rule: finite for chunks a session has, for
        every finite input; -inf for padding.

    Raises:
        ValueError: shapes, dtypes or names that do not fit.
        NotImplementedError: the named implementation cannot run here; says why.
    """
    if rule is not None:
        check_group_rule(rule)
    _check_queries(queries, first.codes.shape[1] if first.codes.ndim == 4 else 0)
    batch, heads, dim = queries.shape
    kv_heads, chunks = first.codes.shape[1], first.codes.shape[-1]
    group = heads // kv_heads
    _check_codes("first", first, recipe.bits, (batch, kv_heads, dim, chunks))
    _expect("n_chunks", n_chunks, (batch,))
    if (second is None) != (recipe.spread == "none") or (second is None) != (weights is None):
        raise ValueError(f"a recipe with spread {recipe.spread} and second, weights do not fit")
    spread_channels = 0
    if second is not None and weights is not None:
        spread_channels = weights.shape[-1]
        _expect("weights", weights, (batch, kv_heads, group, spread_channels))
        lead = (batch, kv_heads, spread_channels, chunks)
        _check_codes("second", second, recipe.spread_bits, lead)
    reason = why_not(queries.dtype, first.codes.dtype, group=group)
    if interpret and group <= 16:
        reason = None
    chosen = choose("index scoring", implementation, reason, interpret=interpret)
    if not chunks:
        return jnp.zeros((batch, kv_heads, *(() if rule else (group,)), 0), jnp.float32)
    if chosen == "xla":
        logits = _once(
            partial(reference.plane_logits, recipe=recipe), queries, first, second, weights
        )
        real = jnp.arange(chunks, dtype=jnp.int32) < n_chunks[:, None, None]
        return _finish(logits, jnp.broadcast_to(real, (batch, kv_heads, chunks)), rule)
    # What is bfloat16 already needs no splitting; with a spread both vectors share their rows.
    plain = recipe.bits == 16 and second is None and queries.dtype == jnp.bfloat16
    return _run(
        queries, first, second, weights, n_chunks, recipe, rule,
        vectors=False, parts=1 if plain else 3, spread_channels=spread_channels,
        tuning=tuning, interpret=interpret,
    )  # fmt: skip


def score_vectors(
    queries: jax.Array,
    vectors: jax.Array,
    sizes: jax.Array,
    rule: Rule | None,
    *,
    implementation: Implementation | None = None,
    tuning: ScoringTuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Scores of clusters by their centroids: q.x / sqrt(D), combined over the group.

    Args:
        queries: [B, H, D] bfloat16, float16 or float32, post-RoPE, unscaled.
        vectors: [B, K, X, D] of any of the three.
        sizes: [B, K, X] int32; what has size 0 is padding.
        rule, implementation, tuning, interpret: as for `score_planes`.

    Returns:
        [B, K, X] float32, or [B, K, G, X] without a rule: finite where sizes are above 0, for every
        finite input; -inf elsewhere.

    Raises:
        ValueError: shapes, dtypes or names that do not fit.
        NotImplementedError: the named implementation cannot run here; says why.
    """
    if rule is not None:
        check_group_rule(rule)
    if vectors.ndim != 4:
        raise ValueError(f"vectors must be [B, K, X, D], got {vectors.shape}")
    _check_queries(queries, vectors.shape[1])
    batch, heads, dim = queries.shape
    kv_heads, count = vectors.shape[1:3]
    group = heads // kv_heads
    _expect("vectors", vectors, (batch, kv_heads, count, dim))
    _expect("sizes", sizes, (batch, kv_heads, count))
    reason = why_not(queries.dtype, vectors.dtype, group=group)
    if interpret and group <= 16:
        reason = None
    chosen = choose("index scoring", implementation, reason, interpret=interpret)
    if not count:
        return jnp.zeros((batch, kv_heads, *(() if rule else (group,)), 0), jnp.float32)
    if chosen == "xla":
        return _finish(reference.vector_logits(queries, vectors), sizes > 0, rule)
    none = jnp.zeros((batch, kv_heads, 0), jnp.float32)
    return _run(
        queries, Codes(vectors, none, none, none), None, None, sizes, Recipe(), rule,
        vectors=True, parts=1 if queries.dtype == jnp.bfloat16 else 3, spread_channels=0,
        tuning=tuning, interpret=interpret,
    )  # fmt: skip


def _run(
    queries: jax.Array,
    first: Codes,
    second: Codes | None,
    weights: jax.Array | None,
    valid: jax.Array,
    recipe: Recipe,
    rule: Rule | None,
    *,
    vectors: bool,
    parts: int,
    spread_channels: int,
    tuning: ScoringTuning | None,
    interpret: bool,
) -> jax.Array:
    batch, heads, dim = queries.shape
    kv_heads = first.codes.shape[1]
    chunks = first.codes.shape[2 if vectors else 3]
    group = heads // kv_heads
    if tuning is None:
        tuning = ScoringTuning.default(group, parts, batch * kv_heads, chunks)
    plan = Plan(
        recipe=recipe,
        rule=rule,
        vectors=vectors,
        group=group,
        channels=dim,
        spread_channels=spread_channels,
        chunks=chunks,
        parts=parts,
        block=tuning.block,
        blocks=tuning.blocks,
    )
    return triton.score(
        plan,
        valid,
        queries.reshape(batch, kv_heads, group, dim),
        first,
        second,
        weights,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        combine_block=tuning.combine_block,
        interpret=interpret,
    )


def _once(
    logits_of: Callable[..., jax.Array],
    queries: jax.Array,
    first: Codes,
    second: Codes | None,
    weights: jax.Array | None,
) -> jax.Array:
    """`logits_of` the rest, computed once although several loops read them.

    XLA holds the long sum over channels for cheap and computes it again in each loop that reads it.
    On CPU, where its barriers are gone before it fuses, a condition that always holds keeps it from
    that (the time for scores is halved); on GPU a condition would make the host wait, and a barrier
    does it.
    """

    def conditional(queries: jax.Array, *vectors: Any) -> jax.Array:
        nothing = jnp.zeros(jax.eval_shape(logits_of, queries, *vectors).shape, jnp.float32)
        # Queries are finite.
        holds = queries.reshape(-1)[0] < jnp.inf
        return lax.cond(holds, logits_of, lambda *_: nothing, queries, *vectors)

    def barred(queries: jax.Array, *vectors: Any) -> jax.Array:
        return lax.optimization_barrier(logits_of(queries, *vectors))

    logits: jax.Array = lax.platform_dependent(
        queries, first, second, weights, cpu=conditional, default=barred
    )
    return logits


def _finish(logits: jax.Array, valid: jax.Array, rule: Rule | None) -> jax.Array:
    if rule is None:
        return jnp.where(valid[:, :, None], logits, -jnp.inf)
    return reference.combine_group(logits, valid, rule)


def _check_queries(queries: jax.Array, kv_heads: int) -> None:
    if queries.ndim != 3 or not kv_heads or queries.shape[1] % kv_heads:
        raise ValueError(
            f"queries must be [B, G * {kv_heads}, D] for {kv_heads} kv heads, got {queries.shape}"
        )


def _check_codes(name: str, codes: Codes, bits: int, sizes: tuple[int, int, int, int]) -> None:
    batch, kv_heads, channels, chunks = sizes
    if bits == 16:
        _expect(f"{name}.codes", codes.codes, sizes)
        return
    lead = (batch, kv_heads)
    _expect(f"{name}.codes", codes.codes, (*lead, word_count(channels, bits), chunks))
    _expect(f"{name}.stretch", codes.stretch, (*lead, chunks))
    _expect(f"{name}.scale", codes.scale, (*lead, channels))
    if name == "first":
        _expect(f"{name}.middle", codes.middle, (*lead, channels))


def _expect(name: str, array: jax.Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} must be {shape}, got {array.shape}")
