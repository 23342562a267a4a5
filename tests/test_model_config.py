"""Reading config.json: families, what is refused, and the presets of published models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from kvdrive_jax.models.decoder import Decoder
from kvdrive_jax.models.model import abstract_model, split
from kvdrive_jax.models.presets import PRESETS, preset
from kvdrive_jax.models.weights import describe_pretrained, parse_config
from tests.model_configs import LLAMA, PHI3, QWEN2, QWEN3


def test_unknown_architecture_lists_the_supported() -> None:
    for raw in (LLAMA | {"architectures": ["MambaForCausalLM"]}, {"model_type": "mamba"}):
        with pytest.raises(ValueError, match=r"(?i)mamba") as error:
            parse_config(raw)
        for name in ("Llama", "Qwen2", "Qwen3", "Phi3"):
            assert f"{name}ForCausalLM" in str(error.value)
    without = {key: value for key, value in QWEN2.items() if key != "architectures"}
    assert parse_config(without).architecture == "qwen2"


def test_config_names_what_it_lacks_or_cannot_use() -> None:
    without = {key: value for key, value in LLAMA.items() if key != "num_hidden_layers"}
    with pytest.raises(ValueError, match="num_hidden_layers"):
        parse_config(without)
    with pytest.raises(ValueError, match="'gelu'"):
        parse_config(LLAMA | {"hidden_act": "gelu"})
    with pytest.raises(ValueError, match=r"multiple of num_kv_heads \(4\), got 6"):
        parse_config(LLAMA | {"num_key_value_heads": 4})


@pytest.mark.parametrize(
    ("raw", "layers"),
    [
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "1"),
        (
            QWEN3 | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
            "0, 1",
        ),
        (
            QWEN3
            | {
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "0",
        ),
        (PHI3 | {"sliding_window": 64}, "0, 1"),
    ],
)
def test_sliding_windows_are_declined(raw: dict[str, Any], layers: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"layers {layers} see 64 tokens"):
        parse_config(raw)
    assert parse_config(raw, context_length=64).max_positions == 64
    with pytest.raises(NotImplementedError):
        parse_config(raw, context_length=65)


@pytest.mark.parametrize(
    "raw",
    [
        QWEN2 | {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0},
        QWEN2 | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
        QWEN3 | {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 0},
        QWEN3 | {"sliding_window": None, "layer_types": ["full_attention"] * 2},
        PHI3 | {"sliding_window": 262144},
        PHI3 | {"sliding_window": None},
    ],
)
def test_windows_that_change_nothing_are_accepted(raw: dict[str, Any]) -> None:
    assert parse_config(raw).max_positions == 128


def test_phi_older_rope_names() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    raw = PHI3 | {"original_max_position_embeddings": 32}
    kinds = {
        parse_config(raw | {"rope_scaling": {"type": kind, **factors}}).rope
        for kind in ("su", "yarn", "longrope")
    }
    assert {rope.type for rope in kinds} == {"longrope"}
    assert len(kinds) == 1


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-3-8B-Instruct-Gradient-1048k", 8.03),
        ("Qwen3-8B", 8.19),
        ("Qwen3-14B", 14.77),
        ("Phi-4-mini-instruct", 3.84),
    ],
)
def test_presets_have_the_published_sizes(name: str, billions: float) -> None:
    config = preset(name)
    decoder = nnx.eval_shape(lambda: Decoder(config, jnp.dtype(jnp.bfloat16)))
    model = split(decoder)
    assert round(model.parameter_count / 1e9, 2) == billions
    assert model.nbytes == 2 * model.parameter_count
    assert hash(model.static) == hash(abstract_model(config).static)
    assert model.static == abstract_model(config).static

    width = config.hidden_size
    static, layer = model.static, model.layers[0]

    def step(leaves: Any, hidden: jax.Array, positions: jax.Array, inv_freq: jax.Array) -> Any:
        module = static.merge_layer(leaves)
        q, k, v = module.attention_inputs(hidden, positions, inv_freq, 1.0)
        return q, k, v, module.after_attention(hidden, q)

    hidden = jax.ShapeDtypeStruct((3, 5, width), jnp.bfloat16)
    positions = jax.ShapeDtypeStruct((3, 5), jnp.int32)
    inv_freq = jax.ShapeDtypeStruct((config.rope.rotary_dim // 2,), jnp.float32)
    q, k, v, out = jax.eval_shape(step, layer, hidden, positions, inv_freq)
    assert q.shape == (3, 5, config.num_heads, config.head_dim)
    assert k.shape == v.shape == (3, 5, config.num_kv_heads, config.head_dim)
    assert (out.shape, out.dtype) == (hidden.shape, hidden.dtype)
    logits = jax.eval_shape(lambda e, h: static.merge_ends(e).logits(h), model.ends, hidden)
    assert (logits.shape, logits.dtype) == ((3, 5, config.vocab_size), jnp.float32)


def test_unknown_preset() -> None:
    with pytest.raises(ValueError, match="Qwen3-8B") as error:
        preset("gpt-2")
    assert all(name in str(error.value) for name in PRESETS)


def test_the_preset_of_the_bundled_model_is_what_its_file_says() -> None:
    file = describe_pretrained("demo", "float32").config
    known = preset("SmolLM2-135M-Instruct")
    assert known.rms_norm_eps == pytest.approx(file.rms_norm_eps)  # the file has it in float32
    assert replace(known, rms_norm_eps=file.rms_norm_eps) == file
