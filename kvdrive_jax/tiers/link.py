"""A link of set bandwidth and latency, to imitate hardware that is not there.

It slows real transfers down, and moves nothing itself: bytes are read and copied as always.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(eq=False)
class Link:
    """Transfers share ``bytes_per_s``, one after another; each ends ``latency_s`` later.

    Raises ValueError for a bandwidth that is not positive or a latency below zero.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    _free: float = field(default=0.0, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s must be positive, got {self.bytes_per_s!r}")
        if not self.latency_s >= 0:
            raise ValueError(f"latency_s must be at least 0, got {self.latency_s!r}")

    @contextmanager
    def carry(self, nbytes: int) -> Iterator[None]:
        """The transfer inside takes at least as long as the link needs for ``nbytes``."""
        with self._lock:
            begin = max(time.perf_counter(), self._free)
            self._free = begin + nbytes / self.bytes_per_s
            end = self._free + self.latency_s
        yield
        left = end - time.perf_counter()
        if left > 0:
            time.sleep(left)


@dataclass(frozen=True, kw_only=True)
class Links:
    """Imitated links between tiers; None: as fast as the machine is."""

    dram_to_hbm: Link | None = None
    ssd_to_dram: Link | None = None
