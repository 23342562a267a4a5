"""Which attention runs where, and why not the other."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

Implementation = Literal["xla", "cudnn"]


def why_not_cudnn(platform: str, dtype: jnp.dtype, head_dim: int) -> str | None:
    """The reason cuDNN cannot serve prompt attention here, or None when it can."""
    if platform not in ("gpu", "cuda"):
        return f"cuDNN needs an NVIDIA GPU, the backend is {platform}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN attention takes bfloat16 or float16, not {jnp.dtype(dtype).name}"
    if head_dim > 128 or head_dim % 8:
        return f"cuDNN attention takes head dims up to 128 in steps of 8, not {head_dim}"
    return None


def prompt_implementation(
    platform: str, dtype: jnp.dtype, head_dim: int, implementation: Implementation | None = None
) -> Implementation:
    """The implementation of prompt attention: the named one, or the best that can.

    Raises NotImplementedError with the reason when the named one cannot.
    """
    reason = why_not_cudnn(platform, dtype, head_dim)
    if implementation == "cudnn" and reason is not None:
        raise NotImplementedError(reason)
    return implementation or ("xla" if reason is not None else "cudnn")


def attend_prompt(q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array) -> jax.Array:
    """Causal attention of a whole prompt through cuDNN (memory linear in T).

    q: [T, H, D]; k, v: [T, K, D]; length: int32 scalar, valid tokens. Returns [T, H, D].
    """
    lengths = length.reshape(1).astype(jnp.int32)
    return jax.nn.dot_product_attention(
        q[None],
        k[None],
        v[None],
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )[0]
