"""The table in benchmarks/results is whole, within limits, and readable without a CUDA plugin."""

from __future__ import annotations

from tests.gpu_compile.cases import runs_of
from tests.gpu_compile.measure import float64_kernels, read_thunks
from tests.gpu_compile.records import broken, load
from tests.gpu_compile.registry import CASES

THUNKS = """\
000: kCommandBuffer [source | sink]
    001: kCustomKernel [source       | next=002 (1)] score grid: [16, 2, 1] threads: [128, 1, 1] \
 shared_memory: 32768 bytes
    002: kCopy [prev=001 (1) | next=003 (1)]
003: kWhile [prev=002 (1) | sink]
"""


def test_table_has_every_case_within_limits() -> None:
    about, records = load()
    assert about["ptxas"], "written without ptxas: no registers, no spills"
    known = {record.key: record for record in records}
    problems = []
    for case in CASES:
        for target, shape in runs_of(case):
            key = (case.name, target, shape.model, shape.context, shape.batch)
            if key not in known:
                problems.append(f"{key} is not in the table")
                continue
            record = known.pop(key)
            problems += broken(case, shape, record)
    problems += [f"{key} is in the table, but no case" for key in known]
    assert not problems, "\n".join([*problems, "`make gpu-table` writes it"])


def test_names_are_distinct() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


def test_reads_what_xla_launches() -> None:
    kernels, library = read_thunks(THUNKS.splitlines(), {})
    assert [(k.name, k.blocks, k.threads, k.shared_bytes) for k in kernels] == [
        ("score", 32, 128, 32768)
    ]
    assert library == ["kCopy"]


def test_finds_float64_in_ptx() -> None:
    ptx = ".visible .entry a(\n) { add.f32 }\n.visible .entry b(\n) { add.f64 }\n"
    assert float64_kernels(ptx) == ["b"]
