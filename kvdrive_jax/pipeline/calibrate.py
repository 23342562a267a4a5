"""Which settings suit the machine at hand (paper 6.2): how to choose, apart from how to measure.

*Arrangement*: micro-batch size and cohorts, tried on the first real decode steps. Every arrangement
gives the same tokens, so a trial wastes nothing but what it is slower than the best. `Search` says
which to use for the next step and takes note of how long that took.

*Windows*: grown as long as a larger one saves more of fetch than it adds to look-up and eviction.
`best_window` says up to which size that is, from `WindowCosts` and hit rates by window size (a
profile's, or `window.hits`).

*Clusters*: a constant number of tokens for each, so that their count follows the context
(`cluster_count`; the paper's figure 18 finds the same at 60K and at 120K).

Pure: nothing here calls JAX, reads a clock or touches a file.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvdrive_jax.pipeline.parts import Arrangement
from kvdrive_jax.window.hits import HitRates

Sizes = npt.NDArray[np.float64]

CALIBRATION_S: Final = 9.5
"""Seconds that all calibration of a run may take, compilation of what is tried included."""
SAMPLES: Final = 3
"""Steps that an arrangement is judged by, where they are short; the one before them, in which it is
compiled and state is put into its place, does not count."""
AGAIN: Final = 3
"""Steps of another run of one that was tried before; the first does not count here either."""
CLOSE: Final = 1.05
"""Arrangements whose times are within this factor are not told apart by SAMPLES steps."""
HOPELESS: Final = 1.4
"""An arrangement is not tried further whose quickest of two steps takes so many times the best, or
the square of that a single one."""


class Trial(NamedTuple):
    """One step: what it ran with, its seconds, and the seconds before it to change to that."""

    used: Arrangement
    seconds: float
    change_s: float


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search for the quickest arrangement. Immutable: `note` returns the next state.

    Each number of cohorts is climbed for itself, from its middle or from where the others are best:
    along micro-batch sizes time falls, then rises (bubbles of large ones, launches of small ones).
    Those that come out close to the best are run again, in turn.

    Attributes:
        candidates: what may be chosen.
        start: what is tried first, one of them.
        limit_s: seconds of all steps together after which nothing new is begun.
        most_steps: the most steps.
        log: every step so far, in order.
    """

    candidates: tuple[Arrangement, ...]
    start: Arrangement
    limit_s: float = CALIBRATION_S
    most_steps: int = 1 << 30
    log: tuple[Trial, ...] = ()

    def __post_init__(self) -> None:
        if self.start not in self.candidates:
            raise ValueError(f"start must be one of {self.candidates}, got {self.start}")

    def note(self, used: Arrangement, seconds: float, change_s: float = 0.0) -> Search:
        """After a step; see `Trial`."""
        return replace(self, log=(*self.log, Trial(used, seconds, change_s)))

    @property
    def spent_s(self) -> float:
        """Seconds of the search. Its first step is none of it: every run compiles one."""
        return sum(trial.seconds + trial.change_s for trial in self.log[1:])

    def times(self, arrangement: Arrangement) -> list[float]:
        """Seconds of its steps that count: not the first after a change of arrangement."""
        return [
            trial.seconds
            for last, trial in pairwise(self.log)
            if trial.used == arrangement == last.used
        ]

    def value(self, arrangement: Arrangement) -> float:
        """Lower median of the seconds of its steps; inf before it had any that counts."""
        return statistics.median_low(self.times(arrangement) or [math.inf])

    @property
    def best(self) -> Arrangement:
        """The quickest so far; the start before anything is known."""
        return min([self.start, *self.tried], key=self.value)

    @property
    def tried(self) -> list[Arrangement]:
        """Arrangements with a value, in the order in which they were begun."""
        return [used for used in self._begun if self.times(used)]

    @property
    def _begun(self) -> list[Arrangement]:
        return list(dict.fromkeys(trial.used for trial in self.log))

    def next(self) -> Arrangement | None:
        """What the next step is to run with; None when the search is over."""
        if len(self.candidates) == 1 or len(self.log) >= self.most_steps:
            return None
        if not self.log:
            return self.start
        current = self.log[-1].used
        if self._wants_more(current):
            return current if self.spent_s < self.limit_s else None
        untried = self._untried()
        if untried is not None and self._affordable(self._samples + 1, new=True):
            return untried
        for other in self._close():
            if self._affordable(AGAIN, new=False):
                return other
        return None

    def _wants_more(self, current: Arrangement) -> bool:
        others = [i for i, trial in enumerate(self.log) if trial.used != current]
        run = len(self.log) - 1 - (others[-1] if others else -1)
        times = self.times(current)
        if run < 2:
            return True
        worse = min(times) / max(self.value(self.best), 1e-9)
        if worse > (HOPELESS if len(times) > 1 else HOPELESS**2):
            return False
        again = len(times) > run - 1
        return run < AGAIN if again else len(times) < self._samples

    @property
    def _samples(self) -> int:
        """As many steps as leave time to try them all."""
        step = self.value(self.best)
        share = 0.5 * self.limit_s / len(self.candidates)
        return max(1, min(SAMPLES, int(share / step) - 1)) if 0 < step < math.inf else SAMPLES

    def _affordable(self, steps: int, *, new: bool) -> bool:
        """Whether so many steps end in time, going by what compiling has cost until now."""
        step = self.value(self.best)
        first = {trial.used: trial for trial in reversed(self.log)}
        extra = [
            max(0.0, first[used].seconds + first[used].change_s - self.value(used))
            for used in self.tried
        ]
        # The first of all also compiles what all arrangements share.
        extra[0] /= 2
        return self.spent_s + new * max(extra[1:] or extra) + steps * step <= self.limit_s

    def _untried(self) -> Arrangement | None:
        begun, best = self._begun, self.best
        # A number of cohorts that was never tried first: it tells more than a neighbour does, and
        # time may not be enough for both.
        tried = {used.cohorts for used in begun}
        rows = sorted(
            {c.cohorts for c in self.candidates},
            key=lambda n: (n in tried, abs(n - best.cohorts)),
        )
        for cohorts in rows:
            row = sorted(
                (c for c in self.candidates if c.cohorts == cohorts), key=lambda c: c.micro_batch
            )
            known = [c for c in row if c in begun]
            if not known:
                return min(row, key=lambda c: _apart(c.micro_batch, best.micro_batch))
            least = min(self.value(c) for c in known)
            for candidate in sorted(known, key=self.value):
                if self.value(candidate) > CLOSE * least:
                    break
                at = row.index(candidate)
                for neighbour in row[max(0, at - 1) : at + 2]:
                    if neighbour not in begun:
                        return neighbour
        return None

    def _close(self) -> list[Arrangement]:
        """What another run may still put before the best, those with the fewest steps first."""
        least = self.value(self.best)
        close = [used for used in self.tried if self.value(used) <= CLOSE * least]
        if len(close) == 1:
            return []
        few = [used for used in close if len(self.times(used)) < 2 * SAMPLES - 1]
        return sorted(few, key=lambda used: len(self.times(used)))


def _apart(first: int, second: int) -> float:
    return max(first, second) / min(first, second)


# Windows

MISS_EXPONENT: Final = -0.6
"""Misses beyond the largest window with a known rate fall with this power of the size, as they do
from x4 to x8 in `window.hits`."""
GRID: Final = 0.25
"""Windows are compared in steps of this multiple of the budget."""


@dataclass(frozen=True, kw_only=True)
class WindowCosts:
    """What windows cost in one layer and step of a batch, in seconds.

    Attributes:
        multiples: [W] measured window sizes as multiples of the budget, ascending, at least two.
        lookup_s: [W] look-up, policy and update of the directory.
        fetch_s: of a fetch, however small.
        page_s: of each page that it brings.
    """

    multiples: tuple[float, ...]
    lookup_s: tuple[float, ...]
    fetch_s: float
    page_s: float

    def __post_init__(self) -> None:
        ascending = list(self.multiples) == sorted(set(self.multiples))
        if len(self.multiples) < 2 or not ascending or self.multiples[0] < 1:
            raise ValueError(f"multiples must be two or more from 1 up, got {self.multiples}")
        if len(self.lookup_s) != len(self.multiples):
            raise ValueError(
                f"lookup_s must be {len(self.multiples)} numbers, got {len(self.lookup_s)}"
            )
        numbers = [*self.multiples, *self.lookup_s, self.fetch_s, self.page_s]
        if not np.isfinite(numbers).all() or min(numbers) < 0:
            raise ValueError("costs must be finite and at least 0")

    def lookup(self, multiple: Sizes) -> Sizes:
        """Seconds of look-up at window sizes [n], never less for a larger one; beyond what was
        measured it goes on as between the last two."""
        known = np.maximum.accumulate(np.array(self.lookup_s))
        slope = (known[-1] - known[-2]) / (self.multiples[-1] - self.multiples[-2])
        beyond = np.maximum(0.0, multiple - self.multiples[-1])
        return np.interp(multiple, self.multiples, known) + slope * beyond

    def fetch(self, missed: Sizes) -> Sizes:
        """Seconds of fetches of so many pages [n]."""
        return self.fetch_s + self.page_s * missed


def miss_rate(hits: HitRates, budget: float, sizes: Sizes) -> Sizes:
    """Share of selected chunks [n] that windows of so many multiples of the budget [n] miss, for a
    budget that is a share of the context."""
    missed = np.array([1 - hits.rate(budget, float(size)) for size in sizes])
    return missed * np.maximum(1.0, sizes / hits.multiples[-1]) ** MISS_EXPONENT


@dataclass(frozen=True, kw_only=True)
class WindowChoice:
    """A window size, and what a layer's look-up and fetch take with it in one step, in seconds."""

    multiple: float
    lookup_s: float
    fetch_s: float


def best_window(
    costs: WindowCosts, hits: HitRates, budget: float, pages: int, largest: float
) -> WindowChoice:
    """The size up to which growing a window pays, and what it then costs.

    hits: by window size; budget: as a share of the context; pages: selected in one layer and step
    by the whole batch; largest: the largest multiple of the budget there is room for, at least 1.
    Of sizes that cost the same within a hundredth, the
    smallest: HBM is better used for something else.
    """
    sizes = np.unique([*np.arange(1.0, largest, GRID), largest])
    lookup = costs.lookup(sizes)
    fetch = costs.fetch(pages * miss_rate(hits, budget, sizes))
    total = lookup + fetch
    at = int(np.flatnonzero(total <= 1.01 * total.min())[0])
    return WindowChoice(
        multiple=float(sizes[at]), lookup_s=float(lookup[at]), fetch_s=float(fetch[at])
    )


def cluster_count(tokens: int, tokens_per_cluster: int) -> int:
    """C of a context: a constant number of tokens for each cluster."""
    return -(-tokens // tokens_per_cluster)
