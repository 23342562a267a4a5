"""The files of an archive's parts: safetensors, written and read whole, with a checksum."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import safe_open

_STEP: Final = 4 << 20  # small enough that a checksum finds in the CPU's cache what was just read
NO_TRICKS: Final = os.O_NOFOLLOW | os.O_NONBLOCK
"""To open with: a symbolic link is refused, a pipe cannot block."""

_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    **{f"{kind}{8 * n}": np.dtype(f"{kind.lower()}{n}") for kind in "IU" for n in (1, 2, 4, 8)},
    "BOOL": np.dtype(np.bool_),
}
_CODES: Final = {dtype: code for code, dtype in _DTYPES.items()}

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One file of an archive, its size in bytes and the CRC-32 of all of them."""

    name: str
    nbytes: int
    crc32: int


def file_of(name: str) -> str:
    return f"{name}.safetensors"


def sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    except OSError as error:
        # Some network file systems have no such thing.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(directory)


def laid_out(arrays: Arrays) -> Arrays:
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


def part_header(arrays: Arrays) -> npt.NDArray[np.uint8]:
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


def write_file(file: Path, arrays: Iterable[npt.NDArray[Any]]) -> dict[str, int]:
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


def read_checked(file: Path, part: Part, again: bool) -> npt.NDArray[np.uint8]:
    """The bytes of a part, read-only. ValueError when they are not those that were written."""
    with os.fdopen(os.open(file, os.O_RDONLY | NO_TRICKS), "rb", buffering=0) as source:
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


def views(data: npt.NDArray[np.uint8]) -> Arrays:
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
