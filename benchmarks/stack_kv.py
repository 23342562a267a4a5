"""KV with the statistics of real models, for layer stacks of any shape and contexts of any length.

The bundled model reads several texts once; what some of its heads have as keys, values and queries
is kept in the user's cache folder (20 MB and several seconds a text). A (layer, kv head) of a
stack is given one real head's: its head dim padded with zeros, its queries scaled so that attention
is exactly the real one. A context is one text with what comes next in it, and before it other texts
as far as it is long; each has its keys at its own positions. Of the others only what is well
before the queries is taken, and not their first tokens: two sinks, or two last sentences, are what
no real context has. Contexts longer than all texts, about 60K tokens, have them more than once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from benchmarks.index_texts import all_texts, prose
from kvdrive_jax.models.model import Model
from kvdrive_jax.models.rope import inverse_frequencies
from kvdrive_jax.models.tokenizer import Tokenizer
from kvdrive_jax.models.weights import load_pretrained
from kvdrive_jax.pipeline.prefill import PromptLayer, embed_prompt, prefill_layer
from kvdrive_jax.shapes import prompt_capacity

Array = np.ndarray[Any, Any]

PROMPT = 4096
"""Tokens of each text that a context may end with; queries come after them."""
STEPS = 128
"""Decode steps that are recorded of each text."""
OBSERVED = 32
FILLER = PROMPT - 512
"""Tokens of each text that a context may hold before the last one: none that is close to the
queries' positions, as heads that look at close tokens would find many."""
SINK = 4
REAL_LAYERS = (4, 6, 8, 10, 12, 14)
PAIRS = 16
"""(layer, kv head) of the bundled model that are kept: of `REAL_LAYERS`, in order."""
TEXTS = 17
FORMAT = 2

MODULES = ("argparse", "inspect", "typing", "tarfile", "doctest")


class StackKV(Protocol):
    """Where the KV of a stack comes from.

    groups: H / K and dim: D must be those of the stack; base: [B], tokens of each prompt.
    """

    base: tuple[int, ...]

    def prompt(self, row: int, layer: int, capacity: int) -> PromptLayer:
        """One layer of one session's prompt, padded to ``capacity`` tokens."""
        ...

    def bank(self, layer: int) -> tuple[Array, Array, Array]:
        """What each session's decode steps project to: q [B, S, H, D], k and v [B, S, K, D]."""
        ...


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """The part of a model's shape that KV depends on, in the letters of the architecture."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: np.dtype[Any]


class RandomKV:
    """Standard normal KV; queries that change slowly, so that selections recur somewhat."""

    def __init__(self, shape: HeadShape, base: Sequence[int], steps: int, seed: int = 0) -> None:
        self._shape, self._steps, self._seed = shape, steps, seed
        self.base = tuple(base)

    def _draw(self, *key: int) -> np.random.Generator:
        return np.random.default_rng((self._seed, *key))

    def prompt(self, row: int, layer: int, capacity: int) -> PromptLayer:
        """See `StackKV`."""
        shape, draw = self._shape, self._draw(row, layer)
        size = (shape.kv_heads, capacity, shape.head_dim)
        observed = (OBSERVED, shape.heads, shape.head_dim)
        k, v, q = (
            jnp.asarray(draw.standard_normal(of, np.float32).astype(shape.dtype))
            for of in (size, size, observed)
        )
        return PromptLayer(k, v, q)

    def bank(self, layer: int) -> tuple[Array, Array, Array]:
        """See `StackKV`."""
        shape, draw = self._shape, self._draw(1 << 20, layer)
        batch, steps, dim = len(self.base), self._steps, shape.head_dim

        def normal(heads: int) -> Array:
            return draw.standard_normal((batch, steps, heads, dim), np.float32)

        q = normal(shape.heads)
        for step in range(1, steps):
            q[:, step] = 0.9 * q[:, step - 1] + np.sqrt(1 - 0.81) * q[:, step]
        return (
            q.astype(shape.dtype),
            normal(shape.kv_heads).astype(shape.dtype),
            normal(shape.kv_heads).astype(shape.dtype),
        )


def cache_folder() -> Path:
    """Where real KV is kept: under ``XDG_CACHE_HOME``, else under ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "kvdrive_jax" / "stack_kv"


def documents(tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of `TEXTS` texts, ``PROMPT + STEPS`` each, no two alike: prose, source code, and
    the tasks of `index_texts` with their answers."""
    length = PROMPT + STEPS
    flowing = tokenizer.encode(prose()[: 5 * 10 * length])
    tasks = []
    for text in all_texts(tokenizer, PROMPT, STEPS):
        if text.name not in ("code", "licence"):
            # Tasks are of different lengths; what is missing comes before them.
            task = text.prompt[:PROMPT] + text.answer
            tasks.append(flowing[: length - len(task)] + task)
    code = []
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).read_text(encoding="utf-8")
        code.append(tokenizer.encode(source[: 5 * length])[:length])
    plain = [flowing[at : at + length] for at in range(length, len(flowing) - length + 1, length)]
    # In turns, so that short contexts have every kind too.
    kinds = [tasks, plain, code]
    mixed = [kind[i] for i in range(len(plain)) for kind in kinds if i < len(kind)]
    made = [ids for ids in mixed if len(ids) == length][:TEXTS]
    if len(made) < TEXTS:
        raise RuntimeError(f"{TEXTS} texts were wanted, got {len(made)}")
    return made


@dataclass(frozen=True, kw_only=True, eq=False)
class RealText:
    """What `PAIRS` heads have of one text, float16: k, v [pairs, PROMPT + STEPS, d]; q [pairs,
    OBSERVED + STEPS, g, d], those of the last tokens; post-RoPE."""

    k: Array
    v: Array
    q: Array


def _extract(model: Model, ids: Sequence[int]) -> dict[str, Array]:
    """One text through the model as far as `REAL_LAYERS` go."""
    padded = np.zeros(prompt_capacity(len(ids)), np.int32)
    padded[: len(ids)] = ids
    inv_freq, factor = inverse_frequencies(model.config.rope, len(ids))
    hidden = embed_prompt(model.static, model.ends, jnp.asarray(padded))
    kept: dict[str, list[Array]] = {"k": [], "v": [], "q": []}
    for number, leaves in enumerate(model.layers[: REAL_LAYERS[-1] + 1]):
        hidden, layer = prefill_layer(
            model.static,
            leaves,
            hidden,
            jnp.int32(len(ids)),
            jnp.asarray(inv_freq),
            jnp.float32(factor),
            observed=OBSERVED + STEPS,
            implementation="xla",
        )
        if number in REAL_LAYERS:
            kept["k"].append(np.asarray(layer.k[:, : len(ids)], np.float16))
            kept["v"].append(np.asarray(layer.v[:, : len(ids)], np.float16))
            q = np.asarray(layer.q_observed, np.float16)
            groups = q.reshape(len(q), layer.k.shape[0], -1, q.shape[-1])
            kept["q"].append(groups.transpose(1, 0, 2, 3))
    return {name: np.concatenate(arrays)[:PAIRS] for name, arrays in kept.items()}


def real_texts(count: int, folder: Path | None = None) -> list[RealText]:
    """``count`` texts, from the cache or read by the bundled model now; mapped, not in memory.

    ValueError for more than there are.
    """
    if count > TEXTS:
        raise ValueError(f"count must be at most {TEXTS}, got {count}")
    folder = folder or cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    what = (FORMAT, PROMPT, STEPS, OBSERVED, REAL_LAYERS, PAIRS, sys.version_info[:2])
    stem = hashlib.sha256(repr(what).encode()).hexdigest()[:12]
    texts, known = [], None
    for number in range(count):
        paths = {name: folder / f"{stem}-{number}-{name}.npy" for name in ("k", "v", "q")}
        if not all(path.exists() for path in paths.values()):
            if known is None:
                known = (
                    load_pretrained("demo", "float32"),
                    documents(Tokenizer.from_pretrained("demo")),
                )
            start = time.perf_counter()
            for name, array in _extract(known[0], known[1][number]).items():
                made = paths[name].with_suffix(f".{os.getpid()}.npy")
                np.save(made, array)
                made.rename(paths[name])
            print(f"text {number} read in {time.perf_counter() - start:.0f} s", flush=True)
        texts.append(RealText(**{name: np.load(p, mmap_mode="r") for name, p in paths.items()}))
    return texts


def texts_needed(tokens: int) -> int:
    """Texts in a context of so many tokens."""
    return 1 + max(0, -(-(tokens - PROMPT) // (FILLER - SINK)))


class RealKV:
    """KV of real heads over contexts of the lengths ``base``; see the module.

    Session b ends with text b and what comes after it. At most ``STEPS`` steps.
    """

    def __init__(
        self, shape: HeadShape, base: Sequence[int], steps: int, folder: Path | None = None
    ) -> None:
        if steps > STEPS:
            raise ValueError(f"steps must be at most {STEPS}, got {steps}")
        self._shape, self._steps, self.base = shape, steps, tuple(base)
        wanted = max(texts_needed(max(base)), min(len(base), 6))
        self._texts = real_texts(min(wanted, TEXTS), folder)
        self._held: tuple[int, list[tuple[Array, Array]]] | None = None

    def _pairs(self, layer: int) -> list[int]:
        """[K] the real heads of a layer, spread over those there are."""
        shape = self._shape
        wanted = shape.layers * shape.kv_heads
        first = layer * shape.kv_heads
        spread = max(PAIRS, wanted) // wanted
        return [(first + k) * spread % PAIRS for k in range(shape.kv_heads)]

    def _wide(self, array: Array, scale: float = 1.0) -> Array:
        """[..., d] to [..., D]: zeros after each half, so that the pairs that RoPE turns together
        are pairs of the wider head too."""
        half, wide = array.shape[-1] // 2, self._shape.head_dim // 2
        made = np.zeros((*array.shape[:-1], 2 * wide), self._shape.dtype)
        scaled = array if scale == 1 else array.astype(np.float32) * np.float32(scale)
        made[..., :half] = scaled[..., :half]
        made[..., wide : wide + half] = scaled[..., half:]
        return made

    def _layer(self, layer: int) -> list[tuple[Array, Array]]:
        """Keys and values [K, T, D] of every text; one layer is held at a time."""
        if self._held is None or self._held[0] != layer:
            pairs = self._pairs(layer)
            self._held = None
            self._held = (
                layer,
                [(self._wide(text.k[pairs]), self._wide(text.v[pairs])) for text in self._texts],
            )
        return self._held[1]

    def _queries(self, row: int, layer: int) -> Array:
        """[OBSERVED + STEPS, H, D] of the text that a session ends with."""
        shape, text = self._shape, self._texts[row % len(self._texts)]
        q = text.q[self._pairs(layer)]
        group = shape.heads // shape.kv_heads
        # A group that is larger than the real one has some of its queries twice.
        q = q[:, :, np.arange(group) % q.shape[2]]
        wide = self._wide(q, np.sqrt(shape.head_dim / q.shape[-1]))
        return np.ascontiguousarray(wide.transpose(1, 0, 2, 3)).reshape(
            len(wide[0]), shape.heads, shape.head_dim
        )

    def prompt(self, row: int, layer: int, capacity: int) -> PromptLayer:
        """See `StackKV`."""
        texts, tokens = self._layer(layer), self.base[row]
        last = row % len(texts)
        own = min(tokens, PROMPT) - SINK
        pieces = [(last, 0, SINK), (last, PROMPT - own, PROMPT)]
        left, other = tokens - own - SINK, last
        while left:
            other = (other + 1) % len(texts)
            if other == last:
                other = (other + 1) % len(texts)
            taken = min(left, FILLER - SINK)
            pieces.insert(1, (other, SINK, SINK + taken))
            left -= taken
        made = []
        for which in range(2):
            array: Array = np.zeros(
                (self._shape.kv_heads, capacity, self._shape.head_dim), self._shape.dtype
            )
            at = 0
            for text, first, end in pieces:
                array[:, at : at + end - first] = texts[text][which][:, first:end]
                at += end - first
            made.append(jnp.asarray(array))
        observed = jnp.asarray(self._queries(row, layer)[:OBSERVED])
        return PromptLayer(made[0], made[1], observed)

    def bank(self, layer: int) -> tuple[Array, Array, Array]:
        """See `StackKV`."""
        texts, steps = self._layer(layer), self._steps
        rows = range(len(self.base))
        q = np.stack([self._queries(row, layer)[OBSERVED : OBSERVED + steps] for row in rows])
        k, v = (
            np.stack(
                [
                    texts[row % len(texts)][which][:, PROMPT : PROMPT + steps].transpose(1, 0, 2)
                    for row in rows
                ]
            )
            for which in range(2)
        )
        return q, k, v


def make_kv(
    kind: str, shape: HeadShape, base: Sequence[int], steps: int, folder: Path | None = None
) -> StackKV:
    """``real`` or ``random`` KV. ValueError for another kind."""
    if kind == "random":
        return RandomKV(shape, base, steps)
    if kind == "real":
        return RealKV(shape, base, steps, folder)
    raise ValueError(f"kv must be real or random, got {kind!r}")


def describe(source: StackKV) -> str:
    """What a figure says of its KV."""
    if isinstance(source, RandomKV):
        return "random keys, values and queries"
    return (
        f"keys, values and queries of the bundled model's heads over texts of {PROMPT:,} tokens, "
        "concatenated"
    )
