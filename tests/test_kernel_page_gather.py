"""Page gather against its specification: bit for bit, and nothing else touched.

The interpreter takes no operand in pinned host memory: here the source is a device array. On a
CUDA GPU the same cases run from `pinned_host`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrive_jax.pallas.page_gather import GatherTuning, gather_pages, why_not
from tests.lowering import MESH, cuda_text

INTERPRET = jax.default_backend() == "cpu"
DTYPES = ("float32", "bfloat16", "float16")


def bits(array: jax.Array) -> np.ndarray:
    host = np.asarray(array)
    return host.view(np.uint32 if host.itemsize == 4 else np.uint16)


def random_case(seed, *, batch, kv_heads, slots, count, chunks, partial):
    """missing [2, B, K, P], first [B, K], table [B, K, N] or None, and rows of the source."""
    rng = np.random.default_rng(seed)
    missing = np.full((2, batch, kv_heads, count), -1, np.int32)
    for b in range(batch):
        # Rows of one pool, in any order, another number of them for each head.
        rows = rng.permutation(slots)
        for k in range(kv_heads):
            n = rng.integers(0, min(count, len(rows), chunks) + 1)
            at = rng.permutation(count)[:n]
            missing[0, b, k, at] = rng.permutation(chunks)[:n]
            missing[1, b, k, at], rows = rows[:n], rows[n:]
    # A chunk for which no slot was left.
    missing[1, rng.random(missing.shape[1:]) < 0.1] = -1
    first = rng.permutation(batch * kv_heads).reshape(batch, kv_heads).astype(np.int32) * chunks
    table = None
    if partial:
        table = np.argsort(rng.random((batch, kv_heads, chunks)), axis=-1).astype(np.int32)
        table[rng.random(table.shape) < 0.3] = -1
    return missing, first, table, batch * kv_heads * chunks


def expected_window(window, source, missing, first, table):
    out = window.copy()
    for b, k, p in np.ndindex(*missing.shape[1:]):
        chunk, slot = missing[:, b, k, p]
        if chunk < 0 or slot < 0:
            continue
        row = chunk if table is None else table[b, k, chunk]
        if row >= 0:
            out[b, slot] = source[first[b, k] + row].reshape(window.shape[2:])
    return out


def place_source(source: jax.Array) -> jax.Array:
    if INTERPRET:
        return source
    device = jax.devices()[0]
    return jax.device_put(
        source, jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    )


def check(page, slots, dtype, case, tuning=None) -> None:
    missing, first, table, rows = case
    elements = int(np.prod(page))
    shape = (first.shape[0], slots, *page)
    source = jnp.asarray(np.random.default_rng(0).standard_normal((rows, elements)), dtype)
    poison = jnp.full(shape, jnp.nan, dtype)
    expected = expected_window(bits(poison), bits(source), missing, first, table)
    table = None if table is None else jnp.asarray(table)
    for options, where in (
        ({"implementation": "xla"}, source),
        (
            {"implementation": "triton", "interpret": INTERPRET, "tuning": tuning},
            place_source(source),
        ),
    ):
        gather = jax.jit(lambda *a, o=options: gather_pages(*a, **o), donate_argnums=0)
        args = (where, jnp.asarray(missing), jnp.asarray(first), table)
        out = gather(jnp.full(shape, jnp.nan, dtype), *args)
        np.testing.assert_array_equal(bits(out), expected, err_msg=str(options))


@settings(max_examples=9, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    slots=st.integers(1, 17),
    chunk_size=st.sampled_from((1, 2, 3, 4, 8)),
    head_dim=st.sampled_from((16, 64, 80, 96, 128, 256)),
    dtype=st.sampled_from(DTYPES),
    count=st.integers(1, 7),
    chunks=st.integers(1, 9),
    partial=st.booleans(),
    per_program=st.sampled_from((1, 2, 3)),
    seed=st.integers(0, 99),
)
def test_equals_specification(
    batch, kv_heads, slots, chunk_size, head_dim, dtype, count, chunks, partial, per_program, seed
):
    case = random_case(
        seed,
        batch=batch,
        kv_heads=kv_heads,
        slots=slots,
        count=count,
        chunks=chunks,
        partial=partial,
    )
    tuning = GatherTuning(pages_per_program=per_program)
    check((2, chunk_size, head_dim), slots, dtype, case, tuning)


def test_nothing_missing_spares_slot_0():
    missing = np.full((2, 2, 1, 5), -1, np.int32)
    check((2, 2, 16), 3, "float32", (missing, np.array([[0], [4]], np.int32), None, 8))


def test_rows_outside_the_source_are_left():
    missing = np.array([[[[0, 3, 1]]], [[[0, 1, 2]]]], np.int32)
    window, source = jnp.zeros((1, 3, 2, 1, 16)), jnp.ones((3, 32))
    for options in (
        {"implementation": "xla"},
        {"implementation": "triton", "interpret": INTERPRET},
    ):
        out = gather_pages(
            window, source, jnp.asarray(missing), jnp.array([[1]], jnp.int32), **options
        )
        np.testing.assert_array_equal(out[0, :, 0, 0, 0], [1, 0, 1])


def test_nothing_to_do_returns_the_window():
    window, first = jnp.zeros((1, 3, 2, 1, 16)), jnp.zeros((1, 1), jnp.int32)
    missing = jnp.full((2, 1, 1, 4), -1, jnp.int32)
    assert gather_pages(window, jnp.zeros((0, 32)), missing, first) is window
    assert gather_pages(window, jnp.zeros((2, 32)), missing[..., :0], first) is window


def case_of_one():
    window, first = jnp.zeros((1, 3, 2, 1, 16)), jnp.zeros((1, 1), jnp.int32)
    return window, jnp.zeros((2, 32)), jnp.zeros((2, 1, 1, 1), jnp.int32), first


@pytest.mark.skipif(not INTERPRET, reason="the kernel runs here")
def test_says_why_not():
    window, source, missing, first = case_of_one()
    assert "GPU" in str(why_not(jnp.float32))
    with pytest.raises(NotImplementedError, match="page gather: Triton kernels need an NVIDIA"):
        gather_pages(window, source, missing, first, implementation="triton")
    device = jax.devices()[0]
    pinned = jax.device_put(
        source, jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    )
    with pytest.raises(NotImplementedError, match=r"XLA cannot gather from pinned_host.*GPU"):
        gather_pages(window, pinned, missing, first)
    with pytest.raises(NotImplementedError, match="interpreter"):
        gather_pages(window, pinned, missing, first, implementation="triton", interpret=True)


def test_refuses_what_does_not_fit():
    window, source, missing, first = case_of_one()
    with pytest.raises(ValueError, match="source"):
        gather_pages(window, source[:, :16], missing, first)
    with pytest.raises(ValueError, match="one dtype"):
        gather_pages(window, source.astype(jnp.bfloat16), missing, first)
    with pytest.raises(ValueError, match="missing must be int32"):
        gather_pages(window, source, missing[0], first)
    huge = jax.ShapeDtypeStruct((1, 2**31 - 1, *window.shape[2:]), window.dtype)
    with pytest.raises(ValueError, match="at most 2147483646 rows B R with 1 entries"):
        jax.eval_shape(gather_pages, huge, source, missing, first)
    with pytest.raises(ValueError, match="first must be int32"):
        gather_pages(window, source, missing, first[0])
    with pytest.raises(ValueError, match="table must be int32"):
        gather_pages(window, source, missing, first, jnp.zeros((1, 1, 0), jnp.int32))
    with pytest.raises(ValueError, match="pages_per_program"):
        GatherTuning(pages_per_program=0)


def test_lowers_for_cuda_with_the_source_left_in_host_memory():
    """No GPU is needed to see that the kernel is handed the host array itself."""

    def shape(dims, dtype, kind="device"):
        spec = jax.sharding.PartitionSpec()
        sharding = jax.sharding.NamedSharding(MESH, spec, memory_kind=kind)
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    def gather(window, source, missing, first):
        return gather_pages(window, source, missing, first, implementation="triton")

    args = (
        shape((2, 24, 2, 4, 80), jnp.bfloat16),
        shape((96, 640), jnp.bfloat16, "pinned_host"),
        shape((2, 2, 3, 5), jnp.int32),
        shape((2, 3), jnp.int32),
    )
    text = cuda_text(gather, *args, donate_argnums=(0,))
    source = next(line for line in text.splitlines() if "func.func public @main" in line)
    assert source.count("pinned_host") == 1
    assert "annotate_device_placement" not in text.replace(source, "")
    assert "triton" in text
