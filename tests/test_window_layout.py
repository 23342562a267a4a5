"""Where windows lie in their pool, and which sizes a batch gets."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvdrive_jax.config import WindowConfig
from kvdrive_jax.window.layout import WindowLayout
from kvdrive_jax.window.profile import (
    Profile,
    ProfiledText,
    ProfileKey,
    profile_path,
    write_profile,
)
from kvdrive_jax.window.sizing import WindowShape, choose_layout

MULTIPLES = (0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
KEY = ProfileKey(
    digest="d",
    chunk_size=4,
    budget=40,
    index="moments",
    group_rule="softmax-sum",
    eviction="smoothed",
)
SHAPE = WindowShape(layers=3, kv_heads=2, selected=10, chunk_capacity=57)


def profile(seed: int = 0) -> Profile:
    rng = np.random.default_rng(seed)
    hits = np.minimum(np.sort(rng.random((3, 2, len(MULTIPLES))), axis=-1) * 10, 10)
    hits[..., 0] = 0
    return Profile(
        key=KEY,
        model="random",
        multiples=MULTIPLES,
        hits=hits,
        selected=10.0,
        texts=(ProfiledText(name="t", tokens=228, steps=9),),
    )


def page_rows(layout: WindowLayout | None) -> int:
    """Bytes of a batch in which nothing counts but rows, and a little for the widest window."""
    return 3 * 2 * 57 if layout is None else layout.rows + layout.largest // 8


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 7), st.integers(0, 99))
def test_windows_never_share_a_row_but_for_landing(
    layers: int, heads: int, selected: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(selected, 4 * selected + 1, (layers, heads))
    sizes[rng.random(sizes.shape) < 0.3] = 0
    layout = WindowLayout.of(sizes, selected)
    owners: dict[int, tuple[int, int]] = {}
    for layer, head in np.ndindex(layers, heads):
        rows = range(
            layout.first[layer, head], layout.first[layer, head] + layout.capacity[layer, head]
        )
        assert len(rows) == (sizes[layer, head] or selected)
        owner = (layer, head) if sizes[layer, head] else (-1, head)
        for row in rows:
            assert 0 <= row < layout.rows
            assert owners.setdefault(row, owner) == owner
    assert len(owners) >= int(sizes.sum())
    assert layout.rows == int(sizes.sum()) + (heads * selected if (sizes == 0).any() else 0)
    assert layout.largest == layout.capacity.max()
    assert layout == WindowLayout(selected=selected, slots=layout.slots)


def test_sizes_that_cannot_be() -> None:
    for slots, why in (
        ((), r"must be \[layers\]\[kv_heads\]"),
        (((4, 4), (4,)), r"must be \[layers\]\[kv_heads\]"),
        (((4, 3),), "0 or at least selected = 4, got 3"),
        (((4, -1),), "0 or at least selected = 4, got -1"),
    ):
        with pytest.raises(ValueError, match=why):
            WindowLayout(selected=4, slots=slots)
    with pytest.raises(ValueError, match="selected must be at least 1"):
        WindowLayout.uniform(1, 1, 4, 0)


def choose(config: WindowConfig, budget: int) -> tuple[WindowLayout | None, str]:
    return choose_layout(config, SHAPE, KEY, page_rows, budget)


@pytest.fixture(autouse=True)
def no_profiles(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_auto_takes_everything_or_the_largest_that_fits() -> None:
    assert choose(WindowConfig(), 342) == (None, "everything fits")
    for budget in range(60, 342, 7):
        layout, how = choose(WindowConfig(), budget)
        assert layout is not None
        assert how == "the largest that fits"
        assert page_rows(layout) <= budget or layout.slots[0][0] == 0
        sizes = [SHAPE.uniform(1 + n / 4) for n in range(20)]
        larger = [size for size in sizes if size is not None and size.rows > layout.rows]
        assert all(page_rows(size) > budget for size in larger)
    # So little that only the landing areas are left, for the plan to refuse or not.
    assert choose(WindowConfig(), 3) == (SHAPE.uniform(0.0), "the largest that fits")


def test_a_profile_in_its_place_is_found_and_stays_in_the_budget() -> None:
    write_profile(profile(), profile_path(KEY))
    for budget in range(65, 342, 11):
        layout, how = choose(WindowConfig(), budget)
        assert layout is not None
        assert page_rows(layout) <= budget
        assert how.startswith("by ") or layout == SHAPE.uniform(layout.mean_multiple)
        assert max(map(max, layout.slots)) <= 57
    layout, _ = choose(WindowConfig(), 150)
    assert layout is not None
    assert len({slots for row in layout.slots for slots in row}) > 1


def test_a_profile_that_was_asked_for(tmp_path) -> None:
    path = str(tmp_path / "p.json")
    write_profile(profile(), path)
    layout, how = choose(WindowConfig(multiple=2, profile=path), 10)
    assert layout is not None
    assert layout.rows <= 120
    assert path in how
    other = ProfileKey(**{**KEY.__dict__, "budget": 44})
    with pytest.raises(ValueError, match=r"is for budget 40, this run has 44: make one with"):
        choose_layout(WindowConfig(multiple=2, profile=path), SHAPE, other, page_rows, 400)
    nameless = ProfileKey(**{**KEY.__dict__, "digest": ""})
    with pytest.raises(ValueError, match="has no digest"):
        choose_layout(WindowConfig(profile=path), SHAPE, nameless, page_rows, 400)


def test_sizes_that_were_asked_for() -> None:
    assert choose(WindowConfig(multiple=9), 1) == (None, "as asked")
    assert choose(WindowConfig(multiple=0), 1)[0] == WindowLayout.uniform(3, 2, 0, 10)
    assert choose(WindowConfig(eviction="none"), 1)[0] == WindowLayout.uniform(3, 2, 0, 10)
    assert choose(WindowConfig(eviction="last-step"), 1)[0] == WindowLayout.uniform(3, 2, 10, 10)
    for bad in (0.5, -1, float("nan"), float("inf"), True):
        with pytest.raises(ValueError, match="window must be 0, a multiple"):
            WindowConfig(multiple=bad)
    with pytest.raises(ValueError, match="window must be 0 with eviction none, got 2"):
        WindowConfig(multiple=2, eviction="none")
    with pytest.raises(ValueError, match="window_profile must be None with eviction last-step"):
        WindowConfig(profile="p.json", eviction="last-step")
    with pytest.raises(ValueError, match="window must be at least 1 with a profile"):
        WindowConfig(multiple=0, profile="p.json")
    with pytest.raises(ValueError, match="eviction must be one of"):
        WindowConfig(eviction="mru")
