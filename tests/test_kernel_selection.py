"""Selection kernels: exactly the set that sorting gives, on adversarial rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrive_jax.pallas.selection import (
    SelectionTuning,
    reference,
    select_chunks,
    select_clusters,
)
from kvdrive_jax.pallas.selection.triton import rounds_of

INTERPRET = jax.default_backend() == "cpu"
KERNEL = {"implementation": "triton", "interpret": INTERPRET}
# (chunks, P, segment): two rounds of the widest tiles; three rounds; several tiles in one program;
# fewer chunks than P.
CASES = ((16385, 5, 16384), (300, 7, 32), (77, 20, 16), (33, 40, 64))


@functools.cache
def compiled(chunks: int, count: int, segment: int):
    tuning = SelectionTuning(segment=segment, chunk_width=32)

    def run(scores, n_chunks, cluster_scores, sizes, members):
        half = jnp.full(scores.shape[:2], count // 2, jnp.int32)
        clusters = (cluster_scores, sizes, members, n_chunks, count)
        return {
            "xla": select_chunks(scores, n_chunks, count, implementation="xla"),
            "bisection": reference.top_chunks_by_bisection(scores, n_chunks, count),
            "triton": select_chunks(scores, n_chunks, count, tuning=tuning, **KERNEL),
            "triton limited": select_chunks(
                scores, n_chunks, count, limit=half, tuning=tuning, **KERNEL
            ),
            "xla limited": select_chunks(scores, n_chunks, count, limit=half, implementation="xla"),
            "xla clusters": select_clusters(*clusters, implementation="xla"),
            "triton clusters": select_clusters(*clusters, tuning=tuning, **KERNEL),
        }

    return jax.jit(run)


def row(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    normal = rng.standard_normal(shape)
    made = {
        "normal": normal,
        "zeros": rng.choice([0.0, -0.0, 1.0], shape),
        "equal": np.full(shape, -7.5),
        "infinite": np.where(rng.random(shape) < 0.5, -np.inf, rng.choice([3e38, np.inf], shape)),
        "tiny": np.round(normal * 3) * 1e-44,
        "near": 1 + rng.integers(0, 3, shape) * 2.0**-23,
    }[kind]
    return made.astype(np.float32)


def best(scores: np.ndarray, n_chunks: np.ndarray, count: int) -> np.ndarray:
    """The best chunks by a stable sort, -1 after them."""
    out = np.full((*scores.shape[:2], count), -1, np.int32)
    for session, n in enumerate(n_chunks):
        order = np.argsort(-scores[session, :, :n], axis=-1, kind="stable")[:, :count]
        out[session, :, : order.shape[1]] = order
    return out


@pytest.mark.parametrize(("chunks", "count", "segment"), CASES)
def test_exact_set(chunks, count, segment):
    @settings(max_examples=6, deadline=None, derandomize=True)
    @given(
        kind=st.sampled_from(("zeros", "equal", "infinite", "tiny", "near", "normal")),
        n=st.integers(0, chunks),
        seed=st.integers(0, 99),
    )
    def examples(kind, n, seed):
        rng = np.random.default_rng(seed)
        clusters = max(1, chunks // 4)
        scores = row(kind, (2, 1, chunks), rng)
        n_chunks = np.array([chunks, n], np.int32)
        scores[1, :, n:] = np.inf  # padding must not be selected, whatever it holds
        members = rng.integers(0, clusters, (2, 1, chunks)).astype(np.int32)
        sizes = np.stack(
            [np.bincount(members[b, 0, : n_chunks[b]], minlength=clusters)[None] for b in range(2)]
        ).astype(np.int32)
        cluster_scores = np.where(sizes > 0, row(kind, sizes.shape, rng), -np.inf)
        found = compiled(chunks, count, segment)(
            scores, n_chunks, cluster_scores.astype(np.float32), sizes, members
        )
        per_chunk = np.take_along_axis(cluster_scores, members, axis=-1)
        for name, got in found.items():
            ids = np.asarray(got)
            expected = best(per_chunk if "clusters" in name else scores, n_chunks, count)
            if name.endswith("limited"):
                expected[..., count // 2 :] = -1
            np.testing.assert_array_equal(np.sort(ids), np.sort(expected), err_msg=name)
            if name == "bisection" or name.startswith("triton"):
                last = np.where(ids < 0, chunks, ids)
                assert (np.diff(last) >= (ids[..., 1:] >= 0)).all(), f"{name} is not ascending"

    examples()


def test_rounds():
    """A long row takes few rounds, each a fraction of the one before."""
    rounds = rounds_of(262144, 512, 8192)
    assert [(r.entries, r.segments) for r in rounds] == [(262144, 32), (16384, 2), (1024, 1)]
    assert [r.last for r in rounds] == [False, False, True]
    # Too many are wanted for rounds to pay: one program goes through the row, again and again.
    (only,) = rounds_of(262144, 16384, 16384)
    assert (only.width, only.tiles, only.segments) == (16384, 16, 1)


def test_nothing_to_select():
    n_chunks = jnp.zeros((2,), jnp.int32)
    ids = select_chunks(jnp.zeros((2, 3, 0)), n_chunks, 4, **KERNEL)
    assert (np.asarray(ids) == -1).all()
    assert ids.shape == (2, 3, 4)


def test_refusals():
    scores, n_chunks = jnp.zeros((1, 2, 8)), jnp.zeros((1,), jnp.int32)
    with pytest.raises(ValueError, match="count must be at least 1"):
        select_chunks(scores, n_chunks, 0)
    with pytest.raises(ValueError, match="scores must be"):
        select_chunks(scores.astype(jnp.bfloat16), n_chunks, 1)
    with pytest.raises(ValueError, match="n_chunks must be"):
        select_chunks(scores, n_chunks[:0], 1)
    with pytest.raises(ValueError, match="sizes must be"):
        select_clusters(scores, n_chunks, jnp.zeros((1, 2, 8), jnp.int32), n_chunks, 1)
    with pytest.raises(ValueError, match="segment must be a power of two"):
        SelectionTuning(segment=100)
    if INTERPRET:
        with pytest.raises(NotImplementedError, match="need an NVIDIA GPU"):
            select_chunks(scores, n_chunks, 1, implementation="triton")
