"""Page write in plain XLA: the specification of the kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def write_rows(window: jax.Array, pages: jax.Array, target: jax.Array) -> jax.Array:
    """window [R, E] with row target[i] replaced by pages[i], pages [M, E], target [M] int32.

    Targets outside 0 .. R - 1 write nothing; those inside are distinct.
    """
    rows = window.shape[0]
    # Unique, those that write nothing too: otherwise XLA swaps 16-bit elements in one by one.
    nowhere = rows + jnp.arange(target.shape[0], dtype=jnp.int32)
    target = jnp.where((target >= 0) & (target < rows), target, nowhere)
    return window.at[target].set(pages, mode="drop", unique_indices=True)
