"""The prompt attention kernel against its XLA specification, and where it is used."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrive_jax.models.rope import inverse_frequencies
from kvdrive_jax.pallas import prompt
from kvdrive_jax.pallas.prompt import PromptTuning, prompt_implementation, reference
from kvdrive_jax.pipeline import prefill
from tests.lowering import cuda_text
from tests.tiny import tiny_model
from tests.tolerances import TOLERANCE

INTERPRET = jax.default_backend() == "cpu"
TRITON: dict[str, Any] = {"implementation": "triton", "interpret": INTERPRET}
# Interpreted kernels are long programs that run for a millisecond.
FAST: dict[str, Any] = (
    {"compiler_options": {"xla_backend_optimization_level": 0}} if INTERPRET else {}
)
# dtype, K, G, D, Q, T
SHAPES = (
    ("float32", 2, 3, 64, 32, 128),
    ("bfloat16", 1, 5, 80, 16, 64),
    ("float16", 1, 1, 96, 48, 96),
    ("bfloat16", 1, 16, 128, 16, 32),
    ("float32", 1, 2, 256, 32, 64),
)


@partial(jax.jit, static_argnames="tuning", **FAST)
def kernel(q: Any, k: Any, v: Any, first: Any, tuning: PromptTuning | None = None) -> Any:
    return prompt.attend_block(q, k, v, first, tuning=tuning, **TRITON)


specified = jax.jit(reference.attend_block, static_argnames="block_k")


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int) -> np.ndarray:
    """In float64, for any number of queries and keys and any offset."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    grouped = q.reshape(q.shape[0], k.shape[0], -1, q.shape[2])
    logits = np.einsum("qkgd,ktd->kgqt", grouped, k) * q.shape[2] ** -0.5
    visible = np.arange(k.shape[1])[None] <= first + np.arange(q.shape[0])[:, None]
    logits = np.where(visible, logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("kgqt,ktd->qkgd", weights, v).reshape(q.shape)


@settings(max_examples=16, deadline=None, derandomize=True, database=None)
@given(
    st.sampled_from(SHAPES),
    st.sampled_from(("normal", "equal", "huge", "tiny", "negative zero")),
    st.integers(0, 7),
    st.integers(0, 2**32 - 1),
)
def test_blocks_at_an_offset(shape: tuple[Any, ...], kind: str, block: int, seed: int) -> None:
    """Keys after the block hold NaN, which nothing may touch."""
    dtype, kv_heads, group, dim, queries, tokens = shape
    first = queries * (block % (tokens // queries))
    rng = np.random.default_rng(seed)

    def numbers(*size: int) -> np.ndarray:
        values = rng.standard_normal(size)
        if kind == "equal":
            values[:] = 0.5
        elif kind == "negative zero":
            values = np.copysign(0.0, values)
        elif kind == "huge":  # integers, whose products and sums are exact
            values = np.round(values * 100)
        elif kind == "tiny":
            values *= 1e-6
        return values.astype(jnp.dtype(dtype))

    q = numbers(queries, kv_heads * group, dim)
    k, v = numbers(kv_heads, tokens, dim), numbers(kv_heads, tokens, dim)
    wide = [x.astype(np.float32) for x in (q, k, v)]
    expected = np.asarray(specified(*wide, jnp.int32(first), block_k=16))
    k[:, first + queries :] = np.nan
    v[:, first + queries :] = np.nan
    got = np.asarray(kernel(q, k, v, jnp.int32(first)))
    assert got.dtype == np.float32
    scale = max(np.abs(wide[2]).max(), 1e-30)
    np.testing.assert_allclose(got / scale, expected / scale, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("queries", "first", "tokens", "tuning"),
    [
        (37, 5, 43, PromptTuning(block_q=16, block_k=32)),
        (1, 16, 17, PromptTuning(block_q=16, block_k=16)),
    ],
)
def test_any_length_and_offset(
    rng: np.random.Generator, queries: int, first: int, tokens: int, tuning: PromptTuning
) -> None:
    q = rng.standard_normal((queries, 6, 80), np.float32)
    k, v = rng.standard_normal((2, 2, tokens, 80), np.float32)
    got = kernel(q, k, v, jnp.int32(first), tuning)
    np.testing.assert_allclose(got, exact(q, k, v, first), atol=TOLERANCE["float32"])


def test_default_tuning_fits_every_case() -> None:
    """Powers of two, no tile much larger than the block, shared memory of the smallest GPU."""
    for queries in (1, 20, 512):
        for heads in (4, 32):
            for dim in (64, 80, 96, 128, 256):
                for size in (2, 4):
                    tuning = prompt.prompt_tuning(queries, heads, dim, size)
                    for block in (tuning.block_q, tuning.block_k):
                        assert block >= 16
                        assert block & (block - 1) == 0
                    assert tuning.block_q < max(32, 2 * queries)
                    tiles = tuning.block_q + 2 * tuning.block_k
                    assert tiles * dim * size <= 99 * 1024


def test_prefill_is_the_same_through_the_kernel(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer of a prompt that ends inside a block."""
    monkeypatch.setattr(prefill, "BLOCK_Q", 32)
    monkeypatch.setattr(prefill, "BLOCK_K", 32)
    model = tiny_model()
    length = 75
    inv_freq, factor = inverse_frequencies(model.config.rope, length)
    hidden = rng.standard_normal((96, model.config.hidden_size), np.float32)
    (expected, _), (got, layer) = (
        prefill.prefill_layer(
            model.static,
            model.layers[0],
            jnp.asarray(hidden),
            jnp.int32(length),
            jnp.asarray(inv_freq),
            jnp.float32(factor),
            observed=7,
            implementation=implementation,
            interpret=INTERPRET,
        )
        for implementation in ("xla", "triton")
    )
    assert layer.k.shape == (2, 96, 16)
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_it_lowers_without_anything_quadratic() -> None:
    """float32 at 128K: one launch in place of [Q, T] logits."""
    shape = jax.ShapeDtypeStruct
    q, k = shape((512, 8, 80), jnp.float32), shape((2, 131072, 80), jnp.float32)
    text = cuda_text(prompt.attend_block, q, k, k, shape((), jnp.int32))
    assert text.count("stablehlo.custom_call") == 1
    assert "stablehlo.dot_general" not in text


def test_a_named_implementation_that_cannot_says_why() -> None:
    for name in ("cudnn", "triton"):
        with pytest.raises(NotImplementedError, match="NVIDIA GPU"):
            prompt_implementation("cpu", jnp.dtype("bfloat16"), 64, name)
    with pytest.raises(NotImplementedError, match="not float32"):
        prompt_implementation("gpu", jnp.dtype("float32"), 64, "cudnn")
    with pytest.raises(NotImplementedError, match="head dims up to 128"):
        prompt_implementation("gpu", jnp.dtype("bfloat16"), 256, "cudnn")
    with pytest.raises(NotImplementedError, match="multiples of 16"):
        prompt_implementation("gpu", jnp.dtype("bfloat16"), 72, "triton")
    with pytest.raises(NotImplementedError, match="not float64"):
        prompt_implementation("gpu", jnp.dtype("float64"), 64, "triton")
    with pytest.raises(ValueError, match="one of xla, triton, cudnn"):
        prompt_implementation("gpu", jnp.dtype("bfloat16"), 64, "cuda")
    with pytest.raises(ValueError, match="multiple of 16 rows"):
        prompt.attend_block(
            jnp.zeros((8, 2, 64)), *jnp.zeros((2, 1, 20, 64)), 0, block_k=16, implementation="xla"
        )
    with pytest.raises(ValueError, match=r"q must be \[Q, G \* 2, 64\]"):
        prompt.attend_block(jnp.zeros((8, 3, 64)), *jnp.zeros((2, 2, 16, 64)), 0)


@pytest.mark.parametrize(
    ("platform", "dtype", "dim", "expected"),
    [
        ("gpu", "bfloat16", 128, "cudnn"),
        ("cuda", "float16", 72, "cudnn"),
        ("gpu", "float32", 128, "triton"),
        ("gpu", "bfloat16", 256, "triton"),
        ("gpu", "float32", 72, "xla"),
        ("cpu", "bfloat16", 128, "xla"),
        ("tpu", "bfloat16", 128, "xla"),
    ],
)
def test_the_best_that_can(platform: str, dtype: str, dim: int, expected: str) -> None:
    assert prompt_implementation(platform, jnp.dtype(dtype), dim) == expected
