"""The engine: prompts in, text out. Prefill, decode, batches, streams.

One thread owns an engine and everything JAX. A call goes through its prompts in batches; within a
batch every session is prefilled in turn, then all are decoded together until the last has ended.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, overload

import numpy as np

from kvdrive_jax import compat
from kvdrive_jax.batch import run_batch
from kvdrive_jax.budgets import Budgets, resolve_budgets
from kvdrive_jax.calibration import Calibrator, check_calibrate
from kvdrive_jax.checks import check_config, check_length
from kvdrive_jax.config import KVDriveConfig, format_size
from kvdrive_jax.methods.base import Tools
from kvdrive_jax.models.model import Model
from kvdrive_jax.models.packing import held, pack_model
from kvdrive_jax.models.rope import inverse_frequencies
from kvdrive_jax.models.tokenizer import Tokenizer
from kvdrive_jax.models.weights import describe_pretrained, load_pretrained
from kvdrive_jax.pipeline.prefill import BLOCK_Q
from kvdrive_jax.pipeline.recorder import TraceRecorder
from kvdrive_jax.plan import Plan, plan_batch
from kvdrive_jax.report import RunReport
from kvdrive_jax.sampling import SamplingConfig
from kvdrive_jax.saved import SavedSession, check_target, load_session
from kvdrive_jax.session import Generation, Resume, Session, StreamEvent
from kvdrive_jax.shapes import Stored
from kvdrive_jax.telemetry import BudgetError, Ledger, Progress
from kvdrive_jax.text import check_stop_strings
from kvdrive_jax.tiers.link import Links
from kvdrive_jax.timeline import Timeline

_STREAMS: weakref.WeakSet[Generator[StreamEvent, None, None]] = weakref.WeakSet()


def _close_streams() -> None:
    """Streams that were left as Python ends are closed while everything they need is there."""
    for stream in list(_STREAMS):
        with suppress(ValueError):  # a thread that Python does not wait for is at it
            stream.close()


# Before the executors end, which closing and saving need: what atexit knows comes after them.
getattr(threading, "_register_atexit", atexit.register)(_close_streams)


class Engine:
    """A model with its KV cache over HBM, DRAM and SSD.

    Use as a context manager, or call ``close``. Not thread-safe.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        config: KVDriveConfig | None = None,
        *,
        name: str = "model",
        quiet: bool = True,
        budgets: Budgets | None = None,
        links: Links | None = None,
    ) -> None:
        """Take a loaded model. Raises ValueError when the configuration does not suit it.

        links: imitate slower ways between the tiers.
        """
        if config is not None and config.weights_dtype == "int8":
            model = pack_model(model)
        self._links = links or Links()
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.config = config or KVDriveConfig()
        self.budgets = budgets or resolve_budgets(self.config.tiers)
        self.context_length = check_config(self.config, model.config, model.dtype)
        self._quiet = quiet
        self._closed = False
        self._ledger = Ledger(hbm=self.budgets.hbm, dram=self.budgets.dram, ssd=self.budgets.ssd)
        self._ledger.reserve("hbm", "weights", model.nbytes)
        self._report: RunReport | None = None
        self._calibrator = Calibrator(
            self.config,
            model.config,
            model.dtype,
            model.digest,
            self.budgets,
            links=self._links,
            quiet=quiet,
        )

    @classmethod
    def from_pretrained(
        cls,
        model: str = "demo",
        config: KVDriveConfig | None = None,
        *,
        quiet: bool = True,
        cache_dir: str | None = None,
    ) -> Engine:
        """Load ``demo``, a .gguf file or a Hugging Face folder.

        cache_dir: where converted weights are kept for a faster second start (None: not at all).
        Raises ValueError for a model or configuration that cannot be used, BudgetError (a
        ValueError) when the weights alone exceed the HBM budget, before they are loaded.
        """
        config = config or KVDriveConfig()
        budgets = resolve_budgets(config.tiers)
        known = describe_pretrained(model, config.dtype, context_length=config.context_length)
        check_config(config, known.config, known.dtype)
        check_calibrate(config)
        parameters, _ = held(
            known.config, known.dtype, known.parameters, known.digest, config.weights_dtype
        )
        weights = parameters * known.dtype.itemsize
        if weights > budgets.hbm:
            kind = known.dtype.name if config.weights_dtype == "model" else config.weights_dtype
            raise BudgetError(
                f"the weights of {model} take {weights:,} bytes in {kind}, the HBM "
                f"budget is {budgets.hbm:,}: raise --hbm-budget, or give a smaller --dtype"
            )
        start = time.perf_counter()
        progress = Progress(f"loading {model}", 1, "model", quiet=quiet)
        tokenizer = Tokenizer.from_pretrained(model)
        loaded = load_pretrained(
            model, config.dtype, context_length=config.context_length, cache_dir=cache_dir
        )
        engine = cls(loaded, tokenizer, config, name=model, quiet=quiet, budgets=budgets)
        progress.finish(
            f"loaded {model}: {loaded.parameter_count / 1e6:,.0f} M parameters, "
            f"{format_size(loaded.nbytes)} in {time.perf_counter() - start:.1f} s"
        )
        return engine

    # Asking

    def encode(
        self, prompt: str, *, chat: bool | None = None, system: str | None = None
    ) -> list[int]:
        """Token ids of a prompt.

        chat: through the model's template (None: if it has one). Raises ValueError for an empty
        prompt, a system message without chat, or a template that fails.
        """
        if not prompt:
            raise ValueError("prompt must not be empty")
        use_chat = self.tokenizer.has_template if chat is None else chat
        if not use_chat and system is not None:
            raise ValueError("system needs chat: this prompt goes to the model as plain text")
        ids = (
            self.tokenizer.encode_chat(prompt, system)
            if use_chat
            else self.tokenizer.encode(prompt)
        )
        if not ids:
            raise ValueError("prompt must not be empty, got text that makes no token")
        return ids

    def plan(
        self, prompt_tokens: Sequence[int], max_new_tokens: int, *, resume: Resume | None = None
    ) -> Plan:
        """Where every byte of a batch of prompts will go."""
        stored = None
        if resume is not None and resume.whole:
            stored = Stored(resume.saved.chunks, resume.saved.flushes)
        model = self.model
        return plan_batch(
            model.config,
            model.dtype,
            model.nbytes // model.dtype.itemsize,
            self.config,
            prompt_tokens,
            max_new_tokens,
            budgets=self.budgets,
            digest=model.digest,
            stored=stored,
            most_window=self._calibrator.most_window(
                len(prompt_tokens), max_new_tokens, self._ledger
            ),
        )

    def config_line(self) -> str:
        """The effective configuration in one line."""
        config, retrieval = self.config, self.config.retrieval
        parts = [f"model {self.name}", f"method {config.method}", f"{self.model.dtype.name}"]
        if config.weights_dtype != "model":
            parts.append(f"weights {config.weights_dtype}")
        if config.method != "full":
            budget = retrieval.budget if retrieval.budget is not None else "default"
            window = config.window.uniform
            parts += [
                f"budget {budget}",
                f"chunk {retrieval.chunk_size}",
                f"index {retrieval.index}",
                f"estimate {retrieval.estimate}",
                f"sink {retrieval.sink} local {retrieval.local}",
                f"group {retrieval.group_rule}",
                f"window {'auto' if window is None else f'x{window:g}'}",
                f"eviction {config.window.eviction}",
                self._schedule(),
            ]
        parts += [
            f"context {self.context_length}",
            f"hbm {format_size(self.budgets.hbm)}",
            f"dram {format_size(self.budgets.dram)}",
        ]
        tiers = config.tiers
        if self.budgets.ssd:
            parts += [
                f"ssd {format_size(self.budgets.ssd)} in {tiers.ssd_dir}",
                f"sync {tiers.sync} prefetch x{tiers.read_ahead:g}",
            ]
        if tiers.dram_dtype != "model" or tiers.ssd_precision != "model":
            parts.append(f"pages {tiers.dram_dtype} in DRAM, {tiers.ssd_precision} on SSD")
        return ", ".join([*parts, f"on {compat.device_name()}"])

    def _schedule(self) -> str:
        pipeline = self.config.pipeline
        parts = [f"schedule {pipeline.schedule}"]
        if pipeline.schedule == "speculative":
            parts.append("(selects by the layer before: other tokens)")
        if pipeline.micro_batch is not None:
            parts.append(f"micro-batch {pipeline.micro_batch}")
        if pipeline.cohorts is not None:
            parts.append(f"cohorts {pipeline.cohorts}")
        return " ".join(parts)

    def stats(self) -> dict[str, Any]:
        """Figures of the last call; the fields are those of ``docs/stats.md``."""
        if self._report is None:
            self._report = RunReport()
        config = {**self.config.to_dict(), "context_length": self.context_length}
        return {
            "model": self.name,
            "method": self.config.method,
            "device": compat.device_name(),
            "dtype": self.model.dtype.name,
            "config": config,
            **self._report.to_dict(self._ledger),
        }

    # Generating

    @overload
    def generate(self, prompts: str | None = None, **options: Any) -> Generation: ...
    @overload
    def generate(self, prompts: Sequence[str], **options: Any) -> list[Generation]: ...
    def generate(
        self, prompts: str | Sequence[str] | None = None, **options: Any
    ) -> Generation | list[Generation]:
        """Generate for one prompt or several; options as for ``stream``."""
        done: dict[int, Generation] = {}
        for event in self.stream(prompts, **options):
            if event.generation is not None:
                done[event.session] = event.generation
        results = [done[number] for number in sorted(done)]
        return results[0] if prompts is None or isinstance(prompts, str) else results

    def load_session(self, path: str | os.PathLike[str]) -> SavedSession:
        """A saved session, to go on with: ``stream(prompt, session=...)``.

        Raises ValueError for what is not a whole saved session of this model and of settings that
        its KV and index depend on.
        """
        if self.config.method != "kvdrive":
            raise NotImplementedError(f"method {self.config.method} cannot load sessions")
        return load_session(path, self.model, self.config)

    def stream(
        self,
        prompts: str | Sequence[str] | None = None,
        *,
        max_new_tokens: int = 128,
        sampling: SamplingConfig | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        chat: bool | None = None,
        system: str | None = None,
        recorder: TraceRecorder | None = None,
        timeline: Timeline | None = None,
        session: SavedSession | str | os.PathLike[str] | None = None,
        save_session: str | os.PathLike[str] | None = None,
    ) -> Generator[StreamEvent, None, None]:
        """Text as it is made, one event after another; the last of a session has its Generation.

        recorder: gets what every step ranks, see ``kvdrive_jax.window.trace``.
        timeline: gets what ran when, see ``kvdrive_jax.timeline_file``; of this call alone.
        session: a saved one, or where it is, to go on with, of a single prompt: without a prompt
        where it ended; a prompt that begins with the same tokens is prefilled from the first whole
        block of prefill in which it differs on.
        save_session: the directory to save the session in when it ends, also when the iterator is
        closed early; one that is there is replaced when the new one is complete.

        Everything that can be refused is refused here, before any work: ValueError for an empty
        prompt, a bad option, a prompt that is too long, or a plan that does not fit. Closing the
        iterator cancels what is under way and gives everything back.
        """
        if isinstance(session, str | os.PathLike):
            session = self.load_session(session)
        if prompts is None and session is None:
            raise ValueError("prompts must be given, unless a saved session goes on")
        if prompts is None:
            assert session is not None
            encoded = [list(session.all_tokens)]
        else:
            if not isinstance(prompts, str | Sequence):
                raise ValueError(f"prompts must be a text, or a list of texts, got {prompts!r}")
            texts = [prompts] if isinstance(prompts, str) else list(prompts)
            encoded = [self.encode(text, chat=chat, system=system) for text in texts]
        return self.stream_ids(
            encoded,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stop,
            ignore_eos=ignore_eos,
            recorder=recorder,
            timeline=timeline,
            session=session,
            save_session=save_session,
        )

    def stream_ids(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        sampling: SamplingConfig | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        recorder: TraceRecorder | None = None,
        timeline: Timeline | None = None,
        session: SavedSession | None = None,
        save_session: str | os.PathLike[str] | None = None,
    ) -> Generator[StreamEvent, None, None]:
        """``stream`` for prompts that are token ids already."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        if not isinstance(max_new_tokens, int) or max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be an integer >= 0, got {max_new_tokens!r}")
        if recorder is not None and self.config.method == "full":
            raise NotImplementedError("a trace needs a selection: method full has none")
        stop = check_stop_strings(stop)
        for number, ids in enumerate(prompts):
            self._check_prompt(number, ids, max_new_tokens)
        if session is not None or save_session is not None:
            if len(prompts) != 1:
                raise ValueError(
                    f"one session is saved or loaded at a time, got {len(prompts)} prompts"
                )
            if self.config.method != "kvdrive":
                raise NotImplementedError(f"method {self.config.method} cannot save sessions")
        resume = None if session is None else self._resume(session, prompts[0], max_new_tokens)
        size = self.config.batch_size
        groups = [list(range(i, min(i + size, len(prompts)))) for i in range(0, len(prompts), size)]
        plans = [
            self.plan([len(prompts[i]) for i in group], max_new_tokens, resume=resume)
            for group in groups
        ]
        for plan in plans:
            plan.require()
        if save_session is not None:
            check_target(save_session)
        eos = frozenset() if ignore_eos else self.model_eos()

        def start(number: int) -> Session:
            return Session.start(
                number,
                prompts[number],
                max_new_tokens=max_new_tokens,
                eos_token_ids=eos,
                tokenizer=self.tokenizer,
                stop=stop,
                resume=resume,
            )

        save_to = None if save_session is None else os.fspath(save_session)
        stream = self._run(
            groups, plans, start, sampling or SamplingConfig(), recorder, timeline, save_to
        )
        _STREAMS.add(stream)
        return stream

    def _resume(
        self, saved: SavedSession, prompt: Sequence[int], max_new_tokens: int
    ) -> Resume | None:
        """How a saved session serves a prompt. ValueError when it cannot."""
        rope, final = self.model.config.rope, len(prompt) + max_new_tokens
        frequencies, factor = inverse_frequencies(rope, final)
        same = np.array_equal(np.asarray(frequencies, np.float32), saved.inv_freq)
        if not same or not math.isclose(factor, saved.attention_factor, rel_tol=1e-6):
            raise ValueError(
                f"the session in {saved.archive.path} has keys rotated for shorter or longer "
                f"contexts than {final:,} tokens: prefill again"
            )
        if tuple(prompt) == saved.all_tokens:
            return Resume(saved=saved, whole=True, tokens=len(saved.tokens))
        shared = min(saved.shared_with(prompt), len(prompt) - 1)
        if shared < BLOCK_Q:
            raise ValueError(
                f"the prompt does not begin as the session in {saved.archive.path} does: it shares "
                f"{shared} tokens, and blocks of {BLOCK_Q} are reused; give none to go on with it, "
                "or one that begins with the same text"
            )
        return Resume(saved=saved, whole=False, tokens=shared // BLOCK_Q * BLOCK_Q)

    def _run(
        self,
        groups: list[list[int]],
        plans: list[Plan],
        start: Callable[[int], Session],
        sampling: SamplingConfig,
        recorder: TraceRecorder | None,
        timeline: Timeline | None,
        save_to: str | None,
    ) -> Generator[StreamEvent, None, None]:
        report = self._report = RunReport(self.name, timeline)
        tools = Tools(
            model=self.model,
            config=self.config,
            ledger=self._ledger,
            traffic=report.traffic,
            clock=report.clock,
            recorder=recorder,
            links=self._links,
            saves=save_to is not None,
            timeline=report.timeline,
        )
        for group, plan in zip(groups, plans, strict=True):
            sessions = [start(number) for number in group]
            yield from run_batch(
                tools,
                sessions,
                plan,
                sampling,
                report,
                quiet=self._quiet,
                calibrator=self._calibrator,
                save_to=save_to,
            )

    def model_eos(self) -> frozenset[int]:
        """Every token that ends a generation, of model and tokenizer together."""
        return frozenset(self.model.config.eos_token_ids) | self.tokenizer.eos_token_ids

    def _check_prompt(self, number: int, ids: Sequence[int], max_new_tokens: int) -> None:
        if not len(ids):
            raise ValueError(f"prompt {number} must not be empty")
        check_length(number, len(ids), max_new_tokens, self.context_length)
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.model.config.vocab_size:
            raise ValueError(
                f"prompt {number} must hold token ids below {self.model.config.vocab_size}, got "
                f"{low if low < 0 else high}"
            )

    def close(self) -> None:
        """Give back the weights' account; further calls raise RuntimeError. Idempotent."""
        if not self._closed:
            self._closed = True
            self._ledger.release("hbm", "weights")

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
