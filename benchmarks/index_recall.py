"""Which index form finds the attention: recall, output error, bytes and time, on six texts.

    python -m benchmarks.index_recall             all forms, rules and budgets; about half an hour
    python -m benchmarks.index_recall --quick     a minute: short texts, two layers, few forms

The bundled model reads six texts (`index_texts.py`); at several positions of each answer, every
layer's exact attention is compared with what each selection covers of it. recall: share of the
attention mass held by selection, sink and all after the last chunk; error: relative error of the
attention output; overlap: share of the oracle's choice that is selected. Means over positions,
layers, query heads. Bytes count everything in the index that grows with the tokens.

Also: estimating what is not selected (`estimate`), and a budget that the heads of a layer share
step by step (`shared`).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from benchmarks.common import (
    RESULTS,
    environment,
    model_shape,
    numbers,
    table,
    write_result,
)
from benchmarks.index_measure import (
    SINK,
    Layer,
    Ranking,
    covered,
    estimated,
    scores,
    shared,
    truth,
)
from benchmarks.index_texts import Text, all_texts
from kvdrive_jax.index.bounds import BoundsForm
from kvdrive_jax.index.chunks import split_into_chunks
from kvdrive_jax.index.clusters import ClusterForm
from kvdrive_jax.index.form import make_form
from kvdrive_jax.index.moments import MomentsForm
from kvdrive_jax.index.selection import select
from kvdrive_jax.index.two_level import TwoLevelForm
from kvdrive_jax.models.model import Model
from kvdrive_jax.models.rope import inverse_frequencies
from kvdrive_jax.models.tokenizer import Tokenizer
from kvdrive_jax.models.weights import load_pretrained
from kvdrive_jax.pallas.scoring.reference import GROUP_RULES
from kvdrive_jax.pipeline.prefill import BLOCK_K, embed_prompt, prefill_layer

ORACLE = Ranking("oracle", None)
QUICK = ("clusters", "moments:4")
MEASURES = ("recall", "error", "overlap")


def rankings() -> list[Ranking]:
    """Every form and precision under the default rule; the main two under all rules."""
    made = [ORACLE]
    made += [
        Ranking(f"clusters of {tokens}", ClusterForm(tokens_per_cluster=tokens))
        for tokens in (32, 12, 8)
    ]
    names = ("clusters", "chunks:bf16", "chunks:4", "chunks:2", "bounds:bf16", "bounds:4")
    made += [Ranking(name, make_form(name)) for name in names]
    names = ("moments:bf16", "moments:8", "moments:4", "moments:2")
    made += [Ranking(name, make_form(name)) for name in names]
    made += [
        Ranking("moments:4/4", MomentsForm(bits=4, spread_bits=4)),
        Ranking("moments:bf16 unpaired", MomentsForm(bits=16, paired=False)),
        Ranking("moments:4, chunks of 8", MomentsForm(bits=4, chunk_size=8)),
        Ranking("moments:2, chunks of 8", MomentsForm(bits=2, chunk_size=8)),
        Ranking("moments:4, 1/4 scanned", TwoLevelForm(MomentsForm(bits=4))),
        Ranking("moments:4, 1/8 scanned", TwoLevelForm(MomentsForm(bits=4), 8)),
        Ranking("bounds:bf16, pages of 16", BoundsForm(bits=16, chunk_size=16)),
    ]
    made += [
        Ranking(f"{name}, {rule}", make_form(name), rule)  # type: ignore[arg-type]
        for name in ("clusters", "moments:4")
        for rule in GROUP_RULES
        if rule != "softmax-sum"
    ]
    return made


def layers_of(
    model: Model, text: Text, at: npt.NDArray[np.int64], tokens: int, every: int
) -> Iterator[Layer]:
    """Every `every`-th layer of one text, padded to `tokens`, at answer positions `at`."""
    ids = text.prompt + text.answer
    padded = np.zeros(tokens, np.int32)
    padded[: len(ids)] = ids
    inv_freq, factor = inverse_frequencies(model.config.rope, len(ids))
    hidden = embed_prompt(model.static, model.ends, jnp.asarray(padded))
    for number, leaves in enumerate(model.layers):
        hidden, layer = prefill_layer(
            model.static,
            leaves,
            hidden,
            jnp.int32(len(ids)),
            jnp.asarray(inv_freq),
            jnp.float32(factor),
            observed=len(text.answer),
            implementation="xla",
        )
        if number % every == 0:
            yield Layer(
                layer.k,
                layer.v,
                layer.q_observed[at],
                jnp.asarray(len(text.prompt) + at, jnp.int32),
                jnp.int32(len(text.prompt)),
            )


class Means:
    """Running means of arrays by key."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], tuple[npt.NDArray[np.float64], int]] = {}

    def add(self, key: tuple[str, ...], values: jax.Array) -> None:
        total, count = self._sums.get(key, (np.float64(0), 0))
        self._sums[key] = (total + np.asarray(values, np.float64), count + 1)

    def nested(self) -> dict[str, Any]:
        """``{a: {b: [means]}}`` for keys (a, b)."""
        made: dict[str, Any] = {}
        for (first, second), (total, count) in self._sums.items():
            made.setdefault(first, {})[second] = [round(float(x), 4) for x in total / count]
        return made


def measure(
    layers: Iterator[Layer], ranked: list[Ranking], budgets: tuple[int, ...]
) -> dict[str, Any]:
    """All figures of one text, by ranking and measure."""
    means = Means()
    for layer in layers:
        exact = truth(layer)
        oracle = scores(layer, exact, ORACLE)
        for ranking in ranked:
            scored = oracle if ranking.form is None else scores(layer, exact, ranking)
            found = covered(layer, exact, scored, oracle, chunk=ranking.chunk, budgets=budgets)
            for name in MEASURES:
                means.add((ranking.name, name), found[name])
            if ranking.name not in QUICK:
                continue
            for rest, clusters in (("chunks", None), ("clusters", ClusterForm())):
                error = estimated(layer, exact, scored, budgets=budgets, clusters=clusters)
                means.add((ranking.name, f"error, {rest} estimated"), error)
            for name, far in (("shared", False), ("shared, far", True)):
                recall = shared(layer, exact, scored, budgets=budgets, far=far)
                means.add((ranking.name, f"recall, {name}"), recall)
    return means.nested()


def timings(layer: Layer, ranked: list[Ranking], tokens: int, repeats: int) -> dict[str, Any]:
    """Best seconds to build one session's index of `tokens` tokens, to score it, and to select.

    The keys are the layer's, repeated. One session, one query; the best of `repeats`, in turns, as
    others may use the machine.
    """
    made: dict[str, Any] = {}
    calls = {}
    kv_heads, _, dim = layer.k.shape
    for ranking in ranked:
        form = ranking.form
        if form is None:
            continue
        count = tokens // form.chunk_size
        prompt = int(layer.prompt) // form.chunk_size
        keys = split_into_chunks(
            layer.k, sink=SINK, chunk_size=form.chunk_size, chunk_capacity=prompt - 1
        )
        keys = jnp.tile(keys, (1, -(-count // (prompt - 1)), 1, 1))[:, :count]
        build = jax.jit(form.build)
        piece = build(keys, jnp.int32(count))
        index = form.empty(1, kv_heads, dim, count, form.cluster_capacity(count, 0, 0))
        index = form.insert(index, 0, piece)
        rule = ranking.rule
        score = jax.jit(lambda index, q, n, form=form, rule=rule: form.scores(index, q, n, rule))
        chosen = jax.jit(select, static_argnums=2)
        n = jnp.array([count])
        scored = score(index, layer.q[:1], n)
        calls[ranking.name] = {
            "build_s": (build, keys, jnp.int32(count)),
            "score_s": (score, index, layer.q[:1], n),
            "select_s": (chosen, scored, n, 512 // form.chunk_size),
        }
        made[ranking.name] = {}
    for turn in range(repeats):
        for name, parts in calls.items():
            for what, (call, *arguments) in parts.items():
                if what == "build_s" and turn > 1:
                    continue
                start = time.perf_counter()
                jax.block_until_ready(call(*arguments))
                spent = time.perf_counter() - start
                made[name][what] = min(spent, made[name].get(what, spent))
    return made


def mean_over_texts(texts: dict[str, Any]) -> dict[str, Any]:
    """The same figures, averaged over texts."""
    first = next(iter(texts.values()))["figures"]
    return {
        name: {
            measure: [
                round(float(x), 4)
                for x in np.mean([t["figures"][name][measure] for t in texts.values()], axis=0)
            ]
            for measure in measures
        }
        for name, measures in first.items()
    }


def shown(report: dict[str, Any]) -> str:
    """The table: one line per ranking, means over texts."""
    budgets = report["budgets"]
    parts = []
    for measure in MEASURES:
        rows = []
        for name, figures in report["mean"].items():
            form = report["forms"].get(name)
            size = f"{form['bytes_per_token']:.2f}" if form else "-"
            rows.append([name, size, *(f"{value:.3f}" for value in figures[measure])])
        rows.sort(key=lambda row: row[1] == "-")
        parts.append(table([measure, "bytes", *map(str, budgets)], rows))
    rows = [
        [f"{name}: {measure}", *(f"{value:.3f}" for value in values)]
        for name, figures in report["mean"].items()
        for measure, values in figures.items()
        if name in QUICK and measure not in ("error", "overlap")
    ]
    parts.append(table(["estimates and shared budgets", *map(str, budgets)], rows))
    rows = [
        [name, *(f"{1e3 * times.get(what, 0):.2f}" for what in ("build_s", "score_s", "select_s"))]
        for name, times in report["timings"].items()
    ]
    title = f"milliseconds at {report['timing_tokens']} tokens"
    parts.append(table([title, "build", "score", "select"], rows))
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.index_recall",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=6656, help="of the longest prompt")
    parser.add_argument("--steps", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--every", type=int, default=12, help="measure every so many steps")
    parser.add_argument("--layers-every", type=int, default=1, help="measure every so many layers")
    parser.add_argument("--budgets", type=numbers, default=[64, 128, 256, 512, 1024])
    parser.add_argument("--timing-tokens", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=40, help="of each timing")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-plots", action="store_true", help="(plots need matplotlib)")
    parser.add_argument("--out", type=Path, default=RESULTS / "index_recall.json")
    args = parser.parse_args(argv)
    if args.quick:
        args.tokens, args.steps, args.layers_every = 900, 24, 15
        args.budgets, args.timing_tokens, args.repeats = [64, 128], 2048, 3
    budgets = tuple(sorted(args.budgets))
    if any(budget % 16 for budget in budgets):
        parser.error(f"budgets must be multiples of 16 tokens, got {args.budgets}")

    if not args.no_plots and importlib.util.find_spec("matplotlib") is None:
        parser.error("plots need matplotlib: pip install -e '.[bench]', or give --no-plots")

    model = load_pretrained(args.model, "float32")
    tokenizer = Tokenizer.from_pretrained(args.model)
    ranked = [r for r in rankings() if not args.quick or r.name in (*QUICK, ORACLE.name)]
    texts = all_texts(tokenizer, args.tokens, args.steps)
    if args.quick:
        texts = texts[:1]
    dim = model.config.head_dim
    longest = max(len(text.prompt) for text in texts)
    report: dict[str, Any] = {
        "environment": environment(dtype="float32"),
        "model": {"name": args.model, "digest": model.digest, **model_shape(model.config)},
        "budgets": list(budgets),
        "positions": len(range(0, args.steps, args.every)),
        "layers": len(range(0, model.config.num_layers, args.layers_every)),
        "forms": {
            r.name: {
                "rule": r.rule,
                "chunk_size": r.chunk,
                "bytes_per_token": r.form.bytes_per_token(dim),
                "bytes_scanned_per_step": r.form.bytes_scanned(dim, longest // r.chunk),
            }
            for r in ranked
            if r.form is not None
        },
        "texts": {},
    }
    tokens = -(-(longest + args.steps) // BLOCK_K) * BLOCK_K
    at = np.arange(0, args.steps, args.every)
    for text in texts:
        start = time.perf_counter()
        layers = layers_of(model, text, at, tokens, args.layers_every)
        figures = measure(layers, ranked, budgets)
        ids = np.asarray(text.prompt + text.answer, np.int32)
        report["texts"][text.name] = {
            "prompt_tokens": len(text.prompt),
            "token_sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
            "figures": figures,
        }
        print(f"{text.name}: {len(ids)} tokens, {time.perf_counter() - start:.0f} s", flush=True)
    report["mean"] = mean_over_texts(report["texts"])
    report["timing_tokens"] = args.timing_tokens
    layer = next(layers_of(model, texts[0], at, tokens, 1))
    report["timings"] = timings(layer, ranked, args.timing_tokens, args.repeats)
    print(shown(report))
    write_result(args.out, report)
    args.out.with_suffix(".txt").write_text(shown(report) + "\n", encoding="utf-8")
    if not args.no_plots:
        from benchmarks.index_plots import draw

        draw(report, args.out.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
