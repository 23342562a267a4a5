"""What a run of a layer stack leaves: times, bytes, spans, and what it computed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvdrive_jax.plan import Plan
from kvdrive_jax.timeline import Lane, Span, Timeline

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class StepSpans:
    """What ran in one step, from ``start`` to ``end``, in seconds of ``time.perf_counter``."""

    start: float
    end: float
    spans: tuple[Span, ...]

    def busy_s(self, lane: Lane, *names: str) -> float:
        """Seconds in which spans of a lane ran (of these names, if any are given); spans that
        overlap count once."""
        of = sorted(
            (span.start, span.end)
            for span in self.spans
            if span.lane == lane and (not names or span.name in names)
        )
        total, until = 0.0, self.start
        for start, end in of:
            total += max(0.0, end - max(start, until))
            until = max(until, end)
        return total


class KeptTimeline(Timeline):
    """A timeline whose spans can be looked at afterwards, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[StepSpans] = []
        self._kept: list[Span] = []

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
        """See `Timeline`."""
        one = Span(lane, name, start, end, layer, micro_batch, cohort, nbytes, hits, misses)
        self._kept.append(one)

    def take(self, start: float, end: float) -> None:
        """A step from ``start`` to ``end`` is over: it has the spans since the last."""
        self.done.append(StepSpans(start=start, end=end, spans=tuple(self._kept)))
        self._kept = []


@dataclass(frozen=True, kw_only=True, eq=False)
class StackRun:
    """What a run took.

    step_s: wall time of each step; digests: of each step's logits; logits: [steps, B, V] float32,
    which a tiny vocabulary makes a summary of hidden states; bytes: moved in all steps, by
    direction; selected, missed: chunks in all steps, by session; setup_s: until the first step;
    computed: sessions whose compute runs together; spans: what ran in each step.
    """

    step_s: list[float]
    digests: list[str]
    logits: Array
    bytes: dict[str, int]
    selected: list[int]
    missed: list[int]
    setup_s: float
    computed: int
    plan: Plan
    spans: list[StepSpans]

    @property
    def digest(self) -> str:
        """Of everything the steps computed."""
        return hashlib.sha256("".join(self.digests).encode()).hexdigest()[:16]

    @property
    def hit_rate(self) -> float:
        """Of all sessions."""
        return 1 - sum(self.missed) / max(1, sum(self.selected))

    @property
    def median_s(self) -> float:
        """Of a step."""
        return float(np.median(self.step_s))

    @property
    def tokens_per_s(self) -> float:
        """Of all sessions, by the median step."""
        return self.logits.shape[1] / self.median_s

    def stage_s(self) -> dict[str, float]:
        """Seconds of a step (mean) in which each stage ran: select and compute on the device, pages
        gathered, carried and written; and in which the device ran nothing."""
        lanes: dict[str, tuple[Lane, tuple[str, ...]]] = {
            "select": ("device", ("select",)),
            "compute": ("device", ("compute",)),
            "write": ("device", ("write",)),
            "gather": ("host gather", ()),
            "transfer": ("DRAM->HBM", ()),
            "read": ("SSD->DRAM", ()),
            "device": ("device", ()),
        }
        steps = len(self.spans)
        found = {
            stage: sum(step.busy_s(lane, *names) for step in self.spans) / steps
            for stage, (lane, names) in lanes.items()
        }
        wall = sum(step.end - step.start for step in self.spans) / steps
        return {**found, "device idle": wall - found.pop("device"), "wall": wall}

    def summary(self) -> dict[str, Any]:
        """Plain values for a result."""
        steps = len(self.step_s)
        return {
            "step_ms": [round(1e3 * value, 3) for value in self.step_s],
            "median_ms": 1e3 * self.median_s,
            "tokens_per_s": self.tokens_per_s,
            "hit_rate": self.hit_rate,
            "bytes_per_step": {name: count / steps for name, count in self.bytes.items() if count},
            "stage_ms_per_step": {name: 1e3 * s for name, s in self.stage_s().items()},
            "setup_s": self.setup_s,
            "digest": self.digest,
        }


TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 4e-3}
"""Of the largest logit, for runs whose matrix products have other shapes and round otherwise."""


def same_outputs(runs: dict[str, StackRun], dtype: str = "float32") -> dict[str, float]:
    """The largest difference between logits of each run and the first, which is 0, bit for bit, for
    runs that compute equally many sessions together. RuntimeError where it is not, or where others
    differ by more than rounding."""
    names = list(runs)
    first = runs[names[0]]
    found = {}
    for name in names[1:]:
        other = runs[name]
        found[name] = worst = float(np.abs(first.logits - other.logits).max())
        allowed = TOLERANCE[dtype] * float(np.abs(first.logits).max())
        same = other.digests == first.digests
        if same or (other.computed != first.computed and worst <= allowed):
            continue
        changed = (one != two for one, two in zip(first.digests, other.digests, strict=True))
        step = next((i for i, differs in enumerate(changed) if differs), None)
        raise RuntimeError(
            f"{name} computed something else than {names[0]} from step {step} on, by {worst:g}"
        )
    return found
