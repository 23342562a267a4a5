"""Staging: the fixed ring of host buffers that fetched pages pass through, and what
offloads and SSD reads pass through.

A buffer of the ring has one owner from ``acquire`` to ``release``. Every acquire gives it a new
generation, so that whoever still holds an older Staging (a late worker, a cancelled fetch) is
recognised and refused. Any thread may call.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdrive_jax.telemetry import Ledger
from kvdrive_jax.tiers.pages import Bytes, PageGeometry, touched_bytes
from kvdrive_jax.tiers.placement import IN_FLIGHT, READS, WRITES, SessionPlan, staging_needs


@dataclass(frozen=True, kw_only=True)
class Staging:
    """One buffer [pages_capacity, *dram_shape], lent until it is released."""

    buffer: npt.NDArray[Any]
    index: int
    generation: int


class StagingRing:
    """``count`` pre-touched buffers of ``pages_capacity`` pages, reserved in the DRAM ledger.

    Raises ValueError for counts below one, BudgetError when the DRAM budget cannot hold the ring.
    """

    def __init__(
        self,
        count: int,
        pages_capacity: int,
        geometry: PageGeometry,
        ledger: Ledger,
        *,
        name: str = "staging ring",
    ) -> None:
        if count < 1 or pages_capacity < 1:
            raise ValueError(
                "count and pages_capacity must be at least 1, "
                f"got count={count}, pages_capacity={pages_capacity}"
            )
        nbytes = pages_capacity * geometry.dram_page_bytes
        self._ledger, self._name = ledger, name
        ledger.reserve("dram", name, count * nbytes)
        try:
            self._buffers = [
                touched_bytes(nbytes, "a staging buffer")
                .view(geometry.dram_dtype)
                .reshape(pages_capacity, *geometry.dram_shape)
                for _ in range(count)
            ]
        except BaseException:
            ledger.release("dram", name)
            raise
        self._generation = [0] * count
        self._free = list(range(count))
        self._changed = threading.Condition()
        self._closed = False

    def acquire(self, timeout: float | None = 0.0) -> Staging:
        """Lend the buffer that has been free longest.

        When all are in flight, waits up to ``timeout`` seconds (None: without limit; the default
        does not wait) and then raises RuntimeError.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._free or self._closed, timeout):
                raise RuntimeError(
                    f"all {len(self._buffers)} staging buffers are in flight; "
                    "release one first, or give the ring more"
                )
            if self._closed:
                raise RuntimeError("the staging ring is closed")
            index = self._free.pop(0)
            self._generation[index] += 1
            return Staging(
                buffer=self._buffers[index], index=index, generation=self._generation[index]
            )

    def current(self, staging: Staging) -> bool:
        """Whether ``staging`` still owns its buffer."""
        with self._changed:
            return self._owns(staging)

    def release(self, staging: Staging) -> None:
        """Give the buffer back; RuntimeError when it was given back already."""
        with self._changed:
            if not self._owns(staging):
                raise RuntimeError(
                    f"staging buffer {staging.index}, generation {staging.generation}, "
                    "was released already"
                )
            self._free.append(staging.index)
            self._changed.notify()

    def close(self) -> None:
        """Drop the buffers and their reservation; idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._buffers = []
            self._changed.notify_all()
        self._ledger.release("dram", self._name)

    def __enter__(self) -> StagingRing:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _owns(self, staging: Staging) -> bool:
        return (
            not self._closed
            and staging.index not in self._free
            and staging.generation == self._generation[staging.index]
        )


class ScratchPool:
    """``count`` equal pre-touched byte buffers that threads borrow; who finds none waits."""

    def __init__(self, count: int, what: str) -> None:
        self._what = what
        self.nbytes = 0
        self._idle: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        for _ in range(count):
            self._idle.put(np.empty(0, np.uint8))

    def resize(self, nbytes: int) -> None:
        """From now on lend buffers of ``nbytes``; those of another size are dropped."""
        self.nbytes = nbytes
        for _ in range(self._idle.qsize()):
            with suppress(queue.Empty):
                self._give(self._idle.get_nowait())

    @contextmanager
    def borrow(self) -> Iterator[Bytes]:
        """A buffer of at least ``nbytes``, uint8. After an error it is not used again: an
        interrupted read may still be writing into it."""
        buffer = self._idle.get()
        back = np.empty(0, np.uint8)
        try:
            if buffer.nbytes != self.nbytes:
                buffer = touched_bytes(self.nbytes, self._what)
            yield buffer
            back = buffer
        finally:
            self._give(back)

    def _give(self, buffer: Bytes) -> None:
        self._idle.put(buffer if buffer.nbytes == self.nbytes else np.empty(0, np.uint8))


class Transit:
    """What the sessions of one store share to move pages: scratch buffers for SSD reads and
    writes, and a bound on the bytes handed in and not yet stored.

    Reserved in the DRAM ledger for the sessions that are open, by the thread that opens and closes
    them.
    """

    def __init__(self, ledger: Ledger, workers: int, pending_bytes: int | None) -> None:
        self._ledger, self._workers, self._pending_bytes = ledger, workers, pending_bytes
        self._held: dict[str, int] = {}
        self._changed = threading.Condition()
        self._in_flight = 0
        self.reads = ScratchPool(workers + 1, "a buffer for SSD reads")
        self.writes = ScratchPool(workers, "a buffer for SSD writes")

    def growth(self, plans: Iterable[SessionPlan]) -> int:
        """Bytes that ``fit`` would add (or, below zero, give back)."""
        needs = staging_needs(plans, self._workers, self._pending_bytes)
        return sum(needs.values()) - sum(self._held.values())

    def fit(self, plans: Sequence[SessionPlan]) -> None:
        """Hold exactly what sessions with these plans need; BudgetError when it does not fit."""
        needs = staging_needs(plans, self._workers, self._pending_bytes)
        for name, size in needs.items():
            held = self._held.get(name, 0)
            if size > held:
                self._ledger.reserve("dram", name, size - held)
            elif size < held:
                self._ledger.release("dram", name)
                if size:
                    self._ledger.reserve("dram", name, size)
            self._held[name] = size
        self.reads.resize(needs[READS] // (self._workers + 1))
        self.writes.resize(needs[WRITES] // self._workers)

    def enter(self, nbytes: int) -> None:
        """Wait until ``nbytes`` more may be in flight. More than the bound goes alone."""
        bound = self._held[IN_FLIGHT]
        with self._changed:
            self._changed.wait_for(
                lambda: self._in_flight == 0 or self._in_flight + nbytes <= bound
            )
            self._in_flight += nbytes

    def leave(self, nbytes: int) -> None:
        """``nbytes`` are stored, or given up."""
        with self._changed:
            self._in_flight -= nbytes
            self._changed.notify_all()
