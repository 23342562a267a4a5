"""One batch from prompts to last token: prefill in turn, then decode together."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvdrive_jax import compat
from kvdrive_jax.methods.base import BatchMethod, BatchRows, Tools, int32
from kvdrive_jax.methods.table import METHODS
from kvdrive_jax.models.rope import inverse_frequencies
from kvdrive_jax.pallas.prompt import prompt_implementation
from kvdrive_jax.pipeline.prefill import embed_prompt, last_logits, prefill_layer
from kvdrive_jax.plan import Plan
from kvdrive_jax.report import RunReport
from kvdrive_jax.sampling import SamplingConfig, SamplingRule, SamplingValues, all_finite, choose
from kvdrive_jax.session import Session, StreamEvent
from kvdrive_jax.telemetry import Progress

SCRATCH = ("prefill", "logits")
"""HBM accounts that the batch itself holds; the rest is the method's."""


@partial(jax.jit, static_argnames="rule")
def _next_tokens(
    logits: jax.Array,
    numbers: jax.Array,
    drawn: jax.Array,
    values: SamplingValues,
    rule: SamplingRule,
) -> tuple[jax.Array, jax.Array]:
    """Tokens [B] int32 from logits [B, V], and whether each row was finite [B] bool."""
    return choose(logits, numbers, drawn, values, rule), all_finite(logits)


def start_rows(tools: Tools, sessions: Sequence[Session], plan: Plan) -> BatchRows:
    """Every session at the end of its prompt; RoPE by the length it can reach."""
    rope = tools.model.config.rope
    turned = [inverse_frequencies(rope, final) for final in plan.shape.final_tokens]
    return BatchRows(
        length=np.array([len(session.prompt_ids) for session in sessions], np.int64),
        active=np.ones(len(sessions), bool),
        inv_freq=jnp.asarray(np.stack([frequencies for frequencies, _ in turned])),
        attention_factor=jnp.asarray(np.array([factor for _, factor in turned], np.float32)),
        counts=[session.counts for session in sessions],
    )


def run_batch(
    tools: Tools,
    sessions: Sequence[Session],
    plan: Plan,
    sampling: SamplingConfig,
    report: RunReport,
    *,
    quiet: bool,
) -> Generator[StreamEvent, None, None]:
    """Events of one batch. Whatever ends it, everything it held is given back.

    Sessions that have not ended when the iterator is closed or interrupted end as ``cancelled``.
    """
    report.sessions += sessions
    ledger = tools.ledger
    held: list[str] = []
    method: BatchMethod | None = None
    try:
        for name in SCRATCH:
            ledger.reserve("hbm", name, plan.bytes_of("hbm", name))
            held.append(name)
        rows = start_rows(tools, sessions, plan)
        method = METHODS[tools.config.method](tools, plan, rows)
        batch = _Batch(tools, sessions, plan, rows, method, report, quiet)
        logits = batch.prefill()
        yield from batch.decode(logits, sampling)
    except (KeyboardInterrupt, GeneratorExit):
        for session in sessions:
            session.finish("cancelled")
        raise
    finally:
        if method is not None:
            method.close()
        for name in held:
            ledger.release("hbm", name)


class _Batch:
    def __init__(
        self,
        tools: Tools,
        sessions: Sequence[Session],
        plan: Plan,
        rows: BatchRows,
        method: BatchMethod,
        report: RunReport,
        quiet: bool,
    ) -> None:
        self.tools, self.sessions, self.plan = tools, sessions, plan
        self.rows, self.method, self.report, self.quiet = rows, method, report, quiet

    # Prefill

    def prefill(self) -> jax.Array:
        """All prompts through all layers; logits [B, V] after each prompt's last token."""
        start = time.perf_counter()
        index_before = self.report.index_s
        tokens = int(self.rows.length.sum())
        progress = Progress("prefill", tokens, "tokens", quiet=self.quiet)
        logits = []
        done = 0
        for row, session in enumerate(self.sessions):
            logits.append(self._prefill_row(row, session, progress, done))
            done += len(session.prompt_ids)
        self.method.finish_prefill()
        out = jnp.concatenate(logits)
        out.block_until_ready()
        elapsed = time.perf_counter() - start
        self.report.prefill_s += elapsed - (self.report.index_s - index_before)
        progress.finish(
            f"prefill {tokens:,} tokens in {elapsed:.1f} s, {tokens / elapsed:,.0f} tokens/s"
        )
        return out

    def _prefill_row(self, row: int, session: Session, progress: Progress, done: int) -> jax.Array:
        model, method = self.tools.model, self.method
        length = len(session.prompt_ids)
        padded = np.zeros(self.plan.shape.prompt_capacity, np.int32)
        padded[:length] = session.prompt_ids
        implementation = prompt_implementation(
            compat.platform(), model.dtype, model.config.head_dim
        )
        hidden = embed_prompt(model.static, model.ends, padded)
        tokens = int32(length)
        for layer, leaves in enumerate(model.layers):
            hidden, prompt = prefill_layer(
                model.static,
                leaves,
                hidden,
                tokens,
                self.rows.inv_freq[row],
                self.rows.attention_factor[row],
                observed=self.tools.config.retrieval.observation,
                implementation=implementation,
            )
            method.settle()
            prompt.k.block_until_ready()
            before = time.perf_counter()
            method.absorb(row, layer, prompt)
            self.report.index_s += time.perf_counter() - before
            progress.update(done + length * (layer + 1) // len(model.layers))
        logits: jax.Array = last_logits(model.static, model.ends, hidden, tokens)
        return logits

    # Decode

    def decode(
        self, logits: jax.Array, sampling: SamplingConfig
    ) -> Generator[StreamEvent, None, None]:
        """Tokens until every session has ended."""
        sessions, rows, report = self.sessions, self.rows, self.report
        numbers = int32(np.array([session.number for session in sessions]))
        # Text that streams to a terminal is progress enough, and a line that rewrites itself would
        # erase it.
        quiet = self.quiet or sys.stdout.isatty()
        progress = Progress("decode", self.plan.shape.max_new_tokens, "steps", quiet=quiet)
        start = time.perf_counter()
        step = 0
        while True:
            events = self._end_failed()
            if sessions[0].max_new_tokens == 0:
                events += [self._end(row, "length") for row in self._active()]
            if rows.active.any():
                drawn = int32(np.array([len(session.token_ids) for session in sessions]))
                with self.tools.clock.measure("compute"):
                    tokens, finite = jax.device_get(
                        _next_tokens(logits, numbers, drawn, sampling.values, sampling.rule)
                    )
                events += self._accept(tokens, finite)
            report.decode_s += time.perf_counter() - start
            yield from events
            start = time.perf_counter()
            if not rows.active.any():
                break
            step += 1
            progress.update(step)
            logits = self.method.step(int32(np.array([s.last_token for s in sessions])))
            rows.length[rows.active] += 1
            report.decode_tokens += int(rows.active.sum())
        report.decode_s += time.perf_counter() - start
        if step:
            rate = report.decode_tokens / report.decode_s
            progress.finish(f"decode {report.decode_tokens:,} tokens, {rate:.1f} tokens/s")

    def _active(self) -> list[int]:
        return [int(row) for row in np.flatnonzero(self.rows.active)]

    def _accept(self, tokens: Any, finite: Any) -> list[StreamEvent]:
        events = []
        for row in self._active():
            session = self.sessions[row]
            if not finite[row]:
                dtype = self.tools.model.dtype.name
                events.append(
                    self._end(
                        row, "error", f"logits are not finite in {dtype}: try another --dtype"
                    )
                )
                continue
            text = session.accept(int(tokens[row]))
            if session.ended:
                self.rows.active[row] = False
                self.method.retire(row)
            if text or session.ended:
                events.append(session.event(text))
        return events

    def _end_failed(self) -> list[StreamEvent]:
        failed = [(row, why) for row, why in self.method.failed.items() if self.rows.active[row]]
        return [self._end(row, "error", why) for row, why in failed]

    def _end(self, row: int, reason: Any, error: str | None = None) -> StreamEvent:
        session = self.sessions[row]
        text = session.finish(reason, error)
        self.rows.active[row] = False
        self.method.retire(row)
        return session.event(text)
