"""Causal attention of a prompt, in memory linear in its length."""

from kvdrive_jax.pallas.prompt.api import (
    PromptImplementation,
    attend_block,
    attend_prompt,
    prompt_implementation,
    why_not_cudnn,
    why_not_prompt,
)
from kvdrive_jax.pallas.prompt.triton import PromptTuning, prompt_tuning

__all__ = [
    "PromptImplementation",
    "PromptTuning",
    "attend_block",
    "attend_prompt",
    "prompt_implementation",
    "prompt_tuning",
    "why_not_cudnn",
    "why_not_prompt",
]
