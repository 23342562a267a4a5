"""The benchmarks at toy size: they run, and what they claim to measure is what runs."""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import compare_transformers, needle, prefill_memory
from benchmarks.common import environment, peak_bytes, reset_peak, spread
from benchmarks.continuation import agreement, configurations, cross_entropy, summary
from benchmarks.continuation import run as decode
from benchmarks.haystack import filler_tokens, needle_prompt, sentences
from benchmarks.probes import (
    OneLetterTokenizer,
    forced_tokens,
    recorded_logits,
    shared_prefill,
    synthetic_prefill,
)
from benchmarks.worker import Worker
from kvdrive_jax.config import KVDriveConfig, RetrievalConfig, WindowConfig
from kvdrive_jax.engine import Engine
from tests.dense_reference import dense_logits
from tests.tiny import random_prompt, tiny_model
from tests.tiny_model import write_tiny_model

MODEL = tiny_model()
PROMPT = random_prompt(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model of 512 positions that both sides can load."""
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", context=512))


def engine(method: Any, **config: Any) -> Engine:
    tokenizer: Any = OneLetterTokenizer()
    return Engine(MODEL, tokenizer, KVDriveConfig(method=method, batch_size=1, **config))


SPARSE: dict[str, Any] = {"retrieval": RetrievalConfig(budget=64)}


def answer(engine: Engine, prompt: list[int], new_tokens: int = 12) -> tuple[int, ...]:
    *_, last = engine.stream_ids([prompt], max_new_tokens=new_tokens, ignore_eos=True)
    assert last.generation is not None
    return last.generation.token_ids


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


@pytest.mark.parametrize("depth", [0.0, 0.4, 1.0])
def test_the_needle_stands_where_it_should(depth: float) -> None:
    texts: list[str] = []

    def encode(text: str) -> list[int]:
        texts.append(text)
        return words(text)

    ids = needle_prompt(encode, 700, depth, "1234567", "the tower")
    assert 660 < len(ids) <= 700
    [text] = {text for text in texts if words(text) == ids}
    prose = text.partition("\n\n")[0]
    before = len(words(prose.partition("The special")[0]))
    assert before / len(words(prose)) == pytest.approx(depth, abs=0.04)
    assert text.count("1234567") == 1


def test_a_context_without_room_for_the_needle_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens must be at least"):
        needle_prompt(words, 12, 0.5, "1234567", "the tower")


def test_prose_has_no_digits_and_hardly_repeats() -> None:
    found = list(islice(sentences(), 500))
    assert not any(char.isdigit() for char in "".join(found))
    assert len(set(found)) > 490
    assert len(filler_tokens(words, 1000)) == 1000


def test_a_shared_prefill_changes_no_token() -> None:
    methods = [
        ("full", {}),
        ("kvdrive", SPARSE),
        ("kvdrive", {**SPARSE, "window": WindowConfig(multiple=1)}),
    ]
    apart = [answer(engine(name, **config), PROMPT) for name, config in methods]
    with shared_prefill():
        together = [answer(engine(name, **config), PROMPT) for name, config in methods]
    assert together == apart


def test_a_shared_prefill_refuses_another_prompt() -> None:
    full = engine("full")
    with shared_prefill():
        answer(full, PROMPT)
        with pytest.raises(RuntimeError, match="another prompt"):
            answer(full, PROMPT[:-1])


def test_recorded_logits_are_those_of_the_prompt_and_of_every_step() -> None:
    with recorded_logits() as seen:
        tokens = answer(engine("full"), PROMPT, 5)
    expected = dense_logits(MODEL, np.asarray([*PROMPT, *tokens[:-1]]))
    np.testing.assert_allclose(np.stack(seen), expected[len(PROMPT) - 1 :], atol=1e-3)


def test_forced_tokens_are_taken_and_scored_as_the_dense_forward_scores_them() -> None:
    forced = random_prompt(9, seed=5)
    logits = decode(engine("full"), PROMPT, forced)
    dense = dense_logits(MODEL, np.array([*PROMPT, *forced[:-1]]))
    expected = np.asarray(dense)[len(PROMPT) - 1 :]
    np.testing.assert_allclose(logits, expected, atol=1e-3)
    shifted = expected - expected.max(axis=-1, keepdims=True)
    chances = np.exp(shifted) / np.exp(shifted).sum(axis=-1, keepdims=True)
    loss = -np.log(chances[np.arange(9), forced]).mean()
    assert cross_entropy(logits, forced) == pytest.approx(loss, abs=1e-3)
    # Left to itself, the engine takes its best tokens, and agrees with itself.
    free = decode(engine("full"), PROMPT, 9).argmax(axis=-1)
    again = decode(engine("full"), PROMPT, free.tolist()).argmax(axis=-1)
    assert agreement(again, free) == {"same": 1.0, "first_difference": None}
    with forced_tokens([3, 4]):
        assert answer(engine("full"), PROMPT, 2) == (3, 4)


def test_agreement_and_summary_say_where_they_part() -> None:
    found = agreement(np.array([1, 2, 9, 4]), np.array([1, 2, 3, 4]))
    assert found == {"same": 0.75, "first_difference": 2}
    made = configurations(["clusters", "moments+chunks"], [64])
    assert list(made) == ["full", "clusters 64", "moments+chunks 64"]
    assert made["moments+chunks 64"].retrieval.estimate == "chunks"
    losses = {"prose": {"full": 2.0, "clusters 64": 2.1}}
    text = summary(losses, {"needle": {"full": found, "clusters 64": found}})
    assert "+10.52 %" in text
    assert "75.0 %" in text


def test_synthetic_prefill_goes_through_index_and_tiers() -> None:
    tokens = []
    for window in (None, WindowConfig(multiple=1)):
        run = engine("kvdrive", **SPARSE, **({} if window is None else {"window": window}))
        with synthetic_prefill():
            tokens.append(answer(run, PROMPT))
        moved = run.stats()["bytes"]
        assert (moved["dram_to_hbm"] > 0) == (window is not None)
    assert tokens[0] == tokens[1]
    assert tokens[0] != answer(engine("kvdrive", **SPARSE), PROMPT)


def test_needle_benchmark(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "needle.json"
    arguments = ["--model", folder, "--contexts", "400", "--depths", "0.2,0.8", "--budgets", "64"]
    arguments += ["--new-tokens", "4", "--window", "1", "--ssd-dir", str(tmp_path)]
    # A random model finds nothing, which the exit status tells.
    assert needle.main([*arguments, "--output", str(result)]) == 1
    found = json.loads(result.read_text())
    assert found["of"] == 2
    assert found["hits"] == {"full": 0, "moments 64": 0}
    assert [run["method"] for run in found["runs"]] == ["full", "moments 64"] * 2
    for run in found["runs"]:
        assert 300 < run["prompt_tokens"] <= 400
        assert (run["bytes"]["dram_to_hbm"] > 0) == (run["method"] != "full")
    assert str(tmp_path) not in result.read_text()
    assert "moments 64" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "hit"),
    [("It is 1234567.", True), ("1,234,567", True), ("12345", False), ("", False)],
)
def test_what_counts_as_found(text: str, hit: bool) -> None:
    assert needle.found("1234567", text) == hit


def comparison_options(folder: str, *flags: str) -> argparse.Namespace:
    sizes = ["--contexts", "300,600", "--prefill-tokens", "100", "--prefill-rounds", "2"]
    sizes += ["--budget", "64", "--window", "1", "--check-tokens", "50"]
    sizes += ["--rounds", "1", "--steps", "2", "--threads", "1"]
    return compare_transformers.parser().parse_args(["--model", folder, *sizes, *flags])


def test_comparison_with_transformers(folder: str) -> None:
    pytest.importorskip("torch", reason="parity extra not installed")
    result = compare_transformers.run(comparison_options(folder), in_process=True)
    assert max(result["check"]["largest_logit_difference"].values()) < 1e-3
    assert [part["synthetic"] for part in result["decode"]] == [False, True]
    assert set(result["prefill"]["sides"]) == {"transformers", "full", "tiered"}
    for part in result["decode"]:
        sides = part["sides"]
        assert list(sides) == list(compare_transformers.SIDES)
        for side in sides.values():
            assert side["count"] == part["steps"] == 2
            assert side["speed_ratio"] > 0
        assert sides["resident"]["bytes"]["dram_to_hbm"] == 0
        assert sides["tiered"]["bytes"]["dram_to_hbm"] > 0
    [real, _] = result["decode"]
    assert real["agreement"]["full_same_tokens"] == real["agreement"]["of"] >= 5
    shown = compare_transformers.report(result)
    assert "decode 600  tiered x1" in shown
    json.dumps(result, allow_nan=False)


def test_comparison_refuses_unknown_sides(folder: str) -> None:
    for sides in ("full", "transformers,all"):
        with pytest.raises(ValueError, match="sides must be"):
            compare_transformers.run(comparison_options(folder, "--sides", sides), in_process=True)


def test_every_side_is_first_equally_often() -> None:
    firsts = [compare_transformers.turn(["a", "b", "c"], number)[0] for number in range(6)]
    assert firsts == ["a", "b", "c"] * 2


class Hoard:
    """Holds memory in a process of its own."""

    def grow(self, size: int) -> tuple[int, int]:
        """Peak growth while ``size`` bytes are held, and after they were let go."""
        before = reset_peak()
        kept = bytearray(size)
        during = peak_bytes() - before
        del kept
        return during, peak_bytes() - reset_peak()

    def fail(self) -> None:
        raise LookupError("nothing here")


def test_a_worker_measures_its_own_memory_and_reports_what_fails() -> None:
    ballast = bytearray(100 * 2**20)  # of this process, and not to be seen in the other
    with Worker("tests.test_benchmarks:Hoard", cpus=1) as worker:
        during, after = worker.call("grow", 40 * 2**20)
        assert 39 * 2**20 < during < 60 * 2**20
        assert after > 30 * 2**20
        with pytest.raises(RuntimeError, match="LookupError: nothing here"):
            worker.call("fail")
    assert len(ballast) == 100 * 2**20


def test_prefill_memory_benchmark(folder: str, tmp_path: Path) -> None:
    result = tmp_path / "memory.json"
    arguments = ["--model", folder, "--contexts", "300", "--methods", "full"]
    assert prefill_memory.main([*arguments, "--output", str(result)]) == 0
    [row] = json.loads(result.read_text())["rows"]
    assert row["padded_tokens"] == 512
    assert row["run"]["planned_bytes"] == sum(row["run"]["terms_bytes"].values())
    assert set(row["run"]["terms_bytes"]) == {"hbm: prefill", "hbm: logits", "hbm: kv cache"}
    for part in ("weights", "run"):
        assert row[part]["measured_bytes"] >= 0


def test_the_environment_names_what_figures_depend_on() -> None:
    record = environment(dtype="float32", threads=2)
    assert {"device", "versions", "cpu_model", "memory_bytes"} <= set(record)
    assert {"python", "jax", "numpy"} <= set(record["versions"])


def test_spread_of_timings() -> None:
    assert spread([3.0])["median_s"] == 3.0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0])["quartiles_s"] == [2.0, 4.0]
