"""How miss lists reach the host: one seam, two ways.

*copy*: the list is copied as soon as it is computed, and the engine's thread asks whether it is
there. *callback*: the compiled select hands it over while it runs, and rings. Either way the host
gets ids, never KV; a callback returns at once and never touches JAX.
"""

from __future__ import annotations

import itertools
import queue
from contextlib import suppress
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback

from kvdrive_jax import compat
from kvdrive_jax.config import MissListWay

Ids = np.ndarray[Any, Any]


class Bell:
    """Wakes the engine's thread; any thread rings."""

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ring(self) -> None:
        """Something has happened."""
        self._rings.put(None)

    def wait(self, timeout: float | None) -> None:
        """Until it rings, or ``timeout`` seconds; all rings so far count as one."""
        with suppress(queue.Empty):
            self._rings.get(timeout=timeout)
            while True:
                self._rings.get_nowait()


class MissLists(Protocol):
    """One way for the miss lists of a batch's micro-batches."""

    def ticket(self, micro_batch: int, layer: int) -> jax.Array | None:
        """What select is given for a micro-batch; two layers may be selected together, so the
        layer is told apart from the next."""
        ...

    def start(self, missing: jax.Array) -> None:
        """Select has been dispatched; ``missing`` [2, B, K, P] is its miss list."""
        ...

    def arrived(
        self, micro_batch: int, layer: int, missing: jax.Array, beside: jax.Array
    ) -> Ids | None:
        """The list, or None as long as it is not there; beside: what select made as well."""
        ...

    def close(self) -> None:
        """Nothing more will arrive."""
        ...


class Copies:
    """Lists that are copied to the host and polled."""

    def ticket(self, micro_batch: int, layer: int) -> None:
        """Nothing: the way asks nothing of select."""
        return

    def start(self, missing: jax.Array) -> None:
        """The copy goes on its way."""
        compat.start_copy(missing)

    def arrived(
        self, micro_batch: int, layer: int, missing: jax.Array, beside: jax.Array
    ) -> Ids | None:
        """The list, once it is computed."""
        # What is being copied is not asked: a list on its way to the host was once never ready on
        # CPU, although all else that its program made was.
        return np.asarray(missing) if compat.is_ready(beside) else None

    def close(self) -> None:
        """Nothing to do."""


_INBOXES: dict[int, tuple[queue.SimpleQueue[Ids], Bell]] = {}
"""Where the list of each ticket goes, and who is told."""
_NUMBERS = itertools.count()


class Callbacks:
    """Lists that compiled selects hand over; they ring ``bell``."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._lists: dict[tuple[int, int], queue.SimpleQueue[Ids]] = {}
        self._tickets: dict[tuple[int, int], jax.Array] = {}
        self._numbers: list[int] = []

    def ticket(self, micro_batch: int, layer: int) -> jax.Array:
        """Says whose list it is."""
        at = micro_batch, layer % 2
        if at not in self._tickets:
            number = next(_NUMBERS) % 2**31
            self._lists[at] = queue.SimpleQueue()
            self._numbers.append(number)
            _INBOXES[number] = self._lists[at], self._bell
            self._tickets[at] = jnp.int32(number)
        return self._tickets[at]

    def start(self, missing: jax.Array) -> None:
        """It comes by itself."""

    def arrived(
        self, micro_batch: int, layer: int, missing: jax.Array, beside: jax.Array
    ) -> Ids | None:
        """The list, once it has been handed over."""
        try:
            return self._lists[micro_batch, layer % 2].get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """What still comes is dropped."""
        for number in self._numbers:
            _INBOXES.pop(number, None)


def miss_lists(way: MissListWay, bell: Bell) -> MissLists:
    """The way that was asked for; auto is copies, see ``benchmarks.pipeline overhead``."""
    return Callbacks(bell) if way == "callback" else Copies()


def _deliver(ticket: Any, missing: Any) -> None:
    # Called on a thread of the backend's. A batch that was given up no longer has an inbox.
    inbox = _INBOXES.get(int(np.asarray(ticket)))
    if inbox is not None:
        lists, bell = inbox
        # A copy: what is handed over is the backend's again when this returns.
        lists.put(np.asarray(missing).copy())
        bell.ring()


def _deliver_buffers(_: Any, done: Any, ticket: Any, missing: Any) -> None:
    np.asarray(done)[...] = 0
    _deliver(ticket, missing)


def hand_over(ticket: jax.Array, missing: jax.Array) -> None:
    """Inside a compiled function: give a miss list to the `Callbacks` that made ``ticket``."""
    if compat.platform() == "cpu":
        # Sees the arrays where they are: no copy, and no JAX within the callback.
        done = jax.ShapeDtypeStruct((), jnp.int32)
        buffer_callback(_deliver_buffers, done, has_side_effect=True)(ticket, missing)
    else:
        io_callback(_deliver, None, ticket, missing, ordered=False)
