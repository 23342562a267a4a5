"""What goes wrong on disk: found before use, named, and of no consequence for other sessions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdrive_jax.config import TierConfig
from kvdrive_jax.telemetry import Ledger, Traffic
from kvdrive_jax.tiers import PageError, PageGeometry, PageStore, SessionPages
from kvdrive_jax.tiers.directory import SsdDirectory

GEOMETRY = PageGeometry(layers=2, kv_heads=2, chunk_size=4, head_dim=64, dtype=np.dtype(np.float32))
PAGE = GEOMETRY.page_bytes
PER_EXTENT = 4
MAPS = 2 * 2 * (2 * 4 + 4)  # bytes of maps and hashes per chunk, or more: DRAM holds no page
Array = np.ndarray[Any, Any]


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def store(tmp_path: Path, ledger: Ledger) -> Iterator[PageStore]:
    tiers = TierConfig(ssd_dir=str(tmp_path), extent_bytes=PER_EXTENT * PAGE)
    with PageStore(GEOMETRY, tiers, ledger, Traffic()) as made:
        yield made
    assert os.listdir(tmp_path) == []
    assert ledger.accounts("dram") == ledger.accounts("ssd") == {}


def page_values(seed: int, n: int) -> list[Array]:
    rng = np.random.default_rng(seed)
    shape = (2, n, *GEOMETRY.page_shape)
    return [rng.standard_normal(shape).astype(np.float32) for _ in range(2)]


def open_session(store: PageStore, name: str, pages: list[Array], n: int = 40) -> SessionPages:
    """A session that lives on SSD alone, 40 prompt chunks and 8 appended, all of it written."""
    capacity = n + 8
    session = store.open(capacity, MAPS * capacity, True, name, prompt_chunks=n, piece_chunks=8)
    for layer in range(2):
        session.offload(layer, pages[layer], n, None, None)
        session.append(layer, pages[layer][:, n : n + 8], n, 8)
    return session


def fetch(store: PageStore, session: SessionPages, layer: int, head: int, chunk: Any) -> Array:
    chunks = np.atleast_1d(np.array(chunk, np.int32))
    out = np.zeros((len(chunks), *GEOMETRY.page_shape), np.float32)
    store.fetch(layer, [session], chunks * 0, chunks * 0 + head, chunks, out)
    return out


def the_file(tmp_path: Path, name: str) -> Path:
    """The file ``name`` (array/key) of the first session."""
    (found,) = tmp_path.glob(f"kvdrive-*/session-000000/{name}")
    return found


def flip(at: float) -> Callable[[Path], None]:
    """Flip one bit, ``at`` a share of the file's length."""

    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[min(len(data) - 1, int(at * len(data)))] ^= 0x10
        path.write_bytes(data)

    return change


def cut(keep: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        os.truncate(path, keep if keep >= 0 else path.stat().st_size + keep)

    return change


def into_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


WHOLE_FILE = {
    "empty": cut(0),
    "torn": cut(5000),
    "deleted": Path.unlink,
    "directory": into_directory,
}


@pytest.mark.parametrize("fault", WHOLE_FILE)
@pytest.mark.parametrize("where", ["prompt", "pieces"])
def test_a_damaged_file_is_found_and_named(
    store: PageStore, tmp_path: Path, fault: str, where: str
) -> None:
    pages = page_values(0, 48)
    session = open_session(store, "hurt", pages)
    session.wait()
    other = open_session(store, "well", pages)
    # Layer 1: the prompt of head 1; the piece of both heads.
    path = the_file(tmp_path, "prompt/1.1.0.0" if where == "prompt" else "pieces/1.0.0.0")
    WHOLE_FILE[fault](path)
    chunk, extent = (13, 3) if where == "prompt" else (45, 11)
    with pytest.raises(PageError, match=rf"session 'hurt', layer 1, head 1, extent {extent},") as e:
        fetch(store, session, 1, 1, chunk)
    error = e.value
    assert (error.session, error.layer, error.head, error.extent) == ("hurt", 1, 1, extent)
    assert error.path == str(path)
    # Everything elsewhere is still right, and so is the other session.
    for layer, head, at in ((0, 1, chunk), (0, 0, chunk)):
        np.testing.assert_array_equal(
            fetch(store, session, layer, head, at)[0], pages[layer][head, at]
        )
    np.testing.assert_array_equal(fetch(store, other, 1, 1, chunk)[0], pages[1][1, chunk])
    store.poll()  # a failed read was told to its caller; nothing more is to be told


@pytest.mark.parametrize("extent", range(10))
def test_a_flipped_bit_condemns_its_own_extent_only(
    store: PageStore, tmp_path: Path, extent: int
) -> None:
    pages = page_values(0, 48)
    session = open_session(store, "hurt", pages)
    session.wait()
    path = the_file(tmp_path, "prompt/0.1.0.0")
    size = PER_EXTENT * PAGE
    flip((extent * size + (extent * 997) % size) / path.stat().st_size)(path)
    with pytest.raises(PageError, match=rf"layer 0, head 1, extent {extent},"):
        fetch(store, session, 0, 1, range(40))
    sound = [chunk for chunk in range(48) if chunk // PER_EXTENT != extent]
    np.testing.assert_array_equal(fetch(store, session, 0, 1, sound), pages[0][1, sound])


def test_a_read_that_fails_once_is_repeated(
    store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = page_values(0, 48)
    session = open_session(store, "one", pages)
    session.wait()
    segments = session._segments
    assert segments is not None
    original, calls = segments._read_batch, []

    def once(layer: int, heads: Array, extents: Array, target: Array) -> None:
        calls.append(len(extents))
        if len(calls) == 1:
            target[...] = 7
            raise OSError("injected: the first read fails")
        original(layer, heads, extents, target)

    monkeypatch.setattr(segments, "_read_batch", once)
    np.testing.assert_array_equal(fetch(store, session, 0, 0, range(48)), pages[0][0, :48])
    # Each extent of the buffer that failed alone, then the rest as always.
    assert calls[1 : 1 + calls[0]] == [1] * calls[0]
    assert sum(calls) == 12 + calls[0]


def test_in_a_batch_the_other_sessions_pages_arrive(store: PageStore, tmp_path: Path) -> None:
    pages = [page_values(seed, 48) for seed in range(3)]
    sessions = [open_session(store, f"s{i}", pages[i]) for i in range(3)]
    for session in sessions:
        session.wait()
    the_file(tmp_path, "prompt/0.0.0.0").unlink()
    row = np.array([0, 1, 1, 2], np.int32)
    chunk = np.array([1, 2, 40, 3], np.int32)
    out = np.zeros((4, *GEOMETRY.page_shape), np.float32)
    with pytest.raises(PageError, match="session 's0', layer 0, head 0, extent 0"):
        store.fetch(0, sessions, row, row * 0, chunk, out)
    for i in (1, 2, 3):
        np.testing.assert_array_equal(out[i], pages[row[i]][0][0, chunk[i]])


def check_one_failed_and_the_other_goes_on(
    store: PageStore, ledger: Ledger, failed: SessionPages, other: SessionPages, pages: list[Array]
) -> None:
    """After a background write of ``failed`` failed and nobody was told yet."""
    for _ in range(1000):
        if failed._outstanding == 0:
            break
        time.sleep(0.01)
    with pytest.raises(PageError, match=f"session {failed.name!r}, layer .*write failed"):
        store.poll()
    store.poll()  # told once
    for _ in range(2):
        with pytest.raises(PageError, match=f"session {failed.name!r}.*the session failed"):
            failed.wait()
        with pytest.raises(PageError, match="the session failed"):
            fetch(store, failed, 0, 0, 0)
        with pytest.raises(PageError, match="the session failed"):
            failed.append(0, pages[0][:, :1], 0, 1)
    assert not any(failed.name in name for name in ledger.accounts("ssd"))
    np.testing.assert_array_equal(fetch(store, other, 1, 0, range(48)), pages[1][0, :48])
    failed.close()


def test_a_write_that_fails_fails_its_session_alone(
    store: PageStore, tmp_path: Path, ledger: Ledger
) -> None:
    """A directory in place of the file: the rename at the end of the write fails."""
    pages = page_values(0, 48)
    first = store.open(48, MAPS * 48, True, "first", prompt_chunks=40, piece_chunks=8)
    other = open_session(store, "other", pages)
    (prompt,) = tmp_path.glob("kvdrive-*/session-000000/prompt")
    (prompt / "0.1.0.0" / "in the way").mkdir(parents=True)
    first.offload(0, pages[0], 40, None, None)
    check_one_failed_and_the_other_goes_on(store, ledger, first, other, pages)
    assert not prompt.parent.exists(), "the failed session's files are removed at once"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where this user may mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if mount is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_disk_that_fills_up_fails_the_session_that_writes(small_disk: Path) -> None:
    ledger, pages = Ledger(), page_values(0, 48)
    tiers = TierConfig(ssd_dir=str(small_disk), extent_bytes=PER_EXTENT * PAGE)
    with PageStore(GEOMETRY, tiers, ledger, Traffic()) as store:
        with pytest.raises(ValueError, match=r"has .* bytes free, but .* needs"):
            store.open(500, MAPS * 500, True, "too much", prompt_chunks=500)
        other = open_session(store, "other", pages)
        other.wait()
        ok = store.open(40, MAPS * 40, True, "fits", prompt_chunks=40)
        with pytest.raises(ValueError, match="open sessions still need"):
            store.open(100, MAPS * 100, True, "too", prompt_chunks=100)
        stat = os.statvfs(small_disk)
        filler = small_disk / "filler"
        filler.write_bytes(bytes(stat.f_bavail * stat.f_frsize - 8192))
        ok.offload(0, pages[0], 40, None, None)
        check_one_failed_and_the_other_goes_on(store, ledger, ok, other, pages)
        filler.unlink()
        again = open_session(store, "again", pages, 8)
        np.testing.assert_array_equal(fetch(store, again, 0, 0, range(16)), pages[0][0, :16])
    assert os.listdir(small_disk) == []


def test_a_full_disk_is_refused_at_construction(small_disk: Path) -> None:
    stat = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(stat.f_bavail * stat.f_frsize))
    with pytest.raises(ValueError, match=r"ssd_dir .* cannot (hold|be written)"):
        SsdDirectory(str(small_disk))
    assert os.listdir(small_disk) == ["filler"]


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    cases = {
        str(tmp_path / "missing"): "does not exist",
        str(file): "is not a directory",
    }
    if Path("/proc/self").is_dir():
        cases["/proc/self"] = "cannot be written"
    for path, message in cases.items():
        with pytest.raises(ValueError, match=f"ssd_dir .*{message}"):
            PageStore(GEOMETRY, TierConfig(ssd_dir=path), Ledger(), Traffic())
    assert os.listdir(tmp_path) == ["file"]


def test_a_directory_that_loses_data_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"something else")
    with pytest.raises(ValueError, match="what was read is not what was written"):
        SsdDirectory(str(tmp_path))
    assert os.listdir(tmp_path) == []


SCRIPT = """
import sys
import numpy as np
from kvdrive_jax.config import TierConfig
from kvdrive_jax.telemetry import Ledger, Traffic
from kvdrive_jax.tiers import PageGeometry, PageStore
g = PageGeometry(layers=1, kv_heads=1, chunk_size=4, head_dim=64, dtype=np.dtype("f4"))
store = PageStore(g, TierConfig(ssd_dir=sys.argv[1]), Ledger(), Traffic())
session = store.open(50, 600, True, "s", prompt_chunks=50)
session.offload(0, np.zeros((1, 50, 2, 4, 64), np.float32), 50, None, None)
if sys.argv[2] == "raise":
    raise KeyboardInterrupt
assert "jax" not in sys.modules, "the tiers must not import jax"
"""


@pytest.mark.parametrize("end", ["return", "raise"])
def test_nothing_is_left_when_python_exits_without_close(tmp_path: Path, end: str) -> None:
    other = tmp_path / "kvdrive-1-another-process"
    other.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), end], capture_output=True, text=True
    )
    assert (done.returncode == 0) == (end == "return"), done.stderr
    assert os.listdir(tmp_path) == [other.name]


def test_a_forked_child_leaves_the_parents_files_alone(tmp_path: Path) -> None:
    script = SCRIPT + "\nimport os\nsession.wait()\nstore._shared.offloaders.shutdown()\n"
    script += (
        "pid = os.fork()\n"
        "if pid == 0:\n    sys.exit()\n"
        "os.waitpid(pid, 0)\nassert len(os.listdir(sys.argv[1])) == 1\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path), "return"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == []
