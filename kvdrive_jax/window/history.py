"""What the directory remembers of chunks, for the policies that look back."""

from __future__ import annotations

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp

NEVER: Final = -1
DECAY: Final = 0.9
"""What is left of a chunk's standing after a step."""
BONUS: Final = 6.0
"""What being selected adds to a score, which is a logarithm of attention mass."""


class History(NamedTuple):
    """Of the chunk in each slot, of no meaning for empty slots, and of every chunk.

    entered, used: [B, K, S] int32, the steps in which it came and in which it was last selected,
    `NEVER` for one that warm-up put there. uses: [B, K, S] int32, steps in which it was selected
    since it came. standing: [B, K, N] float32, see `smooth`; -inf for a chunk that has had no score
    yet; N is 0 where no policy reads it. step: int32 scalar, steps so far.
    """

    entered: jax.Array
    used: jax.Array
    uses: jax.Array
    standing: jax.Array
    step: jax.Array


def history_bytes(slots: int, chunk_capacity: int) -> int:
    """Bytes of one (session, kv head), to the byte; chunk_capacity 0 without standing."""
    return 12 * slots + 4 * chunk_capacity


def empty_history(batch: int, kv_heads: int, slots: int, chunk_capacity: int) -> History:
    """Of slots that have held nothing, and chunks that have had no score."""
    shape = (batch, kv_heads, slots)
    return History(
        entered=jnp.full(shape, NEVER, jnp.int32),
        used=jnp.full(shape, NEVER, jnp.int32),
        uses=jnp.zeros(shape, jnp.int32),
        standing=jnp.full((batch, kv_heads, chunk_capacity), -jnp.inf, jnp.float32),
        step=jnp.zeros((), jnp.int32),
    )


def smooth(history: History, scores: jax.Array, selected: jax.Array) -> History:
    """Scores smoothed over steps: standing = DECAY standing + (1 - DECAY)(score + BONUS selected).

    A chunk's first score is its first standing. Kept of every chunk, whether it is in a window or
    not: one that comes back is known, which is worth as much as the smoothing.

    scores: [B, K, N] float32, -inf for padding; selected: [B, K, P] int32 chunks, -1 for none.
    """
    if not history.standing.shape[-1]:
        return history
    before = history.standing
    now = _add(scores, selected, BONUS)
    standing = jnp.where(jnp.isneginf(before), now, DECAY * before + (1 - DECAY) * now)
    return history._replace(standing=jnp.where(jnp.isneginf(scores), before, standing))


def advance(history: History, selected: jax.Array, arrived: jax.Array) -> History:
    """The history after a step.

    selected, arrived: [B, K, S] bool, slots whose chunk was selected in the step, and those whose
    chunk came in it (arrived implies selected).
    """
    step = history.step
    return history._replace(
        entered=jnp.where(arrived, step, history.entered),
        used=jnp.where(selected, step, history.used),
        uses=jnp.where(arrived, 1, history.uses + selected),
        step=step + 1,
    )


def forget_row(history: History, row: jax.Array | int) -> History:
    """The history with one session as if it had just begun."""
    return history._replace(
        entered=history.entered.at[row].set(NEVER),
        used=history.used.at[row].set(NEVER),
        uses=history.uses.at[row].set(0),
        standing=history.standing.at[row].set(-jnp.inf),
    )


def _add(table: jax.Array, at: jax.Array, value: float) -> jax.Array:
    """table[b, k, at[b, k, i]] + value; negative indices add nothing."""
    width = table.shape[-1]
    base = jnp.arange(table.size // width, dtype=jnp.int32).reshape(*table.shape[:-1], 1) * width
    flat = jnp.where(at < 0, table.size, base + at).reshape(-1)
    return table.reshape(-1).at[flat].add(value, mode="drop").reshape(table.shape)
