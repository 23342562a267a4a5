"""A tiny random Llama as a Hugging Face folder: 3 layers, group 3, byte tokenizer, template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
EOS = 257


def write_tiny_model(
    folder: Path, *, template: str | None = TEMPLATE, context: int = 4096, seed: int = 0
) -> Path:
    """Writes the model into ``folder`` and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 258,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": context,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_tensors(config, np.random.default_rng(seed)), folder / "model.safetensors")
    _write_tokenizer(folder, template)
    return folder


def _tensors(config: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    width, ffn, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def matrix(rows: int, columns: int) -> np.ndarray[Any, Any]:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], width),
        "model.norm.weight": np.ones(width, np.float32),
        "lm_head.weight": matrix(config["vocab_size"], width),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, shape in {
            "self_attn.q_proj": (queries, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, queries),
            "mlp.gate_proj": (ffn, width),
            "mlp.up_proj": (ffn, width),
            "mlp.down_proj": (width, ffn),
        }.items():
            tensors[at + name + ".weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[at + name + ".weight"] = np.ones(width, np.float32)
    return tensors


def _write_tokenizer(folder: Path, template: str | None) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
