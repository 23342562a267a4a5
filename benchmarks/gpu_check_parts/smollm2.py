"""Part ``smollm2``: a real model end to end, the same tokens as on the CPU of the same machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from benchmarks.gpu_check_parts.bench import Bench, Row

PROMPT = "The pass key is 7364291. Remember it. " + "The grass is green. The sky is blue. " * 60
QUESTION = "What is the pass key? The pass key is"
NEW_TOKENS = 32


def run(bench: Bench) -> None:
    """Skipped, and said so, without weights."""
    answers: dict[str, Any] = {}
    if bench.weights is None:
        bench.item("weights", _no_weights)
        return
    bench.item("on the CPU, float32", lambda row: _on_cpu(bench, row, answers))
    for dtype in ("float32", "bfloat16"):
        for method in ("full", "kvdrive"):
            bench.item(
                f"on the device, {dtype}, {method}",
                lambda row, dtype=dtype, method=method: _here(bench, row, answers, dtype, method),
                needs_seconds=3,
            )


def _no_weights(row: Row) -> None:
    raise NotImplementedError("give --weights DIR, a folder with SmolLM2-135M-Instruct")


def generate(weights: str, dtype: str, method: str) -> dict[str, Any]:
    """Tokens, text and rate of one greedy answer."""
    from kvdrive_jax import Engine
    from kvdrive_jax.config import KVDriveConfig, RetrievalConfig

    config = KVDriveConfig(
        dtype=dtype,  # type: ignore[arg-type]
        method=method,  # type: ignore[arg-type]
        context_length=4096,
        retrieval=RetrievalConfig(budget=512),
    )
    with Engine.from_pretrained(weights, config) as engine:
        answer = engine.generate(
            PROMPT + QUESTION, max_new_tokens=NEW_TOKENS, chat=False, ignore_eos=True
        )
        # The second request: the first has compiled everything.
        engine.generate(PROMPT + QUESTION, max_new_tokens=NEW_TOKENS, chat=False, ignore_eos=True)
        stats = engine.stats()
    return {
        "tokens": [int(token) for token in answer.token_ids],
        "text": answer.text,
        "tokens_per_s": stats["decode_tokens_per_s"],
        "device": jax.devices()[0].platform,
    }


def _on_cpu(bench: Bench, row: Row, answers: dict[str, Any]) -> None:
    code = (
        "import json; from benchmarks.gpu_check_parts import smollm2; "
        f"print(json.dumps([smollm2.generate({bench.weights!r}, 'float32', m) "
        "for m in ('full', 'kvdrive')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=max(1.0, bench.left()),
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    full, kvdrive = json.loads(done.stdout.strip().splitlines()[-1])
    answers.update(full=full, kvdrive=kvdrive)
    row.update(full=full, kvdrive=kvdrive)


def _here(bench: Bench, row: Row, answers: dict[str, Any], dtype: str, method: str) -> None:
    assert bench.weights is not None
    found = generate(bench.weights, dtype, method)
    row.update(found)
    row["figure"] = f"{found['tokens_per_s']:.0f} tokens/s"
    if method not in answers:
        raise NotImplementedError("there is no answer of the CPU to compare with")
    wanted = answers[method]["tokens"]
    pairs = zip(found["tokens"], wanted, strict=True)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(wanted))
    row["same_first_tokens"] = same
    # bfloat16 may turn a near tie; in float32 only the order of sums differs.
    enough = len(wanted) if dtype == "float32" else 8
    if same < enough:
        row.update(status="failed", why=f"only the first {same} tokens are those of the CPU")
