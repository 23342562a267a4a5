"""What a store is asked for, step by step, taken from traces: real statistics at any size.

The windows of a trace are replayed through the engine's own directory; what they miss, and what
ranks close to being selected, is asked of the store. A long context is several traces side by side:
each kv head has the chunks, and misses, of several texts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.window_traces import TEXTS, Wanted, traces
from kvdrive_jax.window.allocation import slots_of
from kvdrive_jax.window.directory import Directory, in_window, observe, place
from kvdrive_jax.window.eviction import policy
from kvdrive_jax.window.layout import WindowLayout
from kvdrive_jax.window.replay import warm_directory
from kvdrive_jax.window.trace import Trace, with_budget

EVICTION = "smoothed"


@dataclass(frozen=True, kw_only=True, eq=False)
class Requests:
    """What each step asks for.

    missed: [steps, L, K, P] int32, chunks to be fetched, -1 for none; likely: [steps, L, K, M],
    chunks that rank close to selection and are in no window; warm: [L, K, R], the prompt's chunks,
    most important first; windowed: slots of each window; chunks: of each (layer, kv head).
    """

    missed: Any
    likely: Any
    warm: Any
    windowed: int
    chunks: int


@partial(jax.jit, static_argnames=("count", "depth"))
def _ask(directory: Directory, ids: jax.Array, scores: jax.Array, *, count: int, depth: int) -> Any:
    layers, kv_heads, chunks = directory.slot_of_chunk.shape
    at = (jnp.arange(layers)[:, None, None], jnp.arange(kv_heads)[:, None])

    def step(directory: Directory, ranked: tuple[jax.Array, jax.Array]) -> Any:
        ids, scores = ranked
        known = jnp.full((layers, kv_heads, chunks), -jnp.inf)
        known = known.at[(*at, jnp.where(ids < 0, chunks, ids))].set(scores, mode="drop")
        selected = ids[..., :count]
        directory = observe(directory, known, selected)
        directory, _, miss = place(directory, selected, policy(EVICTION)(directory, known))
        near = ids[..., :depth]
        likely = jnp.where(in_window(directory, near), -1, near)
        return directory, (jnp.where(miss, selected, -1), likely)

    return lax.scan(step, directory, (ids, scores))[1]


def requests(trace: Trace, ratio: float, multiple: float, prefetch: float) -> Requests:
    """Of one trace with a budget that is ``ratio`` of its prompt, windows of ``multiple``."""
    trace = with_budget(trace, math.ceil(trace.info.prompt_tokens * ratio))
    selected = trace.info.selected
    slots = slots_of(multiple, selected)
    layout = WindowLayout.uniform(trace.layers, trace.kv_heads, slots, selected)
    missed, likely = _ask(
        warm_directory(trace, layout, EVICTION),
        jnp.asarray(trace.ids),
        jnp.asarray(trace.scores),
        count=selected,
        depth=math.ceil(prefetch * selected),
    )
    return Requests(
        missed=np.asarray(missed),
        likely=np.asarray(likely),
        warm=trace.warm,
        windowed=slots,
        chunks=int(trace.warm.max()) + 1,
    )


def long_context(
    folder: Path,
    *,
    layers: int,
    kv_heads: int,
    texts: int,
    steps: int,
    ratio: float,
    multiple: float,
    prefetch: float,
) -> Requests:
    """``texts`` traces side by side in every one of ``layers`` x ``kv_heads`` heads.

    Head k of layer l has, as its part j, a kv head of layer l of text j + k, so that no two heads
    of a layer ask for the same.
    """
    wanted = [Wanted(text) for text in TEXTS]
    known = [
        requests(trace, ratio, multiple, prefetch) for trace in traces(wanted, folder).values()
    ]
    part = max(one.chunks for one in known)
    parts = [_part(known, layers, kv_heads, j, steps) for j in range(texts)]

    def side_by_side(arrays: list[Any]) -> Any:
        width = max(array.shape[-1] for array in arrays)
        shifted = [
            np.pad(
                np.where(array < 0, -1, array + j * part),
                [(0, 0)] * (array.ndim - 1) + [(0, width - array.shape[-1])],
                constant_values=-1,
            )
            for j, array in enumerate(arrays)
        ]
        # The best of every part first, then the second best of every part ...
        return np.stack(shifted, axis=-1).reshape(*shifted[0].shape[:-1], -1)

    return Requests(
        missed=side_by_side([one.missed for one in parts]),
        likely=side_by_side([one.likely for one in parts]),
        warm=side_by_side([one.warm for one in parts]),
        windowed=sum(one.windowed for one in parts),
        chunks=part * texts,
    )


def _part(known: list[Requests], layers: int, kv_heads: int, j: int, steps: int) -> Requests:
    of = [known[(j + k) % len(known)] for k in range(kv_heads)]
    width = {name: max(getattr(one, name).shape[-1] for one in of) for name in ("missed", "likely")}
    width["warm"] = max(one.warm.shape[-1] for one in of)

    def pick(name: str) -> Any:
        heads = []
        for k, one in enumerate(of):
            array = getattr(one, name)
            if name != "warm":
                array = array[:steps]
            layer = np.arange(layers) % array.shape[-3]
            head = array[..., layer, k % array.shape[-2], :]
            short = width[name] - head.shape[-1]
            pad = [(0, 0)] * (head.ndim - 1) + [(0, short)]
            heads.append(np.pad(head, pad, constant_values=-1))
        return np.stack(heads, axis=-2)

    return Requests(
        missed=pick("missed"),
        likely=pick("likely"),
        warm=pick("warm"),
        windowed=of[0].windowed,
        chunks=max(one.chunks for one in of),
    )
