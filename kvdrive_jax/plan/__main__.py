"""What a decode step will take: predictions, for hardware that need not be here.

    python -m kvdrive_jax.plan --model llama-3-8b --context 128K --batch 8 --hardware h200

Nothing is loaded or run (with --hardware cpu, this machine is probed for some seconds). Stage times
come from bytes and operations at what the hardware is assumed to sustain, from measured hit rates,
and from a simulation of the pipeline; docs/plan.md says what is assumed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import get_args

from kvdrive_jax.budgets import Budgets
from kvdrive_jax.config import ScheduleName, format_size, parse_budget, parse_size
from kvdrive_jax.pipeline.parts import Arrangement
from kvdrive_jax.plan.hardware import HARDWARE, Hardware, hardware, sustained
from kvdrive_jax.plan.names import SHORT, model_named, parse_tokens
from kvdrive_jax.plan.predict import Prediction, best, default_budgets, predict
from kvdrive_jax.plan.work import Case
from kvdrive_jax.window.hits import MEASURED, HitRates
from kvdrive_jax.window.profile import read_profile

USAGE = 2
FITS_NOWHERE = 1
FEWEST_TOKENS = 256
"""Of a context: with less there is hardly anything to select."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m kvdrive_jax.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--model", default="llama-3-8b", help=f"{', '.join(SHORT)}, or a full name")
    made.add_argument("--context", default="128K", help="tokens of each session")
    made.add_argument("--batch", default=8, type=int, help="sessions decoded together")
    made.add_argument(
        "--hardware", default="h200", help=f"{', '.join(HARDWARE)}, or cpu: this machine"
    )
    made.add_argument("--budget", default="2048", help="tokens, or a share of the context below 1")
    made.add_argument("--index", default="moments:4", help="index form and bits")
    made.add_argument("--window", type=float, help="multiple of the budget (default: the best)")
    made.add_argument("--schedule", default="overlapped", choices=get_args(ScheduleName))
    made.add_argument("--micro-batch", type=int, help="sessions (default: the best)")
    made.add_argument("--cohorts", type=int, help="parts of the batch (default: the best)")
    made.add_argument("--hit-rate", type=float, help="of windows (default: as measured by size)")
    made.add_argument(
        "--profile", metavar="FILE", help="hit rates of python -m kvdrive_jax.profile"
    )
    made.add_argument("--hbm-budget", help="default: 9/10 of device memory")
    made.add_argument("--dram-budget", help="default: 4/5 of host memory")
    made.add_argument("--ssd-budget", default="0", help="default: no SSD")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Print predictions and return the exit status."""
    options = parser().parse_args(argv)
    try:
        text, fits = report(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    print(text)
    return 0 if fits else FITS_NOWHERE


def _hardware(name: str) -> Hardware:
    if name != "cpu":
        return sustained(hardware(name))
    # Only here: the probe computes.
    from kvdrive_jax.plan.probe import this_cpu

    return this_cpu()


def _case(options: argparse.Namespace, machine: Hardware) -> Case:
    try:
        context = parse_tokens(options.context)
    except ValueError as error:
        raise ValueError(f"context: {error}") from error
    if options.batch < 1:
        raise ValueError(f"batch must be at least 1, got {options.batch}")
    budget = parse_budget(options.budget)
    if not budget > 0:
        raise ValueError(f"budget must be above 0, got {options.budget}")
    tokens = math.ceil(budget * context) if budget < 1 else int(budget)
    if context < FEWEST_TOKENS:
        raise ValueError(f"context must be at least {FEWEST_TOKENS} tokens, got {context}")
    for name in ("micro_batch", "cohorts"):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= options.batch:
            raise ValueError(f"{name} must be from 1 to the batch of {options.batch}, got {value}")
    if options.window is not None and not (options.window == 0 or options.window >= 1):
        raise ValueError(f"window must be 0, or at least 1 budget, got {options.window:g}")
    if options.schedule == "speculative" and options.window == 0:
        raise ValueError("window must be above 0 with schedule speculative, got 0")
    case = Case(
        model=model_named(options.model),
        context=context,
        batch=options.batch,
        budget=tokens,
        index=options.index,
        itemsize=4 if machine.name.startswith("CPU") else 2,
        window=2.0 if options.window is None else options.window,
        hit_rate=0.0 if options.hit_rate is None else options.hit_rate,
    )
    case.form  # noqa: B018  an unknown index is reported here
    return case


def _size(options: argparse.Namespace, name: str) -> int:
    return parse_size(getattr(options, name), name)


def report(options: argparse.Namespace) -> tuple[str, bool]:
    """Everything there is to say, and whether any setting fits; ValueError for options that cannot
    be."""
    machine = _hardware(options.hardware)
    case = _case(options, machine)
    usual = default_budgets(machine)
    budgets = Budgets(
        hbm=usual.hbm if options.hbm_budget is None else _size(options, "hbm_budget"),
        dram=usual.dram if options.dram_budget is None else _size(options, "dram_budget"),
        ssd=_size(options, "ssd_budget"),
    )
    hits: HitRates | None = MEASURED
    if options.profile is not None:
        hits = HitRates.of_profile(read_profile(options.profile))
    if options.hit_rate is not None:
        hits = None
    found = chosen(options, case, machine, budgets, hits)
    others = [
        predict(case, machine, budgets=budgets, method="full"),
        predict(case, machine, budgets=budgets, method="layerwise"),
    ]
    rate = "as given" if hits is None else hits.source
    lines = [
        "PREDICTIONS, not measurements.",
        f"{options.model}, {case.batch} session(s) of {case.context:,} tokens, budget "
        f"{case.budget:,}, index {case.index_name}, on {machine.name}",
        f"sustained: memory {machine.hbm / 1e9:,.0f} GB/s, tensor {machine.tensor / 1e12:,.1f} "
        f"TFLOP/s, PCIe {machine.pcie / 1e9:.1f} GB/s, gather {machine.workers} x "
        f"{machine.gather / 1e9:.1f} GB/s, dispatch {machine.dispatch * 1e6:.0f} us",
        f"budgets: HBM {format_size(budgets.hbm)}, DRAM {format_size(budgets.dram)}, "
        f"SSD {format_size(budgets.ssd)}; hit rates: {rate}",
        "",
        *_lines(found),
        "",
        *(line for other in others for line in _lines(other, short=True)),
    ]
    return "\n".join(lines), found.simulation is not None


def chosen(
    options: argparse.Namespace,
    case: Case,
    machine: Hardware,
    budgets: Budgets,
    hits: HitRates | None,
) -> Prediction:
    """The setting that was asked for, or the best of what was left open."""
    sequential = options.schedule == "sequential"
    arrangements = None
    if sequential or options.micro_batch is not None or options.cohorts is not None:
        cohorts = 1 if options.cohorts is None else options.cohorts
        of_cohort = -(-case.batch // cohorts)
        size = of_cohort if options.micro_batch is None else options.micro_batch
        arrangements = [Arrangement(min(size, of_cohort), cohorts)]
    return best(
        case,
        machine,
        budgets=budgets,
        schedule=options.schedule,
        windows=None if options.window is None else (case.window,),
        arrangements=arrangements,
        hits=hits,
    )


def _lines(found: Prediction, *, short: bool = False) -> list[str]:
    if found.simulation is None:
        return [f"{found.method}: cannot run: {found.refused}"]
    head = f"{found.method}: {found.tokens_per_s:,.1f} tokens/s, {1e3 * found.step_s:.2f} ms a step"
    if short:
        return [head]
    step = found.simulation
    window = "a slot for every chunk" if found.window is None else f"x{found.window:.3g}"
    setting = [f"window {window}"]
    if found.window is not None:
        setting = [found.schedule, str(found.arrangement), f"{found.fetch} fetch", *setting]
    stages = "  ".join(f"{name} {1e3 * value:.2f}" for name, value in step.stages.items())
    busy = "  ".join(f"{lane} {1e3 * value:.2f}" for lane, value in step.busy.items() if value)
    stalls = "  ".join(f"{cause} {1e3 * value:.2f}" for cause, value in step.stalls.items())
    return [
        head,
        f"  setting     {', '.join(setting)}",
        f"  hit rate    {found.hit_rate:.1%}; of what is missing {found.from_ssd:.1%} from SSD",
        f"  stages, ms  {stages}",
        f"  busy, ms    {busy}",
        f"  stalls, ms  {stalls or 'none'}",
        f"  at least    {1e3 * step.bound:.2f} ms in any order; stages / step {step.overlap:.2f}",
        *(f"  {lane:10}  {count / 2**20:,.1f} MiB a step" for lane, count in found.nbytes.items()),
    ]


if __name__ == "__main__":
    sys.exit(main())
