"""What a configuration must be for a model: limits that are known without weights or memory."""

from __future__ import annotations

from typing import Any

from kvdrive_jax.config import KVDriveConfig
from kvdrive_jax.index.clusters import ClusterForm
from kvdrive_jax.index.form import IndexForm, make_form
from kvdrive_jax.models.config import ModelConfig
from kvdrive_jax.pallas import page_gather


def check_config(config: KVDriveConfig, model: ModelConfig, dtype: Any) -> int:
    """The context length in force, for a configuration that suits the model and the machine.

    Raises ValueError when the configured context length exceeds the model's or the index does not
    exist, NotImplementedError for a way to fetch that cannot be had here.
    """
    index_form(config, model)
    refusal = page_gather.why_not(dtype) if config.tiers.fetch == "direct" else None
    if refusal is not None:
        raise NotImplementedError(f"fetch direct: {refusal}")
    model_maximum = model.max_positions
    length = config.context_length or model_maximum
    if length > model_maximum:
        raise ValueError(
            f"context_length must be at most the model's {model_maximum:,} positions, got "
            f"{length:,}: lower it"
        )
    return length


def check_length(number: int, tokens: int, max_new_tokens: int, context_length: int) -> None:
    """ValueError when prompt ``number`` and its new tokens exceed the context length."""
    total = tokens + max_new_tokens
    if total > context_length:
        raise ValueError(
            f"prompt {number} has {tokens:,} tokens, with max_new_tokens = {max_new_tokens:,} that "
            f"makes {total:,}; the context length is {context_length:,}: shorten the prompt or "
            "lower max_new_tokens"
        )


def index_form(config: KVDriveConfig, model: ModelConfig) -> IndexForm:
    """The index of this configuration; ValueError, with the choices, when there is none such."""
    retrieval, rotary = config.retrieval, model.rope.rotary_dim
    return make_form(
        retrieval.index,
        chunk_size=retrieval.chunk_size,
        rotary_dim=rotary if rotary < model.head_dim else 0,
        tokens_per_cluster=retrieval.tokens_per_cluster,
        segment_tokens=retrieval.segment_tokens,
        kmeans_rounds=retrieval.kmeans_rounds,
        scan_one_in=retrieval.scan_one_in,
    )


def cluster_form(config: KVDriveConfig) -> ClusterForm:
    """What groups chunks for estimates, whatever the index."""
    retrieval = config.retrieval
    return ClusterForm(
        tokens_per_cluster=retrieval.tokens_per_cluster,
        chunk_size=retrieval.chunk_size,
        segment_tokens=retrieval.segment_tokens,
        rounds=retrieval.kmeans_rounds,
    )
