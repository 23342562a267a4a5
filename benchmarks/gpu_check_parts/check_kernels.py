"""Part ``kernels``: every kernel on fresh random inputs against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax

from benchmarks.gpu_check_parts.bench import Bench, Row
from benchmarks.gpu_check_parts.kernels import Case, Sizes
from benchmarks.gpu_check_parts.sizes import CHECKED, FAMILIES, TOY


def run(bench: Bench) -> None:
    """One row per kernel and size."""
    for sizes in TOY if bench.toy else CHECKED:
        # A small budget, so that something is selected, and a half of it misses.
        sizes = replace(sizes, budget=min(sizes.budget, sizes.tokens // 2), hits=0.5, holes=True)
        for family in FAMILIES:
            bench.item(
                f"{family.__name__.replace('_', ' ')}: {sizes.label}",
                lambda row, family=family, sizes=sizes: _check(bench, row, family, sizes),
                needs_seconds=1.0,
            )


def _check(bench: Bench, row: Row, family: Callable[[Sizes], Case], sizes: Sizes) -> None:
    case = family(sizes)
    inputs = bench.draw.sets(case.inputs, 1)[0]
    row.update(kernel=case.name, dtype=sizes.dtype, tolerance=case.tolerance)
    # XLA's forms are what the tests check on every machine; here once.
    first = sizes.label == (TOY if bench.toy else CHECKED)[0].label
    for implementation in ("triton", "xla") if first else ("triton",):
        call = jax.jit(
            lambda *args, name=implementation: case.call(
                *args,
                implementation=name,
                interpret=bench.interpret and name == "triton",
            )
        )
        row[f"error_{implementation}"] = error = case.check(call(*inputs), inputs)
        if not error <= case.tolerance:
            row["status"] = "failed"
            row["why"] = f"{implementation}: error {error:.3g}, allowed {case.tolerance:g}"
