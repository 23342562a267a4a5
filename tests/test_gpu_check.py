"""The GPU script does not rot: every part at toy size, and what it does when one fails."""

from __future__ import annotations

import argparse
import json
import sys
import types
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check_parts import PARTS, Part


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[int, dict, str]:
    """Exit status, result and output of one run of everything."""
    out = tmp_path_factory.mktemp("gpu_check") / "check.json"
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: lines.append(" ".join(words)))
        status = gpu_check.main(["--toy", "--one-process", "--out", str(out), "--seed", "5"])
    return status, json.loads(out.read_text()), "\n".join(lines)


def test_every_part_runs_at_toy_size(whole):
    status, result, output = whole
    bad = [
        (name, row["item"], row.get("why"), row.get("traceback"))
        for name, part in result["parts"].items()
        for row in part["rows"]
        if row["status"] not in ("ok", "skipped")
    ]
    assert bad == []
    assert status == 0
    assert list(result["parts"]) == list(PARTS)
    assert [part["ended"] for part in result["parts"].values()] == ["ok"] * len(PARTS)
    assert result["environment"]["toy"] is True
    assert result["seed"] == 5
    assert "times mean nothing" in output.splitlines()[-2] + output.splitlines()[-1]


def test_all_kernels_are_checked_and_none_is_skipped(whole):
    rows = whole[1]["parts"]["kernels"]["rows"]
    assert len(rows) >= 10
    for row in rows:
        assert row["status"] == "ok", row
        assert row["error_triton"] <= row["tolerance"]
        assert row["error_xla"] <= row["tolerance"]


def test_times_have_a_floor(whole):
    rows = [row for row in whole[1]["parts"]["speed"]["rows"] if "floor_s" in row]
    assert rows
    for row in rows:
        assert row["triton_s"] > 0
        assert row["triton_of_floor"] == pytest.approx(row["floor_s"] / row["triton_s"], rel=1e-3)


def test_decode_says_tokens_and_stages(whole):
    rows = {row["item"]: row for row in whole[1]["parts"]["decode"]["rows"]}
    staged = rows["decode, kvdrive, window x2, staged"]
    assert len(staged["tokens"]) > 0
    assert staged["work_s_per_step"]["compute"] > 0
    assert staged["hit_rate"] is not None
    assert rows["decode, full attention"]["tokens_per_s"] > 0


def test_a_failing_item_is_recorded_and_the_next_part_runs(monkeypatch, tmp_path, capsys):
    def run(bench):
        bench.facts["seen"] = 1
        bench.item("fine", lambda row: row.update(figure="1"))
        bench.item("broken", lambda row: 1 / 0)
        bench.item("too late", lambda row: None, needs_seconds=1e9)
        raise RuntimeError("and then the part itself")

    def second(bench):
        bench.item("goes on", lambda row: row.update(value=float("nan")))

    for name, body in (("bad", run), ("good", second)):
        module = types.ModuleType(name)
        module.run = body
        monkeypatch.setitem(sys.modules, f"benchmarks.gpu_check_parts.{name}", module)
    parts = {name: Part(name, 5, "a test") for name in ("bad", "good")}
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    out = tmp_path / "new" / "check.json"
    assert gpu_check.main(["--one-process", "--parts", "bad,good", "--out", str(out)]) == 1
    result = json.loads(out.read_text())
    bad, good = result["parts"]["bad"], result["parts"]["good"]
    assert [row["status"] for row in bad["rows"]] == ["ok", "error", "skipped"]
    assert "ZeroDivisionError" in bad["rows"][1]["traceback"]
    assert "and then the part itself" in bad["ended"]
    assert bad["facts"]["seen"] == 1
    assert good["ended"] == "ok"
    assert good["rows"][0]["value"] == "nan"
    printed = capsys.readouterr().out
    assert "bad: broken: error: ZeroDivisionError" in printed


def arguments(seed: object) -> argparse.Namespace:
    return argparse.Namespace(seed=seed, toy=True, weights=None)


def test_a_part_that_crashes_or_hangs_is_told(tmp_path: Path):
    crashed = gpu_check._apart("smollm2", tmp_path / "a.json", arguments("none"), 60)
    assert crashed.startswith("exit status 2: ")
    assert "invalid int value" in crashed
    hung = gpu_check._apart("smollm2", tmp_path / "b.json", arguments(1), -9.99)
    assert hung == "stopped after 0 s"


def test_a_part_in_a_process_of_its_own(tmp_path: Path):
    part = tmp_path / "part.json"
    assert gpu_check._apart("smollm2", part, arguments(1), 300) == "ok"
    (row,) = json.loads(part.read_text())["rows"]
    assert row["status"] == "skipped"
    assert "--weights" in row["why"]


def test_unknown_part(capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(["--parts", "kernels,magic"])
    assert "unknown part magic" in capsys.readouterr().err
