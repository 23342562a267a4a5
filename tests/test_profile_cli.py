"""``python -m kvdrive_jax.profile`` from texts to a run that uses the profile, and bad input."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdrive_jax import generate, profile
from kvdrive_jax.window.trace import read_traces
from tests.tiny_model import write_tiny_model

TEXT = "".join(f"{i}: the cat number {i * i} sat on the mat. " for i in range(24))
SMALL = ["--flush-tokens", "16", "--local", "8", "--segment-tokens", "256", "--budget", "64"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", template=None))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def generated(model: str, text: str, *flags: str) -> int:
    prompt = ["--prompt-file", text, "--max-new-tokens", "20", "--ignore-eos"]
    return generate.main(["--model", model, *prompt, *SMALL, *flags])


def test_from_texts_to_a_run_that_uses_them(
    model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = str(tmp_path / "t.npz")
    recording = ["record", "--model", model, "--text", text, "--text", text, *SMALL]
    status = profile.main([*recording, "--tokens", "600", "--steps", "20", "--traces", kept])
    out, err = capsys.readouterr()
    assert status == 0, err
    assert "3 layers x 2 kv heads, budget 64 tokens, 38 steps of 2 texts" in out
    assert [trace.info.text for trace in read_traces(kept)] == ["text.txt", "text.txt"]
    place = out.rpartition("profile: ")[2].strip()
    assert place.startswith(str(tmp_path / "cache"))

    # Found by itself, where not everything fits; or asked for, at a mean size.
    planned = ["--window", "auto", "--hbm-budget", "15720KiB", "--plan"]
    assert generated(model, text, *planned) == 0
    assert f"(by {place})" in capsys.readouterr().out
    # A trace of its own.
    trace = str(tmp_path / "own.npz")
    flags = ["--window-profile", place, "--window", "2", "--record-trace", trace]
    assert generated(model, text, *flags) == 0
    err = capsys.readouterr().err
    assert f"(mean as asked, by {place})" in err
    assert "trace: 19 steps" in err

    assert profile.main(["replay", trace, "--eviction", "belady", "--window", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[1:3] for line in lines[1:]] == [["belady", "x1"]]
    other = str(tmp_path / "p.json")
    assert profile.main(["make", trace, kept, "--budget", "32", "--output", other]) == 0
    assert "budget 32 tokens, 57 steps of 3 texts" in capsys.readouterr().out
    assert generated(model, text, "--window-profile", other) == 2
    assert "is for budget 32, this run has 64" in capsys.readouterr().err


def test_bad_input_is_refused_by_name(
    model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    missing, empty = str(tmp_path / "no.npz"), str(tmp_path / "empty.txt")
    record = ["record", "--model", model]
    for command, why in (
        (["replay", missing], "no such file"),
        (["replay", text], "cannot be used"),
        (["make", missing], "no such file"),
        ([*record, "--text", empty], "is empty"),
        ([*record, "--text", missing], "cannot be read"),
        ([*record, "--eviction", "none"], "has one window size"),
        ([*record, "--steps", "5000"], "tokens must leave room for 5000 steps"),
        ([*record, "--index", "nothing"], "index must be"),
    ):
        assert profile.main([*command]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "error: " in err
        assert why in err
    for command in (
        ["record", "--tokens", "0"],
        ["record", "--trace-depth", "0.5"],
        ["replay", missing, "--window", "0.5"],
        ["replay", missing, "--eviction", "mru"],
        [],
    ):
        with pytest.raises(SystemExit) as stopped:
            profile.main(command)
        assert stopped.value.code == 2
    assert generated(model, text, "--method", "full", "--record-trace", str(tmp_path / "t")) == 2
    assert "method full has none" in capsys.readouterr().err
    assert generated(model, text, "--trace-depth", "2") == 2
    assert "--trace-depth needs --record-trace" in capsys.readouterr().err
    assert generated(model, text, "--record-trace", str(tmp_path)) == 2
    assert "is a directory" in capsys.readouterr().err


def test_the_built_in_texts_are_long_enough_and_different(model: str) -> None:
    from kvdrive_jax.models.tokenizer import Tokenizer
    from kvdrive_jax.profile_texts import built_in

    prompts = built_in(Tokenizer.from_pretrained(model), 3000)
    assert len({prompt.name for prompt in prompts}) == 5
    assert len({tuple(prompt.ids) for prompt in prompts}) == 5
    for prompt in prompts:
        assert 2900 <= len(prompt.ids) <= 3050
