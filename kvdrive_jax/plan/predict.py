"""What a decode step will take on a machine that need not be here, and the best setting for it.

Predictions, from floors at what hardware is assumed to sustain (`hardware`), measured hit rates
(`hits`) and the pipeline's own rules (`simulate`). Memory is what the engine would plan (`memory`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import ml_dtypes
import numpy as np

from kvdrive_jax.budgets import Budgets
from kvdrive_jax.config import (
    KVDriveConfig,
    PipelineConfig,
    ScheduleName,
    TierConfig,
    WindowConfig,
    format_size,
)
from kvdrive_jax.pipeline.parts import Arrangement, candidates
from kvdrive_jax.plan import work
from kvdrive_jax.plan.costs import FloorCosts, Missing, step_times
from kvdrive_jax.plan.hardware import Hardware, sustained
from kvdrive_jax.plan.memory import Plan, plan_batch
from kvdrive_jax.plan.simulate import Cohort, MicroBatch, Simulation, StepTimes, simulate
from kvdrive_jax.plan.work import Case
from kvdrive_jax.telemetry import BudgetError
from kvdrive_jax.window.hits import MEASURED, HitRates, dram_hit_rate

PredictedMethod = Literal["kvdrive", "full", "layerwise"]
"""``layerwise``: the whole KV of each layer comes over PCIe in each step, while the layer before
computes, and is dropped (FlexGen)."""

FetchWay = Literal["staged", "direct"]
"""By the host, which gathers pages into staging, or by the device, from pinned memory."""

WINDOWS = (4.0, 3.0, 2.0, 1.5, 1.0)
"""Window sizes that are tried, as multiples of the budget."""
NEW_TOKENS = 128
"""Of the context, those that are generated, for what is planned."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A decode step that has not run.

    Attributes:
        method, schedule, arrangement, fetch, window: how it would run; window None where every
            chunk has a slot, so that nothing is fetched.
        hit_rate: of windows; from_ssd: share of the missing pages that DRAM lacks.
        refused: why it cannot run, in the words of the engine's plan; then there are no times.
        simulation: of the step, with stages, stalls and spans in seconds.
        nbytes: that move in a step, by tiers.
        batch: B.
    """

    method: PredictedMethod
    batch: int
    schedule: ScheduleName = "overlapped"
    arrangement: Arrangement | None = None
    fetch: FetchWay = "staged"
    window: float | None = None
    hit_rate: float = 1.0
    from_ssd: float = 0.0
    refused: str | None = None
    simulation: Simulation | None = None
    nbytes: dict[str, float] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """Seconds of one step; infinite where it cannot run."""
        return math.inf if self.simulation is None else self.simulation.wall

    @property
    def tokens_per_s(self) -> float:
        """Of all sessions together; 0 where it cannot run."""
        return self.batch / self.step_s


def default_budgets(hardware: Hardware, *, ssd: int = 0) -> Budgets:
    """As the engine would find them out: 9/10 of device memory, 4/5 of host memory; of a CPU, whose
    memory is both, a half and 2/5."""
    if hardware.name.startswith("CPU"):
        return Budgets(hbm=hardware.memory // 2, dram=hardware.dram * 2 // 5, ssd=ssd)
    return Budgets(hbm=hardware.memory * 9 // 10, dram=hardware.dram * 4 // 5, ssd=ssd)


def predict(
    case: Case,
    hardware: Hardware,
    *,
    budgets: Budgets | None = None,
    arrangement: Arrangement | None = None,
    schedule: ScheduleName = "overlapped",
    fetch: FetchWay = "staged",
    method: PredictedMethod = "kvdrive",
    hits: HitRates | None = MEASURED,
) -> Prediction:
    """One step of ``case`` on ``hardware``, whose figures are taken as what it sustains.

    budgets: of the three tiers (default: ``default_budgets`` without SSD); arrangement: default one
    micro-batch; hits: hit rates by window, None: the case's own hit rate.

    Raises ValueError for an unknown method or way to fetch, schedule ``sequential`` with
    micro-batches, or fetch ``direct`` with micro-batches or with pages on SSD.
    """
    if fetch not in get_args(FetchWay):
        raise ValueError(f"fetch must be one of {', '.join(get_args(FetchWay))}, got {fetch!r}")
    if method not in get_args(PredictedMethod):
        expected = ", ".join(get_args(PredictedMethod))
        raise ValueError(f"method must be one of {expected}, got {method!r}")
    budgets = budgets or default_budgets(hardware)
    if method == "full":
        return _full(case, hardware, budgets)
    if method == "layerwise":
        return _layerwise(case, hardware, budgets)
    arrangement = arrangement or Arrangement(case.batch)
    plan = plan_case(case, budgets, schedule=schedule)
    made = Prediction(
        method=method, batch=case.batch, schedule=schedule, arrangement=arrangement, fetch=fetch,
        window=None if plan.resident else plan.window,
    )  # fmt: skip
    refused = _refusal(plan)
    if refused is not None:
        return replace(made, refused=refused)
    if plan.resident:
        return replace(made, simulation=_resident(case, hardware))
    share = sum(one.rows for one in plan.sessions) / sum(
        one.chunk_capacity for one in plan.sessions
    )
    from_ssd = 1 - dram_hit_rate(min(1.0, share))
    if fetch == "direct" and (from_ssd or arrangement != Arrangement(case.batch)):
        raise ValueError(
            "fetch must be staged where pages are on SSD, and with micro-batches, got direct"
        )
    if hits is not None:
        selected = case.selected * case.chunk_size
        case = replace(case, hit_rate=hits.rate(min(1.0, selected / case.context), case.window))
    extent = max(case.page_bytes, TierConfig().extent_bytes)
    missing = Missing.of(case, from_ssd=from_ssd, read_bytes=extent)
    costs = FloorCosts(case=case, hardware=hardware, speculative=schedule == "speculative")
    times = step_times(costs, hardware, missing, case.batch, arrangement, direct=fetch == "direct")
    pages = case.batch * sum(missing.pages)
    return replace(
        made,
        hit_rate=case.hit_rate,
        from_ssd=from_ssd,
        simulation=simulate(times, schedule),
        nbytes={
            "DRAM->HBM": pages * case.page_bytes,
            "SSD->DRAM": pages * from_ssd * extent,
        },
    )


def best(
    case: Case,
    hardware: Hardware,
    *,
    budgets: Budgets | None = None,
    schedule: ScheduleName = "overlapped",
    windows: Sequence[float] | None = None,
    arrangements: Iterable[Arrangement] | None = None,
    hits: HitRates | None = MEASURED,
) -> Prediction:
    """The fastest setting over ways to fetch, micro-batches, cohorts and windows that fit.

    windows: multiples of the budget (None: a slot for every chunk, and `WINDOWS`); arrangements:
    None for those worth trying. Where nothing fits, the refusal of the smallest window.
    """
    budgets = budgets or default_budgets(hardware)
    if windows is None:
        everything = case.chunks / case.selected
        windows = (2 * everything, *(window for window in WINDOWS if window < everything))
    whole = Arrangement(case.batch)
    cuts: list[tuple[FetchWay, Arrangement]] = [
        ("staged", one) for one in arrangements or candidates(case.batch)
    ]
    found: Prediction | None = None
    for window in sorted(windows, reverse=True):
        of_window = replace(case, window=window)
        ways = list(cuts)
        while ways:
            fetch, arrangement = ways.pop(0)
            one = predict(
                of_window,
                hardware,
                budgets=budgets,
                arrangement=arrangement,
                schedule=schedule,
                fetch=fetch,
                hits=hits,
            )
            if found is None or found.refused is not None or one.step_s < found.step_s:
                found = one
            if one.refused is not None or one.window is None:
                break  # however it is cut
            if fetch == "staged" and arrangement == whole and not one.from_ssd:
                ways.append(("direct", whole))
    if found is None:
        raise ValueError(f"windows must be at least one, got {windows}")
    return found


def compare(
    case: Case, peak: Hardware, *, budgets: Budgets | None = None, hits: HitRates | None = MEASURED
) -> dict[PredictedMethod, Prediction]:
    """The best of ``kvdrive``, and the others, at what ``peak`` is assumed to sustain."""
    hardware = sustained(peak)
    return {
        "kvdrive": best(case, hardware, budgets=budgets, hits=hits),
        "full": predict(case, hardware, budgets=budgets, method="full"),
        "layerwise": predict(case, hardware, budgets=budgets, method="layerwise"),
    }


def plan_case(
    case: Case, budgets: Budgets, *, schedule: ScheduleName = "overlapped", method: str = "kvdrive"
) -> Plan:
    """Where every byte of a case goes, as the engine plans it.

    Positions beyond the model's own are allowed: extending RoPE costs nothing.
    """
    new_tokens = min(NEW_TOKENS, case.context // 2)
    model = replace(case.model, max_positions=max(case.model.max_positions, 2 * case.context))
    config = KVDriveConfig(
        method="full" if method == "full" else "kvdrive",
        batch_size=case.batch,
        retrieval=case.retrieval,
        window=WindowConfig(multiple=_allowed(case.window)),
        # A name only: with budgets given, no directory is looked at.
        tiers=TierConfig(ssd_dir="ssd" if budgets.ssd else None, prefetch=1.0),
        pipeline=PipelineConfig(schedule=schedule),
    )
    return plan_batch(
        model,
        np.dtype(ml_dtypes.bfloat16 if case.itemsize == 2 else np.float32),
        work.parameter_count(model),
        config,
        [case.context - new_tokens] * case.batch,
        new_tokens,
        budgets=budgets,
    )


def _allowed(window: float) -> float:
    return window if window == 0 else max(1.0, window)


def _refusal(plan: Plan) -> str | None:
    try:
        plan.require()
    except BudgetError as error:
        return str(error)
    return None


def _at_once(
    case: Case, hardware: Hardware, select: float, compute: float, last: float
) -> Simulation:
    """One compiled step for all layers."""
    layer = (Cohort(micro_batches=(MicroBatch(select=select),), compute=compute),)
    layers = (layer,) * case.model.num_layers
    return simulate(StepTimes(layers=layers, first=hardware.dispatch, last=last))


def _resident(case: Case, hardware: Hardware) -> Simulation:
    """Every chunk has a slot."""
    costs = FloorCosts(case=replace(case, hit_rate=1.0, window=0.0), hardware=hardware)
    batch = case.batch
    return _at_once(case, hardware, costs.select(batch), costs.compute(batch), costs.ends(batch)[1])


def _dense(case: Case, hardware: Hardware) -> tuple[float, float, float]:
    """Projection, attention to everything with the feed-forward part, and logits."""
    works = (work.projection, work.full_attention, work.feed_forward, work.logits)
    project, attend, rest, last = (one(case).seconds(hardware) for one in works)
    return project, attend + rest, last


def _full(case: Case, hardware: Hardware, budgets: Budgets) -> Prediction:
    """Everything in HBM, attended to."""
    made = Prediction(method="full", batch=case.batch)
    refused = _refusal(plan_case(case, budgets, method="full"))
    if refused is not None:
        return replace(made, refused=refused)
    return replace(made, simulation=_at_once(case, hardware, *_dense(case, hardware)))


def _layerwise(case: Case, hardware: Hardware, budgets: Budgets) -> Prediction:
    """The KV of layer l + 1 is loaded while layer l computes; two layers' KV are in HBM."""
    made = Prediction(method="layerwise", batch=case.batch, hit_rate=0.0)
    layer_bytes = case.batch * case.context * case.page_bytes / case.chunk_size
    layer_bytes *= case.model.num_kv_heads
    dense = plan_case(case, budgets, method="full")
    hbm = dense.used("hbm") - dense.bytes_of("hbm", "kv cache") + 2 * layer_bytes
    whole = layer_bytes * case.model.num_layers
    for tier, needed, budget in (
        ("HBM", hbm, budgets.hbm),
        ("DRAM and SSD", whole, budgets.dram + budgets.ssd),
    ):
        if needed > budget:
            reason = f"needs {format_size(int(needed))} of {tier}, has {format_size(budget)}"
            return replace(made, refused=reason)
    from_ssd = max(0.0, 1 - budgets.dram / whole)
    # What comes from SSD comes in large reads, while the rest crosses PCIe.
    transfer = max(layer_bytes / hardware.pcie, layer_bytes * from_ssd / hardware.ssd)
    project, compute, last = _dense(case, hardware)
    part = MicroBatch(select=project, transfer=transfer)
    layer = (Cohort(micro_batches=(part,), compute=compute),)
    times = StepTimes(
        layers=(layer,) * case.model.num_layers, last=last, dispatch=hardware.dispatch
    )
    return replace(
        made,
        from_ssd=from_ssd,
        simulation=simulate(times, "speculative"),
        nbytes={"DRAM->HBM": whole, "SSD->DRAM": whole * from_ssd},
    )
