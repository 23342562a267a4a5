"""Decode steps of method ``kvdrive`` over a stack of layers, without prefilling a model.

    python -m benchmarks.stack --shape llama-3-8b --layers 2 --context 61440 --batch 4

A stack is as many decoder layers of a model's shape as memory holds, with random weights (or the
bundled model with its own). The method is driven as the engine drives it: plan, prompts handed in
layer by layer, then steps. What is not the engine's: prompts and new tokens come from `stack_kv`.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import MIB, numbers, table
from benchmarks.stack_kv import make_kv
from benchmarks.stack_model import (
    SHAPES,
    VOCABULARY,
    head_shape,
    row_numbers,
    stack_model,
    with_recorded,
)
from benchmarks.stack_run import KeptTimeline, StackRun
from kvdrive_jax.calibration import BatchCalibration
from kvdrive_jax.config import KVDriveConfig, RetrievalConfig, TierConfig, WindowConfig
from kvdrive_jax.methods.base import BatchRows, Tools, int32
from kvdrive_jax.methods.kvdrive import KVDrive
from kvdrive_jax.methods.table import METHODS
from kvdrive_jax.models.model import Model
from kvdrive_jax.models.rope import inverse_frequencies
from kvdrive_jax.pipeline.parts import Arrangement
from kvdrive_jax.plan import Plan, plan_batch
from kvdrive_jax.telemetry import Ledger, RowCounts, StageClock, Traffic
from kvdrive_jax.tiers.link import Links

Array = np.ndarray[Any, Any]
POSITIONS = 1 << 20
WARM_UP = 3
"""Steps of a run that are not timed."""


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
        self.weights = model or stack_model(shape, layers, dtype, POSITIONS)
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

    def open(self, config: KVDriveConfig, links: Links | None = None) -> Session:
        """A fresh batch, all prompts handed in. Raises BudgetError as the engine does."""
        return Session(self, config, links or Links())

    def run(
        self,
        config: KVDriveConfig,
        *,
        links: Links | None = None,
        steps: int | None = None,
        warm_up: int = WARM_UP,
    ) -> StackRun:
        """Steps of a fresh batch; see `Session.run`."""
        with self.open(config, links) as session:
            return session.run(steps, warm_up=warm_up)


class Session:
    """A batch that is decoded as often as one likes, always from the end of its prompts and with
    windows as the prompts left them; a context manager."""

    def __init__(self, stack: Stack, config: KVDriveConfig, links: Links) -> None:
        start = time.perf_counter()
        self._stack, self.plan = stack, stack.plan(config)
        self.contexts = stack.contexts
        self.dtype = stack.weights.dtype.name
        plan = self.plan
        plan.require()
        self._timeline = KeptTimeline()
        self._tools = Tools(
            model=stack.model,
            config=config,
            ledger=Ledger(hbm=plan.budgets.hbm, dram=plan.budgets.dram, ssd=plan.budgets.ssd),
            traffic=Traffic(),
            clock=StageClock(),
            links=links,
            timeline=self._timeline,
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
        self.method = METHODS[config.method](self._tools, plan, self._rows)
        try:
            # A layer of all sessions at a time: their KV comes from the same texts.
            for layer in range(stack.weights.config.num_layers):
                for row in range(batch):
                    prompt = stack.source.prompt(row, layer, plan.shape.prompt_capacity)
                    self.method.absorb(row, layer, prompt)
                    self.method.settle()
            self.method.finish_prefill()
        except BaseException:
            self.method.close()
            raise
        self._first = self._windows()
        self.setup_s = time.perf_counter() - start

    def _windows(self) -> tuple[Arrangement, Any] | None:
        """A copy of windows and directories, and how they are cut."""
        if not isinstance(self.method, KVDrive) or self.plan.resident:
            return None
        state = self.method._state
        return self.method.arrangement, jax.tree.map(jnp.copy, (state.windows, state.directory))

    def _rewind(self) -> None:
        self._rows.length[:] = self._stack.contexts
        if self._first is not None:
            assert isinstance(self.method, KVDrive)
            now, (first, kept) = self.method.arrangement, self._first
            self.method.arrange(first)
            state = self.method._state
            windows, directories = jax.tree.map(jnp.copy, kept)
            state.windows[:] = windows
            for directory, copy in zip(state.directory, directories, strict=True):
                directory[:] = copy
            self.method.arrange(now)

    def arrange(self, micro_batch: int, cohorts: int) -> None:
        """Cut the batch anew. ValueError for what the method does not do."""
        assert isinstance(self.method, KVDrive)
        self.method.arrange(Arrangement(micro_batch, cohorts))

    def possible(self, wanted: Sequence[Arrangement]) -> list[Arrangement]:
        """Those of ``wanted`` that there is memory for; the others are named."""
        assert isinstance(self.method, KVDrive)
        known = self.method.arrangements()
        for one in wanted:
            if one not in known:
                print(f"left out: {one}")
        return [one for one in wanted if one in known]

    def _cohorts(self) -> int:
        return self.method.arrangement.cohorts if isinstance(self.method, KVDrive) else 1

    def run(
        self,
        steps: int | None = None,
        *,
        warm_up: int = WARM_UP,
        calibration: BatchCalibration | None = None,
    ) -> StackRun:
        """Steps from the end of the prompts on.

        warm_up: of the steps, how many are not in times, bytes and counts (digests have them).
        calibration: is told of every step, and may cut the batch anew between steps.
        Raises RuntimeError when a session's KV is lost.
        """
        rows, batch = self._rows, len(self._rows.active)
        self._rewind()
        self._timeline.done = []
        times: list[float] = []
        outputs: list[Array] = []
        tokens = [int32((np.arange(batch) * 7 + step) % VOCABULARY) for step in range(VOCABULARY)]
        before = self._counters()
        for step in range(steps or self._stack.steps):
            if step == warm_up:
                before = self._counters()
            start = time.perf_counter()
            if calibration is not None:
                calibration.before_step()
            logits = self.method.step(tokens[step % VOCABULARY])
            self.method.after_step()
            if calibration is not None:
                calibration.after_step(batch)
            outputs.append(np.asarray(logits, np.float32))
            end = time.perf_counter()
            times.append(end - start)
            self._timeline.take(start, end)
            rows.length += 1
            if self.method.failed:
                raise RuntimeError(f"KV was lost: {self.method.failed}")
        after = self._counters()
        return StackRun(
            step_s=times[warm_up:],
            digests=[hashlib.sha256(output.tobytes()).hexdigest() for output in outputs],
            logits=np.stack(outputs),
            bytes={name: after[0][name] - count for name, count in before[0].items()},
            selected=[a - b for a, b in zip(after[1], before[1], strict=True)],
            missed=[a - b for a, b in zip(after[2], before[2], strict=True)],
            setup_s=self.setup_s,
            computed=-(-batch // self._cohorts()),
            plan=self.plan,
            spans=self._timeline.done[warm_up:],
        )

    def _counters(self) -> tuple[dict[str, int], list[int], list[int]]:
        counts = self._rows.counts
        return (
            {str(name): count for name, count in self._tools.traffic.snapshot().items()},
            [count.selected_chunks for count in counts],
            [count.missed_chunks for count in counts],
        )

    def close(self) -> None:
        """Give back everything."""
        for row in range(len(self._rows.active)):
            self._rows.active[row] = False
            self.method.retire(row)
        self.method.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
    made.add_argument("--steps", type=int, default=12, help=f"the first {WARM_UP} not timed")
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
    rows += [[name, f"{1e3 * seconds:.1f} ms"] for name, seconds in run.stage_s().items()]
    print(table(["", ""], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
