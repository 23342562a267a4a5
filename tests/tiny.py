"""A random model small enough for every test, and a tokenizer that maps each character to an id."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from kvdrive_jax.models.config import ModelConfig
from kvdrive_jax.models.model import Model
from kvdrive_jax.models.rope import RopeConfig
from kvdrive_jax.models.weights import build_model, expected_tensors

VOCABULARY = 64


class CharacterTokenizer:
    """Every id below VOCABULARY is one printable character; id 0 ends a text."""

    has_template = False
    eos_token_ids = frozenset({0})
    drops_first_space = False
    vocab_size = VOCABULARY

    def encode(self, text: str) -> list[int]:
        return [ord(char) % VOCABULARY for char in text]

    def piece(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        return bytes([0x30 + token_id])

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return b"".join(self.piece(i) for i in ids).decode()


def tiny_config(
    *, layers: int = 3, heads: int = 6, kv_heads: int = 2, head_dim: int = 16, **fields: Any
) -> ModelConfig:
    """Group 3 unless asked otherwise."""
    return ModelConfig(
        architecture="llama",
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        max_positions=8192,
        rope=RopeConfig(rotary_dim=head_dim, theta=10000.0),
        **fields,
    )


def tiny_model(seed: int = 0, dtype: str = "float32", **fields: Any) -> Model:
    """Random weights, large enough that attention is far from uniform."""
    config = tiny_config(**fields)
    rng = np.random.default_rng(seed)
    tensors = []
    for name, shape in expected_tensors(config).items():
        scale = 0.0 if len(shape) == 1 else 0.3
        offset = 1.0 if name.endswith("norm.weight") else 0.0
        values = rng.standard_normal(shape, np.float32) * scale + offset
        tensors.append((name, values.astype(np.float32)))
    return build_model(config, tensors, dtype, source="tiny", digest=f"tiny-{seed}")


def random_prompt(tokens: int, seed: int = 1) -> list[int]:
    """Token ids that never end a text."""
    rng = np.random.default_rng(seed)
    return [int(token) for token in rng.integers(1, VOCABULARY, tokens)]


@contextmanager
def compiles() -> Iterator[list[str]]:
    """What the backend compiles within it."""
    seen: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if "backend_compile" in event:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.clear_event_listeners()
