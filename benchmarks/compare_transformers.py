"""Against transformers (torch, float32, sdpa, DynamicCache) on the same weights, in one run.

    python -m benchmarks.compare_transformers

First that both give the same logits; then prefill time, decode time per token and peak memory. Each
side runs in a process of its own on the same CPUs, and they take turns, so that a slow minute of
the machine is slow for all. What is compiled, converted or loaded is never timed.

Sides: ``transformers``; ``full``; ``resident``, kvdrive with everything in HBM; ``tiered``, kvdrive
with a window of --window times the budget in HBM and the rest in DRAM. Contexts up to the model's
maximum hold a real prompt, longer ones random keys and values on both sides. A context of C tokens
is C tokens long when its last step ends. Ratios above 1: transformers takes longer, or more.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import (
    MIB,
    RESULTS,
    environment,
    model_shape,
    numbers,
    spread,
    table,
    write_result,
)
from benchmarks.haystack import filler_tokens
from benchmarks.worker import Local, Worker

THEIRS = "transformers"
SIDES = (THEIRS, "full", "resident", "tiered")
TOLERANCE = 1e-3


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.compare_transformers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--model", default="demo", help="demo, a .gguf file, or a folder")
    made.add_argument("--contexts", type=numbers, default=[1024, 8192, 32768])
    made.add_argument("--prefill-tokens", type=int, default=7168, help="0: no prefill timing")
    made.add_argument("--prefill-rounds", type=int, default=3)
    made.add_argument("--budget", type=int, default=512)
    made.add_argument("--window", type=float, default=2.0)
    made.add_argument("--rounds", type=int, default=6, help="turns of each side")
    made.add_argument("--steps", type=int, default=4, help="timed steps a turn, after one untimed")
    made.add_argument("--threads", type=int, default=2, help="CPUs of each side")
    made.add_argument("--check-tokens", type=int, default=200, help="prompt of the logit check")
    made.add_argument(
        "--sides", default=",".join(SIDES), help=f"some of {','.join(SIDES)}; {THEIRS} is needed"
    )
    made.add_argument("--output", type=Path, default=RESULTS / "compare_transformers.json")
    return made


class Comparison:
    """One run: how sides are started, and what they are given.

    folder: the model for transformers; in_process: sides share this process (tests only: memory
    and threads are then not theirs alone).
    """

    def __init__(self, options: argparse.Namespace, folder: str, in_process: bool) -> None:
        from kvdrive_jax.models.tokenizer import Tokenizer
        from kvdrive_jax.models.weights import describe_pretrained

        self.options, self.folder = options, folder
        self.kind: type[Worker] = Local if in_process else Worker
        self.sides = options.sides.split(",")
        if THEIRS not in self.sides or not set(self.sides) <= set(SIDES):
            raise ValueError(f"sides must be some of {', '.join(SIDES)}, got {options.sides!r}")
        self.config = describe_pretrained(options.model, "float32").config
        longest = max([*options.contexts, options.prefill_tokens, options.check_tokens])
        self.text = filler_tokens(Tokenizer.from_pretrained(options.model).encode, longest)

    def start(self, side: str, context: int) -> Worker:
        """A process with the model loaded, and nothing else done."""
        options = self.options
        if side == THEIRS:
            made = {"folder": self.folder, "threads": options.threads}
            return self.kind("benchmarks.sides:Theirs", made, cpus=options.threads)
        longer = context if context > self.config.max_positions else None
        made = {"model": options.model, "config": self.settings(side, context), "positions": longer}
        return self.kind("benchmarks.sides:Ours", made, cpus=options.threads)

    def settings(self, side: str, context: int) -> dict[str, Any]:
        """Configuration of one of our sides."""
        if side == "full":
            return {"method": "full"}
        budget = self.options.budget
        # A window that holds everything, whatever memory is free now.
        multiple = self.options.window if side == "tiered" else 2.0 * max(1, context / budget)
        return {"retrieval": {"budget": budget}, "window": {"multiple": multiple}}

    # The parts

    def check(self) -> dict[str, Any]:
        """Largest difference in logits; RuntimeError where it is above the tolerance.

        A short prompt, whose chunks are all inside the budget: every side is exact.
        """
        ids = self.text[: self.options.check_tokens]
        if len(ids) + 8 > self.options.budget:
            raise ValueError("check_tokens must leave room for 8 more tokens inside the budget")
        with ExitStack() as stack:
            workers = {side: stack.enter_context(self.start(side, len(ids))) for side in self.sides}
            worst = {}
            for side in self.sides:
                if side == THEIRS:
                    continue
                tokens, ours = workers[side].call("answer", ids, 8)
                theirs = workers[THEIRS].call("logits", ids, tokens[:-1])
                worst[side] = float(np.abs(ours - theirs).max())
                if not worst[side] < TOLERANCE:
                    raise RuntimeError(
                        f"logits of {side} and transformers differ by {worst[side]:.2e}, "
                        f"allowed are {TOLERANCE:.0e}"
                    )
        return {
            "prompt_tokens": len(ids),
            "steps": 8,
            "tolerance": TOLERANCE,
            "largest_logit_difference": worst,
        }

    def prefill(self) -> dict[str, Any]:
        """Seconds of a prompt on each side, and the memory it takes beside the weights."""
        options = self.options
        ids = self.text[: options.prefill_tokens]
        with ExitStack() as stack:
            workers = {
                side: stack.enter_context(self.start(side, len(ids)))
                for side in self.sides
                if side != "resident"
            }
            loaded = {side: worker.call("reset_peak") for side, worker in workers.items()}
            for worker in workers.values():
                worker.call("prefill", ids)
            seconds: dict[str, list[float]] = {side: [] for side in workers}
            for number in range(options.prefill_rounds):
                for side in turn(list(workers), number):
                    seconds[side].append(workers[side].call("prefill", ids))
            peak = {side: worker.call("peak") for side, worker in workers.items()}
        sides = {
            side: {
                **spread(seconds[side]),
                "loaded_bytes": loaded[side],
                "peak_bytes": peak[side],
            }
            for side in workers
        }
        return {"tokens": len(ids), "sides": with_ratios(sides)}

    def decode(self, context: int) -> dict[str, Any]:
        """Seconds a token on each side at one context, and the peak memory of each."""
        options = self.options
        count = 1 + options.steps
        steps = (1 + options.rounds) * count  # the first turn of each side warms it up
        synthetic = context > self.config.max_positions
        # The first new token comes of the prompt, the last one ends the session untimed.
        ids = self.text[: context - steps - 2]
        sides: dict[str, dict[str, Any]] = {}
        with ExitStack() as stack:
            workers = {}
            for side in self.sides:
                workers[side] = stack.enter_context(self.start(side, context))
                loaded = workers[side].call("reset_peak")
                opened = workers[side].call("open", ids, steps, synthetic)
                sides[side] = {"loaded_bytes": loaded, **opened}
            seconds: dict[str, list[float]] = {side: [] for side in self.sides}
            for number in range(1 + options.rounds):
                for side in turn(self.sides, number):
                    timed = workers[side].call("steps", count)[1:]
                    seconds[side] += timed if number else []
            for side, worker in workers.items():
                peak = worker.call("peak")
                sides[side] |= {**spread(seconds[side]), "peak_bytes": peak, **worker.call("end")}
        for side in sides.values():
            side["tokens_per_s"] = 1 / side["median_s"]
        agreement = self.agreement(context, sides)
        return {
            "context": context,
            "synthetic": synthetic,
            "steps": len(seconds[THEIRS]),
            "agreement": agreement,
            "sides": with_ratios(sides),
        }

    def agreement(self, context: int, sides: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """What must hold of the answers: RuntimeError where tiers changed a token or moved nothing.

        Returns how many tokens full attention has in common with transformers before the first
        that differs (near ties fall either way in float32).
        """
        tokens = {side: found.pop("tokens") for side, found in sides.items()}
        if "resident" in tokens and "tiered" in tokens and tokens["resident"] != tokens["tiered"]:
            raise RuntimeError(f"at {context:,} tokens, resident and tiered gave different tokens")
        tiered = sides.get("tiered")
        if tiered is not None and not tiered["everything_in_hbm"]:
            moved = tiered["bytes"]
            if not (moved["dram_to_hbm"] and moved["hbm_to_dram"]):
                raise RuntimeError(f"at {context:,} tokens, tiered moved no bytes: {moved}")
        if "full" not in tokens or context > self.config.max_positions:
            return {}
        pairs = list(zip(tokens["full"], tokens[THEIRS], strict=False))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        return {"full_same_tokens": same, "of": len(pairs)}


def turn(sides: list[str], number: int) -> list[str]:
    """The order of one round: every side is first and last equally often."""
    at = number % len(sides)
    return [*sides[at:], *sides[:at]]


def with_ratios(sides: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each side with transformers' time and memory over its own."""
    theirs = sides[THEIRS]
    for side in sides.values():
        side["speed_ratio"] = theirs["median_s"] / side["median_s"]
        side["memory_ratio"] = theirs["peak_bytes"] / side["peak_bytes"]
    return sides


def report(result: dict[str, Any]) -> str:
    """The whole result as a table for a terminal."""
    rows = []
    parts = [("prefill", result["prefill"])] if result["prefill"] else []
    parts += [("decode", part) for part in result["decode"]]
    for kind, part in parts:
        tokens = part.get("tokens") or part["context"]
        for name, side in part["sides"].items():
            median = side["median_s"]
            where = "" if side.get("everything_in_hbm", True) else f" x{side['window']:g}"
            rate = side.get("hit_rate")
            rows.append(
                [
                    f"{kind} {tokens:,}  {name}{where}",
                    f"{median:.2f} s" if kind == "prefill" else f"{1000 * median:.1f} ms",
                    f"{(tokens if kind == 'prefill' else 1) / median:,.1f}",
                    f"{side['speed_ratio']:.2f} x",
                    "-" if rate is None else f"{100 * rate:.1f} %",
                    f"{side['peak_bytes'] / MIB:,.0f}",
                    f"{side['memory_ratio']:.2f} x",
                ]
            )
    header = ["", "median", "tokens/s", "speed", "hit rate", "peak MiB", "memory"]
    return table(header, rows)


def hf_folder(model: str, scratch: str) -> str:
    """The model as a folder for transformers; a GGUF file is converted into ``scratch``."""
    if model != "demo" and not model.endswith(".gguf"):
        return model
    from kvdrive_jax.models.gguf import demo_path

    with Worker("benchmarks.sides:Conversion") as worker:
        worker.call("convert", demo_path() if model == "demo" else model, scratch)
    return scratch


def run(options: argparse.Namespace, *, in_process: bool = False) -> dict[str, Any]:
    """The whole comparison; see Comparison for in_process."""
    record = environment(dtype="float32", threads=options.threads)
    with tempfile.TemporaryDirectory(prefix="kvdrive-compare-") as scratch:
        print("preparing the model", flush=True)
        comparison = Comparison(options, hf_folder(options.model, scratch), in_process)
        print("checking logits", flush=True)
        check = comparison.check()
        print(f"largest difference: {check['largest_logit_difference']}", flush=True)
        prefill = None
        if options.prefill_tokens:
            print(f"prefill of {options.prefill_tokens:,} tokens", flush=True)
            prefill = comparison.prefill()
        decode = []
        for context in options.contexts:
            print(f"decode at {context:,} tokens", flush=True)
            decode.append(comparison.decode(context))
    record["load_average_at_end"] = list(os.getloadavg())
    return {
        "benchmark": "compare_transformers",
        "environment": record,
        "model": Path(options.model).name,
        "shape": model_shape(comparison.config),
        "settings": {
            name: getattr(options, name)
            for name in ("budget", "window", "rounds", "steps", "threads", "prefill_rounds")
        },
        "check": check,
        "prefill": prefill,
        "decode": decode,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    options = parser().parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    result = run(options)
    print(f"\n{report(result)}")
    write_result(options.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
