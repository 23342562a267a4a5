"""Where the chunks of a session lie, and what stands for one of them.

A session's retrieval region starts after its first ``sink`` tokens. Chunk j covers the tokens
``sink + j * chunk_size`` up to, not including, ``sink + (j + 1) * chunk_size``. What does not fill
a chunk, and the last ``local`` tokens of the prompt, belong to no chunk.

Example with sink 4, local 64, chunk_size 4: 100 tokens make (100 - 4 - 64) // 4 = 8 chunks, the
tokens 4 to 35. 71 tokens make none.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvdrive_jax.pallas.scoring.products import MAGNITUDE_LIMIT


def chunk_count(tokens: int, *, sink: int, local: int, chunk_size: int) -> int:
    """Number of whole chunks of a prompt of `tokens` tokens, between sink and local."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1 token, got {chunk_size}")
    return max(0, (tokens - sink - local) // chunk_size)


def split_into_chunks(
    keys: jax.Array, *, sink: int, chunk_size: int, chunk_capacity: int
) -> jax.Array:
    """Cuts one layer's keys (or values) into chunks.

    Args:
        keys: [..., T, D] in token order; positions past the session's length may hold anything.
        sink: tokens before the first chunk.
        chunk_size: c, tokens per chunk.
        chunk_capacity: N, chunks to return. Those past the end of `keys` are zero.

    Returns:
        [..., N, c, D].
    """
    rows = chunk_capacity * chunk_size
    region = keys[..., sink : sink + rows, :]
    missing = rows - region.shape[-2]
    if missing > 0:
        region = jnp.pad(region, [(0, 0)] * (region.ndim - 2) + [(0, missing), (0, 0)])
    return region.reshape(*keys.shape[:-2], chunk_capacity, chunk_size, keys.shape[-1])


def representatives(keys: jax.Array) -> jax.Array:
    """Mean of each chunk's post-RoPE keys.

    Args:
        keys: [..., N, c, D] in any float dtype.

    Returns:
        [..., N, D] float32, finite for finite keys (see `MAGNITUDE_LIMIT`).
    """
    if keys.ndim < 3:
        raise ValueError(f"keys must be [..., chunks, chunk_size, head_dim], got {keys.shape}")
    bounded = jnp.clip(keys.astype(jnp.float32), -MAGNITUDE_LIMIT, MAGNITUDE_LIMIT)
    return bounded.mean(axis=-2)
