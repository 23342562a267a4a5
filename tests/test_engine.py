"""What may never break: the same tokens whatever the tiers, windows, batches; budgets kept."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from kvdrive_jax.config import KVDriveConfig, RetrievalConfig, TierConfig, WindowConfig
from kvdrive_jax.engine import Engine
from kvdrive_jax.plan import plan_batch
from kvdrive_jax.sampling import SamplingConfig
from kvdrive_jax.session import Generation
from tests.dense_reference import dense_logits
from tests.tiny import CharacterTokenizer, compiles, random_prompt, tiny_model

MODEL = tiny_model()
TOKENIZER: Any = CharacterTokenizer()
RAGGED = [random_prompt(n, seed=n) for n in (701, 333, 90, 1)]
SPARSE = RetrievalConfig(budget=64, flush_tokens=64)


def generate(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: SamplingConfig | None = None,
    ignore_eos: bool = True,
    **config: Any,
) -> tuple[list[Generation], dict[str, Any]]:
    """Generations in the order of the prompts, and the statistics."""
    with Engine(MODEL, TOKENIZER, KVDriveConfig(**config)) as engine:
        done = {}
        for event in engine.stream_ids(
            prompts, max_new_tokens=max_new_tokens, sampling=sampling, ignore_eos=ignore_eos
        ):
            if event.generation is not None:
                done[event.session] = event.generation
        stats = engine.stats()
        for tier in ("dram", "ssd"):
            assert engine._ledger.accounts(tier) == {}
        assert list(engine._ledger.accounts("hbm")) == ["weights"]
    check_stats(stats)
    return [done[number] for number in range(len(prompts))], stats


def tokens(generations: Sequence[Generation]) -> list[tuple[int, ...]]:
    return [generation.token_ids for generation in generations]


def check_stats(stats: dict[str, Any]) -> None:
    """Sums add up, and no tier ever held more than its budget."""
    for tier in stats["tiers"].values():
        assert tier["peak_bytes"] <= tier["budget_bytes"]
    assert sum(stats["stage_s"].values()) == pytest.approx(stats["decode_s"], rel=0.05, abs=0.02)
    for session in stats["sessions"]:
        assert session["hit_rate"] is None or 0 <= session["hit_rate"] <= 1


@functools.cache
def full_tokens(sessions: int) -> list[tuple[int, ...]]:
    """130 tokens of full attention for the first prompts; a shorter answer is a prefix of it."""
    return tokens(generate(RAGGED[:sessions], 130, method="full")[0])


@pytest.fixture(scope="module")
def sparse_tokens() -> list[tuple[int, ...]]:
    """The sparse answer with everything in HBM, over several flushes."""
    generations, stats = generate(RAGGED, 200, retrieval=SPARSE)
    assert stats["bytes"]["dram_to_hbm"] == 0
    return tokens(generations)


def test_full_attention_agrees_with_the_dense_forward() -> None:
    prompt = RAGGED[1]
    [generation], _ = generate([prompt], 24, method="full")
    sequence = [*prompt, *generation.token_ids]
    logits = np.asarray(dense_logits(MODEL, np.asarray(sequence)))
    expected = logits.argmax(axis=-1)[len(prompt) - 1 : -1]
    assert list(generation.token_ids) == expected.tolist()


def test_budget_of_at_least_the_context_equals_full_attention() -> None:
    full, _ = generate(RAGGED, 100, method="full")
    sparse, _ = generate(RAGGED, 100, retrieval=RetrievalConfig(budget=4096, flush_tokens=32))
    assert tokens(full) == tokens(sparse)


@pytest.mark.parametrize("multiple", [1, 1.7, 3])
def test_window_size_changes_no_token(
    multiple: float, sparse_tokens: list[tuple[int, ...]]
) -> None:
    generations, stats = generate(
        RAGGED, 200, retrieval=SPARSE, window=WindowConfig(multiple=multiple)
    )
    assert tokens(generations) == sparse_tokens
    assert stats["bytes"]["dram_to_hbm"] > 0
    assert stats["bytes"]["ssd_to_dram"] == 0


@pytest.mark.parametrize("share", [None, 0.1])
def test_tier_split_changes_no_token(
    share: float | None, sparse_tokens: list[tuple[int, ...]], tmp_path: Path
) -> None:
    ssd = TierConfig(ssd_dir=str(tmp_path), extent_bytes=4096, prefetch=1.5)
    config: dict[str, Any] = {
        "retrieval": SPARSE,
        "window": WindowConfig(multiple=2),
        "tiers": ssd if share is None else with_dram_share(share, ssd),
    }
    generations, stats = generate(RAGGED, 200, **config)
    assert tokens(generations) == sparse_tokens
    assert stats["bytes"]["dram_to_ssd"] > 0
    assert (stats["bytes"]["ssd_to_dram"] > 0) == (share is not None)
    assert (stats["pages"]["ahead"] > 0) == (share is not None)
    assert list(tmp_path.iterdir()) == []


def with_dram_share(share: float, tiers: TierConfig) -> TierConfig:
    """``tiers`` with room in DRAM for the buffers and this share of the pages."""
    lengths = [len(prompt) for prompt in RAGGED]
    window = WindowConfig(multiple=2)

    def planned(dram: int | None) -> dict[str, int]:
        config = KVDriveConfig(
            retrieval=SPARSE, window=window, tiers=replace(tiers, dram_budget=dram)
        )
        with Engine(MODEL, TOKENIZER, config) as engine:
            plan = engine.plan(lengths, 200)
        return {name: plan.bytes_of("dram", name) for name in ("staging", "pages")}

    whole = planned(None)
    partly = planned(whole["staging"] + whole["pages"] - 1)
    return replace(tiers, dram_budget=partly["staging"] + int(share * whole["pages"]))


def test_batch_neighbours_change_no_token(sparse_tokens: list[tuple[int, ...]]) -> None:
    neighbours = [random_prompt(n, seed=n) for n in (500, 87, 3)]
    generations, _ = generate([RAGGED[0], *neighbours], 200, retrieval=SPARSE)
    assert tokens(generations)[0] == sparse_tokens[0]
    alone, _ = generate(RAGGED[:1], 200, retrieval=SPARSE, batch_size=1)
    assert tokens(alone) == sparse_tokens[:1]


@pytest.mark.parametrize("flush_tokens", [4, 28, 32])
def test_flush_on_and_off_the_boundary(flush_tokens: int) -> None:
    """With every chunk selected, when tokens leave the near buffer must not matter."""
    sparse, _ = generate(
        RAGGED[:2],
        130,
        retrieval=RetrievalConfig(budget=4096, flush_tokens=flush_tokens, local=5, sink=3),
    )
    assert tokens(sparse) == full_tokens(2)


def test_nine_flushes_stay_correct(tmp_path: Path) -> None:
    """First with every chunk selected, then through a small window and the SSD."""
    prompt, new = [random_prompt(150)], 600
    full, _ = generate(prompt, new, method="full")
    sparse, _ = generate(prompt, new, retrieval=replace(SPARSE, budget=4096))
    assert tokens(full) == tokens(sparse)
    resident, _ = generate(prompt, new, retrieval=SPARSE)
    tiered, stats = generate(
        prompt,
        new,
        retrieval=SPARSE,
        window=WindowConfig(multiple=2),
        tiers=TierConfig(ssd_dir=str(tmp_path), dram_budget=400_000, sync="blockwise"),
    )
    assert tokens(resident) == tokens(tiered)
    assert stats["bytes"]["ssd_to_dram"] > 0


@pytest.mark.parametrize("chunk_size", [1, 3, 8])
def test_chunk_sizes(chunk_size: int, tmp_path: Path) -> None:
    """Another chunk size is another selection, but never depends on where pages live."""
    retrieval = RetrievalConfig(budget=48, chunk_size=chunk_size, flush_tokens=25, index="clusters")
    resident, _ = generate(RAGGED[:2], 60, retrieval=retrieval)
    tiered, _ = generate(
        RAGGED[:2],
        60,
        retrieval=retrieval,
        window=WindowConfig(multiple=1.5),
        tiers=TierConfig(ssd_dir=str(tmp_path)),
    )
    assert tokens(resident) == tokens(tiered)


@pytest.mark.parametrize(
    ("index", "estimate"),
    [
        ("chunks:8", "none"),
        ("bounds", "chunks"),
        ("moments", "clusters"),
        ("clusters", "clusters"),
        ("moments", "chunks"),
    ],
)
def test_every_index_through_every_tier(index: str, estimate: str, tmp_path: Path) -> None:
    """Another index is another selection; with the whole context as budget it is none."""
    chosen: dict[str, Any] = {"flush_tokens": 32, "index": index, "estimate": estimate}
    everything = RetrievalConfig(budget=4096, **chosen)
    sparse, _ = generate(RAGGED[:2], 70, retrieval=everything)
    assert tokens(sparse) == [ids[:70] for ids in full_tokens(2)]
    retrieval = RetrievalConfig(budget=48, **chosen)
    resident, _ = generate(RAGGED[:2], 70, retrieval=retrieval)
    tiered, _ = generate(
        RAGGED[:2],
        70,
        retrieval=retrieval,
        window=WindowConfig(multiple=1.5),
        tiers=TierConfig(ssd_dir=str(tmp_path)),
    )
    assert tokens(resident) == tokens(tiered)


def test_second_request_of_a_shape_compiles_nothing() -> None:
    config = KVDriveConfig(retrieval=SPARSE, window=WindowConfig(multiple=2))
    with Engine(MODEL, TOKENIZER, config) as engine:

        def ask(seed: int) -> None:
            prompts = [random_prompt(n, seed) for n in (600 + seed, 250)]
            list(engine.stream_ids(prompts, max_new_tokens=90, ignore_eos=True))

        ask(1)
        with compiles() as compiled:
            ask(2)
    assert compiled == []


def test_sampled_tokens_do_not_depend_on_neighbours_or_tiers() -> None:
    sampling = SamplingConfig(temperature=1.0, top_k=20, top_p=0.9, seed=7)
    together, _ = generate(RAGGED[:2], 40, sampling=sampling, retrieval=SPARSE)
    alone, _ = generate(RAGGED[:1], 40, sampling=sampling, retrieval=SPARSE)
    assert tokens(together)[:1] == tokens(alone)
    other, _ = generate(
        RAGGED[:1], 40, sampling=SamplingConfig(temperature=1.0, seed=8), retrieval=SPARSE
    )
    assert tokens(other) != tokens(alone)


def test_sessions_end_one_by_one() -> None:
    """An end-of-sequence token ends its session only, and is not part of the answer."""
    free, _ = generate(RAGGED, 150, retrieval=SPARSE)
    ended, stats = generate(RAGGED, 150, retrieval=SPARSE, ignore_eos=False)
    for long, short in zip(free, ended, strict=True):
        ids = long.token_ids
        end = ids.index(0) if 0 in ids else len(ids)
        assert short.token_ids == ids[:end]
        assert short.finish_reason == ("eos" if 0 in ids else "length")
    assert [s["new_tokens"] for s in stats["sessions"]] == [len(g.token_ids) for g in ended]


def test_no_new_tokens_is_prefill_only() -> None:
    [generation], stats = generate(RAGGED[:1], 0, retrieval=SPARSE)
    assert (generation.token_ids, generation.text, generation.finish_reason) == ((), "", "length")
    assert stats["prefill_s"] > 0


def test_closing_a_stream_cancels_and_gives_everything_back(tmp_path: Path) -> None:
    config = KVDriveConfig(
        retrieval=SPARSE, window=WindowConfig(multiple=1), tiers=TierConfig(ssd_dir=str(tmp_path))
    )
    with Engine(MODEL, TOKENIZER, config) as engine:
        stream: Any = engine.stream_ids(RAGGED, max_new_tokens=100, ignore_eos=True)
        next(stream)
        stream.close()
        reasons = {session["finish_reason"] for session in engine.stats()["sessions"]}
        assert reasons == {"cancelled"}
        assert list(engine._ledger.accounts("hbm")) == ["weights"]
        assert engine._ledger.used("dram") == engine._ledger.used("ssd") == 0
    assert list(tmp_path.iterdir()) == []


def test_a_corrupt_extent_ends_its_session_by_name_and_no_other(tmp_path: Path) -> None:
    config = KVDriveConfig(
        retrieval=SPARSE,
        window=WindowConfig(multiple=1),
        tiers=TierConfig(ssd_dir=str(tmp_path), dram_budget=1_700_000, extent_bytes=4096),
    )
    prompts = [random_prompt(1500, 5), random_prompt(1400, 6)]
    with Engine(MODEL, TOKENIZER, config) as engine:
        expected, _ = generate(prompts, 60, retrieval=SPARSE)
        done: dict[int, Generation] = {}
        stream = engine.stream_ids(prompts, max_new_tokens=60, ignore_eos=True)
        for event in stream:
            if not done and event.generation is None:
                damage_first_session(tmp_path)
            if event.generation is not None:
                done[event.session] = event.generation
    assert done[0].finish_reason == "error"
    assert done[0].error is not None
    for word in ("session '0'", "layer", "head", "extent"):
        assert word in done[0].error
    assert done[1].token_ids == expected[1].token_ids
    assert list(tmp_path.iterdir()) == []


def damage_first_session(directory: Path) -> None:
    """Overwrite the middle of every data file of the session opened first."""
    [private] = directory.iterdir()
    [first, _] = sorted(path for path in private.iterdir() if path.is_dir())
    for path in first.rglob("*"):
        if path.is_file() and path.name != "zarr.json" and path.stat().st_size > 64:
            with path.open("r+b") as file:
                file.seek(8)
                file.write(b"\xff" * 40)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "must not be empty"),
        ([1] * 8000, {"max_new_tokens": 500}, "context length"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens"),
        ([64], {}, "token ids below 64"),
        ([1], {"stop": [""]}, "stop"),
    ],
)
def test_bad_requests_are_refused_before_any_work(
    prompt: list[int], options: dict[str, Any], message: str
) -> None:
    with (
        Engine(MODEL, TOKENIZER, KVDriveConfig()) as engine,
        pytest.raises(ValueError, match=message),
    ):
        engine.stream_ids([prompt], **{"max_new_tokens": 4, **options})


def test_a_prompt_that_is_no_text_is_named() -> None:
    with (
        Engine(MODEL, TOKENIZER, KVDriveConfig()) as engine,
        pytest.raises(ValueError, match="prompts must be a text, or a list of texts, got 3"),
    ):
        engine.generate(3)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tiers": TierConfig(hbm_budget=100_000)}, "HBM"),
        ({"tiers": TierConfig(hbm_budget=3_000_000), "method": "full"}, "HBM"),
        (
            {"tiers": TierConfig(dram_budget=900_000), "window": WindowConfig(multiple=1)},
            "DRAM",
        ),
        ({"retrieval": RetrievalConfig(budget=10_000)}, "budget"),
        ({"context_length": 9000}, "context_length"),
        ({"retrieval": RetrievalConfig(index="trees")}, "clusters, chunks, bounds, moments"),
        ({"retrieval": RetrievalConfig(index="moments:3")}, "bf16, 8, 4, 2"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_arithmetic(
    config: dict[str, Any], message: str
) -> None:
    config = {"retrieval": RetrievalConfig(budget=64), **config}
    with (
        pytest.raises(ValueError, match=message),
        Engine(MODEL, TOKENIZER, KVDriveConfig(**config)) as engine,
    ):
        engine.stream_ids([random_prompt(4000)], max_new_tokens=1000)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU may fetch the direct way")
def test_direct_fetch_is_refused_where_it_cannot_be_had() -> None:
    config = KVDriveConfig(tiers=TierConfig(fetch="direct"))
    with pytest.raises(NotImplementedError, match=r"fetch direct: .* need an NVIDIA GPU"):
        Engine(MODEL, TOKENIZER, config)
    with pytest.raises(NotImplementedError, match="fetch direct"):
        plan_batch(MODEL.config, np.dtype("float32"), 1, config, [100], 5)


def test_an_index_that_does_not_exist_is_refused_whatever_the_method() -> None:
    config = KVDriveConfig(method="full", retrieval=RetrievalConfig(index="trees"))
    with pytest.raises(ValueError, match="clusters, chunks, bounds, moments"):
        plan_batch(MODEL.config, np.dtype("float32"), 1, config, [100], 5)


def test_plan_equals_what_the_run_reserves(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "retrieval": SPARSE,
        "window": WindowConfig(multiple=2),
        "tiers": TierConfig(ssd_dir=str(tmp_path), extent_bytes=4096),
    }
    with Engine(MODEL, TOKENIZER, KVDriveConfig(**config)) as engine:
        plan = engine.plan([len(prompt) for prompt in RAGGED], 80)
        list(engine.stream_ids(RAGGED, max_new_tokens=80, ignore_eos=True))
        tiers = engine.stats()["tiers"]
    for tier in ("hbm", "dram", "ssd"):
        assert tiers[tier]["peak_bytes"] == pytest.approx(plan.used(tier), rel=0.05)
