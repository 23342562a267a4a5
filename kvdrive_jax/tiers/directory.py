"""The directory of the SSD tier: one per store, private to its process, gone when that ends.

Several processes may share a parent. A store locks a file in its directory for as long as it lives;
a directory whose lock can be had belongs to a process that was killed, and the next store under the
same parent removes it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from kvdrive_jax.files import folder_lock, lock_handle

PROBE_BYTES = 4096
PREFIX = "kvdrive-"
LOCK = "lock"


class SsdDirectory:
    """``kvdrive-<pid>-<random>`` under ``parent``, removed on close and when Python exits.

    Raises ValueError, before anything else happens, when ``parent`` is missing, not a directory,
    or cannot be written (shown by writing, syncing and reading a small file).
    """

    def __init__(self, parent: str) -> None:
        self.parent = parent
        if not Path(parent).exists():
            raise ValueError(f"ssd_dir {parent!r} does not exist: create it or name another")
        if not Path(parent).is_dir():
            raise ValueError(f"ssd_dir {parent!r} is not a directory: name one")
        try:
            with folder_lock(parent):
                self.reclaimed_bytes = _remove_orphans(Path(parent))
                name = f"{PREFIX}{os.getpid()}-"
                self.path = Path(tempfile.mkdtemp(prefix=name, dir=parent))
                lock = _lock_of(self.path)
        except OSError as error:
            raise ValueError(
                f"ssd_dir {parent!r} cannot be written ({error.strerror}): name another"
            ) from error
        self._finalizer = weakref.finalize(self, _remove_tree, self.path, lock, os.getpid())
        try:
            _probe(self.path / "probe")
        except OSError as error:
            self.close()
            raise ValueError(
                f"ssd_dir {parent!r} cannot hold a file of {PROBE_BYTES} bytes "
                f"({error.strerror or error}): free some space or name another"
            ) from error

    def check_free(self, nbytes: int, promised: int) -> None:
        """Raise ValueError unless the file system has ``nbytes`` free beside the ``promised``."""
        try:
            stat = os.statvfs(self.path)
        except OSError as error:
            raise ValueError(
                f"ssd_dir {self.parent!r} has lost {self.path.name} ({error.strerror}): nothing "
                "more can be stored there"
            ) from error
        free = stat.f_bavail * stat.f_frsize
        if nbytes + promised > free:
            raise ValueError(
                f"ssd_dir {self.parent!r} has {free:,} bytes free, but this session needs "
                f"{nbytes:,} and open sessions still need {promised:,}: "
                "free some space or name another directory"
            )

    def close(self) -> None:
        """Remove the directory and everything in it; idempotent. OSError says what remained."""
        if self._finalizer.alive:
            self._finalizer()
            if self.path.exists():
                shutil.rmtree(self.path)


def _lock_of(path: Path) -> int:
    handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    lock_handle(handle, wait=False)
    return handle


def _remove_orphans(parent: Path) -> int:
    """Remove what killed processes left under ``parent``; bytes freed. Call it locked."""
    freed = 0
    for path in sorted(parent.glob(f"{PREFIX}*")):
        try:
            handle = os.open(path / LOCK, os.O_RDWR)
        except OSError:
            continue  # not ours: a directory of this kind has its lock from the beginning
        try:
            if lock_handle(handle, wait=False):
                freed += sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                _remove_all(path)
        finally:
            os.close(handle)
    return freed


def _remove_all(path: Path) -> None:
    # The lock goes last: without it nobody would remove what a killed process leaves of the rest.
    with suppress(OSError):
        for entry in list(os.scandir(path)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != LOCK:
                os.unlink(entry.path)
    shutil.rmtree(path, ignore_errors=True)


def _probe(path: Path) -> None:
    data = os.urandom(PROBE_BYTES)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if path.read_bytes() != data:
        raise OSError("what was read is not what was written")
    path.unlink()


def _remove_tree(path: Path, lock: int, owner: int) -> None:
    # A forked child inherits the finalizer, but not the files.
    if os.getpid() == owner:
        _remove_all(path)
    os.close(lock)
