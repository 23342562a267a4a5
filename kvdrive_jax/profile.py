"""``python -m kvdrive_jax.profile``: what a model selects, and which windows that asks for.

    record   traces of a model over texts, and a profile of window sizes made of them
    replay   any policy and window size over recorded traces, without the model
    make     a profile of window sizes from recorded traces

A profile in its default place is found by every later run of that model, budget and index with
``--window auto``. Results go to stdout, the rest to stderr. Exit status as of ``generate``.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvdrive_jax.cli_options import add_flags
from kvdrive_jax.config import (
    FIXED_WINDOWS,
    KVDriveConfig,
    RetrievalConfig,
    TierConfig,
    WindowConfig,
    config_from_dict,
    format_size,
)
from kvdrive_jax.telemetry import Progress

if TYPE_CHECKING:
    from kvdrive_jax.window.profile import Profile
    from kvdrive_jax.window.trace import Trace

DONE, FAILED, USAGE = 0, 1, 2

ENGINE_FLAGS = {"dtype", "context_length"}


def record(options: argparse.Namespace) -> int:
    """Read texts with a model, decode, keep what every step ranks."""
    from kvdrive_jax.engine import Engine
    from kvdrive_jax.pipeline.recorder import TraceRecorder
    from kvdrive_jax.profile_texts import built_in, from_file
    from kvdrive_jax.window.trace import write_traces

    config = _config(options)
    if config.window.eviction in FIXED_WINDOWS:
        raise ValueError(f"eviction {config.window.eviction} has one window size: none to profile")
    traces: list[Trace] = []
    with Engine.from_pretrained(options.model, config, quiet=options.quiet) as engine:
        _say(options, engine.config_line())
        tokens = min(options.tokens, engine.context_length - options.steps)
        if tokens < 1:
            raise ValueError(
                f"tokens must leave room for {options.steps} steps in a context of "
                f"{engine.context_length}, got {options.tokens}"
            )
        if options.text is None:
            prompts = built_in(engine.tokenizer, tokens)
        else:
            prompts = [from_file(engine.tokenizer, path, tokens) for path in options.text]
        for prompt in prompts:
            _say(options, f"text {prompt.name}: {len(prompt.ids):,} tokens")
            recorder = TraceRecorder(options.model, options.trace_depth)
            stream = engine.stream_ids(
                [prompt.ids[:tokens]],
                max_new_tokens=options.steps,
                ignore_eos=True,
                recorder=recorder,
            )
            failure = [event.generation.error for event in stream if event.generation is not None]
            if failure and failure[0] is not None:
                raise RuntimeError(f"text {prompt.name}: {failure[0]}")
            traces += [_named(trace, prompt.name) for trace in recorder.take()]
    if options.traces is not None:
        write_traces(traces, options.traces)
        _say(options, f"traces: {options.traces}")
    return _make(traces, config.window.eviction, options)


def replay(options: argparse.Namespace) -> int:
    """Hit rate of every policy and window size, by trace."""
    from kvdrive_jax.window.allocation import slots_of
    from kvdrive_jax.window.layout import WindowLayout
    from kvdrive_jax.window.replay import replay as run

    traces = _read(options.files, options.budget)
    print("text\tpolicy\twindow\thit rate\tbytes per step")
    for trace in traces:
        for policy in options.eviction:
            # Policies that are a window of one size have no other.
            sizes = [FIXED_WINDOWS[policy]] if policy in FIXED_WINDOWS else options.window
            for multiple in sizes:
                slots = slots_of(multiple, trace.info.selected)
                layout = WindowLayout.uniform(
                    trace.layers, trace.kv_heads, slots, trace.info.selected
                )
                result = run(trace, layout, policy)
                per_step = result.missed.sum() / trace.steps * trace.info.page_bytes
                print(
                    f"{trace.info.text}\t{policy}\tx{multiple:g}\t{100 * result.hit_rate:.2f} %\t"
                    f"{format_size(round(per_step))}",
                    flush=True,
                )
    return DONE


def make(options: argparse.Namespace) -> int:
    """A profile from trace files."""
    return _make(_read(options.files, options.budget), options.eviction, options)


def _make(traces: Sequence[Trace], eviction: str, options: argparse.Namespace) -> int:
    """Write the profile of ``traces`` and tell what it promises."""
    from kvdrive_jax.window.measure import profile_of
    from kvdrive_jax.window.profile import merge, profile_path, write_profile

    if not traces:
        raise ValueError("there is no trace to make a profile of")
    start = time.perf_counter()
    progress = Progress("window sizes", len(traces), "traces", quiet=options.quiet)
    profiles = []
    for trace in traces:
        profiles.append(profile_of(trace, eviction))
        progress.update(len(profiles))
    profile = merge(profiles)
    progress.finish(
        f"window sizes: {len(traces)} traces replayed in {time.perf_counter() - start:.1f} s"
    )
    path = options.output or profile_path(profile.key)
    write_profile(profile, path)
    print(_table(profile))
    print(f"profile: {path}")
    return DONE


def _table(profile: Profile) -> str:
    """What each mean window size serves, the same everywhere and distributed."""
    from kvdrive_jax.window.allocation import greedy, slots_of

    key = profile.key
    selected = key.budget // key.chunk_size
    layers, kv_heads, _ = profile.hits.shape
    wanted = layers * kv_heads * profile.selected
    lines = [
        f"{profile.model}: {layers} layers x {kv_heads} kv heads, budget {key.budget} tokens, "
        f"{sum(text.steps for text in profile.texts):,} steps of {len(profile.texts)} texts",
        "window\thit rate, the same everywhere\thit rate, by layer and head",
    ]
    for multiple in profile.multiples[1:]:
        rows = layers * kv_heads * slots_of(multiple, selected)
        same = profile.hits[..., profile.multiples.index(multiple)].sum() / wanted
        found = greedy(profile.hits, profile.multiples, selected, rows).hits / wanted
        lines.append(f"x{multiple:g}\t{100 * same:.2f} %\t{100 * found:.2f} %")
    return "\n".join(lines)


def _named(trace: Trace, name: str) -> Trace:
    return dataclasses.replace(trace, info=dataclasses.replace(trace.info, text=name))


def _read(files: Sequence[str], budget: int | None) -> list[Trace]:
    """Traces of files; at another budget than they were recorded with if one is given."""
    from kvdrive_jax.window.trace import read_traces, with_budget

    traces = [trace for file in files for trace in read_traces(file)]
    return traces if budget is None else [with_budget(trace, budget) for trace in traces]


def _config(options: argparse.Namespace) -> KVDriveConfig:
    """The engine's configuration from the flags that were given."""
    tables: dict[str, Any] = {"batch_size": 1}
    for dest, value in vars(options).items():
        table, dot, name = dest.partition(".")
        if dot:
            tables.setdefault(table, {})[name] = value
        elif dest in ENGINE_FLAGS:
            tables[dest] = value
    return config_from_dict(tables, "the command line")


def _say(options: argparse.Namespace, line: str) -> None:
    if not options.quiet:
        print(line, file=sys.stderr, flush=True)


def _at_least_one(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return value


def _depth(text: str) -> float:
    value = _number(text)
    if not value >= 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 budget, got {text!r}")
    return value


def _window(text: str) -> float:
    value = _number(text)
    if not (value == 0 or 1 <= value < math.inf):
        raise argparse.ArgumentTypeError(f"must be 0 or at least 1, got {text!r}")
    return value


def _number(text: str) -> float:
    """NaN, which no limit lets through, for what is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _parser() -> argparse.ArgumentParser:
    from kvdrive_jax.window.eviction import POLICIES
    from kvdrive_jax.window.replay import BELADY

    parser = argparse.ArgumentParser(
        prog="python -m kvdrive_jax.profile",
        description="Trace what a model selects and find the window sizes that suit it.",
        allow_abbrev=False,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    commands = parser.add_subparsers(dest="command", required=True)
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument(
        "--output", metavar="FILE", help="write the profile here (default: where runs look for it)"
    )
    output.add_argument("--quiet", action="store_true", help="no progress on stderr")

    recording = commands.add_parser(
        "record", parents=[output], help="traces of a model over texts, and a profile of them"
    )
    recording.set_defaults(run=record)
    recording.add_argument(
        "--model", default="demo", help="as of generate (default: the bundled model)"
    )
    recording.add_argument(
        "--text",
        action="append",
        metavar="FILE",
        help="a text, may be given more than once (default: five prompts of what is installed)",
    )
    recording.add_argument(
        "--tokens",
        type=_at_least_one,
        default=6144,
        metavar="N",
        help="of each prompt (default: 6144)",
    )
    recording.add_argument(
        "--steps",
        type=_at_least_one,
        default=128,
        metavar="N",
        help="decoded after each (default: 128)",
    )
    recording.add_argument("--traces", metavar="FILE", help="keep the traces, for replay and make")
    recording.add_argument(
        "--trace-depth",
        type=_depth,
        default=math.inf,
        metavar="X",
        help="chunks kept per step and head, as a multiple of the budget (default: all of them)",
    )
    add_flags(recording, "", KVDriveConfig, only=ENGINE_FLAGS)
    add_flags(recording, "retrieval", RetrievalConfig)
    add_flags(recording, "window", WindowConfig, only={"eviction"})
    add_flags(recording, "tiers", TierConfig)

    traces = argparse.ArgumentParser(add_help=False)
    traces.add_argument("files", nargs="+", metavar="FILE", help="traces of --record-trace")
    traces.add_argument(
        "--budget",
        type=_at_least_one,
        metavar="N",
        help="as if this many tokens had been selected (default: as recorded)",
    )
    replaying = commands.add_parser("replay", parents=[traces], help="policies over traces")
    replaying.set_defaults(run=replay)
    replaying.add_argument(
        "--eviction",
        action="append",
        choices=(*POLICIES, BELADY),
        help="may be given more than once (default: all)",
    )
    replaying.add_argument(
        "--window",
        action="append",
        type=_window,
        metavar="X",
        help="size as a multiple of the budget, may be given more than once (default: 1, 2 and 3)",
    )
    making = commands.add_parser("make", parents=[output, traces], help="a profile from traces")
    making.set_defaults(run=make)
    making.add_argument(
        "--eviction",
        choices=tuple(name for name in POLICIES if name not in FIXED_WINDOWS),
        default=WindowConfig().eviction,
        help=f"the policy that the windows will have (default: {WindowConfig().eviction})",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; SystemExit only from --help and usage errors."""
    from kvdrive_jax.window.eviction import POLICIES
    from kvdrive_jax.window.replay import BELADY

    options = _parser().parse_args(argv)
    if options.command == "replay":
        options.eviction = options.eviction or [*POLICIES, BELADY]
        options.window = options.window or [1.0, 2.0, 3.0]
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        print("error: stopped", file=sys.stderr)
        return FAILED
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        refused = isinstance(error, ValueError | NotImplementedError)
        named = str(error) if refused else f"{type(error).__name__}: {error}"
        print(f"error: {named}", file=sys.stderr)
        return USAGE if refused else FAILED


if __name__ == "__main__":
    sys.exit(main())
