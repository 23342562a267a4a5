"""Every case: one line for each stage of the pipeline and for each kernel."""

from __future__ import annotations

from typing import Any

from tests.gpu_compile import kernels, stages
from tests.gpu_compile.cases import (
    Case,
    Shape,
    activation_bytes,
    block_bytes,
    logits_bytes,
    near_bytes,
    piece_bytes,
    prompt_bytes,
    scores_bytes,
    selected_bytes,
)


def none(shape: Shape) -> float:
    """Nothing beside arguments and results."""
    return 0.0


def splits(shape: Shape) -> float:
    """Partials of split-K attention: below the selected keys, so that no copy of them fits in."""
    return max(selected_bytes(shape) / 8, 2 * 2**20)


def logits(shape: Shape) -> float:
    """Float32 logits of each query head, between the two passes of a softmax rule."""
    return 1.05 * logits_bytes(shape) + 2**16


def score(index: str) -> Case:
    """One of the forms with a vector or two per chunk."""
    return Case(
        f"score {index}",
        kernels.score_chunks,
        logits,
        launches=2,
        pallas=2,
        index=index,
        everywhere=index == "moments:4",
        shapes="odd" if index == "moments:4" else "one",
    )


# fmt: off
KERNELS = (
    Case("sparse attention", kernels.sparse_attention, splits, 2, pallas=2, shapes="odd"),
    Case("full attention", kernels.full_attention, splits, 2, pallas=2, shapes="odd"),
    Case("page attention", kernels.page_attention, splits, 2, pallas=2, shapes="some"),
    Case("row attention", kernels.row_attention, splits, 2, pallas=2, shapes="some"),
    Case("weighted attention", kernels.weighted_attention, splits, 3, pallas=2, shapes="odd"),
    Case("prompt attention", kernels.prompt_attention, none, 1, pallas=1, shapes="odd"),
    Case("page write", kernels.page_write, none, 1, pallas=1, shapes="odd"),
    Case("page gather", kernels.page_gather, none, 1, pallas=1, shapes="odd"),
    Case("score clusters", kernels.score_clusters, logits, 2, pallas=2, shapes="odd"),
    *map(score, ("moments:8", "moments:4", "moments:2", "chunks:4", "bounds:4")),
    Case("selection chunks", kernels.select_chunks, scores_bytes, 4, pallas=1, shapes="odd"),
    Case("selection clusters", kernels.select_clusters, scores_bytes, 4, pallas=1, shapes="odd"),
    Case("k-means assign", kernels.kmeans_assign, lambda s: 2**16, 2, pallas=1, shapes="odd"),
    Case("k-means totals", kernels.kmeans_totals, none, 1, pallas=1, shapes="odd"),
    Case("chunk means", kernels.means, none, 1, shapes="odd"),
)
# fmt: on


def select_scratch(shape: Shape) -> float:
    """Logits, scores of chunks, and what has the size of the selection or of B tokens."""
    return logits(shape) + 3 * scores_bytes(shape) + activation_bytes(shape)


def compute_scratch(shape: Shape) -> float:
    """Less than a copy of the selected keys would take."""
    return splits(shape) + activation_bytes(shape)


def resident_scratch(shape: Shape) -> float:
    """Of both."""
    return select_scratch(shape) + compute_scratch(shape)


def prompt_scratch(shape: Shape) -> float:
    """What a layer computes on a block of queries."""
    return 2 * block_bytes(shape)


def indexed(index: str, **more: Any) -> tuple[Case, ...]:
    """The stages that an index takes part in."""
    return (
        Case(f"select {index}", stages.select, select_scratch, sorts=1, index=index, **more),
        Case(f"resident {index}", stages.resident, resident_scratch, index=index, **more),
        Case(
            f"flush {index}", stages.flush, lambda s: 3 * near_bytes(s), index=index, shapes="one"
        ),
        Case(f"take apart {index}", stages.take_apart, prompt_bytes, index=index, shapes="one"),
        Case(f"insert {index}", stages.insert, piece_bytes, index=index, shapes="one"),
    )


# Sorts that remain: of the slots of a window by what is in them, to choose victims in order; and,
# once per session, of its chunks by importance.
STAGES = (
    *indexed("clusters", shapes="some"),
    *indexed("moments:4", everywhere=False, shapes="one"),
    Case("compute", stages.compute, compute_scratch, shapes="some"),
    Case("write", stages.write, none, 1, shapes="one"),
    Case("gather", stages.gather, scores_bytes, pallas=1, shapes="one"),
    Case("grow", stages.grow, none, 1, shapes="one"),
    Case("append", stages.append, none, shapes="one"),
    Case("insert pages", stages.insert_pages, none, 1, shapes="one"),
    Case("warm", stages.warm, scores_bytes, sorts=1, shapes="one"),
    Case("prompt layer", stages.prompt_layer, prompt_scratch, pallas=1, shapes="some"),
    Case("full layer", stages.full_layer, compute_scratch, shapes="some"),
    Case("embed", stages.embed, none, 1, shapes="one"),
    Case("logits", stages.logits, activation_bytes, shapes="one"),
)
CASES = (*KERNELS, *STAGES)
NOT_YET: dict[str, str] = {
    **dict.fromkeys(
        ("select clusters", "select moments:4", "resident clusters", "resident moments:4"),
        "the stage does not call the scoring and selection kernels: it sorts",
    ),
    **dict.fromkeys(
        ("compute", "full layer"),
        "the stage does not call the attention kernel: it gathers pages, or writes logits",
    ),
}
"""Cases that do not keep their limits yet, and why; an entry that became wrong fails its test."""
