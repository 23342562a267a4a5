"""Token ids to text as they come: whole characters only, and never a part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class Pieces(Protocol):
    """What a stream needs of a tokenizer: the bytes of each token, and whether the first space of a
    text is dropped.
    """

    @property
    def drops_first_space(self) -> bool: ...

    def piece(self, token_id: int) -> bytes: ...


def check_stop_strings(stop: Sequence[str]) -> tuple[str, ...]:
    """Returns the stop strings as a tuple.

    Raises:
        ValueError: one is empty (it would stop before the first token), or one string was given in
            place of several.
    """
    if isinstance(stop, str):
        raise ValueError(
            f"stop: expected a sequence of strings, got the string {stop!r}; write [{stop!r}]"
        )
    for i, text in enumerate(stop):
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop: expected non-empty strings, got {text!r} at position {i}")
    return tuple(stop)


def first_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """Finds where the first stop string begins, or None.

    First is the one that is complete first when the text is read character by character (so that
    the answer does not depend on how the text was cut into tokens); of those that end at the same
    character, the longest.
    """
    found = [(begin + len(s), begin, s) for s in stop if (begin := text.find(s)) >= 0]
    if not found:
        return None
    _, begin, s = min(found)
    return begin, s


class TextStream:
    """The text of one sequence of tokens, token by token.

    What `feed` and `finish` return, put together, is ``tokenizer.decode(ids)`` up to the first stop
    string. A token costs its own text and what is held back, not the text so far.

    Attributes:
        stop_string: the stop string that was met, or None. Nothing more comes after it.
    """

    def __init__(self, tokenizer: Pieces, stop: Sequence[str] = ()) -> None:
        """Starts an empty stream.

        Raises:
            ValueError: see `check_stop_strings`.
        """
        self._tokenizer = tokenizer
        self._stop = check_stop_strings(stop)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # the longest end of the text that may still become a stop string
        self._at_start = tokenizer.drops_first_space
        self._finished = False
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met."""
        return self.stop_string is not None

    def feed(self, token_id: int) -> str:
        """Adds one token and returns the text that is now certain; empty once a stop string was
        met.

        Raises:
            RuntimeError: the stream was finished.
        """
        if self._finished:
            raise RuntimeError(
                "TextStream.feed after finish: start a new stream for another sequence"
            )
        if self.stopped:
            return ""
        piece = self._tokenizer.piece(token_id)
        if self._at_start and piece:
            self._at_start = False
            piece = piece.removeprefix(b" ")
        return self._release(self._utf8.decode(piece), self._stop)

    def finish(self) -> str:
        """Ends the sequence and returns what was held back, U+FFFD for a character that never got
        its last bytes.
        """
        if self._finished or self.stopped:
            self._finished = True
            return ""
        self._finished = True
        text = self._release(self._utf8.decode(b"", True), self._stop)
        text, self._held = text + self._held, ""
        return text

    def _release(self, text: str, stop: Sequence[str]) -> str:
        """Takes new text and returns what can be no part of a stop string any more."""
        pending = self._held + text
        met = first_stop(pending, stop)
        if met is not None:
            begin, self.stop_string = met
            self._held = ""
            return pending[:begin]
        held = _possible_start(pending, stop)
        self._held = pending[len(pending) - held :]
        return pending[: len(pending) - held]


def _possible_start(text: str, stop: Sequence[str]) -> int:
    """Returns the length of the longest end of ``text`` with which some stop string begins."""
    longest = max(map(len, stop), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(s.startswith(text[-size:]) for s in stop):
            return size
    return 0
