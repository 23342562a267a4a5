"""Which data directories of an archive are somebody's, and which are left over: locks, orphans."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from kvdrive_jax.tiers.archive_manifest import DATA, FORMAT, MANIFEST, parse_manifest, read_manifest
from kvdrive_jax.tiers.archive_parts import NO_TRICKS, sync_directory

LOCK: Final = "lock"
_TRIES: Final = 10


def claim(path: Path) -> tuple[Path, IO[bytes]]:
    """A new data directory and its lock. One that is not locked yet may be taken for an orphan."""
    for _ in range(_TRIES):
        data = path / f"data-{uuid.uuid4().hex}"
        with suppress(FileNotFoundError):
            path.mkdir(exist_ok=True)
            data.mkdir()
            lock = take_lock(data)
            if lock is not None:
                return data, lock
    raise OSError(errno.EBUSY, "others remove it all the time")


def take_lock(data: Path) -> IO[bytes] | None:
    """The lock of a data directory; None while another has it, or when the directory is gone."""
    file = data / LOCK
    try:
        held = os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT | NO_TRICKS, 0o666), "rb")
    except FileNotFoundError:
        return None
    mine = False
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine = os.path.samestat(os.fstat(held.fileno()), os.lstat(file))
    except (BlockingIOError, FileNotFoundError):
        pass
    finally:
        if not mine:
            held.close()
    return held if mine else None


def lock_orphan(path: Path, data: Path) -> IO[bytes] | None:
    """The lock of a data directory that is an orphan, else None."""
    lock = take_lock(data)
    if lock is not None and _may_refer(path, data.name):
        lock.close()
        return None
    return lock


def _may_refer(path: Path, name: str) -> bool:
    """Whether the manifest at ``path`` refers to a data directory, or cannot be asked."""
    try:
        return parse_manifest(path, read_manifest(path)).data == name
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True


def sweep(path: Path) -> int:
    """Remove the orphans of one archive, as far as that is possible; returns the bytes freed."""
    freed = 0
    for data in data_directories(path):
        with suppress(OSError):
            lock = lock_orphan(path, data)
            if lock is None:
                continue
            with lock:
                # That the manifest does not refer to it must be on disk before it goes.
                sync_directory(path)
                before = bytes_under(data)
                shutil.rmtree(data, ignore_errors=True)
                freed += before - bytes_under(data)
    return freed


def data_directories(path: Path) -> list[Path]:
    try:
        found = sorted(entry for entry in path.iterdir() if DATA.fullmatch(entry.name))
    except OSError:
        return []
    return [entry for entry in found if entry.is_dir() and not entry.is_symlink()]


def places(directory: str | os.PathLike[str]) -> list[Path]:
    """``directory`` if it is an archive or the start of one, else those directly in it."""
    directory = Path(directory).absolute()
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise ValueError(f"directory {str(directory)!r} {what}")
    if is_place(directory):
        return [directory]
    try:
        children = sorted(directory.iterdir())
    except OSError as error:
        raise ValueError(
            f"directory {str(directory)!r} cannot be read ({error.strerror})"
        ) from error
    return [child for child in children if not child.is_symlink() and is_place(child)]


def is_place(path: Path) -> bool:
    """Whether a directory is an archive's: by the manifest, or by having what one has and no more.

    A manifest too damaged to tell must not make an archive a stranger, nor any other program's
    manifest.json an archive.
    """
    try:
        if FORMAT.encode() in read_manifest(path):
            return True
    except (OSError, ValueError):
        pass
    try:
        names = set(os.listdir(path)) - {MANIFEST}
    except OSError:
        return False
    return bool(names) and all(DATA.fullmatch(name) for name in names)


def bytes_under(path: Path) -> int:
    """Bytes of all files in a directory and below."""
    nbytes = 0
    for folder, _, files in os.walk(path):
        for file in files:
            with suppress(OSError):
                nbytes += os.lstat(os.path.join(folder, file)).st_size
    return nbytes
