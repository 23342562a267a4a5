"""Named parts of arrays on disk under one commit record: the form of a saved session.

An archive is a directory::

    manifest.json    the header, and the size and checksum of every part
    data-<random>/   a lock, and one safetensors file per part

The manifest appears last, by one rename: whatever ends a writer, the archive there is the old one
or the new one, whole. What else such an end leaves is an orphan: a data directory that the manifest
does not refer to, with a free lock.

Any process may read, write or prune at any time. A writer holds an exclusive flock on the lock of
its own data directory; of two writers of one path the later commit stays. Nothing removes a data
directory before it holds that lock and has seen, under it, a manifest that does not refer to it. An
`Archive` that was opened before an update fails when it reads after it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from safetensors import SafetensorError

from kvdrive_jax.tiers.archive_claims import bytes_under as bytes_under
from kvdrive_jax.tiers.archive_claims import (
    claim,
    data_directories,
    is_place,
    lock_orphan,
    places,
    sweep,
)
from kvdrive_jax.tiers.archive_manifest import FORMAT as FORMAT
from kvdrive_jax.tiers.archive_manifest import LARGEST_MANIFEST as LARGEST_MANIFEST
from kvdrive_jax.tiers.archive_manifest import (
    MANIFEST,
    NAME,
    Manifest,
    check_files,
    encode_manifest,
    parse_manifest,
    plain_header,
    read_manifest,
)
from kvdrive_jax.tiers.archive_manifest import VERSION as VERSION
from kvdrive_jax.tiers.archive_manifest import DamagedError as DamagedError
from kvdrive_jax.tiers.archive_parts import Arrays as Arrays
from kvdrive_jax.tiers.archive_parts import (
    Part,
    file_of,
    laid_out,
    part_header,
    read_checked,
    sync_directory,
    views,
    write_file,
)


class ArchiveError(RuntimeError):
    """An archive could not be written or read to its end; says which part, why and what to do."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Archive(Manifest):
    """An archive that `open_archive` found whole in form; bytes are checked as they are read."""

    def read(self, name: str) -> Arrays:
        """The arrays of one part: read-only, views of one buffer that holds the file.

        ValueError when there is no such part. ArchiveError, naming the part, when its bytes are not
        those that were written, also on a second reading that does not come from the page cache.
        """
        found = [part for part in self.parts if part.name == name]
        if not found:
            raise ValueError(f"archive {self.path} has no part {name!r}")
        return self._read(found[0])

    def verify(self) -> Iterator[tuple[str, int]]:
        """Read every part; yields its name and bytes when it is done with it, whole or not.

        ArchiveError at the end, with all reasons, when any was not whole.
        """
        broken = []
        for part in self.parts:
            try:
                self._read(part)
            except ArchiveError as error:
                broken.append(str(error))
            yield part.name, part.nbytes
        if broken:
            raise ArchiveError("; ".join(broken))

    def _read(self, part: Part) -> Arrays:
        reason = ""
        for again in (False, True):
            try:
                data = read_checked(self.path / self.data / file_of(part.name), part, again)
                return views(data)
            except FileNotFoundError:
                reason = "its file is gone: removed, or replaced by a later save"
            except OSError as error:
                reason = f"it cannot be read ({error.strerror or error})"
            except MemoryError:
                reason = f"there is no memory for its {part.nbytes:,} bytes"
            except (ValueError, KeyError, SafetensorError) as error:
                reason = str(error)
        raise ArchiveError(
            f"archive {self.path}: part {part.name} cannot be used: {reason}; "
            "open the archive again, or do without it"
        )


class ArchiveWriter:
    """Writes an archive, or a new one in the place of an old one; a context manager.

    ``path`` is made if it is missing; ``header`` is any object of JSON values. Nothing is to be
    seen at ``path`` before `commit`; without it, what was written is removed on leaving.

    ValueError from the constructor: the parent of ``path`` does not exist, ``path`` is a file or a
    directory of something else or cannot be written, ``header`` is not plain or too large.
    """

    def __init__(self, path: str | os.PathLike[str], header: dict[str, Any]) -> None:
        self.path = Path(path).absolute()
        self._header = plain_header(header)
        self._parts: list[Part] = []
        encode_manifest("data-" + 32 * "0", self._header, self._parts)
        _check_target(self.path)
        self._made = not os.path.lexists(self.path)
        try:
            if self._made:
                self.path.mkdir(exist_ok=True)
                sync_directory(self.path.parent)
            sweep(self.path)
            self._data, self._lock = claim(self.path)
        except OSError as error:
            self._remove_if_made()
            raise ValueError(
                f"path {str(self.path)!r} cannot be written ({error.strerror or error}): "
                "name another"
            ) from error

    def __enter__(self) -> ArchiveWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def add(self, name: str, arrays: Arrays) -> int:
        """Write one part and wait until the disk has it; returns its bytes.

        ValueError: ``name`` is not of a-z, 0-9 and -, or there already; an array is not of a dtype
        that an archive holds. ArchiveError: it cannot be written.
        """
        self._check_open()
        if not NAME.fullmatch(name):
            raise ValueError(f"name must be of a-z, 0-9 and -, at most 100, got {name!r}")
        if any(part.name == name for part in self._parts):
            raise ValueError(f"name must be new, the archive has a part {name!r}")
        laid = laid_out(arrays)
        file = self._data / file_of(name)
        try:
            with self._failing(f"part {name}"):
                part = Part(name=name, **write_file(file, [part_header(laid), *laid.values()]))
        except BaseException:
            with suppress(OSError):
                file.unlink()
            raise
        self._parts.append(part)
        return part.nbytes

    def commit(self) -> None:
        """Make what was added the archive at ``path``, then remove what was there before.

        ValueError: the manifest is too large. ArchiveError: it cannot be written; what was there
        before is then still there, unless the message is about the directory: then either may be.
        """
        self._check_open()
        made = self._data / MANIFEST
        content = encode_manifest(self._data.name, self._header, self._parts)
        with self._failing("the manifest"):
            with suppress(FileNotFoundError):
                made.unlink()
            write_file(made, [np.frombuffer(content, np.uint8)])
            sync_directory(self._data)
            os.replace(made, self.path / MANIFEST)
        with self._failing("its directory"):
            sync_directory(self.path)
        self.close()

    def close(self) -> None:
        """Give up what was not committed; idempotent. What cannot be removed is an orphan."""
        if self._lock.closed:
            return
        # Released before the sweep, which then judges this data directory like any other: whether
        # it was committed, and not replaced since, is in the manifest and nowhere else.
        self._lock.close()
        sweep(self.path)
        self._remove_if_made()

    def _remove_if_made(self) -> None:
        # Fails, as it should, where anything is left.
        if self._made:
            with suppress(OSError):
                self.path.rmdir()

    def _check_open(self) -> None:
        if self._lock.closed:
            raise RuntimeError(f"archive {self.path} is committed or closed: make another writer")

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            advice = "free some space" if full else "check the disk"
            raise ArchiveError(
                f"archive {self.path}: {what} cannot be written ({error.strerror or error}); "
                f"{advice}, or save to another path"
            ) from error


def open_archive(path: str | os.PathLike[str]) -> Archive:
    """The archive at ``path``, by its manifest and the sizes of its files; reads no part.

    DamagedError, a ValueError, names the path and what is wrong with it. ValueError for what is no
    archive, of another version, or cannot be read now.
    """
    path = Path(path).absolute()
    try:
        content = read_manifest(path)
        while True:
            try:
                found = parse_manifest(path, content)
                check_files(found)
                return Archive(**vars(found))
            except ValueError:
                # The files of an archive go when a later one takes its place: then look at that.
                before, content = content, read_manifest(path)
                if content == before:
                    raise
    except FileNotFoundError:
        what = f"has no {MANIFEST}, so it is none" if path.exists() else "does not exist"
        raise ValueError(f"archive {path} {what}") from None
    except OSError as error:
        raise ValueError(
            f"archive {path} cannot be read now ({error.strerror or error})"
        ) from error


def find_archives(directory: str | os.PathLike[str]) -> list[Path]:
    """``directory`` if it is an archive, else the archives directly in it, sorted; whole or not.

    ValueError when it is no directory or cannot be read.
    """
    return [path for path in places(directory) if os.path.lexists(path / MANIFEST)]


def orphans(directory: str | os.PathLike[str]) -> list[Path]:
    """What writers that are no more left in the archives of ``directory``, as in `find_archives`,
    and in those that were never committed.
    """
    found = []
    for path in places(directory):
        for data in data_directories(path):
            with suppress(OSError):
                lock = lock_orphan(path, data)
                if lock is not None:
                    lock.close()
                    found.append(data)
    return found


def prune_orphans(directory: str | os.PathLike[str]) -> int:
    """Remove `orphans`; returns the bytes freed. What cannot be removed stays one."""
    freed = 0
    for path in places(directory):
        freed += sweep(path)
        # Fails, as it should, where anything is left.
        with suppress(OSError):
            path.rmdir()
    return freed


def remove_archive(path: str | os.PathLike[str]) -> int:
    """Remove an archive, whole or not; returns the bytes freed.

    What a live writer writes to it stays, and so do files that are not an archive's. ValueError
    when there is none; ArchiveError when it cannot be removed.
    """
    path = Path(path).absolute()
    if not is_place(path):
        raise ValueError(f"path {str(path)!r} is no archive")
    manifest = path / MANIFEST
    try:
        nbytes = manifest.lstat().st_size if os.path.lexists(manifest) else 0
        manifest.unlink(missing_ok=True)
    except OSError as error:
        raise ArchiveError(
            f"archive {path} cannot be removed ({error.strerror or error}); remove it by hand"
        ) from error
    nbytes += sweep(path)
    with suppress(OSError):
        path.rmdir()
    return nbytes


def _check_target(path: Path) -> None:
    named = f"path {str(path)!r}"
    if not path.parent.is_dir():
        raise ValueError(f"{named}: the directory {path.parent} does not exist")
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise ValueError(f"{named} is no directory: name another")
    try:
        empty = not os.listdir(path)
    except OSError as error:
        raise ValueError(f"{named} cannot be read ({error.strerror}): name another") from error
    if not empty and not is_place(path):
        raise ValueError(f"{named} is a directory of other files: name a new or empty one")
