"""Two-dimensional window scaling: how many slots each (layer, kv head) gets of what HBM there is.

Layers and heads differ in what a larger window saves them (paper 5.2, figure 8). Given how many
chunks per step each size serves, one size per head is chosen such that most chunks are served and
all windows together stay within the budget: a multiple-choice knapsack. `greedy` is the paper's
answer to it, `exact` is there to judge that by, and `uniform` is what both have to beat.

A page is as large everywhere, so chunks served stand for bytes saved, and rows of the pool (see
`layout`) for bytes of HBM. Windows of size 0 have a cost that belongs to no head: as soon as there
is one, one landing area per kv head is needed. Every answer is therefore the better of two: the
best without size 0, in all of the budget, and the best with it, in what the landing areas leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdrive_jax.window.layout import WindowLayout

MULTIPLES: Final = (0.0, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0)
"""Window sizes that are measured and tried, in multiples of the budget. Fine steps save more: with
half of these sizes, half as much at x2 (`benchmarks.windows fig15`)."""

Hits = npt.NDArray[np.float64]
"""[heads, sizes] chunks served per step; heads are all (layer, kv head), layer by layer."""

Costs = npt.NDArray[np.int64]
"""[sizes] rows, ascending."""

Choice = npt.NDArray[np.intp]
"""[heads] which size each gets."""


@dataclass(frozen=True)
class Allocation:
    """One size for every window.

    Attributes:
        multiples: [L][K], each window's size in multiples of the budget, of those that were given.
        layout: the same in slots, and where they lie.
        hits: chunks per step that all windows together serve, by the curves they were made from.
    """

    multiples: tuple[tuple[float, ...], ...]
    layout: WindowLayout
    hits: float

    @property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """[L][K] slots of each window."""
        return self.layout.slots

    @property
    def rows(self) -> int:
        """R, rows of the pool, landing areas included."""
        return self.layout.rows


def slots_of(multiple: float, selected: int) -> int:
    """Slots of a window: `multiple` times the P `selected` chunks, rounded; 0 for 0.

    Raises ValueError for a multiple between 0 and 1: a window holds one step's selection, or
    nothing.
    """
    if not math.isfinite(multiple) or not (multiple == 0 or multiple >= 1):
        raise ValueError(f"multiple must be 0 or at least 1, got {multiple}")
    if selected < 1:
        raise ValueError(f"selected must be at least 1, got {selected}")
    return max(selected, round(multiple * selected)) if multiple else 0


def greedy(hits: npt.ArrayLike, multiples: Sequence[float], selected: int, rows: int) -> Allocation:
    """The paper's way (5.2): from the smallest windows, enlarge where a row serves most, until the
    rows are used.

    Curves need not be concave: where the next size serves little and one beyond it much, the step
    is the best *jump* to any larger size, so that what is climbed is each curve's upper concave
    hull. A jump that does not fit ends its head's climb. What is left goes to single enlargements
    that fit, the largest gain first. The same is filled up from the largest uniform windows that
    fit, and taken if it serves more: so the answer is never worse than uniform, and misses at most
    one jump's gain to the best there is. Ties go to the lower layer, the lower head, the smaller
    size.

    Args:
        hits: [L, K, W] chunks per step that a window of each size serves; finite, not negative.
            A larger window cannot serve fewer: where it does, that is noise, and the smaller one's
            hits are taken.
        multiples: [W] the sizes, ascending, each as in `slots_of`. Equal ones count as one size
            with the best of their hits, so that sizes may be cut at the context's chunks.
        selected: P.
        rows: R, the most rows of the pool, landing areas included.

    Raises:
        ValueError: for arguments of another form, or fewer rows than the smallest windows take.
    """
    return _allocate(hits, multiples, selected, rows, _climb)


def exact(
    hits: npt.ArrayLike,
    multiples: Sequence[float],
    selected: int,
    rows: int,
    *,
    resolution: int = 1 << 20,
) -> Allocation:
    """The best allocation there is, by dynamic programming over rows.

    Rows are counted in steps of the greatest common divisor of all differences of size. Of equally
    good ones, that with the smaller windows in the first heads.

    Args:
        hits, multiples, selected, rows: as for `greedy`.
        resolution: the most steps into which the rows are divided: bounds time, and memory at
            L x K x resolution bytes. If there are more, steps are made larger and sizes rounded up
            to them: the answer keeps within the rows, but may then not be the best.

    Raises:
        ValueError: as `greedy` does.
    """
    if resolution < 1:
        raise ValueError(f"resolution must be at least 1, got {resolution}")

    def solve(curves: Hits, costs: Costs, budget: int) -> Choice:
        return _knapsack(curves, costs, budget, resolution)

    return _allocate(hits, multiples, selected, rows, solve)


def uniform(
    hits: npt.ArrayLike, multiples: Sequence[float], selected: int, rows: int
) -> Allocation:
    """The largest of the sizes that every window can have (paper 5.1). Arguments, errors: as for
    `greedy`."""
    return _allocate(hits, multiples, selected, rows, _largest_uniform)


def _allocate(
    hits: npt.ArrayLike,
    multiples: Sequence[float],
    selected: int,
    rows: int,
    solve: Callable[[Hits, Costs, int], Choice],
) -> Allocation:
    curves = np.asarray(hits, np.float64)
    if curves.ndim != 3 or not curves.size or curves.shape[-1] != len(multiples):
        raise ValueError(
            f"hits must be [layers, kv_heads, {len(multiples)} sizes], none of them 0, got "
            f"{list(curves.shape)}"
        )
    if not np.isfinite(curves).all() or curves.min() < 0:
        raise ValueError("hits must be finite and not negative")
    every = np.array([slots_of(multiple, selected) for multiple in multiples], np.int64)
    if (np.diff(multiples) < 0).any():
        raise ValueError(f"multiples must ascend, got {list(multiples)}")

    layers, kv_heads = curves.shape[:2]
    # One size per cost, the first of equal ones, with the hits of the last of the running maximum.
    costs, first, count = np.unique(every, return_index=True, return_counts=True)
    served = np.maximum.accumulate(curves, axis=-1)[..., first + count - 1]
    served = served.reshape(layers * kv_heads, len(costs))

    landing = kv_heads * selected if costs[0] == 0 else 0
    found: list[tuple[float, Choice]] = []
    needed = []
    for smallest, budget in ((int(costs[0] == 0), rows), (0, rows - landing)):
        if smallest == len(costs) or (found and not landing):
            continue
        least = len(served) * int(costs[smallest])
        needed.append(least + rows - budget)
        if least <= budget:
            choice = smallest + solve(served[:, smallest:], costs[smallest:], budget)
            found.append((_total(served, choice), choice))
    if not found:
        raise ValueError(
            f"rows must be at least {min(needed)} for the smallest windows of {layers} layers x "
            f"{kv_heads} kv heads, got {rows}"
        )
    total, choice = max(found, key=lambda item: item[0])
    sizes = np.array(multiples, np.float64)[first][choice].reshape(layers, kv_heads)
    return Allocation(
        multiples=tuple(tuple(row) for row in sizes.tolist()),
        layout=WindowLayout.of(costs[choice].reshape(layers, kv_heads), selected),
        hits=total,
    )


def _total(hits: Hits, choice: Choice) -> float:
    return float(hits[np.arange(len(hits)), choice].sum())


def _largest_uniform(hits: Hits, costs: Costs, budget: int) -> Choice:
    size = int((len(hits) * costs <= budget).sum()) - 1
    return np.full(len(hits), size, np.intp)


def _climb(hits: Hits, costs: Costs, budget: int) -> Choice:
    climbed = np.zeros(len(hits), np.intp)
    left = budget - len(hits) * int(costs[0])
    for _, head, start, end in sorted(_jumps(hits, costs)):
        extra = int(costs[end] - costs[start])
        if climbed[head] == start and extra <= left:
            climbed[head] = end
            left -= extra
    starts = (climbed, _largest_uniform(hits, costs, budget))
    filled = [_fill(hits, costs, budget, start) for start in starts]
    return max(filled, key=lambda choice: _total(hits, choice))


def _jumps(hits: Hits, costs: Costs) -> list[tuple[float, int, int, int]]:
    """(-gain per row, head, from size, to size) of every edge of every curve's concave hull, in
    an order of which no edge comes before the one below it."""
    jumps = []
    for head, curve in enumerate(hits):
        at, limit = 0, math.inf
        while at + 1 < len(costs):
            slopes = (curve[at + 1 :] - curve[at]) / (costs[at + 1 :] - costs[at])
            best = int(slopes.argmax())
            if slopes[best] <= 0:
                break
            limit = min(limit, float(slopes[best]))  # falls along a hull, but for rounding
            jumps.append((-limit, head, at, at + 1 + best))
            at += 1 + best
    return jumps


def _fill(hits: Hits, costs: Costs, budget: int, choice: Choice) -> Choice:
    """Enlarges single windows while any gains and fits, the largest gain first."""
    choice = choice.copy()
    heads = np.arange(len(hits))
    left = budget - int(costs[choice].sum())
    while True:
        extra = costs - costs[choice][:, None]
        gain = np.where(extra <= left, hits - hits[heads, choice][:, None], 0.0)
        head, size = np.unravel_index(int(gain.argmax()), gain.shape)
        if gain[head, size] <= 0:
            return choice
        left -= int(extra[head, size])
        choice[head] = size


def _knapsack(hits: Hits, costs: Costs, budget: int, resolution: int) -> Choice:
    heads = len(hits)
    extra = costs - costs[0]
    room = min(budget - heads * int(costs[0]), heads * int(extra[-1]))
    step = max(1, int(np.gcd.reduce(extra)))
    step *= max(1, -(-(room // step) // resolution))
    units = room // step
    need = -(-extra // step)

    # Backwards over heads, so that reading the table forwards meets the first heads first.
    best = np.zeros(units + 1)  # of the heads so far, within so many steps
    table = np.zeros((heads, units + 1), np.uint8)
    for head in range(heads - 1, -1, -1):
        before, best = best, best + hits[head, 0]
        for size in range(1, int((need <= units).sum())):
            above = slice(int(need[size]), None)
            other = before[: units + 1 - need[size]] + hits[head, size]
            better = other > best[above]
            np.copyto(best[above], other, where=better)
            np.copyto(table[head, above], np.uint8(size), where=better)

    choice = np.zeros(heads, np.intp)
    left = units
    for head in range(heads):
        choice[head] = table[head, left]
        left -= int(need[choice[head]])
    return choice
