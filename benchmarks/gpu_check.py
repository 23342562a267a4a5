"""Everything that only a GPU can tell, in one command and under four minutes.

    python -m benchmarks.gpu_check
    python -m benchmarks.gpu_check --parts kernels,speed --out check.json
    python -m benchmarks.gpu_check --weights SMOLLM2_FOLDER

Correctness comes before speed. Each part runs in a process of its own, within its own time, so
that one that crashes or hangs takes nothing with it; what it had found by then is kept. The JSON
file is written after every part, a short table is printed last. Without a GPU the same parts run
at toy size with interpreted kernels: that shows that the script works, and nothing about speed.

Exit status: 0 when nothing failed, 1 otherwise.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, environment, table, write_result
from benchmarks.gpu_check_parts import PARTS

TOTAL_SECONDS = 225.0


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    args = _parse(argv)
    if args.child:
        _run_part(args.child, Path(args.out), args)
        return 0
    return _run_all(args)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", default=str(RESULTS / "gpu_check.json"), help="the JSON file")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--weights", help="folder of SmolLM2-135M-Instruct, for part smollm2")
    parser.add_argument("--seed", type=int, help="of all inputs (default: another in every run)")
    parser.add_argument("--toy", action="store_true", help="toy sizes, also on a GPU")
    parser.add_argument(
        "--seconds", type=float, default=TOTAL_SECONDS, help="for all parts together"
    )
    parser.add_argument(
        "--one-process", action="store_true", help="all parts in this process, for debugging"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    unknown = sorted(set(args.parts.split(",")) - set(PARTS))
    if unknown:
        parser.error(f"unknown part {unknown[0]}; there are {', '.join(PARTS)}")
    if args.seed is None:
        args.seed = time.time_ns() % 10**6
    return args


def _run_all(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    out = Path(args.out)
    # A CPU interprets the kernels, and may be busy with other things.
    patience = 1 if _may_have_gpu() else 10
    result: dict[str, Any] = {"seed": args.seed, "parts": {}}
    chosen = [name for name in PARTS if name in args.parts.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            left = patience * args.seconds - (time.perf_counter() - start)
            print(f"{name}: {PARTS[name].about} ...", flush=True)
            part = Path(folder) / f"{name}.json"
            began = time.perf_counter()
            ended = "no time was left"
            if left > 5:
                seconds = min(left, patience * PARTS[name].seconds)
                ended = (_here if args.one_process else _apart)(name, part, args, seconds)
            found = json.loads(part.read_text()) if part.exists() else {"facts": {}, "rows": []}
            result["environment"] = found["facts"].pop("environment", result.get("environment"))
            took = round(time.perf_counter() - began, 2)
            result["parts"][name] = {"ended": ended, "took_s": took, **found}
            result["took_s"] = round(time.perf_counter() - start, 1)
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    write_result(out, result)
    print(summary(result))
    return 0 if passed(result) else 1


def _may_have_gpu() -> bool:
    """Without asking JAX, which would take hold of the GPU."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    return platforms != "cpu" and any(Path("/dev").glob("nvidia[0-9]*"))


def _apart(name: str, part: Path, args: argparse.Namespace, seconds: float) -> str:
    """Run one part in a process of its own; how it ended."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--child", name, "--out", str(part)]
    command += ["--seed", str(args.seed), "--seconds", str(seconds)]
    command += ["--toy"] if args.toy else []
    command += ["--weights", args.weights] if args.weights else []
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    # The parts follow each other closely: the next must find the memory of the last one free.
    environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # Beyond what the decode part pins, and below what a machine for an H200 has.
    environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "80")
    try:
        done = subprocess.run(
            command, env=environ, timeout=seconds + 10, stderr=subprocess.PIPE, text=True
        )
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds + 10:.0f} s"
    if done.returncode:
        tail = " | ".join(done.stderr.strip().splitlines()[-3:])
        return f"exit status {done.returncode}: {tail}"[-600:]
    return "ok"


def _here(name: str, part: Path, args: argparse.Namespace, seconds: float) -> str:
    try:
        _run_part(name, part, argparse.Namespace(**{**vars(args), "seconds": seconds}))
    except Exception:  # what a part cannot do is a line of the report, and the next part runs
        return traceback.format_exc()[-600:]
    return "ok"


def _run_part(name: str, part: Path, args: argparse.Namespace) -> None:
    import jax

    from benchmarks.gpu_check_parts.bench import Bench

    toy = args.toy or jax.default_backend() == "cpu"
    bench = Bench(part, toy=toy, seed=args.seed, seconds=args.seconds, weights=args.weights)
    bench.facts["environment"] = {**environment(dtype="several"), "toy": toy}
    bench.write()
    module = importlib.import_module(f"benchmarks.gpu_check_parts.{PARTS[name].module}")
    module.run(bench)
    bench.write()


def passed(result: dict[str, Any]) -> bool:
    """Whether every part ended well and nothing in it failed."""
    return all(
        part["ended"] == "ok" and all(row["status"] in ("ok", "skipped") for row in part["rows"])
        for part in result["parts"].values()
    )


def summary(result: dict[str, Any]) -> str:
    """The short table: what happened in each part, and everything that did not go well."""
    rows = []
    for name, part in result["parts"].items():
        count = {"ok": 0, "failed": 0, "error": 0, "skipped": 0}
        for row in part["rows"]:
            count[row["status"]] += 1
        rows.append([name, *(str(n) for n in count.values()), f"{part['took_s']:.1f} s"])
    lines = [table(["part", "ok", "failed", "error", "skipped", "took"], rows)]
    lines += _figures(result)
    for name, part in result["parts"].items():
        if part["ended"] != "ok":
            lines.append(f"{name}: {part['ended']}")
        lines += [
            f"{name}: {row['item']}: {row['status']}: {row.get('why', '')}"
            for row in part["rows"]
            if row["status"] != "ok"
        ]
    where = result.get("environment") or {}
    toy = ", toy sizes: times mean nothing" if where.get("toy") else ""
    lines.append(f"{where.get('device', 'no device')}, {result.get('took_s', 0)} s{toy}")
    return "\n".join(lines)


def _figures(result: dict[str, Any]) -> list[str]:
    rows = []
    for part in result["parts"].values():
        for row in part["rows"]:
            if "floor_s" in row and "triton_s" in row:
                xla = row.get("xla_s")
                rows.append([
                    row["item"], f"{row['triton_s'] * 1e6:,.1f}", f"{row['triton_of_floor']:.0%}",
                    "" if xla is None else f"{xla * 1e6:,.1f}",
                ])  # fmt: skip
            elif "figure" in row:
                rows.append([row["item"], row["figure"], "", ""])
    return [table(["item", "us", "of floor", "xla us"], rows)] if rows else []


if __name__ == "__main__":
    raise SystemExit(main())
