"""What a slot's chunk is worth keeping: one small function per policy over the same directory.

A policy returns a priority per slot; `directory.place` evicts the lowest first, after the empty
slots and never what is selected in the same step. To add one: write the function, enter its name
in `POLICIES` (and in `config.EvictionName`, which makes the flag).
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import jax
import jax.numpy as jnp

from kvdrive_jax.window.directory import Directory

NOW = 0.5
"""Share of this step's score in the priority of `smoothed`."""

Policy = Callable[[Directory, jax.Array], jax.Array]
"""Of the directory before the step and this step's scores [B, K, N] float32 (higher is better):
the priority [B, K, S] float32 of each slot, of no meaning for empty ones."""


def lookahead(directory: Directory, scores: jax.Array) -> jax.Array:
    """This step's score of the chunk in each slot (paper 5.2).

    The paper's rule is: of what is not selected, evict first what ranks below the best M
    (1.25 x budget), the lowest score first. Ordering all slots by score does this without knowing
    M: a chunk that ranks below M has a lower score than every chunk that ranks within M, so nothing
    within M leaves while anything below it is in the window. M itself matters to those who prefetch
    or record what ranks down to it.
    """
    return _of_slots(directory, scores)


def smoothed(directory: Directory, scores: jax.Array) -> jax.Array:
    """The chunk's standing (`history.smooth`), half of it this step's score.

    What was wanted again and again comes back sooner than what has one good step, and a chunk
    selected lately sooner than one that only ranks high. The constants were found on traces of the
    bundled model (`benchmarks.windows policies`), over texts, budgets and window sizes together.
    """
    standing = _of_slots(directory, directory.history.standing)
    return (1 - NOW) * standing + NOW * _of_slots(directory, scores)


def lru(directory: Directory, scores: jax.Array) -> jax.Array:
    """The step in which the chunk was last selected."""
    return directory.history.used.astype(jnp.float32)


def lfu(directory: Directory, scores: jax.Array) -> jax.Array:
    """How often the chunk was selected since it came."""
    return directory.history.uses.astype(jnp.float32)


def fifo(directory: Directory, scores: jax.Array) -> jax.Array:
    """The step in which the chunk came."""
    return directory.history.entered.astype(jnp.float32)


def _of_slots(directory: Directory, values: jax.Array) -> jax.Array:
    """values [B, K, N] of the chunk in each slot: [B, K, S]."""
    if values.shape[-1] == 0:
        return jnp.zeros(directory.chunk_of_slot.shape, jnp.float32)
    chunks = jnp.maximum(directory.chunk_of_slot, 0)
    return jnp.take_along_axis(values, chunks, axis=-1, mode="promise_in_bounds")


POLICIES: MappingProxyType[str, Policy] = MappingProxyType(
    {
        "smoothed": smoothed,
        "lookahead": lookahead,
        "lru": lru,
        "lfu": lfu,
        "fifo": fifo,
        # Windows of one size (`config.FIXED_WINDOWS`), where nothing is left to choose.
        "last-step": fifo,
        "none": fifo,
    }
)


def smooths(name: str) -> bool:
    """Whether a policy reads `History.standing`."""
    return policy(name) is smoothed


def policy(name: str) -> Policy:
    """The policy of that name; ValueError with the choices for any other."""
    if name not in POLICIES:
        raise ValueError(f"eviction must be one of {', '.join(POLICIES)}; got {name!r}")
    return POLICIES[name]
