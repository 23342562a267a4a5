"""Qwen2 and Qwen2.5 (bias on q, k and v), Qwen3 (a norm per query and key head)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvdrive_jax.models.family import Family, Rule, common_fields, required
from kvdrive_jax.models.llama import LAYER, RULES

QK_NORM_RULES = (
    Rule(LAYER + "self_attn.q_norm.weight", "q_norm"),
    Rule(LAYER + "self_attn.k_norm.weight", "k_norm"),
)


def parse_qwen2(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen2's config.json; the bias on q, k and v is not a setting."""
    return common_fields(raw) | {"attention_bias": True}


def parse_qwen3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen3's config.json; heads are 128 wide where it does not say, whatever the hidden size."""
    bias = bool(raw.get("attention_bias", False))
    return common_fields(raw, head_dim=128) | {
        "attention_bias": bias,
        "output_bias": bias,
        "qk_norm": True,
    }


def windows(raw: Mapping[str, Any]) -> list[int | None]:
    """Each layer's window: `layer_types` where given, else the layers from `max_window_layers` on,
    and none at all
    unless `use_sliding_window` is set (the published files state a window that is switched off)."""
    layers = int(required(raw, "num_hidden_layers"))
    window = int(raw.get("sliding_window") or 4096) if raw.get("use_sliding_window") else None
    kinds = raw.get("layer_types")
    if kinds is None:
        first = int(raw.get("max_window_layers", 28))
        return [window if i >= first else None for i in range(layers)]
    if len(kinds) != layers:
        raise ValueError(f"layer_types: expected {layers} entries, got {len(kinds)}")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise NotImplementedError(f"layer types {', '.join(unknown)} are not supported")
    return [window if kind == "sliding_attention" else None for kind in kinds]


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", "qwen2", parse_qwen2, windows, RULES)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", "qwen3", parse_qwen3, windows, RULES + QK_NORM_RULES)
