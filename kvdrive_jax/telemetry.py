"""What is counted while the system runs: bytes held, bytes moved, time spent, progress shown.

Ledger and Traffic are used by worker threads and by the engine's thread; both take one lock per
call. StageClock belongs to the engine's thread.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO, get_args

Tier = Literal["hbm", "dram", "ssd"]
Direction = Literal["hbm_to_dram", "dram_to_hbm", "dram_to_ssd", "ssd_to_dram"]
PageSource = Literal["dram", "ssd", "ahead"]
Stage = Literal["select", "fetch", "compute", "stall"]

TIERS: tuple[Tier, ...] = get_args(Tier)


def host_memory_bytes() -> int:
    """Bytes of host memory that are free for use now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


class BudgetError(ValueError):
    """A reservation would take a tier over its budget."""


class Ledger:
    """Bytes held in each tier, by name, never above the tier's budget (None: no limit)."""

    def __init__(
        self, *, hbm: int | None = None, dram: int | None = None, ssd: int | None = None
    ) -> None:
        self._budget: dict[Tier, int | None] = {"hbm": hbm, "dram": dram, "ssd": ssd}
        self._held: dict[Tier, dict[str, int]] = {tier: {} for tier in TIERS}
        self._used: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        self._peak: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        self._lock = threading.Lock()

    def reserve(self, tier: Tier, name: str, nbytes: int) -> None:
        """Add ``nbytes`` to the account ``name``; BudgetError, with the arithmetic, if over."""
        if nbytes < 0:
            raise ValueError(f"nbytes must be at least 0, got {nbytes}")
        with self._lock:
            budget, used = self._budget[tier], self._used[tier]
            if budget is not None and used + nbytes > budget:
                raise BudgetError(
                    f"the {tier.upper()} budget of {budget:,} bytes cannot hold {name}: "
                    f"{used:,} bytes are in use and {nbytes:,} more are needed; "
                    f"raise --{tier}-budget to at least {used + nbytes:,}"
                )
            self._held[tier][name] = self._held[tier].get(name, 0) + nbytes
            self._used[tier] = used + nbytes
            self._peak[tier] = max(self._peak[tier], self._used[tier])

    def release(self, tier: Tier, name: str) -> int:
        """Close the account ``name`` and return its bytes; KeyError if there is none."""
        with self._lock:
            nbytes = self._held[tier].pop(name)
            self._used[tier] -= nbytes
            return nbytes

    def used(self, tier: Tier) -> int:
        """Bytes held now."""
        return self._used[tier]

    def peak(self, tier: Tier) -> int:
        """Most bytes ever held."""
        return self._peak[tier]

    def budget(self, tier: Tier) -> int | None:
        """Bytes that may be held, or None."""
        return self._budget[tier]

    def accounts(self, tier: Tier) -> dict[str, int]:
        """A copy of the open accounts of a tier, in bytes."""
        with self._lock:
            return dict(self._held[tier])


class Traffic:
    """Bytes moved between tiers, by direction; and pages of the store by where they were: found in
    DRAM, read from SSD when they were asked for, or read ahead of that."""

    def __init__(self) -> None:
        self._bytes: dict[Direction, int] = dict.fromkeys(get_args(Direction), 0)
        self._pages: dict[PageSource, int] = dict.fromkeys(get_args(PageSource), 0)
        self._lock = threading.Lock()

    def add(self, direction: Direction, nbytes: int) -> None:
        """Count ``nbytes`` moved."""
        with self._lock:
            self._bytes[direction] += nbytes

    def add_pages(self, source: PageSource, count: int) -> None:
        """Count ``count`` pages found."""
        with self._lock:
            self._pages[source] += count

    def snapshot(self) -> dict[Direction, int]:
        """A copy of all counters, in bytes."""
        with self._lock:
            return dict(self._bytes)

    def pages(self) -> dict[PageSource, int]:
        """A copy of the counts of pages."""
        with self._lock:
            return dict(self._pages)


@dataclass
class RowCounts:
    """Counters of one session's decode.

    steps: decode steps; attended_tokens: tokens attended to, summed over steps (mean over layers
    and kv heads); selected_chunks, missed_chunks: summed over steps, layers and kv heads.
    """

    steps: int = 0
    attended_tokens: float = 0.0
    selected_chunks: int = 0
    missed_chunks: int = 0

    @property
    def attended_tokens_mean(self) -> float | None:
        """Tokens attended to per step, or None before the first."""
        return self.attended_tokens / self.steps if self.steps else None

    @property
    def hit_rate(self) -> float | None:
        """Share of selected chunks that were in their window, or None if none was selected."""
        if not self.selected_chunks:
            return None
        return 1 - self.missed_chunks / self.selected_chunks


class StageClock:
    """Seconds per stage of decode, as the engine's thread sees them.

    For what no timeline tells: the time of a step that has one is left out.
    """

    def __init__(self) -> None:
        self._seconds: dict[Stage, float] = dict.fromkeys(get_args(Stage), 0.0)
        self._recent: list[tuple[Stage, float, float]] = []

    @contextmanager
    def measure(self, stage: Stage) -> Iterator[None]:
        """Add the time spent inside to ``stage``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._recent.append((stage, start, time.perf_counter()))

    def leave_out(self, start: float, end: float) -> None:
        """What was measured from ``start`` to ``end``, the last step, is told elsewhere."""
        for stage, began, ended in self._recent:
            told = max(0.0, min(ended, end) - max(began, start))
            self._seconds[stage] += ended - began - told
        self._recent.clear()

    def snapshot(self) -> dict[Stage, float]:
        """A copy, in seconds."""
        seconds = dict(self._seconds)
        for stage, began, ended in self._recent:
            seconds[stage] += ended - began
        return seconds


class Progress:
    """One line on stderr that is rewritten on a terminal and sparse in a log.

    Shows label, share done, rate and estimated time left; silent when ``quiet``.
    """

    def __init__(
        self, label: str, total: int, unit: str, *, quiet: bool = False, file: TextIO | None = None
    ) -> None:
        self._label, self._total, self._unit = label, max(total, 1), unit
        self._file = sys.stderr if file is None else file
        self._quiet = quiet
        self._start = time.perf_counter()
        self._shown = self._start
        self._terminal = self._file.isatty()
        self._every = 0.2 if self._terminal else 5.0

    def update(self, done: int) -> None:
        """Show that ``done`` of the total units are finished."""
        now = time.perf_counter()
        if self._quiet or now - self._shown < self._every:
            return
        self._shown = now
        rate = done / max(now - self._start, 1e-9)
        left = (self._total - done) / rate if rate > 0 else float("inf")
        eta = f", {left:.0f} s left" if left < 1e6 else ""
        share = 100 * done / self._total
        self._write(f"{self._label} {share:3.0f} %, {rate:,.0f} {self._unit}/s{eta}")

    def finish(self, line: str) -> None:
        """Replace the progress line with ``line``."""
        if not self._quiet:
            self._write(line)
            if self._terminal:
                self._file.write("\n")
                self._file.flush()

    def _write(self, line: str) -> None:
        self._file.write(f"\r\x1b[2K{line}" if self._terminal else f"{line}\n")
        self._file.flush()
