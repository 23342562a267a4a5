"""Saved sessions: the same tokens as never having stopped, wherever they are opened."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvdrive_jax import Engine, KVDriveConfig, RetrievalConfig, SamplingConfig, TierConfig
from kvdrive_jax.config import WindowConfig
from kvdrive_jax.session import Generation
from tests.tiny import VOCABULARY, CharacterTokenizer, random_prompt, tiny_model

MODEL = tiny_model()
TOKENIZER: Any = CharacterTokenizer()
SPARSE = RetrievalConfig(budget=32, flush_tokens=32, observation=16)
PROMPT = random_prompt(700, seed=1)
WARM = SamplingConfig(temperature=0.8, top_p=0.9, seed=3)


def config(kind: str, directory: Path, **retrieval: Any) -> KVDriveConfig:
    """``resident``; or ``dram`` or ``ssd`` with windows x1.5, the latter with little DRAM."""
    tiers = TierConfig()
    if kind != "resident":
        disk = str(directory) if kind == "ssd" else None
        tiers = TierConfig(ssd_dir=disk, extent_bytes=4096)
    if kind == "ssd":
        tiers = replace(tiers, dram_budget=700_000)
    window = WindowConfig() if kind == "resident" else WindowConfig(multiple=1.5)
    return KVDriveConfig(retrieval=replace(SPARSE, **retrieval), window=window, tiers=tiers)


def run(
    how: KVDriveConfig, prompt: Sequence[int] | None, count: int, **options: Any
) -> tuple[Generation, dict[str, Any]]:
    """One generation by an engine of its own."""
    load = options.pop("load", None)
    with Engine(MODEL, TOKENIZER, how) as engine:
        session = None if load is None else engine.load_session(load)
        ids = session.all_tokens if prompt is None and session is not None else prompt
        assert ids is not None
        stream = engine.stream_ids(
            [ids], max_new_tokens=count, ignore_eos=True, session=session, **options
        )
        generation = [event.generation for event in stream if event.generation][-1]
        return generation, engine.stats()


@pytest.mark.parametrize("sampling", [SamplingConfig(), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("saved_in", "opened_in"),
    [("resident", "resident"), ("ssd", "ssd"), ("resident", "ssd"), ("dram", "resident")],
)
def test_going_on_is_as_if_it_had_never_stopped(
    saved_in: str, opened_in: str, sampling: SamplingConfig, tmp_path: Path
) -> None:
    disk, path = tmp_path / "disk", tmp_path / "saved"
    disk.mkdir()
    whole, _ = run(config("resident", disk), PROMPT, 130, sampling=sampling)
    # 45 tokens are one flush and 13 tokens that are no chunks yet.
    first, stats = run(config(saved_in, disk), PROMPT, 45, sampling=sampling, save_session=path)
    assert first.error is None
    assert stats["sessions"][0]["saved_bytes"] > 0
    second, stats = run(config(opened_in, disk), None, 85, sampling=sampling, load=path)
    assert first.token_ids + second.token_ids == whole.token_ids
    assert stats["sessions"][0]["reused_tokens"] == 744
    if opened_in == "ssd":
        assert stats["bytes"]["ssd_to_dram"] > 0


@pytest.mark.parametrize("index", ["clusters", "moments", "bounds:8"])
def test_a_session_that_is_saved_twice_and_at_once(index: str, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    how = config("dram", tmp_path, index=index, estimate="chunks")
    whole, _ = run(how, PROMPT, 90)
    none, _ = run(how, PROMPT, 0, save_session=path)
    assert none.token_ids == ()
    first, _ = run(how, None, 40, load=path, save_session=path)
    second, _ = run(how, None, 50, load=path)
    assert first.token_ids + second.token_ids == whole.token_ids


@pytest.mark.parametrize("kind", ["resident", "ssd"])
def test_a_prompt_that_begins_the_same_is_prefilled_from_there(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    long = [*PROMPT, *random_prompt(500, seed=2)]
    how = config(kind, tmp_path)
    run(how, PROMPT, 0, save_session=path)
    for prompt, reused in ((long, 512), (PROMPT[:600], 512)):
        expected, _ = run(how, prompt, 40)
        got, stats = run(how, prompt, 40, load=path)
        assert got.token_ids == expected.token_ids
        assert stats["sessions"][0]["reused_tokens"] == reused
    with pytest.raises(ValueError, match="it shares 300 tokens, and blocks of 512 are reused"):
        run(how, [*PROMPT[:300], *PROMPT[301:]], 5, load=path)
    with pytest.raises(ValueError, match="does not begin as the session"):
        run(how, [(PROMPT[0] + 1) % VOCABULARY, *PROMPT[1:]], 5, load=path)


def test_pages_kept_as_codes_are_saved_so_and_opened_as_anything(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    coarse = config("dram", tmp_path)
    coarse = replace(coarse, tiers=replace(coarse.tiers, dram_dtype="int8"))
    whole, _ = run(coarse, PROMPT, 0, save_session=path)
    assert whole.error is None
    for kind in ("resident", "ssd"):
        got, _ = run(config(kind, tmp_path), None, 20, load=path)
        assert len(got.token_ids) == 20
    assert run(coarse, None, 20, load=path)[0].error is None


def test_what_cannot_be_opened_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    how = config("resident", tmp_path)
    run(how, PROMPT[:100], 0, save_session=path)
    for name, value in (("chunk_size", 8), ("index", "bounds"), ("sink", 8)):
        with pytest.raises(ValueError, match=f"{name}.*use the same, or prefill again"):
            run(config("resident", tmp_path, **{name: value}), None, 5, load=path)
    with pytest.raises(NotImplementedError, match="method full"):
        run(replace(how, method="full"), None, 5, load=path)
    other = replace(MODEL, digest="another")
    with (
        Engine(other, TOKENIZER, how) as engine,
        pytest.raises(ValueError, match="another model"),
    ):
        engine.load_session(path)
    with Engine(MODEL, TOKENIZER, how) as engine:
        with pytest.raises(ValueError, match=r"has no manifest.json"):
            engine.load_session(tmp_path)
        session = engine.load_session(path)
        with pytest.raises(ValueError, match="one session"):
            engine.stream_ids([PROMPT, PROMPT], session=session)
        with pytest.raises(ValueError, match="does not exist"):
            engine.stream_ids([PROMPT], save_session=tmp_path / "no" / "where")
    (part,) = path.glob("data-*/layer-001.safetensors")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    with pytest.raises(RuntimeError, match=r"part layer-001.*checksum"):
        run(how, None, 5, load=path)


def test_what_cannot_be_saved_loses_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    how = config("resident", tmp_path)
    run(how, PROMPT[:100], 3, save_session=path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limit[1]))
        got, stats = run(how, PROMPT, 20, save_session=path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert len(got.token_ids) == 20
    assert got.error is not None
    assert "not saved" in got.error
    assert stats["sessions"][0]["saved_bytes"] is None
    again, _ = run(how, None, 3, load=path)  # what was there before is whole
    assert len(again.token_ids) == 3


def test_a_stream_that_is_closed_early_is_saved_too(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    how = config("resident", tmp_path)
    whole, _ = run(how, PROMPT[:200], 12)
    with Engine(MODEL, TOKENIZER, how) as engine:
        stream = engine.stream_ids(
            [PROMPT[:200]], max_new_tokens=50, ignore_eos=True, save_session=path
        )
        for _ in range(5):
            next(stream)
        stream.close()
        [entry] = engine.stats()["sessions"]
    assert entry["finish_reason"] == "cancelled"
    assert entry["saved_bytes"] > 0
    with Engine(MODEL, TOKENIZER, how) as engine:
        got = engine.generate(
            session=path, max_new_tokens=12 - entry["new_tokens"], ignore_eos=True
        )
    assert got.token_ids == whole.token_ids[entry["new_tokens"] :]


LEFT = """
import sys
from pathlib import Path
from kvdrive_jax import Engine
from tests.test_saved_sessions import MODEL, PROMPT, TOKENIZER, config

kind, disk, path = sys.argv[1:]
engine = Engine(MODEL, TOKENIZER, config(kind, Path(disk)))
stream = engine.stream_ids([PROMPT], max_new_tokens=100, ignore_eos=True, save_session=path)
for _ in range(5):
    next(stream)
"""


@pytest.mark.parametrize("kind", ["resident", "ssd"])
def test_a_stream_that_is_left_when_python_ends_is_saved_too(kind: str, tmp_path: Path) -> None:
    disk, path = tmp_path / "disk", tmp_path / "saved"
    disk.mkdir()
    command = [sys.executable, "-c", LEFT, kind, str(disk), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(disk.iterdir()) == []
    whole, _ = run(config("resident", disk), PROMPT, 20)
    with Engine(MODEL, TOKENIZER, config("resident", disk)) as engine:
        made = list(engine.load_session(path).all_tokens[len(PROMPT) :])
    assert len(made) >= 5
    assert made == list(whole.token_ids)[: len(made)]


def test_a_target_that_is_lost_meanwhile_loses_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    with Engine(MODEL, TOKENIZER, config("resident", tmp_path)) as engine:
        stream = engine.stream_ids(
            [PROMPT[:200]], max_new_tokens=8, ignore_eos=True, save_session=path
        )
        next(stream)
        path.write_text("in the way")
        generation = [event.generation for event in stream][-1]
    assert generation is not None
    assert len(generation.token_ids) == 8
    assert generation.error is not None
    assert "not saved" in generation.error
    assert path.read_text() == "in the way"
