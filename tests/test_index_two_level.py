"""Two-level scanning: which spans are read, and that nothing else changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvdrive_jax.index.form import make_form
from kvdrive_jax.index.moments import MomentsForm
from kvdrive_jax.index.two_level import SPAN, TwoLevelForm
from tests.test_index_forms import append, build, index_of, insert, random_keys, score


def test_one_in_one_is_the_fine_index() -> None:
    keys = random_keys(1, 2, 61, 4, 24)
    queries = jax.random.normal(jax.random.key(0), (1, 6, 24))
    count = jnp.array([61])
    fine = MomentsForm(bits=8)
    expected = score(fine, index_of(fine, [(keys, 61)], 61), queries, count, "softmax-sum")
    form = TwoLevelForm(fine, one_in=1)
    got = score(form, index_of(form, [(keys, 61)], 61), queries, count, "softmax-sum")
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)


def test_the_spans_that_matter_are_read_and_the_rest_ranks_below() -> None:
    chunks = 6 * SPAN - 5
    keys = random_keys(2, 1, chunks, 4, 24)
    query = jax.random.normal(jax.random.key(1), (1, 1, 24))
    keys = keys.at[0, 2 * SPAN + 3, 1].add(9 * query[0, 0])  # one key that stands out
    fine = MomentsForm(bits=8)
    form = TwoLevelForm(fine, one_in=4)
    for size in (1.0, 1e9):  # far from the range of float32's whole numbers too
        index = index_of(form, [(keys * size, chunks)], chunks)
        plain = index_of(fine, [(keys * size, chunks)], chunks)
        scores, whole = (
            np.asarray(score(f, i, query, jnp.array([chunks]), "mean"))[0, 0]
            for f, i in ((form, index), (fine, plain))
        )
        assert scores.shape == (chunks,)
        assert scores.argmax() == 2 * SPAN + 3
        read = np.isclose(scores, whole, rtol=1e-5)
        assert read.sum() in (2 * SPAN, 2 * SPAN - 5)
        assert scores[~read].max() < scores[read].min()


@pytest.mark.parametrize("prompt", [0, 1, SPAN, 2 * SPAN + 7])
def test_spans_that_grow_are_those_of_a_prompt(prompt: int) -> None:
    """Flushes on and off the borders of spans, against all of it built at once."""
    form = TwoLevelForm(MomentsForm(bits=16), one_in=3)
    keys = random_keys(3, 1, prompt + 3 * SPAN, 4, 24)
    index = form.empty(1, 1, 24, prompt + 3 * SPAN + 2, 0)
    index = insert(form, index, 0, build(form, keys[:, :prompt], jnp.int32(prompt)))
    at = prompt
    for new in (5, 0, SPAN, 9):
        fresh = keys[None, :, at : at + SPAN]
        index = append(form, index, fresh, jnp.array([new]), jnp.array([at]))
        at += new
    whole = index_of(form, [(keys[:, :at], at)], prompt + 3 * SPAN + 2)
    spans = -(-at // SPAN)
    for got, expected in zip(index.coarse.planes, whole.coarse.planes, strict=True):
        np.testing.assert_allclose(
            np.asarray(got.codes, np.float32)[..., :spans],
            np.asarray(expected.codes, np.float32)[..., :spans],
            atol=0.1,
        )
    queries = jax.random.normal(jax.random.key(2), (1, 3, 24))
    scores = np.asarray(score(form, index, queries, jnp.array([at]), "softmax-sum"))
    assert np.all(np.isfinite(scores[..., :at]))
    assert np.all(scores[..., at:] == -np.inf)


def test_bytes_are_those_of_the_arrays_and_fewer_are_read() -> None:
    form = make_form("moments:4", scan_one_in=4)
    index = form.empty(2, 3, 80, 1000, 0)
    assert form.nbytes(2, 3, 80, 1000, 0) == sum(x.nbytes for x in jax.tree.leaves(index))
    assert form.bytes_scanned(80, 1000) < make_form("moments:4").bytes_scanned(80, 1000) / 3


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="one_in must be at least 1, got 0"):
        make_form("moments", scan_one_in=0)
    with pytest.raises(ValueError, match="scan_one_in must be 1 for index clusters, got 2"):
        make_form("clusters", scan_one_in=2)
    with pytest.raises(
        ValueError, match="scan_one_in = 2 needs a chunk_size of at least 2 tokens, got 1"
    ):
        make_form("moments", chunk_size=1, scan_one_in=2)
