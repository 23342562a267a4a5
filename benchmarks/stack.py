"""Decode steps of method ``kvdrive`` over a stack of layers, without prefilling a model.

    python -m benchmarks.stack --shape llama-3-8b --layers 2 --context 61440 --batch 4

A stack is as many decoder layers of a model's shape as memory holds, with random weights (or the
bundled model with its own). The method is driven as the engine drives it: plan, prompts handed in
layer by layer, then steps. What is not the engine's: prompts come from `stack_kv`, and so do the
new token's queries, keys and values. The projections are computed all the same, and cost what they
cost; then the recorded ones take their place, so that selections recur from step to step as they
do in a real model and never depend on the random weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import MIB, numbers, table
from benchmarks.stack_kv import HeadShape, StackKV, make_kv
from kvdrive_jax.config import KVDriveConfig, RetrievalConfig, TierConfig, WindowConfig
from kvdrive_jax.methods.base import BatchRows, Tools, int32
from kvdrive_jax.methods.table import METHODS
from kvdrive_jax.models.config import ModelConfig
from kvdrive_jax.models.decoder import DecoderLayer
from kvdrive_jax.models.model import Leaves, Model, ModuleDef, define
from kvdrive_jax.models.presets import preset
from kvdrive_jax.models.rope import RopeConfig, inverse_frequencies
from kvdrive_jax.models.weights import load_pretrained
from kvdrive_jax.plan import Plan, plan_batch
from kvdrive_jax.telemetry import Ledger, RowCounts, StageClock, Traffic
from kvdrive_jax.tiers.link import Links

Array = np.ndarray[Any, Any]
VOCABULARY = 64
SHAPES = ("llama-3-8b", "smollm2", "tiny")


class RecordedLayer:
    """A decoder layer whose new token is a recorded one; its own is computed too."""

    def __init__(self, layer: DecoderLayer, bank: Leaves) -> None:
        self._layer = layer
        *self._bank, self._base = bank

    def attention_inputs(
        self,
        hidden: jax.Array,
        positions: jax.Array,
        inv_freq: jax.Array,
        attention_factor: jax.Array,
    ) -> tuple[jax.Array, ...]:
        """As ``DecoderLayer.attention_inputs``, for hidden [b, E]: some rows of the batch.

        attention_factor: [b], which row of the batch each is (`row_numbers`).
        """
        own = self._layer.attention_inputs(hidden, positions, inv_freq, attention_factor)
        row = attention_factor.astype(jnp.int32) - 1
        step = jnp.clip(positions - self._base[row], 0, self._bank[0].shape[1] - 1)
        # A choice by value: XLA can neither leave the projection out nor change a recorded bit.
        return tuple(
            jnp.where(jnp.isfinite(real), recorded[row, step], real)
            for real, recorded in zip(own, self._bank, strict=True)
        )

    def after_attention(self, hidden: jax.Array, attended: jax.Array) -> jax.Array:
        """As ``DecoderLayer.after_attention``."""
        return self._layer.after_attention(hidden, attended)


def row_numbers(batch: int) -> jax.Array:
    """[B] float32, for ``BatchRows.attention_factor``: 1 for the first row. It is the one value
    that stages take along for each row and that recorded tokens do not need for what it is."""
    return jnp.arange(1, batch + 1, dtype=jnp.float32)


@dataclass(frozen=True)
class RecordedDef(ModuleDef):
    """A layer's structure whose leaves go on with the bank: q [B, S, H, D], k and v [B, S, K, D],
    base [B] int32."""

    def merge(self, leaves: Leaves) -> Any:
        """The layer, inside a compiled function."""
        own = len(self.names)
        return RecordedLayer(super().merge(leaves[:own]), leaves[own:])


def stack_config(shape: str, layers: int, positions: int) -> ModelConfig:
    """``layers`` layers of a model's shape, a tiny vocabulary. ValueError for another shape."""
    if shape == "llama-3-8b":
        whole = preset("Llama-3-8B-Instruct-Gradient-1048k")
    elif shape == "tiny":
        whole = ModelConfig(
            architecture="llama",
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_layers=layers,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            rms_norm_eps=1e-5,
            max_positions=positions,
            rope=RopeConfig(theta=1e4, rotary_dim=32),
        )
    else:
        raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    return dataclasses.replace(
        whole, num_layers=layers, vocab_size=VOCABULARY, max_positions=positions
    )


def random_model(config: ModelConfig, dtype: Any, seed: int = 0) -> Model:
    """Random weights of the size that keeps activations near one."""
    static, layer, ends = define(config, dtype)
    draw = np.random.default_rng(seed)

    def make(leaf: Any) -> jax.Array:
        if len(leaf.shape) == 1:
            return jnp.ones(leaf.shape, leaf.dtype)
        values = draw.standard_normal(leaf.shape, np.float32)
        values *= leaf.shape[0] ** -0.5
        return jnp.asarray(values.astype(leaf.dtype))

    layers = tuple(tuple(make(leaf) for leaf in layer) for _ in range(config.num_layers))
    return Model(static, layers, tuple(make(leaf) for leaf in ends), f"stack-{seed}")


def stack_model(shape: str, layers: int, dtype: str, positions: int) -> Model:
    """The model of a stack; ``smollm2`` is the bundled one, its first layers with their weights."""
    if shape != "smollm2":
        return random_model(stack_config(shape, layers, positions), dtype)
    whole = load_pretrained("demo", dtype)
    config = dataclasses.replace(
        whole.config,
        num_layers=min(layers, whole.config.num_layers),
        max_positions=max(positions, whole.config.max_positions),
    )
    static = dataclasses.replace(whole.static, config=config)
    return Model(static, whole.layers[: config.num_layers], whole.ends, whole.digest)


def head_shape(model: Model) -> HeadShape:
    """What KV must have."""
    config = model.config
    return HeadShape(
        layers=config.num_layers,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=model.dtype,
    )


def with_recorded(model: Model, source: StackKV) -> Model:
    """The model with a bank of recorded tokens in each layer."""
    definition = RecordedDef(model.layer_def.graph, model.layer_def.tree, model.layer_def.names)
    static = dataclasses.replace(model.static, layer_def=definition)
    base = int32(np.array(source.base))
    layers = tuple(
        (*leaves, *(jnp.asarray(array) for array in source.bank(layer)), base)
        for layer, leaves in enumerate(model.layers)
    )
    return Model(static, layers, model.ends, model.digest)


@dataclass(frozen=True, kw_only=True, eq=False)
class StackRun:
    """What a run took.

    step_s: wall time of each step; digests: of each step's logits; logits: [steps, B, V] float32,
    which a tiny vocabulary makes a summary of hidden states; bytes: moved in all steps, by
    direction; selected, missed: chunks in all steps, by session; stage_s: as the engine's thread
    saw it; setup_s: until the first step; timeline: its totals, {} where it keeps none.
    """

    step_s: list[float]
    digests: list[str]
    logits: Array
    bytes: dict[str, int]
    selected: list[int]
    missed: list[int]
    stage_s: dict[str, float]
    setup_s: float
    plan: Plan
    timeline: dict[str, Any]

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

    def summary(self) -> dict[str, Any]:
        """Plain values for a result."""
        steps = len(self.step_s)
        return {
            "step_ms": [round(1e3 * value, 3) for value in self.step_s],
            "median_ms": 1e3 * self.median_s,
            "tokens_per_s": self.tokens_per_s,
            "hit_rate": self.hit_rate,
            "bytes_per_step": {name: count / steps for name, count in self.bytes.items() if count},
            "stage_ms_per_step": {
                name: 1e3 * seconds / steps for name, seconds in self.stage_s.items() if seconds
            },
            "setup_s": self.setup_s,
            "digest": self.digest,
            "timeline": self.timeline,
        }


class Stack:
    """A model and its KV, to be run with any configuration.

    contexts: prompt tokens of each session; steps: most steps of a run; kv: ``real`` or ``random``.
    """

    def __init__(
        self,
        shape: str,
        layers: int,
        contexts: Sequence[int],
        *,
        steps: int,
        dtype: str = "float32",
        kv: str = "real",
        model: Model | None = None,
    ) -> None:
        self.contexts, self.steps = tuple(contexts), steps
        self.weights = model or stack_model(shape, layers, dtype, max(contexts) + steps + 8)
        self.source = make_kv(kv, head_shape(self.weights), contexts, steps)
        self.model = with_recorded(self.weights, self.source)

    def plan(self, config: KVDriveConfig) -> Plan:
        """Where every byte of a run goes."""
        return plan_batch(
            self.weights.config,
            self.weights.dtype,
            self.weights.parameter_count,
            config,
            self.contexts,
            self.steps,
            digest=self.weights.digest,
        )

    def run(
        self,
        config: KVDriveConfig,
        *,
        links: Links | None = None,
        steps: int | None = None,
        warm_up: int = 2,
    ) -> StackRun:
        """Steps of a fresh batch.

        warm_up: of the steps, how many are not in times, bytes and counts (digests have them).
        Raises BudgetError as the engine does, RuntimeError when a session's KV is lost.
        """
        return _Session(self, config, links or Links()).run(steps or self.steps, warm_up)


class _Session:
    def __init__(self, stack: Stack, config: KVDriveConfig, links: Links) -> None:
        self._start = time.perf_counter()
        self._plan = plan = stack.plan(config)
        plan.require()
        self._tools = Tools(
            model=stack.model,
            config=config,
            ledger=Ledger(hbm=plan.budgets.hbm, dram=plan.budgets.dram, ssd=plan.budgets.ssd),
            traffic=Traffic(),
            clock=StageClock(),
            links=links,
        )
        rope = stack.weights.config.rope
        batch = len(stack.contexts)
        turned = [inverse_frequencies(rope, final)[0] for final in plan.shape.final_tokens]
        self._rows = BatchRows(
            length=np.array(stack.contexts, np.int64),
            active=np.ones(batch, bool),
            inv_freq=jnp.asarray(np.stack(turned)),
            attention_factor=row_numbers(batch),
            counts=[RowCounts() for _ in range(batch)],
        )
        self._method = METHODS[config.method](self._tools, plan, self._rows)
        try:
            # A layer of all sessions at a time: their KV comes from the same texts.
            for layer in range(stack.weights.config.num_layers):
                for row in range(batch):
                    prompt = stack.source.prompt(row, layer, plan.shape.prompt_capacity)
                    self._method.absorb(row, layer, prompt)
                    self._method.settle()
            self._method.finish_prefill()
        except BaseException:
            self._method.close()
            raise

    def run(self, steps: int, warm_up: int) -> StackRun:
        tools, rows, batch = self._tools, self._rows, len(self._rows.active)
        times: list[float] = []
        outputs: list[Array] = []
        setup = time.perf_counter() - self._start
        tokens = [int32(np.arange(batch) * 7 + step) for step in range(VOCABULARY)]
        before = self._counters()
        try:
            for step in range(steps):
                if step == warm_up:
                    before = self._counters()
                start = time.perf_counter()

                logits = self._method.step(tokens[step % VOCABULARY])
                outputs.append(np.asarray(logits, np.float32))
                times.append(time.perf_counter() - start)
                rows.length[rows.active] += 1
                if self._method.failed:
                    raise RuntimeError(f"KV was lost: {self._method.failed}")
            for row in range(batch):
                rows.active[row] = False
                self._method.retire(row)
            after = self._counters()
        finally:
            self._method.close()
        totals = getattr(tools.timeline, "totals", None)
        return StackRun(
            step_s=times[warm_up:],
            digests=[hashlib.sha256(output.tobytes()).hexdigest() for output in outputs],
            logits=np.stack(outputs),
            bytes={name: after[0][name] - count for name, count in before[0].items()},
            selected=[a - b for a, b in zip(after[1], before[1], strict=True)],
            missed=[a - b for a, b in zip(after[2], before[2], strict=True)],
            stage_s={name: after[3][name] - value for name, value in before[3].items()},
            setup_s=setup,
            plan=self._plan,
            timeline=totals() if callable(totals) else totals or {},
        )

    def _counters(self) -> tuple[dict[str, int], list[int], list[int], dict[str, float]]:
        counts = self._rows.counts
        return (
            {str(name): count for name, count in self._tools.traffic.snapshot().items()},
            [count.selected_chunks for count in counts],
            [count.missed_chunks for count in counts],
            {str(name): value for name, value in self._tools.clock.snapshot().items()},
        )


def same_outputs(runs: dict[str, StackRun]) -> None:
    """RuntimeError unless every run computed the same, bit for bit."""
    names = list(runs)
    first = runs[names[0]]
    for name in names[1:]:
        other = runs[name]
        if other.digests != first.digests:
            step = next(
                i
                for i, (a, b) in enumerate(zip(first.digests, other.digests, strict=True))
                if a != b
            )
            worst = float(np.abs(first.logits - other.logits).max())
            raise RuntimeError(
                f"{name} computed something else than {names[0]} from step {step} on, by {worst:g}"
            )


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.stack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    made.add_argument("--layers", type=int, default=2, metavar="L")
    made.add_argument("--context", type=numbers, default=[16384], metavar="T[,T...]")
    made.add_argument("--batch", type=int, default=None, metavar="B", help="of equal contexts")
    made.add_argument("--dtype", default="float32")
    made.add_argument("--kv", choices=("real", "random"), default="real")
    made.add_argument("--budget", type=float, default=1 / 64, help="ratio, or tokens")
    made.add_argument("--window", type=float, default=2.0, metavar="X")
    made.add_argument("--index", default="moments")
    made.add_argument("--steps", type=int, default=12)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run a stack as told; 0."""
    options = parser().parse_args(argv)
    contexts = options.context * (options.batch or 1)
    config = KVDriveConfig(
        dtype=options.dtype,
        batch_size=len(contexts),
        retrieval=RetrievalConfig(
            budget=options.budget if options.budget < 1 else int(options.budget),
            index=options.index,
        ),
        window=WindowConfig(multiple=options.window),
        tiers=TierConfig(),
    )
    stack = Stack(
        options.shape,
        options.layers,
        contexts,
        steps=options.steps,
        dtype=options.dtype,
        kv=options.kv,
    )
    run = stack.run(config)
    print(run.plan.table())
    moved = run.bytes["dram_to_hbm"] / len(run.step_s) / MIB
    rows = [
        ["median step", f"{1e3 * run.median_s:.1f} ms"],
        ["tokens/s", f"{run.tokens_per_s:.2f}"],
        ["hit rate", f"{run.hit_rate:.3f}"],
        ["DRAM to HBM", f"{moved:.2f} MiB a step"],
        ["until the first step", f"{run.setup_s:.1f} s"],
        ["digest", run.digest],
    ]
    rows += [
        [name, f"{1e3 * seconds / len(run.step_s):.1f} ms"] for name, seconds in run.stage_s.items()
    ]
    print(table(["", ""], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
