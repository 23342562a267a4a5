"""Sessions on disk: one sequence with its KV, index and windows, to go on with in another process.

An archive (`tiers/archive.py`) with a part ``state`` and one part for each layer. What KV and
selection depend on is in its header, and must be the same where it is opened; what only changes
speed (windows, tiers, budgets) need not be.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvdrive_jax.config import KVDriveConfig
from kvdrive_jax.models.model import Model
from kvdrive_jax.tiers.archive import Archive, ArchiveWriter, Arrays, open_archive
from kvdrive_jax.tiers.pages import page_rows
from kvdrive_jax.tiers.precision import PageFormat, transcode

if TYPE_CHECKING:
    from kvdrive_jax.methods.base import BatchMethod

_SETTINGS = (
    "chunk_size",
    "sink",
    "local",
    "flush_tokens",
    "index",
    "scan_one_in",
    "estimate",
    "tokens_per_cluster",
    "segment_tokens",
)
"""Of `RetrievalConfig`: what the KV of a session and its index are made of."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedSession:
    """A session that was saved; made by ``Engine.load_session``.

    Attributes:
        tokens: [T], those whose KV it has.
        tail: what was generated after them: none, or the last token, whose KV was not made.
        logits: [V] float32, after the last of ``tokens``.
        generated: tokens generated before it was saved.
        chunks, flushes: chunks of its index and store, and how many flushes made some of them.
        inv_freq, attention_factor: of the rotation that its keys have.
    """

    archive: Archive
    tokens: tuple[int, ...]
    tail: tuple[int, ...]
    logits: np.ndarray[Any, Any]
    generated: int
    chunks: int
    flushes: int
    inv_freq: np.ndarray[Any, Any]
    attention_factor: float
    pages: PageFormat

    @property
    def all_tokens(self) -> tuple[int, ...]:
        """Prompt and everything generated."""
        return self.tokens + self.tail

    def layer(self, layer: int, kept_as: PageFormat) -> Arrays:
        """What `BatchMethod.save` said of one layer, pages [K, N, bytes] uint8 as ``kept_as``
        keeps them. ArchiveError when its bytes are not those that were written."""
        arrays = self.archive.read(f"layer-{layer:03d}")
        pages = arrays["pages"]
        rows = page_rows(pages.reshape(-1, *pages.shape[2:]), self.pages.page_bytes)
        if self.pages != kept_as:
            rows = transcode(self.pages, kept_as)(rows)
        return {**arrays, "pages": rows.reshape(*pages.shape[:2], kept_as.page_bytes)}

    def shared_with(self, ids: Sequence[int]) -> int:
        """How many tokens a prompt begins with that the session has KV of."""
        known = np.array(self.tokens[: len(ids)])
        differs = np.flatnonzero(known != np.array(ids[: len(known)]))
        return int(differs[0]) if len(differs) else len(known)


def _settings(model: Model, config: KVDriveConfig) -> dict[str, Any]:
    values = {name: getattr(config.retrieval, name) for name in _SETTINGS}
    return {"model": model.digest, "dtype": model.dtype.name, **values}


def check_target(path: str | os.PathLike[str]) -> None:
    """ValueError unless a session can be saved at ``path``; shown by beginning to."""
    ArchiveWriter(path, {}).close()


def save_session(
    path: str | os.PathLike[str],
    method: BatchMethod,
    row: int,
    *,
    name: str,
    tokens: Sequence[int],
    logits: np.ndarray[Any, Any],
    generated: int,
) -> int:
    """Save the session in ``row`` as one archive, in the place of one that is there; its bytes.

    tokens: prompt and what was generated; logits: [V] float32, after the last token with KV.
    Raises ArchiveError when it cannot be written; what was there before is then still there.
    """
    model, config = method.tools.model, method.tools.config
    length = int(method.rows.length[row])
    chunks, flushes = method.saved_chunks(row)
    precision = method.saved_precision
    header = {
        "model": name,
        "digest": model.digest,
        "dtype": model.dtype.name,
        "tokens": length,
        "generated": generated,
        "tail": list(tokens[length:]),
        "chunks": chunks,
        "flushes": flushes,
        "precision": precision,
        "attention_factor": float(method.rows.attention_factor[row]),
        "settings": _settings(model, config),
    }
    with ArchiveWriter(path, header) as writer:
        state = {
            "tokens": np.array(tokens[:length], np.int32),
            "logits": np.asarray(logits, np.float32),
            "inv_freq": np.asarray(method.rows.inv_freq[row]),
        }
        nbytes = writer.add("state", state)
        for layer in range(model.config.num_layers):
            nbytes += writer.add(f"layer-{layer:03d}", method.save(row, layer))
        writer.commit()
    return nbytes


def load_session(path: str | os.PathLike[str], model: Model, config: KVDriveConfig) -> SavedSession:
    """The session at ``path``, for this model and configuration; its layers are read later.

    ValueError, naming the path and the first difference, for one that was made by another model or
    with settings that KV or index depend on.
    """
    archive = open_archive(path)
    header, expected = archive.header, _settings(model, config)
    found = header.get("settings")
    if not isinstance(found, dict):
        raise ValueError(f"{path} is an archive, but not of a session")
    for key, value in expected.items():
        if found.get(key) != value:
            what = "another model" if key == "model" else f"{key} {found.get(key)}"
            raise ValueError(
                f"the session in {path} was saved with {what}, this engine has {key} {value}: "
                "use the same, or prefill again"
            )
    layers = tuple(f"layer-{layer:03d}" for layer in range(model.config.num_layers))
    if archive.names != ("state", *layers):
        raise ValueError(f"the session in {path} has parts {archive.names}, not state and {layers}")
    state = archive.read("state")
    try:
        saved = SavedSession(
            archive=archive,
            tokens=tuple(int(token) for token in state["tokens"]),
            tail=tuple(int(token) for token in header["tail"]),
            logits=state["logits"],
            generated=int(header["generated"]),
            chunks=int(header["chunks"]),
            flushes=int(header["flushes"]),
            inv_freq=state["inv_freq"],
            attention_factor=float(header["attention_factor"]),
            pages=PageFormat(
                header["precision"],
                config.retrieval.chunk_size,
                model.config.head_dim,
                np.dtype(model.dtype),
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the session in {path} has a wrong header: {error}") from error
    vocabulary = model.config.vocab_size
    every = saved.all_tokens
    if saved.logits.shape != (vocabulary,) or not saved.tokens or len(saved.tail) > 1:
        raise ValueError(f"the session in {path} has a wrong state")
    if not 0 <= min(every) <= max(every) < vocabulary:
        raise ValueError(f"the session in {path} has tokens outside of the vocabulary")
    return saved
