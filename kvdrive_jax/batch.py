"""One batch from prompts to last token: prefill in turn, then decode together."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvdrive_jax import compat
from kvdrive_jax.calibration import BatchCalibration, Calibrator
from kvdrive_jax.methods.base import BatchMethod, BatchRows, Draws, Tools, int32
from kvdrive_jax.methods.table import METHODS
from kvdrive_jax.models.rope import inverse_frequencies
from kvdrive_jax.pallas.prompt import prompt_implementation, why_not_prompt
from kvdrive_jax.pipeline.indexing import put_together
from kvdrive_jax.pipeline.prefill import embed_prompt, last_logits, prefill_layer
from kvdrive_jax.pipeline.resident import padded_eos
from kvdrive_jax.plan import Plan
from kvdrive_jax.report import RunReport
from kvdrive_jax.sampling import SamplingConfig, SamplingRule, SamplingValues, all_finite, choose
from kvdrive_jax.saved import SavedSession, save_session
from kvdrive_jax.session import Session, StreamEvent
from kvdrive_jax.shapes import prompt_capacity
from kvdrive_jax.telemetry import Progress
from kvdrive_jax.tiers.archive import ArchiveError
from kvdrive_jax.tiers.pages import PageError

Array = np.ndarray[Any, Any]

SCRATCH = ("prefill", "logits")
"""HBM accounts that the batch itself holds; the rest is the method's."""

BURST_S = 0.1
"""About how long text may be held back for steps that share a dispatch, in seconds."""

BURST_FROM = 64
"""New tokens from which compiling bursts can pay."""


class Pace:
    """How many steps a burst may have, so that text still streams."""

    def __init__(self) -> None:
        self.steps = 1
        self._known = False

    def took(self, seconds: float, steps: int) -> None:
        """The last burst. The first may have been compiled and tells nothing."""
        if self._known:
            self.steps = max(1, int(BURST_S * steps / max(seconds, 1e-9)))
        self._known = True


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
    calibrator: Calibrator,
    save_to: str | None = None,
) -> Generator[StreamEvent, None, None]:
    """Events of one batch. Whatever ends it, everything it held is given back.

    calibrator: finds its arrangement; save_to: where its only session is saved when it ends.

    Sessions that have not ended when the iterator is closed or interrupted end as ``cancelled``.
    """
    report.sessions += sessions
    ledger = tools.ledger
    held: list[str] = []
    method: BatchMethod | None = None
    batch: _Batch | None = None
    try:
        for name in SCRATCH:
            ledger.reserve("hbm", name, plan.bytes_of("hbm", name))
            held.append(name)
        rows = start_rows(tools, sessions, plan)
        method = METHODS[tools.config.method](tools, plan, rows)
        batch = _Batch(tools, sessions, plan, rows, method, report, quiet, save_to)
        logits = batch.prefill()
        batch.calibration = calibrator.begin(method, plan)
        yield from batch.decode(logits, sampling)
    except (KeyboardInterrupt, GeneratorExit) as error:
        if batch is not None and isinstance(error, GeneratorExit):
            batch.cancel()  # between two steps; an interrupt may come within one
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
        save_to: str | None,
    ) -> None:
        self.save_to = save_to
        self.calibration: BatchCalibration | None = None
        self._warms_up = True  # the first step may compile
        self._logits = jnp.zeros((0, 0))
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
            if session.resume is not None and session.resume.whole:
                logits.append(self._restore_row(row, session.resume.saved, progress))
            else:
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
        kind = (compat.platform(), model.dtype, model.config.head_dim)
        implementation = prompt_implementation(*kind)
        known = 0
        if session.resume is not None and session.resume.tokens:
            # The rest begins with a whole block of prefill, as it would have without.
            known = session.resume.tokens
            padded = padded[known : known + prompt_capacity(length - known)]
            if implementation == "cudnn":
                implementation = "xla" if why_not_prompt(*kind) else "triton"
        hidden = embed_prompt(model.static, model.ends, padded)
        tokens = int32(length)
        for layer, leaves in enumerate(model.layers):
            reused: dict[str, Any] = {}
            if session.resume is not None and known:
                reused["first"] = int32(known)
                reused["before"] = self._known_layer(layer, session.resume.saved, known)
            begun = time.perf_counter()
            hidden, prompt = prefill_layer(
                model.static,
                leaves,
                hidden,
                tokens,
                self.rows.inv_freq[row],
                self.rows.attention_factor[row],
                observed=self.tools.config.retrieval.observation,
                implementation=implementation,
                **reused,
            )
            method.settle()
            prompt.k.block_until_ready()
            before = time.perf_counter()
            method.absorb(row, layer, prompt)
            now = time.perf_counter()
            self.report.index_s += now - before
            self.tools.timeline.span("device", f"prefill {row}", begun, before, layer)
            self.tools.timeline.span("device", f"index {row}", before, now, layer)
            progress.update(done + length * (layer + 1) // len(model.layers))
        logits: jax.Array = last_logits(model.static, model.ends, hidden, int32(length - known))
        return logits

    def _restore_row(self, row: int, saved: SavedSession, progress: Progress) -> jax.Array:
        """A saved session as it was, and the logits [1, V] that it ended with."""
        layers = self.tools.model.config.num_layers
        self.rows.length[row] = len(saved.tokens)
        for layer in range(layers):
            try:
                self.method.restore(row, layer, saved)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"the session in {saved.archive.path} does not fit: layer {layer}: {error}"
                ) from error
            progress.update(len(saved.tokens) * (layer + 1) // layers)
        return jnp.asarray(saved.logits)[None]

    def _known_layer(
        self, layer: int, saved: SavedSession, known: int
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Keys and values [K, T, D] of the first ``known`` tokens of a saved session."""
        config, retrieval = self.tools.model.config, self.tools.config.retrieval
        dtype = np.dtype(self.tools.model.dtype)
        kept = replace(saved.pages, precision="model")
        arrays = saved.layer(layer, kept)
        page = (2, retrieval.chunk_size, config.head_dim)
        pages = arrays["pages"].view(dtype).reshape(*arrays["pages"].shape[:2], *page)
        near = (arrays["near-k"], arrays["near-v"])
        keys, values = put_together(pages, near, sink=retrieval.sink, tokens=known)
        padded = np.zeros((2, config.num_kv_heads, self.plan.shape.prompt_capacity, page[2]), dtype)
        padded[0, :, :known], padded[1, :, :known] = keys, values
        return padded[0], padded[1]

    # Decode

    def decode(
        self, logits: jax.Array, sampling: SamplingConfig
    ) -> Generator[StreamEvent, None, None]:
        """Tokens until every session has ended."""
        report = self.report
        # Text that streams to a terminal is progress enough, and a line that rewrites itself would
        # erase it.
        quiet = self.quiet or sys.stdout.isatty()
        progress = Progress("decode", self.plan.shape.max_new_tokens, "steps", quiet=quiet)
        start, saving = time.perf_counter(), report.save_s
        step = -1
        for events in self._events(logits, sampling):
            step += 1
            progress.update(step)
            report.decode_s += time.perf_counter() - start
            yield from events
            start = time.perf_counter()
        report.decode_s += time.perf_counter() - start - (report.save_s - saving)
        if step:
            rate = report.decode_tokens / report.decode_s
            progress.finish(f"decode {report.decode_tokens:,} tokens, {rate:.1f} tokens/s")

    def _events(
        self, logits: jax.Array, sampling: SamplingConfig
    ) -> Generator[list[StreamEvent], None, None]:
        """What comes of the prompt's logits, and then of each step."""
        resumed = [session.resume for session in self.sessions if session.resume is not None]
        if any(resume.whole and resume.saved.tail for resume in resumed):
            # Its last token was drawn, but not gone through.
            logits = self._step()
        self._logits = logits
        if self.sessions[0].max_new_tokens == 0:
            yield self._end_failed() + [self._end(row, "length") for row in self._active()]
            return
        for tokens, finite in self._draws(sampling):
            yield self._end_failed() + self._accept(tokens, finite)

    def _draws(self, sampling: SamplingConfig) -> Generator[tuple[Array, Array], None, None]:
        """Tokens [B], and whether the logits they are drawn from are finite [B]: those that follow
        the prompt, then those of each step, until every session has ended."""
        numbers = int32(np.array([session.number for session in self.sessions]))
        eos = int32(padded_eos(self.sessions[0].eos_token_ids))
        yield self._draw(numbers, sampling)
        pace = Pace()
        bursts = self.plan.shape.max_new_tokens >= BURST_FROM
        while self.rows.active.any():
            start = time.perf_counter()
            sessions = self.sessions
            draws = Draws(
                last=[session.last_token for session in sessions],
                drawn=[session.drawn for session in sessions],
                numbers=numbers,
                eos=eos,
                sampling=sampling,
            )
            left = max(sessions[row].left for row in self._active())
            burst = self.method.burst(draws, min(left, pace.steps)) if bursts else None
            if burst is None:
                self._logits = self._step()
                self.report.decode_tokens += int(self.rows.active.sum())
                drawn = self._draw(numbers, sampling)
                self._end_step(start, 1)
                yield drawn
                continue
            pace.took(time.perf_counter() - start, len(burst.tokens))
            self.tools.timeline.span("device", "burst", start, time.perf_counter())
            self._end_step(start, len(burst.tokens))
            for drawn in zip(burst.tokens, burst.finite, strict=True):
                if not self.rows.active.any():
                    break  # what has ended a session here, the device did not know
                self.method.count_step()
                self.rows.length[self.rows.active] += 1
                self.report.decode_tokens += int(self.rows.active.sum())
                yield drawn

    def _end_step(self, start: float, steps: int) -> None:
        now = time.perf_counter()
        self.tools.timeline.end_step(start, now, steps, warm_up=self._warms_up)
        self._warms_up = False

    def _draw(self, numbers: jax.Array, sampling: SamplingConfig) -> tuple[Array, Array]:
        drawn = int32(np.array([session.drawn for session in self.sessions]))
        drawing = _next_tokens(self._logits, numbers, drawn, sampling.values, sampling.rule)
        self.method.after_step()
        begun = time.perf_counter()
        with self.tools.clock.measure("compute"):
            tokens, finite = jax.device_get(drawing)
        self.tools.timeline.span("device", "draw", begun, time.perf_counter())
        if self.calibration is not None:
            self.calibration.after_step(int(self.rows.active.sum()))
        return tokens, finite

    def _step(self) -> jax.Array:
        if self.calibration is not None:
            self._warms_up |= self.calibration.under_way
            self.calibration.before_step()
        tokens = int32(np.array([session.last_token for session in self.sessions]))
        logits = self.method.step(tokens)
        self.rows.length[self.rows.active] += 1
        return logits

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
                self._retire(row)
            if text or session.ended:
                events.append(session.event(text))
        return events

    def _end_failed(self) -> list[StreamEvent]:
        failed = [(row, why) for row, why in self.method.failed.items() if self.rows.active[row]]
        return [self._end(row, "error", why) for row, why in failed]

    def _end(self, row: int, reason: Any, error: str | None = None) -> StreamEvent:
        session = self.sessions[row]
        text = session.finish(reason, error)
        self._retire(row)
        return session.event(text)

    def cancel(self) -> None:
        """End what has not ended; a session that was to be saved is."""
        for row in self._active():
            self.sessions[row].finish("cancelled")
            self._retire(row)

    def _retire(self, row: int) -> None:
        self.rows.active[row] = False
        session = self.sessions[row]
        if self.save_to is not None and session.finish_reason != "error":
            start = time.perf_counter()
            try:
                session.saved_bytes = save_session(
                    self.save_to,
                    self.method,
                    row,
                    name=self.report.model,
                    tokens=[*session.prompt_ids, *session.token_ids],
                    logits=np.asarray(self._logits[row]),
                    generated=session.drawn,
                )
            except (ArchiveError, PageError, ValueError) as error:
                # What was generated is not lost with it.
                session.error = f"the session was not saved: {error}"
            self.report.save_s += time.perf_counter() - start
        self.method.retire(row)
