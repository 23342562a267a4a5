"""One process per thing measured, asked in turn.

Each worker has its own memory, its own thread pools, and the same CPUs as the others; while one
works the others wait for a message. So two systems are timed step about, and neither pays for what
the other left in the process.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any
from unittest.mock import patch


def _make(factory: str, options: dict[str, Any] | None) -> Any:
    """The object that ``module:Class`` makes of the options."""
    module, _, name = factory.partition(":")
    return getattr(importlib.import_module(module), name)(**(options or {}))


def _serve(connection: Connection, factory: str, options: dict[str, Any], cpus: int | None) -> None:
    """Makes the object and answers calls of its methods until told to end or left alone."""
    if cpus is not None:
        # Before anything that starts threads is imported: XLA makes one per CPU it may use.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cpus])
    try:
        served = _make(factory, options)
        connection.send((True, None))
        while (call := connection.recv()) is not None:
            method, arguments = call
            connection.send((True, getattr(served, method)(*arguments)))
    except EOFError:
        return
    except Exception:
        connection.send((False, traceback.format_exc()))


class Worker:
    """An object in a process of its own.

    factory: ``module:Class``; options: its keyword arguments; cpus: how many it may use; env:
    environment variables of that process. Any exception there is a RuntimeError here, after which
    the worker is of no more use.
    """

    def __init__(
        self,
        factory: str,
        options: dict[str, Any] | None = None,
        *,
        cpus: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, factory, options or {}, cpus), daemon=True
        )
        with patch.dict(os.environ, env or {}):
            self._process.start()
        theirs.close()
        try:
            self._answer(factory)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any) -> Any:
        """The answer of one method."""
        self._connection.send((method, arguments))
        return self._answer(method)

    def _answer(self, what: str) -> Any:
        try:
            done, value = self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(
                f"worker: the process died in {what}, exit code {self._process.exitcode}"
            ) from None
        if not done:
            raise RuntimeError(f"worker: {what} failed\n{value}")
        return value

    def close(self) -> None:
        """Ends the process. Idempotent."""
        if self._process.is_alive():
            with contextlib.suppress(OSError):  # it is ending already
                self._connection.send(None)
            self._process.join(20)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
        self._connection.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Local(Worker):
    """The same in this process, for tests: memory and threads are shared then."""

    def __init__(
        self,
        factory: str,
        options: dict[str, Any] | None = None,
        *,
        cpus: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._served = _make(factory, options)

    def call(self, method: str, *arguments: Any) -> Any:
        """The answer of one method."""
        return getattr(self._served, method)(*arguments)

    def close(self) -> None:
        """Nothing to end."""
