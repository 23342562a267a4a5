"""Small config.json contents, one per family."""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
LLAMA = COMMON | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN2 = COMMON | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = COMMON | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
PHI3 = COMMON | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
BIASED = LLAMA | {"attention_bias": True, "mlp_bias": True}
