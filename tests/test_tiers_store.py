"""The store: bytes that went in come out, from every tier, inside every budget."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvdrive_jax.config import TierConfig
from kvdrive_jax.telemetry import BudgetError, Ledger, Traffic
from kvdrive_jax.tiers import FetchCount, PageGeometry, PageStore, SessionPages
from kvdrive_jax.tiers.cache import cache_bytes
from kvdrive_jax.tiers.extents import ExtentLayout

Array = np.ndarray[Any, Any]


def geometry(dtype: Any = np.float32, c: int = 4, d: int = 80, layers: int = 2) -> PageGeometry:
    return PageGeometry(layers=layers, kv_heads=3, chunk_size=c, head_dim=d, dtype=np.dtype(dtype))


def share(
    g: PageGeometry, capacity: int, part: float, extent: int = 5000, prompt: int | None = None
) -> int:
    """Bytes of DRAM for ``part`` of the pages, and the maps and hashes."""
    pairs = g.layers * g.kv_heads
    layout = ExtentLayout.plan(
        page_bytes=g.page_bytes,
        extent_bytes=extent,
        chunk_capacity=capacity,
        prompt_chunks=prompt,
        piece_chunks=64,
    )
    rows = cache_bytes(int(part * capacity), g.page_bytes)
    return pairs * (rows + 8 * capacity) + layout.hash_bytes(g.layers, g.kv_heads)


@contextmanager
def store_for(
    g: PageGeometry,
    path: Path | None,
    extent: int = 5000,
    options: dict[str, Any] | None = None,
    **budgets: int,
) -> Iterator[tuple[PageStore, Ledger, Traffic]]:
    ledger, traffic = Ledger(**budgets), Traffic()
    ssd_dir = None if path is None else str(path)
    tiers = TierConfig(ssd_dir=ssd_dir, extent_bytes=extent, **(options or {}))
    with PageStore(g, tiers, ledger, traffic) as store:
        yield store, ledger, traffic
    assert ledger.used("dram") == ledger.used("ssd") == 0
    assert ledger.accounts("dram") == ledger.accounts("ssd") == {}
    if path is not None:
        assert os.listdir(path) == []


def random_pages(rng: np.random.Generator, g: PageGeometry, n: int) -> list[Array]:
    """Any bytes at all, NaNs included, per layer [K, n, 2, c, D]."""
    shape = (g.kv_heads, n, *g.page_shape)
    count = int(np.prod(shape)) * g.dtype.itemsize
    return [
        np.frombuffer(rng.bytes(count), np.uint8).view(g.dtype).reshape(shape)
        for _ in range(g.layers)
    ]


def offload_all(
    session: SessionPages, pages: list[Array], n: int, rng: np.random.Generator
) -> None:
    heads = len(pages[0])
    for layer, layer_pages in enumerate(pages):
        clusters = rng.integers(0, max(1, n // 5), (heads, n)).astype(np.int32)
        importance = rng.random((heads, n)).astype(np.float32)
        session.offload(layer, layer_pages, n, clusters, importance)


def fetch_and_compare(
    store: PageStore,
    sessions: list[SessionPages],
    pages: list[list[Array]],
    stored: list[int],
    rng: np.random.Generator,
    m: int,
    *,
    ordered: bool = True,
) -> FetchCount:
    """Fetch m random pages of every layer and compare bit by bit; the counts of all layers."""
    g = store.geometry
    total = FetchCount(0, 0, 0)
    for layer in range(g.layers):
        row = rng.integers(0, len(sessions), m).astype(np.int32)
        row = np.sort(row) if ordered else row
        head = rng.integers(0, g.kv_heads, m).astype(np.int32)
        chunk = (rng.random(m) * np.array(stored)[row]).astype(np.int32)
        out = np.zeros((m + 3, *g.page_shape), g.dtype)
        count = store.fetch(layer, sessions, row, head, chunk, out)
        wanted = np.stack([pages[r][layer][h, j] for r, h, j in zip(row, head, chunk, strict=True)])
        np.testing.assert_array_equal(out[:m].view(np.uint8), wanted.view(np.uint8))
        assert not out[m:].view(np.uint8).any(), "bytes past the wanted pages were written"
        assert count.dram_pages + count.ssd_pages == m
        total = FetchCount(*(a + b for a, b in zip(total, count, strict=True)))
    return total


@pytest.mark.parametrize("part", [0.0, 0.1, 1.0], ids=["ssd", "tenth", "dram"])
@pytest.mark.parametrize(
    ("dtype", "c", "d"),
    [
        (np.float32, 4, 80),
        (np.float16, 8, 96),
        (ml_dtypes.bfloat16, 1, 64),
        (ml_dtypes.bfloat16, 4, 96),
        (np.float32, 1, 3),
    ],
)
def test_round_trip_is_bit_exact(
    tmp_path: Path, rng: np.random.Generator, dtype: Any, c: int, d: int, part: float
) -> None:
    g, n = geometry(dtype, c, d), 97
    with store_for(g, tmp_path) as (store, _, traffic):
        session = store.open(n, share(g, n, part), True, "one", prompt_chunks=n)
        pages = random_pages(rng, g, n + 5)  # padded rows must not matter
        offload_all(session, pages, n, rng)
        session.wait()
        count = fetch_and_compare(store, [session], [pages], [n], rng, 150)
        assert (count.ssd_pages == 0) == (part == 1.0)
        assert (count.dram_pages == 0) == (part == 0.0)
        moved = traffic.snapshot()
        assert moved["hbm_to_dram"] == g.layers * g.kv_heads * n * g.page_bytes
        assert moved["dram_to_ssd"] >= moved["hbm_to_dram"]
        assert moved["ssd_to_dram"] == count.ssd_bytes_read
        assert moved["dram_to_hbm"] == 0


@pytest.mark.parametrize("n", [1, 2, 3, 6, 7, 50])
def test_ragged_counts(tmp_path: Path, rng: np.random.Generator, n: int) -> None:
    g = geometry()
    with store_for(g, tmp_path) as (store, _, _):
        session = store.open(50, share(g, 50, 0.06), True, "one")
        pages = random_pages(rng, g, 50)
        offload_all(session, pages, n, rng)
        fetch_and_compare(store, [session], [pages], [n], rng, 40)


def test_zeros_are_stored_as_well(tmp_path: Path, rng: np.random.Generator) -> None:
    g = geometry()
    with store_for(g, tmp_path) as (store, _, _):
        session = store.open(20, share(g, 20, 0), True, "zeros", prompt_chunks=20)
        pages = [np.zeros((3, 20, *g.page_shape), np.float32) for _ in range(2)]
        offload_all(session, pages, 20, rng)
        assert fetch_and_compare(store, [session], [pages], [20], rng, 40).ssd_pages == 80


def test_dram_holds_the_most_important_chunks(tmp_path: Path, rng: np.random.Generator) -> None:
    g, n = geometry(), 40
    with store_for(g, tmp_path, options={"sync": "hierarchical"}) as (store, _, _):
        session = store.open(n, share(g, n, 0.25), True, "one", prompt_chunks=n)
        assert session.plan.rows == 10
        importance = np.stack([rng.permutation(n) for _ in range(3)]).astype(np.float32)
        for layer, pages in enumerate(random_pages(rng, g, n)):
            session.offload(layer, pages, n, None, importance)
        out = np.zeros((n, *g.page_shape), np.float32)
        for head in range(3):
            ranked = np.argsort(-importance[head]).astype(np.int32)
            heads = np.full(n, head, np.int32)
            row = np.zeros(n, np.int32)
            best = store.fetch(1, [session], row[:10], heads[:10], ranked[:10], out)
            assert best == FetchCount(10, 0, 0)
            rest = store.fetch(1, [session], row[10:], heads[10:], ranked[10:], out)
            assert rest[:2] == (0, 30)


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("flush", [3, 9, 12])  # below, off and on the extent boundary (3 pages)
def test_append(tmp_path: Path, rng: np.random.Generator, part: float, flush: int) -> None:
    g, n, flushes = geometry(d=80), 31, 4
    capacity = n + flush * flushes
    with store_for(g, tmp_path, extent=3 * g.page_bytes + 100) as (store, _, _):
        session = store.open(
            capacity, share(g, capacity, part), True, "one", prompt_chunks=n, piece_chunks=flush
        )
        pages = random_pages(rng, g, capacity)
        offload_all(session, pages, n, rng)
        stored = n
        for _ in range(flushes):
            for layer in range(g.layers):
                # One more than are new: the flush buffer of the caller is padded.
                new = pages[layer][:, stored : stored + flush + 1]
                session.append(layer, new, stored, flush)
            stored += flush
            assert session.stored(0) == stored
            fetch_and_compare(store, [session], [pages], [stored], rng, 60)
        with pytest.raises(ValueError, match="capacity"):
            session.append(0, pages[0][:, :1], stored, 1)


def test_appended_chunks_are_in_dram_and_the_least_important_leave(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    g, n = geometry(layers=1), 10
    with store_for(g, tmp_path) as (store, _, _):
        session = store.open(40, share(g, 40, 0.3), True, "one", prompt_chunks=n, piece_chunks=6)
        assert session.plan.rows == 12
        pages = random_pages(rng, g, 40)
        importance = np.tile(np.arange(n, dtype=np.float32), (3, 1))
        session.offload(0, pages[0], n, None, importance)
        session.wait()
        session.append(0, pages[0][:, n : n + 6], n, 6)
        out = np.zeros((3 * 16, *g.page_shape), np.float32)
        head = np.repeat(np.arange(3, dtype=np.int32), 6)
        new = np.tile(np.arange(n, n + 6, dtype=np.int32), 3)
        assert store.fetch(0, [session], head * 0, head, new, out)[:2] == (18, 0)
        # 30 prompt pages and 18 new ones in 36 rows: the four least important of each head left.
        old = np.tile(np.arange(n, dtype=np.int32), 3)
        head = np.repeat(np.arange(3, dtype=np.int32), n)
        kept = old >= 4
        found = store.fetch(0, [session], head[kept] * 0, head[kept], old[kept], out)
        assert found[:2] == (18, 0)
        assert store.fetch(0, [session], head * 0, head, old, out)[:2] == (18, 12)


def test_an_append_larger_than_a_piece_and_one_too_many(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    g = geometry(layers=1)
    with store_for(g, tmp_path) as (store, _, _):
        session = store.open(40, share(g, 40, 0), True, "one", prompt_chunks=8, piece_chunks=8)
        pages = random_pages(rng, g, 40)
        offload_all(session, pages, 8, rng)
        session.append(0, pages[0][:, 8:28], 8, 20)
        fetch_and_compare(store, [session], [pages], [28], rng, 60)
        session.append(0, pages[0][:, 28:29], 28, 1)
        with pytest.raises(ValueError, match="piece_chunks"):
            session.append(0, pages[0][:, 29:30], 29, 1)


def test_without_an_ssd_tier(rng: np.random.Generator) -> None:
    g, n = geometry(ml_dtypes.bfloat16), 33
    with store_for(g, None) as (store, ledger, traffic):
        session = store.open(n + 7, None, False, "one")
        pages = random_pages(rng, g, n + 7)
        offload_all(session, pages, n, rng)
        for layer in range(g.layers):
            session.append(layer, pages[layer][:, n:], n, 7)
        fetch_and_compare(store, [session], [pages], [n + 7], rng, 80)
        assert traffic.snapshot()["dram_to_ssd"] == 0
        assert ledger.used("ssd") == 0
        with pytest.raises(ValueError, match="ssd_dir"):
            store.open(n, None, True, "two")


@pytest.mark.parametrize("ordered", [True, False])
def test_a_batch_of_sessions_of_different_lengths_and_tiers(
    tmp_path: Path, rng: np.random.Generator, ordered: bool
) -> None:
    g, lengths = geometry(np.float16), [5, 71, 30, 1]
    with store_for(g, tmp_path) as (store, _, _):
        sessions, pages = [], []
        for i, n in enumerate(lengths):
            part = (0.1, 1.0, 0.0, 1.0)[i]
            session = store.open(n, share(g, n, part), i != 3, f"s{i}", prompt_chunks=n)
            pages.append(random_pages(rng, g, n))
            offload_all(session, pages[-1], n, rng)
            sessions.append(session)
        for m in (1, 7, 90):
            fetch_and_compare(store, sessions, pages, lengths, rng, m, ordered=ordered)
        sessions[1].close()
        fetch_and_compare(store, [sessions[0], sessions[2]], [pages[0], pages[2]], [5, 30], rng, 20)


def test_reads_larger_than_the_buffer_go_in_rounds(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    g, n = geometry(layers=1, d=8), 700
    with store_for(g, tmp_path, extent=g.page_bytes) as (store, _, _):
        least = share(g, n, 0, g.page_bytes, n)
        session = store.open(n, least, True, "one", prompt_chunks=n)
        extents = session.plan.read_buffer_bytes // g.page_bytes
        assert extents < 3 * n / 4, "the test needs several rounds"
        pages = random_pages(rng, g, n)
        offload_all(session, pages, n, rng)
        head = np.repeat(np.arange(3, dtype=np.int32), n)
        chunk = np.tile(np.arange(n, dtype=np.int32), 3)
        out = np.zeros((3 * n, *g.page_shape), np.float32)
        count = store.fetch(0, [session], np.zeros(3 * n, np.int32), head, chunk, out)
        np.testing.assert_array_equal(
            out.view(np.uint8), pages[0].reshape(out.shape).view(np.uint8)
        )
        assert count == FetchCount(0, 3 * n, 3 * n * g.page_bytes)


def test_an_extent_is_read_once_for_all_its_pages(tmp_path: Path, rng: np.random.Generator) -> None:
    g, n = geometry(layers=1), 24
    with store_for(g, tmp_path, extent=4 * g.page_bytes) as (store, _, _):
        session = store.open(n, share(g, n, 0), True, "one", prompt_chunks=n)
        pages = random_pages(rng, g, n)
        session.offload(0, pages[0], n, np.tile(np.arange(n) % 6, (3, 1)), None)
        out = np.zeros((8, *g.page_shape), np.float32)
        # Clusters 2 and 3: chunks 2, 8, 14, 20 and 3, 9, 15, 21, each just one extent.
        chunk = np.array([20, 3, 2, 14, 8, 21, 9, 15], np.int32)
        zero = np.zeros(8, np.int32)
        count = store.fetch(0, [session], zero, zero, chunk, out)
        assert count == FetchCount(0, 8, 8 * g.page_bytes)


def test_submitted_fetches_run_on_workers_and_hold_their_session_open(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    g, n = geometry(), 60
    with store_for(g, tmp_path) as (store, _, _):
        session = store.open(n, share(g, n, 0.2), True, "one", prompt_chunks=n)
        pages = random_pages(rng, g, n)
        offload_all(session, pages, n, rng)
        jobs = []
        for layer in [0, 1] * 10:
            head = rng.integers(0, 3, 30).astype(np.int32)
            chunk = rng.integers(0, n, 30).astype(np.int32)
            out = np.zeros((30, *g.page_shape), np.float32)
            row = np.zeros(30, np.int32)
            future = store.submit_fetch(layer, [session], row, head, chunk, out)
            jobs.append((future, pages[layer][head, chunk], out))
        session.close()
        for future, wanted, out in jobs:
            assert sum(future.result()[:2]) == 30
            np.testing.assert_array_equal(out.view(np.uint8), wanted.view(np.uint8))
        bad = store.submit_fetch(0, [session], row, head, chunk, out)
        assert isinstance(bad.exception(), RuntimeError)


def test_wide_ids_are_accepted_and_nothing_is_fetched_for_none(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    g = geometry(layers=1)
    with store_for(g, None) as (store, _, _):
        session = store.open(9, None, False, "one")
        pages = random_pages(rng, g, 9)
        offload_all(session, pages, 9, rng)
        out = np.zeros((2, *g.page_shape), np.float32)
        ids = np.array([1, 2], np.int64)
        store.fetch(0, [session], ids * 0, ids, ids, out)
        np.testing.assert_array_equal(out.view(np.uint8), pages[0][ids, ids].view(np.uint8))
        none = np.zeros(0, np.int32)
        assert store.fetch(0, [session], none, none, none, out) == FetchCount(0, 0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": [9]}, "chunks 0..8"),
        ({"chunk": [-1]}, "chunks 0..8"),
        ({"head": [3]}, "kv heads 0..2"),
        ({"head": [-1]}, "kv heads 0..2"),
        ({"row": [1]}, "row must be in 0..0"),
        ({"row": [-1]}, "row must be in 0..0"),
        ({"chunk": [2**32]}, "chunk must fit int32"),
        ({"chunk": [0.5]}, "chunk must be integer"),
        ({"head": [0, 0]}, r"head must be integer \[1\]"),
        ({"out": np.zeros((0, 2, 4, 80), np.float32)}, "out must be"),
        ({"out": np.zeros((1, 2, 4, 80), np.float64)}, "out must be"),
        ({"out": np.zeros((1, 2, 80, 4), np.float32)}, "out must be"),
        ({"out": np.zeros((1, 2, 4, 160), np.float32)[..., ::2]}, "out must be"),
    ],
)
def test_bad_fetches_are_named(
    rng: np.random.Generator, change: dict[str, Any], message: str
) -> None:
    g = geometry()
    with store_for(g, None) as (store, _, _):
        session = store.open(20, None, False, "one")
        offload_all(session, random_pages(rng, g, 9), 9, rng)
        values: dict[str, Any] = {name: np.zeros(1, np.int32) for name in ("row", "head", "chunk")}
        values["out"] = np.zeros((1, *g.page_shape), np.float32)
        values |= {
            key: np.array(value) if isinstance(value, list) else value
            for key, value in change.items()
        }
        with pytest.raises(ValueError, match=message):
            store.fetch(0, [session], **values)


def test_bad_offloads_are_named(tmp_path: Path, rng: np.random.Generator) -> None:
    g = geometry()
    with store_for(g, tmp_path) as (store, _, _):
        session = store.open(20, None, True, "one", prompt_chunks=12)
        pages = random_pages(rng, g, 20)[0]
        with pytest.raises(ValueError, match="pages must be"):
            session.offload(0, pages[:2], 5, None, None)
        with pytest.raises(ValueError, match="pages must be"):
            session.offload(0, pages.view(np.int32), 5, None, None)
        with pytest.raises(ValueError, match=r"n_chunks must be in 0\.\.12"):
            session.offload(0, pages, 13, None, None)
        with pytest.raises(ValueError, match="importance must be"):
            session.offload(0, pages, 5, None, np.zeros((3, 4), np.float32))
        with pytest.raises(ValueError, match="layer"):
            session.offload(2, pages, 5, None, None)
        session.offload(0, pages, 5, None, None)
        with pytest.raises(ValueError, match="offloaded already"):
            session.offload(0, pages, 5, None, None)
        with pytest.raises(ValueError, match="must follow the 5 stored"):
            session.append(0, pages, 6, 1)


def test_budgets_are_enforced_before_anything_is_made(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    g, n = geometry(layers=12), 100
    everything = 36 * n * g.page_bytes
    with store_for(g, tmp_path, dram=everything // 2) as (store, ledger, _):
        with pytest.raises(BudgetError, match="no SSD tier"):
            store.open(n, None, False, "one")
        with pytest.raises(BudgetError, match="DRAM budget"):
            store.open(n, everything // 2, True, "one")
        assert ledger.accounts("dram") == ledger.accounts("ssd") == {}
    with store_for(g, tmp_path, ssd=everything) as (store, ledger, _):
        with pytest.raises(BudgetError, match="SSD budget"):
            store.open(n, share(g, n, 0.1), True, "one", prompt_chunks=n)
        assert ledger.accounts("dram") == ledger.accounts("ssd") == {}
        assert os.listdir(next(tmp_path.iterdir())) == ["lock"]
    with store_for(g, tmp_path, dram=everything, ssd=2 * everything) as (store, ledger, _):
        session = store.open(n, None, True, "one", prompt_chunks=n)
        assert 0 < session.plan.rows < n, "None takes what the budget has left"
        pages = random_pages(rng, g, n)
        offload_all(session, pages, n, rng)
        fetch_and_compare(store, [session], [pages], [n], rng, 90)
        assert ledger.peak("dram") <= everything
        left = everything - ledger.used("dram")
        assert left < 36 * g.page_bytes, "but a row may be left over"


def test_what_is_on_disk_stays_inside_the_reservation(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    for prompt, flush, extent in ((100, 7, 5000), (1, 1, 100_000), (300, 64, 2560)):
        g, capacity = geometry(), prompt + 3 * flush
        with store_for(g, tmp_path, extent=extent) as (store, ledger, _):
            session = store.open(
                capacity, share(g, capacity, 0), True, "s", prompt_chunks=prompt, piece_chunks=flush
            )
            pages = random_pages(rng, g, capacity)
            offload_all(session, pages, prompt, rng)
            for start in range(prompt, capacity, flush):
                for layer in range(g.layers):
                    session.append(layer, pages[layer][:, start : start + flush], start, flush)
            session.wait()
            paths = [p for p in tmp_path.rglob("*") if p.parent != tmp_path]
            disk = sum(p.stat().st_blocks * 512 for p in paths)
            assert 0 < disk <= ledger.used("ssd")


def test_offload_waits_while_too_much_is_in_flight(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    g, n = geometry(layers=3), 30
    gate, peak = threading.Event(), [0]
    with store_for(g, tmp_path) as (store, _, traffic):
        session = store.open(n, share(g, n, 0.1), True, "one", prompt_chunks=n)
        original = session._store_prompt

        def slow(*args: Any) -> None:
            gate.wait(20)
            original(*args)

        monkeypatch.setattr(session, "_store_prompt", slow)
        pages = random_pages(rng, g, n)
        session.offload(0, pages[0], n, None, None)  # one layer may be in flight
        second = threading.Thread(target=session.offload, args=(1, pages[1], n, None, None))
        second.start()
        second.join(0.2)
        assert second.is_alive(), "the second layer must wait for the first"
        peak[0] = traffic.snapshot()["dram_to_ssd"]
        gate.set()
        second.join()
        session.offload(2, pages[2], n, None, None)
        session.wait()
        assert peak[0] == 0
        fetch_and_compare(store, [session], [pages], [n], rng, 30)


def test_many_sessions_in_a_row_leave_nothing(tmp_path: Path, rng: np.random.Generator) -> None:
    g, n = geometry(layers=1, d=8), 20
    with store_for(g, tmp_path, dram=200_000, ssd=2_000_000) as (store, ledger, _):
        fds = Path("/proc/self/fd")
        counts = []
        for i in range(30):
            session = store.open(n, share(g, n, 0.3), True, "again", prompt_chunks=n)
            pages = random_pages(rng, g, n)
            offload_all(session, pages, n, rng)
            if i % 2:
                fetch_and_compare(store, [session], [pages], [n], rng, 10)
            session.close()
            session.close()
            assert ledger.used("dram") == ledger.used("ssd") == 0
            counts.append(len(list(fds.iterdir())) if fds.exists() else 0)
        assert counts[-1] <= counts[1]
        with pytest.raises(RuntimeError, match="is closed"):
            session.wait()
