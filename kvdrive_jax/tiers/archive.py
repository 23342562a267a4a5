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
import fcntl
import json
import math
import os
import re
import shutil
import stat
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

FORMAT: Final = "kvdrive_jax archive"
VERSION: Final = 1
LARGEST_MANIFEST: Final = 1 << 20
"""Bytes; a larger manifest is neither written nor read."""

_MANIFEST, _LOCK = "manifest.json", "lock"
_DATA: Final = re.compile(r"data-[0-9a-f]{32}")
_NAME: Final = re.compile(r"[a-z0-9-]{1,100}")
_ENVELOPE: Final = re.compile(rb'\{"crc32": "([0-9a-f]{8})", ')
_STEP: Final = 4 << 20  # small enough that a checksum finds in the CPU's cache what was just read
_TRIES: Final = 10
_NO_TRICKS: Final = os.O_NOFOLLOW | os.O_NONBLOCK  # a symbolic link is refused, a pipe cannot block

_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    **{f"{kind}{8 * n}": np.dtype(f"{kind.lower()}{n}") for kind in "IU" for n in (1, 2, 4, 8)},
    "BOOL": np.dtype(np.bool_),
}
_CODES: Final = {dtype: code for code, dtype in _DTYPES.items()}

Arrays = dict[str, npt.NDArray[Any]]


class ArchiveError(RuntimeError):
    """An archive could not be written or read to its end; says which part, why and what to do."""


class DamagedError(ValueError):
    """What is there can never be opened: a file is missing, cut short or changed."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One file of an archive, its size in bytes and the CRC-32 of all of them."""

    name: str
    nbytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Archive:
    """An archive that `open_archive` found whole in form; bytes are checked as they are read.

    Attributes:
        path: its directory; data: the name of the data directory in it.
        header: what its writer was given.
        created: when it was committed, in seconds since 1970.
        parts: in the order in which they were added.
    """

    path: Path
    data: str
    header: dict[str, Any]
    created: float
    parts: tuple[Part, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parts."""
        return tuple(part.name for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts on disk."""
        return sum(part.nbytes for part in self.parts)

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
                data = _read_checked(self.path / self.data / _file_of(part.name), part, again)
                return _views(data)
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
        self._header = _plain(header)
        self._parts: list[Part] = []
        _encode("data-" + 32 * "0", self._header, self._parts)
        _check_target(self.path)
        self._made = not os.path.lexists(self.path)
        try:
            if self._made:
                self.path.mkdir(exist_ok=True)
                _sync_directory(self.path.parent)
            _sweep(self.path)
            self._data, self._lock = _claim(self.path)
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
        if not _NAME.fullmatch(name):
            raise ValueError(f"name must be of a-z, 0-9 and -, at most 100, got {name!r}")
        if any(part.name == name for part in self._parts):
            raise ValueError(f"name must be new, the archive has a part {name!r}")
        laid = _laid_out(arrays)
        file = self._data / _file_of(name)
        try:
            with self._failing(f"part {name}"):
                part = Part(name=name, **_write(file, [_part_header(laid), *laid.values()]))
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
        made = self._data / _MANIFEST
        content = _encode(self._data.name, self._header, self._parts)
        with self._failing("the manifest"):
            with suppress(FileNotFoundError):
                made.unlink()
            _write(made, [np.frombuffer(content, np.uint8)])
            _sync_directory(self._data)
            os.replace(made, self.path / _MANIFEST)
        with self._failing("its directory"):
            _sync_directory(self.path)
        self.close()

    def close(self) -> None:
        """Give up what was not committed; idempotent. What cannot be removed is an orphan."""
        if self._lock.closed:
            return
        # Released before the sweep, which then judges this data directory like any other: whether
        # it was committed, and not replaced since, is in the manifest and nowhere else.
        self._lock.close()
        _sweep(self.path)
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
        content = _manifest(path)
        while True:
            try:
                archive = _parse(path, content)
                _check_files(archive)
                return archive
            except ValueError:
                # The files of an archive go when a later one takes its place: then look at that.
                before, content = content, _manifest(path)
                if content == before:
                    raise
    except FileNotFoundError:
        raise ValueError(f"archive {path}: there is no {_MANIFEST}, so it is none") from None
    except OSError as error:
        raise ValueError(
            f"archive {path} cannot be read now ({error.strerror or error})"
        ) from error


def find_archives(directory: str | os.PathLike[str]) -> list[Path]:
    """``directory`` if it is an archive, else the archives directly in it, sorted; whole or not.

    ValueError when it is no directory or cannot be read.
    """
    return [path for path in _places(directory) if os.path.lexists(path / _MANIFEST)]


def orphans(directory: str | os.PathLike[str]) -> list[Path]:
    """What writers that are no more left in the archives of ``directory``, as in `find_archives`,
    and in those that were never committed.
    """
    found = []
    for path in _places(directory):
        for data in _data_directories(path):
            with suppress(OSError):
                lock = _lock_orphan(path, data)
                if lock is not None:
                    lock.close()
                    found.append(data)
    return found


def prune_orphans(directory: str | os.PathLike[str]) -> int:
    """Remove `orphans`; returns the bytes freed. What cannot be removed stays one."""
    freed = 0
    for path in _places(directory):
        freed += _sweep(path)
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
    if not _is_place(path):
        raise ValueError(f"path {str(path)!r} is no archive")
    manifest = path / _MANIFEST
    try:
        nbytes = manifest.lstat().st_size if os.path.lexists(manifest) else 0
        manifest.unlink(missing_ok=True)
    except OSError as error:
        raise ArchiveError(
            f"archive {path} cannot be removed ({error.strerror or error}); remove it by hand"
        ) from error
    nbytes += _sweep(path)
    with suppress(OSError):
        path.rmdir()
    return nbytes


def bytes_under(path: Path) -> int:
    """Bytes of all files in a directory and below."""
    nbytes = 0
    for folder, _, files in os.walk(path):
        for file in files:
            with suppress(OSError):
                nbytes += os.lstat(os.path.join(folder, file)).st_size
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
    if not empty and not _is_place(path):
        raise ValueError(f"{named} is a directory of other files: name a new or empty one")


def _claim(path: Path) -> tuple[Path, IO[bytes]]:
    """A new data directory and its lock. One that is not locked yet may be taken for an orphan."""
    for _ in range(_TRIES):
        data = path / f"data-{uuid.uuid4().hex}"
        with suppress(FileNotFoundError):
            path.mkdir(exist_ok=True)
            data.mkdir()
            lock = _lock(data)
            if lock is not None:
                return data, lock
    raise OSError(errno.EBUSY, "others remove it all the time")


def _lock(data: Path) -> IO[bytes] | None:
    """The lock of a data directory; None while another has it, or when the directory is gone."""
    file = data / _LOCK
    try:
        held = os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT | _NO_TRICKS, 0o666), "rb")
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


def _lock_orphan(path: Path, data: Path) -> IO[bytes] | None:
    """The lock of a data directory that is an orphan, else None."""
    lock = _lock(data)
    if lock is not None and _may_refer(path, data.name):
        lock.close()
        return None
    return lock


def _may_refer(path: Path, name: str) -> bool:
    """Whether the manifest at ``path`` refers to a data directory, or cannot be asked."""
    try:
        return _parse(path, _manifest(path)).data == name
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True


def _sweep(path: Path) -> int:
    """Remove the orphans of one archive, as far as that is possible; returns the bytes freed."""
    freed = 0
    for data in _data_directories(path):
        with suppress(OSError):
            lock = _lock_orphan(path, data)
            if lock is None:
                continue
            with lock:
                # That the manifest does not refer to it must be on disk before it goes.
                _sync_directory(path)
                before = bytes_under(data)
                shutil.rmtree(data, ignore_errors=True)
                freed += before - bytes_under(data)
    return freed


def _data_directories(path: Path) -> list[Path]:
    try:
        found = sorted(entry for entry in path.iterdir() if _DATA.fullmatch(entry.name))
    except OSError:
        return []
    return [entry for entry in found if entry.is_dir() and not entry.is_symlink()]


def _places(directory: str | os.PathLike[str]) -> list[Path]:
    """``directory`` if it is an archive or the start of one, else those directly in it."""
    directory = Path(directory).absolute()
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise ValueError(f"directory {str(directory)!r} {what}")
    if _is_place(directory):
        return [directory]
    try:
        children = sorted(directory.iterdir())
    except OSError as error:
        raise ValueError(
            f"directory {str(directory)!r} cannot be read ({error.strerror})"
        ) from error
    return [child for child in children if not child.is_symlink() and _is_place(child)]


def _is_place(path: Path) -> bool:
    """Whether a directory is an archive's: by the manifest, or by having what one has and no more.

    A manifest too damaged to tell must not make an archive a stranger, nor any other program's
    manifest.json an archive.
    """
    try:
        if FORMAT.encode() in _manifest(path):
            return True
    except (OSError, ValueError):
        pass
    try:
        names = set(os.listdir(path)) - {_MANIFEST}
    except OSError:
        return False
    return bool(names) and all(_DATA.fullmatch(name) for name in names)


def _plain(header: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``header``, as it will be read."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(header, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"header must be an object of JSON values: {error}") from error
    if type(header) is not dict or copy != header:
        raise ValueError("header must be an object of JSON values: lists, and strings as keys")
    return copy


def _encode(data: str, header: dict[str, Any], parts: list[Part]) -> bytes:
    values = {
        "format": FORMAT,
        "version": VERSION,
        "created": time.time(),
        "data": data,
        "header": header,
        "parts": [asdict(part) for part in parts],
    }
    rest = json.dumps(values, allow_nan=False).encode()[1:]
    content = b'{"crc32": "%08x", %b' % (zlib.crc32(rest), rest)
    if len(content) > LARGEST_MANIFEST:
        raise ValueError(
            f"header and {len(parts)} parts make a manifest of {len(content):,} bytes, "
            f"more than {LARGEST_MANIFEST:,}"
        )
    return content


def _manifest(path: Path) -> bytes:
    """Its bytes. OSError when it cannot be read, FileNotFoundError when there is none."""
    try:
        file = os.fdopen(os.open(path / _MANIFEST, os.O_RDONLY | _NO_TRICKS), "rb")
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DamagedError(f"archive {path}: its manifest is a symbolic link") from error
        raise
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise DamagedError(f"archive {path}: its manifest is no regular file")
        content = file.read(LARGEST_MANIFEST + 1)
    if len(content) > LARGEST_MANIFEST:
        raise DamagedError(f"archive {path}: its manifest has more than {LARGEST_MANIFEST:,} bytes")
    return content


def _parse(path: Path, content: bytes) -> Archive:
    """The archive that a manifest describes; its files are not looked at."""
    envelope = _ENVELOPE.match(content)
    if envelope is None or int(envelope[1], 16) != zlib.crc32(content[envelope.end() :]):
        raise DamagedError(f"archive {path}: its manifest is damaged")
    try:
        values = _of(dict, json.loads(content), "manifest")
        if values["format"] != FORMAT:
            raise ValueError(f"format must be {FORMAT!r}, got {values['format']!r}")
        version = _of(int, values["version"], "version")
    except (ValueError, KeyError, RecursionError) as error:
        raise DamagedError(f"archive {path}: its manifest is wrong: {error}") from error
    if version != VERSION:
        raise ValueError(
            f"archive {path}: its version is {version}, this program reads {VERSION}: "
            "use the program that wrote it"
        )
    try:
        archive = Archive(
            path=path,
            data=_of(str, values["data"], "data"),
            header=_of(dict, values["header"], "header"),
            created=_of(float, values["created"], "created"),
            parts=tuple(_part(entry) for entry in _of(list, values["parts"], "parts")),
        )
        if not _DATA.fullmatch(archive.data):
            raise ValueError(f"data must be data- and 32 hex digits, got {archive.data!r}")
        if not 0 <= archive.created < math.inf:
            raise ValueError(f"created must be seconds of at least 0, got {archive.created}")
        if len(set(archive.names)) < len(archive.names):
            raise ValueError("parts must have different names")
    except (ValueError, KeyError) as error:
        raise DamagedError(f"archive {path}: its manifest is wrong: {error}") from error
    return archive


def _part(entry: Any) -> Part:
    values = _of(dict, entry, "part")
    name = _of(str, values["name"], "name")
    if not _NAME.fullmatch(name):
        raise ValueError(f"name must be of a-z, 0-9 and -, at most 100, got {name!r}")
    numbers = {key: _of(int, values[key], key) for key in ("nbytes", "crc32")}
    for key, limit in (("nbytes", 1 << 63), ("crc32", 1 << 32)):
        if not 0 <= numbers[key] < limit:
            raise ValueError(f"{key} must be at least 0 and below {limit}, got {numbers[key]}")
    return Part(name=name, **numbers)


def _of(kind: type, value: Any, name: str) -> Any:
    if type(value) is not kind:  # true is an int to isinstance
        raise ValueError(f"{name} must be {kind.__name__}, got {type(value).__name__}")
    return value


def _check_files(archive: Archive) -> None:
    """Every file is where it must be, a file, and as long as the manifest says."""
    data = archive.path / archive.data
    try:
        if not stat.S_ISDIR(data.lstat().st_mode):
            raise DamagedError(f"archive {archive.path}: {archive.data} is no directory")
        for part in archive.parts:
            found = (data / _file_of(part.name)).lstat()
            if not stat.S_ISREG(found.st_mode):
                raise DamagedError(f"archive {archive.path}: part {part.name} is no regular file")
            if found.st_size != part.nbytes:
                raise DamagedError(
                    f"archive {archive.path}: part {part.name} must have {part.nbytes:,} bytes, "
                    f"its file has {found.st_size:,}"
                )
    except FileNotFoundError as error:
        raise DamagedError(f"archive {archive.path}: {error.filename} is missing") from None


def _file_of(name: str) -> str:
    return f"{name}.safetensors"


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    except OSError as error:
        # Some network file systems have no such thing.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(directory)


def _laid_out(arrays: Arrays) -> Arrays:
    """Arrays in the order in which their bytes lie in the file, each contiguous and little-endian.

    Larger items first, so that every array lies at a multiple of its item size.
    """
    made = {}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype.newbyteorder("=") not in _CODES:
            got = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise ValueError(
                f"array {name!r} must be a NumPy array of bfloat16, float32, float16, bool or "
                f"integers of up to 64 bits, got {got}"
            )
        if name == "__metadata__" or not _is_text(name):
            raise ValueError(f"array {name!r} must have another name")
        made[name] = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
    return dict(sorted(made.items(), key=lambda item: -item[1].itemsize))


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _part_header(arrays: Arrays) -> npt.NDArray[np.uint8]:
    entries, start = {}, 0
    for name, array in arrays.items():
        entries[name] = {
            "dtype": _CODES[array.dtype],
            "shape": array.shape,
            "data_offsets": (start, start + array.nbytes),
        }
        start += array.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)


def _write(file: Path, arrays: Iterable[npt.NDArray[Any]]) -> dict[str, int]:
    """A new file of the bytes of ``arrays``, on disk when this returns: its size and checksum.

    The checksum is of what was to be written, so that it also tells a write that went wrong.
    """
    nbytes = crc32 = 0
    target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for array in arrays:
            left = array.reshape(-1).view(np.uint8).data
            while left:
                written = os.write(target, left[:_STEP])
                crc32 = zlib.crc32(left[:written], crc32)
                nbytes += written
                left = left[written:]
        os.fsync(target)
    finally:
        os.close(target)
    return {"nbytes": nbytes, "crc32": crc32}


def _read_checked(file: Path, part: Part, again: bool) -> npt.NDArray[np.uint8]:
    """The bytes of a part, read-only. ValueError when they are not those that were written."""
    with os.fdopen(os.open(file, os.O_RDONLY | _NO_TRICKS), "rb", buffering=0) as source:
        if again:
            # What the page cache has may be what is wrong.
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = os.fstat(source.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size != part.nbytes:
            raise ValueError(f"its file has {found.st_size:,} bytes, not {part.nbytes:,}")
        data = np.empty(part.nbytes, np.uint8)
        left, crc32 = data.data, 0
        while left:
            count = source.readinto(left[:_STEP])
            if not count:
                raise ValueError(f"its file ended {len(left):,} bytes early")
            crc32 = zlib.crc32(left[:count], crc32)
            left = left[count:]
    if crc32 != part.crc32:
        raise ValueError(f"its checksum is {crc32:08x}, not {part.crc32:08x}")
    data.flags.writeable = False
    return data


def _views(data: npt.NDArray[np.uint8]) -> Arrays:
    """The arrays of a safetensors file; one that does not lie at a multiple of its item size is
    copied.

    The library parses files or copies: it gets a sparse file with the same header.
    """
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    arrays: Arrays = {}
    with os.fdopen(os.memfd_create("header"), "wb") as twin:
        twin.write(data[:start].data)
        twin.truncate(data.size)
        with safe_open(f"/proc/self/fd/{twin.fileno()}", framework="numpy") as parsed:
            for name in parsed.offset_keys():
                entry = parsed.get_slice(name)
                code, shape = entry.get_dtype(), entry.get_shape()
                if code not in _DTYPES:
                    raise ValueError(f"its array {name!r} is of {code}, which no archive has")
                stop = start + math.prod(shape) * _DTYPES[code].itemsize
                array = data[start:stop].view(_DTYPES[code]).reshape(shape)
                arrays[name] = array if array.flags.aligned else array.copy()
                arrays[name].flags.writeable = False
                start = stop
    return arrays
