"""Part ``decode``: steps at Llama-3-8B shape and 128K tokens, full attention and kvdrive.

Weights are random, and so are the keys and values of the prompt, which are handed to the methods
layer by layer as prefill would: what is timed is decode, and a prefill of 128K for every
configuration would take the time of all of them. The same random prompt serves all, so that what
may never differ, the tokens of staged and direct fetch and of any window, is compared.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_check_parts.bench import Bench, Row, wall
from benchmarks.gpu_check_parts.draw import Draw
from kvdrive_jax import compat
from kvdrive_jax.budgets import Budgets, resolve_budgets
from kvdrive_jax.config import KVDriveConfig, RetrievalConfig, TierConfig, WindowConfig
from kvdrive_jax.methods.base import BatchRows, Tools
from kvdrive_jax.methods.table import METHODS
from kvdrive_jax.models.config import ModelConfig
from kvdrive_jax.models.model import Model, define
from kvdrive_jax.models.presets import LLAMA_3_8B_GRADIENT_1048K
from kvdrive_jax.models.rope import RopeConfig, inverse_frequencies
from kvdrive_jax.pallas.prompt import prompt_implementation
from kvdrive_jax.pipeline.prefill import PromptLayer, prefill_layer
from kvdrive_jax.plan import plan_batch
from kvdrive_jax.shapes import prompt_capacity
from kvdrive_jax.telemetry import Ledger, RowCounts, StageClock, Traffic
from kvdrive_jax.timeline import Timeline

TOY_MODEL = ModelConfig(
    architecture="llama",
    vocab_size=64,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_positions=4096,
    rope=RopeConfig(rotary_dim=16, theta=1e4),
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all configurations share."""

    model: Model
    tokens: int
    budget: int
    steps: int
    seed: int
    budgets: Budgets


@dataclass(frozen=True, kw_only=True)
class Way:
    """One configuration: method, window multiple, fetch."""

    method: str
    window: float | None = None
    fetch: str | None = None

    @property
    def label(self) -> str:
        """For the record."""
        if self.method == "full":
            return "decode, full attention"
        where = "all in HBM" if self.window is None else f"window x{self.window:g}"
        return f"decode, kvdrive, {where}" + (f", {self.fetch}" if self.fetch else "")


# By importance: what is left when time runs out is said to be skipped.
WAYS = (
    Way(method="full"),
    Way(method="kvdrive", window=2, fetch="staged"),
    Way(method="kvdrive", window=2, fetch="direct"),
    Way(method="kvdrive"),
    Way(method="kvdrive", window=1, fetch="staged"),
    Way(method="kvdrive", window=4, fetch="staged"),
    Way(method="kvdrive", window=4, fetch="direct"),
    Way(method="kvdrive", window=1, fetch="direct"),
    Way(method="kvdrive", window=3, fetch="staged"),
    Way(method="kvdrive", window=3, fetch="direct"),
)


def run(bench: Bench) -> None:
    """One row per configuration, and one that compares their tokens."""
    toy = bench.toy
    config = TOY_MODEL if toy else LLAMA_3_8B_GRADIENT_1048K
    setup: list[Setup] = []

    def prepare(row: Row) -> None:
        model = random_model(config, jnp.float32 if toy else jnp.bfloat16, bench.draw)
        jax.block_until_ready(model.layers)
        row["parameters"] = model.parameter_count
        setup.append(
            Setup(
                model=model,
                tokens=300 if toy else 131072 - 64,
                budget=64 if toy else 2048,
                steps=3 if toy else 24,
                seed=bench.seed,
                budgets=resolve_budgets(TierConfig()),
            )
        )

    bench.item("random weights", prepare)
    if not setup:
        return
    bench.item("prefill of one layer", lambda row: _prefill(setup[0], row))
    made: dict[Way, list[int]] = {}
    slowest = 5.0
    for way in WAYS[:3] if toy else WAYS:
        start = time.perf_counter()
        bench.item(
            way.label, lambda row, way=way: _decode(setup[0], row, way, made), needs_seconds=slowest
        )
        slowest = max(slowest, time.perf_counter() - start)
    bench.item("same tokens in every window and fetch", lambda row: _compare(row, made))


def random_model(config: ModelConfig, dtype: Any, draw: Draw) -> Model:
    """Random weights, scaled so that activations stay of order one."""
    static, layer, ends = define(config, dtype)

    def leaf(shape: tuple[int, ...], kind: Any, name: str) -> jax.Array:
        if len(shape) == 1:
            return jnp.ones(shape, kind)
        scale = 1.0 if "embedding" in name else shape[0] ** -0.5
        return jnp.asarray(draw.normal(shape, kind) * jnp.asarray(scale, kind))

    def fill(leaves: Any, names: tuple[str, ...]) -> tuple[jax.Array, ...]:
        return tuple(leaf(x.shape, x.dtype, name) for x, name in zip(leaves, names, strict=True))

    layers = tuple(fill(layer, static.layer_def.names) for _ in range(config.num_layers))
    return Model(static, layers, fill(ends, static.ends_def.names), digest="random")


@partial(jax.jit, static_argnames=("capacity", "kv_heads", "dim", "heads", "observed", "dtype"))
def random_prompt(
    key: jax.Array,
    *,
    capacity: int,
    kv_heads: int,
    dim: int,
    heads: int,
    observed: int,
    dtype: Any,
) -> PromptLayer:
    """Keys in slowly drifting groups, as neighbouring tokens are alike; values at random."""
    parts = jax.random.split(key, 4)
    groups = jax.random.normal(parts[0], (kv_heads, -(-capacity // 64), 1, dim), jnp.float32)
    own = jax.random.normal(parts[1], (kv_heads, capacity, dim), dtype)
    shared = jnp.repeat(groups.astype(dtype), 64, axis=2).reshape(kv_heads, -1, dim)
    return PromptLayer(
        k=shared[:, :capacity] + own * jnp.asarray(0.5, dtype),
        v=jax.random.normal(parts[2], (kv_heads, capacity, dim), dtype),
        q_observed=jax.random.normal(parts[3], (observed, heads, dim), dtype),
    )


def _config(setup: Setup, way: Way) -> KVDriveConfig:
    tiers: dict[str, Any] = {}
    if way.fetch is not None:
        tiers["fetch"] = way.fetch
    return KVDriveConfig(
        method=way.method,  # type: ignore[arg-type]
        batch_size=1,
        context_length=setup.tokens + 64,
        retrieval=RetrievalConfig(budget=setup.budget),
        window=WindowConfig(multiple=way.window),
        tiers=TierConfig(**tiers),
    )


def _decode(setup: Setup, row: Row, way: Way, made: dict[Way, list[int]]) -> None:
    model, config = setup.model, _config(setup, way)
    shape = model.config
    plan = plan_batch(
        shape,
        model.dtype,
        model.parameter_count,
        config,
        [setup.tokens],
        64,
        budgets=setup.budgets,
    )
    plan.require()
    if way.method == "kvdrive" and way.window is None and not plan.resident:
        raise NotImplementedError("not everything fits HBM here")
    row.update(window=plan.window, slots=plan.window_slots, resident=plan.resident)
    frequencies, factor = inverse_frequencies(shape.rope, plan.shape.final_tokens[0])
    counts = RowCounts()
    rows = BatchRows(
        length=np.array([setup.tokens], np.int64),
        active=np.ones(1, bool),
        inv_freq=jnp.asarray(frequencies)[None],
        attention_factor=jnp.asarray(np.array([factor], np.float32)),
        counts=[counts],
    )
    timeline = Timeline()
    tools = Tools(
        model=model,
        config=config,
        ledger=Ledger(hbm=setup.budgets.hbm, dram=setup.budgets.dram, ssd=setup.budgets.ssd),
        traffic=Traffic(),
        clock=StageClock(),
        timeline=timeline,
    )
    start = time.perf_counter()
    method = METHODS[config.method](tools, plan, rows)
    try:
        for layer in range(shape.num_layers):
            prompt = random_prompt(
                jax.random.key(setup.seed * 1000 + layer),
                capacity=plan.shape.prompt_capacity,
                kv_heads=shape.num_kv_heads,
                dim=shape.head_dim,
                heads=shape.num_heads,
                observed=config.retrieval.observation,
                dtype=model.dtype,
            )
            method.settle()
            method.absorb(0, layer, prompt)
        method.finish_prefill()
        row["absorb_s"] = time.perf_counter() - start
        tokens, times = [1], []
        warm = 2
        for step in range(setup.steps + warm):
            began = time.perf_counter()
            logits = method.step(jnp.asarray(tokens[-1:], jnp.int32))
            drawn = jnp.argmax(logits[0])
            method.after_step()
            tokens.append(int(drawn))
            ended = time.perf_counter()
            times.append(ended - began)
            timeline.end_step(began, ended, warm_up=step < warm)
            rows.length[0] += 1
        if not bool(jnp.isfinite(logits).all()):
            row.update(status="failed", why="the logits are not finite")
    finally:
        method.close()
    median = sorted(times[warm:])[setup.steps // 2]
    row.update(step_s=median, tokens_per_s=1 / median, hit_rate=counts.hit_rate)
    told = timeline.totals()
    for name in ("work_s", "stall_s"):
        row[f"{name}_per_step"] = {part: s / setup.steps for part, s in told[name].items()}
    row["tokens"] = tokens[1:]
    row["figure"] = f"{1 / median:.1f} tokens/s"
    made[way] = tokens[1:]


def _compare(row: Row, made: dict[Way, list[int]]) -> None:
    """Only selection decides the answer."""
    answers = {way.label: tokens for way, tokens in made.items() if way.method == "kvdrive"}
    if len(answers) < 2:
        raise NotImplementedError("fewer than two configurations ran")
    first = next(iter(answers))
    different = [label for label, tokens in answers.items() if tokens != answers[first]]
    row["compared"] = list(answers)
    if different:
        row.update(status="failed", why=f"other tokens than {first}: {', '.join(different)}")


def _prefill(setup: Setup, row: Row) -> None:
    """Time of one layer over the whole prompt, random hidden states."""
    model, shape = setup.model, setup.model.config
    capacity = prompt_capacity(setup.tokens)
    frequencies, factor = inverse_frequencies(shape.rope, setup.tokens)
    implementation = prompt_implementation(compat.platform(), model.dtype, shape.head_dim)
    hidden = jax.random.normal(jax.random.key(0), (capacity, shape.hidden_size), model.dtype)

    def call() -> Any:
        return prefill_layer(
            model.static,
            model.layers[0],
            hidden + 0,
            jnp.int32(setup.tokens),
            jnp.asarray(frequencies),
            jnp.float32(factor),
            observed=32,
            implementation=implementation,
        )

    row["seconds"] = wall(call, 1 if setup.tokens > 1000 else 2)
    row["implementation"] = implementation
    row["whole_prompt_s"] = row["seconds"] * shape.num_layers
    row["figure"] = f"{setup.tokens / row['whole_prompt_s']:,.0f} tokens/s"
