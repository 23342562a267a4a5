"""What a decode step must do, kernel by kernel: bytes and operations, and the least time they take.

A floor is the larger of two times: bytes that must move, each once, over the bandwidth; operations
over the rate. What is not counted: caches (what one kernel writes and the next reads is counted
twice), launches, and anything that could be fused away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvdrive_jax.checks import index_form
from kvdrive_jax.config import KVDriveConfig, RetrievalConfig
from kvdrive_jax.index.chunks import chunk_count
from kvdrive_jax.index.form import IndexForm
from kvdrive_jax.index.two_level import SPAN
from kvdrive_jax.models.config import ModelConfig
from kvdrive_jax.plan.hardware import Hardware

# Generated tokens not yet in chunks, on average: half of flush_tokens.
UNFLUSHED = 128

Part = Literal["select", "attend", "write", "fetch", "model", "prefill"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one kernel must do in one call.

    part: of the step; times: calls per step; hbm_bytes, pcie_bytes: that must move; tensor_ops,
    vector_ops: to be done in the tensor cores, and outside them.
    """

    name: str
    part: Part
    times: int
    hbm_bytes: float = 0.0
    pcie_bytes: float = 0.0
    tensor_ops: float = 0.0
    vector_ops: float = 0.0

    def seconds(self, hardware: Hardware) -> float:
        """The floor of one call."""
        return max(
            self.hbm_bytes / hardware.hbm,
            self.pcie_bytes / hardware.pcie,
            self.tensor_ops / hardware.tensor,
            self.vector_ops / hardware.vector,
        )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A decode step: of which model, over what, with which index.

    context: tokens of each session; hit_rate: share of the selected chunks that are in their
    windows; scan_one_in: of how many spans of the index one is scanned; window: slots as a
    multiple of the selection; itemsize: bytes of a weight, an activation, a key or a value.
    """

    model: ModelConfig
    context: int
    batch: int
    budget: int = 2048
    hit_rate: float = 0.9
    index: str = "moments:4"
    scan_one_in: int = 1
    window: float = 2.0
    chunk_size: int = 4
    itemsize: int = 2

    def __post_init__(self) -> None:
        if self.itemsize not in (2, 4):
            raise ValueError(f"itemsize must be 2 or 4 bytes, got {self.itemsize}")
        if not self.window >= 0:
            raise ValueError(f"window must be at least 0, got {self.window}")
        if not 0 <= self.hit_rate <= 1:
            raise ValueError(f"hit_rate must be from 0 to 1, got {self.hit_rate}")
        for name in ("context", "batch", "budget", "chunk_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def retrieval(self) -> RetrievalConfig:
        """As the engine would be configured."""
        return RetrievalConfig(
            budget=self.budget,
            index=self.index,
            scan_one_in=self.scan_one_in,
            chunk_size=self.chunk_size,
        )

    @property
    def index_name(self) -> str:
        """For tables."""
        return self.index + (f" 1/{self.scan_one_in}" if self.scan_one_in > 1 else "")

    @property
    def form(self) -> IndexForm:
        """The index."""
        return index_form(KVDriveConfig(retrieval=self.retrieval), self.model)

    @property
    def chunks(self) -> int:
        """N, chunks of a session."""
        settings = self.retrieval
        return chunk_count(
            self.context, sink=settings.sink, local=settings.local, chunk_size=self.chunk_size
        )

    @property
    def ranked(self) -> float:
        """What has a score of its own per kv head: chunks, or clusters of them."""
        if self.form.name != "clusters":
            return self.chunks
        return self.chunks * self.chunk_size / self.retrieval.tokens_per_cluster

    @property
    def selected(self) -> int:
        """P, chunks selected per kv head."""
        return min(self.chunks, self.budget // self.chunk_size)

    @property
    def near(self) -> int:
        """Tokens of sink, local and the unflushed, on average."""
        return min(self.context, self.retrieval.sink + self.retrieval.local + UNFLUSHED)

    @property
    def rows(self) -> int:
        """Pairs of session and kv head."""
        return self.batch * self.model.num_kv_heads

    @property
    def page_bytes(self) -> int:
        """Of one chunk."""
        return 2 * self.chunk_size * self.model.head_dim * self.itemsize


def weights_per_layer(model: ModelConfig) -> int:
    """Parameters of the products of one layer."""
    return _projected(model) + _the_rest(model)


def _projected(model: ModelConfig) -> int:
    return model.hidden_size * model.qkv_width


def _the_rest(model: ModelConfig) -> int:
    output = model.hidden_size * model.num_heads * model.head_dim
    return output + 3 * model.hidden_size * model.intermediate_size


def parameter_count(model: ModelConfig) -> int:
    """Stored parameters, without biases."""
    ends = (1 if model.tied_embeddings else 2) * model.vocab_size * model.hidden_size
    norms = (2 * model.num_layers + 1) * model.hidden_size
    heads = 2 * model.num_layers * model.head_dim if model.qk_norm else 0
    return ends + norms + heads + model.num_layers * weights_per_layer(model)


def _product(case: Case, name: str, weights: int) -> Work:
    return Work(
        name=name, part="model", times=case.model.num_layers,
        hbm_bytes=weights * case.itemsize, tensor_ops=2.0 * case.batch * weights,
    )  # fmt: skip


def projection(case: Case) -> Work:
    """Queries, keys and values of the new token; part of select."""
    return _product(case, "q, k, v", _projected(case.model))


def feed_forward(case: Case) -> Work:
    """What follows attention: its output projection, and the feed-forward network."""
    return _product(case, "output, feed-forward", _the_rest(case.model))


def logits(case: Case) -> Work:
    """The last product of a step."""
    model, batch = case.model, case.batch
    head = model.vocab_size * model.hidden_size
    return Work(
        name="logits", part="model", times=1,
        hbm_bytes=head * case.itemsize + batch * model.vocab_size * 4,
        tensor_ops=2.0 * batch * head,
    )  # fmt: skip


def scoring(case: Case) -> Work:
    """Index against queries: the index is read once, float32 scores are written."""
    model, form = case.model, case.form
    scanned = case.rows * form.bytes_scanned(model.head_dim, case.chunks)
    narrow = form.name != "clusters" and not case.index.endswith("bf16")
    # As many multiplications as the index has numbers: a mean per chunk, one centroid per cluster.
    vectors = case.ranked
    if case.scan_one_in > 1:
        vectors *= 1 / SPAN + 1 / case.scan_one_in
    codes = case.rows * vectors * model.head_dim
    return Work(
        name=f"scoring {case.index_name}", part="select", times=model.num_layers,
        hbm_bytes=scanned + case.rows * case.ranked * 4,
        tensor_ops=2.0 * codes * (model.num_heads // model.num_kv_heads),
        # A code of a word is isolated and converted.
        vector_ops=2.0 * codes if narrow else 0.0,
    )  # fmt: skip


def selection(case: Case) -> Work:
    """Scores in, ids out; every score is compared at least once. (The cluster of each chunk is in
    the bytes that scoring scans.)"""
    scores = case.rows * case.ranked
    return Work(
        name="selection", part="select", times=case.model.num_layers,
        hbm_bytes=scores * 4 + case.rows * case.selected * 4, vector_ops=scores,
    )  # fmt: skip


def directory(case: Case) -> Work:
    """Look-up of what is selected, scores of what is in the windows, misses placed."""
    slots = case.window * case.selected
    misses = (1 - case.hit_rate) * case.selected
    words = 2 * case.selected + 2 * slots + 4 * case.selected + 3 * misses
    return Work(
        name="directory", part="select", times=case.model.num_layers,
        hbm_bytes=case.rows * words * 4,
    )  # fmt: skip


def attention(case: Case, tokens: int, name: str) -> Work:
    """Decode attention over so many tokens of every session."""
    model = case.model
    entries = case.rows * tokens * model.head_dim
    return Work(
        name=name, part="attend", times=model.num_layers,
        hbm_bytes=2 * entries * case.itemsize,
        tensor_ops=4.0 * entries * (model.num_heads // model.num_kv_heads),
    )  # fmt: skip


def sparse_attention(case: Case) -> Work:
    """Over what is selected, sink and local."""
    tokens = case.selected * case.chunk_size + case.near
    return attention(case, tokens, "sparse attention")


def full_attention(case: Case) -> Work:
    """Over everything."""
    return attention(case, case.context, "full attention")


def missed_bytes(case: Case) -> float:
    """Pages that one layer must fetch in one step."""
    return case.rows * case.selected * (1 - case.hit_rate) * case.page_bytes


def page_write(case: Case) -> Work:
    """Fetched pages from staging into their slots: read and written."""
    return Work(
        name="page write", part="write", times=case.model.num_layers,
        hbm_bytes=2 * missed_bytes(case),
    )  # fmt: skip


def fetch(case: Case) -> Work:
    """Missed pages over PCIe (the direct way writes them to their slots at the same time)."""
    return Work(
        name="fetch over PCIe", part="fetch", times=case.model.num_layers,
        pcie_bytes=missed_bytes(case), hbm_bytes=missed_bytes(case),
    )  # fmt: skip


def prompt_block(case: Case, queries: int = 512) -> Work:
    """Attention of the last block of queries of one prompt."""
    model = case.model
    keys = 2 * model.num_kv_heads * case.context * model.head_dim * case.itemsize
    return Work(
        name=f"prompt attention, last {queries} queries", part="prefill", times=model.num_layers,
        hbm_bytes=keys, tensor_ops=4.0 * queries * model.num_heads * case.context * model.head_dim,
    )  # fmt: skip


def kmeans_round(case: Case) -> Work:
    """One round over one layer of one prompt: every representative against its segment's
    centroids."""
    model, settings = case.model, case.retrieval
    vectors = model.num_kv_heads * case.chunks * model.head_dim
    centroids = settings.segment_tokens / settings.tokens_per_cluster
    return Work(
        name="k-means round", part="prefill", times=model.num_layers * settings.kmeans_rounds,
        hbm_bytes=4.0 * vectors, tensor_ops=2.0 * vectors * centroids,
    )  # fmt: skip


def decode_works(case: Case, method: Literal["kvdrive", "full"] = "kvdrive") -> list[Work]:
    """What one decode step must do, kernel by kernel."""
    if method == "full":
        return [projection(case), full_attention(case), feed_forward(case), logits(case)]
    return [
        projection(case),
        scoring(case),
        selection(case),
        directory(case),
        sparse_attention(case),
        feed_forward(case),
        logits(case),
        page_write(case),
        fetch(case),
    ]
