"""Fresh random inputs, small ones by NumPy, large ones cut from pools on the device.

Compiling a generator for every shape would take longer than everything that is measured.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Shape = Sequence[int]
SMALL = 2**22
POOL = 2**28
"""Elements. A larger array repeats the pool, which no cache holds."""


class Draw:
    """Random arrays; large ones are `jax.Array`, small ones NumPy's."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._pools: dict[str, jax.Array] = {}

    def normal(self, shape: Shape, dtype: Any = np.float32) -> Any:
        """Normal numbers."""
        kind = jnp.dtype(dtype)
        if math.prod(shape) <= SMALL:
            return self.rng.standard_normal(tuple(shape), np.float32).astype(kind)
        make = functools.partial(jax.random.normal, shape=(POOL,), dtype=kind)
        return self._from_pool(kind.name, make, shape)

    def words(self, shape: Shape) -> Any:
        """uint32, any."""
        if math.prod(shape) <= SMALL:
            return self.rng.integers(0, 2**32, tuple(shape), np.uint32)
        make = functools.partial(jax.random.bits, shape=(POOL,), dtype=jnp.uint32)
        return self._from_pool("words", make, shape)

    def uniform(self, shape: Shape) -> Any:
        """float32 in [0, 1)."""
        return self.rng.random(tuple(shape), np.float32)

    def integers(self, shape: Shape, low: int, high: int) -> Any:
        """int32, from ``low`` to ``high`` - 1."""
        return self.rng.integers(low, high, tuple(shape), np.int32)

    def order(self, shape: Shape) -> Any:
        """int32, a random order of 0 .. n - 1 along the last axis."""
        return np.argsort(self.uniform(shape), axis=-1).astype(np.int32)

    def sets(self, make: Callable[[Draw], Any], count: int, limit: float = 8e9) -> list[Any]:
        """Up to ``count`` sets of fresh inputs on the device, of ``limit`` bytes in all."""
        first = jax.tree.map(jnp.asarray, make(self))
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(first))
        count = min(count, max(1, int(limit // max(held, 1))))
        return [first, *(jax.tree.map(jnp.asarray, make(self)) for _ in range(count - 1))]

    def _from_pool(self, name: str, make: Callable[[jax.Array], jax.Array], shape: Shape) -> Any:
        if name not in self._pools:
            self._pools[name] = jax.jit(make)(jax.random.key(int(self.rng.integers(2**31))))
        start = int(self.rng.integers(max(1, POOL - math.prod(shape))))
        return _cut(self._pools[name], start, shape=tuple(shape))


@functools.partial(jax.jit, static_argnames="shape")
def _cut(pool: jax.Array, start: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    size = math.prod(shape)
    if size <= pool.size:
        return jax.lax.dynamic_slice_in_dim(pool, start, size).reshape(shape)
    return jnp.tile(pool, -(-size // pool.size))[:size].reshape(shape)
