"""Products of queries with the index's vectors: float32 results, from narrow storage.

Queries are float32 in meaning. A bfloat16 index is never widened in memory: the query is split
into bfloat16 parts that sum to it exactly, whose products with bfloat16 are exact in float32.
Packed codes are unpacked inside the loop that sums the products, so that nothing wide is written.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

WORD_BITS = 32

# Keys beyond this bound are cut to it before they are indexed, queries before they are scored. No
# model comes near it, and with it no product of two of them over any head dim leaves float32, so
# that scores are finite for every finite input.
MAGNITUDE_LIMIT = 1e15


def group_queries(queries: jax.Array, kv_heads: int, dim: int) -> jax.Array:
    """[B, H, D] of any float dtype -> [B, K, G, D] float32, cut to `MAGNITUDE_LIMIT`.

    Raises ValueError when H is no multiple of `kv_heads` or D is not `dim`.
    """
    if queries.ndim != 3 or queries.shape[1] % kv_heads or queries.shape[2] != dim:
        raise ValueError(
            f"queries must be [B, G * {kv_heads}, {dim}] for an index of {kv_heads} kv heads, "
            f"got {queries.shape}"
        )
    wide = jnp.clip(queries.astype(jnp.float32), -MAGNITUDE_LIMIT, MAGNITUDE_LIMIT)
    return wide.reshape(queries.shape[0], kv_heads, -1, dim)


def bfloat16_parts(wide: jax.Array, parts: int) -> list[jax.Array]:
    """bfloat16 arrays that sum to float32 `wide`: one is enough for what was bfloat16, two for
    float16, three for any float32."""
    split = []
    for _ in range(parts):
        # reduce_precision, because XLA may drop a cast to bfloat16 and back.
        part = lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)
        split.append(part.astype(jnp.bfloat16))
        wide = wide - part
    return split


def channel_major_product(queries: jax.Array, vectors: jax.Array) -> jax.Array:
    """[B, K, G, C] float32 x [B, K, C, N] bfloat16 or float32 -> [B, K, G, N] float32."""
    if vectors.dtype != jnp.bfloat16:
        return jnp.einsum("bkgc,bkcn->bkgn", queries, vectors, precision=lax.Precision.HIGHEST)
    batch, kv_heads, group, _ = queries.shape
    stacked = jnp.concatenate(bfloat16_parts(queries, 3), axis=2)
    product: jax.Array = jnp.einsum(
        "bkgc,bkcn->bkgn", stacked, vectors, preferred_element_type=jnp.float32
    )
    return product.reshape(batch, kv_heads, 3, group, -1).sum(axis=2)


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """[..., C, N] unsigned codes below 2^bits -> [..., W, N] uint32 words.

    Channel c of a chunk is the (c // W)-th code, from the low end, of word c % W.
    """
    per_word = WORD_BITS // bits
    channels = codes.shape[-2]
    words = word_count(channels, bits)
    padding = [(0, 0)] * (codes.ndim - 2) + [(0, words * per_word - channels), (0, 0)]
    wide = jnp.pad(codes.astype(jnp.uint32), padding)
    wide = wide.reshape(*codes.shape[:-2], per_word, words, codes.shape[-1])
    shifts = (jnp.arange(per_word, dtype=jnp.uint32) * bits)[:, None, None]
    # Codes do not overlap, so their sum is their union.
    return (wide << shifts).sum(axis=-3, dtype=jnp.uint32)


def unpack(words: jax.Array, bits: int, channels: int) -> jax.Array:
    """The codes that `pack` packed: [..., W, N] -> [..., C, N] uint32."""
    shifts = (jnp.arange(WORD_BITS // bits, dtype=jnp.uint32) * bits)[:, None, None]
    codes = (words[..., None, :, :] >> shifts) & jnp.uint32(2**bits - 1)
    codes = codes.reshape(*words.shape[:-2], -1, words.shape[-1])
    return codes[..., :channels, :]


def word_count(channels: int, bits: int) -> int:
    """W, words per chunk for so many codes."""
    return -(-channels * bits // WORD_BITS)


def packed_product(weights: jax.Array, words: jax.Array, bits: int, *, square: bool) -> jax.Array:
    """Sum over channels of weight x code, or of weight x code^2.

    Args:
        weights: [B, K, G, C] float32.
        words: [B, K, W, N] uint32, of `pack`.
        bits: per code.
        square: of the codes or of their squares.

    Returns:
        [B, K, G, N] float32.
    """
    # One expression over all channels: XLA makes one loop over chunks of it, in which a word is
    # read once and its codes live in registers. A matmul would want them unpacked in memory.
    count = words.shape[-2]
    power = 2 if square else 1
    total = jnp.zeros((), jnp.float32)
    for channel in range(weights.shape[-1]):
        place, word = divmod(channel, count)
        shift = bits * place
        row = words[:, :, None, word]
        if shift + bits < WORD_BITS:
            # Left where it is, and the weight made smaller: exact, and one operation less.
            code = (row & jnp.uint32((2**bits - 1) << shift)).astype(jnp.int32)
            weight = weights[..., channel, None] * 2.0 ** (-shift * power)
        else:
            code = (row >> shift).astype(jnp.int32)
            weight = weights[..., channel, None]
        value = code.astype(jnp.float32)
        total = total + weight * (value * value if square else value)
    return total
