"""Encoded pages: their bytes, how far off they are, and that host and device agree bit for bit."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrive_jax.pallas.page_codec import decode_pages, encode_pages
from kvdrive_jax.pallas.page_codec.reference import _reciprocal
from kvdrive_jax.tiers.precision import FLOOR, PageFormat, transcode

DTYPES = {name: np.dtype(jnp.dtype(name)) for name in ("float32", "bfloat16", "float16")}
SHAPES = ((4, 64), (1, 80), (3, 96), (8, 128), (2, 6))
PRECISIONS = ("int8", "int4")
LARGEST = {"float32": 2.0**119, "bfloat16": 2.0**119, "float16": 65504.0}
PAGES = 24

encode = jax.jit(encode_pages, static_argnums=1)
decode = jax.jit(
    decode_pages, static_argnums=1, static_argnames=("chunk_size", "head_dim", "dtype")
)


def form(precision: str, pages: np.ndarray) -> PageFormat:
    return PageFormat(precision, *pages.shape[-2:], pages.dtype)


def rows_of(pages: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(pages).reshape(len(pages), -1).view(np.uint8)


def to_rows(pages: np.ndarray, precision: str) -> np.ndarray:
    return transcode(form("model", pages), form(precision, pages))(rows_of(pages))


def to_pages(rows: np.ndarray, source: PageFormat) -> np.ndarray:
    model = PageFormat("model", source.chunk_size, source.head_dim, source.dtype)
    found = transcode(source, model)(rows).view(source.dtype)
    return found.reshape(-1, 2, source.chunk_size, source.head_dim)


def scales(rows: np.ndarray, source: PageFormat) -> np.ndarray:
    """[n, 2, c, D]: the scale of every number, read from the row as the docstring describes it."""
    size, dim = source.chunk_size, source.head_dim
    codes = 2 * size * dim if source.precision == "int8" else size * dim
    channels = dim // 2 if source.precision == "int8" else dim
    nibble = rows[:, codes : codes + channels].astype(np.int64)
    if source.precision == "int8":
        nibble = np.concatenate([nibble & 15, nibble >> 4], axis=1)
    tail = rows[:, codes + channels : codes + channels + 2 * size + 2].copy().view("<u2")
    header = tail[:, -1:].astype(np.int64)
    keys = (header & ~7) + ((nibble & 15) << ((header & 7) + 4))
    both = np.empty((len(rows), 2, size, dim), np.uint32)
    both[:, 0], both[:, 1] = keys[:, None], tail[:, :-1, None]
    return (both << 16).view(np.float32).astype(np.float64)


def some_pages(seed: int, kind: str, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """PAGES pages: like a model's, of every size there is, or of bits at random."""
    rng = np.random.default_rng(seed)
    full = (PAGES, 2, *shape)
    if kind == "bits":
        size = PAGES * 2 * shape[0] * shape[1] * DTYPES[dtype].itemsize
        return rng.integers(0, 256, size, np.uint8).view(DTYPES[dtype]).reshape(full)
    pages = rng.standard_normal(full)
    if kind == "model":
        pages[:, 0] += 3 * rng.standard_normal((PAGES, 1, shape[1]))
        pages[:, 0, :, 0] *= 200  # a channel far out
        pages[:, :, 0] *= rng.random((PAGES, 2, 1)) > 0.5  # tokens of zeros
    else:
        pages *= np.exp2(rng.integers(-149, 119, (PAGES, 2, 1, shape[1])))
        pages *= np.exp2(rng.integers(-9, 1, full)) * (rng.random(full) > 0.1)
    most = LARGEST[dtype]
    return np.clip(pages, -most, most).astype(DTYPES[dtype])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 9999),
    kind=st.sampled_from(("model", "wide", "bits")),
    case=st.sampled_from(
        [
            (shape, dtype)
            for shape, dtype in itertools.product(SHAPES, DTYPES)
            if shape == (4, 64) or dtype == "bfloat16"
        ]
    ),
    precision=st.sampled_from(PRECISIONS),
)
def test_host_and_device_agree_and_errors_are_bounded(seed, kind, case, precision):
    shape, dtype = case
    pages = some_pages(seed, kind, shape, dtype)
    made = to_rows(pages, precision)
    source = form(precision, pages)
    assert made.shape == (PAGES, source.page_bytes)
    np.testing.assert_array_equal(np.asarray(encode(jnp.asarray(pages), precision)), made)
    found = to_pages(made, source)
    size, dim = shape
    device = decode(jnp.asarray(made), precision, chunk_size=size, head_dim=dim, dtype=dtype)
    np.testing.assert_array_equal(rows_of(np.asarray(device)), rows_of(found))
    if precision == "int4":
        wider = form("int8", pages)
        np.testing.assert_array_equal(
            rows_of(to_pages(transcode(source, wider)(made), wider)), rows_of(found)
        )
    else:
        narrower = form("int4", pages)
        np.testing.assert_array_equal(transcode(source, narrower)(made), to_rows(found, "int4"))

    with np.errstate(invalid="ignore"):
        wide = pages.astype(np.float64)
    # NaN < x is False, and so it is among what makes a channel of keys or a token NaN.
    lost = ~(np.abs(wide) < 2.0**120)
    lost[:, 0] = lost[:, 0].any(axis=(1, 2), keepdims=True)
    lost[:, 1] = lost[:, 1].any(axis=2, keepdims=True)
    np.testing.assert_array_equal(np.isnan(found), lost)
    scale = scales(made, source)
    kept = ~lost
    wide = np.where(kept, wide, 0)
    with np.errstate(invalid="ignore"):
        error = np.abs(np.where(kept, found.astype(np.float64) - wide, 0))
    # Half a scale, what rounding to the model's dtype adds, and half its smallest subnormal.
    rounding = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-11}[dtype]
    bound = scale * (0.5 + 2.0**-15) + np.abs(wide) * rounding * 2 + 2.0**-25
    assert (error <= np.where(kept, bound, 0)).all()
    np.testing.assert_array_equal(found[(wide == 0) & kept], 0)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_scales_are_as_small_as_the_numbers_allow(precision):
    pages = some_pages(1, "model", (4, 64), "float32")
    scale = scales(to_rows(pages, precision), form(precision, pages))
    largest = np.abs(pages[:, 1]).max(axis=2)
    codes = {"int8": 127, "int4": 7}[precision]
    wanted = np.maximum(largest / codes, 2.0**-100)
    assert (scale[:, 1, :, 0] >= wanted * (1 - 1e-6)).all()
    assert (scale[:, 1, :, 0] <= wanted * (1 + 2.0**-7) * (1 + 1e-6)).all()
    low, high = pages[:, 0].min(axis=1), pages[:, 0].max(axis=1)
    largest = np.maximum(high, -low)
    if precision == "int8":
        wanted = largest / 127
    else:
        wanted = np.maximum((high - low) / 13, largest / 28)
    # The channel far out makes the pages' nibbles coarse, but not by more than an octave.
    assert (scale[:, 0, 0] >= wanted * (1 - 1e-6)).all()
    assert (scale[:, 0, 0] <= wanted * 2.01).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_small_channels_survive_a_large_one(precision):
    pages = np.random.default_rng(2).standard_normal((5, 2, 4, 64)).astype(np.float32)
    pages[:, 0, :, 1:] *= 1e-6
    pages[:, 0, :, 0] *= 300
    pages[:, 1, 1] *= 1e-20
    found = to_pages(to_rows(pages, precision), form(precision, pages))
    share = {"int8": 1 / 50, "int4": 1 / 3}[precision]
    for kept, true in ((found[:, 0], pages[:, 0]), (found[:, 1, 1], pages[:, 1, 1])):
        assert np.linalg.norm(kept - true) < share * np.linalg.norm(true)
    small = np.linalg.norm(found[:, 0, :, 1:] - pages[:, 0, :, 1:])
    assert small < share * np.linalg.norm(pages[:, 0, :, 1:])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_stay_finite(precision, dtype):
    pages = np.full((1, 2, 4, 64), LARGEST[dtype], DTYPES[dtype])
    pages[:, :, 1::2] *= -1
    found = to_pages(to_rows(pages, precision), form(precision, pages)).astype(np.float64)
    assert np.isfinite(found).all()
    assert (np.abs(found / pages.astype(np.float64) - 1) < 0.15).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_reads_decoded_pages_sees_them_rounded(dtype):
    pages = some_pages(3, "model", (4, 64), dtype)
    pages[0] *= DTYPES[dtype].type(2.0**-12)
    made = jnp.asarray(to_rows(pages, "int8"))
    settings = {"chunk_size": 4, "head_dim": 64, "dtype": dtype}
    inside = jax.jit(lambda rows: decode_pages(rows, "int8", **settings).astype(jnp.float32) * 3)
    outside = decode(made, "int8", **settings).astype(jnp.float32) * 3
    np.testing.assert_array_equal(inside(made), outside)


def test_reciprocals_are_the_nearest():
    patterns = np.arange(FLOOR, 0x7B80, dtype=np.int32)
    numbers = (patterns.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(jax.jit(_reciprocal)(patterns), 1 / numbers)


@pytest.mark.parametrize(
    ("precision", "size", "dim", "dtype", "expected"),
    [
        ("model", 4, 64, "bfloat16", 1024),
        ("model", 3, 5, "float32", 120),
        ("int8", 4, 64, "bfloat16", 556),
        ("int8", 4, 128, "float32", 1100),
        ("int8", 1, 80, "float16", 204),
        ("int4", 4, 64, "bfloat16", 332),
        ("int4", 4, 128, "float16", 652),
        ("int4", 3, 96, "bfloat16", 392),
        ("int4", 8, 64, "float32", 596),
        ("int4", 1, 80, "bfloat16", 164),
    ],
)
def test_bytes_of_a_page(precision, size, dim, dtype, expected):
    assert PageFormat(precision, size, dim, DTYPES[dtype]).page_bytes == expected


def test_leading_axes_and_no_pages():
    pages = jnp.asarray(some_pages(4, "model", (4, 64), "bfloat16"))
    made = encode(pages, "int4")
    apart = encode(pages.reshape(2, 3, -1, 2, 4, 64), "int4")
    np.testing.assert_array_equal(apart.reshape(made.shape), made)
    settings = {"chunk_size": 4, "head_dim": 64, "dtype": "bfloat16"}
    again = decode(apart, "int4", **settings)
    assert again.shape == (2, 3, 4, 2, 4, 64)
    np.testing.assert_array_equal(again.reshape(pages.shape), decode(made, "int4", **settings))
    for source, target in itertools.product(("model", *PRECISIONS), repeat=2):
        formats = [PageFormat(name, 4, 64, DTYPES["bfloat16"]) for name in (source, target)]
        none = transcode(*formats)(np.zeros((0, formats[0].page_bytes), np.uint8))
        assert none.shape == (0, formats[1].page_bytes)


def test_many_pages_are_as_each_alone():
    pages = np.concatenate([some_pages(seed, "model", (8, 128), "bfloat16") for seed in range(7)])
    many = to_rows(pages, "int4")
    for i in (0, 63, 64, 65, len(pages) - 1):
        np.testing.assert_array_equal(many[i : i + 1], to_rows(pages[i : i + 1], "int4"))


def test_refusals():
    bf16 = DTYPES["bfloat16"]
    with pytest.raises(ValueError, match="precision must be one of model, int8, int4, got 'int2'"):
        PageFormat("int2", 4, 64, bf16)
    with pytest.raises(ValueError, match="chunk_size and head_dim must be positive, got 0 and 64"):
        PageFormat("int8", 0, 64, bf16)
    with pytest.raises(ValueError, match="head_dim must be even for int4, got 63"):
        PageFormat("int4", 4, 63, bf16)
    with pytest.raises(ValueError, match="float16 for int8, got int16"):
        PageFormat("int8", 4, 64, np.dtype(np.int16))
    int4 = PageFormat("int4", 4, 64, bf16)
    for other in (
        PageFormat("int8", 3, 64, bf16),
        PageFormat("int8", 4, 80, bf16),
        PageFormat("model", 4, 64, DTYPES["float16"]),
    ):
        with pytest.raises(ValueError, match=r"target must be of the same pages as .* got"):
            transcode(int4, other)
    with pytest.raises(ValueError, match=r"rows must be \[n, 332\] of uint8, got \[2, 331\]"):
        transcode(int4, int4)(np.zeros((2, 331), np.uint8))
    pages = jnp.zeros((2, 4, 64))
    with pytest.raises(ValueError, match="precision must be int8 or int4, got 'model'"):
        encode_pages(pages, "model")
    with pytest.raises(ValueError, match=r"pages must be \[..., 2, c, D\], got \[3, 4, 64\]"):
        encode_pages(jnp.zeros((3, 4, 64)), "int8")
    with pytest.raises(ValueError, match=r"dtype must be one of .*, got int32"):
        encode_pages(pages.astype(jnp.int32), "int8")
    with pytest.raises(ValueError, match="head_dim must be even, got 63"):
        encode_pages(pages[..., :63], "int8")
    with pytest.raises(ValueError, match=r"rows must be \[..., 332\] of uint8, got \[2, 331\]"):
        decode_pages(
            jnp.zeros((2, 331), jnp.uint8), "int4", chunk_size=4, head_dim=64, dtype="float32"
        )
