"""Chunks, k-means and the cluster index."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from kvdrive_jax.index import kmeans
from kvdrive_jax.index.chunks import chunk_count, representatives, split_into_chunks
from kvdrive_jax.index.clusters import ClusterForm, ClusterIndex, cluster_order
from kvdrive_jax.pallas.scoring.reference import GROUP_RULES, combine_group, vector_logits

F32 = ClusterForm(dtype="float32")
# The form is a static argument, so that a shape compiles once for all tests.
build = jax.jit(ClusterForm.build, static_argnums=0)
insert = jax.jit(ClusterForm.insert, static_argnums=0, donate_argnums=1)
append = jax.jit(ClusterForm.append, static_argnums=0, donate_argnums=1)
score = jax.jit(ClusterForm.scores, static_argnums=(0, 4))


def chunk_keys(seed: int, heads: int, chunks: int, dim: int, c: int = 4) -> jax.Array:
    """Keys that come in a few directions and drift, with a large common mean."""
    rng = np.random.default_rng(seed)
    themes = rng.standard_normal((heads, 6, dim)) * 3
    theme = themes[:, rng.integers(0, 6, chunks)]
    keys = theme[:, :, None] + rng.standard_normal((heads, chunks, c, dim))
    return jnp.asarray(keys + rng.standard_normal((heads, 1, 1, dim)) * 5, jnp.float32)


def check_piece(form: ClusterForm, piece: ClusterIndex, reps: jax.Array, n: int) -> None:
    """Every chunk is assigned, sizes count members, centroids are their plain means."""
    members = np.asarray(piece.cluster_of_chunk)
    sizes = np.asarray(piece.sizes)
    used = int(piece.used)
    assert used == form.cluster_count(n)
    assert sizes.sum(-1).tolist() == [n] * len(sizes)
    assert not sizes[:, used:].any()
    for k in range(len(members)):
        assert np.array_equal(np.bincount(members[k, :n], minlength=sizes.shape[1]), sizes[k])
        for cluster in np.flatnonzero(sizes[k]):
            mean = np.asarray(reps)[k, :n][members[k, :n] == cluster].mean(0)
            np.testing.assert_allclose(piece.centroids[k, cluster], mean, rtol=1e-4, atol=1e-4)
    assert members.min(initial=0) >= 0
    assert members.max(initial=0) < sizes.shape[1]


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0), (68, 0), (71, 0), (72, 1), (100, 8), (7000, 1733)]
)
def test_chunk_count(tokens: int, expected: int) -> None:
    assert chunk_count(tokens, sink=4, local=64, chunk_size=4) == expected


def test_chunks_start_after_the_sink_and_padding_is_zero() -> None:
    keys = jnp.arange(2 * 14 * 3, dtype=jnp.float32).reshape(2, 14, 3)
    chunks = split_into_chunks(keys, sink=2, chunk_size=5, chunk_capacity=4)
    assert chunks.shape == (2, 4, 5, 3)
    np.testing.assert_array_equal(chunks[:, 1], keys[:, 7:12])
    np.testing.assert_array_equal(chunks[:, 2, :2], keys[:, 12:14])
    assert not np.any(chunks[:, 2, 2:])
    assert not np.any(chunks[:, 3])
    np.testing.assert_allclose(representatives(chunks)[:, 0], keys[:, 2:7].mean(1), rtol=1e-6)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(
        [
            (1, 1, 64, ClusterForm(dtype="float32")),
            (3, 30, 80, ClusterForm(8, 4, 40, rounds=3, dtype="float32")),
            (2, 17, 96, ClusterForm(12, 4, 20, rounds=1, dtype="float32")),
            (1, 33, 64, ClusterForm(64, 4, rounds=2, dtype="float32")),
            (2, 0, 64, ClusterForm(dtype="float32")),
        ]
    ),
    st.integers(0, 99),
)
def test_every_chunk_is_in_one_cluster(case: tuple[int, int, int, ClusterForm], seed: int) -> None:
    heads, chunks, dim, form = case
    n = int(np.random.default_rng(seed).integers(0, chunks + 1))
    keys = chunk_keys(seed, heads, chunks, dim)
    check_piece(form, build(form, keys, n), representatives(keys), n)


def test_same_input_same_index_bit_for_bit() -> None:
    keys = chunk_keys(0, 3, 150, 64)
    form = ClusterForm(segment_tokens=256)
    first, second = build(form, keys, 140), build(form, keys, 140)
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("segment_tokens", [8192, 200])
def test_padding_changes_nothing(segment_tokens: int) -> None:
    form = ClusterForm(segment_tokens=segment_tokens, dtype="float32")
    keys = chunk_keys(2, 3, 130, 80)
    exact = build(form, keys, 130)
    wide = jnp.pad(keys, [(0, 0), (0, 111), (0, 0), (0, 0)], constant_values=-7e3)
    padded = build(form, wide, 130)
    used = int(exact.used)
    assert int(padded.used) == used
    np.testing.assert_array_equal(padded.cluster_of_chunk[:, :130], exact.cluster_of_chunk)
    np.testing.assert_array_equal(padded.sizes[:, :used], exact.sizes[:, :used])
    assert not np.any(padded.sizes[:, used:])
    np.testing.assert_allclose(
        padded.centroids[:, :used], exact.centroids[:, :used], rtol=1e-5, atol=1e-5
    )


def test_k_means_groups_better_than_consecutive_chunks() -> None:
    keys = chunk_keys(3, 1, 240, 64)
    reps = np.asarray(representatives(keys))[0]

    def spread(members: np.ndarray[Any, Any]) -> float:
        return float(
            sum(
                ((reps[members == m] - reps[members == m].mean(0)) ** 2).sum() for m in set(members)
            )
        )

    piece = build(F32, keys, 240)
    assert spread(np.asarray(piece.cluster_of_chunk)[0]) < 0.8 * spread(np.arange(240) // 4)


def test_scattered_and_matmul_sums_agree() -> None:
    # The one runs on CPU, the other elsewhere.
    rng = np.random.default_rng(0)
    vectors = jnp.asarray(rng.standard_normal((3, 50, 8)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, 8, (3, 50)), jnp.int32)  # 7 counts nowhere
    np.testing.assert_allclose(
        kmeans._scattered_sums(vectors, ids, 7), kmeans._matmul_sums(vectors, ids, 7), atol=1e-5
    )


@pytest.mark.parametrize("rule", GROUP_RULES)
def test_one_token_per_cluster_gives_exact_scores(rule: str) -> None:
    form = ClusterForm(tokens_per_cluster=1, chunk_size=1, dtype="float32")
    heads, group, chunks, dim = 2, 3, 37, 80
    keys = chunk_keys(4, heads, chunks, dim, c=1)
    piece = build(form, keys, 30)
    index = insert(form, form.empty(1, heads, dim, 40, 45), 0, piece)
    queries = jax.random.normal(jax.random.key(0), (1, heads * group, dim))
    scores = score(form, index, queries, jnp.array([30]), rule)  # type: ignore[arg-type]
    logits = np.einsum(
        "kgd,knd->kgn", queries[0].reshape(heads, group, dim), keys[:, :30, 0]
    ) / np.sqrt(dim)
    exact = combine_group(jnp.asarray(logits), jnp.ones((heads, 30), bool), rule)  # type: ignore[arg-type]
    np.testing.assert_allclose(scores[0, :, :30], exact, rtol=1e-5, atol=1e-4)
    assert np.all(np.asarray(scores)[..., 30:] == -np.inf)


def test_chunks_score_as_their_cluster_and_rows_do_not_mix() -> None:
    form = ClusterForm(dtype="float32")
    first, second = chunk_keys(5, 2, 40, 64), chunk_keys(6, 2, 25, 64)
    index = form.empty(2, 2, 64, 50, 20)
    index = insert(form, index, 0, build(form, second, 25))
    index = insert(form, index, 1, build(form, second, 25))
    index = insert(form, index, 0, build(form, first, 33))
    queries = jax.random.normal(jax.random.key(1), (2, 6, 64))
    scores = np.asarray(score(form, index, queries, jnp.array([33, 25]), "softmax-sum"))
    for row, (keys, n) in enumerate([(first, 33), (second, 25)]):
        alone = insert(form, form.empty(1, 2, 64, 50, 20), 0, build(form, keys, n))
        expected = score(form, alone, queries[row : row + 1], jnp.array([n]), "softmax-sum")
        np.testing.assert_allclose(scores[row], expected[0], rtol=1e-6, atol=1e-6)
        members = np.asarray(index.cluster_of_chunk)[row]
        for k in range(2):
            for cluster in set(members[k, :n]):
                assert len(set(scores[row, k, :n][members[k, :n] == cluster])) == 1
        assert np.all(np.isfinite(scores[row, :, :n]))
        assert np.all(scores[row, :, n:] == -np.inf)


def test_flushes_append_clusters_and_leave_the_others() -> None:
    form = ClusterForm(dtype="float32")
    capacity = form.cluster_capacity(30, flush_events=3, flush_chunks=8)
    index = form.empty(2, 3, 80, 60, capacity)
    prompt = [chunk_keys(7, 3, 30, 80), chunk_keys(8, 3, 30, 80)]
    n = np.array([30, 13])
    for row in range(2):
        index = insert(form, index, row, build(form, prompt[row], n[row]))
    reps = [[np.asarray(representatives(prompt[r]))[:, : n[r]]] for r in range(2)]
    for event, n_new in enumerate([(8, 0), (3, 8), (8, 1)]):
        new = jnp.stack([chunk_keys(20 + event, 3, 8, 80), chunk_keys(30 + event, 3, 8, 80)])
        before = jax.tree.map(np.asarray, index)
        index = append(form, index, new, jnp.array(n_new), jnp.array(n))
        for row in range(2):
            used, chunks = int(before.used[row]), n[row]
            np.testing.assert_array_equal(
                index.centroids[row, :, :used], before.centroids[row, :, :used]
            )
            np.testing.assert_array_equal(
                index.cluster_of_chunk[row, :, :chunks], before.cluster_of_chunk[row, :, :chunks]
            )
            fresh = np.asarray(index.cluster_of_chunk)[row, :, chunks : chunks + n_new[row]]
            assert np.all(fresh >= used)
            assert np.all(fresh < int(index.used[row]))
            reps[row].append(np.asarray(representatives(new[row]))[:, : n_new[row]])
        n = n + np.array(n_new)
    for row in range(2):
        together = np.concatenate(reps[row], axis=1)
        sizes, members = np.asarray(index.sizes)[row], np.asarray(index.cluster_of_chunk)[row]
        assert sizes.sum(-1).tolist() == [n[row]] * 3
        for k, cluster in zip(*np.nonzero(sizes), strict=True):
            mean = together[k][members[k, : n[row]] == cluster].mean(0)
            np.testing.assert_allclose(index.centroids[row, k, cluster], mean, rtol=1e-4, atol=1e-4)
    scores = score(form, index, jnp.ones((2, 3, 80)), jnp.asarray(n), "mean")
    assert np.isfinite(np.asarray(scores)).sum(-1).tolist() == [[n[0]] * 3, [n[1]] * 3]


def test_capacity_holds_the_prompt_and_every_flush() -> None:
    form = ClusterForm(tokens_per_cluster=10, chunk_size=4, segment_tokens=50)
    assert form.cluster_count(0) == 0
    assert form.cluster_count(12) == 5  # a segment of 12 chunks
    assert form.cluster_count(27) == 5 + 5 + 2
    assert form.cluster_capacity(27, 4, 6) == 12 + 4 * 3
    assert F32.cluster_count(2048) == 512
    assert F32.cluster_count(32768) == 8192


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bfloat16_centroids_are_scored_with_the_whole_query(dtype: str) -> None:
    rng = np.random.default_rng(9)
    vectors = jnp.asarray(rng.standard_normal((2, 3, 21, 96)) * 9, jnp.bfloat16)
    queries = jnp.asarray(rng.standard_normal((2, 9, 96)) * 9, dtype)
    got = jax.jit(vector_logits)(queries, vectors)
    wide = np.asarray(queries, np.float64).reshape(2, 3, 3, 96)
    expected = np.einsum("bkgd,bkxd->bkgx", wide, np.asarray(vectors, np.float64)) / np.sqrt(96)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rule", GROUP_RULES)
def test_any_finite_keys_give_finite_scores(dtype: str, rule: str) -> None:
    form = ClusterForm(dtype=dtype, segment_tokens=80)
    limit = float(jnp.finfo(jnp.bfloat16).max)
    rows = [
        jnp.zeros((24, 4, 64)),
        jnp.full((24, 4, 64), 2.5),
        jnp.full((24, 4, 64), limit),
        jnp.full((24, 4, 64), limit).at[::2].multiply(-1),
        jnp.zeros((24, 4, 64)).at[5].set(limit),
        jnp.full((24, 4, 64), 1e-38),
    ]
    keys = jnp.stack(rows).astype(jnp.bfloat16)
    for n in (24, 1):
        piece = build(form, keys, n)
        assert np.all(np.isfinite(np.asarray(piece.centroids, np.float32)))
        index = insert(form, form.empty(1, len(rows), 64, 24, 8), 0, piece)
        for value in (0.0, limit, -limit):
            scores = score(form, index, jnp.full((1, 12, 64), value), jnp.array([n]), rule)  # type: ignore[arg-type]
            assert np.all(np.isfinite(np.asarray(scores)[..., :n]))
            assert np.all(np.asarray(scores)[..., n:] == -np.inf)


def test_no_chunks_score_nothing() -> None:
    form = ClusterForm()
    index = insert(form, form.empty(2, 1, 64, 6, 2), 0, build(form, jnp.ones((1, 6, 4, 64)), 0))
    scores = score(form, index, jnp.ones((2, 3, 64)), jnp.array([0, 0]), "softmax-sum")
    assert np.all(np.asarray(scores) == -np.inf)


def test_bytes_are_those_of_the_arrays() -> None:
    for dtype in ("bfloat16", "float32"):
        form = ClusterForm(dtype=dtype)
        index = form.empty(2, 3, 80, 100, 30)
        assert form.nbytes(2, 3, 80, 100, 30) == sum(x.nbytes for x in jax.tree.leaves(index))
    assert ClusterForm().bytes_per_token(64) == (128 + 4) / 16 + 1


def test_cluster_order_is_cluster_by_cluster() -> None:
    members = np.array([[2, 0, 2, 1, 0, 9], [1, 1, 0, 0, 1, 9]], np.int32)
    assert cluster_order(members, 5).tolist() == [[1, 4, 3, 0, 2], [2, 3, 0, 1, 4]]


def test_second_build_of_a_shape_compiles_nothing() -> None:
    fresh = jax.jit(lambda keys, n: F32.build(keys, n))
    for n in (3, 9):
        fresh(chunk_keys(n, 1, 10, 64), jnp.int32(n))
    assert fresh._cache_size() == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens_per_cluster": 0}, "tokens_per_cluster must be at least 1, got 0"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"segment_tokens": 3}, "segment_tokens must hold a chunk of 4 tokens, got 3"),
        ({"dtype": "float16"}, "bfloat16, float32; got 'float16'"),
        ({"segment_tokens": 2**20}, "at most 2\\^30 pairs"),
    ],
)
def test_bad_forms_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterForm(**options)


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="room for 10 cluster_of_chunk, the index only for 9"):
        F32.insert(F32.empty(1, 1, 64, 9, 9), 0, F32.build(jnp.zeros((1, 10, 4, 64)), 1))
    with pytest.raises(ValueError, match=r"got \(1, 3, 64\)"):
        vector_logits(jnp.zeros((1, 3, 64)), jnp.zeros((1, 2, 5, 64)))
    with pytest.raises(ValueError, match="3 or 4 axes"):
        F32.build(jnp.zeros((4, 64)), 1)
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        chunk_count(100, sink=4, local=64, chunk_size=0)
