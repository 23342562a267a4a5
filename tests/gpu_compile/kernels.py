"""The Pallas kernels, each through its api with ``implementation="triton"``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kvdrive_jax.index.planes import PlanesForm
from kvdrive_jax.pallas.attention import (
    attend_pages,
    attend_rows,
    attend_step,
    attend_weighted,
)
from kvdrive_jax.pallas.kmeans import assign, chunk_means, totals
from kvdrive_jax.pallas.page_gather import gather_pages
from kvdrive_jax.pallas.page_write import write_pages
from kvdrive_jax.pallas.prompt import attend_block, attend_prompt
from kvdrive_jax.pallas.scoring import Codes, Recipe, score_planes, score_vectors
from kvdrive_jax.pallas.selection import select_chunks as pick_chunks
from kvdrive_jax.pallas.selection import select_clusters as pick_clusters
from tests.gpu_compile.cases import Call
from tests.gpu_compile.shapes import Shape

TRITON = {"implementation": "triton"}
BLOCK_Q = 512


def _jit(kernel: Any, *static: str, donate: tuple[str, ...] = ()) -> Any:
    return jax.jit(kernel, static_argnames=("implementation", *static), donate_argnames=donate)


def sparse_attention(shape: Shape) -> Call:
    """All attention of one decode step: pages in their slots, near tokens, the token itself."""
    slots = shape.ids(shape.batch, shape.config.num_kv_heads, shape.spec.selected)
    window = shape.pool
    token = shape.array(shape.batch, shape.config.num_kv_heads, shape.config.head_dim)
    rows = shape.ids(shape.batch)
    args = (shape.queries, token, token, *shape.near, rows)
    return Call(_jit(attend_step), args, {"window": window, "slots": slots, **TRITON})


def full_attention(shape: Shape) -> Call:
    """All attention of one decode step of full attention: the cache, the token itself."""
    config = shape.config
    size = (shape.batch, config.num_kv_heads, shape.plan.shape.cache_tokens, config.head_dim)
    token, cache = shape.array(*size[:2], size[3]), shape.array(*size)
    args = (shape.queries, token, token, cache, cache, shape.ids(shape.batch))
    return Call(_jit(attend_step), args, TRITON)


def page_attention(shape: Shape) -> Call:
    """Selected pages alone, as a partial."""
    slots = shape.ids(shape.batch, shape.config.num_kv_heads, shape.spec.selected)
    args = (shape.queries, shape.pool, slots)
    return Call(_jit(attend_pages), args, TRITON)


def row_attention(shape: Shape) -> Call:
    """A whole cache, as a partial."""
    config = shape.config
    size = (shape.batch, config.num_kv_heads, shape.plan.shape.cache_tokens, config.head_dim)
    args = (shape.queries, shape.array(*size), shape.array(*size), shape.ids(shape.batch))
    return Call(_jit(attend_rows), args, TRITON)


def weighted_attention(shape: Shape) -> Call:
    """Cluster means in place of the keys they stand for."""
    clusters = shape.layer_index.ranking
    args = (shape.queries, clusters.centroids, clusters.centroids, clusters.sizes)
    return Call(_jit(attend_weighted), args, TRITON)


def prompt_attention(shape: Shape) -> Call:
    """One block of queries of a prompt, whose length is not a static number."""
    config = shape.config
    queries = shape.array(BLOCK_Q, config.num_heads, config.head_dim)
    keys = shape.array(config.num_kv_heads, shape.plan.shape.prompt_capacity, config.head_dim)
    return Call(_jit(attend_block), (queries, keys, keys, shape.ids()), TRITON)


def prompt_cudnn(shape: Shape) -> Call:
    """A whole prompt through cuDNN."""
    config, tokens = shape.config, shape.plan.shape.prompt_capacity
    queries = shape.array(tokens, config.num_heads, config.head_dim)
    keys = shape.array(tokens, config.num_kv_heads, config.head_dim)
    return Call(jax.jit(attend_prompt), (queries, keys, keys, shape.ids()))


def page_write(shape: Shape) -> Call:
    """The largest transfer of fetched pages into their slots."""
    window = shape.pool
    most = shape.batch * shape.config.num_kv_heads * shape.spec.selected
    pages = shape.pages(most)
    write = _jit(write_pages, donate=("window",))
    return Call(write, (window, pages, shape.ids(most)), TRITON)


def page_gather(shape: Shape) -> Call:
    """A step's misses from DRAM. (The compile-only client takes the source for device memory.)"""
    window = shape.pool
    rows = (shape.batch, shape.config.num_kv_heads)
    chunks = shape.plan.shape.chunk_capacity
    source = shape.array(rows[0] * rows[1] * chunks, 2 * shape.spec.chunk_size * window.shape[-1])
    gather = _jit(gather_pages, donate=("window",))
    missing, table = shape.ids(2, *rows, shape.spec.selected), shape.ids(*rows, chunks)
    return Call(gather, (window, source, missing, shape.ids(*rows), table), TRITON)


def score_clusters(shape: Shape) -> Call:
    """Centroids against the queries of a group."""
    clusters = shape.layer_index.ranking
    args = (shape.queries, clusters.centroids, clusters.sizes, shape.spec.rule)
    return Call(_jit(score_vectors, "rule"), args, TRITON)


def score_chunks(shape: Shape) -> Call:
    """Index forms chunks, bounds and moments in their bits."""
    form = shape.spec.retrieval.form
    assert isinstance(form, PlanesForm)
    planes = [
        Codes(plane.codes, plane.stretch, plane.scale, plane.middle)
        for plane in shape.layer_index.ranking.planes
    ]
    specs = form.specs()
    spread: Any = {"chunks": "none", "moments": "norm", "bounds": "product"}[form.name]
    recipe = Recipe(
        bits=specs[0].bits,
        spread=spread if len(planes) > 1 else "none",
        spread_bits=specs[1].bits if len(specs) > 1 else 16,
        chunk_size=shape.spec.chunk_size,
    )
    config = shape.config
    weights = None
    if len(planes) > 1:
        channels = form.channels(config.head_dim)[1]
        group = config.num_heads // config.num_kv_heads
        weights = shape.array(shape.batch, config.num_kv_heads, group, channels, dtype=jnp.float32)
    second = planes[1] if len(planes) > 1 else None
    rows = shape.ids(shape.batch)
    args = (shape.queries, planes[0], second, weights, rows, recipe, shape.spec.rule)
    return Call(_jit(score_planes, "recipe", "rule"), args, TRITON)


def select_chunks(shape: Shape) -> Call:
    """The best of all chunks."""
    rows = (shape.batch, shape.config.num_kv_heads)
    scores = shape.array(*rows, shape.plan.shape.chunk_capacity, dtype=jnp.float32)
    args = (scores, shape.ids(shape.batch), shape.spec.selected)
    return Call(_jit(pick_chunks, "count"), args, TRITON)


def select_clusters(shape: Shape) -> Call:
    """The best clusters until their chunks fill the budget."""
    clusters = shape.layer_index.ranking
    scores = shape.array(*clusters.sizes.shape, dtype=jnp.float32)
    maps = (clusters.sizes, clusters.cluster_of_chunk)
    args = (scores, *maps, shape.ids(shape.batch), shape.spec.selected)
    return Call(_jit(pick_clusters, "count"), args, TRITON)


def _segment(shape: Shape) -> tuple[Any, int]:
    """Representatives of one segment of a prompt, and how many clusters they make."""
    settings = shape.settings.retrieval
    chunks = settings.segment_tokens // shape.spec.chunk_size
    clusters = settings.segment_tokens // settings.tokens_per_cluster
    config = shape.config
    vectors = shape.array(config.num_kv_heads, chunks, config.head_dim, dtype=jnp.float32)
    return vectors, clusters


def kmeans_assign(shape: Shape) -> Call:
    """Nearest direction of every representative."""
    vectors, clusters = _segment(shape)
    directions = shape.array(vectors.shape[0], clusters, vectors.shape[2], dtype=jnp.float32)
    in_use = shape.array(clusters, dtype=jnp.bool_)
    return Call(_jit(assign), (vectors, directions, in_use), TRITON)


def kmeans_totals(shape: Shape) -> Call:
    """Sums of the representatives of every cluster."""
    vectors, clusters = _segment(shape)
    args = (vectors, shape.ids(*vectors.shape[:2]), clusters)
    return Call(_jit(totals, "clusters"), args, TRITON)


def means(shape: Shape) -> Call:
    """Representatives of a prompt, by XLA."""
    config, chunk = shape.config, shape.spec.chunk_size
    rows = (config.num_kv_heads, shape.plan.shape.chunk_capacity)
    return Call(jax.jit(chunk_means), (shape.array(*rows, chunk, config.head_dim),))
