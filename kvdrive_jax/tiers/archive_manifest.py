"""The manifest of an archive: what it holds, read with suspicion."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from kvdrive_jax.tiers.archive_parts import NO_TRICKS, Part, file_of

FORMAT: Final = "kvdrive_jax archive"
VERSION: Final = 1
LARGEST_MANIFEST: Final = 1 << 20
"""Bytes; a larger manifest is neither written nor read."""

MANIFEST: Final = "manifest.json"
DATA: Final = re.compile(r"data-[0-9a-f]{32}")
NAME: Final = re.compile(r"[a-z0-9-]{1,100}")
_ENVELOPE: Final = re.compile(rb'\{"crc32": "([0-9a-f]{8})", ')


class DamagedError(ValueError):
    """What is there can never be opened: a file is missing, cut short or changed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """What a manifest says.

    Attributes:
        path: the archive's directory; data: the name of the data directory in it.
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


def plain_header(header: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``header``, as it will be read."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(header, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"header must be an object of JSON values: {error}") from error
    if type(header) is not dict or copy != header:
        raise ValueError("header must be an object of JSON values: lists, and strings as keys")
    return copy


def encode_manifest(data: str, header: dict[str, Any], parts: list[Part]) -> bytes:
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


def read_manifest(path: Path) -> bytes:
    """Its bytes. OSError when it cannot be read, FileNotFoundError when there is none."""
    try:
        file = os.fdopen(os.open(path / MANIFEST, os.O_RDONLY | NO_TRICKS), "rb")
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


def parse_manifest(path: Path, content: bytes) -> Manifest:
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
        archive = Manifest(
            path=path,
            data=_of(str, values["data"], "data"),
            header=_of(dict, values["header"], "header"),
            created=_of(float, values["created"], "created"),
            parts=tuple(_part(entry) for entry in _of(list, values["parts"], "parts")),
        )
        if not DATA.fullmatch(archive.data):
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
    if not NAME.fullmatch(name):
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


def check_files(archive: Manifest) -> None:
    """Every file is where it must be, a file, and as long as the manifest says."""
    data = archive.path / archive.data
    try:
        if not stat.S_ISDIR(data.lstat().st_mode):
            raise DamagedError(f"archive {archive.path}: {archive.data} is no directory")
        for part in archive.parts:
            found = (data / file_of(part.name)).lstat()
            if not stat.S_ISREG(found.st_mode):
                raise DamagedError(f"archive {archive.path}: part {part.name} is no regular file")
            if found.st_size != part.nbytes:
                raise DamagedError(
                    f"archive {archive.path}: part {part.name} must have {part.nbytes:,} bytes, "
                    f"its file has {found.st_size:,}"
                )
    except FileNotFoundError as error:
        raise DamagedError(f"archive {archive.path}: {error.filename} is missing") from None
