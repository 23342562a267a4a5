"""How much of the attention a selection covers, for index forms, group rules and budgets.

    python -m benchmarks.recall
    python -m benchmarks.recall --budgets 256 512 --tokens 4000

The bundled model reads a real text. At several positions after the prompt, each query head's exact
attention over all keys is compared with what the chunks selected from the prompt, the sink, and
everything after the last chunk cover of it: recall is that share, a mean over positions, layers and
query heads. "prompt" recall leaves the tokens after the prompt out of the denominator too.

Index forms: clusters (one bf16 centroid per 16 tokens, the paper's), chunk means of 8 tokens (one
bf16 vector per 8 tokens, twice the size), and the oracle, which knows the true mass of each chunk
of 4, summed over the heads of a group. Texts ship with Python: language reference (prose) and the
source of argparse (code).
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import platform
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from kvdrive_jax.index.chunks import chunk_count, representatives, split_into_chunks
from kvdrive_jax.index.clusters import ClusterForm, ClusterIndex
from kvdrive_jax.index.selection import select
from kvdrive_jax.models.model import Model
from kvdrive_jax.models.rope import inverse_frequencies
from kvdrive_jax.models.tokenizer import Tokenizer
from kvdrive_jax.models.weights import load_pretrained
from kvdrive_jax.pallas.scoring.reference import GROUP_RULES, combine_group, vector_logits
from kvdrive_jax.pipeline.prefill import PromptLayer, embed_prompt, prefill_layer

SINK, LOCAL = 4, 64
RESULTS = Path(__file__).resolve().parent / "results" / "recall.json"
FORM = ClusterForm()
# Name -> (index form, group rule, whether the softmax counts a cluster once per member).
RANKINGS: dict[str, tuple[str, str, bool]] = (
    {f"clusters, {rule}": ("clusters", rule, False) for rule in GROUP_RULES}
    | {
        f"clusters, {rule}, weighted": ("clusters", rule, True)
        for rule in GROUP_RULES
        if rule.startswith("softmax")
    }
    | {f"chunk means of 8, {rule}": ("means", rule, False) for rule in GROUP_RULES}
    | {"oracle": ("oracle", "", False)}
)
BYTES_PER_TOKEN = {"clusters": 1 / 16, "means": 1 / 8}  # vectors of 2 D bytes


def texts() -> dict[str, str]:
    """Real text in two kinds, each some 40,000 characters or more."""
    prose = "\n\n".join(topics[name] for name in sorted(topics) if len(topics[name]) > 2000)
    return {"prose": prose, "code": inspect.getsource(argparse)}


def layers(model: Model, ids: list[int], observed: int) -> Iterator[PromptLayer]:
    """Keys of every layer and the queries of the last `observed` tokens."""
    block = 256
    tokens = np.zeros(-(-len(ids) // block) * block, np.int32)
    tokens[: len(ids)] = ids
    inv_freq, factor = inverse_frequencies(model.config.rope, len(ids))
    hidden = embed_prompt(model.static, model.ends, jnp.asarray(tokens))
    for leaves in model.layers:
        hidden, layer = prefill_layer(
            model.static,
            leaves,
            hidden,
            jnp.int32(len(ids)),
            jnp.asarray(inv_freq),
            jnp.float32(factor),
            observed=observed,
            implementation="xla",
        )
        yield layer


@partial(jax.jit, static_argnames="n_chunks")
def indexed(keys: jax.Array, n_chunks: int) -> tuple[ClusterIndex, jax.Array]:
    """Clusters of one layer's keys [K, T, D], and its bf16 means of 8 tokens [K, N / 2, D]."""
    fours, eights = (
        split_into_chunks(keys, sink=SINK, chunk_size=size, chunk_capacity=n_chunks * 4 // size)
        for size in (4, 8)
    )
    means = representatives(eights).astype(jnp.bfloat16)
    return FORM.build(fours, jnp.int32(n_chunks)), means


@partial(jax.jit, static_argnames=("n_chunks", "prompt", "most"))
def covered(
    keys: jax.Array,
    queries: jax.Array,
    positions: jax.Array,
    piece: ClusterIndex,
    means: jax.Array,
    *,
    n_chunks: int,
    prompt: int,
    most: int,
) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """Attention mass covered in one layer by the best chunks of each ranking.

    Args:
        keys: [K, T, D]; queries: [W, H, D] at positions: [W] int32, all past the prompt.
        piece, means: see `indexed`.
        n_chunks: chunks of 4 in the prompt; prompt: its tokens; most: tokens of the largest budget.

    Returns:
        ranking -> [W, H, most / chunk size], mass of the best 1, 2, ... chunks; near [W, H] mass of
        sink and of all after the last chunk; after [W, H] mass of what follows the prompt.
    """
    kv_heads, tokens, dim = keys.shape
    width, heads, _ = queries.shape
    grouped = queries.reshape(width, kv_heads, -1, dim)
    logits = jnp.einsum("wkgd,ktd->wkgt", grouped, keys) * dim**-0.5
    logits = jnp.where(jnp.arange(tokens) <= positions[:, None, None, None], logits, -jnp.inf)
    mass = jax.nn.softmax(logits, axis=-1)
    region = mass[..., SINK : SINK + n_chunks * 4]
    near = (1.0 - region.sum(-1)).reshape(width, heads)
    after = mass[..., prompt:].sum(-1).reshape(width, heads)

    # Not by broadcasting the index over positions: XLA on CPU (to jax 0.11.2 at least) miscompiles
    # a batched matmul of a broadcast operand next to a reduction.
    def logits_of(vectors: jax.Array) -> jax.Array:
        return jax.vmap(lambda one: vector_logits(one[None], vectors[None])[0])(queries)

    def spread(array: jax.Array) -> jax.Array:
        return jnp.broadcast_to(array, (width, *array.shape))

    by_size = {size: _by_chunk(region, size) for size in (4, 8)}
    logits_by_form = {"clusters": logits_of(piece.centroids), "means": logits_of(means)}
    results = {}
    for name, (form, rule, weighted) in RANKINGS.items():
        size = 8 if form == "means" else 4
        if form == "oracle":
            scores = by_size[4].sum(axis=2)
        elif form == "means":
            every = jnp.ones((width, *means.shape[:2]), bool)
            scores = combine_group(logits_by_form[form], every, rule)  # type: ignore[arg-type]
        else:
            sizes = spread(piece.sizes)
            counts = sizes if weighted else None
            scores = combine_group(logits_by_form[form], sizes > 0, rule, counts)  # type: ignore[arg-type]
            scores = jnp.take_along_axis(scores, spread(piece.cluster_of_chunk), axis=-1)
        count = jnp.full((width,), by_size[size].shape[-1])
        ids = select(scores, count, most // size)[:, :, None]
        taken = jnp.take_along_axis(by_size[size], jnp.maximum(ids, 0), axis=-1)
        taken = jnp.where(ids >= 0, taken, 0.0).cumsum(axis=-1)
        results[name] = taken.reshape(width, heads, -1)
    return results, near, after


def _by_chunk(region: jax.Array, size: int) -> jax.Array:
    """[..., tokens] -> [..., chunks]; a rest that fills no chunk is left out."""
    count = region.shape[-1] // size
    return region[..., : count * size].reshape(*region.shape[:-1], count, size).sum(-1)


def measure(
    model: Model, ids: list[int], *, steps: int, every: int, budgets: list[int]
) -> dict[str, dict[str, list[float]]]:
    """Recall by ranking and budget on one text, over all keys and over the prompt's."""
    prompt = len(ids) - steps
    n_chunks = chunk_count(prompt, sink=SINK, local=LOCAL, chunk_size=4)
    at = np.arange(0, steps, every)
    sums: dict[str, dict[str, npt.NDArray[np.float64]]] = {}
    for layer in layers(model, ids, steps):
        piece, means = indexed(layer.k, n_chunks)
        results, near, after = covered(
            layer.k[:, : len(ids)],
            layer.q_observed[at],
            jnp.asarray(prompt + at, jnp.int32),
            piece,
            means,
            n_chunks=n_chunks,
            prompt=prompt,
            most=max(budgets),
        )
        near, after = np.asarray(near, np.float64), np.asarray(after, np.float64)
        for name, taken in results.items():
            size = 8 if RANKINGS[name][0] == "means" else 4
            best = np.asarray(taken, np.float64)[..., np.array(budgets) // size - 1]
            recall = best + near[..., None]
            on_prompt = (recall - after[..., None]) / (1 - after[..., None])
            total = sums.setdefault(
                name, {kind: np.zeros(len(budgets)) for kind in ("all", "prompt")}
            )
            total["all"] = total["all"] + recall.mean((0, 1))
            total["prompt"] = total["prompt"] + on_prompt.mean((0, 1))
    count = model.config.num_layers
    return {
        name: {
            kind: [round(float(v), 4) for v in total / count] for kind, total in sums[name].items()
        }
        for name in RANKINGS
    }


def table(recalls: dict[str, dict[str, list[float]]], budgets: list[int], kind: str) -> str:
    """One line per ranking."""
    lines = [f"{'recall, ' + kind:44s}" + "".join(f"{budget:8d}" for budget in budgets)]
    lines += [
        f"{name:44s}" + "".join(f"{value:8.3f}" for value in kinds[kind])
        for name, kinds in recalls.items()
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recall", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=6656, help="prompt and steps together")
    parser.add_argument("--steps", type=int, default=96, help="tokens after the prompt")
    parser.add_argument("--every", type=int, default=12, help="measure every so many steps")
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    if any(budget < 8 or budget % 8 for budget in args.budgets):
        parser.error(f"budgets must be multiples of 8 tokens, got {args.budgets}")
    if args.tokens < args.steps + SINK + LOCAL + max(args.budgets):
        parser.error(f"{args.tokens} tokens do not hold a budget of {max(args.budgets)}")

    model = load_pretrained(args.model, "float32")
    tokenizer = Tokenizer.from_pretrained(args.model)
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("jax", "flax", "numpy")},
        "model": args.model,
        "model_digest": model.digest,
        "shapes": {
            "layers": model.config.num_layers,
            "query_heads": model.config.num_heads,
            "kv_heads": model.config.num_kv_heads,
            "head_dim": model.config.head_dim,
            "tokens": args.tokens,
            "positions": len(range(0, args.steps, args.every)),
        },
        "sink": SINK,
        "local": LOCAL,
        "budgets": args.budgets,
        "index_bytes_per_token": {
            name: 2 * model.config.head_dim * share for name, share in BYTES_PER_TOKEN.items()
        },
        "texts": {},
    }
    for name, text in texts().items():
        ids = tokenizer.encode(text)[: args.tokens]
        if len(ids) < args.tokens:
            parser.error(f"the text {name!r} has only {len(ids)} tokens")
        start = time.perf_counter()
        recalls = measure(
            model, ids, steps=args.steps, every=args.every, budgets=sorted(args.budgets)
        )
        print(f"\n{name}: {len(ids)} tokens, {time.perf_counter() - start:.0f} s")
        print(table(recalls, sorted(args.budgets), "all"))
        print(table(recalls, sorted(args.budgets), "prompt"))
        digest = hashlib.sha256(np.asarray(ids, np.int32).tobytes()).hexdigest()
        report["texts"][name] = {"token_sha256": digest, "recall": recalls}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten to {args.out.name}; budgets are tokens per kv head beside sink and local")


if __name__ == "__main__":
    main()
