"""What every benchmark shares: the record of where it ran, process memory, results, tables.

Nothing here imports JAX at module level: worker processes limit their CPUs first.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tensorstore", "torch", "transformers")

MIB = 2**20


def cpu_model() -> str:
    """The processor's name, as the operating system tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, those that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment(*, dtype: str, threads: int | None = None) -> dict[str, Any]:
    """Where a figure was measured: device, versions, processor, memory, load when it began.

    dtype: of weights and KV; threads: CPUs each measured process may use (None: all).
    """
    from kvdrive_jax import compat

    cpus = len(os.sched_getaffinity(0))
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()) + " UTC",
        "device": compat.device_name(),
        "dtype": dtype,
        "versions": versions(),
        "cpu_model": cpu_model(),
        "cpus": cpus,
        "threads": threads or cpus,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "load_average_at_start": list(os.getloadavg()),
    }


def model_shape(config: Any) -> dict[str, int]:
    """The sizes of a ModelConfig that figures depend on, under the letters of the architecture."""
    return {
        "L": config.num_layers,
        "H": config.num_heads,
        "K": config.num_kv_heads,
        "D": config.head_dim,
        "E": config.hidden_size,
        "F": config.intermediate_size,
        "V": config.vocab_size,
    }


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Writes one result as JSON, keys in the order given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def numbers(text: str) -> list[int]:
    """``1024,2048`` as integers; ValueError for anything else."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise ValueError(f"expected positive integers, got {text!r}")
    return values


def names(text: str) -> list[str]:
    """``clusters,moments:4`` as a list."""
    return text.split(",")


def fractions(text: str) -> list[float]:
    """``0.1,0.5`` as numbers from 0 to 1; ValueError for anything else."""
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value <= 1 for value in values):
        raise ValueError(f"expected numbers from 0 to 1, got {text!r}")
    return values


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned for a terminal: the first to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of timings, with the timings themselves, in seconds."""
    low, middle, high = (
        statistics.quantiles(seconds, n=4, method="inclusive")
        if len(seconds) > 1
        else [seconds[0]] * 3
    )
    return {
        "median_s": middle,
        "quartiles_s": [low, high],
        "count": len(seconds),
        "seconds": [round(value, 6) for value in seconds],
    }


# Memory of this process. Linux only: VmHWM belongs to the program image, while ru_maxrss of a child
# starts at what its parent held when it was started.


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise NotImplementedError(f"this system's /proc/self/status has no {field}")


def resident_bytes() -> int:
    """Memory this process holds now (RSS), after giving freed memory back to the system."""
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most memory this process held since it started, or since ``reset_peak``."""
    return _status("VmHWM")


def reset_peak() -> int:
    """Starts ``peak_bytes`` anew from what is held now, which is returned."""
    held = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    return held
