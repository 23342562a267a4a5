"""Calibration of a run (paper 6.2): what is measured when, kept under which key, and told.

The largest window that pays is measured when a batch is planned, the arrangement on its first
decode steps. Very short runs take what is known, or the defaults: they are over before a search
would be.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np

from kvdrive_jax import compat
from kvdrive_jax.budgets import Budgets
from kvdrive_jax.config import KVDriveConfig
from kvdrive_jax.models.config import ModelConfig
from kvdrive_jax.pipeline.calibrate import (
    CALIBRATION_S,
    Search,
    WindowChoice,
    WindowCosts,
    best_window,
    cluster_count,
)
from kvdrive_jax.pipeline.calibrate_measure import WindowCase, measure_windows
from kvdrive_jax.pipeline.calibrate_store import (
    ArrangementResult,
    CalibrationKey,
    CalibrationStore,
    Timed,
)
from kvdrive_jax.pipeline.parts import Arrangement, cut
from kvdrive_jax.telemetry import BudgetError, Ledger
from kvdrive_jax.tiers.link import Link, Links
from kvdrive_jax.tiers.pages import PageGeometry
from kvdrive_jax.window.hits import MEASURED, HitRates
from kvdrive_jax.window.profile import Profile
from kvdrive_jax.window.sizing import MostMultiple, WindowShape

if TYPE_CHECKING:
    from kvdrive_jax.methods.base import BatchMethod
    from kvdrive_jax.plan import Plan

FEWEST_STEPS: Final = 16
"""With fewer new tokens nothing is measured."""
MEASURING_S: Final = 3.0
"""Once measuring windows has taken so long, other shapes of the same engine go by the defaults."""
ACCOUNT: Final = "calibration"


@functools.cache
def machine() -> str:
    """Processor, its CPUs, device and JAX, as far as they say how fast something runs."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    cpus = os.cpu_count() if sys.platform != "linux" else len(os.sched_getaffinity(0))
    return f"{name} x{cpus}, {compat.device_name()}, jax {jax.__version__}"


def check_calibrate(config: KVDriveConfig) -> None:
    """ValueError, before anything is loaded, for a file of ``--calibrate`` that cannot be used."""
    _open(config)


def _open(config: KVDriveConfig) -> CalibrationStore | None:
    where = config.pipeline.calibrate
    return CalibrationStore(where) if config.method == "kvdrive" and where != "off" else None


class Calibrator:
    """Calibration of one model and configuration.

    links: imitated ways between the tiers, which are part of what is measured; quiet: tell nothing.
    Raises ValueError for a file of ``--calibrate`` that cannot be used.
    """

    def __init__(
        self,
        config: KVDriveConfig,
        model: ModelConfig,
        dtype: np.dtype[Any],
        digest: str,
        budgets: Budgets,
        *,
        links: Links | None = None,
        quiet: bool = True,
    ) -> None:
        self._config, self._model, self._dtype = config, model, np.dtype(dtype)
        self._digest, self._budgets, self._quiet = digest, budgets, quiet
        self._links = links or Links()
        self._store = _open(config)
        self.spent_s = 0.0
        """Seconds that measuring windows took."""

    # Windows

    def most_window(
        self, batch: int, max_new_tokens: int, ledger: Ledger | None = None
    ) -> MostMultiple | None:
        """For ``choose_layout``: the multiple of the budget beyond which windows do not pay, or
        None where it is not known.

        ledger: accounts for the memory that measuring takes; what it refuses is not measured.
        """
        if self._store is None:
            return None

        def most(shape: WindowShape, largest: float, profile: Profile | None) -> float | None:
            choice = self._window(batch, max_new_tokens, ledger, shape, largest, profile)
            return None if choice is None else choice.multiple

        return most

    def _window(
        self,
        batch: int,
        max_new_tokens: int,
        ledger: Ledger | None,
        shape: WindowShape,
        largest: float,
        profile: Profile | None,
    ) -> WindowChoice | None:
        case = self._case(batch, shape)
        stored = case.geometry.dram_page_bytes * batch * shape.layers * shape.kv_heads
        if stored * shape.chunk_capacity > self._budgets.dram:
            return None  # what misses then may come from SSD: no look-up costs as much
        assert self._store is not None
        key = self._key(batch, shape.chunk_capacity, shape.selected, "auto")
        costs = self._store.get(key)
        if costs is None and max_new_tokens >= FEWEST_STEPS and self.spent_s < MEASURING_S:
            costs = self._measure(case, largest, ledger)
            if costs is not None:
                self._store.put(key, costs)
        if not isinstance(costs, WindowCosts):
            return None
        hits = MEASURED if profile is None else HitRates.of_profile(profile)
        return best_window(costs, hits, shape.selected / shape.chunk_capacity, case.pages, largest)

    def _measure(
        self, case: WindowCase, largest: float, ledger: Ledger | None
    ) -> WindowCosts | None:
        link = self._links.dram_to_hbm
        # A link of its own: what it carries here is not in the way of anything else.
        link = None if link is None else Link(link.bytes_per_s, link.latency_s)
        held: list[Any] = []
        start = time.perf_counter()
        try:
            if ledger is not None:
                for tier, nbytes in (("hbm", case.hbm_bytes(largest)), ("dram", case.dram_bytes)):
                    ledger.reserve(tier, ACCOUNT, nbytes)  # type: ignore[arg-type]
                    held.append(tier)
            return measure_windows(case, largest, link)
        except BudgetError:
            return None
        finally:
            self.spent_s += time.perf_counter() - start
            for tier in held:
                assert ledger is not None
                ledger.release(tier, ACCOUNT)

    def _case(self, batch: int, shape: WindowShape) -> WindowCase:
        tiers, retrieval = self._config.tiers, self._config.retrieval
        return WindowCase(
            batch=batch,
            chunk_capacity=shape.chunk_capacity,
            selected=shape.selected,
            eviction=self._config.window.eviction,
            geometry=PageGeometry(
                layers=shape.layers,
                kv_heads=shape.kv_heads,
                chunk_size=retrieval.chunk_size,
                head_dim=self._model.head_dim,
                dtype=self._dtype,
                dram=tiers.dram_dtype,
                ssd=tiers.ssd_precision,
            ),
        )

    # Arrangement

    def begin(self, method: BatchMethod, plan: Plan) -> BatchCalibration:
        """Calibration beside the decode steps of a batch that is prefilled."""
        return BatchCalibration(self, method, plan)

    def known(self, plan: Plan) -> ArrangementResult | None:
        """What an earlier search found for such a batch."""
        found = None if self._store is None else self._store.get(self._plan_key(plan))
        return found if isinstance(found, ArrangementResult) else None

    def keep(self, plan: Plan, result: ArrangementResult) -> None:
        """What a search found."""
        if self._store is not None:
            self._store.put(self._plan_key(plan), result)

    @property
    def off(self) -> bool:
        """Whether nothing is to be calibrated."""
        return self._store is None

    def tell(self, line: str) -> None:
        """A line for the user, on stderr."""
        if not self._quiet:
            print(line, file=sys.stderr, flush=True)

    def clusters_line(self, plan: Plan) -> str:
        """How many clusters a context gets, where there are any."""
        retrieval = self._config.retrieval
        if retrieval.estimate != "clusters" and not retrieval.index.startswith("clusters"):
            return ""
        each = retrieval.tokens_per_cluster
        count = cluster_count(max(plan.shape.prompt_tokens), each)
        return f"{count:,} clusters of {each} tokens"

    # Keys

    def _plan_key(self, plan: Plan) -> CalibrationKey:
        window = f"x{_about(plan.window):.3g}"
        shape = plan.shape
        return self._key(shape.batch, shape.chunk_capacity, shape.selected, window)

    def _key(self, batch: int, chunk_capacity: int, selected: int, window: str) -> CalibrationKey:
        config, tiers, pipeline = self._config, self._config.tiers, self._config.pipeline
        retrieval = config.retrieval
        cached = tiers.ssd_dir is not None
        return CalibrationKey(
            machine=machine(),
            model=self._digest,
            dtype=self._dtype.name,
            batch=batch,
            chunk_capacity=chunk_capacity,
            selected=selected,
            retrieval=f"{retrieval.index}, estimate {retrieval.estimate}, {retrieval.group_rule}, "
            f"{retrieval.tokens_per_cluster} tokens a cluster, one span in "
            f"{retrieval.scan_one_in}, chunks of {retrieval.chunk_size}",
            window=f"{window}, {config.window.eviction}, attends {config.window.attend}",
            pages=f"{tiers.fetch}, {tiers.dram_dtype}, {tiers.ssd_precision}, {tiers.sync}, "
            + (f"about {_about(self._budgets.dram):.3g} bytes of DRAM" if cached else "no SSD"),
            links=f"{_link(self._links.dram_to_hbm)}, {_link(self._links.ssd_to_dram)}",
            schedule=f"{pipeline.schedule}, {pipeline.miss_list}, micro-batch "
            f"{pipeline.micro_batch}, cohorts {pipeline.cohorts}",
        )


class BatchCalibration:
    """The search for one batch's arrangement, beside its decode steps.

    Call ``before_step`` before each, and ``after_step`` when its tokens are on the host.
    """

    def __init__(self, calibrator: Calibrator, method: BatchMethod, plan: Plan) -> None:
        self._calibrator, self._method, self._plan = calibrator, method, plan
        self._search: Search | None = None
        self._started = self._change_s = 0.0
        self._running: Arrangement | None = None
        self._active = -1
        candidates = alike(plan.shape.batch, method.arrangement, method.arrangements())
        if calibrator.off or len(candidates) < 2:
            return
        known = calibrator.known(plan)
        if known is not None and known.chosen.arrangement in candidates:
            self._method.arrange(known.chosen.arrangement)
            calibrator.tell(self._line(known, "as calibrated before"))
        elif plan.shape.max_new_tokens >= FEWEST_STEPS:
            self._search = Search(
                candidates=tuple(candidates),
                start=method.arrangement,
                limit_s=max(1.0, CALIBRATION_S - calibrator.spent_s),
                # The last steps are not worth a search that ends with them.
                most_steps=plan.shape.max_new_tokens * 3 // 4,
            )

    @property
    def under_way(self) -> bool:
        """Whether arrangements are still tried."""
        return self._search is not None

    def before_step(self) -> None:
        """Arrange the batch for the next step."""
        if self._search is None:
            return
        wanted = self._search.next()
        if wanted is None:
            self._end(self._search, keep=True)
            return
        start = time.perf_counter()
        if wanted != self._method.arrangement:
            self._method.arrange(wanted)
            timeline = self._method.tools.timeline
            timeline.span("engine", "calibrate", start, time.perf_counter())
        self._started = time.perf_counter()
        self._change_s = self._started - start
        self._running = wanted

    def after_step(self, active: int) -> None:
        """The step, of so many sessions, is over. The search ends when one has left: steps are then
        no longer alike."""
        seconds = time.perf_counter() - self._started
        used, self._running = self._running, None
        if self._search is None or used is None:
            return
        if self._active not in (-1, active):
            self._end(self._search, keep=False)
            return
        self._active = active
        self._search = self._search.note(used, seconds, self._change_s)

    def _end(self, search: Search, *, keep: bool) -> None:
        self._search = None
        best = search.best
        if best != self._method.arrangement:
            self._method.arrange(best)
        if not search.tried:
            return
        result = ArrangementResult(
            chosen=_timed(search, best),
            others=tuple(_timed(search, used) for used in search.tried if used != best),
        )
        spent = search.spent_s + self._calibrator.spent_s
        how = f"calibrated in {spent:.1f} s"
        if not result.others:
            how = f"nothing else could be tried in {spent:.1f} s, another run will go on"
        elif keep:
            self._calibrator.keep(self._plan, result)
        self._calibrator.tell(self._line(result, how))

    def _line(self, result: ArrangementResult, how: str) -> str:
        parts = [f"{result.chosen.arrangement}: {1e3 * result.chosen.step_s:.1f} ms a step"]
        if result.others:
            others = sorted(result.others, key=lambda other: other.step_s)
            tried = ", ".join(
                f"{other.micro_batch} x {other.cohorts} {1e3 * other.step_s:.1f}"
                for other in others
            )
            parts.append(f"others {tried}")
        clusters = self._calibrator.clusters_line(self._plan)
        window = self._plan.window_line()
        return f"{how}: " + "; ".join([*parts, window, *([clusters] if clusters else [])])


def alike(batch: int, now: Arrangement, every: Sequence[Arrangement]) -> list[Arrangement]:
    """Those of ``every`` in which the same sessions as now are alone in their micro-batch, and in
    their cohort: a matrix product with one row rounds differently than one with several."""

    def alone(one: Arrangement) -> list[tuple[bool, bool]]:
        return [
            (part.last - part.first == 1, cohort.size == 1)
            for cohort in cut(batch, one)
            for part in cohort.micro_batches
            for _ in range(part.first, part.last)
        ]

    return [one for one in every if alone(one) == alone(now)]


def _timed(search: Search, used: Arrangement) -> Timed:
    return Timed(micro_batch=used.micro_batch, cohorts=used.cohorts, step_s=search.value(used))


def _about(value: float) -> float:
    """One for all values within a fifth or so: what is found out from free memory differs from run
    to run, and what is calibrated hardly depends on it."""
    return 2 ** (round(2 * math.log2(value)) / 2) if value > 0 else 0.0


def _link(link: Link | None) -> str:
    return "as it is" if link is None else f"{link.bytes_per_s:g} B/s + {link.latency_s:g} s"
