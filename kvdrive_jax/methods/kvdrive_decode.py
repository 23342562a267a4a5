"""The stages of tiered decode, as a schedule runs them, for one batch of method ``kvdrive``.

Everything here runs on the engine's thread, which dispatches and moves on: the device runs what it
was given in order, workers gather. It waits in one place, `wait`. What the device did when is seen
by watching outputs become ready, in the order of dispatch.
"""

from __future__ import annotations

import concurrent.futures as futures
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvdrive_jax.compat import is_ready, start_copy
from kvdrive_jax.methods.base import Tools
from kvdrive_jax.methods.kvdrive_state import BatchState
from kvdrive_jax.methods.kvdrive_tiers import BatchTiers
from kvdrive_jax.pipeline.fetcher import Gathered
from kvdrive_jax.pipeline.miss_lists import Bell, MissLists, miss_lists
from kvdrive_jax.pipeline.parts import Cohort, MicroBatch
from kvdrive_jax.pipeline.scheduler import run_layers
from kvdrive_jax.pipeline.stages import (
    Attended,
    Near,
    Ranked,
    Selected,
    StageSpec,
    Step,
    append_rows,
    compute_stage,
    select_stage,
)

POLL_S = 1e-4
"""How often to ask whether a copy has arrived while workers may ring as well."""

Hiddens = tuple[jax.Array, ...]


@dataclass(eq=False)
class Fetch:
    """What is under way for one micro-batch of one layer, from select on.

    here: the miss list has reached the host; arrives: its pages, on a worker; landed: dispatched
    into their slots.
    """

    layer: int
    part: MicroBatch
    selected: Selected
    here: bool = False
    arrives: futures.Future[Gathered | None] | None = None
    landed: bool = False


@dataclass(frozen=True)
class _Watched:
    name: str
    layer: int
    part: int
    cohort: int
    output: jax.Array
    dispatched: float


@partial(jax.jit, static_argnames="cuts")
def split_rows(hidden: jax.Array, cuts: tuple[tuple[int, int], ...]) -> Hiddens:
    """Rows [B, ...] as those of each cut."""
    return tuple(hidden[low:high] for low, high in cuts)


@jax.jit
def join_rows(parts: Hiddens) -> jax.Array:
    """Rows of all parts, [B, ...]."""
    return jnp.concatenate(parts)


class TieredStages:
    """Select, fetch and compute of a batch whose windows do not hold everything."""

    def __init__(
        self, tools: Tools, spec: StageSpec, state: BatchState, tiers: BatchTiers, bell: Bell
    ) -> None:
        self._tools, self._spec, self._state, self._tiers = tools, spec, state, tiers
        self._bell = bell
        self._lists: MissLists = miss_lists(tools.config.pipeline.miss_list, bell)
        self._steps: dict[tuple[int, int], Step] = {}
        self._tokens: list[list[tuple[jax.Array, jax.Array]]] = []
        self._ranked: list[dict[int, Ranked | None]] = []
        self._watched: deque[_Watched] = deque()
        self._device_end = 0.0
        self._taken = np.zeros(0, np.int64)
        self._waiting: float | None = None
        self._inline = False
        self.arrange()

    def arrange(self) -> None:
        """The state was cut anew."""
        parts = [part for cohort in self._state.cohorts for part in cohort.micro_batches]
        # With a single micro-batch there is nothing that a worker's fetch could run beside.
        self._inline = len(parts) == 1 and not self._spec.speculative

    def step(
        self,
        hidden: jax.Array,
        steps: dict[tuple[int, int], Step],
        taken: np.ndarray[Any, Any],
        active: np.ndarray[Any, Any],
    ) -> tuple[jax.Array, list[Ranked | None]]:
        """One token through all layers: hidden [B, E], and what was ranked in each layer.

        taken: [B] chunks that each session selects per kv head; active: [B] bool: a cohort whose
        sessions have all ended is left out.
        """
        layers, cohorts = self._tools.model.config.num_layers, self._state.cohorts
        self._taken = taken * self._tools.model.config.num_kv_heads
        self._steps = steps
        self._tokens = [[] for _ in cohorts]
        self._ranked = [{} for _ in range(layers)]
        self._tiers.begin_step()
        parts = [part for cohort in cohorts for part in cohort.micro_batches]
        cuts = tuple((part.first, part.last) for part in parts)
        rows = (hidden,) if len(cuts) == 1 else split_rows(hidden, cuts)
        states = [tuple(rows[part.number] for part in cohort.micro_batches) for cohort in cohorts]
        # Who records is told of every row.
        going = [cohort for cohort in cohorts if self._spec.ranked or active[cohort.rows].any()]
        after = run_layers(
            self,
            going,
            layers,
            [states[cohort.number] for cohort in going],
            speculative=self._spec.speculative,
        )
        for cohort, state in zip(going, after, strict=True):
            states[cohort.number] = state
            self._append(cohort, self._tokens[cohort.number])
        ended = tuple(part for state in states for part in state)
        hidden = ended[0] if len(ended) == 1 else join_rows(ended)
        return hidden, [_all_rows(ranked) for ranked in self._ranked]

    def _append(self, cohort: Cohort, tokens: list[tuple[jax.Array, jax.Array]]) -> None:
        """The new tokens' keys and values into the near buffers of all layers."""
        near = self._state.near[cohort.number]
        buffers = append_rows(
            [array for pair in near for array in pair],
            [array for pair in tokens for array in pair],
            self._steps[cohort.first, cohort.last].near_row,
        )
        self._state.near[cohort.number] = [
            Near(*buffers[i : i + 2]) for i in range(0, len(buffers), 2)
        ]

    # The stages

    def select(self, layer: int, part: MicroBatch, hidden: Hiddens) -> Fetch:
        begun = self._working()
        directories = self._state.directory[part.number]
        first = self._state.cohorts[part.cohort].micro_batches[0].number
        selected, directories[layer] = select_stage(
            self._spec,
            self._tools.model.layers[layer],
            hidden[part.number - first],
            self._steps[part.first, part.last],
            self._state.index[part.number][layer],
            directories[layer],
            self._lists.ticket(part.number, layer),
        )
        if self._spec.ranked:
            self._ranked[layer][part.number] = selected.ranked
        fetch = Fetch(layer, part, selected)
        if self._tiers.direct:
            # The list stays on the device.
            window = self._state.windows[part.cohort]
            self._state.windows[part.cohort] = self._tiers.fetch_directly(
                layer, selected.missing, window
            )
            fetch.here = fetch.landed = True
        else:
            self._lists.start(selected.missing)
            if selected.likely is not None:
                start_copy(selected.likely)
        self._dispatched("select", layer, part.number, part.cohort, selected.slots, begun)
        return fetch

    def advance(self, fetch: Fetch) -> bool:
        self.observe()
        if fetch.landed:
            return False
        moved = False
        window = self._state.windows[fetch.part.cohort]
        if not fetch.here:
            selected = fetch.selected
            missing = self._lists.arrived(
                fetch.part.number, fetch.layer, selected.missing, selected.slots
            )
            if missing is None:
                return False
            moved = fetch.here = True
            self._note_list(fetch, missing)
            if self._inline:
                gathered = self._tiers.gather(fetch.layer, fetch.part, missing, window.shape)
                self._land(fetch, gathered)
                return True
            if not (missing[0] >= 0).any():
                self._land(fetch, None)
                return True
            fetch.arrives = self._tiers.submit_gather(
                fetch.layer, fetch.part, missing, window.shape
            )
        if fetch.arrives is not None and fetch.arrives.done():
            self._land(fetch, fetch.arrives.result())
            return True
        return moved

    def _land(self, fetch: Fetch, gathered: Gathered | None) -> None:
        at = fetch.part.cohort
        if gathered is not None:
            begun = self._working()
            self._state.windows[at] = self._tiers.write(
                fetch.layer, fetch.part, gathered, self._state.windows[at]
            )
            self._tools.timeline.span(
                "engine", "dispatch write", begun, time.perf_counter(), fetch.layer,
                fetch.part.number, at,
            )  # fmt: skip
        fetch.landed = True
        if fetch.selected.likely is not None:
            self._tiers.rank(fetch.layer, fetch.part, np.asarray(fetch.selected.likely))

    def landed(self, fetch: Fetch) -> bool:
        return fetch.landed

    def compute(
        self, layer: int, cohort: Cohort, hidden: Hiddens, fetches: Sequence[Fetch]
    ) -> Hiddens:
        begun = self._working()
        hidden, token = compute_stage(
            self._spec,
            self._tools.model.layers[layer],
            hidden,
            tuple(
                Attended(fetch.selected.token, fetch.selected.slots, fetch.selected.rest)
                for fetch in fetches
            ),
            self._steps[cohort.first, cohort.last],
            self._state.near[cohort.number][layer],
            self._state.windows[cohort.number],
        )
        single = fetches[0].selected.token
        self._tokens[cohort.number].append(token or (single.k, single.v))
        self._dispatched("compute", layer, -1, cohort.number, hidden[0], begun)
        return hidden

    def wait(self, fetches: Sequence[Fetch]) -> None:
        if self._waiting is None:
            self._waiting = time.perf_counter()
        gathering = any(fetch.arrives is not None and not fetch.landed for fetch in fetches)
        if self._watched and not gathering:
            self._watched[0].output.block_until_ready()
        else:
            self._bell.wait(POLL_S if self._watched or not gathering else None)
        self.observe()

    # What ran when

    def _working(self) -> float:
        """The engine has something to do, from now on."""
        now = time.perf_counter()
        if self._waiting is not None:
            self._tools.timeline.span("engine", "wait", self._waiting, now)
            self._waiting = None
        return now

    def _note_list(self, fetch: Fetch, missing: np.ndarray[Any, Any]) -> None:
        """A miss list has arrived: what was hit is known."""
        begun, part = self._working(), fetch.part
        misses = int(np.count_nonzero(missing[0] >= 0))
        hits = int(self._taken[part.first : part.last].sum()) - misses
        self._tools.timeline.span(
            "engine", "miss list", begun, time.perf_counter(), fetch.layer, part.number,
            part.cohort, hits=hits, misses=misses,
        )  # fmt: skip

    def _dispatched(
        self, name: str, layer: int, part: int, cohort: int, output: jax.Array, begun: float
    ) -> None:
        now = time.perf_counter()
        self._watched.append(_Watched(name, layer, part, cohort, output, now))
        self._tools.timeline.span("engine", f"dispatch {name}", begun, now, layer, part, cohort)

    def observe(self) -> None:
        """Take note of what the device has finished."""
        while self._watched and is_ready(self._watched[0].output):
            self._seen()

    def finish(self, logits: jax.Array) -> None:
        """Wait for the rest of a step, and take note of it."""
        begun = self._working()
        while self._watched:
            self._watched[0].output.block_until_ready()
            self._seen()
        after = self._device_end
        logits.block_until_ready()
        now = time.perf_counter()
        self._tools.timeline.span("device", "logits", after, now)
        self._tools.timeline.span("engine", "wait", begun, now)
        self._device_end = now

    def _seen(self) -> None:
        seen, now = self._watched.popleft(), time.perf_counter()
        start = min(max(seen.dispatched, self._device_end), now)
        self._tools.timeline.span(
            "device", seen.name, start, now, seen.layer, seen.part, seen.cohort
        )
        self._device_end = now

    def close(self) -> None:
        """Nothing more will be dispatched."""
        self._lists.close()


def _all_rows(ranked: dict[int, Ranked | None]) -> Ranked | None:
    parts = [part for _, part in sorted(ranked.items()) if part is not None]
    if len(parts) <= 1:
        return parts[0] if parts else None
    return Ranked(*(jnp.concatenate([part[i] for part in parts]) for i in range(2)))
