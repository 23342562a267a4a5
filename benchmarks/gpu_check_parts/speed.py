"""Part ``speed``: the time of every kernel at real sizes, and its share of the floor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_check_parts.bench import Bench, Row, wall
from benchmarks.gpu_check_parts.kernels import Case, Sizes
from benchmarks.gpu_check_parts.sizes import FAMILIES, TIMED, TOY


def run(bench: Bench) -> None:
    """What the device can do at most, then one row per kernel and size."""
    bench.item("copy", lambda row: _copy(bench, row))
    bench.item("matmul", lambda row: _matmul(bench, row))
    bench.item("nothing", lambda row: _nothing(bench, row))
    for sizes in TOY if bench.toy else TIMED:
        # Of a toy the first and the last, which is in place, show that the script works.
        for family in (FAMILIES[0], FAMILIES[-1]) if bench.toy else FAMILIES:
            bench.item(
                f"{family.__name__.replace('_', ' ')}: {sizes.label}",
                lambda row, family=family, sizes=sizes: _time(bench, row, family, sizes),
                needs_seconds=2.0,
            )


def _copy(bench: Bench, row: Row) -> None:
    size = 2**14 if bench.toy else 2**28
    sets = bench.draw.sets(lambda draw: (draw.normal((size,)),), 2)
    row.update(bench.seconds(lambda x: x + 1.0, sets))
    row["bytes_per_s"] = bench.facts["copy_bytes_per_s"] = 2 * 4 * size / row["seconds"]


def _matmul(bench: Bench, row: Row) -> None:
    size = 128 if bench.toy else 8192
    a, b = bench.draw.sets(lambda draw: draw.normal((size, size), jnp.bfloat16), 2)
    row.update(bench.seconds(lambda x, y: x @ y, [(a, b), (b, a)]))
    row["flops_per_s"] = bench.facts["matmul_flops_per_s"] = 2 * size**3 / row["seconds"]


def _nothing(bench: Bench, row: Row) -> None:
    x = jnp.ones(8)
    call = jax.jit(lambda x: x + 1.0)
    row["seconds"] = bench.facts["empty_call_s"] = wall(lambda: call(x), 50)


def _time(bench: Bench, row: Row, family: Callable[[Sizes], Case], sizes: Sizes) -> None:
    case = family(sizes)
    row.update(kernel=case.name, dtype=sizes.dtype, bytes=case.nbytes, flops=case.flops)
    row["floor_s"] = max(
        case.nbytes / bench.facts.get("copy_bytes_per_s", math.inf),
        case.flops / bench.facts.get("matmul_flops_per_s", math.inf),
    )
    sets = bench.draw.sets(case.inputs, bench.set_count(case.nbytes))
    first = sizes.label == (TOY if bench.toy else TIMED)[0].label
    for implementation in ("triton", "xla") if first else ("triton",):

        def call(*args: Any, name: str = implementation) -> Any:
            return case.call(
                *args, implementation=name, interpret=bench.interpret and name == "triton"
            )

        if case.in_place:
            # Copies, because what is timed donates them and the next implementation wants them.
            carries = [args[0].copy() for args in sets]
            timed = bench.seconds_in_place(call, carries, [args[1:] for args in sets])
        else:
            timed = bench.seconds(call, sets, together=implementation == "triton")
        row[f"{implementation}_s"] = timed["seconds"]
        row[f"{implementation}_quartiles_s"] = timed["quartiles_s"]
        row[f"{implementation}_of_floor"] = row["floor_s"] / timed["seconds"]
