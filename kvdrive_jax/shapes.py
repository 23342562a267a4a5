"""Static capacities: every array's padded size for one batch, worked out once.

Compiled functions see only these numbers, so two requests that fall into the same buckets share
every compilation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvdrive_jax.config import RetrievalConfig
from kvdrive_jax.index.chunks import chunk_count


def bucket(n: int, quantum: int) -> int:
    """The smallest of quantum * {1, 2, 3, 4, 6, 8, 12, ...} that is at least ``n``.

    Padding wastes at most a third, and a context of a million tokens meets some twenty buckets.
    """
    size = quantum
    while size < n:
        size *= 2
    if size > 2 * quantum and size * 3 // 4 >= n:
        return size * 3 // 4
    return size


def fine_bucket(tokens: int) -> int:
    """Padding of at most an eighth, for arrays that every step reads whole."""
    step = max(256, 1 << max(0, (tokens - 1).bit_length() - 3))
    return -(-tokens // step) * step


def prompt_capacity(tokens: int) -> int:
    """Padded length of a prompt: whole blocks of prefill, smaller ones for short prompts."""
    for small in (64, 256):
        if tokens <= small:
            return small
    return bucket(tokens, 512)


@dataclass(frozen=True)
class Stored:
    """Chunks of a saved session, and how many flushes made some of them."""

    chunks: int
    flushes: int


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Capacities of one batch, in the letters of the architecture.

    prompt_tokens: per session; max_new_tokens: for every session; prompt_capacity: padded T of
    prefill; cache_tokens: padded T of a full cache; chunk_capacity: N; selected: P;
    near_capacity: rows of sink, local and unflushed tokens; flush_chunks: chunks moved by one
    flush; flush_events: most flushes of one session; prompt_chunks and row_chunks: chunks
    each session has after prefill, and can reach.
    """

    prompt_tokens: tuple[int, ...]
    max_new_tokens: int
    prompt_capacity: int
    cache_tokens: int
    chunk_capacity: int
    selected: int
    near_capacity: int
    flush_chunks: int
    flush_events: int
    prompt_chunks: tuple[int, ...]
    row_chunks: tuple[int, ...]

    @property
    def batch(self) -> int:
        """B."""
        return len(self.prompt_tokens)

    @property
    def final_tokens(self) -> tuple[int, ...]:
        """Longest length each session can reach."""
        return tuple(tokens + self.max_new_tokens for tokens in self.prompt_tokens)


def batch_shape(
    retrieval: RetrievalConfig,
    prompt_tokens: Sequence[int],
    max_new_tokens: int,
    context_length: int,
    stored: Stored | None = None,
) -> BatchShape:
    """Capacities for a batch of prompts; raises ValueError when the budget exceeds the context.

    stored: what is in store already of its only session, one that was saved.
    """
    chunk = retrieval.chunk_size
    longest = max(prompt_tokens)
    budget = retrieval.budget_tokens(longest, context_length)
    flush_chunks = retrieval.flush_tokens // chunk
    flush_tokens = flush_chunks * chunk
    # A flush leaves sink, local and a chunk's worth of tokens: flush_tokens steps to the next.
    near_capacity = retrieval.sink + retrieval.local + flush_tokens + chunk

    def chunks_of(tokens: int) -> int:
        return chunk_count(tokens, sink=retrieval.sink, local=retrieval.local, chunk_size=chunk)

    row_chunks = tuple(chunks_of(tokens + max_new_tokens) for tokens in prompt_tokens)
    chunk_capacity = bucket(max(max(row_chunks), 1), 64)
    selected = min(max(1, budget // chunk), chunk_capacity)
    prompt_chunks = tuple(chunks_of(tokens) for tokens in prompt_tokens)
    flush_events = max_new_tokens // flush_tokens + 1
    if stored is not None:
        # Tokens that were generated before it was saved may not be chunks yet.
        flush_events = stored.flushes + -(-(row_chunks[0] - stored.chunks) // flush_chunks) + 1
        prompt_chunks = (stored.chunks,)
    return BatchShape(
        prompt_tokens=tuple(prompt_tokens),
        max_new_tokens=max_new_tokens,
        prompt_capacity=prompt_capacity(longest),
        cache_tokens=fine_bucket(longest + max_new_tokens),
        chunk_capacity=chunk_capacity,
        selected=selected,
        near_capacity=near_capacity,
        flush_chunks=flush_chunks,
        flush_events=flush_events,
        prompt_chunks=prompt_chunks,
        row_chunks=row_chunks,
    )
