"""The command's options: flags and TOML keys, both made from the configuration's dataclass fields.

A field becomes the key of its name in its table of the TOML file, and the flag of its name (or of
``metadata["flag"]``) on the command line. A flag that is given wins over the file; one that is not
leaves the file's value alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin

from kvdrive_jax import config as configuration
from kvdrive_jax.config import KVDriveConfig, config_from_dict, read_toml
from kvdrive_jax.sampling import SamplingConfig
from kvdrive_jax.text import check_stop_strings

PROMPT_SOURCES = ("prompt", "prompt_file", "input_jsonl")
OUTPUT_FILES = ("output_jsonl", "stats_json", "trace", "record_trace")


def _option(default: Any, help: str, *, flag: str | None = None, metavar: str | None = None) -> Any:
    return field(default=default, metadata={"help": help, "flag": flag, "metavar": metavar})


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What one run of the command does: model, prompts, length, outputs.

    Raises ValueError from the constructor when a value is of the wrong kind or out of range.
    """

    model: str = _option(
        "demo", "'demo' (the bundled model), a Hugging Face folder, or a .gguf file"
    )
    prompt: str | None = _option(None, "the prompt", metavar="TEXT")
    prompt_file: str | None = _option(None, "read the prompt from a UTF-8 file; - is stdin")
    input_jsonl: str | None = _option(
        None, "one JSON object with a key 'prompt' a line; - is stdin", metavar="FILE"
    )
    output_jsonl: str | None = _option(
        None, "write one JSON object a line of --input-jsonl (default: stdout)", metavar="FILE"
    )
    chat: bool | None = _option(
        None, "use the model's chat template (default: if it has one)", flag="chat"
    )
    system: str | None = _option(None, "system message of the chat template", metavar="TEXT")
    max_new_tokens: int = _option(128, "most tokens to make; 0 only prefills")
    stop: tuple[str, ...] = _option(
        (), "end before this text; may be given more than once", metavar="TEXT"
    )
    ignore_eos: bool = _option(False, "go on after the model's end-of-text tokens")
    cache_dir: str | None = _option(
        None, "keep converted weights here, so that the next start is fast", metavar="DIR"
    )
    stats_json: str | None = _option(
        None, "write what was counted and timed (docs/stats.md)", metavar="FILE"
    )
    stats: bool = _option(False, "print where the time of decode went, and what was moved for it")
    trace: str | None = _option(
        None, "write what ran when, for ui.perfetto.dev (docs/stats.md)", metavar="FILE"
    )
    save_session: str | None = _option(
        None, "save the session here when it ends, to go on with later", metavar="DIR"
    )
    load_session: str | None = _option(
        None,
        "go on with a saved session: without a prompt where it ended; of one that begins with the "
        "same text, only the rest is prefilled",
        metavar="DIR",
    )
    record_trace: str | None = _option(
        None,
        "write what every step ranks, for `python -m kvdrive_jax.profile`",
        metavar="FILE",
    )
    trace_depth: float | None = _option(
        None,
        "chunks a trace tells per step and head, as a multiple of the budget (default: all)",
    )
    quiet: bool = _option(False, "no progress, no summary on stderr")

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(GenerateConfig).items():
            value = getattr(self, name)
            if name == "stop":
                continue
            plain, optional = _without_none(hint)
            kinds = (int, float) if plain is float else plain
            fits = isinstance(value, kinds) and (plain is bool or not isinstance(value, bool))
            if not fits and not (optional and value is None):
                raise ValueError(f"{name} must be {_KINDS[plain]}, got {value!r}")
        if isinstance(self.stop, list):  # as TOML has it
            object.__setattr__(self, "stop", tuple(self.stop))
        check_stop_strings(self.stop)
        for name, text in (("prompt", self.prompt), ("system", self.system), *_named(self.stop)):
            if text is not None and any("\ud800" <= char <= "\udfff" for char in text):
                raise ValueError(f"{name} is not UTF-8: {text!r}")
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {self.max_new_tokens}")
        if not self.model:
            raise ValueError("model must be 'demo', a folder or a .gguf file, got an empty name")
        sources = [name for name in PROMPT_SOURCES if getattr(self, name) is not None]
        if len(sources) > 1:
            raise ValueError(f"give only one of {_flags(PROMPT_SOURCES)}, got {_flags(sources)}")
        if self.output_jsonl is not None and self.input_jsonl is None:
            raise ValueError("--output-jsonl needs --input-jsonl")
        for name in ("save_session", "load_session"):
            if self.input_jsonl is not None and getattr(self, name) is not None:
                raise ValueError(f"{_flags([name])} takes one prompt, not --input-jsonl")
        if self.trace_depth is not None:
            if self.record_trace is None:
                raise ValueError("--trace-depth needs --record-trace")
            if not self.trace_depth >= 1:
                raise ValueError(f"trace_depth must be at least 1 budget, got {self.trace_depth}")


def _named(stop: Sequence[str]) -> list[tuple[str, str]]:
    return [("stop", text) for text in stop]


_KINDS: dict[type, str] = {
    str: "a text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
}


@dataclass(frozen=True)
class Options:
    """Everything that the command line and the file said."""

    generate: GenerateConfig
    sampling: SamplingConfig
    config: KVDriveConfig
    plan: bool
    debug: bool


# Where the fields of each dataclass stand in the TOML file, and how --help groups them.
_GROUPS: tuple[tuple[str, str, type], ...] = (
    ("run", "", GenerateConfig),
    ("sampling", "sampling", SamplingConfig),
    ("engine", "", KVDriveConfig),
    ("retrieval: what is attended to", "retrieval", configuration.RetrievalConfig),
    ("window in HBM", "window", configuration.WindowConfig),
    ("tiers", "tiers", configuration.TierConfig),
    ("pipeline", "pipeline", configuration.PipelineConfig),
)

_SAMPLING_HELP = {
    "temperature": "randomness of each choice; 0 takes the likeliest token",
    "top_k": "choose among this many likeliest tokens; 0 means all",
    "top_p": "choose among the likeliest tokens that reach this probability together",
    "seed": "of the random choices: the same seed gives the same text",
}


def parse_command_line(argv: Sequence[str] | None = None) -> Options:
    """Options from flags and, where --config names one, a TOML file.

    Raises ValueError for what the configuration refuses, SystemExit (status 2) for what is no
    valid command line, or (status 0) after --help.
    """
    given = vars(_parser().parse_args(argv))
    path = given.pop("config", None)
    plan, debug = given.pop("plan", False), given.pop("debug", False)
    tables = {} if path is None else read_toml(path)
    if any(name in given for name in PROMPT_SOURCES):  # a prompt given by flag replaces the file's
        for name in PROMPT_SOURCES:
            tables.pop(name, None)
    for dest, value in given.items():
        table, _, name = dest.rpartition(".")
        (tables.setdefault(table, {}) if table else tables)[name] = value
    where = "the command line" if path is None else path
    return _options(tables, where, plan=plan, debug=debug)


def _options(tables: dict[str, Any], where: str, *, plan: bool, debug: bool) -> Options:
    mine = {f.name for f in dataclasses.fields(GenerateConfig)}
    engine = {f.name for f in dataclasses.fields(KVDriveConfig)}
    unknown = sorted(set(tables) - mine - engine - {"sampling"})
    if unknown:
        known = ", ".join(sorted(mine | engine | {"sampling"}))
        raise ValueError(f"unknown key {unknown[0]!r} in {where}; known: {known}")
    sampling = tables.get("sampling", {})
    if not isinstance(sampling, dict):
        raise ValueError(f"{where}: sampling must be a table, got {sampling!r}")
    return Options(
        generate=GenerateConfig(**{k: v for k, v in tables.items() if k in mine}),
        sampling=configuration.build(SamplingConfig, sampling, f"{where}, table [sampling]"),
        config=config_from_dict({k: v for k, v in tables.items() if k in engine}, where),
        plan=plan,
        debug=debug,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvdrive_jax.generate",
        description="Answer a prompt, however long: its KV lives on device, host memory and SSD.",
        epilog="The answer goes to stdout, everything else to stderr. Exit status: 0 done, 1 the "
        "run failed or was stopped, 2 wrong usage.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28, width=100),
    )
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file with the same settings; flags win"
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print where every byte will go and whether it fits, and exit (status 1: it does not)",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    for title, table, cls in _GROUPS:
        add_flags(parser.add_argument_group(title), table, cls)
    return parser


def add_flags(
    group: argparse._ActionsContainer, table: str, cls: type, only: set[str] | None = None
) -> None:
    """A flag for every field of a dataclass, or for those named; ``dest`` is ``table.field``, and
    absent where the flag was not given."""
    hints = typing.get_type_hints(cls)
    for option in dataclasses.fields(cls):
        nested = dataclasses.is_dataclass(_without_none(hints[option.name])[0])
        if not nested and (only is None or option.name in only):
            _add_flag(group, table, option, hints[option.name])


def _add_flag(
    group: argparse._ActionsContainer, table: str, option: dataclasses.Field[Any], hint: Any
) -> None:
    """One flag for one dataclass field."""
    metadata = option.metadata
    name = metadata.get("flag") or option.name
    text = metadata.get("help") or _SAMPLING_HELP[option.name]
    if "(default" not in text and _worth_showing(option.default):
        text += f" (default: {option.default})"
    flag = "--" + name.replace("_", "-")
    keywords: dict[str, Any] = {
        "dest": f"{table}.{option.name}" if table else option.name,
        "help": text.replace("%", "%%"),
        "default": argparse.SUPPRESS,
    }
    plain, optional = _without_none(hint)
    if plain is bool:
        keywords["action"] = argparse.BooleanOptionalAction if optional else "store_true"
        group.add_argument(flag, **keywords)
        return
    if get_origin(plain) is tuple:
        keywords["action"], plain = "append", str
    parse = metadata.get("parse")
    if parse is not None:
        keywords["type"], metavar = _checked(parse, flag), _metavar(option.name)
    elif get_origin(plain) is Literal:
        keywords["choices"], metavar = get_args(plain), None
    else:
        keywords["type"] = _checked(_NUMBERS[plain], flag) if plain in _NUMBERS else str
        metavar = "N" if plain is int else "X" if plain is float else _metavar(option.name)
    if metavar is not None:
        keywords["metavar"] = metadata.get("metavar") or metavar
    group.add_argument(flag, **keywords)


def _worth_showing(default: Any) -> bool:
    return default is not None and default is not False and default != ()


def _integer(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be an integer, got {text!r}") from None


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {text!r}") from None


_NUMBERS: dict[Any, Callable[[str, str], Any]] = {int: _integer, float: _number}


def _checked(parse: Callable[[str, str], Any], flag: str) -> Callable[[str], Any]:
    """``parse`` as argparse wants it: its message is shown, with the usage line above."""

    def convert(text: str) -> Any:
        try:
            return parse(text, flag.removeprefix("--").replace("-", "_"))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _metavar(name: str) -> str:
    if name.endswith(("_file", "_json")):
        return "FILE"
    if name.endswith("_dir"):
        return "DIR"
    known = {
        "model": "MODEL",
        "profile": "FILE",
        "multiple": "X",
        "budget": "N",
        "calibrate": "auto|off|FILE",
        "index": "NAME[:BITS]",
    }
    return known.get(name, "SIZE")


def _without_none(hint: Any) -> tuple[Any, bool]:
    """The type of ``X | None`` without None, and whether None was allowed."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    arms = [arm for arm in get_args(hint) if arm is not types.NoneType]
    plain = arms[0] if len(arms) == 1 else Union[tuple(arms)]  # noqa: UP007 (made at run time)
    return plain, len(arms) < len(get_args(hint))


def _flags(names: Sequence[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)


def _identity(path: str) -> Any:
    """What two names of one file share."""
    if os.path.exists(path):
        status = os.stat(path)
        return status.st_dev, status.st_ino
    return os.path.realpath(path)


def check_outputs(options: Options) -> None:
    """ValueError for output files that cannot be written, or that something else is in, before any
    work is done for them."""
    generate = options.generate
    written: dict[Any, str] = {}
    for name in OUTPUT_FILES:
        path = getattr(generate, name)
        if path is None:
            continue
        flag = _flags([name])
        folder = os.path.dirname(os.path.abspath(path))
        if os.path.isdir(path):
            raise ValueError(f"{flag}: {path} is a directory")
        if not os.path.isdir(folder):
            raise ValueError(f"{flag}: the directory {folder} does not exist")
        if not os.access(path if os.path.exists(path) else folder, os.W_OK):
            raise ValueError(f"{flag}: {path} is not writable")
        same = _identity(path)
        if same in written:
            raise ValueError(f"{flag} must be another file than {written[same]}: {path}")
        written[same] = flag
    others = {
        "--model": generate.model,
        "--prompt-file": generate.prompt_file,
        "--input-jsonl": generate.input_jsonl,
        "--window-profile": options.config.window.profile,
        "--calibrate": options.config.pipeline.calibrate,
    }
    for flag, path in others.items():
        if path is not None and path not in ("-", "demo", "auto", "off"):
            output = written.get(_identity(path))
            if output is not None:
                raise ValueError(f"{output} must be another file than {flag}: {path}")
    for name in ("save_session", "load_session"):
        path = getattr(generate, name)
        if path is None:
            continue
        from kvdrive_jax.tiers.archive import ArchiveWriter, open_archive

        try:  # before a model is loaded: by beginning to save, and by the record of what is there
            if name == "save_session":
                ArchiveWriter(path, {}).close()
            else:
                open_archive(path)
        except ValueError as error:
            raise ValueError(f"{_flags([name])}: {error}") from error
