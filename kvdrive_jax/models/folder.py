"""A Hugging Face model folder, read tensor by tensor. Local files only, never the network."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvdrive_jax.models.assembly import aligned_empty

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
SAMPLES, SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True)
class Shard:
    """One safetensors file.

    Attributes:
        path: where it is.
        header: per tensor name its `dtype`, `shape` and `data_offsets`.
        header_bytes: length of the header with its length field; tensors follow.
    """

    path: Path
    header: dict[str, dict[str, Any]]
    header_bytes: int


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of the folder.

    Raises:
        ValueError: the file is missing, is not JSON or holds no object.
    """
    path = folder / name
    if not path.is_file():
        raise ValueError(f"model folder {folder}: expected a file {name}, found none")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_shards(folder: Path) -> dict[str, Shard]:
    """The folder's shards, headers read and checked against the index.

    Returns:
        tensor name -> the shard that holds it.

    Raises:
        ValueError: no weights, a missing or damaged shard, a tensor that the index names and its
            shard lacks, or one that two shards hold.
    """
    if (folder / INDEX).is_file():
        return _read_indexed(folder)
    if not (folder / SINGLE).is_file():
        found = sorted(p.name for p in folder.iterdir() if p.is_file())
        raise ValueError(
            f"model folder {folder}: expected {SINGLE} or {INDEX}, found {_listed(found)}"
        )
    shard = _read_header(folder / SINGLE)
    return dict.fromkeys(shard.header, shard)


def _read_indexed(folder: Path) -> dict[str, Shard]:
    weight_map = read_json(folder, INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{folder / INDEX}: expected an object 'weight_map', found none")
    files = sorted(set(weight_map.values()))
    # The index decides, not a pattern of file names: folders hold stale and oddly named shards.
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        present = sorted(p.name for p in folder.glob("*.safetensors"))
        raise ValueError(
            f"model folder {folder}: missing shard {_listed(missing)}: "
            f"the index says {_listed(files)}, the folder has {_listed(present)}"
        )
    shards = {name: _read_header(folder / name) for name in files}
    for tensor, name in weight_map.items():
        if tensor not in shards[name].header:
            raise ValueError(
                f"tensor {tensor}: the index says it is in {name}, which does not hold it"
            )
    located: dict[str, Shard] = {}
    for shard in shards.values():
        for tensor in shard.header:
            if tensor in located:
                raise ValueError(
                    f"tensor {tensor}: duplicate, in {located[tensor].path.name} "
                    f"and {shard.path.name}"
                )
            located[tensor] = shard
    return located


def _read_header(path: Path) -> Shard:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(
                f"{path}: expected a safetensors header of {length} bytes, got {size} bytes in all"
            )
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path}: damaged safetensors header: {error}") from error
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != end:
        raise ValueError(f"{path}: expected {end} bytes by its header, got {size}; is it complete?")
    for tensor, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise NotImplementedError(
                f"tensor {tensor} in {path.name}: dtype {entry['dtype']} is not supported, only "
                f"{', '.join(_DTYPES)}"
            )
    return Shard(path, header, 8 + length)


def stored_dtype(located: dict[str, Shard]) -> str:
    """The dtype that most elements have: float32 (float64 too), float16 or bfloat16."""
    elements: Counter[str] = Counter()
    for tensor, shard in located.items():
        entry = shard.header[tensor]
        elements[_DTYPES[entry["dtype"]].name] += math.prod(entry["shape"])
    name = elements.most_common(1)[0][0] if elements else "float32"
    return "float32" if name == "float64" else name


def stream(located: dict[str, Shard]) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Every tensor, in the order it lies in its file, one in memory at a time.

    Raises:
        ValueError: a tensor whose bytes do not fit its shape, or that ends before it should.
    """
    order = sorted(located, key=lambda t: (located[t].path.name, _offset(located[t], t)))
    for tensor in order:
        yield tensor, _read(located[tensor], tensor)


def _read(shard: Shard, tensor: str) -> npt.NDArray[Any]:
    """One tensor, read into memory that a CPU device can take over as it is.

    Read rather than mapped: pages of a mapped file count as this process's memory until the file is
    closed, which doubles the peak of a load.
    """
    entry = shard.header[tensor]
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    nbytes = dtype.itemsize * math.prod(shape)
    if end - begin != nbytes:
        raise ValueError(
            f"tensor {tensor} in {shard.path.name}: expected {nbytes} bytes for "
            f"{entry['dtype']} {shape}, got {end - begin}"
        )
    array = aligned_empty(shape, dtype)
    buffer = array.reshape(-1).view(np.uint8)
    with shard.path.open("rb", buffering=0) as file:
        file.seek(shard.header_bytes + begin)
        filled = 0
        while filled < nbytes:  # one read of an unbuffered file stops at 2 GiB
            got = file.readinto(buffer[filled:].data)
            if not got:
                raise ValueError(f"tensor {tensor} in {shard.path.name}: the file ends within it")
            filled += got
    return array


def _offset(shard: Shard, tensor: str) -> int:
    return int(shard.header[tensor]["data_offsets"][0])


def digest(folder: Path, located: dict[str, Shard]) -> str:
    """Identifies configuration and weights without reading all of them.

    SHA-256 over config.json and, per shard in order of name: its name, size, header (names, dtypes,
    shapes and offsets of all tensors) and 64 samples of 4 KiB spread evenly from its first to its
    last byte. Times and places of files do not enter. Two checkpoints that differ only between
    samples are not told apart.
    """
    state = hashlib.sha256(b"kvdrive-folder-1")
    state.update((folder / "config.json").read_bytes())
    for shard in sorted({s.path: s for s in located.values()}.values(), key=lambda s: s.path.name):
        size = shard.path.stat().st_size
        state.update(f"\0{shard.path.name}\0{size}\0".encode())
        last = max(size - SAMPLE_BYTES, 0)
        with shard.path.open("rb") as file:
            state.update(file.read(shard.header_bytes))
            for i in range(SAMPLES):
                file.seek(last * i // (SAMPLES - 1))
                state.update(file.read(SAMPLE_BYTES))
    return state.hexdigest()


def _listed(names: list[str]) -> str:
    return (", ".join(names[:6]) + (", ..." if len(names) > 6 else "")) if names else "nothing"
