"""Page write against its specification: bit for bit, and nothing else touched."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrive_jax.pallas.page_write import WriteTuning, why_not, write_pages
from kvdrive_jax.pallas.page_write.triton import spans, warps_for

INTERPRET = jax.default_backend() == "cpu"
DTYPES = ("float32", "bfloat16", "float16")


def bits(array: jax.Array) -> np.ndarray:
    host = np.asarray(array)
    return host.view(np.uint32 if host.itemsize == 4 else np.uint16)


def poisoned(shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jnp.full(shape, jnp.nan, dtype)


def check(window_shape, dtype, target, tuning=None, seed=0) -> None:
    page_shape = window_shape[2:]
    rng = np.random.default_rng(seed)
    pages = jnp.asarray(rng.standard_normal((len(target), *page_shape)), dtype)
    pages = pages.at[0, 0, 0, 0].set(-0.0) if pages.size else pages
    expected = bits(poisoned(window_shape, dtype)).reshape(-1, *page_shape).copy()
    slots = len(expected)
    for page, at in zip(bits(pages), target, strict=True):
        if 0 <= at < slots:
            expected[at] = page
    expected = expected.reshape(window_shape)
    for options in (
        {"implementation": "xla"},
        {"implementation": "triton", "interpret": INTERPRET, "tuning": tuning},
    ):
        write = jax.jit(lambda w, p, t, o=options: write_pages(w, p, t, **o), donate_argnums=0)
        out = write(poisoned(window_shape, dtype), pages, jnp.asarray(target, jnp.int32))
        np.testing.assert_array_equal(bits(out), expected, err_msg=str(options))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 3),
    rows=st.integers(1, 15),
    chunk_size=st.sampled_from((1, 2, 3, 4, 8)),
    head_dim=st.sampled_from((16, 64, 80, 96, 128, 256)),
    dtype=st.sampled_from(DTYPES),
    count=st.integers(1, 11),
    per_program=st.sampled_from((1, 2, 3)),
    seed=st.integers(0, 99),
)
def test_equals_specification(batch, rows, chunk_size, head_dim, dtype, count, per_program, seed):
    shape = (batch, rows, 2, chunk_size, head_dim)
    total = batch * rows
    rng = np.random.default_rng(seed)
    target = np.full(count, total, np.int32)
    used = rng.permutation(total)[: rng.integers(0, min(count, total) + 1)]
    target[rng.permutation(count)[: len(used)]] = used
    # Rows without a page may carry any slot that does not exist.
    target[target == total] += rng.integers(0, 5, (target == total).sum())
    check(shape, dtype, target, WriteTuning(pages_per_program=per_program), seed)


def test_negative_targets_write_nothing_and_spare_slot_0():
    check((1, 3, 2, 2, 16), "float32", np.array([-1, 2, -7, -(2**31)], np.int32))


def test_every_slot_written_leaves_no_poison():
    target = np.random.default_rng(1).permutation(2 * 2 * 3).astype(np.int32)
    check((2, 6, 2, 4, 80), "bfloat16", target)


def test_no_pages():
    window = poisoned((1, 6, 2, 1, 16), "float32")
    out = write_pages(window, jnp.zeros((0, 2, 1, 16)), jnp.zeros(0, jnp.int32))
    assert out is window


def test_none_takes_what_runs_here():
    window, page = jnp.zeros((1, 2, 2, 1, 16)), jnp.ones((1, 2, 1, 16))
    out = write_pages(window, page, jnp.array([1], jnp.int32))
    np.testing.assert_array_equal(out[0], np.stack([np.zeros((2, 1, 16)), np.ones((2, 1, 16))]))


@pytest.mark.skipif(not INTERPRET, reason="the kernel runs here")
def test_named_kernel_says_why_not():
    window, page = jnp.zeros((1, 2, 2, 1, 16)), jnp.ones((1, 2, 1, 16))
    assert "GPU" in str(why_not(jnp.float32))
    with pytest.raises(NotImplementedError, match="page write: Triton kernels need an NVIDIA GPU"):
        write_pages(window, page, jnp.array([1], jnp.int32), implementation="triton")


def test_refuses_what_does_not_fit():
    window, page = jnp.zeros((1, 2, 2, 1, 16)), jnp.ones((1, 2, 1, 16))
    at = jnp.array([1], jnp.int32)
    with pytest.raises(ValueError, match="pages"):
        write_pages(window, page[..., :8], at)
    with pytest.raises(ValueError, match="one dtype"):
        write_pages(window, page.astype(jnp.bfloat16), at)
    with pytest.raises(ValueError, match="target must be int32"):
        write_pages(window, page, at.astype(jnp.float32))
    with pytest.raises(ValueError, match="target"):
        write_pages(window, page, jnp.array([1, 2], jnp.int32))
    with pytest.raises(ValueError, match="implementation"):
        write_pages(window, page, at, implementation="cuda")
    with pytest.raises(ValueError, match="pages_per_program"):
        WriteTuning(pages_per_program=0)


def test_as_many_rows_as_int32_counts():
    page, at = jnp.ones((5, 2, 1, 16), jnp.bfloat16), jnp.zeros(5, jnp.int32)
    for rows, fits in ((2**31 - 6, True), (2**31 - 5, False)):
        window = jax.ShapeDtypeStruct((1, rows, *page.shape[1:]), page.dtype)
        if fits:
            assert jax.eval_shape(write_pages, window, page, at) == window
        else:
            with pytest.raises(ValueError, match="at most 2147483642 rows B R with 5 entries"):
                jax.eval_shape(write_pages, window, page, at)


@pytest.mark.parametrize("size", [1, 96, 160, 640, 768, 1024, 2400, 4096])
def test_spans_cover_a_row_once(size):
    covered = [i for start, length in spans(size) for i in range(start, start + length)]
    assert covered == list(range(size))
    assert all(length & (length - 1) == 0 for _, length in spans(size))
    assert warps_for(size * 2) in (1, 2, 4)
