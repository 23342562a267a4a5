"""Models: one decoder, its families as data, and loading."""

from kvdrive_jax.models.config import ModelConfig
from kvdrive_jax.models.model import Model, ModelDef, abstract_model, split
from kvdrive_jax.models.presets import PRESETS, preset
from kvdrive_jax.models.rope import RopeConfig, inverse_frequencies, rotate
from kvdrive_jax.models.weights import build_model, load_pretrained, parse_config

__all__ = [
    "PRESETS",
    "Model",
    "ModelConfig",
    "ModelDef",
    "RopeConfig",
    "abstract_model",
    "build_model",
    "inverse_frequencies",
    "load_pretrained",
    "parse_config",
    "preset",
    "rotate",
    "split",
]
