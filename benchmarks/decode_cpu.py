"""Decode on this CPU against transformers and llama.cpp, in one run.

    python -m benchmarks.decode_cpu [--contexts 8K,128K] [--llama-python PYTHON]
    python -m benchmarks.decode_cpu --shape llama-3-8b --layers 2 --contexts 128K

Sides: ``kvdrive`` and ``kvdrive int8`` (weights in int8), everything in HBM; ``transformers`` with
float32 and bfloat16 weights (torch, sdpa, DynamicCache), of which the faster one counts; and
``llama.cpp`` with the GGUF file's own weights and flash attention, where ``--llama-python`` names
an interpreter that has llama-cpp-python.

First the answers are compared: logits of kvdrive with those of transformers, the tokens of
llama.cpp. Then each side decodes alone, in a process of its own on the same CPUs. Contexts up to
the model's maximum hold a real prompt, longer ones random keys and values: time depends on sizes
only. llama.cpp cannot be given a cache, so it reads a prompt for ``--llama-fill`` seconds; contexts
that it does not reach in that time are extrapolated linearly from those it does, and marked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, environment, model_shape, table, write_result
from benchmarks.compare_transformers import hf_folder
from benchmarks.haystack import filler_tokens
from benchmarks.llama_side import CHECK_STEPS, CHECK_TOKENS
from benchmarks.worker import Local, Worker

SIDES = ("kvdrive", "kvdrive int8", "transformers float32", "transformers bfloat16", "llama.cpp")
TOLERANCE = {"kvdrive": 1e-4, "kvdrive int8": 0.1}
"""Root mean square of what logits are off from transformers' in float32, as a share of the standard
deviation of all logits."""

LIKELIEST = 4
LLAMA_CONTEXTS = (1024, 2048, 4096, 8192, 16384)


def sizes(text: str) -> list[int]:
    """``8K,128K`` as tokens; ValueError for anything else."""
    scale = {"K": 1024, "k": 1024}
    return [
        int(part[:-1]) * scale[part[-1]] if part[-1:] in scale else int(part)
        for part in text.split(",")
    ]


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.decode_cpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--model", default="demo", help="demo, a .gguf file or a folder")
    made.add_argument(
        "--shape", choices=("llama-3-8b",), help="random layers of this shape instead of a model"
    )
    made.add_argument("--layers", type=int, default=2, help="of --shape")
    made.add_argument("--contexts", type=sizes, default=[8192, 131072])
    made.add_argument("--budget", type=int, default=2048)
    made.add_argument("--rounds", type=int, default=3, help="turns of each side")
    made.add_argument("--tokens", type=int, default=24, help="tokens a turn; peers take a quarter")
    made.add_argument("--threads", type=int, default=2, help="CPUs of each side")
    made.add_argument("--sides", default=",".join(SIDES), help="some of them")
    made.add_argument("--llama-python", help="interpreter that has llama-cpp-python")
    made.add_argument("--llama-fill", type=float, default=90, help="seconds to fill its cache")
    made.add_argument("--output", type=Path, default=None, help="(default: among the results)")
    return made


class Decode:
    """One run. in_process: sides share this process (tests only)."""

    def __init__(self, options: argparse.Namespace, folder: str, in_process: bool) -> None:
        from kvdrive_jax.models.tokenizer import Tokenizer
        from kvdrive_jax.models.weights import describe_pretrained

        self.options, self.folder = options, folder
        self.kind: type[Worker] = Local if in_process else Worker
        self.sides = options.sides.split(",")
        unknown = set(self.sides) - set(SIDES)
        if unknown:
            raise ValueError(f"sides must be some of {', '.join(SIDES)}, got {options.sides!r}")
        self.config = describe_pretrained(options.model, "float32").config
        real = [n for n in options.contexts if n <= self.config.max_positions]
        length = max([*real, CHECK_TOKENS + 1])
        tokenizer = Tokenizer.from_pretrained("demo" if options.shape else options.model)
        self.text = filler_tokens(tokenizer.encode, length)

    def start(self, side: str, context: int) -> Worker:
        """A process with the model loaded, and nothing else done."""
        options = self.options
        kind, _, dtype = side.partition(" ")
        if kind == "transformers":
            made: dict[str, Any] = {"folder": self.folder, "threads": options.threads}
            made["dtype"] = dtype
            return self.kind("benchmarks.sides:Theirs", made, cpus=options.threads)
        settings = {
            "weights_dtype": dtype or "model",
            "retrieval": {"budget": min(options.budget, context)},
            # A window that holds everything, whatever memory is free now.
            "window": {"multiple": 2.0 * max(1, context / options.budget)},
        }
        longer = context if context > self.config.max_positions else None
        made = {"model": options.model, "config": settings, "positions": longer}
        return self.kind("benchmarks.sides:Ours", made, cpus=options.threads)

    def check(self) -> dict[str, Any]:
        """Differences in logits; RuntimeError where one is above its tolerance."""
        ids = self.text[:CHECK_TOKENS]
        found: dict[str, Any] = {}
        with self.start("transformers float32", len(ids)) as theirs:
            for side in TOLERANCE:
                if side not in self.sides:
                    continue
                with self.start(side, CHECK_TOKENS + CHECK_STEPS) as ours:
                    tokens, logits = ours.call("answer", ids, CHECK_STEPS)
                wanted = theirs.call("logits", ids, tokens[:-1])
                off = float(np.sqrt(np.mean((logits - wanted) ** 2)) / wanted.std())
                if not off < TOLERANCE[side]:
                    raise RuntimeError(
                        f"logits of {side} and transformers differ by {off:.2e} of their spread, "
                        f"allowed are {TOLERANCE[side]:.0e}"
                    )
                likeliest = np.argsort(logits[0])[: -LIKELIEST - 1 : -1].tolist()
                found[side] = {"difference": off, "tokens": tokens, "likeliest": likeliest}
        return found

    def decode(self, side: str, context: int) -> dict[str, Any]:
        """Seconds a token of one side at one context."""
        options = self.options
        ours = side in TOLERANCE
        count = options.tokens if ours else max(2, options.tokens // 4)
        steps = (1 + options.rounds) * count
        synthetic = context > self.config.max_positions
        ids = (self.text * (context // len(self.text) + 1))[: context - steps - 2]
        with self.start(side, context) as worker:
            opened = worker.call("open", ids, steps, synthetic)
            turns = []
            for _ in range(1 + options.rounds):  # the first warms up
                if ours:
                    turns.append(worker.call("pace", count))
                else:
                    turns.append(statistics.median(worker.call("steps", count)))
            peak = worker.call("peak")
        turns = turns[1:]
        return {
            "seconds_per_token": statistics.median(turns),
            "turns_s": turns,
            "synthetic": synthetic,
            "open_s": opened["open_s"],
            "peak_bytes": peak,
        }

    def llama(self, check: dict[str, Any]) -> dict[str, Any] | None:
        """What llama.cpp takes at each context, or None where it is missing.

        RuntimeError where its answer begins with none of our likeliest tokens: its activations are
        quantised, so the likeliest itself may be another.
        """
        options = self.options
        if "llama.cpp" not in self.sides or options.llama_python is None or options.shape:
            return None
        from kvdrive_jax.models.gguf import demo_path

        path = demo_path() if options.model == "demo" else options.model
        contexts = sorted({*LLAMA_CONTEXTS, *(n for n in options.contexts if n <= 2**15)})
        cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))[: options.threads]))
        script = Path(__file__).with_name("llama_side.py")
        command = ["taskset", "-c", cpus, options.llama_python, str(script), path]
        command += [str(options.threads), str(options.llama_fill), ",".join(map(str, contexts))]
        run = subprocess.run(
            command, input=json.dumps(self.text), capture_output=True, text=True, check=False
        )
        if run.returncode:
            raise RuntimeError(f"llama.cpp failed\n{run.stderr[-2000:]}")
        found = json.loads(run.stdout.splitlines()[-1])
        for side, one in check.items():
            if found["answer"][0] not in one["likeliest"]:
                raise RuntimeError(
                    f"llama.cpp answers with token {found['answer'][0]}, which is none of the "
                    f"likeliest of {side}: {one['likeliest']}"
                )
        measured = {int(context): seconds for context, seconds in found["seconds"].items()}
        return {**found, "seconds": measured}


def llama_at(measured: dict[int, float], context: int) -> tuple[float, bool]:
    """Seconds a token at a context, and whether it is extrapolated (a line through what was
    measured; ValueError with fewer than two points)."""
    if context in measured:
        return measured[context], False
    if len(measured) < 2:
        raise ValueError(f"a line needs two contexts, got {sorted(measured)}: fill for longer")
    slope, start = np.polyfit(list(measured), list(measured.values()), 1)
    return float(start + slope * context), True


def compare(sides: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Times the peers take over those of each of our sides."""
    found = {}
    peers = [v["seconds_per_token"] for k, v in sides.items() if k.startswith("transformers")]
    for name in TOLERANCE:
        if name not in sides:
            continue
        own = sides[name]["seconds_per_token"]
        if peers:
            found[f"{name} over transformers"] = min(peers) / own
        if "llama.cpp" in sides:
            found[f"{name} over llama.cpp"] = sides["llama.cpp"]["seconds_per_token"] / own
    return found


def report(result: dict[str, Any]) -> str:
    """The whole result as a table for a terminal."""
    rows = []
    for part in result["decode"]:
        for name, side in part["sides"].items():
            seconds = side["seconds_per_token"]
            mark = " (extrapolated)" if side.get("extrapolated") else ""
            rows.append(
                [f"{part['context']:,}  {name}{mark}", f"{1e3 * seconds:.1f}", f"{1 / seconds:.1f}"]
            )
        rows += [
            [f"{part['context']:,}  {name}", f"{ratio:.2f} x", ""]
            for name, ratio in part["ratios"].items()
        ]
    return table(["", "ms/token", "tokens/s"], rows)


def shaped(options: argparse.Namespace, folder: str) -> None:
    """Make the model that ``options.shape`` asks for, in ``folder``, and let it be the model."""
    from kvdrive_jax.models.weights import describe_pretrained

    vocabulary = describe_pretrained("demo", "float32").config.vocab_size
    with Worker("benchmarks.sides:Conversion") as worker:
        worker.call("shape", options.shape, options.layers, vocabulary, folder)
    options.model = folder


def run(options: argparse.Namespace, *, in_process: bool = False) -> dict[str, Any]:
    """The whole comparison; see Decode for in_process."""
    record = environment(dtype="float32 activations and KV", threads=options.threads)
    with tempfile.TemporaryDirectory(prefix="kvdrive-decode-") as scratch:
        print("preparing the model", flush=True)
        name = Path(options.model).name
        if options.shape:
            name = f"{options.layers} layers of {options.shape}'s shape, random weights"
            shaped(options, scratch)
        decode = Decode(options, hf_folder(options.model, scratch), in_process)
        print("checking logits", flush=True)
        check = decode.check()
        for side, one in check.items():
            print(f"{side}: off by {one['difference']:.1e} of the logits' spread")
        llama = decode.llama(check)
        if llama is None:
            print("llama.cpp: not run; give --llama-python an interpreter that has it, and a model")
        else:
            print(f"llama.cpp: {llama['seconds']}", flush=True)
        parts = []
        for context in options.contexts:
            sides: dict[str, dict[str, Any]] = {}
            for side in decode.sides:
                if side != "llama.cpp":
                    sides[side] = decode.decode(side, context)
                    seconds = sides[side]["seconds_per_token"]
                    print(f"{context:,} {side}: {1e3 * seconds:.1f} ms a token", flush=True)
                elif llama is not None:
                    seconds, guessed = llama_at(llama["seconds"], context)
                    sides[side] = {"seconds_per_token": seconds, "extrapolated": guessed}
            parts.append({"context": context, "sides": sides, "ratios": compare(sides)})
    record["load_average_at_end"] = list(os.getloadavg())
    return {
        "benchmark": "decode_cpu",
        "environment": record,
        "model": name,
        "shape": model_shape(decode.config),
        "settings": {n: getattr(options, n) for n in ("budget", "rounds", "tokens", "threads")},
        "check": check,
        "llama": llama,
        "decode": parts,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    options = parser().parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    result = run(options)
    print(f"\n{report(result)}")
    name = f"decode_cpu_{options.shape}" if options.shape else "decode_cpu"
    write_result(options.output or RESULTS / f"{name}.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
