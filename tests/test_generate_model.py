"""The command with a real engine: a tiny random model through every tier, and bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvdrive_jax import generate
from tests.tiny_model import write_tiny_model

PROMPT = "".join(f"{i}: the cat number {i * i} sat on the mat. " for i in range(72))  # 2,800 tokens
SMALL = ["--no-chat", "--flush-tokens", "16", "--local", "8", "--segment-tokens", "256"]
# One shape for all runs of kvdrive, so that it is compiled once; full attention for the rest.
LONG = ["--prompt", PROMPT, "--max-new-tokens", "24", "--budget", "64", "--ignore-eos", *SMALL]
SHORT = ["--method", "full", "--no-chat"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


class Command:
    """Runs the command in this process on the tiny model."""

    def __init__(self, model: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.model, self.capsys = model, capsys
        self.err = ""

    def __call__(self, *flags: str, status: int = 0, model: str | None = None) -> str:
        """Returns stdout; the exit status must be ``status`` and no traceback may be shown."""
        found = generate.main(["--model", model or self.model, *flags])
        captured = self.capsys.readouterr()
        self.err = captured.err
        assert found == status, captured.err
        assert "Traceback" not in captured.err
        if status == 2:
            assert captured.out == ""
            assert captured.err.count("error: ") == 1
        return captured.out


@pytest.fixture
def run(model: str, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(model, capsys)


def smallest_dram(run: Command, *flags: str) -> int:
    """The least DRAM budget, within an eighth, with which the run fits."""
    size = 64 * 2**10
    while generate.main(["--model", run.model, "--plan", *flags, "--dram-budget", str(size)]):
        size += size // 8
    run.capsys.readouterr()
    return size


def test_tiers_and_windows_give_the_same_answer(run: Command, tmp_path: Path) -> None:
    everything = run(*LONG)
    assert len(everything.encode()) >= 24
    assert run(*LONG, "--window", "2") == everything
    stats, ssd = tmp_path / "stats.json", tmp_path / "ssd"
    ssd.mkdir()
    tiers = ["--window", "1", "--ssd-dir", str(ssd), "--extent-bytes", "4096"]
    dram = smallest_dram(run, *LONG, *tiers)
    tiers += ["--dram-budget", str(dram), "--stats-json", str(stats)]
    assert run(*LONG, *tiers) == everything
    assert list(ssd.iterdir()) == []
    figures = json.loads(stats.read_text())
    check_stats(figures)
    assert figures["bytes"]["ssd_to_dram"] > 0
    assert figures["tiers"]["dram"]["peak_bytes"] <= dram


def check_stats(figures: dict[str, Any]) -> None:
    assert set(figures) == {
        "model", "method", "device", "dtype", "config", "sessions", "prefill_s", "index_s",
        "decode_s", "save_s", "decode_tokens_per_s", "bytes", "pages", "tiers", "stage_s",
        "timeline",
    }  # fmt: skip
    for session in figures["sessions"]:
        assert set(session) == {
            "prompt_tokens", "new_tokens", "finish_reason", "ttft_s", "attended_tokens_mean",
            "hit_rate", "reused_tokens", "saved_bytes",
        }  # fmt: skip
    assert sum(figures["stage_s"].values()) == pytest.approx(figures["decode_s"], rel=0.02)
    timeline = figures["timeline"]
    told = timeline["device_busy_s"] + sum(timeline["stall_s"].values())
    assert told == pytest.approx(timeline["wall_s"], rel=1e-6)
    for held in figures["tiers"].values():
        assert held["peak_bytes"] <= held["budget_bytes"]


def test_every_field_of_the_statistics_is_documented(run: Command, tmp_path: Path) -> None:
    stats = tmp_path / "s.json"
    run("--prompt", "x", "--max-new-tokens", "2", "--stats-json", str(stats), *SHORT)
    figures = json.loads(stats.read_text())
    text = (Path(__file__).parent.parent / "docs" / "stats.md").read_text(encoding="utf-8")
    names = [*figures, *figures["sessions"][0], *figures["bytes"], *figures["tiers"]]
    timeline = figures["timeline"]
    names += [*timeline, *timeline["stall_s"], *timeline["work_s"], *timeline["lanes"]]
    names += timeline["lanes"]["device"]
    for name in [*names, *figures["stage_s"], *figures["tiers"]["hbm"], *figures["pages"]]:
        assert f"`{name}`" in text


def test_a_session_is_saved_and_gone_on_with(run: Command, tmp_path: Path) -> None:
    folder = str(tmp_path / "session")
    whole = run(*LONG)
    first = run(*LONG, "--max-new-tokens", "10", "--save-session", folder)
    assert f"saved in {folder}" in run.err
    more = ["--budget", "64", "--ignore-eos", *SMALL, "--load-session", folder]
    second = run(*more, "--max-new-tokens", "14")
    assert first.removesuffix("\n") + second == whole
    assert run(*LONG, "--load-session", folder) == whole
    run(*more, "--prompt", "x", status=2)
    assert "does not begin as the session" in run.err
    run(*more[:-1], str(tmp_path), status=2)
    assert "is none" in run.err
    run("--input-jsonl", "x", "--save-session", folder, status=2)
    assert "takes one prompt" in run.err


def test_budget_of_the_context_equals_full_attention(run: Command) -> None:
    assert run(*LONG, "--budget", "4096") == run(*LONG, "--method", "full")


def test_no_new_tokens_only_prefills(run: Command, tmp_path: Path) -> None:
    stats = tmp_path / "s.json"
    assert (
        run("--prompt", PROMPT, "--max-new-tokens", "0", "--stats-json", str(stats), *SMALL) == ""
    )
    session = json.loads(stats.read_text())["sessions"][0]
    assert (session["new_tokens"], session["finish_reason"]) == (0, "length")
    assert session["ttft_s"] is None


def test_stop_string_never_shows(run: Command) -> None:
    common = ["--prompt", "hello", "--max-new-tokens", "32", "--ignore-eos", *SHORT]
    text = run(*common)
    stop = text[5:7]
    assert run(*common, "--stop", stop).rstrip("\n") == text[: text.index(stop)].rstrip("\n")


def test_seed_repeats(run: Command) -> None:
    common = ["--prompt", "hello", "--max-new-tokens", "16", "--ignore-eos", "--temperature", "1.5"]
    first = run(*common, *SHORT, "--seed", "5")
    assert run(*common, *SHORT, "--seed", "5") == first
    assert run(*common, *SHORT, "--seed", "6") != first


def test_lines_of_different_lengths_match_single_prompts(run: Command, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = ["hello", "x" * 5000, PROMPT[:301], "", "a"]
    source.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    common = ["--max-new-tokens", "8", "--ignore-eos", *SHORT]
    run("--input-jsonl", str(source), "--output-jsonl", str(target), *common, status=1)
    results = {r["index"]: r for r in map(json.loads, target.read_text().splitlines())}
    assert "context length" in results[1]["error"]
    assert "line 2: " in run.err
    assert "line 4: 'prompt' is empty" in results[3]["error"]
    for index in (0, 2, 4):
        alone = run("--prompt", prompts[index], *common)
        assert results[index]["text"].rstrip("\n") == alone.rstrip("\n")
        assert results[index]["prompt_tokens"] == len(prompts[index])
        assert results[index]["new_tokens"] == 8


def test_chat_is_the_default_where_there_is_a_template(run: Command, tmp_path: Path) -> None:
    stats = tmp_path / "s.json"

    def prompt_tokens(*flags: str, model: str | None = None) -> int:
        run(
            "--prompt",
            "hello",
            "--max-new-tokens",
            "1",
            "--stats-json",
            str(stats),
            *flags,
            model=model,
        )
        count: int = json.loads(stats.read_text())["sessions"][0]["prompt_tokens"]
        return count

    chat = prompt_tokens()
    assert prompt_tokens("--chat") == chat > prompt_tokens("--no-chat") == len("hello")
    assert prompt_tokens("--system", "be brief") > chat
    plain = str(write_tiny_model(tmp_path / "plain", template=None))
    assert prompt_tokens(model=plain) == len("hello")


def test_plan_does_not_load_and_says_whether_it_fits(
    run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_loading(monkeypatch)
    table = run("--prompt", PROMPT, "--plan")
    for word in ("HBM", "DRAM", "SSD", "weights", "fits"):
        assert word in table
    table = run("--prompt", PROMPT, "--plan", "--hbm-budget", "1MiB", status=1)
    assert "DOES NOT FIT" in table


def forbid_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr("kvdrive_jax.engine.load_pretrained", load)


# ---------------------------------------------------------------- bad input


NO_DIRECTORY = "ssd_dir must be an existing directory"
TIGHT = ["--window", "1", "--budget", "64"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--no-chat", "--prompt", "x" * 4090, "--max-new-tokens", "20"], "context length"),
        (["--prompt", "x" * 90, "--context-length", "100"], "context length"),
        (["--prompt", "x", "--context-length", "999999"], "context_length"),
        (["--prompt", "x", "--budget", "5000"], "budget must be at most the context length"),
        (["--prompt", PROMPT, "--hbm-budget", "1MiB"], "raise --hbm-budget"),
        (["--prompt", PROMPT, "--hbm-budget", "0"], "raise --hbm-budget"),
        (["--prompt", PROMPT, *TIGHT, "--dram-budget", "8KiB"], "--dram-budget"),
        (["--prompt", "x", "--ssd-dir", "/nonexistent/dir"], NO_DIRECTORY),
        (["--prompt", "x", "--ssd-dir", __file__], NO_DIRECTORY),
        ([*LONG, "--window", "1", "--ssd-dir", "/proc"], "--ssd-dir"),  # nothing fits there
        (["--prompt", "x", "--system", "s", "--no-chat"], "system needs chat"),
    ],
)
def test_refused_before_loading(
    run: Command, monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    forbid_loading(monkeypatch)
    run(*flags, status=2)
    assert message in run.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_ssd_directory_that_is_not_writable(run: Command, tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    run(*LONG, "--window", "1", "--ssd-dir", str(tmp_path), status=2)
    assert "ssd_dir" in run.err


def test_full_ssd_budget_is_refused(run: Command, tmp_path: Path) -> None:
    flags = ["--prompt", PROMPT, "--window", "1", "--budget", "64", "--ssd-budget", "8KiB"]
    run(*flags, "--ssd-dir", str(tmp_path), *SMALL, status=2)
    assert "--ssd-budget" in run.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors", "tokenizer.json"])
def test_model_folder_that_lacks_a_file(run: Command, tmp_path: Path, lost: str) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    (folder / lost).unlink()
    run("--prompt", "x", model=str(folder), status=2)
    expected = "tokenizer" if lost == "tokenizer.json" else lost.removeprefix("model.")
    assert expected in run.err
    assert str(folder) in run.err


def test_no_such_model(run: Command, tmp_path: Path) -> None:
    run("--prompt", "x", model=str(tmp_path / "none"), status=2)
    assert "none" in run.err
    run("--prompt", "x", model=str(tmp_path / "none.gguf"), status=2)
    assert "none.gguf" in run.err


def test_template_that_fails(run: Command, tmp_path: Path) -> None:
    template = "{{ raise_exception('only poems are answered') }}"
    folder = write_tiny_model(tmp_path / "tiny", template=template)
    run("--prompt", "x", model=str(folder), status=2)
    assert "only poems are answered" in run.err


# ---------------------------------------------------------------- as a process


def start(model: str, *flags: str, **settings: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "kvdrive_jax.generate", "--model", model, *flags]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ), **settings
    )


def test_ctrl_c_keeps_what_was_made_and_leaves_nothing_behind(model: str, tmp_path: Path) -> None:
    ssd, stats = tmp_path / "ssd", tmp_path / "stats.json"
    ssd.mkdir()
    tiers = ["--window", "1", "--ssd-dir", str(ssd), "--stats-json", str(stats)]
    with start(model, *LONG, "--max-new-tokens", "1000", *tiers) as process:
        assert process.stdout is not None
        made = os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert made + out
    assert b"Traceback" not in err
    assert b"stopped" in err
    assert list(ssd.iterdir()) == []
    session = json.loads(stats.read_text())["sessions"][0]
    assert session["finish_reason"] == "cancelled"
    assert 0 < session["new_tokens"] < 1000


def test_reader_that_goes_away(model: str) -> None:
    flags = ["--prompt", "hello", "--max-new-tokens", "3000", "--ignore-eos", "--quiet"]
    with start(model, *flags, *SHORT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(timeout=120) == 1
    assert err == b""
