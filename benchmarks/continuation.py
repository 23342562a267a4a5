"""Same answers as full attention: perplexity of what follows a long context, and greedy agreement.

    python -m benchmarks.continuation            clusters and moments, with and without estimates

Perplexity: the tokens that really follow a context are decoded one by one, each method being given
the true ones; mean cross entropy of each. Agreement: full attention answers a prompt greedily, each
method is given its tokens, and it is counted how often its own best token is the same; until the
first that is not, it would have written the same text by itself.

A prompt is prefilled once and its keys and values given to every engine.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import optax

from benchmarks.common import (
    RESULTS,
    environment,
    model_shape,
    names,
    numbers,
    table,
    write_result,
)
from benchmarks.index_texts import all_texts, prose
from benchmarks.probes import OneLetterTokenizer, forced_tokens, recorded_logits, shared_prefill
from kvdrive_jax import Engine, KVDriveConfig, RetrievalConfig
from kvdrive_jax.models.tokenizer import Tokenizer
from kvdrive_jax.models.weights import load_pretrained


def configurations(specs: Sequence[str], budgets: Sequence[int]) -> dict[str, KVDriveConfig]:
    """Full attention, then every spec at every budget, by name."""
    found = {"full": KVDriveConfig(method="full", dtype="float32", batch_size=1)}
    for spec, budget in product(specs, budgets):
        index, _, estimate = spec.partition("+")
        retrieval = RetrievalConfig(
            index=index,
            budget=budget,
            estimate=estimate or "none",  # type: ignore[arg-type]
        )
        found[f"{spec} {budget}"] = KVDriveConfig(
            dtype="float32", batch_size=1, retrieval=retrieval
        )
    return found


def run(engine: Engine, prompt: Sequence[int], forced: Sequence[int] | int) -> np.ndarray[Any, Any]:
    """Logits [W, V] at each of W new tokens: the given ones, or so many of the engine's choice."""
    count = forced if isinstance(forced, int) else len(forced)
    with recorded_logits() as seen:
        stream = engine.stream_ids([prompt], max_new_tokens=count, ignore_eos=True)
        if isinstance(forced, int):
            list(stream)
        else:
            with forced_tokens(forced):
                list(stream)
    return np.stack(seen[:count])


def cross_entropy(logits: np.ndarray[Any, Any], tokens: Sequence[int]) -> float:
    """Mean over positions, in nats."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, np.asarray(tokens, np.int32))
    return float(losses.mean())


def agreement(best: np.ndarray[Any, Any], tokens: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Share of steps with the same best token, and steps before the first other one."""
    same = best == tokens
    return {
        "same": round(float(same.mean()), 4),
        "first_difference": int(same.argmin()) if not same.all() else None,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.continuation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="demo", help="demo, a folder or a .gguf file")
    specs = ["clusters", "moments", "moments+chunks", "moments+clusters"]
    parser.add_argument("--specs", type=names, default=specs, help="INDEX[+ESTIMATE], ...")
    parser.add_argument("--budgets", type=numbers, default=[64, 128, 256])
    parser.add_argument("--context", type=int, default=6144, help="tokens before the continuation")
    parser.add_argument("--tokens", type=int, default=512, help="of the continuation")
    parser.add_argument("--steps", type=int, default=256, help="of the greedy answer")
    parser.add_argument("--output", type=Path, default=RESULTS / "continuation.json")
    args = parser.parse_args(argv)
    tokenizer = Tokenizer.from_pretrained(args.model)
    model = load_pretrained(args.model, "float32")
    record = environment(dtype="float32")
    engines = {
        name: Engine(model, OneLetterTokenizer(), config, name=args.model)  # type: ignore[arg-type]
        for name, config in configurations(args.specs, args.budgets).items()
    }
    sources = {"prose": prose(), "code": inspect.getsource(argparse)}
    losses: dict[str, dict[str, float]] = {}
    for source, text in sources.items():
        ids = tokenizer.encode(text)[: args.context + args.tokens]
        if len(ids) < args.context + args.tokens:
            parser.error(f"{source} has only {len(ids)} tokens")
        losses[source] = {}
        with shared_prefill():
            for name, engine in engines.items():
                start = time.perf_counter()
                logits = run(engine, ids[: args.context], ids[args.context :])
                losses[source][name] = cross_entropy(logits, ids[args.context :])
                print(
                    f"{source}, {name}: loss {losses[source][name]:.4f} "
                    f"({time.perf_counter() - start:.0f} s)",
                    flush=True,
                )
    agreements: dict[str, dict[str, Any]] = {}
    for text in all_texts(tokenizer, args.context, args.steps)[:2]:
        agreements[text.name] = {}
        with shared_prefill():
            tokens = run(engines["full"], text.prompt, args.steps).argmax(axis=-1)
            for name, engine in engines.items():
                best = run(engine, text.prompt, tokens.tolist()).argmax(axis=-1)
                agreements[text.name][name] = agreement(best, tokens)
                print(f"{text.name}, {name}: {agreements[text.name][name]}", flush=True)
    for engine in engines.values():
        engine.close()
    print(f"\n{summary(losses, agreements)}")
    write_result(
        args.output,
        {
            "benchmark": "continuation",
            "environment": record,
            "model": Path(args.model).name,
            "shape": model_shape(model.config),
            "settings": {
                "context": args.context,
                "tokens": args.tokens,
                "steps": args.steps,
                "configs": {name: engine.config.to_dict() for name, engine in engines.items()},
            },
            "cross_entropy": losses,
            "agreement": agreements,
        },
    )
    return 0


def summary(losses: dict[str, dict[str, float]], agreements: dict[str, dict[str, Any]]) -> str:
    """Perplexity against full's, and agreement, one line per method."""
    rows = []
    for name in next(iter(losses.values())):
        row = [name]
        for figures in losses.values():
            ratio = float(np.exp(figures[name] - figures["full"]))
            row += [f"{np.exp(figures[name]):.3f}", f"{100 * (ratio - 1):+.2f} %"]
        for found in agreements.values():
            first = found[name]["first_difference"]
            row += [f"{100 * found[name]['same']:.1f} %", "-" if first is None else str(first)]
        rows.append(row)
    header = ["method"]
    for source in losses:
        header += [f"perplexity, {source}", "against full"]
    for source in agreements:
        header += [f"same token, {source}", "first other"]
    return table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
