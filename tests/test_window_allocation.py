"""Greedy and exact allocation against brute force, and against uniform windows."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvdrive_jax.window.allocation import exact, greedy, slots_of, uniform

MULTIPLES = (0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def curves(seed: int, layers: int, heads: int, *, concave: bool) -> np.ndarray:
    """Hits of every size: concave in slots, or any rising curve with noise that falls."""
    rng = np.random.default_rng(seed)
    if concave:
        rate = rng.random((layers, heads, 1)) * 3 + 0.05
        hits = (1 - np.exp(-np.array(MULTIPLES) * rate)) * rng.random((layers, heads, 1)) * 20
    else:
        hits = np.cumsum(rng.random((layers, heads, len(MULTIPLES))) ** 4, axis=-1) * 5
        hits -= rng.random(hits.shape)
    hits[..., 0] = 0
    return np.maximum(hits, 0)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)]),
    st.sampled_from([1, 3, 8]),
    st.integers(0, 99),
    st.booleans(),
    st.floats(0.0, 1.0),
)
def test_exact_is_what_trying_everything_finds(
    shape: tuple[int, int], selected: int, seed: int, concave: bool, share: float
) -> None:
    layers, heads = shape
    hits = curves(seed, layers, heads, concave=concave)
    rows = heads * selected + round(share * layers * heads * 6 * selected)
    costs = [slots_of(multiple, selected) for multiple in MULTIPLES]
    rising = np.maximum.accumulate(hits, axis=-1)
    best = -1.0
    for choice in itertools.product(range(len(MULTIPLES)), repeat=layers * heads):
        landing = heads * selected if 0 in choice else 0
        if sum(costs[i] for i in choice) + landing <= rows:
            served = sum(rising.reshape(-1, len(MULTIPLES))[n, i] for n, i in enumerate(choice))
            best = max(best, served)
    found = exact(hits, MULTIPLES, selected, rows)
    near = greedy(hits, MULTIPLES, selected, rows)
    assert found.hits == pytest.approx(best)
    for allocation in (found, near):
        assert allocation.rows <= rows
        assert allocation.hits <= best + 1e-9
    assert near == greedy(hits, MULTIPLES, selected, rows)


@pytest.mark.parametrize(("layers", "heads"), [(24, 2), (30, 3), (5, 1)])
@pytest.mark.parametrize("multiple", [1.0, 1.5, 2.0, 3.0])
def test_greedy_is_near_the_best_and_never_worse_than_uniform(
    layers: int, heads: int, multiple: float
) -> None:
    for seed, concave in itertools.product(range(3), (True, False)):
        hits = curves(seed, layers, heads, concave=concave)
        rows = layers * heads * slots_of(multiple, 32)
        made = [solve(hits, MULTIPLES, 32, rows).hits for solve in (uniform, greedy, exact)]
        assert made[0] <= made[1] + 1e-9
        assert made[1] <= made[2] + 1e-9
        # A greedy choice misses at most one jump of one window.
        assert made[1] >= 0.99 * made[2] or made[2] - made[1] <= hits.max()


def test_a_curve_that_is_not_concave_is_jumped() -> None:
    """Nothing at x1 to x3, everything at x4: worth more per slot than any other there is."""
    hits = np.zeros((1, 2, len(MULTIPLES)))
    hits[0, 0, MULTIPLES.index(4.0) :] = 90
    hits[0, 1, 1:] = np.linspace(5, 10, len(MULTIPLES) - 1)
    made = greedy(hits, MULTIPLES, 10, 50)
    assert made.slots == ((40, 10),)
    assert made.hits == exact(hits, MULTIPLES, 10, 50).hits == 95


def test_a_window_of_no_size_pays_when_many_share_its_landing_area() -> None:
    hits = np.zeros((6, 1, len(MULTIPLES)))
    hits[0, 0] = np.where(np.array(MULTIPLES) < 6, 5, 50)
    made = greedy(hits, MULTIPLES, 10, 70)
    assert made.slots == ((60,), *((0,),) * 5)
    assert made.rows == 70


def test_ties_go_to_the_first_head_and_the_smaller_size() -> None:
    """Greedy enlarges the first of equals; the exact answer leaves the first ones small."""
    hits = np.broadcast_to([0.0, 4, 6, 7, 8, 8, 8], (2, 2, len(MULTIPLES)))
    made = greedy(hits, MULTIPLES, 10, 45)
    best = exact(hits, MULTIPLES, 10, 45)
    assert made.hits == best.hits == 18
    assert made.slots == ((15, 10), (10, 10))
    assert best.slots == ((10, 10), (10, 15))
    # x4 and x6 serve no more than x3.
    for solve in (greedy, exact):
        assert solve(hits, MULTIPLES, 10, 999).slots == ((30, 30), (30, 30))


def test_coarse_steps_stay_within_the_rows() -> None:
    hits = curves(5, 6, 2, concave=True)
    for rows in range(130, 500, 37):
        best = exact(hits, MULTIPLES, 11, rows)
        rough = exact(hits, MULTIPLES, 11, rows, resolution=40)
        assert rough.rows <= rows
        assert rough.hits <= best.hits + 1e-9


def test_a_large_model_takes_seconds() -> None:
    hits = curves(1, 48, 8, concave=True)
    rows = 48 * 8 * slots_of(2.0, 512)
    made = greedy(hits, MULTIPLES, 512, rows)
    assert made.hits >= 0.999 * exact(hits, MULTIPLES, 512, rows).hits


def test_sizes_cut_at_the_context_count_once() -> None:
    hits = curves(3, 2, 2, concave=True)
    cut = [min(multiple, 2.6) for multiple in MULTIPLES]
    made = greedy(hits, cut, 10, 80)
    assert max(map(max, made.slots)) <= 26
    assert made.rows <= 80


def test_bad_calls_are_refused() -> None:
    hits = curves(0, 2, 2, concave=True)
    for args, why in (
        ((hits[0], MULTIPLES, 4, 99), r"hits must be \[layers, kv_heads, 7 sizes\]"),
        ((hits * np.nan, MULTIPLES, 4, 99), "finite and not negative"),
        ((hits, MULTIPLES[::-1], 4, 99), "multiples must ascend"),
        ((hits, MULTIPLES, 0, 99), "selected must be at least 1"),
        ((hits, (0.0, 0.5, *MULTIPLES[2:]), 4, 99), "multiple must be 0 or at least 1, got 0.5"),
        ((hits, MULTIPLES, 4, 7), "rows must be at least 8"),
    ):
        for solve in (greedy, exact, uniform):
            with pytest.raises(ValueError, match=why):
                solve(*args)
    with pytest.raises(ValueError, match="resolution"):
        exact(hits, MULTIPLES, 4, 99, resolution=0)
