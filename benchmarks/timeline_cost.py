"""What recording spans costs a decode step: recording, adding up, and keeping them for a trace.

    python -m benchmarks.timeline_cost

Steps like those of SmolLM2 in two micro-batches (30 layers; selects, gathers, transfers, writes, a
compute, and what the engine dispatches) are recorded as the pipeline records them. First the sums
are compared with what was recorded; then the best of several rounds is told, per span, and as a
share of a step's time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from benchmarks.common import RESULTS, environment, table, write_result
from kvdrive_jax.timeline import KEPT_SPANS, Timeline

LAYERS, STEPS, ROUNDS = 30, 9, 60
PARTS = 2


def record(timeline: Timeline, start: float, step_s: float) -> int:
    """One step of ``step_s`` seconds; how many spans it had."""
    span, count, unit = timeline.span, 0, step_s / LAYERS / 16
    for layer in range(LAYERS):
        at = start + step_s * layer / LAYERS
        for part in range(PARTS):
            a, b, c, d = at, at + 2 * unit, at + 4 * unit, at + 6 * unit
            span("engine", "dispatch select", a, b, layer, part, 0)
            span("device", "select", a, b, layer, part, 0)
            span("engine", "miss list", b, b, layer, part, 0, hits=40, misses=8)
            span("host gather", "gather", b, c, layer, part, nbytes=4096)
            span("DRAM->HBM", "transfer", c, d, layer, part, nbytes=4096)
            span("engine", "dispatch write", d, d, layer, part, 0)
            span("engine", "wait", b, d)
            at, count = at + 6 * unit, count + 7
        span("engine", "dispatch compute", at, at + unit, layer, -1, 0)
        span("device", "compute", at, at + 4 * unit, layer, -1, 0)
        count += 2
    timeline.end_step(start, start + step_s)
    return count


def check(step_s: float) -> None:
    """RuntimeError unless the sums are those of the spans."""
    timeline = Timeline()
    for step in range(STEPS):
        record(timeline, 100.0 + step, step_s)
    told = timeline.totals()
    share = step_s * STEPS / 16
    stalls = {"SSD->DRAM": 0.0, "DRAM->HBM": 4 * share, "host gather": 4 * share, "engine": 0.0}
    wanted = {"wall_s": 16 * share, "device_busy_s": 8 * share, **stalls}
    for name, value in wanted.items():
        found = told["stall_s"].get(name, told.get(name))
        if abs(found - value) > 1e-6 * STEPS:
            raise RuntimeError(f"{name} is {found}, the spans say {value}")
    if told["hits"] != 40 * PARTS * LAYERS * STEPS:
        raise RuntimeError(f"{told['hits']} hits")


def best(keep: int, step_s: float) -> tuple[float, int]:
    """Seconds that a step's spans take, of the best round; spans of a step."""
    taken, spans = [], 0
    for _ in range(ROUNDS):
        timeline = Timeline(keep)
        begun = time.perf_counter()
        for step in range(STEPS):
            spans = record(timeline, 100.0 + step, step_s)
        timeline.sums()
        taken.append((time.perf_counter() - begun) / STEPS)
    return min(taken), spans


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline_cost", description=__doc__)
    parser.add_argument("--step-ms", type=float, default=60.0, help="a step (default: 60)")
    step_s = parser.parse_args(argv).step_ms / 1e3
    check(step_s)
    rows, result = [], {"environment": environment(dtype="float32"), "step_s": step_s}
    for name, keep in (("sums", 0), ("sums and trace", KEPT_SPANS)):
        seconds, spans = best(keep, step_s)
        result[name] = {"spans": spans, "seconds_per_step": seconds, "share": seconds / step_s}
        each, share = f"{1e6 * seconds / spans:.2f}", f"{100 * seconds / step_s:.2f} %"
        rows.append([name, f"{spans}", f"{1e6 * seconds:.0f}", each, share])
    header = ["recorded for", "spans", "us a step", "us a span", f"of {1e3 * step_s:g} ms"]
    print(table(header, rows))
    write_result(RESULTS / "timeline_cost.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
