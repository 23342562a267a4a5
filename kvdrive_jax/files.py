"""Files in one piece, and small JSON ones that are kept between runs: where, written, checked."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import reprlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


def cache_folder(name: str) -> str:
    """The user's folder of that name: under ``XDG_CACHE_HOME``, else under ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(root, "kvdrive_jax", name)


def name_of(values: Any) -> str:
    """A file name, without suffix, that stands for plain values: the same for equal ones."""
    text = json.dumps(values, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


@contextmanager
def whole_file(path: str) -> Iterator[TextIO]:
    """A text file that takes the place of ``path`` when it is complete, and never before."""
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe or device stays what it is
        with open(path, "w", encoding="utf-8") as file:
            yield file
        return
    folder, name = os.path.split(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}-", suffix=".part")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            yield file
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path: str | os.PathLike[str], values: Any) -> None:
    """In one piece: what was there before stays until the new file is complete."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(values, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: str | os.PathLike[str], largest: int) -> Any:
    """What a file of at most ``largest`` bytes holds. Raises OSError, or ValueError for one that is
    larger or no JSON."""
    # Read no further than the limit: the size of a pipe or device is not known before.
    with open(path, "rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"its bytes are more than {largest:,}")
    return json.loads(content.decode("utf-8"))


_CANNOT_LOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@contextmanager
def folder_lock(folder: str) -> Iterator[None]:
    """Alone among the processes that lock this folder, where the file system can lock."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock_handle(handle, wait=True)
        yield
    finally:
        os.close(handle)


def lock_handle(handle: int, *, wait: bool) -> bool:
    """Whether the lock was had, which closing frees. Where there are no locks, it never is."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _CANNOT_LOCK:
            return False
        raise
    return True


# What was read, checked.


def typed(cls: Any, values: Any, where: str) -> Any:
    """``cls(**values)`` of a dataclass whose fields are int, float or str, with those types.

    Raises ValueError naming the field, KeyError for one that is missing.
    """
    kinds: dict[str, Any] = {"int": int, "str": str, "float": (int, float)}
    table = of_kind(dict, values, where)
    fields = dataclasses.fields(cls)
    return cls(**{f.name: of_kind(kinds[str(f.type)], table[f.name], f.name) for f in fields})


def number(value: Any, name: str) -> float:
    """``value`` as float if it is a number."""
    return float(of_kind((int, float), value, name))


def of_kind(kind: Any, value: Any, name: str) -> Any:
    """``value`` if it is of a JSON kind; true and false are no numbers."""
    if isinstance(value, kind) and not isinstance(value, bool):
        return value
    kinds = kind if isinstance(kind, tuple) else (kind,)
    expected = " or ".join(one.__name__ for one in kinds)
    raise ValueError(f"{name} must be {expected}, got {reprlib.repr(value)}")
