"""What goes where: plans and the choice of resident chunks, as arithmetic."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrive_jax.config import TierConfig
from kvdrive_jax.telemetry import BudgetError
from kvdrive_jax.tiers import PageGeometry, SessionSize, plan_session, plan_sessions
from kvdrive_jax.tiers.cache import cache_bytes
from kvdrive_jax.tiers.placement import rank_chunks, resident_chunks, staging_needs

GEOMETRY = PageGeometry(layers=3, kv_heads=2, chunk_size=4, head_dim=80, dtype=np.dtype(np.float32))
TIERS = TierConfig(extent_bytes=8192)
EVERYTHING = 3 * 2 * 100 * GEOMETRY.page_bytes
MAP = 3 * 2 * 100 * 4
HASHES = 3 * 2 * (30 + 22) * 8  # 3 pages to an extent: 90 chunks of the prompt, one piece of 64


def plan(dram: int | None, ssd: bool = True, **more: Any):
    values = {"chunk_capacity": 100, "prompt_chunks": 90, **more}
    return plan_session(GEOMETRY, TIERS, dram_bytes=dram, ssd=ssd, **values)


@pytest.mark.parametrize(("cpus", "multiple"), [(None, 1.0), (4, 1.0), (5, 1.25)])
def test_reading_ahead_needs_cpus(
    cpus: int | None, multiple: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    assert TierConfig().read_ahead == multiple
    assert TierConfig(prefetch=2.0).read_ahead == 2.0


def test_page_bytes() -> None:
    assert GEOMETRY.page_shape == (2, 4, 80)
    assert GEOMETRY.page_bytes == 2 * 4 * 80 * 4


def test_everything_fits_dram_exactly_or_not() -> None:
    assert plan(None, ssd=False).rows == 100
    assert plan(EVERYTHING, ssd=False).dram_bytes == EVERYTHING
    whole = plan(EVERYTHING + MAP + HASHES)
    assert (whole.rows, whole.dram_bytes) == (100, EVERYTHING + MAP + HASHES)
    assert whole.read_buffer_bytes == 0, "nothing is read back when DRAM holds everything"
    less = plan(EVERYTHING + MAP + HASHES - 1)
    assert less.rows < 100
    assert less.dram_bytes <= EVERYTHING + MAP + HASHES - 1
    assert less.read_buffer_bytes > 0


@settings(max_examples=40, deadline=None)
@given(share=st.integers(2 * MAP + HASHES, EVERYTHING + 3 * MAP))
def test_a_plan_stays_inside_its_share_and_wastes_less_than_a_row(share: int) -> None:
    made = plan(share)
    assert made.dram_bytes <= share
    if made.rows < 100:
        row = 3 * 2 * cache_bytes(1, GEOMETRY.page_bytes)
        assert share - made.dram_bytes < row


def test_a_share_that_cannot_hold_it_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(BudgetError, match=r"3 layers x 2 kv heads x 100 chunks x 2,560 bytes"):
        plan(EVERYTHING - 1, ssd=False)
    with pytest.raises(
        BudgetError, match=r"2 maps x 6 .* x 100 chunks x 4 bytes, and hashes = 7,296"
    ):
        plan(7295)
    assert plan(7296).rows == 0


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"chunk_capacity": -1, "prompt_chunks": None}, "chunk_capacity"),
        ({"prompt_chunks": 101}, "prompt_chunks"),
        ({"piece_chunks": 0}, "piece_chunks"),
        ({"chunk_capacity": 2**30, "prompt_chunks": None}, "chunk_capacity"),
    ],
)
def test_counts_out_of_range_are_named(values: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        plan(None, **values)
    with pytest.raises(ValueError, match="dram_bytes"):
        plan(-1)


def test_an_empty_session_takes_nothing() -> None:
    made = plan(0, chunk_capacity=0, prompt_chunks=0)
    assert (made.dram_bytes, made.ssd_bytes, made.layout) == (0, 0, None)


def test_bytes_past_32_bits() -> None:
    big = PageGeometry(layers=36, kv_heads=8, chunk_size=4, head_dim=128, dtype=np.dtype("<u2"))
    made = plan_session(
        big,
        TierConfig(),
        chunk_capacity=2**24,
        dram_bytes=None,
        ssd=True,
        prompt_chunks=2**24,
    )
    assert made.slab_bytes == 36 * 8 * 2**24 * 2048
    assert made.ssd_bytes > made.slab_bytes


SIZES = [SessionSize(100, 90), SessionSize(5, 5), SessionSize(60, 50)]


def plans(dram: int | None, ssd: bool = True):
    return plan_sessions(GEOMETRY, TIERS, SIZES, dram_bytes=dram, ssd=ssd, piece_chunks=5)


def total(made: list[Any]) -> int:
    return sum(p.dram_bytes for p in made) + sum(staging_needs(made, 2).values())


def test_sessions_share_dram_and_small_ones_leave_the_rest() -> None:
    whole = plans(None)
    assert [p.rows for p in whole] == [100, 5, 60]
    need = total(whole)
    assert plans(need) == whole
    for budget in range(need - 1, need * 3 // 4, -need // 60):
        made = plans(budget)
        assert total(made) <= budget
        assert made[1].rows == 5
        assert made[0].rows < 100
    with pytest.raises(BudgetError, match="of staging"):
        plans(1000)
    with pytest.raises(BudgetError, match="no SSD tier"):
        plans(need // 2, ssd=False)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.sampled_from([0.0, 0.5, 1.0, -1.0, float("nan")]), max_size=30),
    rows=st.integers(0, 31),
    above=st.integers(0, 31),
)
def test_dram_holds_what_is_most_important_behind_the_windows(
    values: list[float], rows: int, above: int
) -> None:
    importance = np.array([*values, 99.0], np.float32)  # the last one is padding
    ranked = rank_chunks(importance, len(values))
    rank = sorted(
        range(len(values)), key=lambda i: (np.isnan(values[i]), -np.nan_to_num(values[i]), i)
    )
    assert ranked.tolist() == rank
    assert resident_chunks(ranked, rows, above).tolist() == (rank[above:] + rank[:above])[:rows]


def test_without_importance_the_first_chunks_are_resident() -> None:
    assert rank_chunks(None, 4).tolist() == [0, 1, 2, 3]
