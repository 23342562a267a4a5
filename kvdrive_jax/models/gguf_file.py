"""The GGUF container: metadata and tensors of one file, read lazily.

The header is parsed here and not by ``gguf.GGUFReader`` because a vocabulary of 150,000 entries
takes that reader seconds (one array object per entry) and because a damaged length field makes it
loop past the end of the file. The block formats themselves are the ``gguf`` package's.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import struct
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_SCALARS: Final = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_DIGEST_SAMPLE_BYTES: Final = 4096

SUPPORTED_QUANTIZATIONS: Final = (
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
)


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies and how it is stored.

    Attributes:
        shape: NumPy order, so ``[out, in]`` for a matrix (the file stores the reverse).
        quantization: name of the block format, ``"Q4_1"``.
        offset: bytes from the start of the file.
        nbytes: stored bytes.
    """

    name: str
    shape: tuple[int, ...]
    quantization: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """An open GGUF file: ``metadata`` by key, ``tensors`` by name, ``read(name)`` for the values.

    Strings of the metadata are ``str`` (``tokenizer.ggml.tokens`` included), arrays of numbers
    NumPy arrays.
    """

    path: str
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    header_bytes: int
    _bytes: mmap.mmap = field(repr=False, compare=False)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Returns one tensor dequantised to float32; only this tensor's bytes are touched.

        Raises:
            KeyError: there is no such tensor.
        """
        info = self.tensors[name]
        kind = GGMLQuantizationType[info.quantization]
        raw = np.frombuffer(self._bytes, np.uint8, info.nbytes, info.offset)
        rows = raw.reshape(*info.shape[:-1], -1)  # bytes of one row, as the block formats expect
        # A copy also where nothing is dequantised: what outlives the file must not depend on it.
        return np.array(dequantize(rows, kind), np.float32).reshape(info.shape)

    def digest(self) -> str:
        """Names the content: hash of the header, the file size and both ends of every tensor.

        Whole tensors are not hashed, so that a file of many gigabytes costs milliseconds; weights
        that differ between two files differ at their ends as well, short of a deliberate forgery.
        """
        found = hashlib.blake2b(digest_size=16)
        found.update(self._bytes[: self.header_bytes])
        found.update(str(len(self._bytes)).encode())
        for info in self.tensors.values():
            end = info.offset + info.nbytes
            found.update(self._bytes[info.offset : min(info.offset + _DIGEST_SAMPLE_BYTES, end)])
            found.update(self._bytes[max(end - _DIGEST_SAMPLE_BYTES, info.offset) : end])
        return found.hexdigest()


class _Cursor:
    """Reads little-endian values off the mapped bytes; never past their end."""

    def __init__(self, path: str, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def damaged(self, what: str) -> ValueError:
        return ValueError(
            f"path: {self.path} is a damaged or truncated GGUF file: {what} "
            f"(at byte {self.at} of {len(self.data)})"
        )

    def take(self, nbytes: int) -> int:
        """Moves past ``nbytes`` and returns where they begin."""
        begin = self.at
        if nbytes > len(self.data) - begin:
            raise self.damaged(f"{nbytes} more bytes expected")
        self.at += nbytes
        return begin

    def u32(self) -> int:
        return int(struct.unpack_from("<I", self.data, self.take(4))[0])

    def u64(self) -> int:
        return int(struct.unpack_from("<Q", self.data, self.take(8))[0])

    def string(self) -> str:
        size = self.u64()
        begin = self.take(size)
        try:
            return self.data[begin : begin + size].decode("utf-8")
        except UnicodeDecodeError as err:
            raise self.damaged("a string is not UTF-8") from err

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            item = np.dtype(_SCALARS[kind])
            found = np.frombuffer(self.data, item, 1, self.take(item.itemsize))[0].item()
            return bool(found) if kind == _BOOL else found
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        raise self.damaged(f"unknown value type {kind}")

    def array(self) -> Any:
        kind, count = self.u32(), self.u64()
        if kind in _SCALARS:
            item = np.dtype(_SCALARS[kind])
            found = np.frombuffer(self.data, item, count, self.take(count * item.itemsize)).copy()
            return found.astype(np.bool_) if kind == _BOOL else found
        if kind != _STRING:
            raise self.damaged(f"an array of value type {kind}")
        return [
            self.string() for _ in range(count)
        ]  # ends at the file's end whatever ``count`` says


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Opens a file, reads its header and checks that every tensor lies inside it.

    Raises:
        ValueError: there is no such file.
        ValueError: not a GGUF file, damaged, truncated, or a block format outside
            `SUPPORTED_QUANTIZATIONS`.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise ValueError(
            f"path: expected a GGUF file, got {path}, which does not exist or is no file"
        )
    with open(path, "rb") as file:
        start = file.read(len(_MAGIC))
        if start != _MAGIC:
            raise ValueError(f"path: expected a GGUF file, got {path}, which begins with {start!r}")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(path, data)
    cursor.take(len(_MAGIC))
    version = cursor.u32()
    if version not in _VERSIONS:
        raise ValueError(
            f"path: expected GGUF version 2 or 3, little-endian, got version {version} in {path}"
        )
    n_tensors, n_keys = cursor.u64(), cursor.u64()
    metadata: dict[str, Any] = {}
    for _ in range(n_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.u32())
    described = [_tensor_header(cursor) for _ in range(n_tensors)]
    alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
    if alignment < 1:
        raise cursor.damaged(f"general.alignment is {alignment}")
    base = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in described:
        if name in tensors:
            raise cursor.damaged(f"tensor {name} is listed twice")
        tensors[name] = _tensor_info(cursor, name, shape, kind, base + offset)
    return GGUFFile(path, metadata, tensors, min(base, len(data)), data)


def _tensor_header(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Reads name, shape (NumPy order), type number and offset from the start of the tensor data."""
    name = cursor.string()
    rank = cursor.u32()
    if rank > 8:
        raise cursor.damaged(f"tensor {name} has {rank} dimensions")
    dims = tuple(cursor.u64() for _ in range(rank))
    kind = cursor.u32()
    return name, dims[::-1], kind, cursor.u64()


def _tensor_info(
    cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> TensorInfo:
    try:
        quantization = GGMLQuantizationType(kind)
    except ValueError:
        quantization = None
    if quantization is None or quantization.name not in SUPPORTED_QUANTIZATIONS:
        found = f"type {kind}" if quantization is None else quantization.name
        raise ValueError(
            f"path: tensor {name} of {cursor.path} is stored as {found}; "
            f"supported: {', '.join(SUPPORTED_QUANTIZATIONS)}"
        )
    per_block, block_bytes = GGML_QUANT_SIZES[quantization]
    if not shape or 0 in shape or shape[-1] % per_block:
        raise cursor.damaged(
            f"tensor {name} of shape {list(shape)} does not divide into {quantization.name} blocks "
            f"of {per_block}"
        )
    nbytes = math.prod(shape) // per_block * block_bytes
    if offset + nbytes > len(cursor.data):
        raise ValueError(
            f"path: {cursor.path} is truncated: tensor {name} ends at byte {offset + nbytes}, "
            f"the file has {len(cursor.data)}"
        )
    return TensorInfo(name, shape, quantization.name, offset, nbytes)
