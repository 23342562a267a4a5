"""Where every byte will go, in each tier, before anything is loaded or started.

The plan is what the engine then does: it takes its capacities, window and shares from here, and
the ledger refuses whatever the plan did not foresee.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvdrive_jax.budgets import Budgets, resolve_budgets
from kvdrive_jax.calibration import Calibrator
from kvdrive_jax.checks import check_config, check_length, cluster_form, index_form
from kvdrive_jax.config import KVDriveConfig, TierConfig, format_size
from kvdrive_jax.index.rest import Retrieval
from kvdrive_jax.models.config import ModelConfig
from kvdrive_jax.models.packing import held
from kvdrive_jax.models.weights import describe_pretrained
from kvdrive_jax.pipeline.fetcher import staging_buffers
from kvdrive_jax.pipeline.prefill import prefill_bytes
from kvdrive_jax.shapes import BatchShape, Stored, batch_shape
from kvdrive_jax.telemetry import TIERS, BudgetError, Tier
from kvdrive_jax.tiers.pages import PageGeometry
from kvdrive_jax.tiers.placement import (
    SessionPlan,
    SessionSize,
    plan_session,
    plan_sessions,
    staging_needs,
)
from kvdrive_jax.window.eviction import smooths
from kvdrive_jax.window.history import history_bytes
from kvdrive_jax.window.layout import WindowLayout
from kvdrive_jax.window.profile import ProfileKey
from kvdrive_jax.window.sizing import MostMultiple, WindowShape, choose_layout

WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class Line:
    """One account of a tier, in bytes."""

    tier: Tier
    name: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Capacities and bytes of one batch.

    window: the mean multiple of the budget; window_slots: S, the most slots of a (session, layer,
    kv head); layout: the sizes of all windows, None where every chunk has a slot, so that nothing
    is fetched (resident); how: where the sizes come from; sessions: what each session takes in
    DRAM and on SSD (empty for resident and full); likely: M, chunks per step and kv head that are
    considered likely to be selected next (0: none, as DRAM holds everything).
    """

    shape: BatchShape
    budgets: Budgets
    lines: tuple[Line, ...]
    method: str
    window: float
    window_slots: int
    layout: WindowLayout | None
    how: str
    resident: bool
    sessions: tuple[SessionPlan, ...]
    likely: int
    cluster_capacity: int
    retrieval: Retrieval | None

    def used(self, tier: Tier) -> int:
        """Bytes planned in a tier."""
        return sum(line.nbytes for line in self.lines if line.tier == tier)

    def bytes_of(self, tier: Tier, name: str) -> int:
        """Bytes of one account."""
        return sum(line.nbytes for line in self.lines if (line.tier, line.name) == (tier, name))

    @property
    def fits(self) -> bool:
        """Whether every tier stays inside its budget."""
        return all(self.used(tier) <= self.budgets.of(tier) for tier in TIERS)

    def require(self) -> None:
        """Raise BudgetError, with the arithmetic, for the first tier that does not fit."""
        for tier in TIERS:
            used, budget = self.used(tier), self.budgets.of(tier)
            if used > budget:
                parts = ", ".join(
                    f"{line.name} {format_size(line.nbytes)}"
                    for line in self.lines
                    if line.tier == tier and line.nbytes
                )
                raise BudgetError(
                    f"the plan needs {used:,} bytes of {tier.upper()} ({parts}), the budget is "
                    f"{budget:,}: {self._advice(tier)}"
                )

    def _advice(self, tier: Tier) -> str:
        if tier == "hbm":
            if self.method == "full":
                return "raise --hbm-budget, shorten the prompt, or use --method kvdrive"
            return "raise --hbm-budget, or lower --window, --budget, --batch-size or the context"
        if tier == "dram":
            if self.budgets.ssd:
                return "raise --dram-budget, or lower --budget, --batch-size or the context"
            return "raise --dram-budget, or give --ssd-dir"
        return "raise --ssd-budget, or give an --ssd-dir with more space"

    def window_line(self) -> str:
        """The windows for people: how large, and where their sizes come from."""
        if self.layout is None:
            return f"a slot for every chunk ({self.how})"
        low = min(min(row) for row in self.layout.slots)
        high = self.layout.largest
        slots = f"{high:,}" if low == high else f"{low:,} to {high:,}"
        return f"window x{self.window:.3g}, {slots} slots per (layer, kv head) ({self.how})"

    def table(self) -> str:
        """The plan for people: every account, the sums and the budgets, and whether it fits."""
        shape = self.shape
        head = [
            f"plan: {self.method}, {shape.batch} session(s) of {_spread(shape.prompt_tokens)} "
            f"prompt tokens + {shape.max_new_tokens} new",
        ]
        if self.method != "full":
            head.append(
                f"selection {shape.selected} chunks per kv head and step, {self.window_line()}"
            )
        rows = []
        for tier in TIERS:
            used, budget = self.used(tier), self.budgets.of(tier)
            verdict = "fits" if used <= budget else "DOES NOT FIT"
            rows.append(
                f"{tier.upper():5} {format_size(used):>12} of {format_size(budget):>12}  {verdict}"
            )
            rows += [
                f"      {format_size(line.nbytes):>12}  {line.name}"
                for line in self.lines
                if line.tier == tier and line.nbytes
            ]
            if used > budget:
                rows.append(f"      change: {self._advice(tier)}")
        return "\n".join(head + rows)


def _spread(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def plan_batch(
    model: ModelConfig,
    dtype: np.dtype[Any],
    parameters: int,
    config: KVDriveConfig,
    prompt_tokens: Sequence[int],
    max_new_tokens: int,
    *,
    budgets: Budgets | None = None,
    digest: str = "",
    stored: Stored | None = None,
    most_window: MostMultiple | None = None,
) -> Plan:
    """The plan for one batch of prompts.

    dtype: of weights and KV; parameters: stored parameters; digest: of the model, to find its
    profile by; stored: of its only session, where that was saved; most_window: says how large
    windows pay. Works without weights. Raises
    ValueError for a budget above the context length, and as ``check_config`` does. A plan that does
    not fit is returned, see ``Plan.require``.
    """
    context = check_config(config, model, dtype)
    shape = batch_shape(config.retrieval, prompt_tokens, max_new_tokens, context, stored)
    budgets = budgets or resolve_budgets(config.tiers)
    itemsize = dtype.itemsize
    base = [
        Line(tier="hbm", name="weights", nbytes=parameters * itemsize),
        Line(
            tier="hbm",
            name="prefill",
            nbytes=prefill_bytes(
                tokens=shape.prompt_capacity,
                width=model.hidden_size,
                kv_heads=model.num_kv_heads,
                heads=model.num_heads,
                head_dim=model.head_dim,
                itemsize=itemsize,
                ffn=model.intermediate_size,
            ),
        ),
        Line(tier="hbm", name="logits", nbytes=2 * shape.batch * model.vocab_size * 4),
    ]
    if config.method == "full":
        per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize
        cache = Line(
            tier="hbm",
            name="kv cache",
            nbytes=per_token * shape.batch * shape.cache_tokens,
        )
        return Plan(
            shape=shape,
            budgets=budgets,
            lines=(*base, cache),
            method=config.method,
            window=0.0,
            window_slots=0,
            layout=None,
            how="no window",
            resident=True,
            sessions=(),
            likely=0,
            cluster_capacity=0,
            retrieval=None,
        )
    return _plan_kvdrive(model, dtype, config, shape, budgets, base, digest, most_window)


def plan_for(
    model: str, config: KVDriveConfig, prompt_tokens: Sequence[int], max_new_tokens: int
) -> Plan:
    """``plan_batch`` for a model by name or path, without loading its weights.

    Raises ValueError as ``load_pretrained`` and ``plan_batch`` do, and for prompts that exceed the
    context length.
    """
    known = describe_pretrained(model, config.dtype, context_length=config.context_length)
    parameters, digest = held(
        known.config, known.dtype, known.parameters, known.digest, config.weights_dtype
    )
    budgets = resolve_budgets(config.tiers)
    calibrator = Calibrator(config, known.config, known.dtype, digest, budgets)
    context = check_config(config, known.config, known.dtype)
    for number, tokens in enumerate(prompt_tokens):
        check_length(number, tokens, max_new_tokens, context)
    return plan_batch(
        known.config,
        known.dtype,
        parameters,
        config,
        prompt_tokens,
        max_new_tokens,
        budgets=budgets,
        digest=digest,
        most_window=calibrator.most_window(len(prompt_tokens), max_new_tokens),
    )


def _plan_kvdrive(
    model: ModelConfig,
    dtype: np.dtype[Any],
    config: KVDriveConfig,
    shape: BatchShape,
    budgets: Budgets,
    base: list[Line],
    digest: str,
    most_window: MostMultiple | None,
) -> Plan:
    retrieval, tiers = config.retrieval, config.tiers
    retrieves = Retrieval(index_form(config, model), retrieval.estimate, cluster_form(config))
    geometry = PageGeometry(
        layers=model.num_layers,
        kv_heads=model.num_kv_heads,
        chunk_size=retrieval.chunk_size,
        head_dim=model.head_dim,
        dtype=dtype,
        dram=tiers.dram_dtype,
        ssd=tiers.ssd_precision,
    )
    pairs = shape.batch * model.num_layers * model.num_kv_heads
    clusters = retrieves.cluster_capacity(
        shape.chunk_capacity, shape.flush_events, shape.flush_chunks
    )
    index = model.num_layers * retrieves.nbytes(
        shape.batch, model.num_kv_heads, model.head_dim, shape.chunk_capacity, clusters
    )
    near = pairs * shape.near_capacity * 2 * model.head_dim * dtype.itemsize
    flush = shape.batch * model.num_kv_heads * shape.flush_chunks * geometry.page_bytes
    most = shape.batch * model.num_kv_heads * shape.selected
    moved = most * geometry.dram_page_bytes
    # As they come, and where they are kept as something else, decoded.
    decoded = moved if geometry.dram == "model" else moved + most * geometry.page_bytes
    base = [
        *base,
        Line(tier="hbm", name="index", nbytes=index),
        Line(tier="hbm", name="sink, local and recent", nbytes=near + flush),
    ]

    def lines_for(layout: WindowLayout | None) -> list[Line]:
        rows, directory = pairs * shape.chunk_capacity, 0
        if layout is not None:
            rows = shape.batch * layout.rows
            standing = shape.chunk_capacity if smooths(config.window.eviction) else 0
            maps = 4 * (shape.chunk_capacity + layout.largest)
            directory = pairs * (maps + history_bytes(layout.largest, standing))
        return [
            *base,
            Line(tier="hbm", name="windows", nbytes=rows * geometry.page_bytes),
            Line(tier="hbm", name="directory", nbytes=directory),
            Line(tier="hbm", name="fetched pages", nbytes=0 if layout is None else decoded),
        ]

    def hbm(layout: WindowLayout | None) -> int:
        return sum(line.nbytes for line in lines_for(layout))

    sizes = WindowShape(
        layers=model.num_layers,
        kv_heads=model.num_kv_heads,
        selected=shape.selected,
        chunk_capacity=shape.chunk_capacity,
    )
    key = ProfileKey(
        digest=digest,
        chunk_size=retrieval.chunk_size,
        budget=shape.selected * retrieval.chunk_size,
        index=retrieval.index,
        group_rule=retrieval.group_rule,
        eviction=config.window.eviction,
    )
    layout, how = choose_layout(config.window, sizes, key, hbm, budgets.hbm, most_window)
    if config.pipeline.schedule == "speculative" and layout is not None and not layout.keeps.all():
        got = config.window.multiple
        raise ValueError(
            "window must be above 0 everywhere with schedule speculative: two layers are fetched "
            f"together, and windows of size 0 share one place; got {how if got is None else got}"
        )
    resident = layout is None
    lines = lines_for(layout)
    sessions: list[SessionPlan] = []
    if not resident:
        ring = staging_buffers(config.pipeline.schedule) * moved
        sessions = _sessions(geometry, shape, tiers, budgets.dram - ring)
        staging = ring + sum(staging_needs(sessions, WORKERS).values())
        lines += [
            Line(tier="dram", name="staging", nbytes=staging),
            Line(tier="dram", name="pages", nbytes=sum(plan.dram_bytes for plan in sessions)),
            Line(tier="ssd", name="pages", nbytes=sum(plan.ssd_bytes for plan in sessions)),
        ]
    return Plan(
        shape=shape,
        budgets=budgets,
        lines=tuple(lines),
        method=config.method,
        window=sizes.mean_multiple(layout),
        window_slots=shape.chunk_capacity if layout is None else layout.largest,
        layout=layout,
        how=how,
        resident=resident,
        sessions=tuple(sessions),
        likely=_likely(tiers, shape, sessions),
        cluster_capacity=clusters,
        retrieval=retrieves,
    )


def _likely(tiers: TierConfig, shape: BatchShape, sessions: Sequence[SessionPlan]) -> int:
    if tiers.read_ahead == 1 or not any(session.cached for session in sessions):
        return 0
    return min(shape.chunk_capacity, math.ceil(tiers.read_ahead * shape.selected))


def _sessions(
    geometry: PageGeometry, shape: BatchShape, tiers: TierConfig, dram_bytes: int
) -> list[SessionPlan]:
    """What each session takes in DRAM and on SSD.

    Where that cannot fit, the least it would take, so that the plan can say how much is missing.
    """
    ssd = tiers.ssd_dir is not None
    try:
        return plan_sessions(
            geometry,
            tiers,
            [
                SessionSize(chunks, prompt)
                for chunks, prompt in zip(shape.row_chunks, shape.prompt_chunks, strict=True)
            ],
            dram_bytes=max(0, dram_bytes),
            ssd=ssd,
            piece_chunks=shape.flush_chunks,
            workers=WORKERS,
        )
    except BudgetError:

        def session(row: int, share: int | None) -> SessionPlan:
            return plan_session(
                geometry,
                tiers,
                chunk_capacity=shape.row_chunks[row],
                dram_bytes=share,
                ssd=ssd,
                prompt_chunks=shape.prompt_chunks[row],
                piece_chunks=shape.flush_chunks,
            )

        whole = [session(row, None) for row in range(shape.batch)]
        if not ssd:
            return whole
        # No page in DRAM, only the maps of what is on SSD.
        return [session(row, 2 * plan.map_bytes) for row, plan in enumerate(whole)]
