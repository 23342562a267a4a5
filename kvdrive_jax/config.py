"""Configuration: frozen dataclasses, one per concern, one TOML format, flags made from them.

Every field's ``metadata`` carries its help text; ``generate`` builds its flags from it, so that
the API, the file and the command line cannot drift apart. Limits that need no model are checked
here, at construction; limits that need one are checked by ``plan``.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

GroupRule = Literal["softmax-sum", "softmax-max", "max", "mean"]
Estimate = Literal["none", "chunks", "clusters"]
MethodName = Literal["kvdrive", "full"]
ScheduleName = Literal["overlapped", "sequential", "speculative"]
MissListWay = Literal["auto", "copy", "callback"]
FetchName = Literal["auto", "staged", "direct"]
EvictionName = Literal["smoothed", "lookahead", "lru", "lfu", "fifo", "last-step", "none"]
Attend = Literal["selection", "resident"]
SyncName = Literal["adaptive", "hierarchical", "blockwise", "layerwise"]
DramEviction = Literal["ranked", "lru"]
WarmUp = Literal["per-head", "aggregated", "none"]
Precision = Literal["model", "int8", "int4"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
WeightsName = Literal["model", "int8"]

DEFAULT_BUDGET_TOKENS = 2048
FEW_CPUS = 4
"""With no more, reading ahead takes from decode more than it gives."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_size(text: str | int, name: str = "size") -> int:
    """Bytes of a size such as ``512MiB``, ``8GiB``, ``1.5GB`` or ``4096``.

    Raises ValueError naming ``name`` when the text is not a size of at least zero bytes.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError(f"{name} must be a size of at least 0 bytes, got {text}")
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{name} must be a size such as 512MiB, 8GiB or 4096, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_budget(text: str | int | float, name: str = "budget") -> int | float:
    """A budget from text: an integer is tokens, a value below 1 a ratio of the context."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or (value >= 1 and value != int(value)):
        raise ValueError(
            f"{name} must be a whole number of tokens, or a ratio below 1, got {text!r}"
        )
    return value if 0 < value < 1 else int(value)


def parse_window(text: str | int | float, name: str = "window") -> float | None:
    """A multiple of the budget from text; ``auto`` is None."""
    if text == "auto":
        return None
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"{name} must be 0, a multiple of the budget of at least 1, or auto, got {text!r}"
        ) from None


def format_size(nbytes: int) -> str:
    """Bytes for people: ``98.2 MiB``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def _option(default: Any, help: str, *, parse: Any = None, flag: str | None = None) -> Any:
    metadata = {"help": help, "parse": parse, "flag": flag}
    return field(default=default, metadata=metadata)


def _require(condition: bool, name: str, expected: str, got: Any) -> None:
    if not condition:
        raise ValueError(f"{name} must be {expected}, got {got!r}")


def _positive_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@dataclass(frozen=True, kw_only=True)
class RetrievalConfig:
    """What is attended to: budget, chunks, clusters, and the tokens always kept.

    Raises ValueError from the constructor when a value is out of range.
    """

    budget: int | float | None = _option(
        None,
        "tokens each kv head may attend to beside sink and local: an integer is tokens, a value "
        f"below 1 a ratio of the prompt (default: {DEFAULT_BUDGET_TOKENS} tokens, or the context)",
        parse=parse_budget,
    )
    chunk_size: int = _option(4, "consecutive tokens that are selected and moved together")
    index: str = _option(
        "moments",
        "what ranks chunks, NAME or NAME:BITS: clusters, chunks, bounds or moments, the last three "
        "in bf16, 8, 4 or 2 bits",
    )
    scan_one_in: int = _option(
        1,
        "read all spans of a coarse index and the full index of one span in so many (moments only; "
        "1 reads all of it)",
    )
    estimate: Estimate = _option(
        "none",
        "what stands for the chunks that a step does not select: nothing, each chunk's mean, or "
        "the means of clusters",
    )
    tokens_per_cluster: int = _option(16, "tokens per centroid of clusters")
    sink: int = _option(4, "first tokens, always attended")
    local: int = _option(64, "last tokens, always attended")
    group_rule: GroupRule = _option(
        "softmax-sum", "how the query heads of one kv head are combined when chunks are ranked"
    )
    observation: int = _option(32, "last prompt queries that decide where a chunk starts")
    segment_tokens: int = _option(8192, "tokens clustered together by one k-means")
    kmeans_rounds: int = _option(4, "rounds of k-means when the index is built")
    flush_tokens: int = _option(256, "generated tokens moved into the index and store at once")

    def __post_init__(self) -> None:
        _require(
            _positive_int(self.chunk_size), "chunk_size", "a positive integer", self.chunk_size
        )
        budget = self.budget
        if budget is not None:
            _require(
                isinstance(budget, int | float) and not isinstance(budget, bool) and budget > 0,
                "budget",
                "a positive number of tokens, or a ratio below 1",
                budget,
            )
            if budget >= 1:
                _require(budget == int(budget), "budget", "a whole number of tokens", budget)
                _require(
                    budget >= self.chunk_size,
                    "budget",
                    f"at least one chunk (chunk_size = {self.chunk_size} tokens)",
                    budget,
                )
        for name in ("tokens_per_cluster", "observation", "kmeans_rounds", "local", "scan_one_in"):
            value = getattr(self, name)
            _require(_positive_int(value), name, "a positive integer", value)
        _require(
            isinstance(self.sink, int) and self.sink >= 0, "sink", "an integer >= 0", self.sink
        )
        for name, kind in (("group_rule", GroupRule), ("estimate", Estimate)):
            choices = get_args(kind)
            _require(getattr(self, name) in choices, name, f"one of {choices}", getattr(self, name))
        for name in ("segment_tokens", "flush_tokens"):
            value = getattr(self, name)
            _require(
                _positive_int(value) and value >= self.chunk_size,
                name,
                f"at least one chunk (chunk_size = {self.chunk_size} tokens)",
                value,
            )

    def budget_tokens(self, prompt_tokens: int, context_length: int) -> int:
        """Budget in tokens for a prompt; raises ValueError when it exceeds the context length."""
        if self.budget is None:
            return max(self.chunk_size, min(DEFAULT_BUDGET_TOKENS, context_length))
        if self.budget < 1:
            return max(self.chunk_size, math.ceil(self.budget * prompt_tokens))
        if self.budget > context_length:
            raise ValueError(
                f"budget must be at most the context length, {context_length} tokens, "
                f"got {self.budget}: give a smaller budget, or a ratio below 1"
            )
        return int(self.budget)


FIXED_WINDOWS = {"none": 0.0, "last-step": 1.0}
"""Ways to evict that are a window of one size: nothing is kept, or the last step's selection."""


@dataclass(frozen=True, kw_only=True)
class WindowConfig:
    """The window in HBM. Raises ValueError from the constructor when a value is out of range."""

    multiple: float | None = _option(
        None,
        "window size as a multiple of the budget: 0 (keep nothing), at least 1, or auto: all "
        "chunks if they fit the HBM budget, else what a profile of the model gives each layer and "
        "head, else the largest that fits (default: auto)",
        parse=parse_window,
        flag="window",
    )
    profile: str | None = _option(
        None,
        "sizes per layer and head from this file of `python -m kvdrive_jax.profile`, with --window "
        "as their mean",
        flag="window-profile",
    )
    eviction: EvictionName = _option(
        "smoothed",
        "what leaves a full window: the lowest score smoothed over steps (smoothed) or of this "
        "step (lookahead), what was selected longest ago (lru), least often (lfu) or came first "
        "(fifo); last-step is --window 1, none is --window 0",
    )
    attend: Attend = _option(
        "selection",
        "what is attended to: the selection, or everything in the window as well (answers then "
        "depend on the window)",
    )

    def __post_init__(self) -> None:
        multiple = self.multiple
        _require(
            multiple is None
            or (
                isinstance(multiple, int | float)
                and not isinstance(multiple, bool)
                and (multiple == 0 or 1 <= multiple < math.inf)
            ),
            "window",
            "0, a multiple of the budget of at least 1, or auto",
            multiple,
        )
        for name, kind in (("eviction", EvictionName), ("attend", Attend)):
            choices = get_args(kind)
            _require(getattr(self, name) in choices, name, f"one of {choices}", getattr(self, name))
        fixed = FIXED_WINDOWS.get(self.eviction)
        if fixed is not None:
            _require(
                multiple in (None, fixed),
                "window",
                f"{fixed:g} with eviction {self.eviction}",
                multiple,
            )
            _require(
                self.profile is None,
                "window_profile",
                f"None with eviction {self.eviction}",
                self.profile,
            )
        if self.profile is not None:
            _require(
                multiple is None or multiple >= 1, "window", "at least 1 with a profile", multiple
            )

    @property
    def uniform(self) -> float | None:
        """The multiple that every layer and head gets, or None when it is still to be found."""
        return FIXED_WINDOWS.get(self.eviction, self.multiple)


@dataclass(frozen=True, kw_only=True)
class TierConfig:
    """Bytes each tier may use. ``None`` means: find out from the machine (see ``plan``)."""

    hbm_budget: int | None = _option(
        None, "device memory for weights, activations, index and windows", parse=parse_size
    )
    dram_budget: int | None = _option(None, "host memory for KV and staging", parse=parse_size)
    ssd_budget: int | None = _option(None, "bytes on disk for KV (needs ssd_dir)", parse=parse_size)
    ssd_dir: str | None = _option(None, "directory of the SSD tier; without it there is none")
    extent_bytes: int = _option(4096, "unit of SSD reads, in whole pages", parse=parse_size)
    fetch: FetchName = _option(
        "auto",
        "how pages come from DRAM: staged (gathered by the host), direct (by the GPU, from pinned "
        "memory), or auto: direct where it works and DRAM holds everything",
    )
    sync: SyncName = _option(
        "adaptive",
        "what DRAM does for pages on SSD: keeps those of all heads alike, where each is worth most "
        "(adaptive), the same number for each head (hierarchical), none (blockwise), or none and "
        "whole layers are read (layerwise)",
    )
    dram_eviction: DramEviction = _option(
        "ranked",
        "what leaves DRAM: what was read or ranked close to selection longest ago (ranked), or "
        "read longest ago (lru)",
    )
    prefetch: float | None = _option(
        None,
        "read ahead from SSD to DRAM what ranks within this multiple of the budget; 1: nothing "
        f"(default: 1.25 with more than {FEW_CPUS} CPUs, which it needs beside decode, else 1)",
    )
    warm_up: WarmUp = _option(
        "per-head",
        "what windows and DRAM hold when decode starts: what the prompt's last queries attend to, "
        "by head, or summed over heads and layers; or nothing",
    )
    dram_dtype: Precision = _option(
        "model", "of KV in DRAM; below the model's own, answers depend on where KV lies"
    )
    ssd_dtype: Precision | None = _option(
        None, "of KV on SSD, at most as fine as dram_dtype (default: the same)"
    )

    def __post_init__(self) -> None:
        for name in ("hbm_budget", "dram_budget", "ssd_budget"):
            value = getattr(self, name)
            _require(
                value is None or (isinstance(value, int) and value >= 0),
                name,
                "a size of at least 0 bytes",
                value,
            )
        _require(
            _positive_int(self.extent_bytes), "extent_bytes", "a positive size", self.extent_bytes
        )
        for name, kind in (
            ("fetch", FetchName),
            ("sync", SyncName),
            ("dram_eviction", DramEviction),
            ("warm_up", WarmUp),
            ("dram_dtype", Precision),
            ("ssd_precision", Precision),
        ):
            choices = get_args(kind)
            _require(getattr(self, name) in choices, name, f"one of {choices}", getattr(self, name))
        _require(
            self.dram_dtype == "model" or self.fetch != "direct",
            "dram_dtype",
            "model with fetch direct",
            self.dram_dtype,
        )
        fineness = get_args(Precision)
        _require(
            fineness.index(self.ssd_precision) >= fineness.index(self.dram_dtype),
            "ssd_dtype",
            f"at most as fine as dram_dtype = {self.dram_dtype}",
            self.ssd_dtype,
        )
        _require(
            self.prefetch is None
            or (
                isinstance(self.prefetch, int | float)
                and not isinstance(self.prefetch, bool)
                and 1 <= self.prefetch < math.inf
            ),
            "prefetch",
            "a multiple of the budget of at least 1",
            self.prefetch,
        )
        if self.ssd_budget and self.ssd_dir is None:
            raise ValueError("ssd_budget needs ssd_dir: say where the SSD tier may write")

    @property
    def read_ahead(self) -> float:
        """Multiple of the budget within which pages are read ahead."""
        if self.prefetch is not None:
            return self.prefetch
        return 1.25 if (os.cpu_count() or 1) > FEW_CPUS else 1.0

    @property
    def ssd_precision(self) -> Precision:
        """Of KV on SSD."""
        return self.ssd_dtype or self.dram_dtype


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """When select, fetch and compute run (paper section 6); never what they do."""

    schedule: ScheduleName = _option(
        "overlapped",
        "order of select, fetch and compute: overlapped over micro-batches, sequential, or "
        "speculative (each layer selects by the input of the one before: other tokens)",
    )
    micro_batch: int | None = _option(
        None, "sessions that one select and fetch work on, at most (default: calibrated)"
    )
    cohorts: int | None = _option(
        None,
        "parts of the batch that go through the layers apart, so that one computes while another "
        "fetches, at most (default: calibrated)",
    )
    miss_list: MissListWay = _option(
        "auto", "how ids of missing chunks reach the host: a polled copy or a callback"
    )
    calibrate: str = _option(
        "auto",
        "measure what suits this machine (micro-batch, cohorts, how large windows pay) and keep it "
        "in the user's cache (auto) or in this FILE; off: fixed defaults",
    )

    def __post_init__(self) -> None:
        for name, choices in (
            ("schedule", get_args(ScheduleName)),
            ("miss_list", get_args(MissListWay)),
        ):
            value = getattr(self, name)
            _require(value in choices, name, f"one of {', '.join(choices)}", value)
        for name in ("micro_batch", "cohorts"):
            value = getattr(self, name)
            _require(value is None or _positive_int(value), name, "a positive integer", value)
        _require(
            isinstance(self.calibrate, str) and self.calibrate != "",
            "calibrate",
            "auto, off or a file",
            self.calibrate,
        )


@dataclass(frozen=True, kw_only=True)
class KVDriveConfig:
    """Everything that is fixed for the life of an Engine."""

    method: MethodName = _option("kvdrive", "how attention is served: kvdrive, or full attention")
    dtype: DtypeName = _option(
        "auto", "of weights, activations and KV (auto: float32 on CPU, the checkpoint's on a GPU)"
    )
    weights_dtype: WeightsName = _option(
        "model",
        "of matrices: the dtype above, or int8 in blocks of 32 (CPU only), which take half of the "
        "memory, are no faster yet, and change answers a little",
    )
    context_length: int | None = _option(
        None, "longest prompt plus new tokens (default: the model's maximum)"
    )
    batch_size: int = _option(4, "prompts decoded together")
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    window: WindowConfig = field(default_factory=WindowConfig)
    tiers: TierConfig = field(default_factory=TierConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)

    def __post_init__(self) -> None:
        for name, choices in (
            ("method", get_args(MethodName)),
            ("dtype", get_args(DtypeName)),
            ("weights_dtype", get_args(WeightsName)),
        ):
            value = getattr(self, name)
            _require(value in choices, name, f"one of {', '.join(choices)}", value)
        _require(
            self.context_length is None or _positive_int(self.context_length),
            "context_length",
            "a positive integer",
            self.context_length,
        )
        _require(
            _positive_int(self.batch_size), "batch_size", "a positive integer", self.batch_size
        )
        # What the unselected would have contributed depends on queries that it has only guessed.
        _require(
            self.pipeline.schedule != "speculative" or self.retrieval.estimate == "none",
            "estimate",
            "none with schedule speculative",
            self.retrieval.estimate,
        )

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, as they would stand in a TOML file."""
        return dataclasses.asdict(self)


SECTIONS: dict[str, type] = {
    "retrieval": RetrievalConfig,
    "window": WindowConfig,
    "tiers": TierConfig,
    "pipeline": PipelineConfig,
}


def build(cls: type, values: dict[str, Any], where: str) -> Any:
    """``cls(**values)`` with each value parsed; unknown keys raise ValueError naming ``where``."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r} in {where}; known: {', '.join(fields)}")
    parsed = {}
    for name, value in values.items():
        parse = fields[name].metadata.get("parse")
        parsed[name] = parse(value, name) if parse is not None and value is not None else value
    return cls(**parsed)


def config_from_dict(values: dict[str, Any], where: str = "config") -> KVDriveConfig:
    """KVDriveConfig from nested plain values; unknown keys and bad values raise ValueError."""
    top = {}
    for name, value in values.items():
        if name in SECTIONS:
            _require(isinstance(value, dict), f"{where}: {name}", "a table", value)
            top[name] = build(SECTIONS[name], value, f"{where}, table [{name}]")
        else:
            top[name] = value
    return build(KVDriveConfig, top, where)  # type: ignore[no-any-return]


def read_toml(path: str) -> dict[str, Any]:
    """The tables of a TOML file; ValueError names the file when it is missing or malformed."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config file {path} is not TOML: {error}") from error
