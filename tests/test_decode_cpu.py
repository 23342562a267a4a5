"""The decode benchmark: its arithmetic, and one small run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import decode_cpu
from tests.tiny_model import write_tiny_model


def test_contexts_are_read_as_people_write_them() -> None:
    assert decode_cpu.sizes("8K,128K,300") == [8192, 131072, 300]
    with pytest.raises(ValueError, match="invalid literal"):
        decode_cpu.sizes("8M")


def test_llama_cpp_is_extrapolated_by_a_line_and_says_so() -> None:
    measured = {1000: 0.010, 2000: 0.012, 4000: 0.016}
    assert decode_cpu.llama_at(measured, 2000) == (0.012, False)
    seconds, guessed = decode_cpu.llama_at(measured, 10_000)
    assert guessed
    assert seconds == pytest.approx(0.028)
    with pytest.raises(ValueError, match="two contexts"):
        decode_cpu.llama_at({1000: 0.01}, 2000)


def test_the_faster_dtype_of_transformers_counts() -> None:
    sides = {
        "kvdrive": {"seconds_per_token": 0.02},
        "transformers float32": {"seconds_per_token": 0.5},
        "transformers bfloat16": {"seconds_per_token": 0.4},
        "llama.cpp": {"seconds_per_token": 0.1, "extrapolated": True},
    }
    ratios = decode_cpu.compare(sides)
    assert ratios == pytest.approx(
        {"kvdrive over transformers": 20.0, "kvdrive over llama.cpp": 5.0}
    )
    part = {"context": 8192, "sides": sides, "ratios": ratios}
    text = decode_cpu.report({"decode": [part]})
    assert "8,192  llama.cpp (extrapolated)" in text
    assert "20.00 x" in text


def test_a_run_without_llama_cpp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="parity extra not installed")
    folder, output = write_tiny_model(tmp_path / "model"), tmp_path / "result.json"
    arguments = ["--model", str(folder), "--contexts", "300", "--tokens", "8", "--rounds", "1"]
    arguments += ["--sides", "kvdrive,transformers float32", "--output", str(output)]
    options = decode_cpu.parser().parse_args(arguments)
    result = decode_cpu.run(options, in_process=True)
    decode_cpu.write_result(options.output, result)
    assert "llama.cpp: not run" in capsys.readouterr().out
    found = json.loads(output.read_text())
    assert found["check"]["kvdrive"]["difference"] < 1e-4
    [part] = found["decode"]
    assert set(part["sides"]) == {"kvdrive", "transformers float32"}
    assert all(side["seconds_per_token"] > 0 for side in part["sides"].values())
    assert str(tmp_path) not in output.read_text()
