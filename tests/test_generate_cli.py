"""The command: options, prompts, streams, exit statuses. A small stand-in plays the engine."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdrive_jax import cli_options, generate
from kvdrive_jax.cli_options import GenerateConfig, parse_command_line
from kvdrive_jax.config import KVDriveConfig
from kvdrive_jax.prompts import read_prompts
from kvdrive_jax.timeline import Timeline


@dataclasses.dataclass
class Generation:
    text: str
    token_ids: list[int]
    finish_reason: str
    stats: dict[str, Any]
    error: str | None = None


@dataclasses.dataclass
class StreamEvent:
    session: int
    text: str
    generation: Generation | None = None


class StandInEngine:
    """Answers each prompt with its words, one a step, round robin over the sessions.

    Words with a meaning: 'interrupt' sends this process a Ctrl-C, 'crash' raises, 'broken' ends
    that session with an error, 'refuse' makes the engine refuse the request.
    """

    closed = 0
    cancelled = 0

    def __init__(self, config: KVDriveConfig, **settings: Any) -> None:
        self.config, self.settings = config, settings
        self.requests: list[dict[str, Any]] = []
        self.sessions: list[dict[str, Any]] = []

    @classmethod
    def from_pretrained(cls, model: str, config: KVDriveConfig, **settings: Any) -> StandInEngine:
        return cls(config, model=model, **settings)

    def __enter__(self) -> StandInEngine:
        return self

    def __exit__(self, *_: object) -> None:
        StandInEngine.closed += 1

    def config_line(self) -> str:
        return f"config: {self.config.method}"

    def encode(self, prompt: str, *, chat: bool | None, system: str | None) -> list[int]:
        return list(prompt.encode())

    def stream(self, prompt: str, *, chat: Any, system: Any, **request: Any) -> Any:
        return self.stream_ids([self.encode(prompt, chat=chat, system=system)], **request)

    def stream_ids(self, encoded: list[list[int]], **request: Any) -> Iterator[StreamEvent]:
        prompts = [bytes(ids).decode() for ids in encoded]
        if any("refuse" in text for text in prompts):
            raise ValueError("the prompt is too long: shorten it")
        return self._events(prompts, request)

    def _events(self, prompts: list[str], request: dict[str, Any]) -> Iterator[StreamEvent]:
        timeline = request["timeline"] or Timeline()
        most = request["max_new_tokens"]
        words = [text.split(" ")[:most] for text in prompts]
        self.sessions = [
            {"prompt_tokens": len(text), "new_tokens": 0, "finish_reason": "cancelled",
             "hit_rate": None} for text in prompts
        ]  # fmt: skip
        if "early" in prompts[0]:
            os.kill(os.getpid(), signal.SIGINT)
        try:
            for step in range(max(map(len, words)) + 1):
                for session, mine in enumerate(words):
                    if step < len(mine):
                        self.sessions[session]["new_tokens"] += 1
                        if mine[step] == "interrupt":
                            os.kill(os.getpid(), signal.SIGINT)
                        if mine[step] == "crash":
                            raise RuntimeError("the device went away")
                        timeline.span("device", "compute", step + 0.25, step + 0.75, layer=0)
                        timeline.end_step(step, step + 1)
                        yield StreamEvent(session, mine[step] + " ")
                    elif step == len(mine):
                        broken = "broken" in mine
                        reason = "error" if broken else "length"
                        self.sessions[session]["finish_reason"] = reason
                        text = "".join(word + " " for word in mine)
                        generation = Generation(
                            text, list(range(len(mine))), reason, self.sessions[session],
                            "layer 3, head 1: extent 7 is damaged" if broken else None,
                        )  # fmt: skip
                        yield StreamEvent(session, "", generation)
        except GeneratorExit:
            StandInEngine.cancelled += 1
            raise

    def stats(self) -> dict[str, Any]:
        return {
            "sessions": self.sessions,
            "prefill_s": 0.5,
            "index_s": 0.1,
            "decode_s": 0.25,
            "decode_tokens_per_s": 8.0,
            "bytes": {"ssd_to_dram": 4096},
            "tiers": {"hbm": {"budget_bytes": 10, "peak_bytes": 5}},
            **dict.fromkeys(("model", "method", "device", "dtype"), "stand-in"),
            "timeline": {
                "warm_up_steps": 1, "warm_up_s": 0.5,
                "steps": 2, "wall_s": 0.2, "device_busy_s": 0.11,
                "stall_s": {"SSD->DRAM": 0.04, "DRAM->HBM": 0.03, "host gather": 0.02,
                            "engine": 0.0},
                "work_s": {"select": 0.05, "fetch": 0.13, "compute": 0.05, "other": 0.01},
                "overlap_efficiency": 1.2, "hits": 30, "misses": 10,
                "lanes": {"SSD->DRAM": {"seconds": 0.04, "bytes": 8192, "spans": 2},
                          "engine": {"seconds": 0.04, "bytes": 0, "spans": 2}},
            },
        }  # fmt: skip


class StandInLimits:
    def line(self, *_: int) -> str:
        return "largest prompts that fit: 7 tokens"


class StandInPlan:
    fits = True
    method = "kvdrive"
    shape = types.SimpleNamespace(prompt_tokens=(1,), max_new_tokens=2)

    def table(self) -> str:
        return "HBM 5 B of 10 B"

    def window_line(self) -> str:
        return "window x2"

    def require(self) -> None:
        if not self.fits:
            raise ValueError("the plan needs 20 bytes of HBM, the budget is 10")


class StandInTokenizer:
    has_template = False

    @classmethod
    def from_pretrained(cls, model: str) -> StandInTokenizer:
        return cls()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandInEngine]:
    """Puts the stand-ins where the command looks for engine, plan and tokenizer."""

    def module(name: str, **members: Any) -> None:
        fake = types.ModuleType(name)
        vars(fake).update(members)
        monkeypatch.setitem(sys.modules, name, fake)

    monkeypatch.setattr(StandInEngine, "closed", 0)
    monkeypatch.setattr(StandInEngine, "cancelled", 0)
    monkeypatch.setattr(StandInPlan, "fits", True)
    module("kvdrive_jax.engine", Engine=StandInEngine)
    module("kvdrive_jax.plan", plan_for=lambda *_: StandInPlan())
    module("kvdrive_jax.limits", find_limits=lambda *_: StandInLimits())
    module("kvdrive_jax.models.tokenizer", Tokenizer=StandInTokenizer)
    return StandInEngine


# ---------------------------------------------------------------- options


def test_every_configuration_field_has_a_flag_with_help() -> None:
    text = " ".join(cli_options._parser().format_help().split())
    for _, _, cls in cli_options._GROUPS:
        for option in dataclasses.fields(cls):
            if option.name in cli_options.configuration.SECTIONS:
                continue
            name = option.metadata.get("flag") or option.name
            assert "--" + name.replace("_", "-") in text


def test_defaults_are_the_dataclasses_defaults() -> None:
    options = parse_command_line(["--prompt", "x"])
    assert options.config == KVDriveConfig()
    assert options.generate == GenerateConfig(prompt="x")
    assert options.sampling == cli_options.SamplingConfig()


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        """
        model = "other"
        max_new_tokens = 7
        stop = ["END"]
        prompt = "from the file"
        method = "full"
        [sampling]
        temperature = 0.5
        [retrieval]
        budget = 512
        chunk_size = 8
        [tiers]
        dram_budget = "64MiB"
        """
    )
    options = parse_command_line(
        ["--config", str(file), "--prompt-file", "p.txt", "--budget", "0.25",
         "--hbm-budget", "1GiB", "--seed", "3"]
    )  # fmt: skip
    assert options.generate.model == "other"
    assert options.generate.max_new_tokens == 7
    assert options.generate.stop == ("END",)
    assert (options.generate.prompt, options.generate.prompt_file) == (None, "p.txt")
    assert options.config.method == "full"
    assert options.config.retrieval.budget == 0.25
    assert options.config.retrieval.chunk_size == 8
    assert options.config.tiers.dram_budget == 64 * 2**20
    assert options.config.tiers.hbm_budget == 2**30
    assert (options.sampling.temperature, options.sampling.seed) == (0.5, 3)


def test_repeated_stop_and_both_chat_flags() -> None:
    options = parse_command_line(["--prompt", "x", "--stop", "a", "--stop", "b", "--no-chat"])
    assert options.generate.stop == ("a", "b")
    assert options.generate.chat is False
    assert parse_command_line(["--prompt", "x", "--chat"]).generate.chat is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("budgets = 3", "unknown key 'budgets'.*known: .*method"),
        ("[retrieval]\nbudgets = 3", r"unknown key 'budgets'.*\[retrieval\]"),
        ("[sampling]\nheat = 1.0", r"unknown key 'heat'.*\[sampling\]"),
        ("sampling = 3", "sampling must be a table"),
        ("retrieval = 3", "retrieval must be a table"),
        ("max_new_tokens = '7'", "max_new_tokens must be an integer"),
        ("max_new_tokens = true", "max_new_tokens must be an integer"),
        ("quiet = 1", "quiet must be true or false"),
        ("stop = 'END'", "stop"),
        ("model = ", "is not TOML"),
    ],
)
def test_bad_file_is_a_usage_error(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    assert generate.main(["--prompt", "x", "--config", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert re.search(message, captured.err, re.DOTALL)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give a prompt"),
        (["--prompt", "x", "--prompt-file", "y"], "only one of"),
        (["--prompt", ""], "--prompt is empty"),
        (["--prompt", " \n"], "--prompt is empty"),
        (["--prompt", "a\udc80"], "prompt is not UTF-8"),
        (["--prompt-file", "/nonexistent/file"], "cannot read"),
        (["--prompt", "x", "--output-jsonl", "y"], "needs --input-jsonl"),
        (["--prompt", "x", "--max-new-tokens", "-1"], "max_new_tokens must be at least 0"),
        (["--prompt", "x", "--stop", ""], "stop"),
        (["--prompt", "x", "--temperature", "-1"], "temperature"),
        (["--prompt", "x", "--top-p", "0"], "top_p"),
        (["--prompt", "x", "--budget", "0"], "budget"),
        (["--prompt", "x", "--budget", "2"], "at least one chunk"),
        (["--prompt", "x", "--chunk-size", "0"], "chunk_size must be a positive integer"),
        (["--prompt", "x", "--chunk-size", "-4"], "chunk_size must be a positive integer"),
        (["--prompt", "x", "--window", "0.5"], "window must be"),
        (["--prompt", "x", "--ssd-budget", "1GiB"], "ssd_budget needs ssd_dir"),
        (["--prompt", "x", "--config", "/nonexistent.toml"], "config file /nonexistent.toml"),
        (["--prompt", "x", "--stats-json", "/nonexistent/s.json"], "does not exist"),
        (["--prompt", "x", "--stats-json", "/"], "is a directory"),
        (["--prompt", "x", "--trace", "/nonexistent/t.json"], "does not exist"),
        (["--prompt", "x", "--trace", "/"], "--trace: / is a directory"),
        (["--prompt", "x", "--trace", "t", "--stats-json", "./t"], "another file than --stats"),
    ],
)
def test_bad_values_are_usage_errors(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(flags) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    "flags",
    [
        ["--prompt", "x", "--budget", "many"],
        ["--prompt", "x", "--chunk-size", "4.5"],
        ["--prompt", "x", "--hbm-budget", "lots"],
        ["--prompt", "x", "--method", "magic"],
        ["--prompt", "x", "--no-such-flag"],
        ["--prompt", "x", "--max-new", "4"],  # no abbreviations
    ],
)
def test_argparse_errors_have_status_2(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        generate.main(flags)
    assert caught.value.code == 2
    assert flags[-2].removeprefix("--") in capsys.readouterr().err or flags[-1].startswith("--")


# ---------------------------------------------------------------- prompts


def test_prompt_from_file_and_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes("\ufeffgrüße\n".encode())
    assert read_prompts(GenerateConfig(prompt_file=str(file)))[0].text == "grüße\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("日本".encode()), "ascii"))
    assert read_prompts(GenerateConfig(prompt_file="-"))[0].text == "日本"


def test_file_that_is_not_utf8_or_empty(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match="not UTF-8: byte 0xff at offset 2"):
        read_prompts(GenerateConfig(prompt_file=str(file)))
    file.write_bytes(b"")
    with pytest.raises(ValueError, match="is empty"):
        read_prompts(GenerateConfig(prompt_file=str(file)))
    with pytest.raises(ValueError, match="holds no line"):
        read_prompts(GenerateConfig(input_jsonl=str(file)))
    with pytest.raises(ValueError, match="cannot read"):
        read_prompts(GenerateConfig(prompt_file=str(tmp_path)))


BAD_LINES = [
    ("{", "is not JSON"),
    ("[1]", "must be an object"),
    ('"text"', "must be an object"),
    ("null", "must be an object with a key 'prompt', got null"),
    ('{"text": "x"}', "has no key 'prompt'; its keys: text"),
    ('{"prompt": 3}', "'prompt' must be a text, got a number"),
    ('{"prompt": ""}', "'prompt' is empty"),
    ('{"prompt": "\\ud800"}', "lone surrogate"),
]


def test_bad_lines_are_named_and_the_rest_is_done(
    stand_in: type[StandInEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = ['{"prompt": "a b"}', "", *(line for line, _ in BAD_LINES), '{"prompt": "ü", "id": 1}']
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert generate.main(["--input-jsonl", str(source), "--output-jsonl", str(target)]) == 1
    written = {}
    for line in target.read_text(encoding="utf-8").splitlines():
        result = json.loads(line)
        written[result["index"]] = result
    assert sorted(written) == list(range(len(BAD_LINES) + 2))
    assert written[0] == {
        "index": 0,
        "text": "a b ",
        "finish_reason": "length",
        "prompt_tokens": 3,
        "new_tokens": 2,
        "error": None,
    }
    assert written[len(BAD_LINES) + 1]["text"] == "ü "
    messages = capsys.readouterr()
    assert messages.out == ""
    for number, (_, message) in enumerate(BAD_LINES, start=3):
        assert f"line {number}: " in messages.err
        assert message in messages.err
        assert message in written[number - 2]["error"]


# ---------------------------------------------------------------- runs


def test_stdout_is_the_answer_and_nothing_else(
    stand_in: type[StandInEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(["--prompt", "eins zwei größer", "--max-new-tokens", "3"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "eins zwei größer \n"
    assert "config: kvdrive" in captured.err
    assert "prefill 16 tokens in 0.5 s (32 tokens/s)" in captured.err
    assert stand_in.closed == 1


def test_quiet_says_nothing(
    stand_in: type[StandInEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(["--prompt", "a", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("a \n", "")


def test_stats_are_a_table_on_stderr_and_a_trace_is_a_file(
    stand_in: type[StandInEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    assert generate.main(["--prompt", "a b", "--quiet", "--stats", "--trace", str(trace)]) == 0
    captured = capsys.readouterr()
    assert captured.out == "a b \n"
    table = {line[:20].strip(): line[20:].split() for line in captured.err.splitlines()}
    assert table["device busy"] == ["55.00", "55.0", "%"]
    assert table["stalls"] == ["45.00", "45.0", "%"]
    assert table["DRAM->HBM"] == ["15.00", "15.0", "%"]
    assert table["SSD->DRAM"] == ["20.00", "4.0", "KiB", "200.0", "KiB"]
    assert (
        "8.0 tokens/s with the warm-up; 2 steps in 0.20 s, 100.00 ms a step; 1 more in 0.50 s"
        in captured.err
    )
    assert "overlap efficiency 1.20" in captured.err
    assert "ssd to dram 4.0 KiB" in captured.err
    told = json.loads(trace.read_text())
    assert told["otherData"]["configuration"] == "config: kvdrive"
    names = [event["name"] for event in told["traceEvents"]]
    assert (names.count("compute"), names.count("step 1")) == (2, 1)


def test_a_run_that_is_stopped_or_fails_leaves_its_trace(
    stand_in: type[StandInEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for word in ("interrupt", "crash"):
        trace = tmp_path / f"{word}.json"
        assert generate.main(["--prompt", f"one {word} two", "--trace", str(trace)]) == 1
        names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
        assert names.count("compute") == {"interrupt": 2, "crash": 1}[word]
    assert "trace: 2 spans, 2 steps" in capsys.readouterr().err


def test_no_new_tokens_prints_nothing(
    stand_in: type[StandInEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(["--prompt", "a b", "--max-new-tokens", "0"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("fits", "status"), [(True, 0), (False, 1)])
def test_plan_prints_the_table(
    stand_in: type[StandInEngine],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fits: bool,
    status: int,
) -> None:
    monkeypatch.setattr(StandInPlan, "fits", fits)
    assert generate.main(["--prompt", "a", "--plan"]) == status
    expected = "HBM 5 B of 10 B\nlargest prompts that fit: 7 tokens\n"
    assert capsys.readouterr().out == expected
    assert stand_in.closed == 0


def test_what_cannot_fit_is_refused_before_the_weights_are_loaded(
    stand_in: type[StandInEngine],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StandInPlan, "fits", False)
    assert generate.main(["--prompt", "a"]) == 2
    assert "the plan needs 20 bytes" in capsys.readouterr().err
    assert stand_in.closed == 0


def test_ctrl_c_keeps_what_was_made(
    stand_in: type[StandInEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = tmp_path / "stats.json"
    before = signal.getsignal(signal.SIGINT)
    assert generate.main(["--prompt", "one interrupt two", "--stats-json", str(stats)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "one interrupt \n"
    assert "stopped" in captured.err
    assert "Traceback" not in captured.err
    assert json.loads(stats.read_text())["sessions"][0]["finish_reason"] == "cancelled"
    assert (stand_in.closed, stand_in.cancelled) == (1, 1)
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_before_the_first_token(
    stand_in: type[StandInEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(["--prompt", "early bird"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert stand_in.closed == 1


def test_ctrl_c_in_a_batch_writes_every_session(
    stand_in: type[StandInEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = ["a", "b b interrupt b", "c c c c c"]
    source.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    assert generate.main(["--input-jsonl", str(source), "--output-jsonl", str(target)]) == 1
    results = {r["index"]: r for r in map(json.loads, target.read_text().splitlines())}
    assert [results[i]["finish_reason"] for i in range(3)] == ["length", "cancelled", "cancelled"]
    assert results[1]["text"] == "b b interrupt "
    assert results[2]["text"] == "c c "


def test_one_refused_prompt_does_not_stop_the_others(
    stand_in: type[StandInEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    prompts = ["a", "refuse", "c", "broken", "e"]
    source.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    assert generate.main(["--input-jsonl", str(source)]) == 1
    captured = capsys.readouterr()
    results = {r["index"]: r for r in map(json.loads, captured.out.splitlines())}
    assert [results[i]["finish_reason"] for i in range(5)] == [
        "length", "error", "length", "error", "length",
    ]  # fmt: skip
    assert "too long" in results[1]["error"]
    assert "extent 7" in results[3]["error"]
    assert "line 2: the prompt is too long" in captured.err
    assert "line 4: layer 3" in captured.err


def test_refusal_of_the_one_prompt_is_a_usage_error(
    stand_in: type[StandInEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(["--prompt", "refuse"]) == 2
    assert capsys.readouterr().err.endswith("error: the prompt is too long: shorten it\n")


def test_failed_run_has_status_1_and_its_statistics(
    stand_in: type[StandInEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = tmp_path / "stats.json"
    assert generate.main(["--prompt", "a crash b", "--stats-json", str(stats)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "a "
    assert "RuntimeError: the device went away" in captured.err
    assert "Traceback" not in captured.err
    assert json.loads(stats.read_text())["sessions"][0]["new_tokens"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["stats.json"]
    assert generate.main(["--prompt", "a crash b", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_failure_in_a_batch_is_written_for_its_sessions(
    stand_in: type[StandInEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ["a", "b b crash"]))
    assert generate.main(["--input-jsonl", str(source), "--output-jsonl", str(target)]) == 1
    results = [json.loads(line) for line in target.read_text().splitlines()]
    assert [r["finish_reason"] for r in results] == ["length", "error"]
    assert results[1]["text"] == "b b "
    assert "device went away" in results[1]["error"]


def test_closed_stdout_ends_the_run_quietly(
    stand_in: type[StandInEngine],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", closefd=True) as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert generate.main(["--prompt", "a b c", "--quiet"]) == 1
    assert capsys.readouterr().err == ""
    assert (stand_in.closed, stand_in.cancelled) == (1, 1)


@pytest.mark.parametrize(
    ("reads", "writes"),
    [
        ("--input-jsonl", "--output-jsonl"),
        ("--prompt-file", "--trace"),
        ("--window-profile", "--stats-json"),
        ("--calibrate", "--stats-json"),
        ("--model", "--stats-json"),
    ],
)
@pytest.mark.parametrize("linked", [False, True])
def test_output_must_not_be_what_is_read(
    reads: str, writes: str, linked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, other = tmp_path / "x", tmp_path / "y"
    file.write_text('{"prompt": "a"}\n')
    if linked:
        other.hardlink_to(file)
    prompt = [] if "prompt" in reads or "input" in reads else ["--prompt", "x"]
    output = str(other if linked else file)
    assert generate.main([*prompt, reads, str(file), writes, output]) == 2
    assert f"{writes} must be another file than {reads}" in capsys.readouterr().err
    assert file.read_text() == '{"prompt": "a"}\n'


def test_output_must_not_be_a_file_that_is_yet_to_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "new.json")
    assert generate.main(["--prompt", "x", "--calibrate", file, "--stats-json", file]) == 2
    assert "another file than --calibrate" in capsys.readouterr().err
