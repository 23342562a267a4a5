"""Phi-3, Phi-3.5 and Phi-4-mini: q, k, v and gate, up come fused, in the order we keep them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvdrive_jax.models.family import Family, Rule, common_fields, required
from kvdrive_jax.models.llama import END_RULES, LAYER, NORM_RULES, OUTPUT_RULES

FUSED_RULES = (
    Rule(LAYER + "self_attn.qkv_proj.weight", "qkv", transpose=True),
    Rule(LAYER + "mlp.gate_up_proj.weight", "gate_up", transpose=True),
)


def parse(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Phi-3's config.json. Early files call longrope "su", or "yarn" with longrope's factors."""
    settings = raw.get("rope_parameters") or raw.get("rope_scaling")
    if settings:
        kind = settings.get("rope_type") or settings.get("type")
        if kind == "su" or (kind == "yarn" and "long_factor" in settings):
            settings = {**settings, "rope_type": "longrope"}
        raw = {**raw, "rope_parameters": settings}
    return common_fields({"rms_norm_eps": 1e-5, **raw})


def windows(raw: Mapping[str, Any]) -> list[int | None]:
    """One window for all layers, if config.json states one."""
    window = raw.get("sliding_window")
    return [None if window is None else int(window)] * int(required(raw, "num_hidden_layers"))


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    "phi3",
    parse,
    windows,
    END_RULES + NORM_RULES + FUSED_RULES + OUTPUT_RULES,
)
