"""Compile everything for six GPUs and write the table of what it uses.

    JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m tests.gpu_compile.table

writes benchmarks/results/gpu_compile.json and .txt (`make gpu-table` does it).
"""

from __future__ import annotations

import argparse
import sys
import time

import jax

from tests.gpu_compile.cases import BASE
from tests.gpu_compile.measure import ptxas
from tests.gpu_compile.records import RESULTS, Record, broken, compile_case, save
from tests.gpu_compile.registry import CASES
from tests.gpu_compile.targets import why_not

HEAD = (
    "case", "target", "shape", "scratch MiB", "launches", "copies", "loops", "sorts", "shared KiB",
    "registers", "spill", "own kernels (registers, shared KiB)",
)  # fmt: skip


def row(record: Record) -> tuple[str, ...]:
    """One line of the text table."""
    own = {kernel.name: kernel for kernel in record.pallas}
    spill = sum(kernel.spill_bytes or 0 for kernel in record.pallas)
    return (
        record.case,
        record.target,
        f"{record.model}-{record.context}-b{record.batch}",
        f"{record.scratch_bytes / 2**20:.1f}",
        str(record.launches),
        str(record.copies),
        str(record.loops),
        str(record.sorts),
        f"{record.shared_bytes / 1024:.0f}",
        "?" if record.registers is None else str(record.registers),
        "?" if record.registers is None else f"{spill}/{record.xla_spill_bytes}",
        ", ".join(f"{k.name} ({k.registers}, {k.shared_bytes / 1024:.0f})" for k in own.values()),
    )


def text_table(records: list[Record], about: dict[str, object]) -> str:
    """For people: the base shape for all targets first, then other shapes."""
    parts = [
        f"Compiled, not run: jax {about['jax']}, XLA's compiler for six GPUs, {about['ptxas']}.",
        "spill: bytes per thread of own kernels / the most of any kernel of XLA's. Launches in a "
        "loop count once.",
        "Matrix products are as XLA chooses without a GPU to time them on; one that is there may "
        "choose others.",
    ]
    model, context, batch = BASE
    base = [r for r in records if (r.model, r.context, r.batch) == (model, context, batch)]
    other = [r for r in records if r not in base]
    for title, lines in (("One shape, all targets", base), ("Other shapes", other)):
        rows = [HEAD, *(row(record) for record in lines)]
        widths = [max(len(line[i]) for line in rows) for i in range(len(HEAD))]
        parts += ["", title]
        for line in rows:
            cells = [
                cell.ljust(width) if i in (0, 1, 2, 11) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            parts.append("  ".join(cells).rstrip())
    return "\n".join(parts) + "\n"


def main() -> int:
    """Exit status: 0 when everything is within limits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="", help="only cases whose name has this in it; no file")
    parser.add_argument("--print", action="store_true", help="print the table, write no file")
    arguments = parser.parse_args()
    if (reason := why_not()) is not None:
        print(f"cannot compile for CUDA: {reason}", file=sys.stderr)
        return 1
    records, problems = [], []
    start = time.monotonic()
    for case in CASES:
        if arguments.case not in case.name:
            continue
        try:
            compiled = list(compile_case(case))
        except Exception as error:  # one that does not compile is reported with the others
            problems.append(f"{case.name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            compiled = []
        for shape, record in compiled:
            records.append(record)
            problems += broken(case, shape, record)
        print(f"{time.monotonic() - start:5.0f} s  {case.name}", file=sys.stderr)
    about: dict[str, object] = {
        "jax": jax.__version__,
        "ptxas": "registers and spills by ptxas of CUDA 12.9" if ptxas() else "",
    }
    table = text_table(records, about)
    if arguments.print or arguments.case:
        print(table)
    else:
        save(records, about)
        RESULTS.with_suffix(".txt").write_text(table)
        print(f"{len(records)} lines in {RESULTS.with_suffix('.txt')}")
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
