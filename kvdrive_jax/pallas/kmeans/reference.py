"""The two halves of a k-means round in plain XLA: the specification of the kernels.

`index.kmeans` has the algorithm, and on a CPU its own faster forms of the same.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def assign(vectors: jax.Array, directions: jax.Array, in_use: jax.Array) -> jax.Array:
    """[K, N] int32: the direction in use with the largest inner product, ties to the lowest id.

    vectors: [K, N, D] float32; directions: [K, C, D] float32; in_use: [C] bool, at least one.
    """
    products = jnp.einsum("krd,kcd->krc", vectors, directions)
    return jnp.where(in_use, products, -jnp.inf).argmax(axis=-1).astype(jnp.int32)


def totals(vectors: jax.Array, ids: jax.Array, clusters: int) -> tuple[jax.Array, jax.Array]:
    """Sums [K, C, D] float32 and counts [K, C] int32 of the members of each cluster.

    vectors: [K, N, D] float32; ids: [K, N] int32; ids outside 0 .. C - 1 count nowhere.
    """
    members = ids[..., None] == jnp.arange(clusters, dtype=jnp.int32)
    sums = jnp.einsum(
        "krc,krd->kcd", members.astype(jnp.float32), vectors, precision=lax.Precision.HIGHEST
    )
    return sums, members.sum(axis=1, dtype=jnp.int32)


def chunk_means(keys: jax.Array) -> jax.Array:
    """Mean of each chunk's keys: [..., N, c, D] any float dtype -> [..., N, D] float32.

    XLA makes one loop of it, on every backend, that reads each key once.
    """
    return keys.astype(jnp.float32).mean(axis=-2)
