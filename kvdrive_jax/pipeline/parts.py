"""How a batch is cut: micro-batches for select and fetch, cohorts for compute.

A micro-batch is what one select and one fetch work on. A cohort is one or more whole micro-batches
whose compute runs together. One cohort is the paper's arrangement (6.1); with two, one half of the
batch computes while the other fetches, at the price of reading the weights twice.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Arrangement:
    """Sessions of one micro-batch, and cohorts of a batch.

    Raises ValueError for numbers below one.
    """

    micro_batch: int
    cohorts: int = 1

    def __post_init__(self) -> None:
        for name, value in (("micro_batch", self.micro_batch), ("cohorts", self.cohorts)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def __str__(self) -> str:
        return f"micro-batch {self.micro_batch}, {self.cohorts} cohort(s)"


@dataclass(frozen=True)
class MicroBatch:
    """Rows ``first`` to ``last - 1`` of the batch; number counts over all cohorts."""

    number: int
    cohort: int
    first: int
    last: int

    @property
    def rows(self) -> slice:
        """Its rows of the batch."""
        return slice(self.first, self.last)


@dataclass(frozen=True)
class Cohort:
    """Rows ``first`` to ``last - 1`` of the batch, cut into micro-batches."""

    number: int
    first: int
    last: int
    micro_batches: tuple[MicroBatch, ...]

    @property
    def rows(self) -> slice:
        """Its rows of the batch."""
        return slice(self.first, self.last)

    @property
    def size(self) -> int:
        """Its sessions."""
        return self.last - self.first


def even_cuts(first: int, last: int, pieces: int) -> list[tuple[int, int]]:
    """Ranges from first to last, as even as can be, the larger ones in front."""
    size, longer = divmod(last - first, pieces)
    cuts = []
    for piece in range(pieces):
        end = first + size + (piece < longer)
        cuts.append((first, end))
        first = end
    return cuts


def cut(batch: int, arrangement: Arrangement) -> tuple[Cohort, ...]:
    """A batch of ``batch`` sessions, cut; no cohort is empty, no micro-batch larger than asked."""
    made = []
    number = 0
    for at, (first, last) in enumerate(even_cuts(0, batch, min(arrangement.cohorts, batch))):
        pieces = -(-(last - first) // arrangement.micro_batch)
        parts = []
        for low, high in even_cuts(first, last, pieces):
            parts.append(MicroBatch(number, at, low, high))
            number += 1
        made.append(Cohort(at, first, last, tuple(parts)))
    return tuple(made)


def candidates(
    batch: int, *, micro_batch: int | None = None, cohorts: int | None = None, most_cohorts: int = 2
) -> list[Arrangement]:
    """Arrangements of a batch that are worth trying, as few as can be: micro-batches of a whole, a
    half, a quarter... of a cohort; what is given is fixed."""
    found = []
    for count in [cohorts] if cohorts is not None else range(1, min(most_cohorts, batch) + 1):
        size = -(-batch // min(count, batch))
        sizes = [micro_batch] if micro_batch is not None else []
        while not sizes or (micro_batch is None and sizes[-1] > 1):
            sizes.append(-(-sizes[-1] // 2) if sizes else size)
        found += [Arrangement(min(each, size), min(count, batch)) for each in sizes]
    return sorted(set(found), reverse=True)
