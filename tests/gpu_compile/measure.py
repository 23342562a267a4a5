"""What a compiled function will use on a GPU: kernels, shared memory, registers, spills, scratch.

XLA lists the kernels that it launches, and writes their PTX; ``ptxas -v`` (package
nvidia-cuda-nvcc-cu12, extra ``aot``) turns PTX into machine code and says what each kernel uses.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from tests.gpu_compile.targets import lower_for

_KERNEL = re.compile(
    r"^\s*\d+: (?P<kind>\w+).*\] ?(?P<name>[\w.$<>:]*) ?grid: \[(?P<grid>[\d, ]+)\] "
    r"threads: \[(?P<threads>[\d, ]+)\]\s+shared_memory: (?P<shared>\d+)"
)
_THUNK = re.compile(r"^\s*\d+: (?P<kind>k\w+)")
_PALLAS = re.compile(r'custom_call_target="[^"]*triton[^"]*".*\bname = "(\w+)", num_stages')
_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
# jax 0.10.2 writes PTX unasked, and with this option also symbolises stack traces for seconds.
_DUMP_PTX = {"xla_dump_emitter_re": "ptx"} if jax.__version_info__ >= (0, 11) else {}
# Thunks that only hold others, or order them.
_STRUCTURE = (
    "kSequential", "kCommandBuffer", "kWhile", "kConditional", "kWaitForStreams",
    "kAsyncStart", "kAsyncDone",
)  # fmt: skip


@dataclass(frozen=True)
class Usage:
    """What ptxas says of one kernel: registers per thread, bytes per thread or per block."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared_bytes: int


@dataclass(frozen=True)
class Kernel:
    """One launch. `usage` is None where ptxas is not installed."""

    name: str
    blocks: int
    threads: int
    shared_bytes: int
    usage: Usage | None


@dataclass(frozen=True)
class Facts:
    """One function compiled for one target.

    scratch_bytes: device memory beside arguments and results; kernels: launches in order, those in
    a loop once; library: other work in order, as XLA names it (copies, cuBLAS, cuDNN); loops: how
    many ``while`` there are; pallas: names of Pallas kernels; float64_kernels: names of those that
    compute in float64; hlo: the optimised program.
    """

    target: str
    scratch_bytes: int
    kernels: tuple[Kernel, ...]
    library: tuple[str, ...]
    loops: int
    pallas: tuple[str, ...]
    float64_kernels: tuple[str, ...]
    hlo: str

    @property
    def launches(self) -> int:
        """Kernels and library calls, those in a loop once."""
        return len(self.kernels) + len(self.library)

    @property
    def shared_bytes(self) -> int:
        """The most shared memory that one block of any kernel takes."""
        return max((kernel.shared_bytes for kernel in self.kernels), default=0)

    @property
    def registers(self) -> int | None:
        """The most registers that one thread of any kernel takes."""
        return max((k.usage.registers for k in self.kernels if k.usage), default=None)

    @property
    def spill_bytes(self) -> int | None:
        """Bytes spilled by a thread, over all kernels; None where it cannot be read."""
        known = [k.usage.spill_bytes for k in self.kernels if k.usage]
        return sum(known) if known or not self.kernels else None


@functools.cache
def ptxas() -> str | None:
    """Path of ptxas: that of the Python package, else that on PATH."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for found in sorted(Path(folder).glob("*/bin/ptxas")):
            return str(found)
    return shutil.which("ptxas")


@functools.cache
def usage_of(ptx: str) -> dict[str, Usage]:
    """Usage of every kernel in PTX, by name; nothing without ptxas."""
    tool = ptxas()
    architecture = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    if tool is None or architecture is None or ".entry" not in ptx:
        return {}
    done = subprocess.run(
        [tool, "-v", f"-arch={architecture[1]}", "-", "-o", "/dev/null"],
        input=ptx,
        capture_output=True,
        text=True,
        check=True,
    )
    found, name, spilled = {}, "", (0, 0)
    for line in done.stderr.splitlines():
        if entry := _ENTRY.search(line):
            name = entry[1]
        elif spill := _SPILL.search(line):
            spilled = (int(spill[2]) + int(spill[3]), int(spill[1]))
        elif used := _USED.search(line):
            found[name] = Usage(int(used[1]), *spilled, int(used[2] or 0))
    return found


def float64_kernels(ptx: str) -> list[str]:
    """Names of the kernels in PTX that compute in float64."""
    parts = re.split(r"^\.visible \.entry (\w+)", ptx, flags=re.MULTILINE)
    return [name for name, body in zip(parts[1::2], parts[2::2], strict=True) if ".f64" in body]


def _product(text: str) -> int:
    size = 1
    for part in text.split(","):
        size *= int(part)
    return size


def read_thunks(lines: Iterable[str], usage: dict[str, Usage]) -> tuple[list[Kernel], list[str]]:
    """Kernels and other work in XLA's list of what it launches."""
    kernels: list[Kernel] = []
    library: list[str] = []
    for line in lines:
        if kernel := _KERNEL.match(line):
            used = usage.get(kernel["name"])
            shared = int(kernel["shared"]) + (used.static_shared_bytes if used else 0)
            blocks, threads = _product(kernel["grid"]), _product(kernel["threads"])
            kernels.append(Kernel(kernel["name"], blocks, threads, shared, used))
        elif (thunk := _THUNK.match(line)) and thunk["kind"] not in _STRUCTURE:
            library.append(thunk["kind"])
    return kernels, library


def measure(target: str, fn: Any, *args: Any, **kwargs: Any) -> Facts:
    """Compiles as `compile_for` does, and reads what XLA and ptxas say about the result."""
    lowered = lower_for(target, fn, *args, **kwargs)
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, **_DUMP_PTX})
        dump = Path(folder)
        usage: dict[str, Usage] = {}
        wide: list[str] = []
        for ptx in sorted(dump.glob("*.ptx")):
            text = ptx.read_text()
            usage |= usage_of(text)
            wide += float64_kernels(text)
        lines: list[str] = []
        for listing in sorted(dump.glob("*.thunk_sequence.txt")):
            lines += listing.read_text().splitlines()
    kernels, library = read_thunks(lines, usage)
    hlo = compiled.as_text() or ""
    pallas = tuple(sorted(set(_PALLAS.findall(hlo))))
    return Facts(
        target=target,
        scratch_bytes=int(compiled.memory_analysis().temp_size_in_bytes),
        kernels=tuple(kernels),
        library=tuple(library),
        loops=len(re.findall(r" while\(", hlo)),
        pallas=pallas,
        float64_kernels=tuple(name for name in wide if name in pallas),
        hlo=hlo,
    )
