"""What people type for models and lengths."""

from __future__ import annotations

from kvdrive_jax.models.config import ModelConfig
from kvdrive_jax.models.presets import PRESETS, preset

SHORT = {
    "smollm2": "SmolLM2-135M-Instruct",
    "llama-3-8b": "Llama-3-8B-Instruct-Gradient-1048k",
    "qwen3-8b": "Qwen3-8B",
    "qwen3-14b": "Qwen3-14B",
    "phi-4-mini": "Phi-4-mini-instruct",
}


def model_named(name: str) -> ModelConfig:
    """A published model by its short or full name; ValueError, with the choices, for another."""
    if name not in SHORT and name not in PRESETS:
        raise ValueError(f"model must be one of {', '.join([*SHORT, *PRESETS])}, got {name!r}")
    return preset(SHORT.get(name, name))


def parse_tokens(text: str) -> int:
    """``128K`` is 131,072; ValueError for anything else than digits with K or M."""
    scale = {"K": 1024, "M": 1024**2}.get(text[-1:].upper(), 1)
    digits = text[:-1] if scale > 1 else text
    if not digits.isdecimal() or not int(digits):
        raise ValueError(f"expected tokens such as 32768, 128K or 1M, got {text!r}")
    return int(digits) * scale
