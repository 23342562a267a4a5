"""The seam between the engine and a method.

The engine owns prompts, sampling and time; a method owns the KV of one batch. It is given each
prompt layer by layer, then asked for one step after another. To add a method: subclass
BatchMethod, name it in ``methods.table``, and add it to the conformance test.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvdrive_jax.config import KVDriveConfig, Precision
from kvdrive_jax.models.model import Model, ModelDef
from kvdrive_jax.pipeline.parts import Arrangement
from kvdrive_jax.pipeline.prefill import PromptLayer
from kvdrive_jax.pipeline.recorder import TraceRecorder
from kvdrive_jax.plan import Plan
from kvdrive_jax.sampling import SamplingConfig
from kvdrive_jax.saved import SavedSession
from kvdrive_jax.telemetry import Ledger, RowCounts, StageClock, Traffic
from kvdrive_jax.tiers.link import Links
from kvdrive_jax.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What every method may use: the model, the configuration, the accounts, who records what is
    selected (None: nobody), imitated links, whether sessions will be saved, and what ran when."""

    model: Model
    config: KVDriveConfig
    ledger: Ledger
    traffic: Traffic
    clock: StageClock
    recorder: TraceRecorder | None = None
    links: Links = field(default_factory=Links)
    saves: bool = False
    timeline: Timeline = field(default_factory=Timeline)


@dataclass
class BatchRows:
    """Where each session of the batch stands; the engine advances it, methods read it.

    length: [B] int32 tokens held; active: [B] bool; inv_freq: [B, R/2]; attention_factor: [B].
    """

    length: np.ndarray[Any, Any]
    active: np.ndarray[Any, Any]
    inv_freq: jax.Array
    attention_factor: jax.Array
    counts: list[RowCounts]


@dataclass(frozen=True, kw_only=True)
class Draws:
    """How a burst draws tokens.

    last: the token of each session that is decoded next; drawn: how many it drew before; numbers:
    [B] int32, of the sessions' random streams; eos: [X] int32, tokens that end a session, -1 for
    none.
    """

    last: Sequence[int]
    drawn: Sequence[int]
    numbers: jax.Array
    eos: jax.Array
    sampling: SamplingConfig


class Drawn(NamedTuple):
    """What a burst drew: tokens [S, B] int32, and whether the logits they were drawn from are
    finite [S, B] bool."""

    tokens: np.ndarray[Any, Any]
    finite: np.ndarray[Any, Any]


class BatchMethod(ABC):
    """KV of one batch and the decode steps over it."""

    def __init__(self, tools: Tools, plan: Plan, rows: BatchRows) -> None:
        self.tools = tools
        self.plan = plan
        self.rows = rows
        self._step_begun = 0.0
        self._logits: jax.Array | None = None
        self.failed: dict[int, str] = {}
        """Rows whose KV is lost, and why; their sessions end, the others go on."""
        self.arrangement = Arrangement(plan.shape.batch)
        """How the batch is cut."""

    def arrangements(self) -> list[Arrangement]:
        """What `arrange` may be given; any of them gives the same tokens."""
        return [self.arrangement]

    def arrange(self, arrangement: Arrangement) -> None:
        """Cut the batch anew, between two steps."""
        if arrangement not in self.arrangements():
            raise ValueError(f"arrangement must be one of {self.arrangements()}, got {arrangement}")

    @abstractmethod
    def absorb(self, row: int, layer: int, prompt: PromptLayer) -> None:
        """Take one layer of one session's prompt; its length is ``rows.length[row]``.

        Returns when the device has done its part. What then goes to the host goes in ``settle``.
        """

    def settle(self) -> None:  # noqa: B027  doing nothing is a fine answer
        """Hand over what ``absorb`` left; called when the device is busy with the next layer."""

    @abstractmethod
    def finish_prefill(self) -> None:
        """All rows are absorbed: settle what is still under way, raise what failed."""

    @abstractmethod
    def layers(self, hidden: jax.Array) -> jax.Array:
        """One token per session through all layers: hidden [B, E] to hidden [B, E].

        The token of row r stands at position ``rows.length[r]``; its key and value are kept.
        """

    def step(self, tokens: jax.Array) -> jax.Array:
        """Logits [B, V] float32 after tokens [B] int32; rows are advanced by the engine."""
        model = self.tools.model
        self._step_begun = time.perf_counter()
        hidden = embed_tokens(model.static, model.ends, tokens)
        hidden = self.layers(hidden)
        self._logits = token_logits(model.static, model.ends, hidden)
        return self._logits

    def burst(self, draws: Draws, limit: int) -> Drawn | None:
        """Up to ``limit`` steps without the host, at least one; None where each step needs it.

        Tokens are those of as many calls of ``step``. It ends early where every session has drawn
        a token that ends it. The engine calls ``count_step`` and advances the rows for each.
        """
        return None

    def count_step(self) -> None:  # noqa: B027  nothing calls it without bursts
        """Count one step of all active sessions, in ``rows.counts``, before it is advanced: the
        engine does for each step of a burst that it uses, ``layers`` by itself."""

    def after_step(self) -> None:
        """A step, and what draws from its logits, is dispatched: wait for the logits, and note in
        the timeline when the device did what. Does nothing where no step was made."""
        logits, self._logits = self._logits, None
        if logits is not None:
            self.note_step(logits)

    def note_step(self, logits: jax.Array) -> None:
        """Wait for a step's logits and note when the device did what; a method that knows it of
        each layer says so."""
        logits.block_until_ready()
        self.tools.timeline.span("device", "compute", self._step_begun, time.perf_counter())

    def retire(self, row: int) -> None:  # noqa: B027  doing nothing is a fine answer
        """The session of ``row`` has ended: give back what it held."""

    # Sessions on disk. A method that does not say how refuses.

    @property
    def saved_precision(self) -> Precision:
        """What the pages of ``save`` are kept as."""
        return "model"

    def saved_chunks(self, row: int) -> tuple[int, int]:
        """Chunks of the session in ``row``, and how many flushes it has had."""
        raise NotImplementedError(f"method {self.plan.method} cannot save sessions")

    def save(self, row: int, layer: int) -> dict[str, np.ndarray[Any, Any]]:
        """One layer of the session in ``row``, for ``restore``; ``pages`` is [K, N, ...]."""
        raise NotImplementedError(f"method {self.plan.method} cannot save sessions")

    def restore(self, row: int, layer: int, saved: SavedSession) -> None:
        """Take one layer from a saved session instead of ``absorb``."""
        raise NotImplementedError(f"method {self.plan.method} cannot load sessions")

    @abstractmethod
    def close(self) -> None:
        """Give back everything; may be called at any time, and twice."""


@partial(jax.jit, static_argnames="model_def")
def embed_tokens(model_def: ModelDef, ends: tuple[jax.Array, ...], tokens: jax.Array) -> jax.Array:
    """Hidden states [B, E] of tokens [B]."""
    return model_def.merge_ends(ends).embed(tokens)


@partial(jax.jit, static_argnames="model_def")
def token_logits(model_def: ModelDef, ends: tuple[jax.Array, ...], hidden: jax.Array) -> jax.Array:
    """Logits [B, V] float32 of hidden [B, E]."""
    return model_def.merge_ends(ends).logits(hidden)


@partial(jax.jit, donate_argnames="array")
def insert_row(array: jax.Array, row: jax.Array, values: jax.Array) -> jax.Array:
    """``array`` [B, ...], donated, with ``values`` [...] in place of row ``row``."""
    return jax.lax.dynamic_update_index_in_dim(array, values, row, axis=0)


def int32(value: int | np.ndarray[Any, Any]) -> jax.Array:
    """An int32 array on the device; scalars become rank 0, so that values never recompile."""
    return jnp.asarray(value, dtype=jnp.int32)
