"""What every index form must do; a new form joins `NAMES` and passes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvdrive_jax.index.form import FORMS, IndexForm, make_form, parse_index
from kvdrive_jax.pallas.scoring.reference import GROUP_RULES, combine_group

TWO_LEVEL = "moments:8, one in 3"
ONE_LEVEL = ("clusters", "chunks:2", "bounds:4", "moments:bf16", "moments:4")
NAMES = (*ONE_LEVEL, TWO_LEVEL)
# How well the scores of appended chunks must correlate with unquantised ones, by bits.
CORRELATION = {"bf16": 0.99, "4": 0.8, "2": 0.5}

empty = jax.jit(lambda form, *sizes: form.empty(*sizes), static_argnums=range(6))
build = jax.jit(lambda form, keys, n: form.build(keys, n), static_argnums=0)
insert = jax.jit(lambda form, index, row, piece: form.insert(index, row, piece), static_argnums=0)
append = jax.jit(lambda form, *args: form.append(*args), static_argnums=0)
score = jax.jit(lambda form, *args: form.scores(*args), static_argnums=(0, 4))


def random_keys(seed: int, *shape: int) -> jax.Array:
    """Chunks [..., c, D] whose channels differ in mean and range, the same for all seeds."""
    rng = np.random.default_rng(99)
    channels = rng.standard_normal(shape[-1]) * 4, np.exp(rng.standard_normal(shape[-1]))
    rng = np.random.default_rng(seed)
    chunk = rng.standard_normal((*shape[:-2], 1, shape[-1])) * channels[1]
    inside = rng.standard_normal(shape) * channels[1] * 0.5
    return jnp.asarray(channels[0] + chunk + inside, jnp.float32)


def form_of(name: str) -> IndexForm:
    """The form of one of NAMES."""
    return make_form("moments:8", scan_one_in=3) if name == TWO_LEVEL else make_form(name)


def index_of(form: IndexForm, rows: list[tuple[jax.Array, int]], chunks: int) -> Any:
    """An index with room for `chunks` chunks, its rows built from (keys, n_chunks)."""
    kv_heads, dim = rows[0][0].shape[0], rows[0][0].shape[-1]
    index = empty(form, len(rows), kv_heads, dim, chunks, form.cluster_capacity(chunks, 2, 6))
    for row, (keys, n) in enumerate(rows):
        index = insert(form, index, row, build(form, keys, n))
    return index


@pytest.mark.parametrize("name", NAMES)
def test_padding_capacity_and_neighbours_change_no_score(name: str) -> None:
    form = form_of(name)
    heads, group, dim = 2, 3, 80
    keys, other = random_keys(0, heads, 13, 4, dim), random_keys(1, heads, 20, 4, dim)
    more = random_keys(2, 2, heads, 6, 4, dim)
    queries = jax.random.normal(jax.random.key(0), (2, heads * group, dim))

    exact = index_of(form, [(keys, 13)], 17)
    exact = append(form, exact, more[:1], jnp.array([4]), jnp.array([13]))
    expected = np.asarray(score(form, exact, queries[:1], jnp.array([17]), "softmax-sum"))

    padded = jnp.pad(keys, [(0, 0), (0, 7), (0, 0), (0, 0)], constant_values=-3e4)
    # The row held another session before.
    index = index_of(form, [(other, 20), (other, 20)], 40)
    index = insert(form, index, 0, build(form, padded, 13))
    index = append(form, index, more, jnp.array([4, 0]), jnp.array([13, 20]))
    scores = np.asarray(score(form, index, queries, jnp.array([17, 20]), "softmax-sum"))
    assert scores.shape == (2, heads, 40)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores[0, :, :17], expected[0], rtol=1e-5, atol=1e-4)
    assert np.all(np.isfinite(scores[1, :, :20]))
    assert np.all(scores[0, :, 17:] == -np.inf)
    assert np.all(scores[1, :, 20:] == -np.inf)


@pytest.mark.parametrize("name", ONE_LEVEL)
def test_appending_leaves_what_is_there_and_later_rows_alone(name: str) -> None:
    form = form_of(name)
    keys = random_keys(3, 1, 24, 4, 20)
    index = index_of(form, [(keys, 24), (keys, 24)], 40)
    queries = jax.random.normal(jax.random.key(1), (2, 3, 20))
    before = np.asarray(score(form, index, queries, jnp.array([24, 24]), "mean"))
    # Chunks far beyond the range of the prompt's.
    far = random_keys(4, 2, 1, 6, 4, 20) * 50
    index = append(form, index, far, jnp.array([5, 0]), jnp.array([24, 24]))
    after = np.asarray(score(form, index, queries, jnp.array([29, 24]), "mean"))
    np.testing.assert_array_equal(before[..., :24], after[..., :24])
    assert np.all(np.isfinite(after[0, :, 24:29]))
    assert np.all(after[1, :, 24:] == -np.inf)


@pytest.mark.parametrize("name", ONE_LEVEL[1:])
@pytest.mark.parametrize(("prompt", "factor"), [(0, 1), (1, 1), (40, 3)])
def test_appended_chunks_rank_as_their_keys_do(name: str, prompt: int, factor: float) -> None:
    """Also where the prompt had no chunk, or one, or lies in a far smaller range."""
    form = form_of(name)
    old, new = random_keys(5, 1, max(prompt, 1), 4, 64), random_keys(6, 1, 30, 4, 64) * factor
    index = index_of(form, [(old, prompt)], 80)
    count = jnp.array([prompt])
    index = append(form, index, new[None], jnp.array([30]), count)
    queries = jax.random.normal(jax.random.key(2), (1, 3, 64))
    got = np.asarray(score(form, index, queries, count + 30, "mean"))[0, 0, prompt : prompt + 30]

    kind, _, bits = name.partition(":")
    whole = make_form(f"{kind}:bf16")
    alone = index_of(whole, [(new, 30)], 30)
    expected = np.asarray(score(whole, alone, queries, jnp.array([30]), "mean"))[0, 0]
    assert np.corrcoef(got, expected)[0, 1] > CORRELATION[bits]


@pytest.mark.parametrize("name", NAMES)
def test_any_finite_keys_give_finite_scores(name: str) -> None:
    form = form_of(name)
    limit = float(jnp.finfo(jnp.bfloat16).max)
    rows = [
        jnp.zeros((24, 4, 16)),
        jnp.full((24, 4, 16), 2.5),
        jnp.full((24, 4, 16), limit),
        jnp.full((24, 4, 16), limit).at[:, ::2].multiply(-1),
        jnp.zeros((24, 4, 16)).at[5, 2].set(limit),
        jnp.zeros((24, 4, 16)).at[:, :, 3].set(jnp.where(jnp.arange(24) % 2, limit, 1)[:, None]),
        jnp.full((24, 4, 16), 1e-38),
    ]
    keys = jnp.stack(rows).astype(jnp.bfloat16)
    for n, more in ((23, keys), (1, keys), (0, keys), (23, keys[::-1])):
        index = index_of(form, [(keys, n)], 32)
        new = more[None, :, :6]
        index = append(form, index, new, jnp.array([6]), jnp.array([n]))
        for value in (0.0, limit, -limit):
            queries = jnp.full((1, 2 * len(rows), 16), value, jnp.bfloat16)
            scores = np.asarray(score(form, index, queries, jnp.array([n + 6]), "softmax-sum"))
            assert np.all(np.isfinite(scores[..., : n + 6])), (n, value)
            assert np.all(scores[..., n + 6 :] == -np.inf)


def test_float16_keys_and_queries_are_fine() -> None:
    keys = jnp.full((1, 8, 4, 16), 6e4, jnp.float16).at[:, ::2, 1].multiply(-1)
    form = make_form("moments:4")
    index = index_of(form, [(keys, 8)], 8)
    queries = jnp.full((1, 3, 16), 6e4, jnp.float16)
    assert np.all(np.isfinite(score(form, index, queries, jnp.array([8]), "softmax-sum")))


@pytest.mark.parametrize("name", ONE_LEVEL)
def test_bytes_are_those_of_the_arrays(name: str) -> None:
    form = form_of(name)
    index = form.empty(2, 3, 80, 100, form.cluster_capacity(100, 0, 0))
    size = form.nbytes(2, 3, 80, 100, form.cluster_capacity(100, 0, 0))
    assert size == sum(x.nbytes for x in jax.tree.leaves(index))
    # Per token, but for what does not grow with the tokens: ranges, or counters.
    fixed = 2 * 3 * 80 * 4 * 4
    assert 0 <= size - form.bytes_per_token(80) * 2 * 3 * 400 <= fixed
    assert form.bytes_scanned(80, 100) == pytest.approx(form.bytes_per_token(80) * 400, rel=0.01)
    assert hash(form) == hash(form_of(name))
    assert form == form_of(name)
    assert form.name == name.partition(":")[0]


@pytest.mark.parametrize("name", NAMES)
def test_no_chunks_score_nothing(name: str) -> None:
    form = form_of(name)
    for room in (0, 3):
        index = form.empty(2, 1, 16, room, form.cluster_capacity(room, 0, 0))
        scores = score(form, index, jnp.ones((2, 3, 16)), jnp.array([0, 0]), "softmax-sum")
        assert scores.shape == (2, 1, room)
        assert np.all(np.asarray(scores) == -np.inf)


@pytest.mark.parametrize("rule", GROUP_RULES)
@pytest.mark.parametrize("name", ["chunks:bf16", "moments:8"])
def test_chunks_of_one_token_are_ranked_by_their_logits(name: str, rule: str) -> None:
    form = make_form(name, chunk_size=1)
    keys = random_keys(7, 2, 21, 1, 24)
    queries = jax.random.normal(jax.random.key(3), (1, 6, 24))
    index = index_of(form, [(keys, 21)], 24)
    scores = score(form, index, queries, jnp.array([21]), rule)[..., :21]
    logits = jnp.einsum("kgd,knd->kgn", queries[0].reshape(2, 3, 24), keys[:, :, 0]) / 24**0.5
    expected = combine_group(logits, jnp.ones((2, 21), bool), rule)  # type: ignore[arg-type]
    np.testing.assert_allclose(scores[0], expected, atol=0.15)


def test_bounds_hold_the_best_key() -> None:
    form = make_form("bounds:bf16")
    keys = random_keys(8, 1, 30, 4, 64)
    queries = jax.random.normal(jax.random.key(4), (1, 1, 64))
    index = index_of(form, [(keys, 30)], 30)
    scores = np.asarray(score(form, index, queries, jnp.array([30]), "mean"))[0, 0]
    best = np.einsum("d,ncd->nc", queries[0, 0], keys[0]).max(-1) / 8
    assert np.all(scores > best - 0.1)


def test_second_flush_of_a_shape_compiles_nothing() -> None:
    form = make_form("moments:4")
    grow = jax.jit(lambda *args: form.append(*args))
    index = index_of(form, [(random_keys(9, 1, 8, 4, 16), 8)], 24)
    for n in (8, 12):
        new = random_keys(n, 1, 1, 4, 4, 16)
        index = grow(index, new, jnp.array([4]), jnp.array([n]))
    assert grow._cache_size() == 1


def test_names_and_bits() -> None:
    assert parse_index("clusters") == ("clusters", "bf16")
    assert parse_index("moments") == ("moments", "4")
    assert parse_index("moments:8") == ("moments", "8")
    for name, bits in FORMS.items():
        for each in bits:
            make_form(f"{name}:{each}", chunk_size=8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("moment", "NAME one of clusters, chunks, bounds, moments; got 'moment'"),
        ("", "got ''"),
        ("moments:3", "moments must have bits bf16, 8, 4, 2; got '3'"),
        ("moments:", "got ''"),
        ("clusters:4", "clusters must have bits bf16; got '4'"),
    ],
)
def test_unknown_forms_are_refused_with_the_choices(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_form(text)


def test_bad_shapes_and_sizes_are_refused() -> None:
    form = make_form("moments:4")
    with pytest.raises(ValueError, match="chunk_size must be at least 1 token, got 0"):
        make_form("moments", chunk_size=0)
    with pytest.raises(ValueError, match="rotary_dim must be even"):
        make_form("moments", rotary_dim=33)
    with pytest.raises(ValueError, match=r"keys must be \[K, N, 4, D\], got shape \(1, 5, 3, 64\)"):
        form.build(jnp.zeros((1, 5, 3, 64)), jnp.int32(1))
    piece, small = build(form, jnp.zeros((1, 9, 4, 16)), 1), form.empty(1, 1, 16, 8, 8)
    with pytest.raises(ValueError, match="room for 9 chunks, the index only for 8"):
        form.insert(small, 0, piece)
    index = form.empty(1, 2, 64, 8, 8)
    with pytest.raises(ValueError, match=r"queries must be \[B, G \* 2, 64\]"):
        form.scores(index, jnp.zeros((1, 3, 64)), jnp.array([0]), "mean")


@pytest.mark.parametrize("bits", ["bf16", "8", "4", "2"])
@pytest.mark.parametrize("name", ["chunks", "bounds", "moments"])
def test_an_empty_index_can_be_donated(name: str, bits: str) -> None:
    """No array is there twice."""
    index = make_form(f"{name}:{bits}").empty(1, 1, 16, 8, 8)
    jax.block_until_ready(jax.jit(lambda index: index, donate_argnums=0)(index))
