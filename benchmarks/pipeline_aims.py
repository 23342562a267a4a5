"""What the pipeline is to reach, and what it costs the host, for `pipeline.py`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from benchmarks.common import MIB
from benchmarks.pipeline_cases import (
    FREE,
    Figures,
    Machine,
    Shown,
    about,
    arranged,
    best_of,
    configure,
    few,
    make_stack,
    opened,
    row_of,
)
from benchmarks.stack import Session, Stack
from benchmarks.stack_run import StackRun, same_outputs
from kvdrive_jax.tiers.link import Link, Links

GAIN, NEAR, BATCH_GAIN = 1.6, 1.15, 3.0
BATCHES = (1, 2, 4, 8, 16)


def _throttled(session: Session, link: Link, times: float = 1.0) -> StackRun:
    """Sets the link so that a sequential step's fetches take ``times`` as long as its select and
    compute, all that fetching costs besides included; the run they were measured in."""
    batch = len(session.contexts)
    session.arrange(batch, 1)
    link.bytes_per_s = FREE
    run = session.run()
    stage = run.stage_s()
    wanted = times * (stage["select"] + stage["compute"])
    moved = run.bytes["dram_to_hbm"] / len(run.step_s)
    besides = stage["wall"] - stage["select"] - stage["compute"]
    link.bytes_per_s = moved / max(wanted - besides, 0.05 * wanted)
    return run


def aims(options: argparse.Namespace, machine: Machine) -> tuple[Figures, Shown]:
    """Fetch made as long as select and compute: overlapped against sequential and the critical
    path; then batch against batch with that link."""
    context, batches = (options.context or [30_000])[0], options.batch or list(BATCHES[:4])
    largest = max(batches)
    link = Link(FREE)
    links = Links(dram_to_hbm=link)
    stack = make_stack(options, [context] * largest)
    with opened(stack, configure(options, largest), links) as session:
        unhindered = _throttled(session, link)
        runs = arranged(session, few(largest))
    best = best_of(runs)
    gain = runs["sequential"].median_s / runs[best].median_s
    stage = runs["sequential"].stage_s()
    fetch = stage["wall"] - stage["select"] - stage["compute"]
    near = row_of(runs[best])
    share = near["median_ms"] / near["critical_path_ms"]
    rows = {name: row_of(run) for name, run in runs.items()}
    shown = [["batch, schedule", "ms a step", "tokens/s", "gain", "of critical path", "MiB a step"]]
    shown += [
        [f"{largest}, {name}", f"{row['median_ms']:.1f}", f"{row['tokens_per_s']:.2f}",
         f"{runs['sequential'].median_s / runs[name].median_s:.2f}",
         f"{row['median_ms'] / row['critical_path_ms']:.2f}", f"{row['mib_per_step']:.2f}"]
        for name, row in rows.items()
    ]  # fmt: skip
    by_batch = {largest: rows[best] | {"arrangement": best}}
    for batch in sorted(batches)[:-1]:
        part = make_stack(options, [context] * batch, like=stack)
        with opened(part, configure(options, batch), links) as session:
            found = arranged(session, few(batch))
        fastest = best_of(found)
        by_batch[batch] = row_of(found[fastest]) | {"arrangement": fastest}
        row = by_batch[batch]
        shown.append(
            [f"{batch}, {fastest}", f"{row['median_ms']:.1f}", f"{row['tokens_per_s']:.2f}",
             f"{found['sequential'].median_s / found[fastest].median_s:.2f}",
             f"{row['median_ms'] / row['critical_path_ms']:.2f}", f"{row['mib_per_step']:.2f}"]
        )  # fmt: skip
    rates = [by_batch[batch]["tokens_per_s"] for batch in sorted(by_batch)]
    reached: dict[str, Any] = {
        "gain over sequential": gain,
        "gain wanted": GAIN,
        "step over critical path": share,
        "step over critical path wanted": NEAR,
        "largest batch over the smallest": rates[-1] / rates[0],
        "largest over smallest wanted": BATCH_GAIN,
        "throughput never falls": bool(np.all(np.diff(rates) >= -0.02 * np.array(rates[:-1]))),
        "fetch over select and compute, sequential": fetch / (stage["select"] + stage["compute"]),
    }
    shown += [[f"{name}: {value:.2f}" if isinstance(value, float) else f"{name}: {value}",
               "", "", "", "", ""] for name, value in reached.items()]  # fmt: skip
    return {
        **about(options, stack),
        "context": context,
        "link_bytes_per_s": link.bytes_per_s,
        "unhindered": row_of(unhindered),
        "arrangements": rows,
        "best": best,
        "by_batch": {str(batch): by_batch[batch] for batch in sorted(by_batch)},
        "reached": reached,
    }, shown


def _host(run: StackRun, layers: int, parts: int) -> dict[str, float]:
    """Microseconds of the engine's thread for each (layer, micro-batch), and what they are for:
    dispatches, and all that a step takes of it beside waiting for the device and for pages."""
    calls = len(run.spans) * layers * parts
    dispatch: dict[str, float] = {}
    for step in run.spans:
        for span in step.spans:
            if span.lane == "engine":
                dispatch[span.name] = dispatch.get(span.name, 0.0) + span.end - span.start
    waited = dispatch.pop("wait", 0.0)
    wall = sum(step.end - step.start for step in run.spans)
    device = sum(step.busy_s("device") for step in run.spans)
    found = {name: 1e6 * seconds / calls for name, seconds in dispatch.items()}
    found["engine's thread"] = 1e6 * max(0.0, wall - waited) / calls
    found["device idle"] = 1e6 * max(0.0, wall - device) / calls
    found["step"] = 1e6 * wall / calls
    return found


def overhead(options: argparse.Namespace, machine: Machine) -> tuple[Figures, Shown]:
    """Host time for each (layer, micro-batch), with both ways for miss lists."""
    context, batch = (options.context or [4096])[0], (options.batch or [4])[0]
    stack: Stack = make_stack(options, [context] * batch)
    layers = stack.weights.config.num_layers
    rows: dict[str, Figures] = {}
    runs: dict[str, StackRun] = {}
    shown = [["way, micro-batch", "engine us", "select us", "write us", "compute us", "step us",
              "MiB a step"]]  # fmt: skip
    for way in ("copy", "callback"):
        with opened(stack, configure(options, batch, miss_list=way), None) as session:
            for size in sorted({max(1, batch // 4), max(1, batch // 2)}):
                session.arrange(size, 1)
                name = f"{way}, {size}"
                runs[name] = run = session.run()
                host = _host(run, layers, -(-batch // size))
                rows[name] = {"us_per_call": host, **row_of(run)}
                shown.append(
                    [name, *(f"{host.get(key, 0.0):.0f}" for key in
                             ("engine's thread", "dispatch select", "dispatch write",
                              "dispatch compute", "step")),
                     f"{run.bytes['dram_to_hbm'] / len(run.step_s) / MIB:.2f}"]
                )  # fmt: skip
    same_outputs(runs, stack.weights.dtype.name)
    return {**about(options, stack), "context": context, "batch": batch, "rows": rows}, shown
