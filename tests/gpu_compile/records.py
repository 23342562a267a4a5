"""One compiled function as a line of the table, and what it breaks of its limits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from tests.gpu_compile.cases import Call, Case, runs_of
from tests.gpu_compile.measure import Facts, measure
from tests.gpu_compile.shapes import Shape

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_compile.json"
# XLA's own fusions are not ours to tune: a few bytes of a thread may go to local memory.
XLA_SPILL_BYTES = 64


@dataclass(frozen=True)
class PallasKernel:
    """One launch of a kernel of ours; registers and spills None where there is no ptxas."""

    name: str
    blocks: int
    threads: int
    shared_bytes: int
    registers: int | None
    spill_bytes: int | None


@dataclass(frozen=True)
class Record:
    """One case, compiled for one target at one shape.

    scratch_bytes: device memory beside arguments and results; launches: kernels and library calls,
    those in loops once; copies: those of them that only copy; sorts: sort operations; float64:
    where it occurs; shared_bytes, registers: the most of any kernel, XLA's included;
    xla_spill_bytes: the most of any kernel of XLA's; pallas: ours.
    """

    case: str
    target: str
    model: str
    context: str
    batch: int
    scratch_bytes: int
    launches: int
    copies: int
    loops: int
    sorts: int
    float64: tuple[str, ...]
    shared_bytes: int
    registers: int | None
    xla_spill_bytes: int | None
    pallas: tuple[PallasKernel, ...]

    @classmethod
    def of(cls, case: Case, shape: Shape, facts: Facts) -> Record:
        """What matters of `facts`."""
        ours = [kernel for kernel in facts.kernels if kernel.name in facts.pallas]
        other = [kernel for kernel in facts.kernels if kernel.name not in facts.pallas]
        spills = [kernel.usage.spill_bytes for kernel in other if kernel.usage]
        wide = ["HLO"] if re.search(r"\bf64\[", facts.hlo) else []
        return cls(
            case=case.name,
            target=facts.target,
            model=shape.model,
            context=shape.context,
            batch=shape.batch,
            scratch_bytes=facts.scratch_bytes,
            launches=facts.launches,
            copies=facts.library.count("kCopy"),
            loops=facts.loops,
            sorts=len(re.findall(r"[ =]sort\(", facts.hlo)),
            float64=(*wide, *facts.float64_kernels),
            shared_bytes=facts.shared_bytes,
            registers=facts.registers,
            xla_spill_bytes=max(spills, default=0) if spills or not other else None,
            pallas=tuple(
                PallasKernel(
                    kernel.name,
                    kernel.blocks,
                    kernel.threads,
                    kernel.shared_bytes,
                    kernel.usage.registers if kernel.usage else None,
                    kernel.usage.spill_bytes if kernel.usage else None,
                )
                for kernel in ours
            ),
        )

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """What tells lines apart."""
        return self.case, self.target, self.model, self.context, self.batch


def broken(case: Case, shape: Shape, record: Record) -> list[str]:
    """What a compiled function breaks of its limits, in words; empty when all is well."""
    found = []
    limit = int(case.scratch(shape))
    if record.scratch_bytes > limit:
        found.append(f"scratch {record.scratch_bytes:,} bytes, at most {limit:,}")
    if case.launches is not None and record.launches > case.launches:
        found.append(f"{record.launches} launches, at most {case.launches}")
    kinds = {kernel.name for kernel in record.pallas}
    if len(kinds) < case.pallas:
        found.append(f"{len(kinds)} Pallas kernels, at least {case.pallas}")
    if record.sorts > case.sorts:
        found.append(f"{record.sorts} sorts, at most {case.sorts}")
    if record.float64:
        found.append(f"float64 in {', '.join(record.float64)}")
    if (record.xla_spill_bytes or 0) > XLA_SPILL_BYTES:
        found.append(f"a kernel of XLA's spills {record.xla_spill_bytes} bytes")
    found += [
        f"{kernel.name} spills {kernel.spill_bytes} bytes"
        for kernel in record.pallas
        if kernel.spill_bytes
    ]
    where = f"{case.name}, {record.target}, {shape.label}"
    return [f"{where}: {what}" for what in found]


def compile_case(
    case: Case, *, one_shape: bool = False, threads: int = 2
) -> Iterator[tuple[Shape, Record]]:
    """A case compiled for its targets and shapes; what is the same is compiled once."""
    runs = [
        (target, shape, case.build(shape)) for target, shape in runs_of(case, one_shape=one_shape)
    ]
    distinct = {(target, _signature(call)): (target, call) for target, _, call in runs}

    def one(run: tuple[str, Call]) -> Facts:
        target, call = run
        return measure(target, call.fn, *call.args, **call.kwargs)

    with ThreadPoolExecutor(threads) as pool:
        facts = dict(zip(distinct, pool.map(one, distinct.values()), strict=True))
    for target, shape, call in runs:
        yield shape, Record.of(case, shape, facts[target, _signature(call)])


def _signature(call: Call) -> tuple[Any, ...]:
    leaves, tree = jax.tree.flatten((call.args, call.kwargs))
    return tree, *((x.shape, x.dtype) if hasattr(x, "shape") else x for x in leaves)


def save(records: list[Record], about: dict[str, Any], path: Path = RESULTS) -> None:
    """The table as JSON, one line per record."""
    lines = ",\n".join(f"    {json.dumps(asdict(record))}" for record in records)
    path.write_text(f'{{\n  "about": {json.dumps(about)},\n  "records": [\n{lines}\n  ]\n}}\n')


def load(path: Path = RESULTS) -> tuple[dict[str, Any], list[Record]]:
    """What `save` wrote."""
    data = json.loads(path.read_text())
    records = []
    for item in data["records"]:
        kernels = tuple(PallasKernel(**kernel) for kernel in item.pop("pallas"))
        records.append(Record(**{**item, "float64": tuple(item["float64"])}, pallas=kernels))
    return data["about"], records
