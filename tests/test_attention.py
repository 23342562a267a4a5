"""The attention specification against NumPy in float64, over odd shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvdrive_jax.pallas.attention import attend, attend_one, combine
from kvdrive_jax.pallas.prompt.reference import attend_block

# Greatest error of float32 attention over standard normal values.
TOLERANCE = 2e-5


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """q [Q, H, D], k and v [K, T, D], visible [Q, T] -> [Q, H, D] in float64."""
    queries, heads, dim = q.shape
    grouped = q.reshape(queries, k.shape[0], -1, dim).astype(np.float64)
    logits = np.einsum("qkgd,ktd->kgqt", grouped, k) * dim**-0.5
    logits = np.where(visible, logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("kgqt,ktd->qkgd", weights, v).reshape(queries, heads, dim)


@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "queries", "first", "tokens", "block_k"),
    [
        (3, 3, 64, 512, 1024, 2048, 512),  # rows of a kv head in two products
        (1, 16, 64, 512, 512, 1024, 512),  # in eight
        (2, 7, 80, 256, 256, 512, 256),
        (5, 1, 96, 64, 128, 256, 64),
        (2, 3, 16, 64, 0, 64, 64),
    ],
)
def test_blocked_prompt_attention(
    rng: np.random.Generator,
    kv_heads: int,
    group: int,
    dim: int,
    queries: int,
    first: int,
    tokens: int,
    block_k: int,
) -> None:
    q = rng.standard_normal((queries, kv_heads * group, dim), np.float32) * 2
    k, v = rng.standard_normal((2, kv_heads, tokens, dim), np.float32)
    out = jax.jit(attend_block, static_argnames="block_k")(
        q, k, v, jnp.int32(first), block_k=block_k
    )
    visible = np.arange(tokens)[None] <= first + np.arange(queries)[:, None]
    np.testing.assert_allclose(out, exact(q, k, v, visible), atol=TOLERANCE)


@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(3, 3, 64), (1, 7, 80), (4, 1, 96)])
def test_partials_combine_to_attention_over_the_union(
    rng: np.random.Generator, kv_heads: int, group: int, dim: int
) -> None:
    """Two sets of keys, one of them empty for the second session, and the token itself."""
    batch, counts = 2, (37, 10)
    q = rng.standard_normal((batch, kv_heads * group, dim), np.float32) * 2
    k, v = rng.standard_normal((2, batch, kv_heads, sum(counts) + 1, dim), np.float32)
    valid = rng.random((batch, 1, sum(counts) + 1)) < 0.7
    valid[1, :, counts[0] : -1] = False
    valid[..., -1] = True

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        edge = counts[0]
        return combine(
            attend(q, k[:, :, :edge], v[:, :, :edge], valid[..., :edge]),
            attend(q, k[:, :, edge:-1], v[:, :, edge:-1], valid[..., edge:-1]),
            attend_one(q, k[:, :, -1], v[:, :, -1]),
        )

    out = run(q, k, v)
    for row in range(batch):
        expected = exact(q[row : row + 1], k[row], v[row], valid[row])
        np.testing.assert_allclose(out[row], expected[0], atol=TOLERANCE)


def test_large_logits_and_an_empty_set_stay_finite() -> None:
    q = jnp.full((1, 2, 16), 1e4)
    k = jnp.full((1, 1, 8, 16), 1e4)
    v = jnp.ones((1, 1, 8, 16))
    nothing = attend(q, k, v, jnp.zeros((1, 1, 8), bool))
    out = combine(attend(q, k, v, jnp.ones((1, 1, 8), bool)), nothing)
    np.testing.assert_allclose(out, 1.0)
    np.testing.assert_array_equal(combine(nothing), 0.0)
