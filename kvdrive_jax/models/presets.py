"""Published models by name, without their files: for plans, sizes and compiling ahead."""

from __future__ import annotations

from kvdrive_jax.models.config import ModelConfig
from kvdrive_jax.models.rope import RopeConfig

LLAMA_3_8B_GRADIENT_1048K = ModelConfig(
    architecture="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    max_positions=1048576,
    rope=RopeConfig(theta=3580165449.0, rotary_dim=128),
    eos_token_ids=(128001, 128009),
    bos_token_id=128000,
)

QWEN3_8B = ModelConfig(
    architecture="qwen3",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    max_positions=40960,
    rope=RopeConfig(theta=1e6, rotary_dim=128),
    qk_norm=True,
    eos_token_ids=(151645, 151643),
    bos_token_id=151643,
)

QWEN3_14B = ModelConfig(
    architecture="qwen3",
    vocab_size=151936,
    hidden_size=5120,
    intermediate_size=17408,
    num_layers=40,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    max_positions=40960,
    rope=RopeConfig(theta=1e6, rotary_dim=128),
    qk_norm=True,
    eos_token_ids=(151645, 151643),
    bos_token_id=151643,
)

# fmt: off
_PHI_4_MINI_LONG = (
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897,
    1.956131817, 2.187582649, 2.446418898, 2.735880826, 3.059592084, 3.421605075,
    3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424, 6.693110555,
    7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651,
    14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418,
    28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6,
    32.61, 32.64, 32.66, 32.7, 32.71, 32.93,
    32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
)
# fmt: on

PHI_4_MINI = ModelConfig(
    architecture="phi3",
    vocab_size=200064,
    hidden_size=3072,
    intermediate_size=8192,
    num_layers=32,
    num_heads=24,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    max_positions=131072,
    rope=RopeConfig(
        type="longrope",
        rotary_dim=96,
        original_max_positions=4096,
        attention_factor=1.1902380714238083,  # sqrt(1 + ln(131072 / 4096) / ln(4096))
        short_factor=(1.0,) * 48,
        long_factor=_PHI_4_MINI_LONG,
    ),
    tied_embeddings=True,
    eos_token_ids=(200020, 199999),
    bos_token_id=199999,
)

SMOLLM2_135M = ModelConfig(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    max_positions=8192,
    rope=RopeConfig(rotary_dim=64, theta=100000.0),
    tied_embeddings=True,
    eos_token_ids=(0, 2),
    bos_token_id=1,
)

PRESETS: dict[str, ModelConfig] = {
    "SmolLM2-135M-Instruct": SMOLLM2_135M,
    "Llama-3-8B-Instruct-Gradient-1048k": LLAMA_3_8B_GRADIENT_1048K,
    "Qwen3-8B": QWEN3_8B,
    "Qwen3-14B": QWEN3_14B,
    "Phi-4-mini-instruct": PHI_4_MINI,
}


def preset(name: str) -> ModelConfig:
    """The configuration of a published model.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if name not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]
