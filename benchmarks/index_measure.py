"""What one layer's selection covers: recall, output error, overlap with the oracle's choice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from kvdrive_jax.config import GroupRule
from kvdrive_jax.index.chunks import representatives, split_into_chunks
from kvdrive_jax.index.clusters import ClusterForm
from kvdrive_jax.index.estimate import estimate, unselected_counts
from kvdrive_jax.index.form import IndexForm
from kvdrive_jax.index.selection import select
from kvdrive_jax.pallas.attention.reference import Partial, combine

SINK, LOCAL = 4, 64


@dataclass(frozen=True)
class Ranking:
    """One way to rank chunks: an index form and a group rule; without a form, the oracle, which
    knows the true mass of each chunk, summed over the heads of a group."""

    name: str
    form: IndexForm | None
    rule: GroupRule = "softmax-sum"

    @property
    def chunk(self) -> int:
        """Tokens per chunk."""
        return 4 if self.form is None else self.form.chunk_size


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layer:
    """One layer of one text at W positions after the prompt.

    k, v: [K, T, D]; q: [W, H, D]; positions: [W] int32, of the queries; prompt: int32 scalar.
    """

    k: jax.Array
    v: jax.Array
    q: jax.Array
    positions: jax.Array
    prompt: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Truth:
    """Exact attention: mass [W, K, G, T] of every token, output [W, K, G, D], and the largest logit
    and the sum of exponentials [W, K, G] behind them."""

    mass: jax.Array
    output: jax.Array
    m: jax.Array
    l: jax.Array


@jax.jit
def truth(layer: Layer) -> Truth:
    """Exact attention of every query over every key up to its own."""
    heads = layer.k.shape[0]
    grouped = layer.q.reshape(layer.q.shape[0], heads, -1, layer.q.shape[-1])
    logits = jnp.einsum("wkgd,ktd->wkgt", grouped, layer.k) * layer.k.shape[-1] ** -0.5
    seen = jnp.arange(layer.k.shape[1]) <= layer.positions[:, None, None, None]
    logits = jnp.where(seen, logits, -jnp.inf)
    m = logits.max(axis=-1)
    weights = jnp.exp(logits - m[..., None])
    total = weights.sum(axis=-1)
    mass = weights / total[..., None]
    return Truth(mass, jnp.einsum("wkgt,ktd->wkgd", mass, layer.v), m, total)


def n_chunks(prompt: jax.Array, chunk: int) -> jax.Array:
    """Chunks of a prompt."""
    return jnp.maximum(0, (prompt - SINK - LOCAL) // chunk)


def by_chunk(mass: jax.Array, count: jax.Array, chunk: int) -> jax.Array:
    """[W, K, G, T] -> [W, K, G, N]: mass of each chunk, 0 for padding."""
    capacity = (mass.shape[-1] - SINK) // chunk
    region = mass[..., SINK : SINK + capacity * chunk]
    per_chunk = region.reshape(*mass.shape[:-1], capacity, chunk).sum(axis=-1)
    return jnp.where(jnp.arange(capacity) < count, per_chunk, 0.0)


@partial(jax.jit, static_argnames="ranking")
def scores(layer: Layer, exact: Truth, ranking: Ranking) -> jax.Array:
    """[W, K, N]: how each ranking scores every chunk."""
    count = n_chunks(layer.prompt, ranking.chunk)
    if ranking.form is None:
        best = by_chunk(exact.mass, count, ranking.chunk).sum(axis=2)
        return jnp.where(jnp.arange(best.shape[-1]) < count, best, -jnp.inf)
    form, rule = ranking.form, ranking.rule
    capacity = (layer.k.shape[1] - SINK) // form.chunk_size
    keys = split_into_chunks(
        layer.k, sink=SINK, chunk_size=form.chunk_size, chunk_capacity=capacity
    )
    piece = jax.tree.map(lambda array: array[None], form.build(keys, count))
    # One query at a time, not by broadcasting the index over them: XLA on CPU (to jax 0.11.2 at
    # least) miscompiles a batched matmul of a broadcast operand next to a reduction.
    return lax.map(lambda one: form.scores(piece, one[None], count[None], rule)[0], layer.q)


@partial(jax.jit, static_argnames=("chunk", "budgets"))
def covered(
    layer: Layer,
    exact: Truth,
    scored: jax.Array,
    oracle: jax.Array,
    *,
    chunk: int,
    budgets: tuple[int, ...],
) -> dict[str, jax.Array]:
    """Means over positions and query heads, one per budget: recall, error, overlap.

    recall: share of the attention mass that selection, sink and all after the last chunk hold;
    error: |output - exact| / |exact|; overlap: share of the oracle's chunks of 4 (by budget) whose
    tokens are selected.
    """
    count = n_chunks(layer.prompt, chunk)
    rows = jnp.full(scored.shape[:1], count)
    ids = select(scored, rows, budgets[-1] // chunk)
    best = select(oracle, jnp.full(rows.shape, n_chunks(layer.prompt, 4)), budgets[-1] // 4)
    results: dict[str, list[jax.Array]] = {"recall": [], "error": [], "overlap": []}
    for budget in budgets:
        taken = tokens_of(ids[..., : budget // chunk], layer.k.shape[1], chunk, count)
        wanted = tokens_of(best[..., : budget // 4], layer.k.shape[1], 4, 0)
        mass = jnp.where(taken[:, :, None], exact.mass, 0.0)
        recall = mass.sum(axis=-1)
        output = jnp.einsum("wkgt,ktd->wkgd", mass, layer.v) / recall[..., None]
        results["recall"].append(recall.mean())
        results["error"].append(relative_error(output, exact.output))
        results["overlap"].append((taken & wanted).sum() / wanted.sum())
    return {name: jnp.stack(values) for name, values in results.items()}


def tokens_of(ids: jax.Array, tokens: int, chunk: int, near_from: jax.Array | int) -> jax.Array:
    """[W, K, P] chunk ids -> [W, K, T] bool; sink and all from chunk `near_from` on too, if any."""
    total = (tokens - SINK) // chunk
    rows, heads = jnp.ix_(jnp.arange(ids.shape[0]), jnp.arange(ids.shape[1]))
    at = jnp.where(ids >= 0, ids, total)
    chosen = jnp.zeros((*ids.shape[:2], total), bool)
    chosen = chosen.at[rows[..., None], heads[..., None], at].set(True, mode="drop")
    chosen = jnp.repeat(chosen, chunk, axis=-1)
    chosen = jnp.pad(chosen, [(0, 0), (0, 0), (SINK, tokens - SINK - total * chunk)])
    at_token = jnp.arange(tokens)
    near = (at_token < SINK) | (at_token >= SINK + near_from * chunk)
    return chosen | (near & (jnp.asarray(near_from) > 0))


def relative_error(output: jax.Array, exact: jax.Array) -> jax.Array:
    """Mean of |output - exact| / |exact|."""
    return (jnp.linalg.norm(output - exact, axis=-1) / jnp.linalg.norm(exact, axis=-1)).mean()


@partial(jax.jit, static_argnames=("budgets", "clusters"))
def estimated(
    layer: Layer,
    exact: Truth,
    scored: jax.Array,
    *,
    budgets: tuple[int, ...],
    clusters: ClusterForm | None,
) -> jax.Array:
    """Output error [budgets] when unselected chunks of 4, or clusters of them, are estimated."""
    count = n_chunks(layer.prompt, 4)
    width, heads = layer.q.shape[0], layer.k.shape[0]
    capacity = (layer.k.shape[1] - SINK) // 4
    keys, values = (
        representatives(split_into_chunks(x, sink=SINK, chunk_size=4, chunk_capacity=capacity))
        for x in (layer.k, layer.v)
    )
    groups = jnp.broadcast_to(jnp.arange(capacity), (heads, capacity))
    if clusters is not None:
        piece = clusters.build(keys, count)
        groups = piece.cluster_of_chunk
        real = (jnp.arange(capacity) < count)[:, None]
        rows = jnp.arange(heads)[:, None]
        total = jnp.zeros((heads, piece.sizes.shape[1], values.shape[-1]))
        total = total.at[rows, groups].add(jnp.where(real, values, 0.0))
        values = total / jnp.maximum(piece.sizes, 1)[..., None]
        keys = piece.centroids
    ids = select(scored, jnp.full((width,), count), budgets[-1] // 4)
    errors = []
    for budget in budgets:
        chosen = ids[..., : budget // 4]
        taken = tokens_of(chosen, layer.k.shape[1], 4, count)

        def one(
            args: tuple[jax.Array, jax.Array, jax.Array, Truth],
        ) -> jax.Array:
            q, chosen, taken, exact = args
            left = unselected_counts(chosen[None], groups[None], count[None], keys.shape[1], 4)
            rest = estimate(q[None], keys[None], values[None], left)
            mass = jnp.where(taken[:, None], exact.mass, 0.0)
            dim = q.shape[-1]
            near = Partial(
                (jnp.einsum("kgt,ktd->kgd", mass, layer.v) * exact.l[..., None]).reshape(-1, dim),
                (mass.sum(axis=-1) * exact.l).reshape(-1),
                exact.m.reshape(-1),
            )
            output = combine(near, jax.tree.map(lambda x: x[0], rest))
            return relative_error(output.reshape(exact.output.shape), exact.output)

        errors.append(lax.map(one, (layer.q, chosen, taken, exact)).mean())
    return jnp.stack(errors)


@partial(jax.jit, static_argnames=("budgets", "far"))
def shared(
    layer: Layer, exact: Truth, scored: jax.Array, *, budgets: tuple[int, ...], far: bool
) -> jax.Array:
    """Recall [budgets] when the heads of a layer share their budget, step by step.

    The K heads together take the K x P best chunks by group score, which is an estimated share of
    attention; no head takes more than 4 P (a static shape). far: shares are of all keys, those of
    sink and local included, not of the prompt's chunks alone.
    """
    count = n_chunks(layer.prompt, 4)
    width, heads, capacity = scored.shape
    if far:
        near = tokens_of(jnp.zeros((width, heads, 0), jnp.int32), layer.k.shape[1], 4, count)
        near_mass = jnp.where(near[:, :, None], exact.mass, 0.0).sum(axis=-1).mean(axis=-1)
        scored = scored + jnp.log(jnp.maximum(1 - near_mass, 1e-9))[..., None]
    recalls = []
    for budget in budgets:
        each = budget // 4
        most = min(4 * each, capacity)
        best, ids = lax.top_k(scored, most)
        _, flat = lax.top_k(best.reshape(width, -1), heads * each)
        kept = jnp.zeros((width, heads * most), bool)
        kept = kept.at[jnp.arange(width)[:, None], flat].set(True).reshape(best.shape)
        chosen = jnp.where(kept & (ids < count), ids, -1)
        taken = tokens_of(chosen, layer.k.shape[1], 4, count)
        recalls.append(jnp.where(taken[:, :, None], exact.mass, 0.0).sum(axis=-1).mean())
    return jnp.stack(recalls)
