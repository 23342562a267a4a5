"""The paper's figures of section 6 and 9 on a layer stack, for `pipeline.py`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from benchmarks.common import MIB
from benchmarks.pipeline_cases import (
    Figures,
    Machine,
    Shown,
    about,
    arranged,
    best_of,
    configure,
    few,
    make_stack,
    ms,
    name_of,
    opened,
    row_of,
    stack_for,
)
from benchmarks.stack import Stack
from benchmarks.stack_run import StackRun
from kvdrive_jax.pipeline.parts import Arrangement

RULES: dict[str, dict[str, Any]] = {
    "Quest-like": {"index": "bounds:bf16", "chunk_size": 16},
    "RetroInfer-like": {"index": "clusters", "chunk_size": 4},
    "ShadowKV-like": {"index": "chunks:bf16", "chunk_size": 8},
}
"""Selection of the systems in the paper's figure 4, with the last step's chunks kept (x1)."""


def _split(run: StackRun) -> dict[str, float]:
    """Seconds of a step: select and compute while they run; what is left is waiting for pages."""
    stage = run.stage_s()
    fetch = stage["wall"] - stage["select"] - stage["compute"]
    return {"select": stage["select"], "fetch": fetch, "compute": stage["compute"]}


def fig4(options: argparse.Namespace, machine: Machine) -> tuple[Figures, Shown]:
    """Time split of three ways to select, one stage after another."""
    rows, shown = [], [["context, batch, selection", "select ms", "fetch ms", "compute ms",
                        "select + fetch", "hits"]]  # fmt: skip
    like: Stack | None = None
    # Half of the paper's contexts: every way to select has an index of its own to build.
    cases = [(30_000, 4), (30_000, 8), (60_000, 4)]
    if options.context or options.batch:
        cases = [(c, b) for c in options.context or [30_000] for b in options.batch or [4]]
    for context, batch in cases:
        like, fits = stack_for(options, like, context, batch)
        if not fits:
            continue
        stack = like
        for name, rule in RULES.items():
            config = configure(options, batch, window=1.0, **rule)
            with opened(stack, config, machine.links()) as session:
                runs = arranged(session, few(batch)[:2])
            run = runs["sequential"]
            split = _split(run)
            wall = sum(split.values())
            rows.append(
                {
                    "context": context,
                    "batch": batch,
                    "selection": name,
                    **rule,
                    "split_ms": {stage: 1e3 * value for stage, value in split.items()},
                    **row_of(run),
                }
            )
            shown.append(
                [f"{context:,} x {batch}, {name}", *(ms(value) for value in split.values()),
                 f"{100 * (1 - split['compute'] / wall):.0f} %", f"{100 * run.hit_rate:.0f} %"]
            )  # fmt: skip
    assert like is not None
    return {**about(options, like), "window": 1.0, "rows": rows}, shown


def fig10(options: argparse.Namespace, machine: Machine) -> tuple[Figures, Shown]:
    """One step of each schedule, span by span."""
    context, batch = (options.context or [16_384])[0], (options.batch or [8])[0]
    stack = make_stack(options, [context] * batch)
    links = machine.links()
    wanted = {
        "sequential": Arrangement(batch),
        "overlapped, one cohort": Arrangement(max(1, batch // 4), 1),
        "overlapped, two cohorts": Arrangement(max(1, batch // 4), 2),
    }
    runs: dict[str, StackRun] = {}
    with opened(stack, configure(options, batch), links) as session:
        found = arranged(session, list(wanted.values()))
        runs = {name: found[name_of(one, session)] for name, one in wanted.items()}
    speculative = configure(options, batch, schedule="speculative", cohorts=1)
    with opened(stack, speculative, links) as session:
        runs["speculative"] = session.run()
    order = ("sequential", "speculative", "overlapped, one cohort", "overlapped, two cohorts")
    rows = {}
    for name in order:
        run = runs[name]
        at = int(np.argsort(run.step_s)[len(run.step_s) // 2])
        step = run.spans[at]
        spans = [
            {
                "lane": span.lane,
                "name": span.name,
                "start_ms": 1e3 * (span.start - step.start),
                "end_ms": 1e3 * (span.end - step.start),
                "layer": span.layer,
                "micro_batch": span.micro_batch,
                "cohort": span.cohort,
            }
            for span in step.spans
            if span.lane != "engine"
        ]
        rows[name] = {**row_of(run), "step": spans, "step_wall_ms": 1e3 * (step.end - step.start)}
    base = rows["sequential"]["median_ms"]
    shown = [["schedule", "ms a step", "of sequential", "device idle ms", "MiB a step"]]
    shown += [
        [name, f"{row['median_ms']:.1f}", f"{row['median_ms'] / base:.2f}",
         f"{row['stage_ms_per_step']['device idle']:.1f}", f"{row['mib_per_step']:.1f}"]
        for name, row in rows.items()
    ]  # fmt: skip
    note = "speculative selects by recorded queries, which the layer's input does not change"
    return {**about(options, stack), "context": context, "batch": batch, "note": note,
            "rows": rows}, shown  # fmt: skip


def _swept(
    options: argparse.Namespace,
    machine: Machine,
    cases: list[tuple[int, int]],
    settings: list[tuple[str, dict[str, Any]]],
) -> tuple[Stack, list[Figures], Shown]:
    """Every setting for every (context, batch): sequential and the best of few arrangements."""
    rows: list[Figures] = []
    shown = [["context, batch, setting", "ms a step", "sequential ms", "select ms", "compute ms",
              "transfer ms", "MiB a step", "hits"]]  # fmt: skip
    like: Stack | None = None
    for context, batch in cases:
        like, fits = stack_for(options, like, context, batch)
        if not fits:
            continue
        stack = like
        for name, setting in settings:
            setting = {key: value(context) if callable(value) else value
                       for key, value in setting.items()}  # fmt: skip
            with opened(stack, configure(options, batch, **setting), machine.links()) as session:
                runs = arranged(session, few(batch)[:3])
            best = best_of(runs)
            row = row_of(runs[best])
            rows.append(
                {"context": context, "batch": batch, "setting": name, **setting,
                 "arrangement": best, **row, "sequential": row_of(runs["sequential"])}
            )  # fmt: skip
            stage = row["stage_ms_per_step"]
            shown.append(
                [f"{context:,} x {batch}, {name}", f"{row['median_ms']:.1f}",
                 f"{1e3 * runs['sequential'].median_s:.1f}", f"{stage['select']:.1f}",
                 f"{stage['compute']:.1f}", f"{stage['transfer']:.1f}",
                 f"{row['mib_per_step']:.2f}", f"{100 * row['hit_rate']:.1f} %"]
            )  # fmt: skip
    assert like is not None
    return like, rows, shown


def fig16(options: argparse.Namespace, machine: Machine) -> tuple[Figures, Shown]:
    """Windows of 2, 3 and 4 times the budget."""
    cases = [(c, b) for c in options.context or [60_000, 122_880] for b in options.batch or [1, 4]]
    settings = [(f"window x{window}", {"window": float(window)}) for window in (2, 3, 4)]
    stack, rows, shown = _swept(options, machine, cases, settings)
    return {**about(options, stack), "rows": rows}, shown


def fig17(options: argparse.Namespace, machine: Machine) -> tuple[Figures, Shown]:
    """Chunks of 1, 4 and 8 tokens, ranked by clusters and by the default index."""
    cases = [(c, b) for c in options.context or [30_000] for b in options.batch or [4]]
    settings = [
        (f"{index}, chunk {chunk}", {"index": index, "chunk_size": chunk})
        for index in ("clusters", "moments")
        for chunk in (1, 4, 8)
    ]
    stack, rows, shown = _swept(options, machine, cases, settings)
    return {**about(options, stack), "rows": rows}, shown


def fig18(options: argparse.Namespace, machine: Machine) -> tuple[Figures, Shown]:
    """2,048, 4,096 and 8,192 cluster centres."""
    cases = [(c, b) for c in options.context or [60_000, 122_880] for b in options.batch or [2]]
    settings = [
        (
            f"{centres:,} centres",
            {
                "index": "clusters",
                "tokens_per_cluster": lambda context, centres=centres: max(
                    1, round(context / centres)
                ),
            },
        )
        for centres in (2048, 4096, 8192)
    ]
    stack, rows, shown = _swept(options, machine, cases, settings)
    return {**about(options, stack), "rows": rows}, shown


def fig24(options: argparse.Namespace, machine: Machine) -> tuple[Figures, Shown]:
    """Throughput by batch."""
    context = (options.context or [30_000])[0]
    rows: list[Figures] = []
    shown = [["batch", "tokens/s", "sequential", "ms a step", "best arrangement", "hits",
              "MiB a step"]]  # fmt: skip
    like: Stack | None = None
    for batch in options.batch or [1, 2, 4, 8, 16]:
        like, fits = stack_for(options, like, context, batch)
        if not fits:
            continue
        stack = like
        with opened(stack, configure(options, batch), machine.links()) as session:
            runs = arranged(session, few(batch))
        best = best_of(runs)
        row = row_of(runs[best])
        rows.append({"batch": batch, "arrangement": best, **row,
                     "sequential": row_of(runs["sequential"])})  # fmt: skip
        shown.append(
            [str(batch), f"{row['tokens_per_s']:.2f}", f"{runs['sequential'].tokens_per_s:.2f}",
             f"{row['median_ms']:.1f}", best, f"{100 * row['hit_rate']:.1f} %",
             f"{runs[best].bytes['dram_to_hbm'] / len(runs[best].step_s) / MIB:.2f}"]
        )  # fmt: skip
    assert like is not None
    return {**about(options, like), "context": context, "rows": rows}, shown
