"""The kernels of the index as cases: scoring, selection, k-means."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_check_parts import exact
from benchmarks.gpu_check_parts.bench import relative_error
from benchmarks.gpu_check_parts.draw import Draw
from benchmarks.gpu_check_parts.kernels import Case, Inputs, Sizes, queries_of, same_scores

SCORE_TOLERANCE = 2e-3
"""Largest difference of a log share from float64; scores are float32 whatever the storage."""


def centroid_scores(sizes: Sizes) -> Case:
    """Scores of clusters by their centroids."""
    from kvdrive_jax.pallas.scoring.api import score_vectors

    clusters = max(1, sizes.tokens // 16)
    shape = (sizes.batch, sizes.kv_heads, clusters, sizes.dim)

    def inputs(draw: Draw) -> Inputs:
        present = draw.integers(shape[:3], 0, 8) + (np.arange(clusters, dtype=np.int32) == 0)
        return queries_of(draw, sizes), draw.normal(shape, jnp.bfloat16), present

    def check(out: Any, inputs: Inputs) -> float:
        q, vectors, present = inputs
        grouped = exact.wide(q).reshape(sizes.batch, sizes.kv_heads, -1, sizes.dim)
        logits = np.einsum("bkgd,bkxd->bkgx", grouped, exact.wide(vectors)) * sizes.dim**-0.5
        return same_scores(out, exact.group_scores(logits, np.asarray(present) > 0))

    pairs = sizes.pairs * clusters
    return Case(
        name="centroid scores",
        sizes=sizes,
        inputs=inputs,
        call=lambda *args, **how: score_vectors(*args, "softmax-sum", **how),
        check=check,
        tolerance=SCORE_TOLERANCE,
        nbytes=pairs * (sizes.dim * 2 + 4 + 4),
        flops=2 * pairs * sizes.dim * sizes.heads // sizes.kv_heads,
    )


def moments_scores(sizes: Sizes, bits: int = 4, spread_bits: int = 2) -> Case:
    """Scores of chunks by packed mean and spread."""
    from kvdrive_jax.pallas.scoring.api import score_planes
    from kvdrive_jax.pallas.scoring.products import word_count
    from kvdrive_jax.pallas.scoring.reference import Codes, Recipe

    recipe = Recipe(bits=bits, spread="norm", spread_bits=spread_bits, chunk_size=sizes.chunk)
    lead = (sizes.batch, sizes.kv_heads)
    paired = -(-sizes.dim // 2)
    group = sizes.heads // sizes.kv_heads

    def codes(draw: Draw, channels: int, width: int, middle: bool) -> Any:
        words = (*lead, word_count(channels, width), sizes.chunks)
        stretch = 0.5 + draw.uniform((*lead, sizes.chunks))
        scale = 0.5 + draw.uniform((*lead, channels))
        none = np.zeros((*lead, 0), np.float32)
        return Codes(
            draw.words(words),
            stretch.astype(jnp.bfloat16),
            scale,
            draw.normal((*lead, channels)) if middle else none,
        )

    def inputs(draw: Draw) -> Inputs:
        low = max(1, sizes.chunks // 2) if sizes.holes else sizes.chunks
        held = draw.integers((sizes.batch,), low, sizes.chunks + 1)
        weights = np.abs(draw.normal((*lead, group, paired)))
        first = codes(draw, sizes.dim, bits, True)
        return (
            queries_of(draw, sizes),
            first,
            codes(draw, paired, spread_bits, False),
            weights,
            held,
        )

    def check(out: Any, inputs: Inputs) -> float:
        q, first, second, weights, held = inputs
        logits = exact.moments_logits(
            q, first, second, weights, bits=bits, spread_bits=spread_bits, chunk=sizes.chunk
        )
        real = np.arange(sizes.chunks) < np.asarray(held)[:, None, None]
        return same_scores(
            out, exact.group_scores(logits, np.broadcast_to(real, logits[:, :, 0].shape))
        )

    words = word_count(sizes.dim, bits) + word_count(paired, spread_bits)
    pairs = sizes.pairs * sizes.chunks
    return Case(
        name=f"moments scores, {bits} and {spread_bits} bits",
        sizes=sizes,
        inputs=inputs,
        call=lambda *args, **how: score_planes(*args, recipe, "softmax-sum", **how),
        check=check,
        tolerance=SCORE_TOLERANCE,
        nbytes=pairs * (words * 4 + 2 * 2 + 4),
        flops=2 * pairs * (sizes.dim + paired) * group,
    )


def chunk_selection(sizes: Sizes) -> Case:
    """The best chunks of every row; one score in three is shared by many, so ties decide."""
    from kvdrive_jax.pallas.selection.api import select_chunks

    def inputs(draw: Draw) -> Inputs:
        shape = (sizes.batch, sizes.kv_heads, sizes.chunks)
        scores = draw.normal(shape)
        tied = (np.arange(sizes.chunks) % 3 == 0) & sizes.holes
        scores = np.where(tied, np.round(scores), scores).astype(np.float32)
        low = max(1, sizes.chunks // 2) if sizes.holes else sizes.chunks
        return scores, draw.integers((sizes.batch,), low, sizes.chunks + 1)

    def check(out: Any, inputs: Inputs) -> float:
        scores, held = (np.asarray(x) for x in inputs)
        wanted = np.full((*scores.shape[:2], sizes.selected), sizes.chunks)
        for b, k in np.ndindex(*scores.shape[:2]):
            best = np.argsort(-scores[b, k, : held[b]], kind="stable")[: sizes.selected]
            wanted[b, k, : len(best)] = np.sort(best)
        got = np.asarray(out)
        got = np.sort(np.where(got < 0, sizes.chunks, got), axis=-1)
        return 0.0 if np.array_equal(got, wanted) else np.inf

    return Case(
        name="selection",
        sizes=sizes,
        inputs=inputs,
        call=lambda *args, **how: select_chunks(*args, sizes.selected, **how),
        check=check,
        tolerance=0.0,
        nbytes=4 * sizes.pairs * (sizes.chunks + sizes.selected),
    )


def kmeans_assign(sizes: Sizes) -> Case:
    """Every representative of one segment to its nearest centroid."""
    from kvdrive_jax.pallas.kmeans.api import assign

    vectors, clusters = _segment(sizes)

    def inputs(draw: Draw) -> Inputs:
        directions = draw.normal((sizes.kv_heads, clusters, sizes.dim))
        directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
        in_use = np.arange(clusters) % 7 != 1
        return draw.normal((sizes.kv_heads, vectors, sizes.dim)), directions, in_use

    def check(out: Any, inputs: Inputs) -> float:
        x, directions, in_use = (exact.wide(array) for array in inputs)
        products = np.einsum("knd,kcd->knc", x, directions)
        products[:, :, in_use == 0] = -np.inf
        taken = np.take_along_axis(products, np.asarray(out)[..., None].astype(np.int64), axis=-1)
        lost = (products.max(axis=-1) - taken[..., 0]) / np.linalg.norm(x, axis=-1)
        return float(lost.max())

    pairs = sizes.kv_heads * vectors
    return Case(
        name="k-means assign",
        sizes=sizes,
        inputs=inputs,
        call=assign,
        check=check,
        # In TF32, where two centroids are nearly as near.
        tolerance=2e-3,
        nbytes=4 * (pairs * (sizes.dim + 1) + sizes.kv_heads * clusters * sizes.dim),
        flops=2 * pairs * clusters * sizes.dim,
    )


def kmeans_totals(sizes: Sizes) -> Case:
    """Sums and counts of the clusters of one segment."""
    from kvdrive_jax.pallas.kmeans.api import totals

    vectors, clusters = _segment(sizes)

    def inputs(draw: Draw) -> Inputs:
        ids = draw.integers((sizes.kv_heads, vectors), 0, clusters + 1)  # the last counts nowhere
        return draw.normal((sizes.kv_heads, vectors, sizes.dim)), ids

    def check(out: Any, inputs: Inputs) -> float:
        x, ids = exact.wide(inputs[0]), np.asarray(inputs[1])
        sums = np.zeros((sizes.kv_heads, clusters + 1, sizes.dim))
        counts = np.zeros((sizes.kv_heads, clusters + 1), np.int64)
        for head in range(sizes.kv_heads):
            np.add.at(sums[head], ids[head], x[head])
            np.add.at(counts[head], ids[head], 1)
        if not np.array_equal(np.asarray(out[1]), counts[:, :-1]):
            return np.inf
        return relative_error(out[0], sums[:, :-1])

    pairs = sizes.kv_heads * vectors
    return Case(
        name="k-means totals",
        sizes=sizes,
        inputs=inputs,
        call=lambda *args, **how: totals(*args, clusters, **how),
        check=check,
        tolerance=1e-5,
        nbytes=4 * (pairs * (sizes.dim + 1) + sizes.kv_heads * clusters * (sizes.dim + 1)),
        flops=pairs * sizes.dim,
    )


def _segment(sizes: Sizes) -> tuple[int, int]:
    """Representatives and centroids of one segment of 8,192 tokens."""
    vectors = min(sizes.chunks, 8192 // sizes.chunk)
    return vectors, max(1, vectors * sizes.chunk // 16)
