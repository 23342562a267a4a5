"""What a slot's chunk is worth keeping: one small function per policy over the same directory.

A policy returns a priority per slot; `directory.place` evicts the lowest first, after the empty
slots and never what is selected in the same step.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import jax
import jax.numpy as jnp

from kvdrive_jax.window.directory import Directory

Policy = Callable[[Directory, jax.Array], jax.Array]


def lookahead(directory: Directory, scores: jax.Array) -> jax.Array:
    """This step's score of the chunk in each slot (paper 5.2).

    The paper's rule is: of what is not selected, evict first what ranks below the best M
    (1.25 x budget), the lowest score first. Ordering all slots by score does this without knowing
    M: a chunk that ranks below M has a lower score than every chunk that ranks within M, so nothing
    within M leaves while anything below it is in the window. M itself matters to those who prefetch
    or record what ranks down to it.

    Args:
        directory: the maps before the step.
        scores: [B, K, N] float32, this step's scores, higher is better.

    Returns:
        [B, K, S] float32; of no meaning for empty slots.
    """
    if scores.shape[-1] == 0:
        return jnp.zeros(directory.chunk_of_slot.shape, jnp.float32)
    chunks = jnp.maximum(directory.chunk_of_slot, 0)
    return jnp.take_along_axis(scores, chunks, axis=-1, mode="promise_in_bounds")


POLICIES: MappingProxyType[str, Policy] = MappingProxyType({"lookahead": lookahead})


def policy(name: str) -> Policy:
    """The policy of that name; ValueError with the choices for any other."""
    if name not in POLICIES:
        raise ValueError(f"eviction must be one of {', '.join(POLICIES)}; got {name!r}")
    return POLICIES[name]
