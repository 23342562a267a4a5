"""When things run: the stages of all layers and micro-batches, in the order of a schedule.

A schedule decides when select, fetch and compute run, never what they do, so every schedule gives
the same tokens (speculative excepted: it selects by the input of the layer before).

- *overlapped* (paper 6.1): every micro-batch of a cohort is selected at once; as each miss list
  arrives its pages are gathered and transferred while the next is selected; compute follows when
  the last are in their slots. Cohorts go through the layers independently of each other.
- *sequential* (paper figure 10a): the same with one micro-batch, so that each stage waits for the
  one before.
- *speculative* (InfiniGen, paper figure 10b): layer l + 1 selects by the input of layer l, so that
  its fetch hides behind compute of layer l.

One thread runs all of this, the engine's; it waits only when nothing can go on.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Generic, Protocol, TypeVar

from kvdrive_jax.pipeline.parts import Cohort, MicroBatch

Hidden = TypeVar("Hidden")
Fetch = TypeVar("Fetch")


class Stages(Protocol[Hidden, Fetch]):
    """The three stages as a schedule sees them. Hidden is the state of one cohort between two
    layers, Fetch what is under way for one micro-batch of one layer."""

    def select(self, layer: int, part: MicroBatch, hidden: Hidden) -> Fetch:
        """Dispatch selection; its fetch has begun when this returns."""
        ...

    def advance(self, fetch: Fetch) -> bool:
        """Take a fetch as far as it can go now; whether it went on."""
        ...

    def landed(self, fetch: Fetch) -> bool:
        """Whether its pages are on their way into their slots, ahead of all that follows."""
        ...

    def compute(
        self, layer: int, cohort: Cohort, hidden: Hidden, fetches: Sequence[Fetch]
    ) -> Hidden:
        """Dispatch attention and the feed-forward part of a cohort whose fetches have landed."""
        ...

    def wait(self, fetches: Sequence[Fetch]) -> None:
        """Until something may have happened to one of these."""
        ...


class _Run(Generic[Hidden, Fetch]):
    """One cohort on its way through the layers, and what it waits for."""

    def __init__(
        self,
        stages: Stages[Hidden, Fetch],
        cohort: Cohort,
        layers: int,
        hidden: Hidden,
        *,
        speculative: bool,
    ) -> None:
        self._stages, self._cohort, self._layers = stages, cohort, layers
        self.hidden = hidden
        self.under_way: list[Fetch] = []
        self.waits_for: list[Fetch] = []
        self._steps = self._speculative() if speculative else self._overlapped()
        self.done = False
        self.go_on()

    def go_on(self) -> None:
        """To the next point that has to wait."""
        try:
            self.waits_for = next(self._steps)
        except StopIteration:
            self.done, self.waits_for = True, []

    def _select(self, layer: int) -> list[Fetch]:
        parts = self._cohort.micro_batches
        begun = [self._stages.select(layer, part, self.hidden) for part in parts]
        self.under_way += begun
        return begun

    def _compute(self, layer: int, fetches: list[Fetch]) -> None:
        self.hidden = self._stages.compute(layer, self._cohort, self.hidden, fetches)
        self.under_way = [fetch for fetch in self.under_way if fetch not in fetches]

    def _overlapped(self) -> Generator[list[Fetch], None, None]:
        for layer in range(self._layers):
            fetches = self._select(layer)
            yield fetches
            self._compute(layer, fetches)

    def _speculative(self) -> Generator[list[Fetch], None, None]:
        ahead = self._select(0) if self._layers else []
        for layer in range(self._layers):
            fetches = ahead
            if layer + 1 < self._layers:
                ahead = self._select(layer + 1)
            yield fetches
            self._compute(layer, fetches)


def run_layers(
    stages: Stages[Hidden, Fetch],
    cohorts: Sequence[Cohort],
    layers: int,
    hidden: Sequence[Hidden],
    *,
    speculative: bool = False,
) -> list[Hidden]:
    """Every cohort through all layers: hidden before the first layer, hidden after the last.

    What a stage raises ends the run; fetches that are under way then are left to their owner.
    """
    runs = [
        _Run(stages, cohort, layers, state, speculative=speculative)
        for cohort, state in zip(cohorts, hidden, strict=True)
    ]
    going = [run for run in runs if not run.done]
    while going:
        moved = False
        for run in going:
            for fetch in run.under_way:
                moved |= stages.advance(fetch)
            while not run.done and all(stages.landed(fetch) for fetch in run.waits_for):
                run.go_on()
                moved = True
        going = [run for run in going if not run.done]
        if going and not moved:
            stages.wait([fetch for run in going for fetch in run.under_way])
    return [run.hidden for run in runs]
