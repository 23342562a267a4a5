"""The least time that a decode step and each of its kernels can take on a GPU.

    python -m benchmarks.floors --model llama-3-8b --context 128K --batch 8 --budget 2048 \\
        --hit-rate 0.9 [--gpu h200] [--index moments:4]

A floor is the larger of two times: bytes that must move, each once, over the bandwidth; operations
over the rate. Nothing runs at its floor; a kernel's share of it is how good the kernel is.

What is not counted: caches (what one kernel writes and the next reads is counted twice), launches,
and anything that could be fused away, such as the logits of single query heads between two passes.
Fetching over PCIe can hide behind the rest of the step, so a step takes at least the longer of the
two.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.common import table
from kvdrive_jax.models.presets import PRESETS
from kvdrive_jax.plan.hardware import HARDWARE, Hardware
from kvdrive_jax.plan.names import SHORT, model_named, parse_tokens
from kvdrive_jax.plan.work import (
    Case,
    Part,
    Work,
    decode_works,
    kmeans_round,
    prompt_block,
    scoring,
)

INDEXES = (
    ("clusters", 1), ("bounds:4", 1), ("chunks:4", 1), ("chunks:2", 1), ("moments:8", 1),
    ("moments:4", 1), ("moments:2", 1), ("moments:4", 4), ("moments:2", 4), ("moments:2", 16),
)  # fmt: skip
"""Forms and bits, and of how many spans one is scanned."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """The floor of a decode step on one GPU, in seconds.

    compute: what goes through device memory, one after the other; fetch: what PCIe takes
    meanwhile; total: the longer; parts: of compute.
    """

    compute: float
    fetch: float
    parts: dict[Part, float]

    @property
    def total(self) -> float:
        """The longer of the two."""
        return max(self.compute, self.fetch)

    def share(self, *parts: Part) -> float:
        """Of these parts in the total."""
        return sum(self.parts.get(part, 0.0) for part in parts) / self.total


def step_floor(works: Sequence[Work], hardware: Hardware) -> Step:
    """The floor of a step that does all this."""
    parts: dict[Part, float] = {}
    for work in works:
        parts[work.part] = parts.get(work.part, 0.0) + work.times * work.seconds(hardware)
    fetching = parts.pop("fetch", 0.0)
    return Step(compute=sum(parts.values()), fetch=fetching, parts=parts)


def kernel_table(case: Case, gpu: Hardware) -> str:
    """Every kernel of a step on one GPU."""
    works = decode_works(case)
    step = step_floor(works, gpu)
    beside = {"fetch": "beside it", "prefill": "prefill"}
    rows = []
    for work in (*works, prompt_block(case), kmeans_round(case)):
        seconds = work.times * work.seconds(gpu)
        rows.append(
            (
                work.name,
                f"{work.hbm_bytes / 1e6:,.1f}",
                f"{(work.tensor_ops + work.vector_ops) / 1e9:,.2f}",
                f"{work.seconds(gpu) * 1e6:,.1f}",
                str(work.times),
                f"{seconds * 1e3:,.3f}",
                beside.get(work.part) or f"{seconds / step.compute:.1%}",
            )
        )
    header = ("kernel", "MB", "Gop", "us", "times", "ms", "share of step")
    return f"{gpu.name} ({gpu.source})\n{table(header, rows)}"


def gpu_table(case: Case, names: Sequence[str]) -> str:
    """The whole step on every GPU, against full attention."""
    rows = []
    for name in names:
        gpu = HARDWARE[name]
        step = step_floor(decode_works(case), gpu)
        full = step_floor(decode_works(case, "full"), gpu)
        rows.append(
            (
                gpu.name,
                f"{step.total * 1e3:.2f}",
                "PCIe" if step.fetch > step.compute else "memory",
                f"{step.fetch * 1e3:.2f}",
                f"{step.parts['select'] * 1e3:.2f}",
                f"{step.parts['attend'] * 1e3:.2f}",
                f"{step.share('select', 'attend'):.1%}",
                f"{case.batch / step.total:,.0f}",
                f"{full.total * 1e3:.2f}",
                f"{full.total / step.total:.1f}x",
            )
        )
    header = (
        "GPU", "ms/step", "bound by", "fetch", "select", "attend", "select + attend", "tokens/s",
        "full ms/step", "full/kvdrive",
    )  # fmt: skip
    return table(header, rows)


def index_table(case: Case, gpu: Hardware) -> str:
    """What selection costs with every index form."""
    rows = []
    for index, scan in INDEXES:
        other = replace(case, index=index, scan_one_in=scan)
        step = step_floor(decode_works(other), gpu)
        per_token = other.form.bytes_scanned(case.model.head_dim, case.chunks) / case.context
        rows.append(
            (
                other.index_name,
                f"{per_token:.1f}",
                f"{scoring(other).seconds(gpu) * 1e6:.1f}",
                f"{step.share('select'):.1%}",
                f"{step.share('attend'):.1%}",
                f"{step.share('select', 'attend'):.1%}",
            )
        )
    header = (
        "index", "bytes/token and kv head", "scoring us", "select", "attend", "select + attend",
    )  # fmt: skip
    return table(header, rows)


def tokens(text: str) -> int:
    """`parse_tokens` for argparse."""
    try:
        return parse_tokens(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.floors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--model", default="llama-3-8b", choices=[*SHORT, *PRESETS])
    made.add_argument("--context", default="128K", type=tokens)
    made.add_argument("--batch", default=8, type=int)
    made.add_argument("--budget", default=2048, type=int, help="tokens per kv head and step")
    made.add_argument("--hit-rate", default=0.9, type=float)
    made.add_argument("--index", default="moments:4", help="index form and bits")
    made.add_argument("--scan-one-in", default=1, type=int, help="as the engine's option")
    made.add_argument("--window", default=2.0, type=float, help="slots per selected chunk")
    made.add_argument("--gpu", choices=HARDWARE, help="only this one, kernel by kernel")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    options = parser().parse_args(arguments)
    try:
        case = Case(
            model=model_named(options.model),
            context=options.context,
            batch=options.batch,
            budget=options.budget,
            hit_rate=options.hit_rate,
            index=options.index,
            scan_one_in=options.scan_one_in,
            window=options.window,
        )
        case.form  # noqa: B018  an unknown index is reported here
    except ValueError as error:
        print(f"floors: {error}", file=sys.stderr)
        return 2
    print(
        f"{options.model}, {case.context:,} tokens, batch {case.batch}, budget {case.budget:,}, "
        f"{case.hit_rate:.0%} hits, index {case.index_name}, bfloat16. Floors, not measurements.\n"
    )
    for name in [options.gpu] if options.gpu else ["h200"]:
        print(kernel_table(case, HARDWARE[name]), end="\n\n")
        print(index_table(case, HARDWARE[name]), end="\n\n")
    print(gpu_table(case, [options.gpu] if options.gpu else list(HARDWARE)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
