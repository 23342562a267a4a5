"""Where pages lie on SSD and which extents hold them: arithmetic alone, no file is touched."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrive_jax.tiers.extents import ExtentLayout, ReadPlan, cluster_order, plan_read


def layout_for(
    capacity: int, prompt: int | None, piece: int, per_extent: int, page_bytes: int = 96
) -> ExtentLayout:
    return ExtentLayout.plan(
        page_bytes=page_bytes,
        extent_bytes=per_extent * page_bytes,
        chunk_capacity=capacity,
        prompt_chunks=prompt,
        piece_chunks=piece,
    )


def check_read(layout: ExtentLayout, heads: np.ndarray, positions: np.ndarray, read: ReadPlan):
    """Walk the plan as a reader would and compare with the definition."""
    pairs = list(zip(read.heads.tolist(), read.extents.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs), "an extent is read twice"
    late = [extent >= layout.prompt_extents for _, extent in pairs]
    assert late == sorted(late), "prompt extents come first"
    for part in (False, True):
        chosen = [pair for pair, is_late in zip(pairs, late, strict=True) if is_late is part]
        assert chosen == sorted(chosen), "neighbours on disk must be neighbours in the read"
    assert sorted(read.order.tolist()) == list(range(len(positions)))
    per_extent = layout.pages_per_extent
    whose = read.place // per_extent
    assert (np.diff(whose) >= 0).all()
    wanted_heads, wanted = heads[read.order], positions[read.order]
    np.testing.assert_array_equal(read.heads[whose], wanted_heads)
    np.testing.assert_array_equal(
        read.extents[whose] * per_extent + read.place % per_extent, wanted
    )
    assert set(whose.tolist()) == set(range(len(pairs))), "an extent is read for nothing"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_wanted_page_is_found_and_each_extent_is_read_once(data: st.DataObject) -> None:
    per_extent = data.draw(st.integers(1, 9))
    prompt = data.draw(st.integers(0, 90))
    appended = data.draw(st.integers(0, 40))
    piece = data.draw(st.integers(1, 20))
    heads_count = data.draw(st.integers(1, 5))
    layout = layout_for(prompt + appended, prompt, piece, per_extent)
    per_extent = layout.pages_per_extent  # no more than there are pages
    stored = list(range(prompt))
    for index in range(layout.pieces):
        start = layout.piece_extent(index) * per_extent
        stored += range(start, start + min(piece, appended - index * piece))
    if not stored:
        return
    m = data.draw(st.integers(1, 60))
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    positions = rng.choice(np.array(stored, np.int32), m).astype(np.int32)
    heads = rng.integers(0, heads_count, m).astype(np.int32)
    check_read(layout, heads, positions, plan_read(layout, heads, positions, heads_count))


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.integers(0, 500),
    appended=st.integers(0, 200),
    piece=st.integers(1, 70),
    per_extent=st.integers(1, 33),
)
def test_a_layout_has_room_for_the_prompt_and_every_flush(
    prompt: int, appended: int, piece: int, per_extent: int
) -> None:
    layout = layout_for(prompt + appended, prompt, piece, per_extent)
    per_extent = layout.pages_per_extent
    assert layout.prompt_extents * per_extent >= prompt
    assert layout.pieces * piece >= appended
    assert layout.piece_extents * per_extent >= piece
    assert layout.piece_extent(0) >= layout.prompt_extents
    assert layout.extents == layout.piece_extent(layout.pieces)
    assert 1 <= layout.shard_extents <= layout.prompt_extents


@settings(max_examples=40, deadline=None)
@given(capacity=st.integers(1, 400), share=st.floats(0, 1), piece=st.integers(1, 70))
def test_an_unknown_prompt_length_reserves_enough_for_every_cut(
    capacity: int, share: float, piece: int
) -> None:
    prompt = round(share * capacity)
    unknown = layout_for(capacity, None, piece, 4, 1024)
    known = layout_for(capacity, prompt, piece, 4, 1024)
    assert unknown.prompt_extents >= known.prompt_extents
    assert unknown.pieces >= known.pieces
    # What this cut writes stays below what the unknown layout reserves.
    extents = 3 * (known.prompt_extents + known.pieces * known.piece_extents)
    assert extents * (known.extent_bytes + 4) <= unknown.disk_bytes(1, 3, capacity, None)


def test_extents_are_whole_pages_and_at_least_one() -> None:
    assert layout_for(10, 10, 4, 1, 100).pages_per_extent == 1
    small = ExtentLayout.plan(
        page_bytes=1000, extent_bytes=999, chunk_capacity=3, prompt_chunks=3, piece_chunks=1
    )
    assert (small.pages_per_extent, small.extent_bytes) == (1, 1000)
    between = ExtentLayout.plan(
        page_bytes=1000, extent_bytes=3999, chunk_capacity=3, prompt_chunks=3, piece_chunks=1
    )
    assert (between.pages_per_extent, between.extent_bytes) == (3, 3000)


def test_positions_and_bytes_past_32_bits() -> None:
    # 2 GiB-page positions, 8 kv heads, a terabyte a segment: nothing wraps.
    per_extent, page_bytes = 32, 2048
    prompt = 2**30
    layout = layout_for(prompt + 2**20, prompt, 64, per_extent, page_bytes)
    assert layout.extents * layout.extent_bytes > 2**41
    assert layout.disk_bytes(36, 8, prompt + 2**20, prompt) > 36 * 8 * 2**41
    last = layout.extents * per_extent - 1
    positions = np.array([last, 0, prompt - 1, prompt - 1, last - 32], np.int32)
    heads = np.array([7, 7, 7, 0, 7], np.int32)
    check_read(layout, heads, positions, plan_read(layout, heads, positions, 8))


def test_positions_that_would_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2\*\*31 positions; raise chunk_size"):
        layout_for(2**31, 2**31, 64, 32)


def test_cluster_order_is_by_cluster_then_by_id() -> None:
    order = cluster_order(np.array([2, 0, 2, 1, 0, 9, 9], np.int32), 5)
    assert order.tolist() == [1, 4, 3, 0, 2]
    assert cluster_order(None, 3).tolist() == [0, 1, 2]
    assert cluster_order(np.zeros(0, np.int32), 0).tolist() == []
