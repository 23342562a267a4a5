"""Scoring kernels against what the index forms say of the vectors they store, in float64."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrive_jax.index.bounds import BoundsForm
from kvdrive_jax.index.chunk_means import ChunksForm
from kvdrive_jax.index.moments import MomentsForm
from kvdrive_jax.pallas.scoring import (
    Recipe,
    ScoringTuning,
    products,
    score_planes,
    score_vectors,
    why_not,
)
from kvdrive_jax.pallas.scoring.reference import GROUP_RULES
from tests.tolerances import TOLERANCE

INTERPRET = jax.default_backend() == "cpu"
KERNEL = {"implementation": "triton", "interpret": INTERPRET}
# Several tiles and programs from few chunks.
SMALL = ScoringTuning(block=32, blocks=2, num_warps=4, num_stages=2, combine_block=64)


def combined(logits: np.ndarray, valid: np.ndarray, rule: str | None) -> np.ndarray:
    """The group rules as they are defined: [B, K, G, X] -> [B, K, X]."""
    if rule is None:
        return np.where(valid[:, :, None], logits, -np.inf)
    if rule in ("mean", "max"):
        scores = logits.mean(axis=2) if rule == "mean" else logits.max(axis=2)
        return np.where(valid, scores, -np.inf)
    masked = np.where(valid[:, :, None], logits, -np.inf)
    top = np.where(valid.any(-1)[..., None, None], masked.max(axis=-1, keepdims=True), 0.0)
    total = np.exp(masked - top).sum(axis=-1, keepdims=True)
    shares = masked - top - np.log(np.where(total > 0, total, 1.0))
    best = shares.max(axis=2)
    if rule == "softmax-sum":
        finite = np.where(valid, best, 0.0)
        sums = np.exp(shares - finite[:, :, None]).sum(axis=2)
        best = finite + np.log(np.where(valid, sums, 1.0))
    return np.where(valid, best, -np.inf)


def plane_scores(form, vectors, queries, weights, n_chunks, rule) -> np.ndarray:
    """What each form says of its stored vectors [B, K, N, C]."""
    scale = queries.shape[-1] ** -0.5
    first, *second = (np.asarray(v, np.float64) for v in vectors)
    grouped = np.asarray(queries, np.float64).reshape(*first.shape[:2], -1, queries.shape[-1])
    logits = np.einsum("bkgc,bknc->bkgn", grouped, first) * scale
    if second:
        weights = np.asarray(weights, np.float64)
        if form.name == "bounds":
            logits += np.einsum("bkgc,bknc->bkgn", weights, second[0]) * scale
        else:
            squares = np.einsum("bkgc,bknc->bkgn", weights**2, second[0] ** 2)
            deviation, count = np.sqrt(squares) * scale, form.chunk_size
            reach = math.sqrt(count - 1)
            others = (count - 1) * np.exp(-(reach + 1 / reach) * deviation)
            logits += reach * deviation + np.log((1 + others) / count)
    valid = np.arange(first.shape[2]) < np.asarray(n_chunks)[:, None, None]
    return combined(logits, np.broadcast_to(valid, first.shape[:3]), rule)


@functools.cache
def planes_case(form, dim, chunks, rule, implementation):
    """Compiled once: keys, queries, n_chunks -> scores, stored vectors, weights."""
    options = KERNEL if implementation == "triton" else {"implementation": "xla"}

    def run(keys, queries, n_chunks):
        index = form.empty(*keys.shape[:2], dim, chunks, chunks)
        index = form.append(index, keys, n_chunks, jnp.zeros_like(n_chunks))
        first, *others = index.planes
        second = others[0] if others else None
        grouped = products.group_queries(queries, keys.shape[1], dim)
        weights = form.weights(grouped) if others else None
        args = (queries, first, second, weights, n_chunks, form.recipe(), rule)
        scores = score_planes(*args, tuning=SMALL, **options)
        stored = [spec.restore(p) for spec, p in zip(form.specs(), index.planes, strict=True)]
        return scores, stored, weights

    return jax.jit(run)


def check(expected, got, largest: float) -> None:
    """Equal within float32's share of the largest sum of absolute products."""
    got = np.asarray(got)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    real = ~np.isneginf(expected)
    assert np.isfinite(got[real]).all()
    if real.any():
        assert np.abs(got[real] - expected[real]).max() <= TOLERANCE["float32"] * max(largest, 1.0)


FORMS = [
    (MomentsForm(bits=4), 80, 3, "bfloat16", "softmax-sum"),
    (MomentsForm(bits=16), 64, 5, "float32", "softmax-sum"),
    (MomentsForm(bits=8, spread_bits=8, chunk_size=2), 32, 1, "float16", "max"),
    (MomentsForm(bits=2, chunk_size=8), 128, 4, "float32", "softmax-max"),
    (BoundsForm(bits=8), 96, 2, "bfloat16", "mean"),
    (ChunksForm(bits=16), 256, 16, "bfloat16", "softmax-sum"),
    (MomentsForm(bits=4, chunk_size=1), 16, 8, "float32", None),
]


@pytest.mark.parametrize(("form", "dim", "group", "dtype", "rule"), FORMS)
def test_planes(form, dim, group, dtype, rule):
    @settings(max_examples=5, deadline=None, derandomize=True)
    @given(
        count=st.integers(0, 77),
        size=st.sampled_from((1e-15, 1.0, 30.0, 1e15)),
        same=st.booleans(),
        seed=st.integers(0, 99),
    )
    def examples(count, size, same, seed):
        rng = np.random.default_rng(seed)
        keys = rng.uniform(-1, 1, (2, 2, 77, form.chunk_size, dim)) * size
        keys = np.broadcast_to(keys[:, :, :1], keys.shape) if same else keys
        queries = jnp.asarray(rng.standard_normal((2, 2 * group, dim)), dtype)
        n_chunks = jnp.asarray([77, count], jnp.int32)
        run = planes_case(form, dim, 77, rule, "triton")
        got, stored, weights = run(jnp.asarray(keys, jnp.float32), queries, n_chunks)
        expected = plane_scores(form, stored, queries, weights, n_chunks, rule)
        check(expected, got, size * 4 * dim**0.5)

    examples()


@pytest.mark.parametrize("rule", [None, *GROUP_RULES])
def test_planes_in_xla(rule, rng):
    form, n_chunks = MomentsForm(bits=4), jnp.asarray([8], jnp.int32)
    keys = jnp.asarray(rng.standard_normal((1, 2, 9, 4, 16)), jnp.float32)
    queries = jnp.asarray(rng.standard_normal((1, 6, 16)), jnp.float32)
    got, stored, weights = planes_case(form, 16, 9, rule, "xla")(keys, queries, n_chunks)
    check(plane_scores(form, stored, queries, weights, n_chunks, rule), got, 20.0)


@pytest.mark.parametrize(
    ("dim", "group", "dtype", "stored", "rule"),
    [
        (80, 3, "bfloat16", "bfloat16", "softmax-sum"),
        (64, 7, "float32", "bfloat16", "softmax-max"),
        (96, 1, "float16", "float16", "mean"),
        (128, 4, "float32", "float32", None),
    ],
)
def test_vectors(dim, group, dtype, stored, rule, rng):
    def both(queries, vectors, sizes):
        args = (queries, vectors, sizes, rule)
        plain = score_vectors(*args, implementation="xla")
        return plain, score_vectors(*args, tuning=SMALL, **KERNEL)

    run = jax.jit(both)
    for size in (1.0, 100.0):
        queries = jnp.asarray(rng.standard_normal((2, 2 * group, dim)) * size, dtype)
        vectors = jnp.asarray(rng.standard_normal((2, 2, 101, dim)), stored)
        sizes = jnp.asarray(rng.integers(0, 3, (2, 2, 101)), jnp.int32).at[0, 0].set(0)
        grouped = np.asarray(queries, np.float64).reshape(2, 2, group, dim)
        logits = np.einsum("bkgd,bkxd->bkgx", grouped, np.asarray(vectors, np.float64))
        expected = combined(logits * dim**-0.5, np.asarray(sizes) > 0, rule)
        for got in run(queries, vectors, sizes):
            check(expected, got, size * 4 * dim**0.5)


def test_no_chunks():
    form = ChunksForm(bits=8)
    (plane,) = form.empty(1, 2, 64, 0, 0).planes
    queries, n_chunks = jnp.ones((1, 2, 64), jnp.float32), jnp.zeros((1,), jnp.int32)
    scores = score_planes(queries, plane, None, None, n_chunks, form.recipe(), "max", **KERNEL)
    assert scores.shape == (1, 2, 0)


def test_refusals():
    queries = jnp.zeros((1, 34, 64), jnp.float32)
    vectors, sizes = jnp.zeros((1, 2, 5, 64), jnp.bfloat16), jnp.ones((1, 2, 5), jnp.int32)
    assert "17" in str(why_not(jnp.float32, jnp.bfloat16, group=17))
    with pytest.raises(NotImplementedError, match="16 query heads"):
        score_vectors(queries, vectors, sizes, "max", **KERNEL)
    with pytest.raises(ValueError, match="rule must be"):
        score_vectors(queries, vectors, sizes, "sum")
    with pytest.raises(ValueError, match=r"sizes must be \(1, 2, 5\)"):
        score_vectors(queries, vectors, sizes[..., :4], "max")
    with pytest.raises(ValueError, match="queries must be"):
        score_vectors(queries[:, :33], vectors, sizes, "max")
    with pytest.raises(ValueError, match="spread must be"):
        Recipe(spread="sum")
    with pytest.raises(ValueError, match="bits must be"):
        Recipe(bits=3)
    if INTERPRET:
        with pytest.raises(NotImplementedError, match="need an NVIDIA GPU"):
            score_vectors(queries[:, :32], vectors, sizes, "max", implementation="triton")
