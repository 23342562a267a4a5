"""What every kernel should give, in float64 with NumPy: written for this check, short and slow."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def wide(array: Any) -> Array:
    """Any array as float64."""
    return np.asarray(array).astype(np.float64)


def attention(q: Any, k: Any, v: Any, counts: Any) -> Array:
    """q [B, H, D], k, v [B, K, T, D], counts [B, K, T] (weight of each key): [B, H, D]."""
    q, k, v, counts = wide(q), wide(k), wide(v), wide(counts)
    batch, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, dim) * dim**-0.5
    logits = np.einsum("bkgd,bktd->bkgt", grouped, k)
    logits = np.where(counts[:, :, None] > 0, logits, -np.inf)
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True)) * counts[:, :, None]
    shares /= shares.sum(axis=-1, keepdims=True)
    return np.einsum("bkgt,bktd->bkgd", shares, v).reshape(batch, heads, dim)


def page_tokens(window: Any, slots: Any) -> tuple[Array, Array, Array]:
    """Keys and values [B, K, P c, D] of the pages in ``slots`` [B, K, P], and which are real."""
    window, slots = wide(window), np.asarray(slots)
    batch, kv_heads, _ = slots.shape
    chunk, dim = window.shape[-2:]
    pages = window[np.arange(batch)[:, None, None], np.maximum(slots, 0)]
    keys = pages[:, :, :, 0].reshape(batch, kv_heads, -1, dim)
    values = pages[:, :, :, 1].reshape(batch, kv_heads, -1, dim)
    return keys, values, np.repeat(slots >= 0, chunk, axis=-1)


def prompt_attention(q: Any, k: Any, v: Any, first: int) -> Array:
    """q [Q, H, D] at positions first + i, k, v [K, T, D]: causal, [Q, H, D]."""
    q, k, v = wide(q), wide(k), wide(v)
    queries, heads, dim = q.shape
    group = heads // k.shape[0]
    out = np.empty(q.shape)
    after = np.arange(k.shape[1])[None] > first + np.arange(queries)[:, None]
    for head in range(heads):
        logits = q[:, head] @ k[head // group].T * dim**-0.5
        logits[after] = -np.inf
        shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
        out[:, head] = shares / shares.sum(axis=-1, keepdims=True) @ v[head // group]
    return out


def group_scores(logits: Array, valid: Array) -> Array:
    """Rule softmax-sum: logits [B, K, G, X], valid [B, K, X] -> [B, K, X], -inf for padding."""
    logits = np.where(valid[:, :, None], logits, -np.inf)
    top = logits.max(axis=-1, keepdims=True)
    shares = np.exp(logits - top)
    shares /= shares.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return np.where(valid, np.log(shares.sum(axis=2)), -np.inf)


def unpack(words: Any, bits: int, channels: int) -> Array:
    """Codes [B, K, C, N] of words [B, K, W, N]: channel c is code c // W of word c % W."""
    words = np.asarray(words)
    count = words.shape[2]
    codes = [
        (words[:, :, c % count] >> np.uint32(bits * (c // count))) & np.uint32(2**bits - 1)
        for c in range(channels)
    ]
    return np.stack(codes, axis=2).astype(np.float64)


def moments_logits(
    q: Any, first: Any, second: Any, weights: Any, *, bits: int, spread_bits: int, chunk: int
) -> Array:
    """Logits [B, K, G, N] of the moments index from its packed planes."""
    q, weights = wide(q), wide(weights)
    batch, heads, dim = q.shape
    kv_heads = first.codes.shape[1]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, dim)
    steps = 2**bits - 1
    codes = unpack(first.codes, bits, dim) * (2 / steps) - 1
    mean = codes * wide(first.scale)[..., None] * wide(first.stretch)[:, :, None]
    mean += wide(first.middle)[..., None]
    logits = np.einsum("bkgc,bkcn->bkgn", grouped, mean) * dim**-0.5
    spread = unpack(second.codes, spread_bits, weights.shape[-1]) / (2**spread_bits - 1)
    spread *= wide(second.scale)[..., None] * wide(second.stretch)[:, :, None]
    deviation = np.sqrt(np.einsum("bkgc,bkcn->bkgn", weights**2, spread**2)) * dim**-0.5
    if chunk == 1:
        return logits
    reach = (chunk - 1) ** 0.5
    others = (chunk - 1) * np.exp(-(reach + 1 / reach) * deviation)
    return logits + reach * deviation + np.log((1 + others) / chunk)
