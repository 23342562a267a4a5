"""Every case: one line for each stage of the pipeline and for each kernel."""

from __future__ import annotations

from typing import Any

from tests.gpu_compile import kernels, stages
from tests.gpu_compile.cases import (
    ODDEST,
    ONE,
    ONE_EACH,
    Case,
    activation_bytes,
    block_bytes,
    cache_bytes,
    logits_bytes,
    near_bytes,
    page_bytes,
    piece_bytes,
    prompt_bytes,
    scores_bytes,
    selected_bytes,
)
from tests.gpu_compile.shapes import ODD, Shape


def none(shape: Shape) -> float:
    """Nothing beside arguments and results."""
    return 0.0


def splits(shape: Shape) -> float:
    """Partials of split-K attention: below the selected keys, so that no copy of them fits in."""
    return max(selected_bytes(shape) / 8, 2 * 2**20)


def shares(shape: Shape) -> float:
    """Partials of split-K attention over everything: one of many keys each."""
    return max(cache_bytes(shape) / 256, 2 * 2**20)


def logits(shape: Shape) -> float:
    """Float32 logits of each query head, between the two passes of a softmax rule."""
    return 1.05 * logits_bytes(shape) + 2**16


def score(index: str, **more: Any) -> Case:
    """One of the forms with a vector or two per chunk."""
    return Case(
        f"score {index}",
        kernels.score_chunks,
        logits,
        launches=2,
        pallas=2,
        index=index,
        **more,
    )


# fmt: off
KERNELS = (
    Case("sparse attention", kernels.sparse_attention, splits, 2, pallas=2, others=True,
         odd=tuple(ODD)),
    Case("full attention", kernels.full_attention, shares, 2, pallas=2, odd=ODDEST),
    Case("page attention", kernels.page_attention, splits, 2, pallas=2, targets=ONE_EACH),
    Case("row attention", kernels.row_attention, shares, 2, pallas=2, targets=ONE_EACH),
    Case("weighted attention", kernels.weighted_attention, splits, 3, pallas=2, odd=ODDEST),
    Case("prompt attention", kernels.prompt_attention, none, 1, pallas=1, odd=ODDEST),
    Case("page write", kernels.page_write, none, 1, pallas=1, odd=ODDEST),
    Case("page gather", kernels.page_gather, none, 1, pallas=1, odd=ODDEST),
    Case("score clusters", kernels.score_clusters, logits, 2, pallas=2, odd=ODDEST),
    score("moments:4", others=True, odd=ODDEST[:1]),
    *(score(index, targets=ONE) for index in ("moments:8", "moments:2", "chunks:4", "bounds:4")),
    Case("selection chunks", kernels.select_chunks, scores_bytes, 4, pallas=1, others=True,
         odd=ODDEST),
    Case("selection clusters", kernels.select_clusters, scores_bytes, 4, pallas=1, odd=ODDEST),
    Case("k-means assign", kernels.kmeans_assign, lambda s: 2**16, 2, pallas=1, odd=ODDEST),
    Case("k-means totals", kernels.kmeans_totals, none, 1, pallas=1, odd=ODDEST),
    Case("chunk means", kernels.means, none, 1, odd=ODDEST),
)
# fmt: on


def select_scratch(shape: Shape) -> float:
    """Logits, scores of chunks, and what has the size of the selection or of B tokens."""
    return logits(shape) + 3 * scores_bytes(shape) + activation_bytes(shape)


def fetched_bytes(shape: Shape) -> float:
    """The pages of the largest transfer, and the scales of their values."""
    selected = shape.batch * shape.config.num_kv_heads * shape.plan.shape.selected
    return selected * (page_bytes(shape) + 8 * shape.spec.chunk_size)


def compute_scratch(shape: Shape) -> float:
    """Less than a copy of the selected keys would take."""
    return splits(shape) + activation_bytes(shape)


def full_scratch(shape: Shape) -> float:
    """Less than a copy of the keys would take by far."""
    return shares(shape) + activation_bytes(shape)


def resident_scratch(shape: Shape) -> float:
    """Of both."""
    return select_scratch(shape) + compute_scratch(shape)


def burst_scratch(shape: Shape) -> float:
    """Of the resident layers, and logits."""
    return 2 * resident_scratch(shape) + 4 * shape.batch * 4 * shape.config.vocab_size


def warm_scratch(shape: Shape) -> float:
    """Scores, and the pages that a session's windows of one layer begin with."""
    return scores_bytes(shape) + shape.config.num_kv_heads * shape.plan.window_slots * page_bytes(
        shape
    )


def prompt_scratch(shape: Shape) -> float:
    """What a layer computes on a block of queries."""
    return 2 * block_bytes(shape)


def index_stages(index: str, targets: tuple[str, ...]) -> tuple[Case, ...]:
    """The stages that an index takes part in."""
    more: dict[str, Any] = {"index": index, "targets": targets}
    kmeans = 2 if index == "clusters" else 0
    return (
        Case(f"select {index}", stages.select, select_scratch, 32, pallas=3, **more),
        Case(f"resident {index}", stages.resident, resident_scratch, 22, pallas=5, **more),
        Case(f"flush {index}", stages.flush, lambda s: 3 * near_bytes(s), 32, **more),
        Case(f"take apart {index}", stages.take_apart, prompt_bytes, 96, pallas=kmeans, **more),
        Case(f"insert {index}", stages.insert, piece_bytes, 13, **more),
    )


def stage(name: str, build: Any, scratch: Any, launches: int, pallas: int = 0, **more: Any) -> Case:
    """One that takes part in no index."""
    return Case(name, build, scratch, launches, pallas=pallas, **{"targets": ONE_EACH, **more})


# The sort that remains chooses, once per session and layer, the chunks to begin with.
# fmt: off
STAGES = (
    *index_stages("moments:4", ONE_EACH),
    *index_stages("clusters", ONE),
    stage("select clusters, rest by clusters", stages.select, select_scratch, 40, 3,
          estimate="clusters", targets=ONE),
    stage("select moments:4, one span in four", stages.select, select_scratch, 48, 3,
          index="moments:4", scan_one_in=4, targets=ONE),
    stage("select moments:4, likely", stages.select_likely, select_scratch, 40, 3,
          index="moments:4", targets=ONE),
    stage("compute", stages.compute, compute_scratch, 11, 2, others=True),
    stage("burst of two layers", stages.burst, burst_scratch, 120, 5, targets=ONE),
    stage("compute of micro-batches", stages.compute_parts, compute_scratch, 24, 2, targets=ONE),
    stage("write", stages.write, none, 1, 1),
    stage("write int4", stages.write_codes, fetched_bytes, 12, 1, targets=ONE),
    stage("gather", stages.gather, scores_bytes, 5, 1),
    stage("grow", stages.grow, none, 1),
    stage("append", stages.append, none, 64),
    stage("insert pages", stages.insert_pages, none, 1),
    stage("insert near", stages.insert_near, none, 2),
    stage("warm", stages.warm, warm_scratch, 26, sorts=1),
    stage("prompt layer", stages.prompt_layer, prompt_scratch, 23, 1),
    stage("full layer", stages.full_layer, full_scratch, 15, 2),
    stage("embed", stages.embed, none, 1),
    stage("logits", stages.logits, activation_bytes, 2),
)
# fmt: on
CASES = (*KERNELS, *STAGES)
