"""One sequence as the host sees it: its tokens, its text, how it ended, how long it took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvdrive_jax.saved import SavedSession
from kvdrive_jax.telemetry import RowCounts
from kvdrive_jax.text import Pieces, TextStream

FinishReason = Literal["eos", "stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What came of one prompt.

    text: without special tokens, up to the first stop string; token_ids: the new tokens, a final
    end-of-sequence token left out; finish_reason: why it ended; error: the message, where that is
    ``error``; stats: this session's entry of ``Engine.stats()["sessions"]``.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class StreamEvent:
    """New text of one session; ``generation`` is set on its last event."""

    session: int
    text: str
    generation: Generation | None = None


@dataclass(frozen=True, kw_only=True)
class Resume:
    """How much of a saved session is gone on with.

    whole: everything, as if it had not been saved; tokens: from the beginning, whose KV is reused.
    """

    saved: SavedSession
    whole: bool
    tokens: int

    @property
    def drawn_before(self) -> int:
        """Tokens that had been drawn when it was saved."""
        return self.saved.generated if self.whole else 0


@dataclass
class Session:
    """State of one sequence; belongs to the engine's thread.

    number: its place among the prompts of the call, and the number of its random stream.
    """

    number: int
    prompt_ids: Sequence[int]
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    stream: TextStream
    counts: RowCounts = field(default_factory=RowCounts)
    started: float = field(default_factory=time.perf_counter)
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    ttft_s: float | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    resume: Resume | None = None
    saved_bytes: int | None = None

    @classmethod
    def start(
        cls,
        number: int,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        eos_token_ids: frozenset[int],
        tokenizer: Pieces,
        stop: Sequence[str],
        resume: Resume | None = None,
    ) -> Session:
        """A session with nothing generated yet."""
        stream = TextStream(tokenizer, stop)
        return cls(number, prompt_ids, max_new_tokens, eos_token_ids, stream, resume=resume)

    @property
    def drawn(self) -> int:
        """Tokens drawn from its random stream, those before it was saved included."""
        return len(self.token_ids) + (self.resume.drawn_before if self.resume else 0)

    @property
    def left(self) -> int:
        """Tokens it may still get."""
        return self.max_new_tokens - len(self.token_ids)

    @property
    def last_token(self) -> int:
        """The token that the next step decodes; any token once the session has ended."""
        return self.token_ids[-1] if self.token_ids else self.prompt_ids[-1]

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    def accept(self, token: int) -> str:
        """Take one sampled token; returns the text that is certain now, and sets the end if any."""
        if self.ttft_s is None:
            self.ttft_s = time.perf_counter() - self.started
        if token in self.eos_token_ids:
            return self.finish("eos")
        self.token_ids.append(token)
        text = self.stream.feed(token)
        if self.stream.stopped:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_new_tokens:
            return self._keep(text) + self.finish("length")
        return self._keep(text)

    def finish(self, reason: FinishReason, error: str | None = None) -> str:
        """End the session; returns the text that was held back."""
        if self.finish_reason is not None:
            return ""
        text = self._keep(self.stream.finish())
        self.finish_reason, self.error = reason, error
        if self.stream.stopped and reason in ("eos", "length"):
            self.finish_reason = "stop"
        return text

    def _keep(self, text: str) -> str:
        if text:
            self.pieces.append(text)
        return text

    def stats(self) -> dict[str, Any]:
        """This session's entry in the statistics."""
        return {
            "prompt_tokens": len(self.prompt_ids),
            "new_tokens": len(self.token_ids),
            "finish_reason": self.finish_reason,
            "ttft_s": self.ttft_s,
            "attended_tokens_mean": self.counts.attended_tokens_mean,
            "hit_rate": self.counts.hit_rate,
            "reused_tokens": self.resume.tokens if self.resume else 0,
            "saved_bytes": self.saved_bytes,
        }

    def event(self, text: str) -> StreamEvent:
        """New text as an event, with the Generation once the session has ended."""
        generation = None
        if self.finish_reason is not None:
            generation = Generation(
                text="".join(self.pieces),
                token_ids=tuple(self.token_ids),
                finish_reason=self.finish_reason,
                stats=self.stats(),
                error=self.error,
            )
        return StreamEvent(session=self.number, text=text, generation=generation)
