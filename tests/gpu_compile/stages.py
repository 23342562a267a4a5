"""The compiled functions of prefill and decode, with the arguments that the engine gives them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvdrive_jax.methods import full
from kvdrive_jax.methods.base import embed_tokens, token_logits
from kvdrive_jax.pipeline import direct, indexing, prefill, stages
from kvdrive_jax.pipeline.resident import Held, Sequences, resident_burst
from kvdrive_jax.sampling import SamplingConfig
from kvdrive_jax.tiers.precision import PageFormat
from tests.gpu_compile.cases import Call
from tests.gpu_compile.shapes import Shape


def select(shape: Shape) -> Call:
    """Norm, queries, scores, selection, directory."""
    state = (shape.layer_index, shape.directory)
    return Call(stages.select_stage, (shape.spec, shape.layer, shape.hidden, shape.step, *state))


def select_likely(shape: Shape) -> Call:
    """The same, and what ranks close to being selected, to be read ahead."""
    spec = replace(shape.spec, likely=5 * shape.spec.selected // 4)
    return Call(stages.select_stage, (spec, *select(shape).args[1:]))


def compute(shape: Shape) -> Call:
    """Attention over sink, selection and local, then feed-forward."""
    selected, _ = jax.eval_shape(
        lambda *args: stages.select_stage(shape.spec, *args), *select(shape).args[1:]
    )
    window = shape.pool
    told = (stages.Attended(selected.token, selected.slots, selected.rest),)
    args = (shape.spec, shape.layer, (shape.hidden,), told, shape.step, shape.near, window)
    return Call(stages.compute_stage, args)


def compute_parts(shape: Shape) -> Call:
    """The same of a cohort of as many micro-batches as sessions."""
    spec, layer, (hidden,), (told,), *state = compute(shape).args
    count = hidden.shape[0]
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), (hidden, told))
    return Call(stages.compute_stage, (spec, layer, (one[0],) * count, (one[1],) * count, *state))


def resident(shape: Shape) -> Call:
    """Select and compute in one, every chunk in HBM."""
    window = shape.resident
    state = (shape.near, shape.layer_index, window, shape.ids())
    return Call(stages.resident_layer, (shape.spec, shape.layer, shape.hidden, shape.step, *state))


def burst(shape: Shape) -> Call:
    """Several resident steps in one program, of two layers."""
    rows, step, layers = shape.ids(shape.batch), shape.step, 2
    held = Held(
        layers=(shape.layer,) * layers,
        ends=shape.weights.ends,
        indexes=(shape.layer_index,) * layers,
        window=shape.resident,
        n_chunks=rows,
        inv_freq=step.inv_freq,
        attention_factor=step.attention_factor,
        numbers=rows,
        eos=shape.ids(8),
    )
    active = shape.array(shape.batch, dtype=jnp.bool_)
    at = Sequences(token=rows, position=rows, near_row=rows, drawn=rows, active=active)
    sampling = SamplingConfig()
    args = (shape.spec, held, (shape.near,) * layers, at, shape.ids(), sampling.values)
    return Call(resident_burst, (*args, sampling.rule))


def write(shape: Shape) -> Call:
    """The largest transfer of fetched pages into their slots."""
    window = shape.pool
    most = shape.batch * shape.config.num_kv_heads * shape.plan.shape.selected
    pages = shape.pages(most)
    return Call(stages.write_stage, (window, pages, shape.ids(most)))


def write_codes(shape: Shape) -> Call:
    """The same, of pages that are int4 below HBM."""
    window = shape.pool
    most = shape.batch * shape.config.num_kv_heads * shape.plan.shape.selected
    _, chunk_size, head_dim = window.shape[2:]
    kept = PageFormat("int4", chunk_size, head_dim, np.dtype(window.dtype))
    rows = shape.array(most, kept.page_bytes, dtype=jnp.uint8)
    return Call(stages.write_stage, (window, rows, shape.ids(most)), {"precision": "int4"})


def gather(shape: Shape) -> Call:
    """A step's misses from pinned pages. (The compile-only client takes them for device memory.)"""
    window = shape.pool
    rows = (shape.batch, shape.config.num_kv_heads)
    chunks = shape.plan.shape.chunk_capacity
    source = shape.array(rows[0] * rows[1] * chunks, 2 * shape.spec.chunk_size * window.shape[-1])
    missing, moved = shape.ids(2, *rows, shape.spec.selected), shape.ids(shape.batch)
    args = (window, moved, source, missing, shape.ids(*rows), shape.ids(*rows, chunks))
    return Call(direct.gather_stage, args)


def flush(shape: Shape) -> Call:
    """Generated tokens into pages and index."""
    rows = shape.ids(shape.batch)
    return Call(
        stages.flush_stage,
        (shape.spec, shape.near, (shape.layer_index,), rows, rows),
        {"flush_chunks": shape.plan.shape.flush_chunks},
    )


def grow(shape: Shape) -> Call:
    """Flushed pages into a window that holds every chunk."""
    window = shape.resident
    pages = shape.pages(shape.batch, shape.config.num_kv_heads, shape.plan.shape.flush_chunks)
    counts = shape.ids(shape.batch)
    return Call(
        stages.grow_resident,
        (window, pages, counts, counts, shape.ids()),
        {"chunks": shape.plan.shape.chunk_capacity},
    )


def append(shape: Shape) -> Call:
    """The new token into the near buffers of all layers."""
    layers = shape.config.num_layers
    row = shape.array(shape.batch, shape.config.num_kv_heads, shape.config.head_dim)
    buffers = [array for _ in range(layers) for array in shape.near]
    return Call(stages.append_rows, (buffers, [row] * (2 * layers), shape.ids(shape.batch)))


def prompt_layer(shape: Shape) -> Call:
    """One layer of prefill of one prompt."""
    config = shape.config
    rotary = shape.array(config.rope.rotary_dim // 2, dtype=jnp.float32)
    hidden = shape.array(shape.plan.shape.prompt_capacity, config.hidden_size)
    length, factor = shape.ids(), shape.array(dtype=jnp.float32)
    return Call(
        prefill.prefill_layer,
        (shape.weights.static, shape.layer, hidden, length, rotary, factor),
        {"observed": shape.settings.retrieval.observation, "implementation": "triton"},
    )


def take_apart(shape: Shape) -> Call:
    """Pages, near tokens, index and importance of one layer of a prompt."""
    return Call(
        indexing.take_apart,
        (shape.spec, shape.prompt_layer, shape.ids(), shape.ids()),
        {
            "grouped": True,
            "near_capacity": shape.plan.shape.near_capacity,
            "chunk_capacity": shape.plan.shape.chunk_capacity,
        },
    )


def _parts(shape: Shape) -> Any:
    call = take_apart(shape)

    def run(prompt: Any, length: Any, n_chunks: Any) -> Any:
        return indexing.take_apart(shape.spec, prompt, length, n_chunks, **call.kwargs)

    return jax.eval_shape(run, *call.args[1:])


def insert(shape: Shape) -> Call:
    """One session's index into the batch."""
    args = (shape.spec, shape.layer_index, shape.ids(), _parts(shape).piece)
    return Call(indexing.insert_index, args)


def insert_near(shape: Shape) -> Call:
    """One session's near tokens into the batch."""
    return Call(indexing.insert_state, (shape.near, shape.ids(), _parts(shape).near))


def insert_pages(shape: Shape) -> Call:
    """All pages of a session into a window that holds every chunk."""
    window = shape.resident
    pages = shape.pages(shape.config.num_kv_heads, shape.plan.shape.chunk_capacity)
    return Call(indexing.insert_resident, (window, shape.ids(), shape.ids(), pages))


def warm(shape: Shape) -> Call:
    """A session's most important chunks into its windows."""
    window = shape.pool
    parts = _parts(shape)
    rows = (shape.ids(), shape.ids())
    args = (window, shape.directory, *rows, parts.pages, parts.importance, shape.ids())
    return Call(indexing.warm_window, args)


def full_layer(shape: Shape) -> Call:
    """One decode step of one layer of full attention."""
    config, step = shape.config, shape.step
    size = (shape.batch, config.num_kv_heads, shape.plan.shape.cache_tokens, config.head_dim)
    return Call(
        full._layer,
        (
            shape.weights.static,
            shape.layer,
            shape.hidden,
            step.position,
            step.inv_freq,
            step.attention_factor,
            shape.array(*size),
            shape.array(*size),
        ),
    )


def embed(shape: Shape) -> Call:
    """Tokens to hidden states."""
    return Call(embed_tokens, (shape.weights.static, shape.weights.ends, shape.ids(shape.batch)))


def logits(shape: Shape) -> Call:
    """Hidden states to logits."""
    return Call(token_logits, (shape.weights.static, shape.weights.ends, shape.hidden))
