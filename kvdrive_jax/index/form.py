"""The seam of the index: what every form does, and how a form is chosen by name.

A form reduces one layer's keys to something small in HBM, from which it ranks chunks for a query.
It is a hashable value that says how; the arrays are data of a type of its own, passed in and
returned. A *piece* is the index of one session, without the leading B.

To add a form, implement `IndexForm` in a file of its own, enter it in `make_form`, and add it to
the list that `tests/test_index_forms.py` runs through.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax

from kvdrive_jax.config import GroupRule
from kvdrive_jax.index.bounds import BoundsForm
from kvdrive_jax.index.chunk_means import ChunksForm
from kvdrive_jax.index.clusters import ClusterForm
from kvdrive_jax.index.moments import MomentsForm
from kvdrive_jax.index.quantise import parse_bits
from kvdrive_jax.index.two_level import TwoLevelForm

FORMS: dict[str, tuple[str, ...]] = {
    "clusters": ("bf16",),
    "chunks": ("bf16", "8", "4", "2"),
    "bounds": ("bf16", "8", "4", "2"),
    "moments": ("bf16", "8", "4", "2"),
}
"""Names, and the bits each can be stored in."""

DEFAULT_BITS = {"clusters": "bf16", "chunks": "4", "bounds": "4", "moments": "4"}


class IndexForm(Protocol):
    """What ranks chunks; hashable, so that it can be a static argument."""

    @property
    def name(self) -> str:
        """As `--index` has it, without bits."""

    @property
    def chunk_size(self) -> int:
        """c, tokens per chunk."""

    def cluster_capacity(self, chunk_capacity: int, flush_events: int, flush_chunks: int) -> int:
        """C to pass to `empty` for a prompt of `chunk_capacity` chunks and so many flushes of at
        most `flush_chunks` chunks; forms that group nothing do not use it."""

    def empty(
        self, batch: int, kv_heads: int, head_dim: int, chunk_capacity: int, cluster_capacity: int
    ) -> Any:
        """An index of B sessions without chunks."""

    def nbytes(
        self, batch: int, kv_heads: int, head_dim: int, chunk_capacity: int, cluster_capacity: int
    ) -> int:
        """Bytes of what `empty` makes for one layer, to the byte."""

    def bytes_per_token(self, head_dim: int) -> float:
        """Bytes of index per token and kv head, without what does not grow with the tokens."""

    def bytes_scanned(self, head_dim: int, n_chunks: int) -> int:
        """Bytes that `scores` reads per kv head for a session of so many chunks."""

    def build(self, keys: jax.Array, n_chunks: jax.Array) -> Any:
        """A piece from the chunks [K, N, c, D] of a prompt, of which n_chunks (int32) are real."""

    def insert(self, index: Any, row: jax.Array | int, piece: Any) -> Any:
        """`index`, which may be donated, with the session in `row` replaced."""

    def append(
        self, index: Any, keys: jax.Array, n_new: jax.Array, n_chunks_before: jax.Array
    ) -> Any:
        """`index`, which may be donated, with n_new [B] of the chunks [B, K, F, c, D] added."""

    def scores(
        self, index: Any, queries: jax.Array, n_chunks: jax.Array, rule: GroupRule
    ) -> jax.Array:
        """[B, K, N] float32 for queries [B, H, D]: finite for the n_chunks [B] that a session has,
        -inf for padding."""


def parse_index(text: str) -> tuple[str, str]:
    """Name and bits of ``NAME`` or ``NAME:BITS``.

    Raises ValueError, with the choices, for a name that does not exist, or bits that it cannot be
    stored in.
    """
    name, colon, bits = str(text).partition(":")
    if name not in FORMS:
        raise ValueError(
            f"index must be NAME or NAME:BITS with NAME one of {', '.join(FORMS)}; got {text!r}"
        )
    if not colon:
        bits = DEFAULT_BITS[name]
    if bits not in FORMS[name]:
        raise ValueError(
            f"index {name} must have bits {', '.join(FORMS[name])}; got {bits!r} in {text!r}"
        )
    return name, bits


def make_form(
    index: str,
    *,
    chunk_size: int = 4,
    rotary_dim: int = 0,
    tokens_per_cluster: int = 16,
    segment_tokens: int = 8192,
    kmeans_rounds: int = 4,
    scan_one_in: int = 1,
) -> IndexForm:
    """The form that ``NAME`` or ``NAME:BITS`` names.

    rotary_dim is the model's, 0 where RoPE turns all channels; scan_one_in above 1 makes moments
    read in two levels (`TwoLevelForm`); the three before it are for clusters.
    Raises ValueError as `parse_index` and the forms do.
    """
    name, text = parse_index(index)
    bits = parse_bits(text)
    if scan_one_in != 1 and name != "moments":
        raise ValueError(
            f"scan_one_in must be 1 for index {name}, got {scan_one_in}: only moments are read in "
            "two levels"
        )
    if name == "chunks":
        return ChunksForm(chunk_size=chunk_size, bits=bits)
    if name == "bounds":
        return BoundsForm(chunk_size=chunk_size, bits=bits)
    if name == "moments":
        moments = MomentsForm(chunk_size=chunk_size, bits=bits, rotary_dim=rotary_dim)
        return moments if scan_one_in == 1 else TwoLevelForm(moments, scan_one_in)
    return ClusterForm(
        tokens_per_cluster=tokens_per_cluster,
        chunk_size=chunk_size,
        segment_tokens=segment_tokens,
        rounds=kmeans_rounds,
    )
