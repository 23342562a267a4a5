"""Decode attention kernels against their XLA specification, over odd shapes and values."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrive_jax import compat
from kvdrive_jax.pallas import attention
from kvdrive_jax.pallas.attention import MASKED, DecodeTuning, Partial, combine, reference
from tests.lowering import cuda_text
from tests.tolerances import TOLERANCE

INTERPRET = jax.default_backend() == "cpu"
TRITON: dict[str, Any] = {"implementation": "triton", "interpret": INTERPRET}
# Interpreted kernels are long programs that run for a millisecond.
FAST: dict[str, Any] = (
    {"compiler_options": {"xla_backend_optimization_level": 0}} if INTERPRET else {}
)
SMALL = DecodeTuning(block=16, splits=3)
EXAMPLES = settings(max_examples=16, deadline=None, derandomize=True, database=None)

# dtype, B, K, G, D, c, S, P: every chunk size, groups under and over a tile, parts of a tile.
PAGES = (
    ("float32", 2, 1, 17, 64, 4, 7, 5),
    ("bfloat16", 1, 2, 1, 80, 1, 9, 33),
    ("float16", 1, 1, 7, 96, 8, 3, 3),
    ("bfloat16", 2, 2, 16, 128, 2, 11, 9),
)
# dtype, B, K, G, D, T
ROWS = (
    ("float32", 3, 1, 5, 80, 53),
    ("bfloat16", 2, 2, 6, 64, 1),
    ("float16", 2, 1, 8, 256, 49),
)
VALUES = ("normal", "equal", "negative zero", "huge", "tiny")


def numbers(kind: str, rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Values of `dtype`: "huge" ones whose logits differ by thousands, "tiny" ones by nothing."""
    if kind == "equal":
        values = np.full(shape, 0.5)
    elif kind == "negative zero":
        values = np.where(rng.random(shape) < 0.5, -0.0, 0.0)
    elif kind == "huge":  # integers, whose products and sums are exact
        values = np.round(rng.standard_normal(shape) * 100)
    else:
        values = rng.standard_normal(shape) * (1.0 if kind == "normal" else 1e-6)
    return values.astype(jnp.dtype(dtype))


def wide(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """The same numbers in float32, so that the reference rounds nothing."""
    return tuple(array.astype(np.float32) for array in arrays)


def normalised(partial_: Partial) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Attention and log of the mass of each row, and which rows have none."""
    o, l, m = (np.asarray(x, np.float64) for x in partial_)
    empty = l == 0
    np.testing.assert_array_equal(m[empty], np.float32(MASKED))
    np.testing.assert_array_equal(o[empty], 0)
    safe = np.where(empty, 1.0, l)
    return o / safe[..., None], m + np.log(safe), empty


def assert_same(got: Partial, expected: Partial, v: np.ndarray, dtype: str) -> None:
    assert all(x.dtype == jnp.float32 for x in got)
    assert np.all(np.asarray(got.m) >= MASKED)
    out, mass, empty = normalised(got)
    out_, mass_, empty_ = normalised(expected)
    np.testing.assert_array_equal(empty, empty_)
    scale = max(float(np.abs(v.astype(np.float32)).max()), 1e-30)
    np.testing.assert_allclose(out / scale, out_ / scale, atol=TOLERANCE[dtype])
    # Logits are float32 sums of exact products, whatever the dtype; huge ones differ relatively.
    largest = np.abs(mass_[~empty_]).max(initial=0)
    np.testing.assert_allclose(mass, mass_, rtol=1e-6, atol=2e-5 + 1e-6 * largest)


pages_reference = jax.jit(reference.attend_pages)
one_by_one = jax.jit(reference.attend)
rows_reference = jax.jit(reference.attend_rows)
weighted_reference = jax.jit(reference.attend_weighted)


@partial(jax.jit, static_argnames="tuning", **FAST)
def pages_kernel(q: Any, window: Any, slots: Any, tuning: DecodeTuning | None = SMALL) -> Any:
    return attention.attend_pages(q, window, slots, tuning=tuning, **TRITON)


@partial(jax.jit, static_argnames="tuning", **FAST)
def rows_kernel(q: Any, k: Any, v: Any, length: Any, tuning: DecodeTuning | None = SMALL) -> Any:
    return attention.attend_rows(q, k, v, length, tuning=tuning, **TRITON)


@partial(jax.jit, **FAST)
def weighted_kernel(q: Any, k: Any, v: Any, counts: Any) -> Any:
    return attention.attend_weighted(q, k, v, counts, tuning=SMALL, **TRITON)


@EXAMPLES
@given(
    st.sampled_from(PAGES),
    st.sampled_from(VALUES),
    st.sampled_from(("some", "all", "none", "last")),
    st.integers(0, 2**32 - 1),
)
def test_pages(shape: tuple[Any, ...], kind: str, chosen: str, seed: int) -> None:
    """Pages that are not selected hold NaN, which nothing may touch."""
    dtype, batch, kv_heads, group, dim, chunk, slots, selected = shape
    rng = np.random.default_rng(seed)
    q = numbers(kind, rng, (batch, kv_heads * group, dim), dtype)
    pool = slots + kv_heads  # rows of all heads, in any order and with repeats: a kernel does
    window = numbers(kind, rng, (batch, pool, 2, chunk, dim), dtype)  # not care
    ids = rng.integers(0, pool, (batch, kv_heads, selected)).astype(np.int32)
    if chosen == "some":
        ids[rng.random(ids.shape) < 0.4] = -1
    elif chosen == "none":
        ids[0] = -1
    elif chosen == "last":
        ids[..., :-1] = -1
    used = np.zeros((batch, pool), bool)
    for b in range(batch):
        used[b, ids[b][ids[b] >= 0]] = True
    poisoned = window.copy()
    poisoned[~used] = np.nan
    window[~used] = 0
    expected = pages_reference(*wide(q, window), ids)
    assert_same(pages_kernel(q, poisoned, ids), expected, window, dtype)


@EXAMPLES
@given(st.lists(st.integers(0, 6), min_size=3, max_size=3), st.integers(0, 2**32 - 1))
def test_heads_own_different_numbers_of_rows(sizes: list[int], seed: int) -> None:
    """Rows anywhere in one pool: as if each head had a window of its own."""
    batch, group, dim, chunk, most = 2, 2, 64, 3, 6
    kv_heads, pool = len(sizes), most * len(sizes)
    rng = np.random.default_rng(seed)
    q = numbers("normal", rng, (batch, kv_heads * group, dim), "float32")
    window = numbers("normal", rng, (batch, pool, 2, chunk, dim), "float32")
    own = np.zeros((batch, kv_heads, most, 2, chunk, dim), np.float32)
    slots = np.full((batch, kv_heads, most), -1, np.int32)
    for b in range(batch):
        rows = np.split(rng.permutation(pool), np.cumsum(sizes))
        for h, size in enumerate(sizes):
            own[b, h, :size] = window[b, rows[h]]
            slots[b, h, rng.permutation(most)[:size]] = rows[h]
    k, v = (own[:, :, :, i].reshape(batch, kv_heads, most * chunk, dim) for i in range(2))
    valid = np.arange(most * chunk) < np.asarray(sizes)[:, None] * chunk
    expected = one_by_one(q, k, v, valid[None])
    for attend in (pages_kernel, pages_reference):
        assert_same(attend(q, window, slots), expected, v, "float32")


@EXAMPLES
@given(st.sampled_from(ROWS), st.sampled_from(VALUES), st.integers(0, 2**32 - 1))
def test_rows(shape: tuple[Any, ...], kind: str, seed: int) -> None:
    """Rows from the length on hold NaN; lengths of nothing and of everything occur."""
    dtype, batch, kv_heads, group, dim, tokens = shape
    rng = np.random.default_rng(seed)
    length = rng.integers(0, tokens + 1, batch).astype(np.int32)
    length[0] = rng.choice([0, tokens])
    q = numbers(kind, rng, (batch, kv_heads * group, dim), dtype)
    k, v = (numbers(kind, rng, (batch, kv_heads, tokens, dim), dtype) for _ in range(2))
    expected = rows_reference(*wide(q, k, v), length)
    poisoned = [k.copy(), v.copy()]
    for array in poisoned:
        for row, valid in enumerate(length):
            array[row, :, valid:] = np.nan
    assert_same(rows_kernel(q, *poisoned, length), expected, v, dtype)


@EXAMPLES
@given(
    st.sampled_from([(ROWS[0], "int32"), (ROWS[2], "float32")]),
    st.sampled_from(VALUES),
    st.integers(0, 2**32 - 1),
)
def test_weighted(case: tuple[Any, ...], kind: str, seed: int) -> None:
    shape, counted = case
    dtype, batch, kv_heads, group, dim, tokens = shape
    rng = np.random.default_rng(seed)
    q = numbers(kind, rng, (batch, kv_heads * group, dim), dtype)
    k, v = (numbers(kind, rng, (batch, kv_heads, tokens, dim), dtype) for _ in range(2))
    counts = rng.choice([0, 1, 2, 1000], (batch, kv_heads, tokens), p=[0.4, 0.3, 0.2, 0.1])
    counts[0, 0] *= rng.integers(0, 2)
    counts = counts.astype(counted)
    expected = weighted_reference(*wide(q, k, v), counts)
    assert_same(weighted_kernel(q, k, v, counts), expected, v, dtype)


def test_float32_queries_over_narrow_keys(rng: np.random.Generator) -> None:
    """As an index has them: products are float32, the keys are not widened in memory."""
    q = numbers("normal", rng, (1, 3, 64), "float32")
    k, v = (numbers("normal", rng, (1, 1, 20, 64), "bfloat16") for _ in range(2))
    counts = np.ones((1, 1, 20), np.float32)
    expected = weighted_reference(q, *wide(k, v), counts)
    assert_same(weighted_kernel(q, k, v, counts), expected, v, "float32")


@pytest.mark.parametrize(
    ("dtype", "group", "dim", "chunk", "near", "parts"),
    [
        ("float32", 3, 64, 4, 37, "near, pages and rest"),
        ("bfloat16", 4, 128, 2, 70, "near and pages"),
        ("float16", 2, 80, 8, 5, "near"),
    ],
)
def test_a_whole_step(
    rng: np.random.Generator, dtype: str, group: int, dim: int, chunk: int, near: int, parts: str
) -> None:
    """Two launches for what the reference makes of its pieces, an empty near buffer included."""
    batch, kv_heads, slots, selected = 2, 2, 5, 4
    make = partial(numbers, "normal", rng, dtype=dtype)
    q = make((batch, kv_heads * group, dim))
    k, v = make((batch, kv_heads, dim)), make((batch, kv_heads, dim))
    near_k, near_v = (make((batch, kv_heads, near, dim)) for _ in range(2))
    length = np.asarray([near - 2, 0], np.int32)
    args = (q, k, v, near_k, near_v, length)
    more: dict[str, Any] = {}
    if "pages" in parts:
        more["window"] = make((batch, slots, 2, chunk, dim))
        more["slots"] = rng.integers(-1, slots, (batch, kv_heads, selected)).astype(np.int32)
    if "rest" in parts:
        more["rest"] = rows_reference(*wide(q, near_v, near_k), length)
    plain = jax.jit(partial(attention.attend_step, implementation="xla"))
    expected = plain(*wide(*args[:5]), length, **_wide_window(more))
    step = partial(attention.attend_step, tuning=SMALL, **TRITON)
    got = jax.jit(step, **FAST)(*args, **more)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=4 * TOLERANCE[dtype])


def _wide_window(more: dict[str, Any]) -> dict[str, Any]:
    return more | ({"window": wide(more["window"])[0]} if "window" in more else {})


def test_the_step_is_its_pieces_combined(rng: np.random.Generator) -> None:
    q, (k, v) = rng.standard_normal((2, 4, 16)), rng.standard_normal((2, 2, 2, 16))
    near_k, near_v = rng.standard_normal((2, 2, 2, 5, 16))
    window = rng.standard_normal((2, 3, 2, 4, 16))
    slots, length = rng.integers(-1, 3, (2, 2, 2)).astype(np.int32), np.asarray([5, 3], np.int32)

    @jax.jit
    def both(*arrays: Any) -> Any:
        q, k, v, near_k, near_v, window = arrays
        pieces = (
            attention.attend_pages(q, window, slots, implementation="xla"),
            attention.attend_rows(q, near_k, near_v, length, implementation="xla"),
            attention.attend_one(q, k, v),
        )
        step = attention.attend_step(
            q, k, v, near_k, near_v, length, window=window, slots=slots, implementation="xla"
        )
        return combine(*pieces), step

    np.testing.assert_array_equal(*both(*wide(q, k, v, near_k, near_v, window)))


def test_nothing_to_attend_to(rng: np.random.Generator) -> None:
    q = numbers("normal", rng, (1, 2, 64), "float32")
    k = v = numbers("normal", rng, (1, 1, 64), "float32")
    none = jnp.zeros((1, 1, 0, 64))
    length = jnp.zeros(1, jnp.int32)
    for how in (TRITON, {"implementation": "xla"}):
        for empty in (
            attention.attend_pages(
                q, jnp.zeros((1, 3, 2, 4, 64)), jnp.zeros((1, 1, 0), jnp.int32), **how
            ),
            attention.attend_rows(q, none, none, length, **how),
            attention.attend_weighted(q, none, none, jnp.zeros((1, 1, 0)), **how),
        ):
            np.testing.assert_array_equal(empty.o, 0)
            np.testing.assert_array_equal(empty.l, 0)
            np.testing.assert_array_equal(empty.m, np.float32(MASKED))
        alone = attention.attend_step(q, k, v, none, none, length, **how)
        np.testing.assert_allclose(alone, jnp.broadcast_to(v, q.shape), rtol=1e-6)


def test_where_pages_lie_changes_no_bit(rng: np.random.Generator) -> None:
    """Only selection decides the answer, not which slot holds what."""
    q = numbers("normal", rng, (1, 2, 80), "bfloat16")
    window = numbers("normal", rng, (1, 9, 2, 1, 80), "bfloat16")
    ids = rng.integers(-1, 9, (1, 2, 33)).astype(np.int32)
    order = rng.permutation(9).astype(np.int32)
    moved = np.empty_like(window)
    moved[:, order] = window
    elsewhere = np.where(ids >= 0, order[ids], -1)
    for a, b in zip(pages_kernel(q, window, ids), pages_kernel(q, moved, elsewhere), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("splits", [None, 20])
def test_any_number_of_splits(rng: np.random.Generator, splits: int | None) -> None:
    """The default, and more than the merge takes at a time."""
    q = numbers("normal", rng, (1, 2, 64), "float32")
    k, v = (numbers("normal", rng, (1, 1, 309, 64), "float32") for _ in range(2))
    length = np.asarray([305], np.int32)
    tuning = None if splits is None else DecodeTuning(block=16, splits=splits)
    expected = rows_reference(q, k, v, length)
    assert_same(rows_kernel(q, k, v, length, tuning), expected, v, "float32")


def test_default_tuning_fits_every_case() -> None:
    for dim in (64, 80, 96, 128, 256):
        for size in (2, 4):
            for tokens in (1, 100, 10**6):
                tuning = attention.decode_tuning(8, tokens, dim, size)
                assert tuning.block >= 16
                assert tuning.block & (tuning.block - 1) == 0
                assert tuning.block * dim * size <= 2**15
                assert tuning.splits >= 1


def test_what_it_lowers_to() -> None:
    """On a GPU None picks the kernels: two launches, and no gathered copy beside them."""
    shape = jax.ShapeDtypeStruct
    q, own = shape((2, 8, 80), jnp.bfloat16), shape((2, 2, 80), jnp.bfloat16)
    near = shape((2, 2, 70, 80), jnp.bfloat16)
    window, slots = shape((2, 9, 2, 4, 80), jnp.bfloat16), shape((2, 2, 5), jnp.int32)
    length = shape((2,), jnp.int32)
    text = cuda_text(
        attention.attend_step, q, own, own, near, near, length, window=window, slots=slots
    )
    assert text.count("stablehlo.custom_call") == 2
    assert "stablehlo.gather" not in text


def test_why_not() -> None:
    q, k = jnp.zeros((1, 2, 72)), jnp.zeros((1, 1, 8, 72))
    length = jnp.zeros(1, jnp.int32)
    rows = partial(attention.attend_rows, q, k, k, length)
    with pytest.raises(NotImplementedError, match="multiples of 16 up to 256, not 72"):
        rows(implementation="triton", interpret=True)
    with pytest.raises(ValueError, match="implementation must be None or one of"):
        rows(implementation="cuda")
    with compat.compiling_for("cpu"):
        assert "need an NVIDIA GPU" in str(attention.why_not_decode(jnp.float32, 64))
    with compat.compiling_for("gpu"):
        assert attention.why_not_decode(jnp.bfloat16, 96, 16) is None
        assert "not float64" in str(attention.why_not_decode("float64", 96))
        assert "not 65" in str(attention.why_not_decode(jnp.bfloat16, 96, 65))
    assert rows().o.shape == q.shape  # the reference serves every head dim


def test_shapes_that_do_not_fit() -> None:
    q, k, length = jnp.zeros((1, 4, 64)), jnp.zeros((1, 2, 8, 64)), jnp.zeros(1, jnp.int32)
    window, slots = jnp.zeros((1, 3, 2, 4, 64)), jnp.zeros((1, 2, 2), jnp.int32)
    own = jnp.zeros((1, 2, 64))
    with pytest.raises(ValueError, match=r"q must be \[1, G \* 2, 64\], got \(1, 3, 64\)"):
        attention.attend_rows(q[:, :3], k, k, length)
    with pytest.raises(ValueError, match="k and v must be"):
        attention.attend_rows(q, k, k[:, :, :4], length)
    with pytest.raises(ValueError, match=r"length must be \[1\]"):
        attention.attend_rows(q, k, k, jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match="counts must be"):
        attention.attend_weighted(q, k, k, jnp.zeros((1, 2, 7)))
    with pytest.raises(ValueError, match="window must be"):
        attention.attend_pages(q, window[:, :, 0], slots)
    huge = jax.ShapeDtypeStruct((1, 2**28, 2, 4, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="at most 2147483647 keys and values R 2 c per session"):
        jax.eval_shape(attention.attend_pages, q, huge, slots)
    with pytest.raises(ValueError, match=r"slots must be .* int32"):
        attention.attend_pages(q, window, slots.astype(jnp.float32))
    with pytest.raises(ValueError, match="slots must be of 2 kv heads"):
        attention.attend_step(q, own, own, k, k, length, window=window, slots=slots[:, :1])
    with pytest.raises(ValueError, match="go together"):
        attention.attend_step(q, own, own, k, k, length, window=window)
    with pytest.raises(ValueError, match=r"k and v must be \(1, 2, 64\)"):
        attention.attend_step(q, own[:, :1], own, k, k, length)
