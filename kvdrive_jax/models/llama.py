"""Llama 2, 3 and 3.x, and models of that shape. Other families vary its tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvdrive_jax.models.family import Family, Rule, common_fields, no_windows

LAYER = "model.layers.{layer}."

END_RULES = (
    Rule("model.embed_tokens.weight", "embedding"),
    Rule("model.norm.weight", "final_norm"),
    Rule("lm_head.weight", "head", transpose=True),
)
NORM_RULES = (
    Rule(LAYER + "input_layernorm.weight", "input_norm"),
    Rule(LAYER + "post_attention_layernorm.weight", "post_norm"),
)
OUTPUT_RULES = (
    Rule(LAYER + "self_attn.o_proj.weight", "output", transpose=True),
    Rule(LAYER + "self_attn.o_proj.bias", "output_bias"),
    Rule(LAYER + "mlp.down_proj.weight", "down", transpose=True),
    Rule(LAYER + "mlp.down_proj.bias", "down_bias"),
)
ATTENTION_RULES = tuple(
    rule
    for part in ("q", "k", "v")
    for rule in (
        Rule(LAYER + f"self_attn.{part}_proj.weight", "qkv", part, transpose=True),
        Rule(LAYER + f"self_attn.{part}_proj.bias", "qkv_bias", part),
    )
)
MLP_RULES = tuple(
    rule
    for part in ("gate", "up")
    for rule in (
        Rule(LAYER + f"mlp.{part}_proj.weight", "gate_up", part, transpose=True),
        Rule(LAYER + f"mlp.{part}_proj.bias", "gate_up_bias", part),
    )
)
RULES = END_RULES + NORM_RULES + ATTENTION_RULES + OUTPUT_RULES + MLP_RULES


def parse(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Llama's config.json. `attention_bias` is on all four projections of attention."""
    bias = bool(raw.get("attention_bias", False))
    return common_fields(raw) | {
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": bool(raw.get("mlp_bias", False)),
    }


LLAMA = Family("llama", "LlamaForCausalLM", "llama", parse, no_windows, RULES)
