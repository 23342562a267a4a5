"""Scoring kernels against the index forms they serve, whose scores are their specification."""

from __future__ import annotations

import functools

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
    Codes,
    Recipe,
    ScoringTuning,
    products,
    reference,
    score_planes,
    score_vectors,
    why_not,
)
from kvdrive_jax.pallas.scoring.reference import GROUP_RULES, combine_group
from tests.tolerances import TOLERANCE

INTERPRET = jax.default_backend() == "cpu"
KERNEL = {"implementation": "triton", "interpret": INTERPRET}
# Several tiles and programs from few chunks.
SMALL = ScoringTuning(block=32, blocks=2, num_warps=4, num_stages=2, combine_block=64)


def recipe_of(form) -> Recipe:
    spread = {"chunks": "none", "moments": "norm", "bounds": "product"}[form.name]
    specs = form.specs()
    if len(specs) == 1:
        return Recipe(bits=form.bits)
    return Recipe(form.bits, spread, specs[1].bits, form.chunk_size)


def planes_of(form, index, queries):
    """What `score_planes` takes, from an index: first, second, weights."""
    codes = [Codes(p.codes, p.stretch, p.scale, p.middle) for p in index.planes]
    if len(codes) == 1:
        return codes[0], None, None
    grouped = products.group_queries(queries, codes[0].codes.shape[1], queries.shape[-1])
    weights = form._weights(grouped) if form.name == "moments" else jnp.abs(grouped)
    return codes[0], codes[1], weights


@functools.cache
def planes_case(form, dim, group, chunks, dtype, rule):
    """Compiled once: keys, queries, n_chunks -> scores of the form and of the kernel."""

    def run(keys, queries, n_chunks):
        index = form.empty(*keys.shape[:2], dim, chunks, chunks)
        index = form.append(index, keys, n_chunks, jnp.zeros_like(n_chunks))
        expected = form.scores(index, queries, n_chunks, rule)
        first, second, weights = planes_of(form, index, queries)
        args = (queries, first, second, weights, n_chunks, recipe_of(form), rule)
        return expected, score_planes(*args, tuning=SMALL, **KERNEL)

    return jax.jit(run)


def check(expected, got, largest: float) -> None:
    """Equal within float32's share of the largest sum of absolute products."""
    expected, got = np.asarray(expected), np.asarray(got)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    real = ~np.isneginf(expected)
    assert np.isfinite(got[real]).all()
    if real.any():
        assert np.abs(got[real] - expected[real]).max() <= TOLERANCE["float32"] * max(largest, 1.0)


FORMS = [
    (MomentsForm(bits=4), 80, 3, "bfloat16", "softmax-sum"),
    (MomentsForm(bits=16), 64, 5, "float32", "softmax-sum"),
    (MomentsForm(bits=8, chunk_size=2), 128, 1, "float16", "max"),
    (MomentsForm(bits=2, chunk_size=8), 96, 4, "float32", "softmax-max"),
    (BoundsForm(bits=8), 80, 2, "bfloat16", "mean"),
    (ChunksForm(bits=16), 256, 16, "bfloat16", "softmax-sum"),
    (MomentsForm(bits=4, chunk_size=1), 16, 8, "float32", "softmax-sum"),
]


@pytest.mark.parametrize(("form", "dim", "group", "dtype", "rule"), FORMS)
def test_planes_as_the_form(form, dim, group, dtype, rule):
    @settings(max_examples=5, deadline=None, derandomize=True)
    @given(
        count=st.integers(0, 77),
        size=st.sampled_from((1e-20, 1.0, 30.0, 1e18)),
        same=st.booleans(),
        seed=st.integers(0, 99),
    )
    def examples(count, size, same, seed):
        rng = np.random.default_rng(seed)
        keys = rng.standard_normal((2, 2, 77, form.chunk_size, dim)) * size
        keys = np.broadcast_to(keys[:, :, :1], keys.shape) if same else keys
        # float16 has no room for large queries; large keys are the same test.
        queries = jnp.asarray(rng.standard_normal((2, 2 * group, dim)), dtype)
        run = planes_case(form, dim, group, 77, dtype, rule)
        expected, got = run(
            jnp.asarray(keys, jnp.float32), queries, jnp.asarray([77, count], jnp.int32)
        )
        check(expected, got, min(size, 1e15) * 4 * dim**0.5)

    examples()


@pytest.mark.parametrize(
    ("dim", "group", "dtype", "stored", "rule"),
    [
        (80, 3, "bfloat16", "bfloat16", "softmax-sum"),
        (64, 7, "float32", "bfloat16", "softmax-max"),
        (96, 1, "float16", "float16", "mean"),
        (128, 4, "float32", "float32", None),
    ],
)
def test_vectors_as_the_clusters(dim, group, dtype, stored, rule, rng):
    def run(queries, vectors, sizes):
        grouped = reference.vector_logits(queries, vectors)
        expected = (
            jnp.where((sizes > 0)[:, :, None], grouped, -jnp.inf)
            if rule is None
            else combine_group(grouped, sizes > 0, rule)
        )
        plain = score_vectors(queries, vectors, sizes, rule, implementation="xla")
        return expected, plain, score_vectors(queries, vectors, sizes, rule, tuning=SMALL, **KERNEL)

    run = jax.jit(run)
    for size in (1.0, 100.0):
        queries = jnp.asarray(rng.standard_normal((2, 2 * group, dim)) * size, dtype)
        vectors = jnp.asarray(rng.standard_normal((2, 2, 101, dim)), stored)
        sizes = jnp.asarray(rng.integers(0, 3, (2, 2, 101)), jnp.int32).at[0, 0].set(0)
        expected, plain, got = run(queries, vectors, sizes)
        check(expected, plain, size * 4 * dim**0.5)
        check(expected, got, size * 4 * dim**0.5)


@pytest.mark.parametrize("rule", [None, *GROUP_RULES])
def test_xla_is_the_form(rule, rng):
    """The specification beside the kernel says what the index forms say."""
    form = MomentsForm(bits=4)

    @jax.jit
    def run(keys, queries, n_chunks):
        index = form.empty(1, 2, 32, 9, 9)
        index = form.append(index, keys, n_chunks, jnp.zeros_like(n_chunks))
        args = (queries, *planes_of(form, index, queries), n_chunks, recipe_of(form), rule)
        got = score_planes(*args, implementation="xla")
        if rule is not None:
            return form.scores(index, queries, n_chunks, rule), got
        return form.score(index.planes, queries, n_chunks, None), got

    keys = jnp.asarray(rng.standard_normal((1, 2, 9, 4, 32)), jnp.float32)
    queries = jnp.asarray(rng.standard_normal((1, 6, 32)), jnp.float32)
    check(*run(keys, queries, jnp.asarray([8], jnp.int32)), 20.0)


def test_no_chunks():
    form = ChunksForm(bits=8)
    index = form.empty(1, 2, 64, 0, 0)
    queries = jnp.ones((1, 2, 64), jnp.float32)
    n_chunks = jnp.zeros((1,), jnp.int32)
    args = (queries, *planes_of(form, index, queries), n_chunks, recipe_of(form), "max")
    assert score_planes(*args, **KERNEL).shape == (1, 2, 0)


def test_refusals():
    queries = jnp.zeros((1, 34, 64), jnp.float32)
    vectors, sizes = jnp.zeros((1, 2, 5, 64), jnp.bfloat16), jnp.ones((1, 2, 5), jnp.int32)
    assert "17" in str(why_not(jnp.float32, jnp.bfloat16, group=17)) or INTERPRET
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
