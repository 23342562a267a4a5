"""Which prompt attention runs where, and why not the other."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from kvdrive_jax.pallas import common
from kvdrive_jax.pallas.attention.tiles import why_not_tiles
from kvdrive_jax.pallas.prompt import reference, triton

PromptImplementation = Literal["xla", "triton", "cudnn"]


def why_not_cudnn(platform: str, dtype: Any, head_dim: int) -> str | None:
    """The reason cuDNN cannot serve prompt attention here, or None when it can."""
    if platform not in ("gpu", "cuda"):
        return f"cuDNN needs an NVIDIA GPU, the backend is {platform}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN attention takes bfloat16 or float16, not {jnp.dtype(dtype).name}"
    if head_dim > 128 or head_dim % 8:
        return f"cuDNN attention takes head dims up to 128 in steps of 8, not {head_dim}"
    return None


def why_not_prompt(platform: str, dtype: Any, head_dim: int) -> str | None:
    """The reason the Triton kernel cannot serve prompt attention here, or None when it can."""
    if platform not in ("gpu", "cuda"):
        return f"Triton kernels need an NVIDIA GPU, the backend is {platform}"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"kernels take bfloat16, float16 or float32, not {jnp.dtype(dtype).name}"
    return why_not_tiles(head_dim)


def prompt_implementation(
    platform: str,
    dtype: Any,
    head_dim: int,
    implementation: PromptImplementation | None = None,
) -> PromptImplementation:
    """The implementation of prompt attention: the named one, or the best that can.

    cuDNN before Triton before the XLA loop over blocks; none needs memory quadratic in T.

    Raises:
        ValueError: unknown implementation.
        NotImplementedError: the named one cannot do the case; says why.
    """
    known = get_args(PromptImplementation)
    if implementation is not None and implementation not in known:
        raise ValueError(
            f"implementation must be None or one of {', '.join(known)}; got {implementation!r}"
        )
    reasons = {
        "cudnn": why_not_cudnn(platform, dtype, head_dim),
        "triton": why_not_prompt(platform, dtype, head_dim),
        "xla": None,
    }
    if implementation is not None:
        reason = reasons[implementation]
        if reason is not None:
            raise NotImplementedError(reason)
        return implementation
    if reasons["cudnn"] is None:
        return "cudnn"
    return "triton" if reasons["triton"] is None else "xla"


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


def attend_block(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    first: jax.Array | int,
    *,
    block_k: int = 512,
    implementation: common.Implementation | None = None,
    tuning: triton.PromptTuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of one block of prompt queries at an offset.

    Args:
        q: [Q, H, D], query i stands at position first + i.
        k: [K, T, D] with every position up to first + Q - 1 filled in; later ones are not read
            into the result.
        v: [K, T, D], likewise.
        first: int32 scalar.
        block_k: keys per product of the XLA loop, which wants T to be a multiple of it and
            `first` one of Q. The kernel takes any.
        implementation: None picks Triton where it can.
        tuning: knobs of the kernel, None for `prompt_tuning`.
        interpret: run the kernel in the interpreter.

    Returns:
        [Q, H, D] float32.

    Raises:
        ValueError: shapes do not fit.
        NotImplementedError: the named implementation cannot do the case; says why.
    """
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape:
        raise ValueError(
            f"q must be [Q, H, D], k and v [K, T, D] alike; got {q.shape}, {k.shape}, {v.shape}"
        )
    if q.shape[1] % k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q must be [Q, G * {k.shape[0]}, {k.shape[2]}] for k {k.shape}, got {q.shape}"
        )
    operand = jnp.result_type(q, k, v)
    reason = None if interpret else common.why_not_triton(operand)
    reason = reason or why_not_tiles(q.shape[2])
    chosen = common.choose("prompt attention", implementation, reason, interpret=interpret)
    if chosen == "xla":
        if k.shape[1] % block_k:
            raise ValueError(f"k must have a multiple of {block_k} rows, got {k.shape}")
        return reference.attend_block(q, k, v, jnp.asarray(first), block_k=block_k)
    queries, heads, dim = q.shape
    tuning = tuning or triton.prompt_tuning(queries, heads, dim, operand.itemsize)
    return triton.attend_block(q, k, v, jnp.asarray(first), tuning=tuning, interpret=interpret)
