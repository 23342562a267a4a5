"""What the figures of `pipeline` share: links scaled to this machine, configurations, runs."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common import MIB, model_shape
from benchmarks.stack import Session, Stack
from benchmarks.stack_kv import describe
from benchmarks.stack_run import StackRun, StepSpans, same_outputs
from kvdrive_jax.config import (
    KVDriveConfig,
    PipelineConfig,
    RetrievalConfig,
    ScheduleName,
    TierConfig,
    WindowConfig,
)
from kvdrive_jax.pipeline.parts import Arrangement, candidates
from kvdrive_jax.telemetry import host_memory_bytes
from kvdrive_jax.tiers.link import Link, Links

A100_BYTES_PER_S = 2.039e12
PCIE_BYTES_PER_S = 25e9
NVME_BYTES_PER_S = 3.5e9
FREE = 1e15
"""Bytes/s of a link that never holds anything up."""
BUDGET = 1 / 64

Shown = list[list[str]]
Figures = dict[str, Any]


def memory_bandwidth(threads: int = 2, nbytes: int = 200_000_000) -> float:
    """Bytes/s at which ``threads`` threads together read memory: the best of several sums."""
    arrays = [np.ones(nbytes // 4, np.float32) for _ in range(threads)]
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        readers = [threading.Thread(target=array.sum) for array in arrays]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        best = max(best, threads * nbytes / (time.perf_counter() - start))
    return best


@dataclass(frozen=True)
class Machine:
    """Links as slow, against this machine's memory, as they are against an A100's.

    bytes_per_s: what this machine's memory was measured to give.
    """

    bytes_per_s: float

    @property
    def scale(self) -> float:
        """How many times faster the A100's memory is."""
        return A100_BYTES_PER_S / self.bytes_per_s

    def links(self) -> Links:
        """PCIe 4.0 x16 and NVMe, fresh."""
        return Links(
            dram_to_hbm=Link(PCIE_BYTES_PER_S / self.scale),
            ssd_to_dram=Link(NVME_BYTES_PER_S / self.scale),
        )

    def line(self) -> str:
        """For people."""
        return (
            f"memory {self.bytes_per_s / 1e9:.1f} GB/s, an A100's is {self.scale:.0f} x that: PCIe "
            f"4.0 x16 (25 GB/s) runs at {PCIE_BYTES_PER_S / self.scale / 1e6:.0f} MB/s, NVMe "
            f"(3.5 GB/s) at {NVME_BYTES_PER_S / self.scale / 1e6:.0f} MB/s"
        )

    def to_dict(self) -> dict[str, float]:
        """Plain values."""
        return {
            "memory_bytes_per_s": self.bytes_per_s,
            "scale": self.scale,
            "pcie_bytes_per_s": PCIE_BYTES_PER_S / self.scale,
            "nvme_bytes_per_s": NVME_BYTES_PER_S / self.scale,
        }


def configure(
    options: argparse.Namespace,
    batch: int,
    *,
    window: float | None = None,
    schedule: ScheduleName = "overlapped",
    cohorts: int | None = None,
    miss_list: Any = "auto",
    tiers: TierConfig | None = None,
    **retrieval: Any,
) -> KVDriveConfig:
    """A configuration of a figure, with what the command line says."""
    memory = host_memory_bytes()
    return KVDriveConfig(
        dtype=options.dtype,
        batch_size=batch,
        retrieval=RetrievalConfig(**{"budget": options.budget, **retrieval}),
        window=WindowConfig(multiple=options.window if window is None else window),
        # One memory is both tiers here; what a figure takes is decided by its sizes.
        tiers=tiers or TierConfig(hbm_budget=memory, dram_budget=memory),
        pipeline=PipelineConfig(schedule=schedule, cohorts=cohorts, miss_list=miss_list),
    )


def make_stack(
    options: argparse.Namespace, contexts: Sequence[int], *, like: Stack | None = None
) -> Stack:
    """The stack of a figure; ``like``: with the weights of another."""
    return Stack(
        options.shape,
        options.layers,
        contexts,
        steps=options.steps,
        dtype=options.dtype,
        kv=options.kv,
        model=None if like is None else like.weights,
    )


def about(options: argparse.Namespace, stack: Stack) -> Figures:
    """What a result says of its stack."""
    return {
        "shape": {"name": options.shape, **model_shape(stack.weights.config)},
        "dtype": stack.weights.dtype.name,
        "kv": describe(stack.source),
        "budget": options.budget,
    }


def arranged(session: Session, arrangements: Sequence[Arrangement]) -> dict[str, StackRun]:
    """The same steps in each of these arrangements, all of which must compute the same (see
    `same_outputs`) and move bytes; keys are `name_of`."""
    runs = {}
    for one in session.possible(arrangements):
        session.arrange(one.micro_batch, one.cohorts)
        runs[name_of(one, session)] = session.run()
    differ = same_outputs(runs, session.dtype)
    if any(differ.values()):
        others = ", ".join(f"{name} by {by:.1e}" for name, by in differ.items() if by)
        print(f"rounded otherwise, as products have other shapes: {others}")
    first = next(iter(runs.values()))
    for name, run in runs.items():
        if run.missed != first.missed:
            raise RuntimeError(f"{name} missed {run.missed}, the first {first.missed} chunks")
        if not run.bytes["dram_to_hbm"]:
            raise RuntimeError(f"{name} moved nothing: every chunk was in its window")
    return runs


def name_of(arrangement: Arrangement, session: Session) -> str:
    """``sequential`` for a batch that is not cut, else what it is cut into."""
    if arrangement == Arrangement(len(session.contexts)):
        return "sequential"
    return str(arrangement)


def few(batch: int, cohorts: int | None = None) -> list[Arrangement]:
    """Sequential, and arrangements that may be best: micro-batches of a half and a quarter of the
    batch, one and two cohorts; none computes a session alone, which rounds differently."""
    found = [Arrangement(batch)]
    for one in candidates(batch, cohorts=cohorts):
        whole = batch // one.cohorts
        cut = one.micro_batch < whole or one.cohorts > 1
        if cut and whole >= min(2, batch) and one.micro_batch >= max(1, batch // 4):
            found.append(one)
    return found


def best_of(runs: dict[str, StackRun]) -> str:
    """The fastest that is not sequential (if there is any other)."""
    names = [name for name in runs if name != "sequential"] or ["sequential"]
    return min(names, key=lambda name: runs[name].median_s)


def shortest_s(step: StepSpans) -> float:
    """The least time that any order of a step's work could take (the critical path): the device's
    own, the link's, or the longest chain of a cohort, which for every layer has its first
    selection, one of its fetches and its compute."""
    spans = step.spans
    cohorts = {span.cohort for span in spans if span.lane == "device" and span.cohort >= 0}
    of_part = {
        (span.layer, span.micro_batch): span.cohort
        for span in spans
        if span.lane == "device" and span.name == "select"
    }
    chains = []
    for cohort in cohorts:
        chain = 0.0
        for layer in {span.layer for span in spans if span.layer >= 0}:
            at = [span for span in spans if span.layer == layer]
            own = [span for span in at if span.cohort == cohort]
            selects = [span.end - span.start for span in own if _is(span, "select")]
            fetches: dict[int, float] = {}
            for span in at:
                if span.lane in ("host gather", "DRAM->HBM"):
                    part = span.micro_batch
                    if of_part.get((layer, part)) == cohort:
                        fetches[part] = fetches.get(part, 0.0) + span.end - span.start
            chain += min(selects, default=0.0) + max(fetches.values(), default=0.0)
            chain += sum(span.end - span.start for span in own if _is(span, "compute"))
        chains.append(chain)
    return max(step.busy_s("device"), step.busy_s("DRAM->HBM"), *chains)


def _is(span: Any, name: str) -> bool:
    return span.lane == "device" and span.name == name


def row_of(run: StackRun) -> Figures:
    """The figures of a run, with the critical path of its steps."""
    found = run.summary()
    found["critical_path_ms"] = 1e3 * float(np.median([shortest_s(step) for step in run.spans]))
    found["mib_per_step"] = run.bytes["dram_to_hbm"] / len(run.step_s) / MIB
    return found


def stack_for(
    options: argparse.Namespace, like: Stack | None, context: int, batch: int
) -> tuple[Stack, bool]:
    """A stack with the weights of ``like``, and whether it fits: its KV with that of one prompt on
    its way in. One that does not fit is a small one, said so."""
    like = like or make_stack(options, [256])
    shape = like.weights.config
    token = 2 * shape.num_kv_heads * shape.head_dim * like.weights.dtype.itemsize
    nbytes, free = token * context * (batch * shape.num_layers + 5), host_memory_bytes()
    if nbytes > 0.85 * free:
        print(
            f"left out: {batch} x {context:,} tokens need about {nbytes / 2**30:.1f} GiB, "
            f"{free / 2**30:.1f} are free"
        )
        return like, False
    return make_stack(options, [context] * batch, like=like), True


@contextmanager
def opened(stack: Stack, config: KVDriveConfig, links: Links | None) -> Iterator[Session]:
    """A session, and a line that says how long its prompts took."""
    with stack.open(config, links) as session:
        print(
            f"{len(stack.contexts)} x {max(stack.contexts):,} tokens, {config.retrieval.index}: "
            f"indexed and stored in {session.setup_s:.0f} s",
            flush=True,
        )
        yield session


def ms(seconds: float) -> str:
    """Milliseconds for a table."""
    return f"{1e3 * seconds:,.1f}"
