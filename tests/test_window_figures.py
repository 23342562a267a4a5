"""The window figures over made-up traces: what they compute, not what real texts give."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import windows
from tests.test_window_replay import random_trace


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def each(wanted: list[Any], folder: Path) -> Any:
        for want in wanted:
            trace = random_trace(sum(map(ord, want.text)) + want.tokens)
            yield (
                want,
                dataclasses.replace(trace, info=dataclasses.replace(trace.info, text=want.text)),
            )

    monkeypatch.setattr(windows, "each", each)
    monkeypatch.setattr(windows, "TEXTS", ("one", "two", "three"))


def test_bytes_fall_and_memory_grows_with_the_window() -> None:
    rows = windows.fig3(Path())["rows"]
    for at in range(0, len(rows), 4):
        four = rows[at : at + 4]
        assert [row["window"] for row in four] == [0, 1, 2, 3]
        fetched = [row["bytes_per_step"] for row in four]
        assert fetched == sorted(fetched, reverse=True)
        budget = max(1, int(np.ceil(148 * four[0]["budget_ratio"])) // 4)
        assert fetched[0] == budget * 2 * 3 * 256
        assert [row["hbm_bytes"] for row in four] == [
            budget * 3 * 256 * layers for layers in (1, 2, 4, 6)
        ]


def test_overlap_reaches_everything_when_all_is_counted() -> None:
    for tokens, curve in windows.fig7(Path())["curves"].items():
        found = np.array(curve["found_tokens"])
        assert (np.diff(found, axis=0) >= 0).all()
        np.testing.assert_allclose(found[-1], min(int(tokens), 37 * 4))


def test_windows_by_layer_and_head_cost_no_more() -> None:
    result = windows.fig15(Path())
    for row in result["rows"]:
        for name in ("from other texts", "from this text"):
            assert row[f"{name}, rows"] <= row["rows"]
            saved = 1 - row[f"{name}, bytes_per_step"] / row["uniform_bytes_per_step"]
            assert row[f"{name}, saved"] == pytest.approx(saved)
    assert result["least greedy / exact"] <= 1


def test_policies_are_placed_between_lru_and_belady() -> None:
    for row in windows.policies(Path())["rows"]:
        assert row["gap_closed"]["lru"] == 0
        assert row["gap_closed"]["belady"] == 1
        assert max(row["hit_rate"].values()) == row["hit_rate"]["belady"]
