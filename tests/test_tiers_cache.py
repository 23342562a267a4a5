"""DRAM as a cache of what is on SSD: right bytes, the least worth leaves, what is needed comes."""

from __future__ import annotations

import concurrent.futures as futures
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrive_jax.config import TierConfig
from kvdrive_jax.telemetry import Ledger, Traffic
from kvdrive_jax.tiers import FetchCount, PageError, PageGeometry, PageStore, SessionPages, reader
from kvdrive_jax.tiers.cache import DramCache, cache_bytes
from kvdrive_jax.tiers.extents import ExtentLayout
from kvdrive_jax.tiers.link import Link
from kvdrive_jax.tiers.pages import page_rows
from kvdrive_jax.tiers.precision import PageFormat, transcode

Array = np.ndarray[Any, Any]
GEOMETRY = PageGeometry(layers=2, kv_heads=2, chunk_size=2, head_dim=4, dtype=np.dtype("f4"))
PAGE = GEOMETRY.page_bytes
CAPACITY = 6
KEYS = GEOMETRY.layers * GEOMETRY.kv_heads * CAPACITY


def bytes_of(key: Array) -> Array:
    """The page of each chunk, told from its number."""
    return np.repeat(np.asarray(key, np.int64)[:, None], PAGE // 8, axis=1).view(np.uint8)


def held_keys(cache: DramCache) -> set[int]:
    return set(np.flatnonzero(cache.holds(np.arange(KEYS))).tolist())


def check_taken(cache: DramCache, key: Array) -> Array:
    """Which of ``key`` are not there; the others' bytes are right."""
    target = np.full((len(key), PAGE), 255, np.uint8)
    absent = cache.take(key, target)
    here = np.setdiff1d(np.arange(len(key)), absent)
    np.testing.assert_array_equal(target[here], bytes_of(key[here]))
    return absent


class Model:
    """What a cache of so many rows to a group may do, with a dictionary of what each is worth."""

    def __init__(self, rows: int, pooled: bool, scored: bool) -> None:
        self.cache = DramCache(GEOMETRY, CAPACITY, rows, pooled=pooled, scored=scored)
        self.pooled, self.scored, self.step = pooled, scored, 0
        self.rows = rows * (KEYS // CAPACITY if pooled else 1)
        self.worth: dict[int, float] = {}

    def group(self, key: int) -> int:
        return 0 if self.pooled else key // CAPACITY

    def arrive(self, keys: list[int], worth: dict[int, float]) -> None:
        """After ``keys`` were handed in: what came, and what left for it."""
        before, after = self.worth, held_keys(self.cache)
        assert after <= set(before) | set(keys)
        for group in {self.group(key) for key in keys}:
            asked = [key for key in keys if self.group(key) == group]
            old = {key: w for key, w in before.items() if self.group(key) == group}
            new = set(asked) - set(old)
            left = set(old) - after
            if len(asked) <= self.rows:
                assert new <= after, "there was room, once others leave"
            came = new & after
            # As few as must; a chunk that comes twice may cost two.
            twice = sum(key in came for key in asked) - len(came)
            over = len(old) + len(came) - self.rows
            assert max(0, over) <= len(left) <= max(0, over + twice)
            stay = set(old) - left
            if left and stay:
                assert max(old[k] for k in left) <= min(old[k] for k in stay), "others first"
        assert set(before) - after <= {k for k in before if self.group(k) in map(self.group, keys)}
        self.worth = {key: before.get(key, worth.get(key, 0.0)) for key in after}

    def put(self, pair: int, chunks: list[int]) -> None:
        key = np.array([pair * CAPACITY + chunk for chunk in chunks if pair * CAPACITY + chunk
                        not in self.worth], np.int64)  # fmt: skip
        worth = 1 - (np.arange(len(key)) + 1) / (len(key) + 1)
        self.cache.put(key, bytes_of(key), np.arange(len(key)), worth)
        told = worth - 1 if self.scored else worth * 0 - 1
        self.arrive(key.tolist(), dict(zip(key.tolist(), told.tolist(), strict=True)))

    def install(self, keys: list[int]) -> None:
        key = np.array(keys, np.int64)
        self.cache.install(key, bytes_of(key))
        self.arrive(keys, dict.fromkeys(keys, self.step))

    def take(self, keys: list[int]) -> None:
        absent = check_taken(self.cache, np.array(keys, np.int64))
        assert [i for i, key in enumerate(keys) if key not in self.worth] == absent.tolist()
        self.worth |= {key: self.step for key in keys if key in self.worth}

    def rank(self, keys: list[int]) -> None:
        missing = self.cache.rank(np.array(keys, np.int64))
        assert missing.tolist() == [key for key in keys if key not in self.worth]
        if self.scored:
            self.worth |= {key: self.step for key in keys if key in self.worth}

    def advance(self) -> None:
        self.cache.advance()
        self.step += 1

    def check(self) -> None:
        assert held_keys(self.cache) == set(self.worth)
        assert self.cache.pages == len(self.worth), "a chunk has one row"
        counts = np.bincount([self.group(key) for key in self.worth], minlength=1)
        assert counts.max() <= self.rows
        assert check_taken(self.cache, np.array(sorted(self.worth), np.int64)).tolist() == []
        self.worth = dict.fromkeys(self.worth, self.step)


def keys_of(layer: int | None, unique: bool) -> st.SearchStrategy[list[int]]:
    size = KEYS // GEOMETRY.layers
    low, high = (0, KEYS - 1) if layer is None else (layer * size, (layer + 1) * size - 1)
    return st.lists(st.integers(low, high), min_size=1, max_size=9, unique=unique)


def operations(unique: bool) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    chunks = st.lists(st.integers(0, CAPACITY - 1), min_size=1, unique=True)
    layers = keys_of(0, unique) | keys_of(1, unique)
    one = st.one_of(
        st.tuples(st.just("put"), st.integers(0, 3), chunks),
        st.tuples(st.just("install"), layers),
        st.tuples(st.just("take"), keys_of(None, False)),
        st.tuples(st.just("rank"), keys_of(None, True)),
        st.tuples(st.just("advance")),
    )
    return st.lists(one, max_size=25)


def run(rows: int, pooled: bool, scored: bool, steps: list[tuple[Any, ...]], every: int) -> None:
    model = Model(rows, pooled, scored)
    for i, (name, *args) in enumerate(steps):
        getattr(model, name)(*args)
        assert held_keys(model.cache) == set(model.worth)
        if i % every == 0:
            model.check()
    model.check()


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 5), st.booleans(), st.booleans(), operations(True), st.integers(2, 9))
def test_a_cache_holds_what_is_worth_most(
    rows: int, pooled: bool, scored: bool, steps: list[tuple[Any, ...]], every: int
) -> None:
    run(rows, pooled, scored, steps, every)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 5), st.booleans(), operations(False), st.integers(2, 9))
def test_a_chunk_that_comes_twice_at_once_has_one_row(
    rows: int, pooled: bool, steps: list[tuple[Any, ...]], every: int
) -> None:
    run(rows, pooled, True, steps, every)


@pytest.mark.parametrize("scored", [True, False], ids=["ranked", "lru"])
def test_many_leave_at_once_and_they_are_the_least(scored: bool) -> None:
    """A group of more than 32 rows: more leave than must, so that the search is paid rarely."""
    cache = DramCache(GEOMETRY, 400, 50, pooled=True, scored=scored)
    rows = 200
    for step in range(rows):
        cache.install(np.array([step], np.int64), bytes_of(np.array([step])))
        cache.advance()
    cache.take(np.arange(10), np.zeros((10, PAGE), np.uint8))
    assert not len(cache.rank(np.arange(10, 20)))
    cache.install(np.array([900], np.int64), bytes_of(np.array([900])))
    gone = np.flatnonzero(~cache.holds(np.arange(rows)))
    first = 20 if scored else 10
    assert gone.tolist() == list(range(first, first + len(gone)))
    assert 1 <= len(gone) <= rows // 32


@pytest.mark.parametrize("pooled", [True, False])
def test_threads_never_hand_out_wrong_bytes(pooled: bool) -> None:
    cache = DramCache(GEOMETRY, CAPACITY, 3, pooled=pooled, scored=True)
    end = time.monotonic() + 0.5

    def work(seed: int) -> int:
        rng, done = np.random.default_rng(seed), 0
        while time.monotonic() < end:
            key = rng.permutation(KEYS)[: rng.integers(1, 9)]
            absent = check_taken(cache, key)
            layer = rng.integers(0, 2) * 12
            mine = key[absent]
            mine = mine[(mine >= layer) & (mine < layer + 12)]
            cache.install(mine, bytes_of(mine))
            cache.rank(rng.permutation(KEYS)[:5])
            if seed == 0:
                cache.advance()
            done += 1
        return done

    with futures.ThreadPoolExecutor(4) as pool:
        assert all(done > 20 for done in pool.map(work, range(4)))
    held = np.array(sorted(held_keys(cache)))
    assert check_taken(cache, held).tolist() == []
    assert cache.pages == len(held) <= 12
    if not pooled:
        assert np.bincount(held // CAPACITY).max() <= 3


def test_numbers_of_chunks_past_32_bits() -> None:
    # The map of such a cache is 8 GiB: only the arithmetic is asked for.
    cache = DramCache.__new__(DramCache)
    cache._heads, cache._capacity = 8, 2**27  # type: ignore[misc]
    key = cache.key(35, np.array([7, 0], np.int32), np.array([2**27 - 1, 5], np.int32))
    assert key.dtype == np.int64
    assert key.tolist() == [36 * 8 * 2**27 - 1, 35 * 8 * 2**27 + 5]
    assert int(cache.key(35, 7, np.array([1], np.int32))[0]) == (35 * 8 + 7) * 2**27 + 1


# The store around it


def share(
    g: PageGeometry,
    capacity: int,
    rows: int,
    extent: int,
    prompt: int | None = None,
    piece: int = 64,
) -> int:
    """Bytes of DRAM for ``rows`` pages of each (layer, kv head), maps and hashes."""
    pairs = g.layers * g.kv_heads
    layout = ExtentLayout.plan(
        page_bytes=g.ssd_page_bytes,
        extent_bytes=extent,
        chunk_capacity=capacity,
        prompt_chunks=prompt,
        piece_chunks=piece,
    )
    return (
        pairs * (cache_bytes(rows, g.dram_page_bytes) + 8 * capacity)
        + layout.hash_bytes(g.layers, g.kv_heads)
        + 1
    )


@contextmanager
def store_for(
    path: Path,
    g: PageGeometry = GEOMETRY,
    extent: int = 2 * PAGE,
    workers: int = 2,
    link: Link | None = None,
    **options: Any,
) -> Iterator[tuple[PageStore, Traffic]]:
    ledger, traffic = Ledger(), Traffic()
    tiers = TierConfig(ssd_dir=str(path), extent_bytes=extent, **options)
    with PageStore(g, tiers, ledger, traffic, workers=workers, link=link) as store:
        yield store, traffic
    assert ledger.accounts("dram") == ledger.accounts("ssd") == {}
    assert list(path.iterdir()) == []


def values(seed: int, n: int, g: PageGeometry = GEOMETRY) -> list[Array]:
    rng = np.random.default_rng(seed)
    shape = (g.kv_heads, n, *g.page_shape)
    return [rng.standard_normal(shape).astype(g.dtype) for _ in range(g.layers)]


def open_session(
    store: PageStore, name: str, pages: list[Array], rows: int, extent: int = 2 * PAGE
) -> SessionPages:
    """All of it prompt; DRAM begins with the first ``rows`` chunks of each head."""
    n = pages[0].shape[1]
    part = share(store.geometry, n, rows, extent, n)
    session = store.open(n, part, True, name, prompt_chunks=n)
    assert session.plan.rows == rows
    for layer, part_of_layer in enumerate(pages):
        session.offload(layer, part_of_layer, n, None, None)
    session.wait()
    return session


def fetch(
    store: PageStore, session: SessionPages, layer: int, head: Any, chunk: Any, pages: list[Array]
) -> FetchCount:
    """Fetch and compare."""
    chunk = np.atleast_1d(np.asarray(chunk, np.int32))
    head = np.broadcast_to(np.asarray(head, np.int32), chunk.shape)
    out = np.zeros((len(chunk), *store.geometry.dram_shape), store.geometry.dram_dtype)
    count = store.fetch(layer, [session], np.zeros_like(chunk), head, chunk, out)
    np.testing.assert_array_equal(out, pages[layer][head, chunk])
    return count


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never comes"
        time.sleep(0.002)


def likely(*heads: list[int]) -> Array:
    """[K, M] with -1 for none."""
    most = max(map(len, heads))
    return np.array([row + [-1] * (most - len(row)) for row in heads], np.int32)


@pytest.mark.parametrize("dram_eviction", ["ranked", "lru"])
@pytest.mark.parametrize("sync", ["adaptive", "hierarchical"])
def test_what_ranked_close_is_read_ahead(tmp_path: Path, sync: str, dram_eviction: str) -> None:
    pages = values(0, 20)
    options = {"sync": sync, "dram_eviction": dram_eviction}
    with store_for(tmp_path, **options) as (store, traffic):
        session = open_session(store, "one", pages, 8)
        store.begin_step()
        ids = likely([15, 2, 17, 19], [12])
        for layer in (1, 0):
            store.rank(layer, [session, None], np.stack([ids, ids * 0 - 1]))
            until(lambda n=4 * (2 - layer): traffic.pages()["ahead"] == n)
            assert fetch(store, session, layer, [0, 0, 0, 0, 1], [15, 2, 17, 19, 12], pages) == (
                FetchCount(5, 0, 0)
            )
            assert session.in_dram(layer)[0, [15, 2, 17, 19]].all()
        store.poll()


def test_what_is_stored_is_read_ahead_without_a_fetch_before(tmp_path: Path) -> None:
    """As after a flush, in steps that miss nothing: all is written, and nobody has waited."""
    pages = values(0, 20)
    with store_for(tmp_path) as (store, traffic):
        session = store.open(20, share(GEOMETRY, 20, 8, 2 * PAGE, 20), True, "one",
                             prompt_chunks=20)  # fmt: skip
        session.offload(0, pages[0], 20, None, None)
        futures.wait(session._pending[0])
        session.rank(0, likely([15], [12]))
        until(lambda: traffic.pages()["ahead"] == 2, 4)


def test_nothing_piles_up_behind_a_slow_disk(tmp_path: Path) -> None:
    g = PageGeometry(layers=3, kv_heads=1, chunk_size=2, head_dim=4, dtype=np.dtype("f4"))
    pages = values(0, 30, g)
    link = Link(1e9)
    with store_for(tmp_path, g, workers=1, link=link) as (store, _):
        session = open_session(store, "one", pages, 10)
        fetch(store, session, 1, 0, 3, pages)
        link.bytes_per_s = 2 * PAGE / 0.3  # 0.3 s for an extent
        session.rank(0, likely([29]))
        outstanding = 0
        for step in range(300):
            store.begin_step()
            for layer in (1, 2):
                session.rank(layer, likely([20 + step % 10]))
                outstanding = max(outstanding, store._fetchers._work_queue.qsize())
                # What is needed is in DRAM and does not wait for the disk.
                assert fetch(store, session, layer, 0, step % 5, pages) == FetchCount(1, 0, 0)
        link.bytes_per_s = 1e9
        fetch(store, session, 0, 0, [29, 28, 3], pages)
        assert outstanding <= 4, "jobs that were given up are kept in the queue"


def test_reading_ahead_is_left_out_while_enough_is_under_way(tmp_path: Path) -> None:
    g = PageGeometry(layers=8, kv_heads=1, chunk_size=2, head_dim=4, dtype=np.dtype("f4"))
    pages = values(0, 30, g)
    link = Link(1e9)
    with store_for(tmp_path, g, workers=2, link=link) as (store, traffic):
        session = open_session(store, "one", pages, 10)
        link.bytes_per_s = 2 * PAGE / 0.05
        for layer in range(8):
            session.rank(layer, likely([20]))
        assert store._reading_ahead <= 4
        # The last layers were left out, and come when they are asked for.
        for layer in (7, 0, 5, 1, 6, 3, 2, 4):
            fetch(store, session, layer, 0, [20, 29], pages)
        assert traffic.pages()["ahead"] <= 4


def test_a_session_closes_while_it_is_read_ahead(tmp_path: Path) -> None:
    pages = values(0, 20)
    link = Link(1e9)
    with store_for(tmp_path, link=link) as (store, _):
        session, other = (open_session(store, name, pages, 8) for name in ("one", "two"))
        link.latency_s = 0.1
        for layer in (0, 1):
            for each in (session, other):
                each.rank(layer, likely([15], [16]))
        until(lambda: link._free > 0)
        session.close()
        with pytest.raises(RuntimeError, match="is closed"):
            fetch(store, session, 0, 0, 15, pages)
        session.rank(0, likely([15], [16]))  # of no consequence
        fetch(store, other, 0, [0, 1], [15, 16], pages)
        store.poll()


def test_no_read_ahead_outlives_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranked again just when a fetch of the layer has waited for what was read ahead."""
    pages = values(0, 20)
    link = Link(1e9)
    with store_for(tmp_path, link=link) as (store, _):
        session = open_session(store, "one", pages, 8)
        wait, late = futures.wait, []

        def wait_and_rank(jobs: Any) -> Any:
            # Another thread's call, put where the race would have it.
            done = wait(jobs)
            monkeypatch.setattr(reader, "futures", futures)
            session.rank(0, likely([18], [18]))
            late.append(session._reader._ahead[0])
            return done

        link.latency_s = 0.1
        session.rank(0, likely([15], [16]))
        until(lambda: session._reader._ahead[0].running())
        monkeypatch.setattr(reader, "futures", SimpleNamespace(wait=wait_and_rank))
        fetch(store, session, 0, 0, 3, pages)
        until(lambda: late[0].running())
        session.close()
        assert late[0].done()
        store.poll()


@contextmanager
def damaged(tmp_path: Path) -> Iterator[tuple[PageStore, SessionPages, SessionPages, list[Array]]]:
    """Two sessions, the first of which has lost a file, and nothing said so yet."""
    pages = values(0, 20)
    with store_for(tmp_path) as (store, _):
        hurt, well = (open_session(store, name, pages, 8) for name in ("hurt", "well"))
        (path,) = tmp_path.glob("kvdrive-*/session-000000/prompt/1.0.0.0")
        path.unlink()
        hurt.rank(0, likely([15], [16]))
        hurt.rank(1, likely([15], [16]))
        until(lambda: hurt.failure is not None)
        yield store, hurt, well, pages


def test_a_read_ahead_that_fails_is_told_by_name(tmp_path: Path) -> None:
    with damaged(tmp_path) as (store, hurt, well, pages):
        with pytest.raises(PageError, match="session 'hurt', layer 1, head 0, extent 7"):
            store.poll()
        store.poll()
        with pytest.raises(PageError, match="the session failed"):
            fetch(store, hurt, 0, 0, 1, pages)
        hurt.rank(0, likely([15], [16]))
        well.rank(1, likely([15], [16]))
        for layer in (0, 1):
            fetch(store, well, layer, 0, range(20), pages)
        hurt.close()
        store.poll()


def test_a_read_ahead_that_fails_removes_its_sessions_files(tmp_path: Path) -> None:
    with damaged(tmp_path) as (store, _, well, pages):
        (path,) = tmp_path.glob("kvdrive-*")
        until(lambda: not (path / "session-000000").exists(), 4)
        until(lambda: not any("hurt" in name for name in store._ledger.accounts("ssd")), 4)
        fetch(store, well, 1, 0, range(20), pages)


def test_any_error_of_a_read_ahead_is_told(tmp_path: Path) -> None:
    pages = values(0, 20)
    with store_for(tmp_path) as (store, _):
        session = open_session(store, "one", pages, 8)

        def no_memory(rows: Array) -> Array:
            raise MemoryError("injected")

        session._reader._convert = no_memory
        session.rank(0, likely([15], [16]))
        until(lambda: store._reading_ahead == 0)
        with pytest.raises(PageError, match=r"session 'one'.*MemoryError: injected"):
            store.poll()


def test_layers_are_ranked_and_fetched_in_any_order(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    g = PageGeometry(layers=5, kv_heads=2, chunk_size=2, head_dim=4, dtype=np.dtype("f4"))
    pages = values(0, 40, g)
    with store_for(tmp_path, g, workers=3) as (store, traffic):
        sessions = [open_session(store, str(i), pages, 9) for i in range(2)]
        for _ in range(12):
            store.begin_step()
            for layer in rng.permutation(5).tolist():
                ids = np.stack([rng.permutation(40)[:6] for _ in range(4)]).reshape(2, 2, 6)
                ids[rng.random(ids.shape) < 0.2] = -1
                store.rank(layer, sessions, ids.astype(np.int32))
            for layer in rng.permutation(5).tolist():
                head, chunk = rng.integers(0, 2, 12), rng.integers(0, 40, 12)
                fetch(store, sessions[int(rng.integers(2))], layer, head, chunk, pages)
        store.poll()
        assert traffic.pages()["ahead"] > 0


@pytest.mark.parametrize("extent", [1, 1 << 20], ids=["page", "all"])
@pytest.mark.parametrize("dram_eviction", ["ranked", "lru"])
@pytest.mark.parametrize("sync", ["adaptive", "hierarchical", "blockwise", "layerwise"])
def test_all_ways_give_the_same_bytes(
    tmp_path: Path, rng: np.random.Generator, sync: str, dram_eviction: str, extent: int
) -> None:
    lengths, flush, flushes = (23, 1, 40), 7, 3
    options = {"sync": sync, "dram_eviction": dram_eviction}
    with store_for(tmp_path, extent=extent, **options) as (store, _):
        sessions, pages = [], []
        for i, n in enumerate(lengths):
            capacity = n + flush * flushes
            part = share(GEOMETRY, capacity, capacity // 4, extent, n, flush)
            session = store.open(capacity, part, True, str(i), prompt_chunks=n, piece_chunks=flush)
            pages.append(values(i, capacity))
            for layer in rng.permutation(2).tolist():
                clusters = rng.integers(0, 5, (2, n))
                importance = rng.random((2, n)).astype(np.float32)
                session.offload(layer, pages[i][layer], n, clusters, importance, [1, 0])
            sessions.append(session)
        stored = np.array(lengths)
        for flushed in range(flushes + 1):
            for _ in range(4):
                store.begin_step()
                for layer in rng.permutation(2).tolist():
                    row = rng.integers(0, 3, 25).astype(np.int32)
                    head = rng.integers(0, 2, 25).astype(np.int32)
                    chunk = (rng.random(25) * stored[row]).astype(np.int32)
                    out = np.zeros((25, *GEOMETRY.page_shape), np.float32)
                    store.fetch(layer, sessions, row, head, chunk, out)
                    for i in range(3):
                        mine = row == i
                        np.testing.assert_array_equal(
                            out[mine], pages[i][layer][head[mine], chunk[mine]]
                        )
                    ids = (rng.random((3, 2, 4)) * stored[:, None, None]).astype(np.int32)
                    store.rank(layer, sessions, ids)
            for session in sessions:
                for layer in (0, 1):
                    held = session.in_dram(layer).sum(axis=1)
                    if sync in ("blockwise", "layerwise"):
                        assert not held.any()
                    elif sync == "hierarchical":
                        assert held.max() <= session.plan.rows
            if flushed < flushes:
                for i, session in enumerate(sessions):
                    for layer in (1, 0):
                        new = pages[i][layer][:, stored[i] : stored[i] + flush]
                        session.append(layer, new, int(stored[i]), flush)
                stored = stored + flush
        store.poll()


def test_layerwise_reads_whole_layers(tmp_path: Path) -> None:
    pages = values(0, 27)
    with store_for(tmp_path, extent=4 * PAGE, sync="layerwise") as (store, _):
        part = share(GEOMETRY, 27, 5, 4 * PAGE, 21, 6)
        session = store.open(27, part, True, "one", prompt_chunks=21, piece_chunks=6)
        for layer in (0, 1):
            session.offload(layer, pages[layer], 21, None, None)
        # 21 chunks are 6 extents of each head; 6 more are 2.
        for extents in (6, 8):
            for chunk in ([3], [0, 8, 20], [20] * 9):
                count = fetch(store, session, 1, 1, chunk, pages)
                assert count == FetchCount(0, len(chunk), 2 * extents * 4 * PAGE)
            session.append(1, pages[1][:, 21:], 21, 6) if extents == 6 else None


def test_blockwise_keeps_nothing_and_reads_only_what_is_asked_for(tmp_path: Path) -> None:
    pages = values(0, 20)
    with store_for(tmp_path, sync="blockwise") as (store, traffic):
        part = share(GEOMETRY, 20, 8, 2 * PAGE, 20)
        session = store.open(20, part, True, "one", prompt_chunks=20)
        assert session.plan.rows == session.plan.slab_bytes == 0
        session.offload(0, pages[0], 20, None, None)
        for _ in range(3):
            assert fetch(store, session, 0, 1, [4, 5, 11], pages) == FetchCount(0, 3, 4 * PAGE)
            session.rank(0, likely([4], [5]))
        assert traffic.pages()["ahead"] == 0


def test_shares_stay_equal_or_go_where_the_misses_are(tmp_path: Path) -> None:
    pages = values(0, 20)
    for sync in ("hierarchical", "adaptive"):
        with store_for(tmp_path, sync=sync) as (store, _):
            session = open_session(store, "one", pages, 6)
            for layer in (0, 1):
                assert (session.in_dram(layer).sum(axis=1) == 6).all()
            for _ in range(3):
                store.begin_step()
                last = fetch(store, session, 1, 0, range(20), pages)
            held = [session.in_dram(layer).sum(axis=1).tolist() for layer in (0, 1)]
            if sync == "hierarchical":
                assert held == [[6, 6], [6, 6]]
                assert last.ssd_pages > 0
            else:
                assert held[1][0] == 20
                assert sum(map(sum, held)) <= 24
                assert last == FetchCount(20, 0, 0)


PRECISIONS = [
    (dram, ssd)
    for dram, ssd in itertools.product(("model", "int8", "int4"), repeat=2)
    if ("model", "int8", "int4").index(ssd) >= ("model", "int8", "int4").index(dram)
]


@pytest.mark.parametrize("rows", [0, 9, 30])
@pytest.mark.parametrize(("dram", "ssd"), PRECISIONS)
def test_what_is_fetched_is_the_transcoding(
    tmp_path: Path, rng: np.random.Generator, dram: Any, ssd: Any, rows: int
) -> None:
    g = PageGeometry(
        layers=2, kv_heads=2, chunk_size=4, head_dim=8, dtype=np.dtype("f4"), dram=dram, ssd=ssd
    )
    n, flush = 24, 6
    forms = {name: PageFormat(name, 4, 8, np.dtype("f4")) for name in ("model", dram, ssd)}
    there = transcode(forms["model"], forms[dram])
    down, up = transcode(forms[dram], forms[ssd]), transcode(forms[ssd], forms[dram])
    given: list[Array] = []
    for layer in values(1, n + flush, g):
        coded = there(page_rows(layer.reshape(-1, *g.page_shape), g.page_bytes))
        given.append(coded.view(g.dram_dtype).reshape(2, n + flush, *g.dram_shape))
    read = [
        up(down(page_rows(layer.reshape(-1, *g.dram_shape), g.dram_page_bytes)))
        .view(g.dram_dtype)
        .reshape(layer.shape)
        for layer in given
    ]
    extent = 3 * g.ssd_page_bytes
    with store_for(tmp_path, g, extent, dram_dtype=dram, ssd_dtype=ssd) as (store, _):
        part = share(g, n + flush, rows, extent, n, flush)
        session = store.open(n + flush, part, True, "one", prompt_chunks=n, piece_chunks=flush)
        plan = session.plan
        assert plan.layout is not None
        assert (plan.rows, plan.layout.page_bytes) == (rows, forms[ssd].page_bytes)
        page = forms[dram].page_bytes
        per_row = page if rows == 30 else page + 16
        assert plan.slab_bytes == 4 * rows * per_row
        assert plan.layer_bytes == 2 * 30 * page
        for layer in (0, 1):
            session.offload(layer, given[layer], n, rng.integers(0, 4, (2, n)), None)
            session.append(layer, given[layer][:, n:], n, flush)
        session.wait()
        came: list[Array] = [session.in_dram(layer) for layer in (0, 1)]
        for _ in range(3):
            for layer in (0, 1):
                head, chunk = (rng.integers(0, k, 20).astype(np.int32) for k in (2, n + flush))
                out = np.zeros((20, *g.dram_shape), g.dram_dtype)
                store.fetch(layer, [session], chunk * 0, head, chunk, out)
                as_given, as_read = given[layer][head, chunk], read[layer][head, chunk]
                same = (out == as_given).reshape(20, -1).all(axis=1)
                rest = (out == as_read).reshape(20, -1).all(axis=1)
                # What was in DRAM from the beginning may have left it and come back.
                assert (rest | (same & came[layer][head, chunk])).all()
                if rows == 30:
                    assert same.all()


# A link


def test_a_link_carries_no_faster_than_it_can() -> None:
    link = Link(1e6, 0.01)
    start = time.perf_counter()
    with link.carry(20_000):
        pass
    assert time.perf_counter() - start >= 0.03
    start = time.perf_counter()
    with pytest.raises(OSError, match="inside"), link.carry(10):
        raise OSError("inside")
    with link.carry(0):
        pass
    assert time.perf_counter() - start >= 0.01


def test_transfers_at_once_share_a_link() -> None:
    link, ends = Link(1e6), []
    begin = threading.Barrier(4)

    def transfer() -> None:
        begin.wait()
        with link.carry(15_000):
            pass
        ends.append(time.perf_counter())

    start = time.perf_counter()
    with futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: transfer(), range(4)))
    # In whatever order: the i-th cannot be done before i transfers fit the link.
    for i, end in enumerate(sorted(ends)):
        assert end - start >= 0.015 * (i + 1)


@pytest.mark.parametrize("bad", [(0, 0), (-1, 0), (float("nan"), 0), (1, -1), (1, float("nan"))])
def test_a_link_that_cannot_be_is_refused(bad: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Link(*bad)
