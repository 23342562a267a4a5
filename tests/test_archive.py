"""Archives: what is read is what was written, or an error; whatever ends a writer."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from kvdrive_jax.tiers import archive_claims
from kvdrive_jax.tiers.archive import (
    LARGEST_MANIFEST,
    ArchiveError,
    ArchiveWriter,
    DamagedError,
    bytes_under,
    find_archives,
    open_archive,
    orphans,
    prune_orphans,
    remove_archive,
)

DTYPES = ["bfloat16", "float32", "float16", "bool"]
DTYPES += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
FEW = settings(max_examples=60, deadline=None)


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A directory whose syncs cost nothing, where there is one: most tests are not about disks."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kvdrive-archive-", dir=parent) as path:
        yield Path(path)


@pytest.fixture
def place(memory: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir=memory))
    yield path
    shutil.rmtree(path)


def save(path: Path, value: int = 1, parts: int = 2) -> None:
    with ArchiveWriter(path, {"value": value}) as writer:
        for layer in range(parts):
            writer.add(f"layer-{layer:03}", {"x": np.full(30, value, np.int32)})
        writer.commit()


def value_of(path: Path) -> int:
    """The value of an archive, of which everything is read and says the same."""
    archive = open_archive(path)
    value = archive.header["value"]
    for name in archive.names:
        assert (archive.read(name)["x"] == value).all()
    return int(value)


def data_of(path: Path) -> Path:
    return path / open_archive(path).data


def envelope(values: Any) -> bytes:
    rest = json.dumps(values).encode()[1:]
    return b'{"crc32": "%08x", ' % zlib.crc32(rest) + rest


def forge(path: Path, **changes: Any) -> None:
    """Change fields of the manifest, with the right checksum."""
    values = json.loads((path / "manifest.json").read_bytes())
    values.pop("crc32")
    (path / "manifest.json").write_bytes(envelope(values | changes))


def forge_part(path: Path, content: bytes) -> None:
    """Change the only part, with the right size and checksum."""
    (data_of(path) / "layer-000.safetensors").write_bytes(content)
    part = {"name": "layer-000", "nbytes": len(content), "crc32": zlib.crc32(content)}
    forge(path, parts=[part])


def same_bits(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> bool:
    return (first.dtype, first.shape) == (second.dtype, second.shape) and (
        first.tobytes() == second.tobytes()
    )


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    seed = draw(st.integers(0, 2**32))
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    made = (raw % 2 if dtype.kind == "b" else raw).view(dtype).reshape(shape)
    return made.T if draw(st.booleans()) else made


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@FEW
@given(st.lists(st.dictionaries(NAMES, arrays(), max_size=4), max_size=3))
def test_what_is_read_is_what_was_written(memory: Path, parts: list[dict[str, Any]]) -> None:
    path = memory / "round"
    with ArchiveWriter(path, {"n": [1, 2.5, None, True, "\u00e9\n", {}]}) as writer:
        sizes = [writer.add(f"part-{i}", part) for i, part in enumerate(parts)]
        writer.commit()
    archive = open_archive(path)
    assert archive.header == {"n": [1, 2.5, None, True, "\u00e9\n", {}]}
    assert abs(archive.created - time.time()) < 60
    assert archive.names == tuple(f"part-{i}" for i in range(len(parts)))
    assert list(archive.verify()) == list(zip(archive.names, sizes, strict=True))
    assert archive.nbytes == sum(sizes)
    for name, part in zip(archive.names, parts, strict=True):
        found = archive.read(name)
        assert found.keys() == part.keys()
        assert all(same_bits(found[key], part[key]) for key in part)
        # Any reader of safetensors files finds the same.
        other = dict(deserialize((path / archive.data / f"{name}.safetensors").read_bytes()))
        assert {key: bytes(entry["data"]) for key, entry in other.items()} == {
            key: array.tobytes() for key, array in part.items()
        }


def test_views_of_one_buffer_that_cannot_be_written(place: Path) -> None:
    with ArchiveWriter(place / "s", {}) as writer:
        big_endian = np.arange(3, dtype=">i4")
        writer.add("a", {"k": np.ones((3, 5), ml_dtypes.bfloat16), "i": big_endian})
        writer.commit()
    found = open_archive(place / "s").read("a")
    assert found["i"].dtype == np.int32
    assert found["i"].tolist() == [0, 1, 2]
    assert not any(array.flags.owndata or array.flags.writeable for array in found.values())
    with pytest.raises(ValueError, match="read-only"):
        found["k"][0] = 2
    # Arrays that lie at odd places are copied, and no more writable for it.
    head = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    head += b'"b":{"dtype":"I32","shape":[2],"data_offsets":[1,9]}}'
    save(place / "odd", parts=1)
    forge_part(place / "odd", len(head).to_bytes(8, "little") + head + bytes(range(9)))
    odd = open_archive(place / "odd").read("layer-000")
    assert odd["b"].tobytes() == bytes(range(1, 9))
    assert odd["b"].flags.aligned
    assert not odd["b"].flags.writeable


def test_what_a_writer_refuses(place: Path) -> None:
    (place / "file").write_text("x")
    (place / "other").mkdir()
    (place / "other" / "manifest.json").write_text('{"name": "a web page"}')
    (place / "loop").symlink_to(place / "loop")
    for path, why in (
        (place / "no" / "s", "does not exist"),
        (place / "file", "is no directory"),
        (place / "loop", "is no directory"),
        (place / "other", "is a directory of other files"),
        (place / ("n" * 300), "cannot be written"),
    ):
        with pytest.raises(ValueError, match=f"path .*{why}"):
            ArchiveWriter(path, {})
    headers: tuple[Any, ...] = (
        {1: "a"},
        {"a": (1, 2)},
        {"a": float("nan")},
        {"a": np.int32(1)},
        [],
        {"a": "x" * LARGEST_MANIFEST},
    )
    for header in headers:
        with pytest.raises(ValueError, match="header"):
            ArchiveWriter(place / "s", header)
    assert not (place / "s").exists()
    with ArchiveWriter(place / "s", {}) as writer:
        writer.add("a", {})
        for name in ("", "A", "../a", "a/b", "a.b", "a\n", "\u00e9", "a" * 101, "a"):
            with pytest.raises(ValueError, match="name must be"):
                writer.add(name, {})
        for array in (np.zeros(2), np.zeros(2, complex), np.array(["x"]), np.array([{}]), [1]):
            with pytest.raises(ValueError, match="must be a NumPy array of"):
                writer.add("b", {"x": array})  # type: ignore[dict-item]
        for key in ("__metadata__", "\ud800"):
            with pytest.raises(ValueError, match="another name"):
                writer.add("b", {key: np.zeros(2, np.int8)})
        writer.commit()
        for call in (writer.commit, lambda: writer.add("c", {})):
            with pytest.raises(RuntimeError, match="committed or closed"):
                call()
    assert open_archive(place / "s").names == ("a",)
    with pytest.raises(ValueError, match="has no part 'b'"):
        open_archive(place / "s").read("b")


def test_the_header_is_that_of_the_start(place: Path) -> None:
    header = {"a": [1]}
    with ArchiveWriter(place / "s", header) as writer:
        header["a"].append(2)
        writer.commit()
    assert open_archive(place / "s").header == {"a": [1]}


def test_nothing_is_left_without_commit(place: Path) -> None:
    for _ in range(2):
        with suppress(KeyError), ArchiveWriter(place / "s", {}) as writer:
            writer.add("a", {})
            raise KeyError("mine")
    assert not (place / "s").exists()
    (place / "empty").mkdir()
    with ArchiveWriter(place / "empty", {}) as writer:
        writer.add("a", {})
    assert list((place / "empty").iterdir()) == []
    save(place / "s", 1)
    before = sorted((place / "s").rglob("*"))
    with ArchiveWriter(place / "s", {"value": 2}) as writer:
        writer.add("a", {})
    assert sorted((place / "s").rglob("*")) == before
    assert value_of(place / "s") == 1


def test_every_flipped_bit_and_cut_of_a_manifest_is_detected(place: Path) -> None:
    save(place / "s")
    manifest = place / "s" / "manifest.json"
    content = manifest.read_bytes()
    for at in range(len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        for wrong in (bytes(flipped), content[:at]):
            manifest.write_bytes(wrong)
            with pytest.raises(DamagedError, match=r"archive .*s: its manifest is damaged"):
                open_archive(place / "s")
            assert orphans(place / "s") == []
    manifest.write_bytes(content + b" ")
    with pytest.raises(DamagedError):
        open_archive(place / "s")
    # It is known as an archive still: what comes next takes its place.
    manifest.write_bytes(content[:40])
    assert find_archives(place) == [place / "s"]
    save(place / "s", 2)
    assert value_of(place / "s") == 2
    assert len(list((place / "s").iterdir())) == 2


def test_every_flipped_bit_and_cut_of_a_part_is_detected(place: Path) -> None:
    save(place / "s")
    archive = open_archive(place / "s")
    file = data_of(place / "s") / "layer-001.safetensors"
    content = file.read_bytes()
    for at in range(len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        file.write_bytes(flipped)
        with pytest.raises(ArchiveError, match=r"part layer-001 .* checksum"):
            open_archive(place / "s").read("layer-001")
    for wrong in [content[:at] for at in range(0, len(content), 7)] + [content + b"\0"]:
        file.write_bytes(wrong)
        with pytest.raises(DamagedError, match="part layer-001 must have"):
            open_archive(place / "s")
        # As when it happens after the archive was opened.
        with pytest.raises(ArchiveError, match=r"part layer-001 .* bytes, not"):
            archive.read("layer-001")
    told = archive.verify()
    assert [next(told)[0], next(told)[0]] == ["layer-000", "layer-001"]
    with pytest.raises(ArchiveError, match="layer-001"):
        next(told)
    assert len(archive.read("layer-000")["x"]) == 30
    file.unlink()
    with pytest.raises(DamagedError, match="is missing"):
        open_archive(place / "s")
    with pytest.raises(ArchiveError, match="its file is gone"):
        archive.read("layer-001")


def test_a_bad_page_cache_is_read_past(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(place / "s")
    file = data_of(place / "s") / "layer-000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"?")
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: file.write_bytes(content))
    assert value_of(place / "s") == 1


def test_manifests_that_lie(place: Path) -> None:
    path = place / "s"
    save(path, parts=1)
    content = (path / "manifest.json").read_bytes()
    data = open_archive(path).data
    part = json.loads(content)["parts"][0]
    (place / "out.safetensors").write_bytes(b"x")
    os.symlink(place / "out.safetensors", path / data / "link.safetensors")
    os.symlink(path / data, path / ("data-" + "1" * 32))
    os.mkfifo(path / data / "pipe.safetensors")
    (path / data / "folder.safetensors").mkdir()
    lies: tuple[tuple[dict[str, Any], str], ...] = (
        ({"format": "other"}, "format must be"),
        ({"version": 2}, "its version is 2, this program reads 1"),
        ({"version": True}, "version must be int"),
        ({"created": 1}, "created must be float"),
        ({"created": float("nan")}, "created must be seconds"),
        ({"created": -1.0}, "created must be seconds"),
        ({"header": []}, "header must be dict"),
        ({"parts": {}}, "parts must be list"),
        ({"parts": [1]}, "part must be dict"),
        ({"parts": [{"name": "a"}]}, "nbytes"),
        ({"parts": [part, part]}, "different names"),
        *(({"data": name}, "data must be") for name in ("..", "/etc", data + "/", data + "\n", 3)),
        ({"data": "data-" + "0" * 32}, "is missing"),
        ({"data": "data-" + "1" * 32}, "is no directory"),
        *(
            ({"parts": [part | {"name": name}]}, "name must be")
            for name in ("../layer-000", "/layer-000", "layer-000\n", "", 7)
        ),
        *(({"parts": [part | {"name": n}]}, "no regular") for n in ("link", "pipe", "folder")),
        ({"parts": [part | {"name": "no"}]}, "no.safetensors is missing"),
        *(
            ({"parts": [part | {"nbytes": nbytes}]}, "nbytes must be")
            for nbytes in (-1, 2**63, 10**400, 1.0, "1", None, True)
        ),
        *(({"parts": [part | {"nbytes": n}]}, "must have") for n in (0, 1, 2**62)),
        *(({"parts": [part | {"crc32": crc}]}, "crc32 must be") for crc in (-1, 2**32, "0")),
    )
    for changes, why in lies:
        forge(path, **changes)
        with pytest.raises(ValueError, match=f"archive {path}: .*{why}") as refused:
            open_archive(path)
        # Only another program's archive may be good for something yet.
        assert isinstance(refused.value, DamagedError) == ("this program reads" not in why)
        if "data" not in changes:
            assert orphans(path) == []
        (path / "manifest.json").write_bytes(content)
    for wrong in (envelope([]), envelope({}), envelope({"a": 1})[:-1], b"", b"[" * 100_000):
        (path / "manifest.json").write_bytes(wrong)
        with pytest.raises(DamagedError):
            open_archive(path)
    (path / "manifest.json").write_bytes(envelope({"a": "x" * LARGEST_MANIFEST}))
    with pytest.raises(DamagedError, match="more than 1,048,576 bytes"):
        open_archive(path)
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")
    with pytest.raises(DamagedError, match="no regular file"):
        open_archive(path)
    (path / "manifest.json").unlink()
    (place / "m.json").write_bytes(content)
    (path / "manifest.json").symlink_to(place / "m.json")
    with pytest.raises(DamagedError, match="symbolic link"):
        open_archive(path)
    for missing in (place, place / "no", place / "m.json"):
        with pytest.raises(ValueError, match="archive"):
            open_archive(missing)


def test_an_archive_of_a_newer_version_keeps_its_data(place: Path) -> None:
    save(place / "s")
    forge(place / "s", version=2, data=["in", "some", "other", "form"])
    assert orphans(place) == []
    assert prune_orphans(place) == 0
    forge(place / "s", version=1, data=data_of_only(place / "s"))
    assert value_of(place / "s") == 1


def data_of_only(path: Path) -> str:
    (found,) = path.glob("data-*")
    return found.name


def test_sizes_beyond_32_bits(place: Path) -> None:
    save(place / "s", parts=1)
    nbytes = (5 << 30) + 1
    os.truncate(data_of(place / "s") / "layer-000.safetensors", nbytes)
    forge(place / "s", parts=[{"name": "layer-000", "nbytes": nbytes, "crc32": 0}])
    assert open_archive(place / "s").nbytes == nbytes


def header_of(entries: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_parts_that_lie_are_refused_by_the_library(place: Path) -> None:
    save(place / "s", parts=1)

    def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
        return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}

    for content in (
        b"",
        b"\x02",
        (2**63).to_bytes(8, "little") + b"{}",
        (2**64 - 1).to_bytes(8, "little"),
        header_of({"a": entry("U8", [9], 0, 9)}, b"12345678"),
        header_of({"a": entry("U8", [8], 0, 8)}, b"123456789"),
        header_of({"a": entry("U8", [4], 0, 8)}, b"12345678"),
        header_of({"a": entry("U8", [8], 0, 8), "b": entry("U8", [4], 4, 8)}, b"12345678"),
        header_of({"a": entry("U8", [4], 4, 8)}, b"12345678"),
        header_of({"a": entry("U8", [2**63, 2**63], 0, 8)}, b"12345678"),
        header_of({"a": entry("U8", [-8], 0, 8)}, b"12345678"),
        header_of({"a": entry("F64", [1], 0, 8)}, b"12345678"),
        header_of({"a": entry("F9", [1], 0, 8)}, b"12345678"),
        header_of({"a": {}}, b""),
    ):
        forge_part(place / "s", content)
        with pytest.raises(ArchiveError, match="part layer-000 cannot be used"):
            open_archive(place / "s").read("layer-000")


@FEW
@given(st.data())
def test_any_bytes_make_arrays_or_an_error(memory: Path, data: st.DataObject) -> None:
    path = memory / "fuzz"
    if not path.exists():
        save(path, parts=1)
    good = header_of({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}, b"12345678")
    at = data.draw(st.integers(0, len(good) - 1))
    forge_part(path, good[:at] + data.draw(st.binary(max_size=3)) + good[at + 1 :])
    try:
        found = open_archive(path).read("layer-000")
    except ArchiveError:
        return
    assert sum(array.nbytes for array in found.values()) <= len(good) + 3


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@FEW
@given(st.sampled_from(["format", "version", "created", "data", "parts", "header"]), JSON)
def test_any_field_makes_an_archive_or_a_refusal(memory: Path, field: str, value: Any) -> None:
    path = memory / "field"
    if not path.exists():
        save(path)
    content = (path / "manifest.json").read_bytes()
    forge(path, **{field: value})
    try:
        assert list(open_archive(path).verify()) or field == "parts"
    except ValueError as error:
        assert str(path) in str(error)  # noqa: PT017 (not always raised)
    (path / "manifest.json").write_bytes(content)


KILLED = """
import os, signal, sys
import numpy as np
from kvdrive_jax.tiers import archive, archive_claims, archive_parts

def save(path, value):
    with archive.ArchiveWriter(path, {"value": value}) as writer:
        for layer in range(2):
            writer.add(f"layer-{layer:03}", {"x": np.full(30, value, np.int32)})
        writer.commit()

def die_before(call):
    def counted(run):
        def step(*args, **names):
            nonlocal call
            call -= 1
            if not call:
                os.kill(os.getpid(), signal.SIGKILL)
            return run(*args, **names)
        return step
    for name in ("open", "mkdir", "write", "fsync", "replace", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    archive_claims.fcntl.flock = counted(archive_claims.fcntl.flock)
    archive_parts._STEP = 64

status, call = 1, 0
while status:
    call += 1
    path = f"{sys.argv[1]}/{call:03}"
    if sys.argv[2] == "update":
        save(path, 1)
    child = os.fork()
    if not child:
        try:
            die_before(call)
            save(path, 2)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
"""


@pytest.mark.parametrize("mode", ["first", "update"])
def test_a_writer_killed_at_any_call_leaves_the_old_or_the_new(place: Path, mode: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(place), mode]
    subprocess.run(command, check=True, timeout=60)
    cases = sorted(place.iterdir())
    assert len(cases) > 25
    found = []
    for case in cases:
        whole = find_archives(case) == [case]
        found.append(value_of(case) if whole else 0)
    # One moment decides, and all before it is the old, all after it the new.
    assert set(found) == {0 if mode == "first" else 1, 2}
    assert found == sorted(found)
    left = {path.parent for path in orphans(place)}
    assert len(left) > 20
    for case, value in list(zip(cases, found, strict=True))[::2]:
        if case in left:
            nbytes = bytes_under(case)
            assert prune_orphans(case) == nbytes - (bytes_under(case) if value else 0)
        if value:
            assert value_of(case) == value
            assert len(list(case.iterdir())) == 2
        else:
            assert not case.exists() or not list(case.iterdir())
    # The next writer does it as well.
    for case in cases[1::2]:
        save(case, 3)
        assert value_of(case) == 3
        assert len(list(case.iterdir())) == 2
    assert orphans(place) == []


LIVE = """
import sys
import numpy as np
from kvdrive_jax.tiers.archive import ArchiveWriter
with ArchiveWriter(sys.argv[1], {"value": 2}) as writer:
    writer.add("layer-000", {"x": np.full(30, 2, np.int32)})
    print("ready", flush=True)
    if sys.stdin.readline() == "commit\\n":
        writer.commit()
"""


@contextmanager
def live_writer(path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", LIVE, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


def test_a_live_writer_is_never_touched(place: Path) -> None:
    save(place / "s", 1)
    with live_writer(place / "s") as process, live_writer(place / "t") as killed:
        assert orphans(place) == []
        assert prune_orphans(place) == 0
        assert find_archives(place) == [place / "s"]
        save(place / "s", 5)
        assert value_of(place / "s") == 5
        assert remove_archive(place / "s") > 0
        assert find_archives(place) == []
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        (left,) = orphans(place)
        assert left.parent == place / "t"
        assert prune_orphans(place) > 0
        assert not (place / "t").exists()
        process.communicate("commit\n")
        assert process.returncode == 0
    assert value_of(place / "s") == 2
    assert len(list((place / "s").iterdir())) == 2


def test_two_writers_of_one_path(place: Path) -> None:
    path = place / "s"
    with ArchiveWriter(path, {"value": 1}) as first, ArchiveWriter(path, {"value": 2}) as second:
        for value, writer in ((1, first), (2, second)):
            writer.add("a", {"x": np.full(3, value, np.int8)})
        second.commit()
        assert value_of(path) == 2
        opened = open_archive(path)
        first.commit()
    assert value_of(path) == 1
    with pytest.raises(ArchiveError, match="replaced by a later save"):
        opened.read("a")
    assert len(list(path.iterdir())) == 2
    with ArchiveWriter(path, {"value": 3}) as first, ArchiveWriter(path, {"value": 4}):
        first.commit()
    assert value_of(path) == 3
    assert len(list(path.iterdir())) == 2


def test_a_directory_pruned_before_it_was_locked_is_made_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, early = archive_claims.take_lock, [True]

    def late(data: Path) -> Any:
        if early and early.pop():
            assert prune_orphans(place) == 0
            assert not data.parent.exists()
        return lock(data)

    monkeypatch.setattr(archive_claims, "take_lock", late)
    save(place / "s")
    assert value_of(place / "s") == 1
    assert len(list((place / "s").iterdir())) == 2


HAMMER = """
import sys
import numpy as np
from kvdrive_jax.tiers.archive import ArchiveWriter
for value in range(60):
    with ArchiveWriter(sys.argv[1], {"value": value}) as writer:
        writer.add("layer-000", {"x": np.full(30, value, np.int32)})
        if value % 4:
            writer.commit()
"""


def test_processes_that_save_read_and_prune_at_once(place: Path) -> None:
    save(place / "s")
    command = [sys.executable, "-c", HAMMER, str(place / "s")]
    reads = 0
    with subprocess.Popen(command) as one, subprocess.Popen(command) as two:
        while one.poll() is None or two.poll() is None:
            prune_orphans(place)
            try:
                value_of(place / "s")
                reads += 1
            except ArchiveError as error:
                assert "its file is gone" in str(error)  # noqa: PT017 (not always raised)
    assert one.returncode == two.returncode == 0
    assert reads
    assert value_of(place / "s") == 59
    prune_orphans(place)
    assert len(list((place / "s").iterdir())) == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here: that needs root")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    path = small_disk / "s"
    save(path, 1)
    for room in (300_000, 900_000):
        with ArchiveWriter(path, {"value": 2}) as writer:
            writer.add("a", {"x": np.zeros(room, np.int8)})
            with pytest.raises(ArchiveError, match=r"part b .*No space left.* free some space"):
                writer.add("b", {"x": np.zeros(2 << 20, np.int8)})
            # What did not fit is gone, what did can be committed.
            writer.add("c", {"x": np.zeros(50_000, np.int8)})
        assert value_of(path) == 1
        assert len(list(path.iterdir())) == 2
    disk = os.statvfs(small_disk)
    (small_disk / "fill").write_bytes(bytes(disk.f_bavail * disk.f_frsize))
    with pytest.raises(ArchiveError, match="No space left"):
        save(path, 2)
    assert value_of(path) == 1


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_takes_no_more(place: Path) -> None:
    save(place / "s", 1)
    with ArchiveWriter(place / "s", {"value": 2}) as writer:
        with largest_file(1000), pytest.raises(ArchiveError, match=r"part a .*File too large"):
            writer.add("a", {"x": np.zeros(2000, np.int8)})
        writer.add("a", {"x": np.full(3, 2, np.int8)})
        for _ in range(2):
            with largest_file(100), pytest.raises(ArchiveError, match="the manifest cannot be"):
                writer.commit()
            assert value_of(place / "s") == 1
        writer.commit()
    assert value_of(place / "s") == 2
    assert len(list((place / "s").iterdir())) == 2


@contextmanager
def sealed(path: Path) -> Iterator[None]:
    """A directory in which nothing can be made or removed, for root too."""
    root = os.geteuid() == 0
    on, off = (["chattr", "+i"], ["chattr", "-i"]) if root else (["chmod", "555"], ["chmod", "755"])
    if shutil.which(on[0]) is None or subprocess.run([*on, path], capture_output=True).returncode:
        pytest.skip(f"{' '.join(on)} does not work in {path}")
    try:
        yield
    finally:
        subprocess.run([*off, path], check=True)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    save(tmp_path / "s", 1)
    with sealed(tmp_path / "s"):
        with pytest.raises(ValueError, match=r"path .*s' cannot be written \("):
            ArchiveWriter(tmp_path / "s", {})
        with pytest.raises(ArchiveError, match="cannot be removed"):
            remove_archive(tmp_path / "s")
        assert value_of(tmp_path / "s") == 1
    with sealed(tmp_path), pytest.raises(ValueError, match="cannot be written"):
        ArchiveWriter(tmp_path / "t", {})
    assert remove_archive(tmp_path / "s") > 0


def test_only_what_is_an_archive_is_found_and_removed(place: Path) -> None:
    save(place / "b")
    save(place / "a")
    (place / "web").mkdir()
    (place / "web" / "manifest.json").write_text("{}")
    (place / "file").write_text("x")
    (place / "link").symlink_to(place / "a")
    (place / "empty").mkdir()
    assert find_archives(place) == [place / "a", place / "b"]
    assert find_archives(place / "a") == [place / "a"]
    assert find_archives(place / "link") == [place / "link"]
    for wrong in (place / "web", place / "empty", place / "no"):
        with pytest.raises(ValueError, match="is no archive"):
            remove_archive(wrong)
    with pytest.raises(ValueError, match="does not exist"):
        find_archives(place / "no")
    with pytest.raises(ValueError, match="is not a directory"):
        orphans(place / "file")
    # Files that are not of an archive stay, and so does the directory that has them.
    (place / "a" / "notes.txt").write_text("mine")
    nbytes = bytes_under(place / "a") - 4
    assert remove_archive(place / "a") == nbytes
    assert [path.name for path in (place / "a").iterdir()] == ["notes.txt"]
    # A link out of an archive is neither an orphan nor followed.
    (place / "b" / ("data-" + "a" * 32)).symlink_to(place / "web")
    assert orphans(place) == []
    remove_archive(place / "b")
    assert (place / "web" / "manifest.json").exists()
    assert prune_orphans(place) == 0
    assert (place / "empty").exists()


def test_a_thousand_saves_leave_one(place: Path) -> None:
    save(place / "s", 0)
    descriptors, files = len(os.listdir("/proc/self/fd")), len(list(place.rglob("*")))
    for value in range(1, 1001):
        save(place / "s", value, parts=1 + value % 2)
        if value % 100 == 0:
            assert value_of(place / "s") == value
    save(place / "s", 1001)
    assert len(list(place.rglob("*"))) == files
    assert len(os.listdir("/proc/self/fd")) == descriptors
