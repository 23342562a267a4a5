"""A model with its matrices as int8."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvdrive_jax import compat
from kvdrive_jax.config import WeightsName
from kvdrive_jax.models.config import ModelConfig
from kvdrive_jax.models.model import Leaves, Model, define
from kvdrive_jax.models.packed import Packed, pack, packed_nbytes


def pack_model(model: Model) -> Model:
    """The same model with int8 matrices (`packed.Packed`); norms, biases and the embedding that is
    looked up stay as they are.

    The matrices of all layers lie in one array, of which each layer's leaves name a part. Raises
    NotImplementedError where there is no fast product with them.
    """
    if compat.platform() != "cpu":
        raise NotImplementedError(
            f"weights_dtype int8 needs a CPU, and this is {compat.device_name()}: give model"
        )
    kinds = [_pack_kind(arrays) for arrays in zip(*model.layers, strict=True)]
    layers = tuple(zip(*kinds, strict=True))
    parts = dict(zip(model.ends_def.names, model.ends, strict=True))
    config = replace(model.config, tied_embeddings=False)
    static, _, _ = define(config, model.dtype)
    parts["head"] = pack(  # type: ignore[assignment]
        parts["embedding"].T if "head" not in parts else parts["head"]
    )
    ends: Leaves = tuple(parts[name] for name in static.ends_def.names)
    return replace(
        model,
        static=replace(static, layer_def=model.layer_def),
        layers=layers,
        ends=ends,
        digest=packed_digest(model.digest),
    )


def packed_size(config: ModelConfig, dtype: np.dtype[Any]) -> int:
    """Bytes of the model that `pack_model` makes, without any weights."""
    _, layer, _ = define(config, dtype)
    layers = sum(
        packed_nbytes(leaf.shape) if leaf.ndim > 1 else leaf.size * dtype.itemsize for leaf in layer
    )
    kept = (config.vocab_size + 1) * config.hidden_size * dtype.itemsize
    head = packed_nbytes((config.hidden_size, config.vocab_size))
    return config.num_layers * layers + kept + head


def held(
    config: ModelConfig, dtype: np.dtype[Any], parameters: int, digest: str, weights: WeightsName
) -> tuple[int, str]:
    """Parameters, as many of ``dtype`` as the weights take bytes, and digest of a model whose
    matrices are ``weights``."""
    if weights == "model":
        return parameters, digest
    return packed_size(config, dtype) // dtype.itemsize, packed_digest(digest)


def packed_digest(digest: str) -> str:
    """Of the model that `pack_model` makes."""
    return f"{digest}-int8"


def _pack_kind(arrays: tuple[Any, ...]) -> list[Any]:
    """One parameter of all layers."""
    if arrays[0].ndim < 2:
        return list(arrays)
    packed = [pack(array) for array in arrays]
    codes = jnp.stack([one.codes for one in packed])
    scale = jnp.stack([one.scale for one in packed])
    inputs = packed[0].inputs
    return [Packed(codes, scale, inputs, jnp.int32(layer)) for layer in range(len(arrays))]
