"""What the parts share: sizes, the record that survives a failure, and timing on a device."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.gpu_check_parts.draw import Draw

Row = dict[str, Any]
L2_BYTES = 64 * 2**20
"""At least the L2 of every GPU that is aimed at."""


class OutOfTime(Exception):
    """The part has used what it may take."""


class Bench:
    """One run of one part.

    toy: sizes for a CPU, kernels interpreted; seed: of all inputs, new in every run; weights: as
    given on the command line; left(): seconds this part may still take.
    """

    def __init__(
        self, path: Path, *, toy: bool, seed: int, seconds: float, weights: str | None = None
    ) -> None:
        self.toy, self.seed, self.weights = toy, seed, weights
        self.interpret = jax.default_backend() == "cpu"
        self.draw = Draw(seed)
        self._path, self._end = path, time.perf_counter() + seconds
        self.rows: list[Row] = []
        self.facts: Row = {}

    def left(self) -> float:
        """Seconds this part may still take."""
        return self._end - time.perf_counter()

    def item(self, name: str, body: Callable[[Row], None], *, needs_seconds: float = 0.0) -> None:
        """One row of the record, filled by ``body`` and written whatever happens in it.

        The row's ``status`` ends as ``ok`` unless the body sets another; ``skipped`` where a thing
        cannot be had here or time is up; ``error``, with the traceback, otherwise.
        """
        row: Row = {"item": name}
        start = time.perf_counter()
        try:
            if self.left() < needs_seconds:
                raise OutOfTime(f"{self.left():.0f} s left, {needs_seconds:.0f} needed")
            body(row)
            row.setdefault("status", "ok")
        except (OutOfTime, NotImplementedError, ImportError) as error:
            row.update(status="skipped", why=f"{type(error).__name__}: {error}")
        except Exception as error:
            lines = str(error).splitlines() or [""]
            row.update(
                status="error",
                why=f"{type(error).__name__}: {lines[0]}",
                traceback=traceback.format_exc()[-4000:],
            )
        finally:
            row["took_s"] = round(time.perf_counter() - start, 3)
            self.rows.append(row)
            self.write()

    def write(self) -> None:
        """What is known so far, replacing the file whole."""
        text = json.dumps({"facts": plain(self.facts), "rows": plain(self.rows)}, indent=1)
        beside = self._path.with_suffix(".part")
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, self._path)

    # Timing

    def seconds(
        self, fn: Callable[..., Any], sets: Sequence[Sequence[Any]], *, together: bool = True
    ) -> Row:
        """Time of one call of ``fn``, over input ``sets`` that together exceed the cache.

        together: all sets in one compiled function, so that what a dispatch costs is shared; not
        for what takes long to compile.
        """
        one = jax.jit(fn)
        if not together:
            return self._time(lambda: [one(*args) for args in sets], len(sets))
        many = jax.jit(lambda sets: [one(*args) for args in sets])
        return self._time(lambda: many(sets), len(sets))

    def seconds_in_place(
        self,
        fn: Callable[..., jax.Array],
        carries: list[jax.Array],
        sets: Sequence[Sequence[Any]],
    ) -> Row:
        """`seconds` of a function that replaces its first argument, which is donated."""
        one = jax.jit(fn)
        many = jax.jit(
            lambda carries, sets: [one(c, *args) for c, args in zip(carries, sets, strict=True)],
            donate_argnums=0,
        )
        state = [carries]

        def call() -> Any:
            state[0] = many(state[0], sets)
            return state[0]

        return self._time(call, len(sets))

    def _time(self, call: Callable[[], Any], per_call: int) -> Row:
        target = 0.001 if self.toy else 0.02
        jax.block_until_ready(call())
        start = time.perf_counter()
        jax.block_until_ready(call())
        once = time.perf_counter() - start
        count = max(1, min(200, math.ceil(target / max(once, 1e-7))))
        taken = []
        for _ in range(2 if self.toy else 9):
            start = time.perf_counter()
            for _ in range(count):
                out = call()
            jax.block_until_ready(out)
            taken.append((time.perf_counter() - start) / (count * per_call))
        low, _, high = statistics.quantiles(taken, n=4, method="inclusive")
        return {"seconds": statistics.median(taken), "quartiles_s": [low, high]}

    def set_count(self, nbytes: float) -> int:
        """How many input sets of so many bytes it takes to leave the cache behind."""
        if self.toy:
            return 2
        return int(min(16, max(2, math.ceil(3 * L2_BYTES / max(nbytes, 1)))))


def wall(call: Callable[[], Any], repeats: int = 7) -> float:
    """Median seconds of a call that ends when its result is ready."""
    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def relative_error(got: Any, wanted: np.ndarray[Any, Any]) -> float:
    """Norm of the difference over the norm of what is wanted; NaN counts as infinite."""
    values = np.asarray(got).astype(np.float64)
    if values.shape != wanted.shape or not np.isfinite(values).all():
        return math.inf
    return float(np.linalg.norm(values - wanted) / max(np.linalg.norm(wanted), 1e-30))


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it: numbers rounded to six digits, infinities as text."""
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value if isinstance(value, str | int | bool | None) else str(value)
