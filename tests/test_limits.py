"""The largest context and batch that fit: what is one larger does not."""

from __future__ import annotations

import pytest

from kvdrive_jax import KVDriveConfig, RetrievalConfig, TierConfig
from kvdrive_jax.config import WindowConfig
from kvdrive_jax.limits import _largest, find_limits
from kvdrive_jax.plan import plan_for


@pytest.mark.parametrize("most", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("limit", [0, 1, 2, 5, 8, 9, 99, 100, 1000])
def test_the_largest_number_that_fits(limit: int, most: int) -> None:
    tried: list[int] = []

    def fits(value: int) -> bool:
        tried.append(value)
        return value <= limit

    assert _largest(fits, most) == min(limit, most)
    assert max(tried) <= most


@pytest.mark.parametrize("dram", [8 << 20, 64 << 20])
def test_one_token_or_session_more_does_not_fit(dram: int) -> None:
    config = KVDriveConfig(
        retrieval=RetrievalConfig(budget=256),
        window=WindowConfig(multiple=2),
        tiers=TierConfig(hbm_budget=700 << 20, dram_budget=dram),
    )
    limits = find_limits("demo", config, [900], 64)
    assert limits.context == 8192 - 64
    for count, tokens in ((1, limits.prompt_tokens), (limits.sessions, 900)):
        if count and tokens:
            assert plan_for("demo", config, [tokens] * count, 64).fits
    assert not plan_for("demo", config, [900] * (limits.sessions + 1), 64).fits
    if limits.prompt_tokens < limits.context:
        assert not plan_for("demo", config, [limits.prompt_tokens + 1], 64).fits
    assert f"{limits.prompt_tokens:,} tokens" in limits.line(1, 900, 64)
