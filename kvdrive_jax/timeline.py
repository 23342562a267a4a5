"""Spans of time: what ran when, in which lane, for which layer and micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Lane = Literal["device", "engine", "host gather", "DRAM->HBM", "SSD->DRAM"]


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds of ``time.perf_counter`` from start to end; -1 where a number does not apply."""

    lane: Lane
    name: str
    start: float
    end: float
    layer: int = -1
    micro_batch: int = -1
    cohort: int = -1
    nbytes: int = 0
    hits: int = -1
    misses: int = -1


class Timeline:
    """Collects spans of one call; any thread may add, the engine's thread ends steps."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def span(
        self,
        lane: Lane,
        name: str,
        start: float,
        end: float,
        layer: int = -1,
        micro_batch: int = -1,
        cohort: int = -1,
        nbytes: int = 0,
        hits: int = -1,
        misses: int = -1,
    ) -> None:
        """Add one span."""
        self._spans.append(
            Span(lane, name, start, end, layer, micro_batch, cohort, nbytes, hits, misses)
        )

    def end_step(self, start: float, end: float) -> None:
        """A decode step from ``start`` to ``end`` is over."""
        self._spans.clear()
