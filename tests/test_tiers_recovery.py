"""The store under random load, on failing disks and after killed processes; nothing is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdrive_jax.config import TierConfig
from kvdrive_jax.telemetry import BudgetError, Ledger, Traffic
from kvdrive_jax.tiers import (
    PageError,
    PageGeometry,
    PageStore,
    SessionPages,
    SessionSize,
    plan_sessions,
)
from kvdrive_jax.tiers.cache import DramCache
from kvdrive_jax.tiers.directory import SsdDirectory
from kvdrive_jax.tiers.extents import ExtentLayout
from kvdrive_jax.tiers.link import Link
from kvdrive_jax.tiers.ssd import SsdSegments

Array = np.ndarray[Any, Any]
GEOMETRY = PageGeometry(layers=2, kv_heads=3, chunk_size=2, head_dim=8, dtype=np.dtype("f4"))
PAGE = GEOMETRY.page_bytes
EXTENT = 4 * PAGE


def values(seed: int, n: int) -> list[Array]:
    rng = np.random.default_rng(seed)
    shape = (GEOMETRY.kv_heads, n, *GEOMETRY.page_shape)
    return [rng.standard_normal(shape).astype(np.float32) for _ in range(GEOMETRY.layers)]


def fetch(
    store: PageStore, session: SessionPages, layer: int, head: Any, chunk: Any, pages: list[Array]
) -> None:
    """Fetch and compare."""
    head, chunk = (
        np.atleast_1d(each).astype(np.int32) for each in np.broadcast_arrays(head, chunk)
    )
    out = np.zeros((len(chunk), *GEOMETRY.page_shape), np.float32)
    store.fetch(layer, [session], np.zeros_like(chunk), head, chunk, out)
    np.testing.assert_array_equal(out, pages[layer][head, chunk])


def tiers_in(path: Path, **options: Any) -> TierConfig:
    return TierConfig(ssd_dir=str(path), extent_bytes=EXTENT, **options)


# Budgets


class WatchedLedger(Ledger):
    """Checks itself whenever it changes."""

    def reserve(self, tier: Any, name: str, nbytes: int) -> None:
        super().reserve(tier, name, nbytes)
        self.check()

    def release(self, tier: Any, name: str) -> int:
        nbytes = super().release(tier, name)
        self.check()
        return nbytes

    def check(self) -> None:
        for tier in ("dram", "ssd"):
            with self._lock:
                used, budget = self._used[tier], self._budget[tier]
                assert used == sum(self._held[tier].values())
            assert budget is None or 0 <= used <= budget


def memory_of(session: SessionPages) -> int:
    """Bytes of what a session really keeps in memory."""
    dram, arrays = session._dram, list(session._positions)
    if isinstance(dram, DramCache):
        arrays += [dram._slab, dram._row_of, dram._owner, dram._worth, dram._free]
    else:
        arrays += dram.slabs + (dram.row_of_chunk or [])
    if session._segments is not None:
        arrays.append(session._segments._hashes)
    return sum(array.nbytes for array in arrays)


def check_bytes(store: PageStore, ledger: Ledger, path: Path) -> None:
    """What is held is what is reserved, no less in memory and no more on disk."""
    accounts = ledger.accounts("dram")
    for session in store._sessions:
        mine = sum(size for name, size in accounts.items() if name.startswith(session._account))
        assert memory_of(session) <= mine
        assert mine == session.plan.dram_bytes
    disk = sum(
        file.stat().st_blocks * 512
        for folder in path.glob("kvdrive-*/session-*")
        for file in folder.rglob("*")
        if file.is_file()
    )
    assert disk <= ledger.used("ssd")


@pytest.mark.parametrize("sync", ["adaptive", "hierarchical", "blockwise"])
@pytest.mark.parametrize("seed", range(2))
def test_random_load_stays_inside_every_budget(tmp_path: Path, seed: int, sync: str) -> None:
    rng, budget = np.random.default_rng(seed), 60_000
    ledger = WatchedLedger(dram=budget, ssd=1_500_000)
    refused = opened = 0
    live: list[tuple[SessionPages, list[Array], int]] = []
    with PageStore(GEOMETRY, tiers_in(tmp_path, sync=sync), ledger, Traffic(), workers=2) as store:
        for turn in range(110):
            action = rng.choice(["open", "open", "append", "fetch", "submit", "rank", "close"])
            if action == "open" or not live:
                prompt = int(rng.integers(1, 60))
                capacity = prompt + 12
                part = [None, int(rng.integers(0, 40_000))][int(rng.integers(2))]
                before = ledger.accounts("dram"), ledger.accounts("ssd")
                try:
                    session = store.open(
                        capacity, part, True, f"s{turn}", prompt_chunks=prompt, piece_chunks=4
                    )
                except BudgetError:
                    assert (ledger.accounts("dram"), ledger.accounts("ssd")) == before
                    refused += 1
                    if live:
                        live.pop(int(rng.integers(len(live))))[0].close()
                    continue
                opened += 1
                pages = values(turn, capacity)
                for layer in (0, 1):
                    session.offload(layer, pages[layer], prompt, None, None)
                live.append((session, pages, prompt))
                continue
            at = int(rng.integers(len(live)))
            session, pages, _ = live[at]
            layer = int(rng.integers(2))
            stored = session.stored(layer)
            head, chunk = rng.integers(0, 3, 15), rng.integers(0, stored, 15)
            if action == "append" and stored + 4 <= len(pages[0][0]):
                session.append(layer, pages[layer][:, stored : stored + 4], stored, 4)
            elif action == "fetch":
                fetch(store, session, layer, head, chunk, pages)
                check_bytes(store, ledger, tmp_path)
            elif action == "submit":
                chunks, heads = chunk.astype(np.int32), head.astype(np.int32)
                out = np.zeros((15, *GEOMETRY.page_shape), np.float32)
                job = store.submit_fetch(layer, [session], chunks * 0, heads, chunks, out)
                store.begin_step()
                job.result()
                np.testing.assert_array_equal(out, pages[layer][head, chunk])
            elif action == "rank":
                session.rank(layer, rng.integers(-1, stored, (3, 4)).astype(np.int32))
            elif action == "close":
                live.pop(at)[0].close()
        store.poll()
        assert min(opened, refused) > 3, "the test needs both"
    assert ledger.peak("dram") <= budget
    assert ledger.accounts("dram") == ledger.accounts("ssd") == {}
    assert os.listdir(tmp_path) == []


def test_what_is_planned_is_what_is_reserved(tmp_path: Path) -> None:
    sizes = [SessionSize(212, 200), SessionSize(9, 9), SessionSize(112, 100)]
    checked = 0
    for budget in range(120_000, 300_000, 3700):
        tiers = tiers_in(tmp_path)
        ledger = Ledger(dram=budget)
        try:
            plans = plan_sessions(
                GEOMETRY, tiers, sizes, dram_bytes=budget, ssd=True, piece_chunks=4
            )
        except BudgetError:
            continue
        with PageStore(GEOMETRY, tiers, ledger, Traffic()) as store:
            sessions = [
                store.open(
                    size.chunk_capacity,
                    plan.dram_bytes,
                    True,
                    "one",
                    prompt_chunks=size.prompt_chunks,
                    piece_chunks=4,
                )
                for plan, size in zip(plans, sizes, strict=True)
            ]
            assert ledger.used("ssd") == sum(plan.ssd_bytes for plan in plans)
            assert [session.plan for session in sessions] == plans
        checked += 1
    assert checked > 15


def test_a_session_releases_its_own_accounts_whatever_its_name(tmp_path: Path) -> None:
    ledger = Ledger()
    with PageStore(GEOMETRY, tiers_in(tmp_path), ledger, Traffic()) as store:
        first = store.open(20, None, True, "a", prompt_chunks=20)
        second = store.open(20, None, True, "a (#0): b", prompt_chunks=20)
        first.close()
        accounts = ledger.accounts("dram")
        mine = [size for name, size in accounts.items() if not name.startswith("staging")]
        assert sum(mine) == second.plan.dram_bytes
        assert ledger.used("ssd") == second.plan.ssd_bytes


@pytest.mark.parametrize("layer", [-1, 2])
def test_layers_that_are_not_there_are_named(tmp_path: Path, layer: int) -> None:
    pages = values(0, 40)
    one = np.zeros(1, np.int32)
    with PageStore(GEOMETRY, tiers_in(tmp_path), Ledger(), Traffic()) as store:
        session = store.open(40, 20_000, True, "one", prompt_chunks=30, piece_chunks=10)
        for each in (0, 1):
            session.offload(each, pages[each], 30, None, None)
        session.wait()
        out = np.zeros((1, *GEOMETRY.page_shape), np.float32)
        with pytest.raises(ValueError, match="layer"):
            store.fetch(layer, [session], one, one, one, out)
        with pytest.raises(ValueError, match="layer"):
            session.append(layer, pages[0][:, 30:], 30, 10)
        with pytest.raises(ValueError, match="layer"):
            store.rank(layer, [session], np.full((1, 3, 1), 29, np.int32))


def test_a_whole_layer_is_read_while_chunks_are_appended(tmp_path: Path) -> None:
    """By a worker, at the moment in which an append is about to hand its piece over."""
    pages = values(0, 40)
    tiers = tiers_in(tmp_path, sync="layerwise")
    with PageStore(GEOMETRY, tiers, Ledger(), Traffic()) as store:
        session = store.open(40, 20_000, True, "one", prompt_chunks=30, piece_chunks=10)
        session.offload(0, pages[0], 30, None, None)
        fetch(store, session, 0, 1, 3, pages)
        chunk, out = np.full(1, 7, np.int32), np.zeros((1, *GEOMETRY.page_shape), np.float32)
        enter, errors = store._shared.transit.enter, []

        def fetch_first(nbytes: int) -> None:
            job = store.submit_fetch(0, [session], chunk * 0, chunk * 0, chunk, out)
            errors.append(job.exception())
            enter(nbytes)

        store._shared.transit.enter = fetch_first
        session.append(0, pages[0][:, 30:], 30, 10)
        assert errors == [None]
        np.testing.assert_array_equal(out[0], pages[0][0, 7])
        fetch(store, session, 0, 1, [3, 39], pages)


def test_a_close_that_was_interrupted_can_be_repeated(tmp_path: Path) -> None:
    """Ctrl-C while it waits for a slow disk."""
    pages, link, ledger = values(0, 40), Link(1e9), Ledger()
    with PageStore(GEOMETRY, tiers_in(tmp_path), ledger, Traffic(), link=link) as store:
        session = store.open(40, 20_000, True, "one", prompt_chunks=40)
        session.offload(0, pages[0], 40, None, None)
        session.wait()
        link.latency_s = 0.3
        session.rank(0, np.full((3, 1), 39, np.int32))
        main = threading.get_ident()
        # A shell lets what it starts in the background ignore this signal, and so does Python then.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupt = threading.Timer(0.05, signal.pthread_kill, [main, signal.SIGINT])
        interrupt.start()

        def close() -> None:
            session.close()
            time.sleep(20)  # the signal is not to end the other tests

        try:
            with pytest.raises(KeyboardInterrupt):
                close()
            interrupt.join()
        finally:
            signal.signal(signal.SIGINT, before)
        session.close()
        assert ledger.accounts("dram") == ledger.accounts("ssd") == {}
        assert store._sessions == []
    assert os.listdir(tmp_path) == []


# Damage


@contextmanager
def two_sessions(path: Path) -> Iterator[tuple[PageStore, SessionPages, SessionPages, list[Array]]]:
    """Of 40 chunks, of which DRAM begins with some."""
    ledger, pages = Ledger(), values(0, 40)
    with PageStore(GEOMETRY, tiers_in(path), ledger, Traffic()) as store:
        sessions = []
        for name in ("hurt", "well"):
            session = store.open(40, 30_000, True, name, prompt_chunks=40)
            assert 5 < session.plan.rows < 32
            for layer in (0, 1):
                session.offload(layer, pages[layer], 40, None, None)
            session.wait()
            sessions.append(session)
        yield store, sessions[0], sessions[1], pages
    assert ledger.accounts("dram") == ledger.accounts("ssd") == {}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [Path.unlink, lambda path: os.truncate(path, EXTENT * 9 + 5), flip],
    ids=["removed", "truncated", "flipped"],
)
def test_what_dram_holds_outlives_its_file(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    with two_sessions(tmp_path) as (store, hurt, well, pages):
        (path,) = tmp_path.glob("kvdrive-*/session-000000/prompt/1.2.0.0")
        damage(path)
        held = np.flatnonzero(hurt.in_dram(1)[2])
        fetch(store, hurt, 1, 2, held, pages)
        # Of a fetch by a worker, the error is the future's.
        out = np.zeros((1, *GEOMETRY.page_shape), np.float32)
        one = np.array([39], np.int32)
        job = store.submit_fetch(1, [hurt], one * 0, one * 0 + 2, one, out)
        error = job.exception()
        assert isinstance(error, PageError)
        assert (error.session, error.layer, error.head, error.extent) == ("hurt", 1, 2, 9)
        fetch(store, hurt, 0, [2, 1, 0], 39, pages)
        fetch(store, well, 1, 2, range(40), pages)
    assert os.listdir(tmp_path) == []


def test_a_sessions_directory_is_removed_under_it(tmp_path: Path) -> None:
    with two_sessions(tmp_path) as (store, hurt, well, pages):
        (path,) = tmp_path.glob("kvdrive-*/session-000000")
        shutil.rmtree(path)
        with pytest.raises(PageError, match="session 'hurt', layer 0, head 1, extent 9"):
            fetch(store, hurt, 0, 1, 39, pages)
        fetch(store, well, 0, 1, range(40), pages)
    assert os.listdir(tmp_path) == []


def test_the_stores_directory_is_removed_under_it(tmp_path: Path) -> None:
    with two_sessions(tmp_path) as (store, hurt, _, pages):
        (path,) = tmp_path.glob("kvdrive-*")
        shutil.rmtree(path)
        accounts = store._ledger.accounts("dram")
        with pytest.raises((PageError, ValueError), match=str(tmp_path)):
            store.open(40, 30_000, True, "late", prompt_chunks=40)
        assert store._ledger.accounts("dram") == accounts
        with pytest.raises(PageError, match="session 'hurt'"):
            fetch(store, hurt, 0, 1, 39, pages)
        # Without SSD there is nothing to miss.
        session = store.open(40, None, False, "dram")
        session.offload(0, pages[0], 40, None, None)
        fetch(store, session, 0, 1, range(40), pages)
    assert os.listdir(tmp_path) == []


def mount(*args: str) -> None:
    """Skips where this user may not mount."""
    command = shutil.which("mount")
    if command is None or subprocess.run([command, *args], capture_output=True).returncode:
        pytest.skip("needs the right to mount")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path))
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def fill(disk: Path) -> Path:
    """Leaves two blocks free."""
    stat = os.statvfs(disk)
    filler = disk / "filler"
    with filler.open("ab") as file:
        file.write(bytes(stat.f_bavail * stat.f_frsize - 8192))
    return filler


def ssd_accounts(store: PageStore, session: SessionPages) -> list[str]:
    return [name for name in store._ledger.accounts("ssd") if name.startswith(session._account)]


def test_a_full_disk_is_no_loss_where_dram_holds_everything(small_disk: Path) -> None:
    ledger, pages = Ledger(), values(0, 60)
    with PageStore(GEOMETRY, tiers_in(small_disk), ledger, Traffic()) as store:
        part = store.open(40, 30_000, True, "on SSD", prompt_chunks=40)
        whole = store.open(60, None, True, "in DRAM", prompt_chunks=40, piece_chunks=10)
        late = store.open(60, None, True, "later", prompt_chunks=40, piece_chunks=10)
        lost = store.open(40, 30_000, True, "lost", prompt_chunks=40)
        for layer in (0, 1):
            part.offload(layer, pages[layer], 40, None, None)
            late.offload(layer, pages[layer], 40, None, None)
        part.wait()
        late.wait()
        filler = fill(small_disk)
        for layer in (0, 1):
            whole.offload(layer, pages[layer], 40, None, None)
        whole.wait()
        assert whole.failure is None
        told = store.notices()
        assert len(told) == 1
        assert "session 'in DRAM'" in told[0]
        assert "goes on without SSD" in told[0]
        assert store.notices() == []
        assert ssd_accounts(store, whole) == []
        assert whole.disk_promised == 0
        for layer in (0, 1):
            fetch(store, whole, layer, [0, 1, 2] * 20, list(range(40)) + list(range(20)), pages)
        # Another one, full only when it flushes; and one that DRAM does not hold.
        for session in (whole, late):
            for layer in (0, 1):
                for start in (40, 50):
                    session.append(layer, pages[layer][:, start : start + 10], start, 10)
                fetch(store, session, layer, 2, range(60), pages)
        assert ["session 'later'" in line for line in store.notices()] == [True]
        filler = fill(small_disk)  # they have left their room
        lost.offload(1, pages[1], 40, None, None)
        with pytest.raises(PageError, match=r"session 'lost'.*the session failed"):
            lost.wait()
        store.poll()
        with pytest.raises(PageError, match="session 'lost'"):
            fetch(store, lost, 1, 0, 0, pages)
        assert ssd_accounts(store, lost) == []
        fetch(store, part, 1, 1, range(40), pages)
        filler.unlink()
    assert os.listdir(small_disk) == []
    assert ledger.accounts("dram") == ledger.accounts("ssd") == {}


class Gate:
    """Lends buffers as the pool it stands for, but the second only when SSD was given up."""

    def __init__(self, pool: Any, given_up: Callable[[], bool]) -> None:
        self.pool, self.given_up = pool, given_up
        self.borrowed, self.lock, self.second = 0, threading.Lock(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    @contextmanager
    def borrow(self) -> Iterator[Array]:
        with self.lock:
            self.borrowed += 1
            number = self.borrowed
        if number == 2:
            self.second.set()
            end = time.monotonic() + 20
            while not self.given_up() and time.monotonic() < end:
                time.sleep(0.001)
        else:
            assert self.second.wait(20)
        with self.pool.borrow() as buffer:
            yield buffer


def test_a_write_under_way_when_ssd_is_given_up(tmp_path: Path) -> None:
    """One worker is about to write when the other finds that it cannot. The buffers of the pool
    are lent in the order that shows it; files, threads and errors are real."""
    pages = values(0, 40)
    with PageStore(GEOMETRY, tiers_in(tmp_path), Ledger(), Traffic(), workers=2) as store:
        writes = store._shared.transit.writes
        store._shared.transit.writes = Gate(writes, lambda: bool(store._notices))
        session = store.open(40, None, True, "one", prompt_chunks=40)
        (path,) = tmp_path.glob("kvdrive-*/session-000000")
        for head in range(3):
            (path / "prompt" / f"0.{head}.0.0" / "in the way").mkdir(parents=True)
        session.offload(0, pages[0], 40, None, None)
        session.wait()
        assert session.failure is None
        assert len(store.notices()) == 1
        fetch(store, session, 0, [0, 1, 2], 39, pages)
        assert ssd_accounts(store, session) == []
        assert not path.exists(), "what is no longer counted is not on disk"


def test_no_notice_is_lost(tmp_path: Path) -> None:
    interval = sys.getswitchinterval()
    with PageStore(GEOMETRY, tiers_in(tmp_path), Ledger(), Traffic()) as store:
        writer = threading.Thread(
            target=lambda: [store._shared.notice(str(i)) for i in range(30_000)]
        )
        told = []
        try:
            sys.setswitchinterval(1e-6)
            writer.start()
            while writer.is_alive():
                told += store.notices()
            writer.join()
        finally:
            sys.setswitchinterval(interval)
        told += store.notices()
    assert told == [str(i) for i in range(30_000)]


def test_a_directory_that_becomes_read_only(tmp_path: Path) -> None:
    pages = values(0, 60)
    with PageStore(GEOMETRY, tiers_in(tmp_path), Ledger(), Traffic()) as store:
        part = store.open(60, 40_000, True, "part", prompt_chunks=40, piece_chunks=10)
        whole = store.open(60, None, True, "whole", prompt_chunks=40, piece_chunks=10)
        for session in (part, whole):
            for layer in (0, 1):
                session.offload(layer, pages[layer], 40, None, None)
            session.wait()
        (path,) = tmp_path.glob("kvdrive-*")
        # Root may write whatever the mode says.
        mount("--bind", str(path), str(path))
        try:
            mount("-o", "remount,bind,ro", str(path))
            fetch(store, part, 0, 1, range(40), pages)
            for session in (part, whole):
                session.append(0, pages[0][:, 40:50], 40, 10)
            whole.wait()
            fetch(store, whole, 0, 1, range(50), pages)
            assert ["session 'whole'" in line for line in store.notices()] == [True]
            with pytest.raises(PageError, match="session 'part', layer 0"):
                part.wait()
            with pytest.raises(PageError, match="session 'new'"):
                store.open(40, None, True, "new", prompt_chunks=40)
            assert ssd_accounts(store, part) == ssd_accounts(store, whole) == []
        finally:
            subprocess.run(["umount", str(path)], check=True)
        again = store.open(40, 30_000, True, "again", prompt_chunks=40)
        again.offload(0, pages[0], 40, None, None)
        fetch(store, again, 0, 1, range(40), pages)
    assert os.listdir(tmp_path) == []


def test_a_read_only_file_system_is_refused(small_disk: Path) -> None:
    mount("-o", "remount,ro", str(small_disk))
    with pytest.raises(ValueError, match="cannot be written"):
        SsdDirectory(str(small_disk))


# Other processes

PROCESS = """
import os, signal, sys, time
import numpy as np
from kvdrive_jax.config import TierConfig
from kvdrive_jax.telemetry import Ledger, Traffic
from kvdrive_jax.tiers import PageGeometry, PageStore
from kvdrive_jax.tiers.link import Link

G = PageGeometry(layers=2, kv_heads=2, chunk_size=4, head_dim=64, dtype=np.dtype("f4"))
N = 200
PAGES = [np.random.default_rng(l).standard_normal((2, N, 2, 4, 64)).astype("f4") for l in (0, 1)]


def opened(path, link=None):
    tiers = TierConfig(ssd_dir=path, extent_bytes=8192)
    store = PageStore(G, tiers, Ledger(), Traffic(), link=link)
    return store, store.open(N, 500_000, True, "s", prompt_chunks=N)


def offload(session):
    for layer in (0, 1):
        session.offload(layer, PAGES[layer], N, None, None)


def read(store, session):
    chunk = np.random.default_rng().integers(0, N, 60).astype("i4")
    for layer in (0, 1):
        out = np.zeros((60, 2, 4, 64), "f4")
        store.fetch(layer, [session], chunk * 0, chunk % 2, chunk, out)
        assert (out == PAGES[layer][chunk % 2, chunk]).all()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Sorted:
    # os.scandir in an order that a file system may have: "lock" comes before "session-000000".
    def __init__(self, *args):
        with scandir(*args) as entries:
            self.entries = sorted(entries, key=lambda entry: entry.name)
    def __iter__(self): return iter(self.entries)
    def __enter__(self): return self
    def __exit__(self, *args): pass
    def close(self): pass


scandir = os.scandir


def phase(name, path):
    name, _, at = name.partition(":")
    if name == "reclaim":  # the next store removes what was left, and is killed at that
        left = [int(at)]
    else:
        link = Link(1e12)
        store, session = opened(path, link)
        if name == "opened":
            die()
        offload(session)
        if name == "offload":
            die()
        session.wait()
        link.latency_s = 60.0
        chunk = np.arange(N - 8, N, dtype="i4")
        if name == "fetch":
            store.submit_fetch(0, [session], chunk * 0, chunk * 0, chunk,
                               np.zeros((8, 2, 4, 64), "f4"))
        if name == "ahead":
            session.rank(1, np.stack([chunk, chunk]))
        if name in ("fetch", "ahead"):
            while store._shared.transit.reads._idle.qsize() == 3:
                time.sleep(0.001)
            die()
        left = [int(at)]
    remove = os.unlink

    def unlink(*args, **kwargs):
        if not left[0]:
            die()
        left[0] -= 1
        remove(*args, **kwargs)

    os.unlink, os.scandir = unlink, Sorted
    if name == "closing":
        store.close()
    elif name == "exit":  # without close
        store._shared.directory.close()
    else:
        PageStore(G, TierConfig(ssd_dir=path), Ledger(), Traffic())
    os._exit(7)


store = session = None
print("ready", flush=True)
for line in sys.stdin:
    order, _, rest = line.strip().partition(" ")
    if order == "kill":
        name, path = rest.split(" ")
        pid = os.fork()
        if not pid:
            try:
                phase(name, path)
            finally:
                os._exit(8)
        status = os.waitpid(pid, 0)[1]
        print(-os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status),
              flush=True)
    elif order == "hold":
        store, session = opened(rest)
        offload(session)
        print("held", flush=True)
    elif order == "read":
        read(store, session)
        print("right", flush=True)
    elif order == "churn":
        for _ in range(12):
            other, one = opened(rest)
            offload(one)
            read(other, one)
            other.close()
        print("right", flush=True)
    elif order == "close":
        store.close()
        print("closed", flush=True)
"""


class Process:
    """A process that does what it is told, line by line."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROCESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.heard() == "ready"

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()

    def ask(self, order: str) -> str:
        self.tell(order)
        return self.heard()

    def end(self) -> None:
        self.process.communicate()


@pytest.fixture(scope="module")
def killed() -> Iterator[Process]:
    """Starts processes that kill themselves; it makes no store, so that it can fork."""
    process = Process()
    yield process
    process.end()


@pytest.fixture(scope="module")
def other() -> Iterator[Process]:
    """Another process with a store."""
    process = Process()
    yield process
    process.end()


def files_under(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()]


@pytest.mark.parametrize("phase", ["opened", "offload", "fetch", "ahead", "closing:1"])
def test_what_a_killed_process_left_is_removed(
    tmp_path: Path, killed: Process, other: Process, phase: str
) -> None:
    assert other.ask(f"hold {tmp_path}") == "held"
    (held,) = os.listdir(tmp_path)
    assert other.ask("read") == "right"
    foreign = tmp_path / "kvdrive-notes.txt"
    foreign.write_text("not a store's")
    assert killed.ask(f"kill {phase} {tmp_path}") == "-9"
    (orphan,) = set(os.listdir(tmp_path)) - {held, foreign.name}
    size = sum(file.stat().st_size for file in files_under(tmp_path / orphan))
    pages = values(0, 40)
    with PageStore(GEOMETRY, tiers_in(tmp_path), Ledger(), Traffic()) as store:
        directory = store._shared.directory
        assert directory is not None
        assert directory.reclaimed_bytes == size
        assert set(os.listdir(tmp_path)) == {held, foreign.name, directory.path.name}
        assert other.ask("read") == "right"
        session = store.open(40, 30_000, True, "here", prompt_chunks=40)
        session.offload(0, pages[0], 40, None, None)
        fetch(store, session, 0, 1, range(40), pages)
    assert other.ask("read") == "right"
    assert other.ask("close") == "closed"
    assert os.listdir(tmp_path) == [foreign.name]


@pytest.mark.parametrize("who", ["exit", "reclaim"])
def test_killed_while_removing_is_removed_by_the_next(
    tmp_path: Path, killed: Process, who: str
) -> None:
    """At each file that goes, the one that says whose the others are included."""
    for at in range(50):
        parent = tmp_path / str(at)
        parent.mkdir()
        if who == "reclaim":
            assert killed.ask(f"kill offload {parent}") == "-9"
        status = killed.ask(f"kill {who}:{at} {parent}")
        SsdDirectory(str(parent)).close()
        assert files_under(parent) == [], f"killed before file {at} went, the rest stays for ever"
        if status == "7":
            break
        assert status == "-9"
    assert at > 2


def test_two_processes_come_and_go_in_one_directory(tmp_path: Path, other: Process) -> None:
    other.tell(f"churn {tmp_path}")
    pages = values(0, 40)
    for _ in range(12):
        with PageStore(GEOMETRY, tiers_in(tmp_path), Ledger(), Traffic()) as store:
            session = store.open(40, 30_000, True, "here", prompt_chunks=40)
            for layer in (0, 1):
                session.offload(layer, pages[layer], 40, None, None)
                fetch(store, session, layer, 1, range(40), pages)
            assert store._shared.directory is not None
            assert store._shared.directory.reclaimed_bytes == 0
    assert other.heard() == "right"
    assert os.listdir(tmp_path) == []


# What stays, and what is large


def test_a_thousand_sessions_leave_nothing(tmp_path: Path) -> None:
    g = PageGeometry(layers=1, kv_heads=1, chunk_size=2, head_dim=4, dtype=np.dtype("f4"))
    pages = np.random.default_rng(0).standard_normal((1, 8, *g.page_shape)).astype(np.float32)
    chunk = np.arange(8, dtype=np.int32)
    out = np.zeros((8, *g.page_shape), np.float32)
    shm = Path("/dev/shm")  # a disk takes a millisecond for each of the files
    ledger = Ledger(dram=100_000, ssd=1_000_000)

    def now(path: Path) -> tuple[int, ...]:
        return (
            int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            len(list(path.rglob("*"))),
        )

    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else tmp_path) as name:
        path = Path(name)
        with PageStore(g, TierConfig(ssd_dir=name, extent_bytes=256), ledger, Traffic()) as store:
            before: tuple[int, ...] = ()
            threads = threading.active_count()
            for i in range(1000):
                session = store.open(8, 400, True, "again", prompt_chunks=8)
                session.offload(0, pages, 8, None, None)
                if i % 3 == 0:
                    store.fetch(0, [session], chunk * 0, chunk * 0, chunk, out)
                    np.testing.assert_array_equal(out, pages[0])
                elif i % 3 == 1:
                    session.wait()
                    session.rank(0, chunk[None])
                session.close()
                if i == 100:
                    before = now(path)
            after = now(path)
            assert after[0] - before[0] < 20_000_000
            assert after[1::2] == before[1::2]
            assert after[2] <= threads + 4
            assert ledger.accounts("dram") == ledger.accounts("ssd") == {}
        assert os.listdir(path) == []


def test_a_segment_of_more_than_4_gib(tmp_path: Path) -> None:
    """Its last pieces are written and read; what lies between was never written."""
    pieces = 600_000
    layout = ExtentLayout.plan(
        page_bytes=PAGE,
        extent_bytes=128 * PAGE,
        chunk_capacity=128 * pieces,
        prompt_chunks=0,
        piece_chunks=128,
    )
    assert layout.extents * layout.extent_bytes > 2 << 32
    g = PageGeometry(layers=1, kv_heads=3, chunk_size=2, head_dim=8, dtype=np.dtype("f4"))
    segments = SsdSegments(tmp_path / "s", g, layout, "one")
    pages = values(0, 128)[0]
    scratch = np.zeros(3 * layout.extent_bytes, np.uint8)
    written = {0: pages, 131_072: pages[:, ::-1], pieces - 1: pages[:, 5:] + 1}
    for piece, part in written.items():
        segments.write_piece(0, piece, part, scratch)
    for piece, part in written.items():
        first = np.array([layout.piece_extent(piece)] * 3)
        got = np.zeros((3, layout.extent_bytes), np.uint8)
        segments.read(0, np.arange(3), first, got)
        n = part.shape[1]
        found = got.reshape(3, 128, PAGE)[:, :n].view(np.float32).reshape(3, n, 2, 2, 8)
        np.testing.assert_array_equal(found, part)
    with pytest.raises(PageError, match="session 'one', layer 0, head 1, extent 131072"):
        segments.read(0, np.array([1]), np.array([131_072]), got[:1])
    segments.remove()


def test_a_session_of_the_longest_positions(tmp_path: Path) -> None:
    """Positions just below 2^31 keep their place: an extent of one page each, one piece a chunk."""
    layout = ExtentLayout.plan(
        page_bytes=PAGE,
        extent_bytes=PAGE,
        chunk_capacity=2**31 - 2,
        prompt_chunks=2**31 - 3,
        piece_chunks=1,
    )
    segments = SsdSegments.__new__(SsdSegments)
    segments.path, segments.layout, segments._heads = tmp_path, layout, 3  # type: ignore[misc]
    extents = np.array([0, 2**31 - 4, 2**31 - 3], np.int64)
    heads = np.array([2, 2, 2], np.int64)
    files, place = segments._places(heads, extents)
    each = layout.shard_extents
    per_segment = -(-layout.prompt_extents // each)
    assert files.tolist() == [
        2 * per_segment,
        2 * per_segment + (2**31 - 4) // each,
        3 * per_segment,
    ]
    assert place.tolist() == [0, (2**31 - 4) % each, 2]
    assert Path(segments.file_of(1, 2, 2**31 - 3)).name == "1.0.0.0"
