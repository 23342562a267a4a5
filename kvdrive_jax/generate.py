"""``python -m kvdrive_jax.generate``: prompts in, text out.

stdout carries the answer and nothing else; progress, the effective configuration, the summary and
errors go to stderr. Exit status: 0 done, 1 the run failed or was stopped, 2 wrong usage.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from kvdrive_jax.cli_options import GenerateConfig, Options, check_outputs, parse_command_line
from kvdrive_jax.config import format_size
from kvdrive_jax.files import whole_file
from kvdrive_jax.prompts import Prompt, read_prompts
from kvdrive_jax.summary import stats_table, summary
from kvdrive_jax.telemetry import Progress
from kvdrive_jax.timeline import KEPT_SPANS, Timeline
from kvdrive_jax.timeline_file import write_timeline

if TYPE_CHECKING:
    from kvdrive_jax.engine import Engine
    from kvdrive_jax.models.tokenizer import Tokenizer
    from kvdrive_jax.pipeline.recorder import TraceRecorder
    from kvdrive_jax.plan import Plan
    from kvdrive_jax.session import Generation

DONE, FAILED, USAGE = 0, 1, 2

# What a request gets that cannot be served as it stands: status 2 as long as nothing was made.
REFUSALS = (ValueError, NotImplementedError, FileNotFoundError)


class OutputClosed(Exception):
    """Whoever read stdout went away."""


class StopSignals:
    """Ctrl-C and SIGTERM while the engine works.

    Before text flows (``gentle`` is False) they raise KeyboardInterrupt at once. After that the
    first one only sets ``requested``, so that the step under way ends whole and what was made is
    kept; a second one raises.
    """

    def __init__(self) -> None:
        self.gentle = False
        self.requested = False

    def __enter__(self) -> StopSignals:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _received(self, number: int, frame: FrameType | None) -> None:
        hard = self.requested or not self.gentle
        self.requested = True
        if hard:
            raise KeyboardInterrupt


class Run:
    """One run of the command: from options to an exit status."""

    def __init__(self, options: Options, prompts: Sequence[Prompt]) -> None:
        self.options = options
        self.generate = options.generate
        self.good = [prompt for prompt in prompts if prompt.error is None]
        self.bad = [prompt for prompt in prompts if prompt.error is not None]
        self.failed = bool(self.bad)
        self.made_text = False
        self.signals = StopSignals()
        self.recorder: TraceRecorder | None = None
        # Without a trace the engine has one of its own, which keeps no span.
        self.timeline = None if options.generate.trace is None else Timeline(keep=KEPT_SPANS)

    def say(self, line: str) -> None:
        """A line on stderr, unless --quiet."""
        if not self.generate.quiet:
            print(line, file=sys.stderr, flush=True)

    def plan(self) -> int:
        """--plan: the table on stdout; status 0 if it fits."""
        if self.generate.load_session is not None and not self.good[0].text:
            raise ValueError("--plan needs a prompt, also with --load-session")
        from kvdrive_jax.limits import find_limits

        plan = self._plan()
        print(plan.table())
        lengths, new = plan.shape.prompt_tokens, plan.shape.max_new_tokens
        limits = find_limits(self.generate.model, self.options.config, lengths, new)
        print(limits.line(len(lengths), max(lengths), new))
        return DONE if plan.fits else FAILED

    def serve(self) -> int:
        """Load the model, answer every prompt, write the statistics."""
        with self.signals, self._output() as output:
            for prompt in self.bad:
                self._write_line(output, prompt, error=prompt.error)
            if not self.good:
                return FAILED
            plan = None
            # Groups of lines are checked one by one; a session that goes on, when it is open.
            if self.generate.input_jsonl is None and self.good[0].text:
                plan = self._plan()
                plan.require()  # before the weights are loaded
            with self._engine() as engine:
                self.say(engine.config_line())
                if plan is not None and plan.method != "full":
                    self.say(plan.window_line())
                self._start_recording()
                try:
                    if self.generate.input_jsonl is None:
                        self._answer_one(engine, output)
                    else:
                        self._answer_all(engine, output)
                finally:
                    self._write_stats(engine)
                    self._write_selections()
                    self._write_timeline(engine)
                self.say(summary(engine.stats()))
                if self.generate.stats:
                    print(stats_table(engine.stats()), file=sys.stderr, flush=True)
        if self.signals.requested:
            complain("stopped: what was made until then is kept")
        return FAILED if self.failed or self.signals.requested else DONE

    def _plan(self) -> Plan:
        """The plan of the batch that needs most: the longest prompts together."""
        from kvdrive_jax.models.tokenizer import Tokenizer
        from kvdrive_jax.plan import plan_for

        tokenizer = Tokenizer.from_pretrained(self.generate.model)
        lengths = [len(encode(tokenizer, prompt.text, self.generate)) for prompt in self.good]
        config = self.options.config
        longest = sorted(lengths, reverse=True)[: config.batch_size]
        return plan_for(self.generate.model, config, longest, self.generate.max_new_tokens)

    def _engine(self) -> Engine:
        from kvdrive_jax.engine import Engine

        generate = self.generate
        return Engine.from_pretrained(
            generate.model, self.options.config, quiet=generate.quiet, cache_dir=generate.cache_dir
        )

    def _request(self) -> dict[str, Any]:
        generate = self.generate
        return {
            "max_new_tokens": generate.max_new_tokens,
            "sampling": self.options.sampling,
            "stop": generate.stop,
            "ignore_eos": generate.ignore_eos,
            "chat": generate.chat,
            "system": generate.system,
            "recorder": self.recorder,
            "timeline": self.timeline,
        }

    @contextlib.contextmanager
    def _output(self) -> Iterator[TextIO]:
        """Where answers go: stdout in UTF-8, or the file of --output-jsonl."""
        path = self.generate.output_jsonl
        if path is not None:
            with open(path, "w", encoding="utf-8", newline="\n") as file:
                yield file
            return
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(encoding="utf-8", errors="replace", newline="\n")
        yield sys.stdout

    def _write(self, output: TextIO, text: str) -> None:
        try:
            output.write(text)
            output.flush()
        except BrokenPipeError as error:
            raise OutputClosed from error

    def _answer_one(self, engine: Engine, output: TextIO) -> None:
        """Stream one answer; it ends with a line break if it does not have one."""
        prompt = self.good[0]
        generation, last = None, ""
        generate = self.generate
        session = None
        if generate.load_session is not None:
            session = engine.load_session(generate.load_session)
            self.say(
                f"session: {len(session.tokens):,} tokens, {format_size(session.archive.nbytes)} "
                f"in {generate.load_session}"
            )
        stream = engine.stream(
            prompt.text or None,
            session=session,
            save_session=generate.save_session,
            **self._request(),
        )
        with contextlib.closing(stream):
            for event in stream:
                self.signals.gentle = self.made_text = True
                self._write(output, event.text)
                last = event.text or last
                generation = event.generation
                if self.signals.requested:
                    break
        if last and not last.endswith("\n"):
            self._write(output, "\n")
        if session is not None:
            entry = engine.stats()["sessions"][0]
            reused, total = entry["reused_tokens"], entry["prompt_tokens"]
            self.say(f"session: reused {reused:,} of {total:,} tokens")
        if generation is not None and generation.error is not None:
            self.failed = True
            complain(generation.error)
        if generate.save_session is not None:
            saved = engine.stats()["sessions"][0]["saved_bytes"]
            if saved is None and generation is None:
                complain(f"the session is not saved in {generate.save_session}")
            elif saved is not None:
                self.say(f"session: {format_size(saved)} saved in {generate.save_session}")

    def _answer_all(self, engine: Engine, output: TextIO) -> None:
        """Answer the lines of --input-jsonl; each result is written when its session ends."""
        request = self._request()
        chat, system = request.pop("chat"), request.pop("system")
        accepted: list[Prompt] = []
        encoded: list[list[int]] = []
        for prompt in self.good:
            try:  # a line that is refused does not stop the others; nothing runs before iteration
                ids = engine.encode(prompt.text, chat=chat, system=system)
                engine.stream_ids([ids], **request)
            except REFUSALS as error:
                self._refused(output, prompt, error)
                continue
            accepted.append(prompt)
            encoded.append(ids)
        if not accepted:
            return
        begun: dict[int, list[str]] = {}  # text of the sessions under way
        progress = Progress("answered", len(accepted), "prompts", quiet=self.generate.quiet)
        done, stream = 0, engine.stream_ids(encoded, **request)
        reason, message = "cancelled", None
        try:
            with contextlib.closing(stream):
                for event in stream:
                    begun.setdefault(event.session, []).append(event.text)
                    if event.generation is not None:
                        del begun[event.session]
                        self._write_generation(output, accepted[event.session], event.generation)
                        done += 1
                        progress.finish(f"answered {done} of {len(accepted)} prompts")
                    self.made_text, self.signals.gentle = True, bool(begun)
                    if self.signals.requested:
                        break
        except Exception as error:
            reason, message = "error", f"{type(error).__name__}: {error}"
            raise
        finally:
            for session, texts in sorted(begun.items()):
                self._write_line(
                    output,
                    accepted[session],
                    text="".join(texts),
                    finish_reason=reason,
                    prompt_tokens=len(encoded[session]),
                    error=message,
                )

    def _write_generation(self, output: TextIO, prompt: Prompt, generation: Generation) -> None:
        if generation.finish_reason == "error":
            self.failed = True
            complain(f"line {prompt.line}: {generation.error}")
        self._write_line(
            output,
            prompt,
            text=generation.text,
            finish_reason=generation.finish_reason,
            prompt_tokens=generation.stats.get("prompt_tokens"),
            new_tokens=len(generation.token_ids),
            error=generation.error,
        )

    def _refused(self, output: TextIO, prompt: Prompt, error: Exception) -> None:
        self.failed = True
        complain(f"line {prompt.line}: {error}")
        self._write_line(output, prompt, error=str(error))

    def _write_line(
        self,
        output: TextIO,
        prompt: Prompt,
        *,
        text: str = "",
        finish_reason: str = "error",
        prompt_tokens: int | None = None,
        new_tokens: int | None = None,
        error: str | None = None,
    ) -> None:
        """One object of --output-jsonl, whole or not at all."""
        line = {
            "index": prompt.index,
            "text": text,
            "finish_reason": finish_reason,
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "error": error,
        }
        self._write(output, json.dumps(line, ensure_ascii=False) + "\n")

    def _start_recording(self) -> None:
        if self.generate.record_trace is not None:
            from kvdrive_jax.pipeline.recorder import TraceRecorder

            depth = self.generate.trace_depth
            self.recorder = TraceRecorder(self.generate.model, math.inf if depth is None else depth)

    def _write_selections(self) -> None:
        """--record-trace: what was recorded until now."""
        path = self.generate.record_trace
        if path is None or self.recorder is None:
            return
        from kvdrive_jax.window.trace import write_traces

        traces = self.recorder.take()
        write_traces(traces, path)
        size = format_size(os.path.getsize(path))
        self.say(f"trace: {sum(trace.steps for trace in traces)} steps, {size} in {path}")

    def _write_stats(self, engine: Engine) -> None:
        """--stats-json, in one piece: the old file stays until the new one is complete."""
        path = self.generate.stats_json
        if path is None:
            return
        with whole_file(path) as file:
            file.write(json.dumps(engine.stats(), indent=2) + "\n")

    def _write_timeline(self, engine: Engine) -> None:
        """--trace: what ran when, until now."""
        path = self.generate.trace
        if path is None or self.timeline is None:
            return
        stats = engine.stats()
        about = {name: stats[name] for name in ("model", "method", "device", "dtype")}
        about["configuration"] = engine.config_line()
        spans = write_timeline(self.timeline, path, about)
        steps, size = len(self.timeline.steps), format_size(os.path.getsize(path))
        self.say(f"trace: {spans:,} spans, {steps:,} steps, {size} in {path}")
        if self.timeline.dropped:
            self.say(f"trace: {self.timeline.dropped:,} later spans are not in it")


def encode(tokenizer: Tokenizer, text: str, generate: GenerateConfig) -> list[int]:
    """Token ids of a prompt as the engine will see it, chat template included."""
    chat = tokenizer.has_template if generate.chat is None else generate.chat
    if generate.system is not None and not chat:
        raise ValueError("system needs chat: this prompt goes to the model as plain text")
    if chat:
        return tokenizer.encode_chat(text, generate.system)
    return tokenizer.encode(text)


def complain(message: object) -> None:
    """An error for the user, also with --quiet."""
    print(f"error: {message}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; SystemExit only from --help and usage errors."""
    debug = False
    run: Run | None = None
    try:
        options = parse_command_line(argv)
        debug = options.debug
        check_outputs(options)
        prompts = read_prompts(options.generate)
        run = Run(options, prompts)
        for prompt in run.bad:
            complain(prompt.error)
        return run.plan() if options.plan else run.serve()
    except KeyboardInterrupt:
        complain("stopped")
        return FAILED
    except OutputClosed:
        # Nobody reads on: not even Python's own flush at exit may fail.
        with open(os.devnull, "w") as nowhere, contextlib.suppress(OSError, ValueError):
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if debug:
            traceback.print_exc()
        refused = isinstance(error, REFUSALS) and not (run is not None and run.made_text)
        named = str(error) if refused and str(error) else f"{type(error).__name__}: {error}"
        complain(named)
        if not refused and not debug:
            print("the traceback is shown with --debug", file=sys.stderr)
        return USAGE if refused else FAILED


if __name__ == "__main__":
    sys.exit(main())
