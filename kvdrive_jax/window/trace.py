"""What a run selected, step by step: enough to replay any policy and window size without the model.

One trace is one session. A file holds the traces of a run: a compressed npz without pickles, a JSON
header and three arrays per session.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

VERSION: Final = 1
LARGEST_BYTES: Final = 16 << 30
"""A file that declares more than this is refused before anything is allocated."""


@dataclass(frozen=True, kw_only=True)
class TraceInfo:
    """Of what model and configuration a trace is; text: what was read, for people."""

    model: str
    digest: str
    text: str
    prompt_tokens: int
    chunk_size: int
    selected: int
    chunk_capacity: int
    page_bytes: int
    index: str
    group_rule: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """The ranking of every step of one session.

    Attributes:
        info: what it is of.
        ids: [steps, L, K, M] int32, the best M chunks, best first, ties to the lowest id; -1 for
            none. The first P are the selection.
        scores: [steps, L, K, M] float32, theirs, -inf for none.
        warm: [L, K, R] int32, the prompt's chunks by importance (paper 7.1), best first.
    """

    info: TraceInfo
    ids: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    warm: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        if self.ids.ndim != 4 or self.scores.shape != self.ids.shape:
            raise ValueError(
                "ids and scores must be [steps, layers, kv_heads, M], got "
                f"{list(self.ids.shape)} and {list(self.scores.shape)}"
            )
        if self.warm.ndim != 3 or self.warm.shape[:2] != self.ids.shape[1:3]:
            raise ValueError(
                f"warm must be [{self.layers}, {self.kv_heads}, R], got {list(self.warm.shape)}"
            )
        if not 1 <= self.info.selected <= self.depth:
            raise ValueError(
                f"a trace must hold at least the selection, got {self.depth} chunks a step and "
                f"selected = {self.info.selected}"
            )
        for name, ids in (("ids", self.ids), ("warm", self.warm)):
            if ids.size and not -1 <= ids.min() <= ids.max() < self.info.chunk_capacity:
                raise ValueError(
                    f"{name} must be chunks below {self.info.chunk_capacity}, or -1, got "
                    f"{ids.min()} to {ids.max()}"
                )

    @property
    def steps(self) -> int:
        """Decode steps."""
        return len(self.ids)

    @property
    def layers(self) -> int:
        """L."""
        return int(self.ids.shape[1])

    @property
    def kv_heads(self) -> int:
        """K."""
        return int(self.ids.shape[2])

    @property
    def depth(self) -> int:
        """M, chunks told per step and head."""
        return int(self.ids.shape[3])

    @property
    def selection(self) -> npt.NDArray[np.int32]:
        """[steps, L, K, P]."""
        return self.ids[..., : self.info.selected]


def with_budget(trace: Trace, budget: int) -> Trace:
    """The trace as if ``budget`` tokens had been selected: what a step attends to would differ a
    little, so this is an estimate of what a run at that budget does.

    Raises ValueError when the trace does not tell so many chunks.
    """
    selected = max(1, budget // trace.info.chunk_size)
    if selected > trace.depth:
        raise ValueError(
            f"budget must be at most {trace.depth * trace.info.chunk_size} tokens, which is what "
            f"the trace of {trace.info.text} tells, got {budget}"
        )
    return replace(trace, info=replace(trace.info, selected=selected))


def write_traces(traces: Sequence[Trace], path: str | os.PathLike[str]) -> None:
    """One file, in one piece: what was there before stays until the new one is complete."""
    arrays: dict[str, Any] = {}
    for number, trace in enumerate(traces):
        small = np.int16 if trace.info.chunk_capacity <= 2**15 else np.int32
        arrays[f"ids{number}"] = trace.ids.astype(small)
        arrays[f"scores{number}"] = trace.scores
        arrays[f"warm{number}"] = trace.warm.astype(small)
    header = {"version": VERSION, "traces": [asdict(trace.info) for trace in traces]}
    arrays["header"] = np.array(json.dumps(header))
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            np.savez_compressed(file, **arrays)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def read_traces(path: str | os.PathLike[str]) -> list[Trace]:
    """The traces of a file. Raises ValueError, naming the file, for what is not a whole one."""
    try:
        with zipfile.ZipFile(path) as archive:
            declared = sum(item.file_size for item in archive.infolist())
        if declared > LARGEST_BYTES:
            raise ValueError(f"it declares {declared:,} bytes, more than {LARGEST_BYTES:,}")
        with np.load(path, allow_pickle=False) as arrays:
            return _read(arrays)
    except FileNotFoundError:
        raise ValueError(f"trace {path}: no such file") from None
    except (ValueError, KeyError, TypeError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"trace {path} cannot be used: {error}") from error


def _read(arrays: Any) -> list[Trace]:
    header = json.loads(str(arrays["header"]))
    if not isinstance(header, dict) or header.get("version") != VERSION:
        found = header.get("version") if isinstance(header, dict) else None
        raise ValueError(f"its version must be {VERSION}, got {found!r}")
    known = {field.name: field.type for field in fields(TraceInfo)}
    made = []
    for number, values in enumerate(header["traces"]):
        kinds = {"int": int, "str": str}
        for name, kind in known.items():
            if not isinstance(values[name], kinds[str(kind)]):
                raise ValueError(f"{name} must be {kind}, got {values[name]!r}")
        made.append(
            Trace(
                info=TraceInfo(**values),
                ids=arrays[f"ids{number}"].astype(np.int32),
                scores=arrays[f"scores{number}"].astype(np.float32),
                warm=arrays[f"warm{number}"].astype(np.int32),
            )
        )
    return made
