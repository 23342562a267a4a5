"""The direct way to fetch: same windows as staged, same counts, and a probe that tells the truth.

On a CPU the arena is in ordinary memory, so that XLA can gather from it; the rest is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvdrive_jax import compat
from kvdrive_jax.config import TierConfig
from kvdrive_jax.pipeline import direct
from kvdrive_jax.pipeline.direct import (
    DirectFetcher,
    PinnedArena,
    choose_fetch,
    committed,
    gather_stage,
    why_not_direct,
)
from kvdrive_jax.pipeline.fetcher import Fetcher
from kvdrive_jax.telemetry import Ledger, RowCounts, Traffic
from kvdrive_jax.tiers import PageGeometry, PageStore

ON_CPU = jax.default_backend() == "cpu"
KIND = jax.devices()[0].default_memory().kind if ON_CPU else "pinned_host"
LAYERS, KV_HEADS, CHUNK, DIM, SELECTED, SLOTS = 2, 3, 2, 80, 5, 7


def geometry(dtype: Any = jnp.bfloat16) -> PageGeometry:
    return PageGeometry(
        layers=LAYERS, kv_heads=KV_HEADS, chunk_size=CHUNK, head_dim=DIM, dtype=np.dtype(dtype)
    )


def random_pages(rng: np.random.Generator, n: int) -> np.ndarray:
    shape = (KV_HEADS, n, 2, CHUNK, DIM)
    return rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)


class Setup:
    """A store whose slabs are in an arena, sessions, and the same fetches in both ways."""

    def __init__(self, tmp_path, capacities, shares) -> None:
        self.geometry = g = geometry()
        self.ledger, self.traffic = Ledger(), Traffic()
        ssd = any(share is not None for share in shares)
        tiers = TierConfig(
            ssd_dir=str(tmp_path) if ssd else None, extent_bytes=4096, fetch="direct"
        )
        self.store = PageStore(g, tiers, self.ledger, self.traffic)
        plans = [
            self.store.plan(c, None if s is None else self.share(c, s), s is not None)
            for c, s in zip(capacities, shares, strict=True)
        ]
        self.arena = PinnedArena(g, sum(KV_HEADS * plan.rows for plan in plans), memory_kind=KIND)
        self.store.close()
        self.store = PageStore(g, tiers, self.ledger, self.traffic, allocate=self.arena.take)
        self.sessions = [
            self.store.open(c, None if s is None else self.share(c, s), s is not None, str(i))
            for i, (c, s) in enumerate(zip(capacities, shares, strict=True))
        ]
        self.pages = [[np.zeros(0)] * LAYERS for _ in capacities]
        self.batch = len(capacities)
        most = self.batch * KV_HEADS * SELECTED
        self.staged = Fetcher(self.store, g, most, self.ledger, Traffic())
        self.rest_traffic = Traffic()
        rest = Fetcher(self.store, g, most, Ledger(), self.rest_traffic)
        self.direct = DirectFetcher(self.arena, rest, g, self.traffic)
        self.counts = [RowCounts() for _ in capacities]

    def share(self, capacity: int, part: float) -> int:
        pairs = LAYERS * KV_HEADS
        return pairs * (int(part * capacity) * self.geometry.page_bytes + 8 * capacity)

    def offload(self, rng, row: int, n: int) -> None:
        for layer in range(LAYERS):
            self.pages[row][layer] = pages = random_pages(rng, n)
            importance = rng.random((KV_HEADS, n)).astype(np.float32)
            self.sessions[row].offload(layer, pages, n, None, importance)
        self.sessions[row].wait()

    def append(self, rng, row: int, n: int) -> None:
        for layer in range(LAYERS):
            more = random_pages(rng, n)
            self.sessions[row].append(layer, more, self.pages[row][layer].shape[1], n)
            self.pages[row][layer] = np.concatenate([self.pages[row][layer], more], axis=1)
        self.sessions[row].wait()

    def missing(self, rng) -> np.ndarray:
        out = np.full((2, self.batch, KV_HEADS, SELECTED), -1, np.int32)
        for row, session in enumerate(self.sessions):
            if session is None:
                continue
            held = session.stored(0)
            for head in range(KV_HEADS):
                n = rng.integers(0, min(SELECTED, held) + 1)
                at = rng.permutation(SELECTED)[:n]
                out[0, row, head, at] = rng.permutation(held)[:n]
                out[1, row, head, at] = head * SLOTS + rng.permutation(SLOTS)[:n]
        return out

    def step(self, rng) -> int:
        """One step in both ways; returns how many pages were missing."""
        count = 0
        for layer in range(LAYERS):
            missing = self.missing(rng)
            count += int((missing[0] >= 0).sum())
            shape = (self.batch, KV_HEADS * SLOTS, *self.geometry.page_shape)
            base = rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)
            counts = [RowCounts() for _ in self.sessions]
            staged, _ = self.staged.fetch(layer, self.sessions, missing, jnp.asarray(base), counts)
            device_ids = committed(missing)
            window, failure = self.direct.fetch(
                layer, self.sessions, device_ids, committed(base.copy()), self.counts
            )
            assert failure is None
            np.testing.assert_array_equal(
                np.asarray(window).view(np.uint16), np.asarray(staged).view(np.uint16)
            )
            for row, head, p in np.ndindex(*missing.shape[1:]):
                chunk, slot = missing[:, row, head, p]
                if chunk >= 0:
                    base[row, slot] = self.pages[row][layer][head, chunk]
            np.testing.assert_array_equal(np.asarray(window).view(np.uint16), base.view(np.uint16))
        return count


@contextmanager
def setup(tmp_path, capacities, shares) -> Iterator[Setup]:
    made = Setup(tmp_path, capacities, shares)
    try:
        yield made
    finally:
        made.direct.close()
        made.staged.close()
        made.store.close()


def test_same_windows_as_staged_when_dram_holds_everything(tmp_path, rng):
    with setup(tmp_path, (11, 6), (None, None)) as made:
        made.offload(rng, 0, 8)
        made.offload(rng, 1, 6)
        window = jnp.ones((2, KV_HEADS * SLOTS, *made.geometry.page_shape), jnp.bfloat16)
        window = made.direct.compile(committed(window), made.sessions, SELECTED)
        assert bool((window == 1).all())
        compiled = gather_stage._cache_size()
        total = made.step(rng) + made.step(rng)
        made.append(rng, 0, 3)
        total += made.step(rng)
        made.sessions[1].close()
        made.sessions[1] = None
        total += made.step(rng)
        assert gather_stage._cache_size() == compiled
        made.direct.settle()
        assert sum(count.missed_chunks for count in made.counts) == total
        assert made.traffic.snapshot()["dram_to_hbm"] == total * made.geometry.page_bytes
        # Nothing went through staging.
        assert made.rest_traffic.snapshot()["dram_to_hbm"] == 0


def test_what_is_on_ssd_comes_the_staged_way(tmp_path, rng):
    with setup(tmp_path, (12, 9), (0.5, None)) as made:
        made.offload(rng, 0, 9)
        made.offload(rng, 1, 9)
        window = jnp.ones((2, KV_HEADS * SLOTS, *made.geometry.page_shape), jnp.bfloat16)
        made.direct.compile(committed(window), made.sessions, SELECTED)
        compiled = gather_stage._cache_size()
        total = made.step(rng)
        made.append(rng, 0, 2)
        total += made.step(rng)
        made.sessions[0].close()
        made.sessions[0] = None
        total += made.step(rng)
        assert gather_stage._cache_size() == compiled
        made.direct.settle()
        assert sum(count.missed_chunks for count in made.counts) == total
        direct_bytes = made.traffic.snapshot()["dram_to_hbm"]
        rest = made.rest_traffic.snapshot()["dram_to_hbm"]
        assert direct_bytes + rest == total * made.geometry.page_bytes
        assert direct_bytes > 0
        assert rest > 0


def test_a_failed_session_is_reported_and_the_others_served(tmp_path, rng):
    with setup(tmp_path, (6, 6), (None, None)) as made:
        made.offload(rng, 0, 6)
        made.offload(rng, 1, 6)
        made.sessions[0].failure = error = direct.PageError("gone", session="0")
        missing = made.missing(rng)
        missing[:, 0] = -1
        window = jnp.zeros((2, KV_HEADS * SLOTS, *made.geometry.page_shape), jnp.bfloat16)
        window, failure = made.direct.fetch(
            0, made.sessions, jnp.asarray(missing), window, made.counts
        )
        assert failure is error
        head, p = np.argwhere(missing[0, 1] >= 0)[0]
        chunk, slot = missing[:, 1, head, p]
        np.testing.assert_array_equal(window[1, slot], made.pages[1][0][head, chunk])
        made.sessions[0].failure = None


def test_arena_gives_each_row_once():
    arena = PinnedArena(geometry(), 10, memory_kind=KIND)
    a, b, c = arena.take(0, 4), arena.take(0, 6), arena.take(1, 3)
    assert [arena.first_row(0, a), arena.first_row(0, b), arena.first_row(1, c)] == [0, 4, 0]
    b[...] = 7
    assert not a.any()
    assert (np.asarray(arena.arrays[0]).view(np.uint8)[4:] == 7).all()
    with pytest.raises(ValueError, match="0 rows left"):
        arena.take(0, 1)
    with pytest.raises(ValueError, match="not one of layer 1"):
        arena.first_row(1, np.zeros_like(a))
    with pytest.raises(ValueError, match="at least 1"):
        PinnedArena(geometry(), 0, memory_kind=KIND)


def test_a_slab_outlives_its_arena():
    arena = PinnedArena(geometry(), 4, memory_kind=KIND)
    slab = arena.take(0, 4)
    del arena
    slab[...] = 3
    assert (slab == 3).all()


def test_probe_reads_its_bytes_back():
    assert direct._probe(geometry(), memory_kind=KIND) is None


def test_probe_notices_changed_bytes(monkeypatch):
    def wrong(window, source, missing, first):
        return window.at[0, 0, 0, 0, 0].set(1.0)

    monkeypatch.setattr(direct, "gather_pages", wrong)
    assert "came back changed" in direct._probe(geometry(), memory_kind=KIND)


def test_probe_that_raises_is_a_reason(monkeypatch):
    monkeypatch.setattr(direct.page_gather, "why_not", lambda dtype: None)

    def broken(*_):
        raise RuntimeError("no such thing\nsecond line")

    monkeypatch.setattr(direct, "_probe", broken)
    reason = why_not_direct.__wrapped__(geometry())
    assert reason == "the probe failed: RuntimeError: no such thing"


@pytest.mark.skipif(not ON_CPU, reason="direct may work here")
def test_on_cpu_direct_is_refused_and_auto_is_staged():
    assert "NVIDIA GPU" in why_not_direct(geometry())
    with pytest.raises(NotImplementedError, match="fetch direct: Triton kernels need an NVIDIA"):
        choose_fetch("direct", geometry(), 8, cached=False)
    for wanted in ("auto", "staged"):
        way = choose_fetch(wanted, geometry(), 8, cached=False)
        assert way.arena is None
        assert way.notice is None


def test_a_gpu_where_it_fails_says_so(monkeypatch):
    monkeypatch.setattr(direct, "why_not_direct", lambda g: "the probe's first bytes changed")
    with compat.compiling_for("cuda"):
        way = choose_fetch("auto", geometry(), 8, cached=False)
    assert way.arena is None
    assert way.notice == (
        "fetch: staged, because direct does not work: the probe's first bytes changed"
    )


def test_memory_that_cannot_be_pinned_is_a_reason(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(direct, "why_not_direct", lambda g: None)
    monkeypatch.setattr(direct, "PinnedArena", refuse)
    with pytest.raises(NotImplementedError, match="bytes of host memory cannot be pinned"):
        choose_fetch("direct", geometry(), 8, cached=False)
    with pytest.raises(NotImplementedError, match="no page is in DRAM"):
        choose_fetch("direct", geometry(), 0, cached=False)


def test_direct_is_taken_where_it_works(monkeypatch):
    monkeypatch.setattr(direct, "why_not_direct", lambda g: None)
    monkeypatch.setattr(
        direct, "PinnedArena", lambda g, rows: PinnedArena(g, rows, memory_kind=KIND)
    )
    way = choose_fetch("auto", geometry(), 8, cached=False)
    assert way.arena is not None
    assert way.arena.arrays[0].shape == (8, 2 * CHUNK * DIM)
