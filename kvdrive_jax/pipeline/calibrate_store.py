"""What calibration found, kept between runs: a JSON file of entries, each under the key of all that
it depends on.

By default one file for each key in the user's cache, where a file that cannot be used costs a
notice and another calibration. In a file that the user names, one that cannot be used is an error.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvdrive_jax.files import (
    cache_folder,
    folder_lock,
    name_of,
    number,
    of_kind,
    read_json,
    typed,
    write_json,
)
from kvdrive_jax.pipeline.calibrate import WindowCosts
from kvdrive_jax.pipeline.parts import Arrangement

VERSION: Final = 1
LARGEST_BYTES: Final = 4 << 20
"""A file larger than this holds no calibration."""


@dataclass(frozen=True, kw_only=True)
class CalibrationKey:
    """What a result depends on.

    machine: processor, device and JAX; model: its digest; dtype: of KV; batch, chunk_capacity,
    selected: B, N, P; retrieval, window, pages, links, schedule: what differs in the work of
    select, fetch and compute, in words.
    """

    machine: str
    model: str
    dtype: str
    batch: int
    chunk_capacity: int
    selected: int
    retrieval: str
    window: str
    pages: str
    links: str
    schedule: str


@dataclass(frozen=True, kw_only=True)
class Timed:
    """An arrangement and the seconds of a step with it."""

    micro_batch: int
    cohorts: int
    step_s: float

    def __post_init__(self) -> None:
        if min(self.micro_batch, self.cohorts) < 1 or not 0 < self.step_s < float("inf"):
            raise ValueError(
                "micro_batch and cohorts must be at least 1 and step_s above 0, got "
                f"{self.micro_batch}, {self.cohorts}, {self.step_s}"
            )

    @property
    def arrangement(self) -> Arrangement:
        """Without its time."""
        return Arrangement(self.micro_batch, self.cohorts)


@dataclass(frozen=True, kw_only=True)
class ArrangementResult:
    """What a search chose, and what else it tried."""

    chosen: Timed
    others: tuple[Timed, ...]


Result = WindowCosts | ArrangementResult


class CalibrationStore:
    """Results by key: those of this process, and those in files.

    where: ``auto``, the user's cache; or the path of one file for all keys, which is made when
    there is something to keep. Raises ValueError for a file that holds anything else, and for one
    that could not be written.
    """

    def __init__(self, where: str) -> None:
        self._path = None if where == "auto" else where
        self._known: dict[CalibrationKey, Result] = {}
        if self._path is None:
            return
        folder = os.path.dirname(os.path.abspath(self._path))
        if os.path.isdir(self._path) or not os.path.isdir(folder):
            raise ValueError(
                f"calibrate must be auto, off or a file in a directory that exists, got {where!r}"
            )
        if not os.access(folder, os.W_OK):
            raise ValueError(f"calibrate: the directory of {self._path} is not writable")
        if os.path.exists(self._path):
            self._known = read_results(self._path)

    def get(self, key: CalibrationKey) -> Result | None:
        """What is known, or None."""
        path = self._path_of(key)
        if key not in self._known and self._path is None and path and os.path.exists(path):
            try:
                self._known.update(read_results(path))
            except ValueError as error:
                print(f"{error}; calibrating again", file=sys.stderr, flush=True)
        return self._known.get(key)

    def put(self, key: CalibrationKey, result: Result) -> None:
        """Keep a result, in the file as well where the model has a digest to know it by."""
        self._known[key] = result
        path = self._path_of(key)
        if path is None:
            return
        try:
            if self._path is None:
                write_results(path, {key: result})
                return
            with folder_lock(os.path.dirname(os.path.abspath(path))):
                # Another process may have added to it since.
                others = read_results(path) if os.path.exists(path) else {}
                write_results(path, {**others, key: result})
        except (OSError, ValueError) as error:
            # The run goes on with what it has found.
            print(f"calibration is not kept: {error}", file=sys.stderr, flush=True)

    def _path_of(self, key: CalibrationKey) -> str | None:
        if not key.model:
            return None
        if self._path is not None:
            return self._path
        name = name_of([VERSION, asdict(key)])
        return os.path.join(cache_folder("calibration"), f"{name}.json")


def write_results(path: str, results: dict[CalibrationKey, Result]) -> None:
    """All results of a file, in one piece."""
    entries = []
    for key, result in results.items():
        name = "windows" if isinstance(result, WindowCosts) else "arrangement"
        entries.append({"key": asdict(key), name: asdict(result)})
    write_json(path, {"version": VERSION, "entries": entries})


def read_results(path: str) -> dict[CalibrationKey, Result]:
    """The results of a file. Raises ValueError, naming it, for one that holds anything else."""
    try:
        values = read_json(path, LARGEST_BYTES)
        version = values.get("version") if isinstance(values, dict) else None
        if type(version) is not int or version != VERSION:
            raise ValueError(f"its version must be {VERSION}, got {version!r}")
        entries = of_kind(list, values["entries"], "entries")
        return dict(_entry(of_kind(dict, entry, "an entry")) for entry in entries)
    except OSError as error:
        raise ValueError(f"calibration {path}: {error.strerror}") from error
    except KeyError as error:
        raise ValueError(f"calibration {path} has no {error}") from error
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"calibrate: {path} is no calibration file: {error}") from error


def _entry(entry: dict[str, Any]) -> tuple[CalibrationKey, Result]:
    key = typed(CalibrationKey, entry["key"], "key")
    if "windows" in entry:
        windows = of_kind(dict, entry["windows"], "windows")
        costs = WindowCosts(
            multiples=_numbers(windows["multiples"], "multiples"),
            lookup_s=_numbers(windows["lookup_s"], "lookup_s"),
            fetch_s=number(windows["fetch_s"], "fetch_s"),
            page_s=number(windows["page_s"], "page_s"),
        )
        return key, costs
    found = of_kind(dict, entry["arrangement"], "arrangement")
    others = of_kind(list, found["others"], "others")
    return key, ArrangementResult(
        chosen=typed(Timed, found["chosen"], "chosen"),
        others=tuple(typed(Timed, other, "others") for other in others),
    )


def _numbers(values: Any, name: str) -> tuple[float, ...]:
    return tuple(number(value, name) for value in of_kind(list, values, name))
