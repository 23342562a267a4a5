"""The measurements behind `benchmarks.index_recall`, on random attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.index_measure import (
    Layer,
    Ranking,
    Truth,
    covered,
    estimated,
    n_chunks,
    scores,
    shared,
    truth,
)
from benchmarks.index_recall import main, rankings
from kvdrive_jax.index.clusters import ClusterForm
from kvdrive_jax.index.form import make_form

BUDGETS = (16, 64, 192)
ORACLE = Ranking("oracle", None)


@pytest.fixture(scope="module")
def layer() -> Layer:
    rng = np.random.default_rng(0)
    k = rng.standard_normal((2, 320, 16)) * 2
    v, q = rng.standard_normal((2, 320, 16)), rng.standard_normal((3, 6, 16)) * 2
    return Layer(
        *(jnp.asarray(x, jnp.float32) for x in (k, v, q)),
        jnp.array([250, 280, 300]),
        jnp.int32(248),
    )


@pytest.fixture(scope="module")
def exact(layer: Layer) -> Truth:
    return truth(layer)


@pytest.fixture(scope="module")
def oracle(layer: Layer, exact: Truth) -> jax.Array:
    return scores(layer, exact, ORACLE)


def test_the_prompt_has_the_chunks_that_decode_would_see(layer: Layer) -> None:
    assert int(n_chunks(layer.prompt, 4)) == (248 - 4 - 64) // 4


def test_nothing_covers_more_than_the_oracle_and_all_chunks_cover_all(
    layer: Layer, exact: Truth, oracle: jax.Array
) -> None:
    best = covered(layer, exact, oracle, oracle, chunk=4, budgets=BUDGETS)
    np.testing.assert_allclose(best["overlap"], 1, rtol=1e-6)
    form = covered(
        layer,
        exact,
        scores(layer, exact, Ranking("moments:4", make_form("moments:4"))),
        oracle,
        chunk=4,
        budgets=BUDGETS,
    )
    assert np.all(np.asarray(form["recall"]) <= np.asarray(best["recall"]) + 1e-6)
    assert np.all(np.diff(np.asarray(form["recall"])) > 0)
    # 180 tokens of chunks: the last budget takes everything.
    for found in (best, form):
        np.testing.assert_allclose(found["recall"][-1], 1, rtol=1e-5)
        np.testing.assert_allclose(found["error"][-1], 0, atol=1e-5)


def test_estimates_and_shared_budgets_agree_where_nothing_is_left(
    layer: Layer, exact: Truth, oracle: jax.Array
) -> None:
    plain = covered(layer, exact, oracle, oracle, chunk=4, budgets=BUDGETS)
    for clusters in (None, ClusterForm()):
        error = estimated(layer, exact, oracle, budgets=BUDGETS, clusters=clusters)
        np.testing.assert_allclose(error[-1], 0, atol=1e-5)
        assert float(error[0]) < float(plain["error"][0])
    for far in (False, True):
        recall = shared(layer, exact, jnp.log(oracle), budgets=BUDGETS, far=far)
        np.testing.assert_allclose(recall[-1], 1, rtol=1e-5)
        assert np.all(np.asarray(recall) <= 1 + 1e-5)


def test_rankings_have_names_of_their_own() -> None:
    names = [ranking.name for ranking in rankings()]
    assert len(set(names)) == len(names)


def test_bad_budgets_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--budgets", "100"])
    assert "multiples of 16 tokens, got [100]" in capsys.readouterr().err
