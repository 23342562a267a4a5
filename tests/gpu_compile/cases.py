"""What is compiled, for which targets and shapes, and what it may use.

A stage or a kernel is one line in `STAGES` or `KERNELS`: compiled at one shape for some targets,
a kernel for all six, and for one target at other shapes where those matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from tests.gpu_compile.shapes import Shape
from tests.gpu_compile.targets import TARGETS

BASE = ("llama-3-8b", "128K", 8)
BASE_TARGET = "h200"
ONE = (BASE_TARGET,)
ONE_EACH = ("a100", "rtx4090", "h200")
"""A target of each compute capability."""

OTHERS = (
    ("qwen3-8b", "1M", 1),
    ("qwen3-14b", "32K", 8),
    ("phi-4-mini", "1M", 8),
)
"""With the base shape, every model, context and batch."""

ODD_TARGET = "a100"
ODDEST = ("g7-d80-f16-c1", "g1-d256-f32-c8")


@dataclass(frozen=True)
class Call:
    """A function and its abstract arguments."""

    fn: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


Bound = Callable[[Shape], float]


@dataclass(frozen=True)
class Case:
    """One compiled function or kernel.

    Attributes:
        name: for tables.
        build: the call at a shape.
        scratch: the most device memory it may take beside arguments and results, in bytes.
        launches: the most kernels and library calls, those in a loop once; None: any number.
        sorts: how many sorts may be in it.
        pallas: how many different Pallas kernels must be in it, at least.
        index, estimate, scan_one_in: of the shape.
        targets: what the base shape is compiled for.
        others: whether the shapes of `OTHERS` are, too, for one target.
        odd: which shapes of `ODD` are, too, for the oldest target, which has the fewest ways out.
    """

    name: str
    build: Callable[[Shape], Call]
    scratch: Bound
    launches: int | None = None
    sorts: int = 0
    pallas: int = 0
    index: str = "clusters"
    estimate: str = "none"
    scan_one_in: int = 1
    targets: tuple[str, ...] = TARGETS
    others: bool = False
    odd: tuple[str, ...] = ()

    def shape(self, model: str, context: str, batch: int) -> Shape:
        """With the options of this case."""
        return Shape(model, context, batch, self.index, self.estimate, self.scan_one_in)


def runs_of(case: Case, *, one_shape: bool = False) -> Iterator[tuple[str, Shape]]:
    """Targets and shapes that a case is compiled for; with `one_shape`, only `BASE_TARGET` and
    `BASE`."""
    if one_shape:
        yield BASE_TARGET, case.shape(*BASE)
        return
    for target in case.targets:
        yield target, case.shape(*BASE)
    for shape in OTHERS if case.others else ():
        yield BASE_TARGET, case.shape(*shape)
    for model in case.odd:
        yield ODD_TARGET, case.shape(model, "odd", 3)


def selected_bytes(shape: Shape) -> int:
    """Keys (or values) of what is selected: what a gathered copy of K would take."""
    config = shape.config
    return shape.batch * config.num_kv_heads * shape.spec.selected * _chunk_bytes(shape)


def scores_bytes(shape: Shape) -> int:
    """Float32 scores [B, K, N]."""
    return shape.batch * shape.config.num_kv_heads * shape.plan.shape.chunk_capacity * 4


def logits_bytes(shape: Shape) -> int:
    """Float32 logits [B, H, X] of what the index ranks."""
    index = shape.layer_index.ranking
    groups = index.sizes.shape[-1] if hasattr(index, "sizes") else shape.plan.shape.chunk_capacity
    return shape.batch * shape.config.num_heads * groups * 4


def cache_bytes(shape: Shape) -> int:
    """Keys (or values) of one layer of full attention."""
    config = shape.config
    row = config.head_dim * shape.dtype.itemsize
    return shape.batch * config.num_kv_heads * shape.plan.shape.cache_tokens * row


def prompt_bytes(shape: Shape) -> int:
    """Keys (or values) of one layer of one prompt."""
    config = shape.config
    return config.num_kv_heads * shape.plan.shape.prompt_capacity * config.head_dim * 2


def near_bytes(shape: Shape) -> int:
    """Keys and values of sink, local and unflushed tokens of all sessions."""
    return 2 * math.prod(shape.near.k.shape) * 2


def piece_bytes(shape: Shape) -> int:
    """Index of one session and layer."""
    leaves = jax.tree.leaves(shape.layer_index)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) // shape.batch


def activation_bytes(shape: Shape) -> int:
    """What a layer computes on B tokens, with room for partial sums of products."""
    config = shape.config
    return 8 * shape.batch * (config.hidden_size + config.intermediate_size) * 4


def block_bytes(shape: Shape) -> int:
    """What a layer of prefill computes on a block of 512 queries."""
    config = shape.config
    heads = config.num_heads + 2 * config.num_kv_heads
    wide = config.hidden_size + 3 * config.intermediate_size + heads * config.head_dim
    return 512 * wide * 4


def page_bytes(shape: Shape) -> int:
    """One page."""
    return 2 * _chunk_bytes(shape)


def _chunk_bytes(shape: Shape) -> int:
    return shape.spec.chunk_size * shape.config.head_dim * 2
