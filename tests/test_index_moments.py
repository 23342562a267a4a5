"""Quantised planes, packing, and the bounded form of moments."""

from __future__ import annotations

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from kvdrive_jax.index.moments import MomentsForm
from kvdrive_jax.index.quantise import BITS, PlaneSpec, parse_bits
from kvdrive_jax.pallas.scoring.products import pack, packed_product, unpack, word_count
from kvdrive_jax.pallas.scoring.reference import bounded_logits, plane_norm

NARROW = [bits for bits in BITS if bits != 16]


# Each a program of its own: operation by operation, every shape would compile dozens.
packed = jax.jit(pack, static_argnums=1)
unpacked = jax.jit(unpack, static_argnums=(1, 2))
product_of_words = jax.jit(packed_product, static_argnums=2, static_argnames="square")
norm = jax.jit(plane_norm, static_argnums=2)
ranges = jax.jit(PlaneSpec.ranges, static_argnums=0)
quantise = jax.jit(PlaneSpec.quantise, static_argnums=0)
restore = jax.jit(PlaneSpec.restore, static_argnums=0)
product = jax.jit(PlaneSpec.product, static_argnums=0)
build = jax.jit(MomentsForm.build, static_argnums=0)
insert = jax.jit(MomentsForm.insert, static_argnums=0)
score = jax.jit(MomentsForm.scores, static_argnums=(0, 4))


def log_mean_exp(logits: np.ndarray) -> np.ndarray:
    top = logits.max(-1)
    return top + np.log(np.exp(logits - top[..., None]).mean(-1))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.floats(0, 60), st.integers(0, 9999))
def test_bounded_form_lies_above_log_mean_exp_and_the_mean(c: int, size: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((20, c)) * size
    mean, deviation = logits.mean(-1), logits.std(-1)
    got = np.asarray(bounded_logits(jnp.float32(mean), jnp.float32(deviation), c))
    slack = 1e-3 + 1e-4 * size
    assert np.all(got >= log_mean_exp(logits) - slack)
    assert np.all(got <= mean + np.sqrt(c - 1) * deviation + slack)


@pytest.mark.parametrize("c", [2, 3, 4, 8])
def test_bounded_form_is_exact_for_a_needle_and_second_order_for_the_rest(c: int) -> None:
    needle = np.zeros(c)
    needle[0] = 40.0
    got = bounded_logits(jnp.float32(needle.mean()), jnp.float32(needle.std()), c)
    assert float(got) == pytest.approx(log_mean_exp(needle), rel=1e-5)
    assert float(bounded_logits(jnp.float32(1.0), jnp.float32(0.05), c)) == pytest.approx(
        1 + 0.05**2 / 2, abs=1e-4
    )


def test_bounded_form_is_finite_for_any_deviation() -> None:
    got = bounded_logits(jnp.float32([-1e30, 0, 1e30]), jnp.float32([1e30, 0, 1e30]), 4)
    assert np.all(np.isfinite(got))


@pytest.mark.parametrize(("c", "dim", "rotary"), [(4, 64, 0), (3, 80, 0), (8, 96, 72), (4, 9, 0)])
def test_a_needle_along_one_channel_is_scored_exactly(c: int, dim: int, rotary: int) -> None:
    """Keys that differ in one channel, or in both of a RoPE pair for a query along both."""
    form = MomentsForm(chunk_size=c, bits=16, rotary_dim=rotary, paired=False)
    rng = np.random.default_rng(c)
    keys = np.repeat(rng.standard_normal((1, 12, 1, dim)), c, axis=2)
    for chunk in range(12):
        keys[0, chunk, chunk % c, chunk % dim] += 64.0
    query = np.ones((1, 1, dim)) * dim**0.5
    piece = build(form, jnp.asarray(keys, jnp.float32), jnp.int32(12))
    index = insert(form, form.empty(1, 1, dim, 12, 12), 0, piece)
    scores = score(form, index, jnp.asarray(query, jnp.float32), jnp.array([12]), "mean")
    expected = log_mean_exp(keys[0].sum(-1))
    np.testing.assert_allclose(scores[0, 0], expected, rtol=0.02, atol=0.5)


@pytest.mark.parametrize(("dim", "rotary"), [(64, 0), (80, 0), (96, 72), (7, 0), (9, 4)])
def test_pairs_share_their_variance(dim: int, rotary: int) -> None:
    form = MomentsForm(bits=16, rotary_dim=rotary)
    rng = np.random.default_rng(dim)
    keys = rng.standard_normal((2, 5, 4, dim)) * np.exp(rng.standard_normal(dim))
    turned = rotary or dim - dim % 2
    half, variance = turned // 2, keys.var(axis=2)
    shared = variance.copy()
    shared[..., :half] = shared[..., half:turned] = (
        variance[..., :half] + variance[..., half:turned]
    ) / 2
    if rotary:  # the rest shares in halves too
        rest = -(-(dim - turned) // 2)
        second = dim - turned - rest
        mean = (variance[..., turned : turned + second] + variance[..., turned + rest :]) / 2
        shared[..., turned : turned + second] = shared[..., turned + rest :] = mean
    queries = rng.standard_normal((1, 2, 3, dim))
    weights = form.weights(jnp.asarray(queries, jnp.float32))
    _, deviation = form.vectors(jnp.asarray(keys, jnp.float32))
    got = np.einsum("bkgd,knd->bkgn", np.square(weights), np.square(deviation))
    expected = np.einsum("bkgd,knd->bkgn", queries**2, shared)
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    assert form.channels(dim)[1] == deviation.shape[-1]


@pytest.mark.parametrize("bits", NARROW)
@pytest.mark.parametrize("channels", [1, 40, 64, 80, 7])
def test_packing_keeps_every_code(bits: int, channels: int) -> None:
    rng = np.random.default_rng(channels)
    codes = rng.integers(0, 2**bits, (2, channels, 5)).astype(np.uint32)
    words = packed(jnp.asarray(codes), bits)
    assert words.shape == (2, word_count(channels, bits), 5)
    np.testing.assert_array_equal(unpacked(words, bits, channels), codes)
    weights = rng.standard_normal((1, 2, 3, channels)).astype(np.float32)
    for square in (False, True):
        got = product_of_words(jnp.asarray(weights), words[None], bits, square=square)
        values = codes.astype(np.float64) ** (2 if square else 1)
        expected = np.einsum("bkgc,kcn->bkgn", weights.astype(np.float64), values)
        scale = np.einsum("bkgc,kcn->bkgn", np.abs(weights), values).max()
        np.testing.assert_allclose(got, expected, atol=1e-6 * scale)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(NARROW),
    st.booleans(),
    st.sampled_from([(1, 1, 64), (2, 9, 80), (1, 30, 96)]),
    st.floats(-6, 6),
    st.integers(0, 9999),
)
def test_round_trip_stays_inside_half_a_step(
    bits: int, signed: bool, shape: tuple[int, int, int], size: float, seed: int
) -> None:
    """For the chunks that set the ranges and for others, ten times further out."""
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal(shape) * np.exp(rng.standard_normal(shape[-1])) * 10.0**size
    vectors = vectors if signed else np.abs(vectors)
    spec = PlaneSpec(bits, signed)
    scale, middle = ranges(spec, jnp.asarray(vectors, jnp.float32), jnp.int32(shape[1]))
    for x in (vectors, vectors * 10):
        plane = quantise(spec, jnp.asarray(x, jnp.float32), scale, middle)
        back = np.asarray(restore(spec, plane))
        stretch = np.asarray(plane.stretch, np.float64)[..., None]
        step = (2 if signed else 1) * np.asarray(scale)[:, None] * stretch / (2**bits - 1)
        assert np.all(np.abs(back - x) <= step * 0.501 + np.abs(x).max() * 1e-6)
        if x is vectors and shape[1] > 1:
            assert stretch.max() < 1.01  # the full range and no more


@pytest.mark.parametrize("bits", BITS)
def test_products_are_those_of_the_stored_vectors(bits: int) -> None:
    rng = np.random.default_rng(bits)
    x = rng.standard_normal((2, 33, 80)) * 3 + 5
    queries = jnp.asarray(rng.standard_normal((1, 2, 3, 80)), jnp.float32)
    for signed in (True, False):
        spec = PlaneSpec(bits, signed)
        vectors = jnp.asarray(x if signed else np.abs(x), jnp.float32)
        plane = quantise(spec, vectors, *ranges(spec, vectors, jnp.int32(33)))
        batched = jax.tree.map(lambda array: array[None], plane)
        stored = np.asarray(restore(spec, plane), np.float64)
        expected = np.einsum("bkgc,knc->bkgn", np.asarray(queries, np.float64), stored)
        got = product(spec, batched, queries)
        np.testing.assert_allclose(got, expected, atol=2e-4 * np.abs(expected).max())
        if not signed:
            squares = np.einsum(
                "bkgc,knc->bkgn", np.square(np.asarray(queries, np.float64)), stored**2
            )
            got = norm(jnp.abs(queries), batched, spec.bits)
            np.testing.assert_allclose(got, np.sqrt(squares), rtol=1e-4, atol=1e-5)


def test_identical_vectors_and_none() -> None:
    for signed in (True, False):
        spec = PlaneSpec(4, signed)
        same = jnp.full((1, 6, 64), 3.0)
        plane = quantise(spec, same, *ranges(spec, same, jnp.int32(6)))
        np.testing.assert_allclose(restore(spec, plane), 3.0, rtol=0.01)
        none = jnp.zeros((1, 0, 64))
        plane = quantise(spec, none, *ranges(spec, none, jnp.int32(0)))
        assert plane.codes.shape == (1, 8, 0)


def test_bits_are_refused_with_the_choices() -> None:
    assert [parse_bits(text) for text in ("bf16", "8", 4, "2")] == [16, 8, 4, 2]
    with pytest.raises(ValueError, match="bf16, 8, 4, 2; got '16'"):
        parse_bits("16")
    with pytest.raises(ValueError, match="16, 8, 4, 2; got 3"):
        PlaneSpec(3)
