"""Six prompts of different kinds, each with the answer that follows it.

Built from this repository's own text, Python's documentation and library, and generated text, so
that nothing is downloaded. The answer is given, not generated: every index form is measured at the
same tokens, and the answer of a model that gets it right attends as the task demands.
"""

from __future__ import annotations

import argparse
import inspect
import random
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from kvdrive_jax.models.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
NEEDLE = "The special magic number for the harbour is 7402916. Remember it."
PLACES = ("mill", "bridge", "library", "orchard", "station", "tower", "bakery", "lighthouse")


@dataclass(frozen=True)
class Text:
    """A prompt and the tokens decoded after it."""

    name: str
    prompt: list[int]
    answer: list[int]


def all_texts(tokenizer: Tokenizer, tokens: int, steps: int) -> list[Text]:
    """The six texts, with prompts of 0.6 to 1 times `tokens` and answers of `steps` tokens."""
    return [
        _licence(tokenizer, tokens, steps),
        _needle(tokenizer, tokens, steps),
        _needles(tokenizer, tokens * 4 // 5, steps),
        _code(tokenizer, tokens, steps),
        _chat(tokenizer, tokens * 3 // 5, steps),
        _copying(tokenizer, tokens * 7 // 10, steps),
    ]


def _fit(
    tokenizer: Tokenizer,
    name: str,
    make: Callable[[str], str],
    filler: str,
    answer: str,
    tokens: int,
    steps: int,
) -> Text:
    """`make` around so much of `filler` that the chat prompt has about `tokens` tokens."""
    spare = tokens - len(tokenizer.encode_chat(make("")))
    ids = tokenizer.encode(filler)
    while len(ids) < spare:
        ids = ids + ids
    prompt = tokenizer.encode_chat(make(tokenizer.decode(ids[:spare])))
    forced = tokenizer.encode(answer)
    while len(forced) < steps:
        forced = forced + forced
    return Text(name, prompt[: tokens + 16], forced[:steps])


def prose() -> str:
    """Python's language reference, without the grammar-heavy short entries."""
    return "\n\n".join(topics[name] for name in sorted(topics) if len(topics[name]) > 2000)


def _story(seed: int, sentences: int) -> str:
    """Generated prose without meaning, not repetitive enough to be copied from."""
    draw = random.Random(seed)
    who = ("the ferryman", "a clerk", "her sister", "the old gardener", "a pilot", "the twins")
    did = ("carried", "forgot", "repaired", "counted", "described", "hid", "painted", "sold")
    what = ("a brass lamp", "the ledger", "two baskets", "a broken clock", "the map", "some rope")
    when = ("before dawn", "in late autumn", "after the storm", "on market day", "that evening")
    parts = [
        f"{draw.choice(who).capitalize()} {draw.choice(did)} {draw.choice(what)} near the "
        f"{draw.choice(PLACES)} {draw.choice(when)}, and {draw.choice(who)} "
        f"{draw.choice(did)} {draw.choice(what)}."
        for _ in range(sentences)
    ]
    return " ".join(parts)


def _licence(tokenizer: Tokenizer, tokens: int, steps: int) -> Text:
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    answer = (
        "The licence lets anyone use, copy, change and distribute the work, in source or object "
        "form, without paying for it. Each contributor also grants a patent licence, which ends "
        "for whoever starts patent litigation about the work. Whoever passes the work on must "
        "include a copy of the licence, mark the files that were changed, and keep the notices of "
        "copyright, patents and trademarks. The work comes as it is, without warranty of any kind, "
        "and no contributor is liable for damages. Trademarks are not licensed."
    )
    return _fit(
        tokenizer,
        "licence",
        lambda body: f"{body}\n\nExplain in plain words what this licence allows and demands.",
        licence + "\n\n" + prose(),
        answer,
        tokens,
        steps,
    )


def _needle(tokenizer: Tokenizer, tokens: int, steps: int) -> Text:
    def make(body: str) -> str:
        lines = body.splitlines()
        lines.insert(len(lines) * 2 // 5, NEEDLE)
        question = "What is the special magic number for the harbour? Then tell a short story."
        return "\n".join(lines) + f"\n\n{question}"

    answer = (
        "The special magic number for the harbour is 7402916. Once upon a time there was a harbour "
        "where every ship had to give a number before it could land. The keeper of the harbour "
        "knew only one number, 7402916, and waited each night for the ship that would say it. One "
        "evening a small boat came in from the fog, and a child on board called the number. The "
        "keeper lit the lamp, opened the gate, and wrote the name of the boat into his book."
    )
    filler = textwrap.fill(_story(1, 60), 100)
    return _fit(tokenizer, "needle", make, "\n".join([filler] * 8), answer, tokens, steps)


def _needles(tokenizer: Tokenizer, tokens: int, steps: int) -> Text:
    numbers = {place: 1000 + 7919 * (i + 3) % 9000 for i, place in enumerate(PLACES)}

    def make(body: str) -> str:
        lines = body.splitlines()
        for i, (place, number) in enumerate(numbers.items()):
            at = (2 * i + 1) * len(lines) // (2 * len(numbers))
            lines.insert(at, f"The code of the {place} is {number}.")
        return "\n".join(lines) + "\n\nList the codes of all places in alphabetical order."

    listed = [f"The code of the {place} is {numbers[place]}." for place in sorted(numbers)]
    filler = textwrap.fill(_story(2, 400), 100)
    return _fit(tokenizer, "needles", make, filler, "\n".join(listed), tokens, steps)


def _code(tokenizer: Tokenizer, tokens: int, steps: int) -> Text:
    ids = tokenizer.encode(inspect.getsource(argparse))
    tokens = min(tokens, len(ids) - steps)
    return Text("code", ids[:tokens], ids[tokens : tokens + steps])


def _chat(tokenizer: Tokenizer, tokens: int, steps: int) -> Text:
    """Questions and answers in turns; the last question refers back to the second."""
    names = [name for name in sorted(topics) if 600 < len(topics[name]) < 2500]
    turns, used = [], 0
    for name in names:
        turn = (
            f"<|im_start|>user\nWhat does Python's reference say about {name}?<|im_end|>\n"
            f"<|im_start|>assistant\n{topics[name]}<|im_end|>\n"
        )
        cost = len(tokenizer.encode(turn))
        if used + cost > tokens - 80:
            break
        turns.append(turn)
        used += cost
    last = (
        f"<|im_start|>user\nWhat did you say about {names[1]}, my second question? Say it again, "
        "in short.<|im_end|>\n<|im_start|>assistant\n"
    )
    forced = tokenizer.encode(topics[names[1]] + " " + topics[names[0]])
    return Text("chat", tokenizer.encode("".join(turns) + last), forced[:steps])


def _copying(tokenizer: Tokenizer, tokens: int, steps: int) -> Text:
    """The first half of the prompt again: what follows is found only in the first half."""
    half = tokenizer.encode(prose()[20000:])[: tokens * 3 // 4]
    again = tokens // 4
    return Text("copying", half + half[:again], half[again : again + steps])
