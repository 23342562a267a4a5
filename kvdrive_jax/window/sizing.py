"""Which window sizes a batch gets: what was asked for, what a profile says, or what fits."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from kvdrive_jax.config import WindowConfig
from kvdrive_jax.window.allocation import greedy, slots_of
from kvdrive_jax.window.layout import WindowLayout
from kvdrive_jax.window.profile import Profile, ProfileKey, profile_path, read_profile

STEP = 0.25
"""Uniform windows are tried in steps of this multiple of the budget."""

Hbm = Callable[[WindowLayout | None], int]
"""Bytes of HBM that a batch takes with a layout, or with a slot for every chunk (None)."""


@dataclass(frozen=True, kw_only=True)
class WindowShape:
    """L, K, P and N of a batch."""

    layers: int
    kv_heads: int
    selected: int
    chunk_capacity: int

    def uniform(self, multiple: float) -> WindowLayout | None:
        """Windows of one size; None where that is a slot for every chunk."""
        slots = slots_of(multiple, self.selected)
        if slots >= self.chunk_capacity:
            return None
        return WindowLayout.uniform(self.layers, self.kv_heads, slots, self.selected)

    def uniform_rows(self, multiple: float) -> int:
        """Page rows of windows of one size."""
        return self.layers * self.kv_heads * slots_of(multiple, self.selected)

    def mean_multiple(self, layout: WindowLayout | None) -> float:
        """Mean window size as a multiple of the budget."""
        return self.chunk_capacity / self.selected if layout is None else layout.mean_multiple


MostMultiple = Callable[[WindowShape, float, Profile | None], float | None]
"""Of a batch, the largest multiple that fits and the profile there is: the multiple beyond which
windows cost more than they save, or None where that is not known."""


def choose_layout(
    config: WindowConfig,
    shape: WindowShape,
    key: ProfileKey,
    hbm: Hbm,
    budget: int,
    most: MostMultiple | None = None,
) -> tuple[WindowLayout | None, str]:
    """The windows of a batch, and in a few words where their sizes come from.

    Asked for: that, or with a profile its distribution over layers and heads at the same mean.
    Else everything, if it fits ``budget`` bytes of HBM; else as a profile of the model distributes
    what fits (`--window-profile`, or one in its default place); else the largest uniform windows
    that fit (paper 5.1), or the smallest there are, for the plan to refuse. Of what fits no more is
    taken than pays, where ``most`` knows it (paper 6.2).

    Raises ValueError for a profile that is asked for and is not of this model and configuration.
    """
    multiple, profile = config.uniform, None
    if config.profile is not None:
        profile = read_profile(config.profile)
        profile.require(key, config.profile)
    if multiple is not None:
        wanted = shape.uniform(multiple)
        if wanted is None or profile is None:
            return wanted, "as asked"
        return profile_layout(profile, shape, wanted.rows), f"mean as asked, by {config.profile}"
    if hbm(None) <= budget:
        return None, "everything fits"
    largest = _largest_uniform(shape, hbm, budget)
    path = config.profile
    if profile is None:
        path = profile_path(key)
        profile = read_profile(path) if os.path.exists(path) else None
        if profile is not None:
            profile.require(key, path)
    how, by = "the largest that fits", f"by {path}"
    if most is not None and largest is not None and largest.mean_multiple > 1:
        pays = most(shape, largest.mean_multiple, profile)
        if pays is not None and pays < largest.mean_multiple:
            largest, how = shape.uniform(pays), "as large as pays"
            by = f"{how}, {by}"
    if largest is None or profile is None or largest.mean_multiple >= profile.multiples[-1]:
        return largest or shape.uniform(0.0), how
    rows = largest.rows
    layout = profile_layout(profile, shape, rows)
    while hbm(layout) > budget:  # directories are as wide as the largest window
        rows = rows * 99 // 100
        if rows < shape.uniform_rows(1.0):
            return largest, how
        layout = profile_layout(profile, shape, rows)
    return layout, by


def _largest_uniform(shape: WindowShape, hbm: Hbm, budget: int) -> WindowLayout | None:
    """The largest windows of one size that fit, or None if not even the smallest do."""
    steps = int(shape.chunk_capacity / shape.selected / STEP)
    low, high = 0, steps  # in steps above 1; bytes grow with every step
    best = shape.uniform(0.0)
    if best is None or hbm(best) > budget:
        return None
    while low <= high:
        middle = (low + high) // 2
        layout = shape.uniform(1 + middle * STEP)
        if layout is not None and hbm(layout) <= budget:
            best, low = layout, middle + 1
        else:
            high = middle - 1
    return best


def profile_layout(profile: Profile, shape: WindowShape, rows: int) -> WindowLayout:
    """The profile's windows in at most so many rows, none larger than the context."""
    largest = shape.chunk_capacity / shape.selected
    multiples = [min(multiple, largest) for multiple in profile.multiples]
    return greedy(profile.hits, multiples, shape.selected, rows).layout
