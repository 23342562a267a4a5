"""Prose to get lost in: sentences of everyday life, all different, without a digit in them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice

_WHO = (
    "The old baker", "A tired teacher", "The youngest sister", "Our neighbour", "The tall sailor",
    "A patient gardener", "The station master", "My grandmother", "The village doctor",
    "A quiet carpenter", "The night watchman", "The new librarian", "A cheerful postman",
    "The miller's son", "A stubborn painter", "The widow next door",
)  # fmt: skip
_DID = (
    "walked to", "waited near", "came back from", "looked across", "swept the steps of",
    "met a friend at", "lost a glove near", "drew a picture of", "told a story about",
    "carried apples to", "dreamed about", "hurried past",
)  # fmt: skip
_WHERE = (
    "the market square", "the stone bridge", "the empty theatre", "the lighthouse", "the mill pond",
    "the railway station", "the orchard", "the school yard", "the chapel", "the long pier",
    "the corner shop", "the hill above the town", "the ferry landing", "the walled garden",
)  # fmt: skip
_WHEN = (
    "before sunrise", "after the rain", "on a windy afternoon", "in the first week of spring",
    "when the bells rang", "at the end of the harvest", "under a pale moon", "late in the evening",
    "while the kettle boiled", "just before the fair",
)  # fmt: skip
_THEN = (
    "nobody thought much of it", "the dog slept through it all", "the street was quiet again",
    "there was bread and warm soup", "the talk turned to the weather", "the lamps were lit early",
    "somebody hummed an old tune", "the children asked to hear it again",
    "the smell of wet leaves stayed in the air", "the clock had stopped once more",
)  # fmt: skip

PLACES = ("the harbour", "the observatory", "the bakery", "the museum", "the tower", "the garden")


def sentences(seed: int = 0) -> Iterator[str]:
    """Sentences without end, the same for the same seed."""
    rng = random.Random(seed)
    while True:
        who, did, where, when, then = map(rng.choice, (_WHO, _DID, _WHERE, _WHEN, _THEN))
        yield f"{who} {did} {where} {when}, and {then}."


def filler_tokens(encode: Callable[[str], list[int]], tokens: int, seed: int = 0) -> list[int]:
    """Exactly ``tokens`` token ids of prose. encode: text to ids."""
    count = tokens // 8 + 8
    while True:
        ids = encode(" ".join(islice(sentences(seed), count)))
        if len(ids) >= tokens:
            return ids[:tokens]
        count *= 2


def needle_prompt(
    encode: Callable[[str], list[int]],
    tokens: int,
    depth: float,
    number: str,
    place: str,
    seed: int = 0,
) -> list[int]:
    """Token ids of prose with a number hidden in it and a question at its end.

    encode: the prompt's text to ids, template included; tokens: most ids, which the prompt comes
    within a sentence of; depth: where the number stands, from 0 (start) to 1 (before the question).
    Raises ValueError when the needle and the question alone are longer.
    """
    needle = f"The special magic number for {place} is {number}. Remember it."
    question = f"What is the special magic number for {place}? Answer with the number only."
    prose = list(islice(sentences(seed), tokens // 4 + 1))

    def prompt(count: int) -> list[int]:
        at = round(depth * count)
        text = " ".join([*prose[:at], needle, *prose[at:count]])
        return encode(f"{text}\n\n{question}")

    low, high = 0, len(prose)
    while low < high:
        middle = (low + high + 1) // 2
        if len(prompt(middle)) <= tokens:
            low = middle
        else:
            high = middle - 1
    ids = prompt(low)
    if len(ids) > tokens:
        raise ValueError(
            f"tokens must be at least {len(ids)} for needle and question, got {tokens}"
        )
    return ids
