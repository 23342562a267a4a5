"""Every kernel as a case: fresh inputs, the call, what it should give, and what it must move."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_check_parts import exact
from benchmarks.gpu_check_parts.bench import relative_error
from benchmarks.gpu_check_parts.draw import Draw

TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 2e-3}
"""Relative error (norm over norm) that a kernel may have against float64 on the same inputs."""

Inputs = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """One model, context and batch; letters as everywhere."""

    label: str
    batch: int
    heads: int
    kv_heads: int
    dim: int
    tokens: int
    chunk: int = 4
    budget: int = 2048
    window: float = 2.0
    hits: float = 0.9
    dtype: str = "bfloat16"
    holes: bool = False
    """Whether some of everything is absent: for checking, not for timing."""

    @property
    def chunks(self) -> int:
        """N."""
        return self.tokens // self.chunk

    @property
    def selected(self) -> int:
        """P."""
        return max(1, min(self.budget // self.chunk, self.chunks))

    @property
    def slots(self) -> int:
        """S."""
        return max(self.selected, min(self.chunks, round(self.window * self.selected)))

    @property
    def page(self) -> tuple[int, int, int]:
        """[2, c, D]."""
        return (2, self.chunk, self.dim)

    @property
    def itemsize(self) -> int:
        """Bytes of one element of K and V."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def pairs(self) -> int:
        """B K."""
        return self.batch * self.kv_heads


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel at one size.

    call(*inputs, implementation=..., interpret=...); check(output, inputs) gives the error of one
    call's output, infinite where it is plainly wrong; nbytes and flops are what a call must move
    and do; in_place: the first input is replaced and donated.
    """

    name: str
    sizes: Sizes
    inputs: Callable[[Draw], Inputs]
    call: Callable[..., Any]
    check: Callable[[Any, Inputs], float]
    tolerance: float
    nbytes: float
    flops: float = 0.0
    in_place: bool = False


def distinct_slots(draw: Draw, sizes: Sizes, count: int) -> Any:
    """[B, K, count] int32, rows of the pool in each window, none twice."""
    slots = draw.order((sizes.batch, sizes.kv_heads, sizes.slots))[..., :count]
    return slots + np.arange(sizes.kv_heads, dtype=np.int32)[:, None] * sizes.slots


def window_of(draw: Draw, sizes: Sizes) -> Any:
    """[B, K S, 2, c, D] of random pages."""
    shape = (sizes.batch, sizes.kv_heads * sizes.slots, *sizes.page)
    return draw.normal(shape, sizes.dtype)


def queries_of(draw: Draw, sizes: Sizes) -> Any:
    """[B, H, D]."""
    return draw.normal((sizes.batch, sizes.heads, sizes.dim), sizes.dtype)


def sparse_attention(sizes: Sizes) -> Case:
    """Attention over the selected slots of each window."""
    from kvdrive_jax.pallas.attention.api import attend_pages
    from kvdrive_jax.pallas.attention.reference import combine

    def inputs(draw: Draw) -> Inputs:
        slots = distinct_slots(draw, sizes, sizes.selected)
        if sizes.holes:
            # One in ten is missing, the first never.
            absent = draw.uniform(slots.shape) < 0.1
            slots = np.where(absent & (np.arange(sizes.selected) > 0), -1, slots)
        return queries_of(draw, sizes), window_of(draw, sizes), slots

    def check(out: Any, inputs: Inputs) -> float:
        q, window, slots = inputs
        keys, values, real = exact.page_tokens(window, slots)
        return relative_error(out, exact.attention(q, keys, values, real))

    attended = sizes.pairs * sizes.selected * sizes.chunk
    return Case(
        name="sparse attention",
        sizes=sizes,
        inputs=inputs,
        call=lambda *args, **how: combine(attend_pages(*args, **how)),
        check=check,
        tolerance=TOLERANCE[sizes.dtype],
        nbytes=2 * attended * sizes.dim * sizes.itemsize,
        flops=4 * attended * sizes.dim * sizes.heads // sizes.kv_heads,
    )


def row_attention(sizes: Sizes) -> Case:
    """Attention over every key: the full attention baseline."""
    from kvdrive_jax.pallas.attention.api import attend_rows
    from kvdrive_jax.pallas.attention.reference import combine

    shape = (sizes.batch, sizes.kv_heads, sizes.tokens, sizes.dim)

    def inputs(draw: Draw) -> Inputs:
        low = sizes.tokens // 2 if sizes.holes else sizes.tokens
        length = draw.integers((sizes.batch,), low, sizes.tokens + 1)
        k, v = draw.normal(shape, sizes.dtype), draw.normal(shape, sizes.dtype)
        return queries_of(draw, sizes), k, v, length

    def check(out: Any, inputs: Inputs) -> float:
        q, k, v, length = inputs
        real = np.arange(sizes.tokens) < np.asarray(length)[:, None, None]
        real = np.broadcast_to(real, shape[:3])
        return relative_error(out, exact.attention(q, k, v, real))

    total = math.prod(shape)
    return Case(
        name="full attention",
        sizes=sizes,
        inputs=inputs,
        call=lambda *args, **how: combine(attend_rows(*args, **how)),
        check=check,
        tolerance=TOLERANCE[sizes.dtype],
        nbytes=2 * total * sizes.itemsize,
        flops=4 * total * sizes.heads // sizes.kv_heads,
    )


def weighted_attention(sizes: Sizes) -> Case:
    """Attention over cluster means, each standing for a number of keys."""
    from kvdrive_jax.pallas.attention.api import attend_weighted
    from kvdrive_jax.pallas.attention.reference import combine

    clusters = max(1, sizes.tokens // 16)
    shape = (sizes.batch, sizes.kv_heads, clusters, sizes.dim)

    def inputs(draw: Draw) -> Inputs:
        counts = draw.integers(shape[:3], 0, 9) + (np.arange(clusters, dtype=np.int32) == 0)
        k, v = draw.normal(shape, sizes.dtype), draw.normal(shape, sizes.dtype)
        return queries_of(draw, sizes), k, v, counts

    total = math.prod(shape)
    return Case(
        name="weighted attention",
        sizes=sizes,
        inputs=inputs,
        call=lambda *args, **how: combine(attend_weighted(*args, **how)),
        check=lambda out, inputs: relative_error(out, exact.attention(*inputs)),
        tolerance=TOLERANCE[sizes.dtype],
        nbytes=2 * total * sizes.itemsize + 4 * math.prod(shape[:3]),
        flops=4 * total * sizes.heads // sizes.kv_heads,
    )


def prompt_attention(sizes: Sizes) -> Case:
    """Causal attention of the last block of a prompt."""
    from kvdrive_jax.pallas.prompt.api import attend_block

    block = 64 if sizes.tokens < 512 else 512
    keys = -(-sizes.tokens // block) * block
    first = keys - block
    shape = (sizes.kv_heads, keys, sizes.dim)

    def inputs(draw: Draw) -> Inputs:
        q = draw.normal((block, sizes.heads, sizes.dim), sizes.dtype)
        return q, draw.normal(shape, sizes.dtype), draw.normal(shape, sizes.dtype)

    return Case(
        name="prompt attention",
        sizes=sizes,
        inputs=inputs,
        call=lambda q, k, v, **how: attend_block(q, k, v, first, block_k=block, **how),
        check=lambda out, inputs: relative_error(out, exact.prompt_attention(*inputs, first)),
        tolerance=TOLERANCE[sizes.dtype],
        nbytes=2 * math.prod(shape) * sizes.itemsize,
        flops=4 * block * (first + block / 2) * sizes.heads * sizes.dim,
    )


def page_write(sizes: Sizes) -> Case:
    """Fetched pages into their slots."""
    from kvdrive_jax.pallas.page_write import write_pages

    count = max(1, round(sizes.pairs * sizes.selected * (1 - sizes.hits)))

    def inputs(draw: Draw) -> Inputs:
        total = sizes.pairs * sizes.slots
        target = draw.order((total,))[:count]
        target = np.where(np.arange(count) == 0, total, target)  # one holds no page
        pages = draw.normal((count, *sizes.page), sizes.dtype)
        return window_of(draw, sizes), pages, target.astype(np.int32)

    def check(out: Any, inputs: Inputs) -> float:
        window, pages, target = (np.asarray(x) for x in inputs)
        wanted = window.reshape(-1, *sizes.page).copy()
        real = target < len(wanted)
        wanted[target[real]] = pages[real]
        return _same_bits(out, wanted.reshape(window.shape))

    return Case(
        name="page write",
        sizes=sizes,
        inputs=inputs,
        call=write_pages,
        check=check,
        tolerance=0.0,
        nbytes=2 * count * math.prod(sizes.page) * sizes.itemsize,
        in_place=True,
    )


def page_gather(sizes: Sizes) -> Case:
    """Missing pages from a slab in device memory into their slots."""
    from kvdrive_jax.pallas.page_gather import gather_pages

    missed = max(1, round(sizes.selected * (1 - sizes.hits)))
    # Enough to leave the cache; the whole slab would be 4 GB.
    held = min(sizes.chunks, 4096)

    def inputs(draw: Draw) -> Inputs:
        shape = (sizes.batch, sizes.kv_heads, sizes.selected)
        chunks = draw.integers(shape, 0, held)
        slots = distinct_slots(draw, sizes, sizes.selected)
        hit = draw.order(shape) >= missed
        missing = np.stack([np.where(hit, -1, ids) for ids in (chunks, slots)])
        source = draw.normal((sizes.pairs * held, math.prod(sizes.page)), sizes.dtype)
        first = np.arange(sizes.pairs, dtype=np.int32).reshape(shape[:2]) * held
        return window_of(draw, sizes), source, missing, first

    def check(out: Any, inputs: Inputs) -> float:
        window, source, missing, first = (np.asarray(x) for x in inputs)
        wanted = window.copy()
        for b, k, p in np.argwhere(missing[0] >= 0):
            row = first[b, k] + missing[0, b, k, p]
            wanted[b, missing[1, b, k, p]] = source[row].reshape(sizes.page)
        return _same_bits(out, wanted)

    return Case(
        name="page gather",
        sizes=sizes,
        inputs=inputs,
        call=gather_pages,
        check=check,
        tolerance=0.0,
        nbytes=2 * sizes.pairs * missed * math.prod(sizes.page) * sizes.itemsize
        + 8 * sizes.pairs * sizes.selected,
        in_place=True,
    )


def _same_bits(out: Any, wanted: np.ndarray[Any, Any]) -> float:
    return (
        0.0 if np.array_equal(np.asarray(out).view(np.uint8), wanted.view(np.uint8)) else math.inf
    )


def same_scores(out: Any, wanted: np.ndarray[Any, Any]) -> float:
    """Largest difference of scores that are real; infinite where padding differs."""
    got = np.asarray(out).astype(np.float64)
    real = np.isfinite(wanted)
    if got.shape != wanted.shape or not np.array_equal(np.isfinite(got), real):
        return math.inf
    return float(np.abs(got[real] - wanted[real]).max(initial=0.0))
