"""What a model family is to the loader: how its config.json reads and what its checkpoints call
each tensor.

A family is data. `weights.build_model` applies the table; `FAMILIES` there lists the families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvdrive_jax.models.config import ModelConfig
from kvdrive_jax.models.rope import parse_rope


@dataclass(frozen=True)
class Rule:
    """One kind of checkpoint tensor.

    Attributes:
        name: its name, `{layer}` standing for the layer's number.
        target: the parameter it becomes, or becomes part of (an attribute of `DecoderLayer` or
        `Ends`).
        part: "all", or which columns of a fused parameter: "q", "k", "v", "gate" or "up".
        transpose: the checkpoint stores [out, in], we store [in, out].
    """

    name: str
    target: str
    part: str = "all"
    transpose: bool = False

    @property
    def per_layer(self) -> bool:
        """Whether every layer has one."""
        return "{layer}" in self.name


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        name: what `ModelConfig.architecture` says.
        hf_architecture: the class name in config.json's `architectures`.
        model_type: config.json's `model_type`.
        parse: config.json to the arguments of `ModelConfig` that are the family's own.
        windows: config.json to each layer's sliding window in tokens, None for full attention.
        rules: one per kind of tensor. Rules for parameters that a configuration lacks do not apply.
    """

    name: str
    hf_architecture: str
    model_type: str
    parse: Callable[[Mapping[str, Any]], dict[str, Any]]
    windows: Callable[[Mapping[str, Any]], Sequence[int | None]]
    rules: tuple[Rule, ...]


def required(raw: Mapping[str, Any], name: str) -> Any:
    """A setting that config.json must have.

    Raises:
        ValueError: it is missing.
    """
    value = raw.get(name)
    if value is None:
        raise ValueError(f"config.json: expected a value for {name!r}, found none")
    return value


def common_fields(raw: Mapping[str, Any], *, head_dim: int | None = None) -> dict[str, Any]:
    """The arguments of `ModelConfig` that every family reads the same way.

    Args:
        raw: the parsed config.json.
        head_dim: D where config.json does not say; None is hidden size over heads.

    Raises:
        ValueError: a missing setting, an activation other than SiLU, or RoPE settings that are
            unknown.
    """
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act: expected 'silu', got {activation!r}")
    hidden, heads = int(required(raw, "hidden_size")), int(required(raw, "num_attention_heads"))
    max_positions = int(required(raw, "max_position_embeddings"))
    dim = int(raw.get("head_dim") or head_dim or hidden // heads)
    return {
        "vocab_size": int(required(raw, "vocab_size")),
        "hidden_size": hidden,
        "intermediate_size": int(required(raw, "intermediate_size")),
        "num_layers": int(required(raw, "num_hidden_layers")),
        "num_heads": heads,
        "num_kv_heads": int(raw.get("num_key_value_heads") or heads),
        "head_dim": dim,
        "rms_norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "max_positions": max_positions,
        "rope": parse_rope(raw, head_dim=dim, max_positions=max_positions),
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
    }


def no_windows(raw: Mapping[str, Any]) -> list[int | None]:
    """Full attention in every layer."""
    return [None] * int(required(raw, "num_hidden_layers"))


def usable_positions(
    config: ModelConfig, windows: Sequence[int | None], context_length: int | None
) -> int:
    """Longest context for which every window covers everything, so that attention is full.

    Args:
        config: the model.
        windows: per layer, tokens or None.
        context_length: the longest context that will be asked for, None for the model's own
            maximum.

    Raises:
        NotImplementedError: a window is shorter than that.
    """
    wanted = min(context_length or config.max_positions, config.max_positions)
    short = [i for i, window in enumerate(windows) if window is not None and window < wanted]
    if short:
        named = ", ".join(str(i) for i in short[:8]) + (", ..." if len(short) > 8 else "")
        window = min(w for w in windows if w is not None)
        raise NotImplementedError(
            f"sliding-window attention is not supported: layers {named} see {window} tokens, "
            f"and the context is {wanted}; a context length of at most {window} makes their "
            "attention full"
        )
    return min([config.max_positions, *(w for w in windows if w is not None)])
