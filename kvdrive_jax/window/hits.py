"""How much of a selection is in its window, and of what is missing in DRAM: as measured.

Window: mean over eight texts of 6,600 tokens and 208 steps of the bundled model, selection by
moments, policy ``smoothed``: `benchmarks/results/time_hits.json`, made by
``python -m benchmarks.time_model hits``. DRAM: pages that a quarter of the KV in DRAM served, mean
of the three texts of `benchmarks/results/tiers_warm.json`, made by ``python -m benchmarks.tiers
warm``. Longer contexts and other models: a profile (``python -m kvdrive_jax.profile``) has their
own figures.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvdrive_jax.window.profile import Profile

DRAM_HITS = ((0.0, 0.0), (0.25, 0.70), (1.0, 1.0))
"""Share of the KV in DRAM, and of missing chunks that are found there."""


@dataclass(frozen=True, kw_only=True)
class HitRates:
    """Hit rate by window size, for some budgets.

    Attributes:
        budgets: [R] as shares of the context, ascending.
        multiples: [W] window sizes as multiples of the budget, ascending.
        rates: [R][W] hit rates.
        source: where they are from.
    """

    budgets: tuple[float, ...]
    multiples: tuple[float, ...]
    rates: tuple[tuple[float, ...], ...]
    source: str

    def __post_init__(self) -> None:
        if len(self.rates) != len(self.budgets) or not self.budgets:
            raise ValueError(f"rates must be one row for each budget, got {len(self.rates)}")
        for row in self.rates:
            if len(row) != len(self.multiples) or not all(0 <= rate <= 1 for rate in row):
                raise ValueError(f"rates must be from 0 to 1, one for each multiple, got {row}")

    def rate(self, budget: float, multiple: float) -> float:
        """For a budget that is a share of the context and a window, linear between what is known;
        outside it, the nearest that is known.

        Raises ValueError for a negative window, or a budget that is not from 0 to 1.
        """
        if multiple < 0:
            raise ValueError(f"window must be at least 0, got {multiple}")
        if not 0 < budget <= 1:
            raise ValueError(f"budget must be a share of the context up to 1, got {budget}")
        by_budget = [float(np.interp(multiple, self.multiples, row)) for row in self.rates]
        return float(np.interp(np.log(budget), np.log(self.budgets), by_budget))

    @classmethod
    def of_profile(cls, profile: Profile) -> HitRates:
        """Those of a profile, for its own budget."""
        rates = np.minimum(profile.hits.mean(axis=(0, 1)) / profile.selected, 1.0)
        return cls(
            budgets=(1.0,),
            multiples=profile.multiples,
            rates=(tuple(rates.tolist()),),
            source=f"a profile of {profile.model}",
        )


MEASURED = HitRates(
    budgets=(1 / 64, 1 / 16),
    multiples=(0.0, 1.0, 2.0, 3.0, 4.0),
    rates=((0.0, 0.646, 0.836, 0.890, 0.915), (0.0, 0.723, 0.914, 0.954, 0.971)),
    source="eight texts of 6,600 tokens, the bundled model (benchmarks/results/time_hits.json)",
)


def dram_hit_rate(share: float, table: Sequence[tuple[float, float]] = DRAM_HITS) -> float:
    """Of chunks that no window holds, those found in DRAM when it holds ``share`` of the KV.

    Raises ValueError for a share that is not from 0 to 1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be from 0 to 1, got {share}")
    at = bisect_left([known for known, _ in table], share)
    if table[at][0] == share:
        return table[at][1]
    (low, below), (high, above) = table[at - 1], table[at]
    return below + (above - below) * (share - low) / (high - low)
