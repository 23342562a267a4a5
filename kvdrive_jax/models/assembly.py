"""From the tensors of a checkpoint to the parameters of a decoder: where each goes, and the fusing.

Parts of a fused parameter are written, transposed and converted, into one host buffer that goes to
the device when it is full. Doing this on the host costs no compilation and no second copy.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from kvdrive_jax.models.config import ModelConfig
from kvdrive_jax.models.family import Rule
from kvdrive_jax.models.model import define

ALIGNMENT = 64  # of memory that a CPU device takes over without a copy
BLOCK_ROWS = 64  # rows that are transposed at a time; so few stay in the cache

Key = tuple[int | None, str]


@dataclass(frozen=True)
class Place:
    """Where a checkpoint's tensor goes.

    Attributes:
        key: layer (None: the ends) and parameter.
        shape: what the tensor must have in the checkpoint.
        parameter_shape: what the whole parameter has in the decoder.
        columns: the part of its last axis that the tensor fills.
        transpose: the checkpoint stores [out, in].
    """

    key: Key
    shape: tuple[int, ...]
    parameter_shape: tuple[int, ...]
    columns: slice
    transpose: bool


def places(config: ModelConfig, rules: tuple[Rule, ...]) -> dict[str, Place]:
    """Every tensor that a checkpoint may hold, by name; all but the head must be there.

    Rules for parameters that this configuration lacks have no effect.
    """
    static, layer, ends = define(dataclasses.replace(config, tied_embeddings=False), jnp.float32)
    layer_shapes = {n: x.shape for n, x in zip(static.layer_def.names, layer, strict=True)}
    ends_shapes = {n: x.shape for n, x in zip(static.ends_def.names, ends, strict=True)}
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    columns = {
        "q": slice(0, queries),
        "k": slice(queries, queries + keys),
        "v": slice(queries + keys, queries + 2 * keys),
        "gate": slice(0, inner),
        "up": slice(inner, 2 * inner),
    }
    found: dict[str, Place] = {}
    for rule in rules:
        whole = (layer_shapes if rule.per_layer else ends_shapes).get(rule.target)
        if whole is None:
            continue
        part = columns.get(rule.part, slice(0, whole[-1]))
        shape = (*whole[:-1], part.stop - part.start)
        shape = shape[::-1] if rule.transpose else shape
        layers = range(config.num_layers) if rule.per_layer else (None,)
        for i in layers:
            found[rule.name.format(layer=i)] = Place(
                (i, rule.target), shape, whole, part, rule.transpose
            )
    return found


class Assembler:
    """Collects the parts of parameters.

    Args:
        dtype: what every parameter is converted to.
        pool: threads that share the transposing.
    """

    def __init__(self, dtype: np.dtype[Any], pool: ThreadPoolExecutor) -> None:
        self._dtype, self._pool = dtype, pool
        self._buffers: dict[Key, npt.NDArray[Any]] = {}
        self._missing: dict[Key, int] = {}

    def add(self, place: Place, array: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        """Takes a tensor of the shape that its place says, once.

        Returns:
            the parameter, when this was its last part.
        """
        width = place.parameter_shape[-1]
        filled = place.columns.stop - place.columns.start
        if filled == width and not place.transpose:
            return array.astype(self._dtype, copy=False)
        if place.key not in self._buffers:
            self._buffers[place.key] = aligned_empty(place.parameter_shape, self._dtype)
            self._missing[place.key] = width
        target = self._buffers[place.key][..., place.columns]
        if place.transpose:
            rows = range(0, array.shape[0], BLOCK_ROWS)
            for _ in self._pool.map(functools.partial(_transpose_rows, target, array), rows):
                pass
        else:
            target[...] = array
        self._missing[place.key] -= filled
        if self._missing[place.key]:
            return None
        del self._missing[place.key]
        return self._buffers.pop(place.key)


def _transpose_rows(target: npt.NDArray[Any], array: npt.NDArray[Any], row: int) -> None:
    # Converted before it is turned: a converting copy between strides is several times slower.
    block = array[row : row + BLOCK_ROWS].astype(target.dtype, copy=False)
    target[:, row : row + BLOCK_ROWS] = block.T


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """An uninitialised array whose memory a CPU device takes over without a copy."""
    nbytes = dtype.itemsize * math.prod(shape)
    padded = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -padded.ctypes.data % ALIGNMENT
    return padded[start : start + nbytes].view(dtype).reshape(shape)
