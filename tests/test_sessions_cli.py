"""``python -m kvdrive_jax.sessions``: what it tells, what it removes, what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdrive_jax import sessions
from kvdrive_jax.tiers.archive import ArchiveWriter, open_archive
from tests.test_archive import forge, live_writer, sealed

HEADER = {
    "model": "demo",
    "digest": "0123456789abcdef0123",
    "tokens": 1200,
    "generated": 30,
    "context": 8192,
    "dtype": "bfloat16",
}


def save(path: Path, header: dict[str, Any] | None = None) -> Path:
    with ArchiveWriter(path, HEADER if header is None else header) as writer:
        writer.add("layer-000", {"k": np.zeros(1000, np.int8)})
        writer.add("layer-001", {"k": np.ones(1000, np.int8)})
        writer.commit()
    return path


def cut(path: Path) -> None:
    """A saved session that cannot be opened any more."""
    os.truncate(path / open_archive(path).data / "layer-001.safetensors", 100)


def flip(path: Path) -> None:
    """One that opens, but is not what was written."""
    file = path / open_archive(path).data / "layer-000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def leave(path: Path) -> Path:
    """What a save that was killed leaves; returns its data directory."""
    with live_writer(path) as process:
        process.kill()
    (found,) = (data for data in path.glob("data-*") if not is_referred(path, data))
    return found


def is_referred(path: Path, data: Path) -> bool:
    return (path / "manifest.json").exists() and open_archive(path).data == data.name


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command; returns status, lines of stdout and stderr."""

    def run(*command: str | Path) -> tuple[int, list[str], str]:
        status = sessions.main([str(word) for word in command])
        out, err = capsys.readouterr()
        return status, out.splitlines(), err

    return run


def test_list(tmp_path: Path, told: Any) -> None:
    status, out, err = told("list", tmp_path)
    assert (status, out) == (0, [])
    assert f"no saved session in {tmp_path}" in err
    one = save(tmp_path / "one")
    forge(one, created=time.time() - 3 * 86400 - 60)
    other = save(tmp_path / "other", {"model": "a\tb\n\x1b[31m", "tokens": "many", "dtype": True})
    broken = save(tmp_path / "broken")
    cut(broken)
    status, out, err = told("list", tmp_path)
    assert (status, err) == (0, "")
    assert out == [
        "path\tmodel\tdigest\ttokens\tgenerated\tcontext\tdtype\tsize\tage",
        f"{broken}\tbroken: archive {broken}: part layer-001 must have 1,080 bytes, its file "
        "has 100",
        f"{one}\tdemo\t0123456789ab\t1200\t30\t8192\tbfloat16\t2.1 KiB\t3 d",
        f"{other}\ta?b??[31m\t-\t-\t-\t-\t-\t2.1 KiB\t{out[3].rpartition(chr(9))[2]}",
    ]
    assert told("list", one)[1][1:] == out[2:3]

    status, lines, _ = told("list", tmp_path, "--json")
    found = [json.loads(line) for line in lines]
    assert status == 0
    assert [item["path"] for item in found] == [str(broken), str(one), str(other)]
    assert found[1].items() >= {**HEADER, "nbytes": 2160, "error": None}.items()
    assert abs(found[1]["age_s"] - 3 * 86400 - 60) < 60
    assert found[2]["model"] == "a\tb\n\x1b[31m"
    assert found[2]["tokens"] is None
    assert "layer-001" in found[0]["error"]
    assert found[0]["nbytes"] is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (59.9, "59 s"), (60.0, "1 min"), (7200.0, "2 h"), (8640000.0, "100 d")],
)
def test_ages(seconds: float, text: str) -> None:
    assert sessions.format_age(seconds) == text


def test_verify(tmp_path: Path, told: Any) -> None:
    one, other = save(tmp_path / "one"), save(tmp_path / "two")
    status, out, err = told("verify", one, tmp_path)
    assert (status, out) == (0, [f"{path}\twhole\t2.1 KiB" for path in (one, other)])
    assert f"{one} (1 of 2): 2.1 KiB read" in err
    flip(one)
    third = save(tmp_path / "zero")
    cut(third)
    status, out, err = told("verify", tmp_path, "--quiet")
    assert (status, err) == (1, "")
    assert out[0].startswith(f"{one}\tbroken: archive {one}: part layer-000 cannot be used")
    assert out[1] == f"{other}\twhole\t2.1 KiB"
    assert out[2].startswith(f"{third}\tbroken: archive {third}: part layer-001 must have")


def test_prune_removes_what_is_of_no_use(tmp_path: Path, told: Any) -> None:
    whole, broken = save(tmp_path / "whole"), save(tmp_path / "broken")
    newer = save(tmp_path / "newer")
    orphan, first = leave(whole), leave(tmp_path / "first")
    cut(broken)
    forge(newer, version=7)
    with live_writer(tmp_path / "live") as process:
        before = sorted(tmp_path.rglob("*"))
        status, dry, err = told("prune", tmp_path, "--dry-run")
        assert status == 0
        assert f"kept: archive {newer}: its version is 7" in err
        assert sorted(tmp_path.rglob("*")) == before
        status, out, _ = told("prune", tmp_path)
        assert status == 0
        assert [line.replace("would remove", "removed") for line in dry[:-1]] == out[:-1]
        assert dry[-1] == f"would free\t{out[-1].partition(chr(9))[2]}"
        assert [line.split("\t")[:2] for line in out[:-1]] == [
            ["removed", str(path)] for path in (broken, first, orphan)
        ]
        assert out[-1].startswith("freed\t")
        process.communicate("commit\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["live", "newer", "whole"]
    assert list(open_archive(whole).verify())
    assert list(open_archive(tmp_path / "live").verify())
    assert told("prune", tmp_path)[1] == ["freed\t0 bytes (0 B)"]


def test_prune_by_age_and_all(tmp_path: Path, told: Any) -> None:
    old, new = save(tmp_path / "old"), save(tmp_path / "new")
    newer = save(tmp_path / "newer")
    forge(newer, version=7)
    forge(old, created=time.time() - 2.5 * 86400)
    orphan = leave(old)
    assert told("prune", tmp_path, "--older-than", "3", "--dry-run")[1][0].split("\t")[1] == str(
        orphan
    )
    nbytes = sum(file.stat().st_size for file in old.rglob("*") if file.is_file())
    status, out, _ = told("prune", tmp_path, "--older-than", "2")
    assert status == 0
    assert out == [
        f"removed\t{old}\t{out[0].split(chr(9))[2]}\tsaved 2 d ago",
        f"freed\t{nbytes} bytes ({out[0].split(chr(9))[2]})",
    ]
    status, out, _ = told("prune", tmp_path, "--all")
    assert status == 0
    assert [line.split("\t")[1] for line in out[:-1]] == [str(new), str(newer)]
    assert list(tmp_path.iterdir()) == []


def test_prune_says_what_it_could_not(tmp_path: Path, told: Any) -> None:
    path = save(tmp_path / "s")
    with sealed(path):
        status, out, err = told("prune", tmp_path, "--all")
        assert (status, out) == (1, ["freed\t0 bytes (0 B)"])
        assert "cannot be removed" in err
    orphan = leave(path)
    nbytes = sum(file.stat().st_size for file in orphan.iterdir())
    with sealed(path):
        status, out, err = told("prune", tmp_path)
        assert (status, out) == (1, [f"freed\t{nbytes} bytes ({nbytes} B)"])
        assert f"error: {orphan} cannot be removed" in err
    assert told("prune", tmp_path)[0] == 0
    assert not orphan.exists()
    assert list(open_archive(path).verify())


def test_bad_input_is_refused_by_name(tmp_path: Path, told: Any) -> None:
    (tmp_path / "file").write_text("x")
    for command in ("list", "verify", "prune"):
        for name, why in (("no", "does not exist"), ("file", "is not a directory")):
            status, out, err = told(command, tmp_path / name)
            assert (status, out) == (2, [])
            assert f"error: directory {str(tmp_path / name)!r} {why}" in err
    status, out, err = told("verify", tmp_path)
    assert (status, out) == (2, [])
    assert "has no saved session" in err


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ([], "required: command"),
        (["list"], "required: DIR"),
        (["verify"], "required: DIR"),
        (["list", "a", "--all"], "unrecognized arguments"),
        (["remove", "a"], "invalid choice"),
        *(
            (["prune", "a", "--older-than", days], "must be days, at least 0")
            for days in ("-1", "nan", "inf", "old")
        ),
    ],
)
def test_wrong_usage(command: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        sessions.main(command)
    assert stopped.value.code == 2
    assert why in capsys.readouterr().err


def test_as_a_program(tmp_path: Path) -> None:
    save(tmp_path / "s")
    flip(tmp_path / "s")
    command = [sys.executable, "-m", "kvdrive_jax.sessions", "verify", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "\tbroken: " in found.stdout
    assert "read" in found.stderr
