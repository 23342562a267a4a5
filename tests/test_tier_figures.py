"""The benchmark of the tiers at toy size: what it asks, reads and runs is what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import tier_engine, tier_store
from benchmarks.tier_reads import compare
from benchmarks.tier_traces import EVICTION, Requests, requests
from benchmarks.tiers import FIGURES, parse_link, parser
from kvdrive_jax.tiers.link import Link
from kvdrive_jax.window.allocation import slots_of
from kvdrive_jax.window.layout import WindowLayout
from kvdrive_jax.window.replay import replay
from kvdrive_jax.window.trace import Trace, TraceInfo
from tests.tiny import CharacterTokenizer, random_prompt, tiny_model


def random_trace(steps: int = 9, layers: int = 2, kv_heads: int = 2, chunks: int = 60) -> Trace:
    rng = np.random.default_rng(0)
    shape = (steps, layers, kv_heads, chunks)
    drift = np.cumsum(rng.standard_normal(shape), axis=0).astype(np.float32)
    ids = np.argsort(-drift, axis=-1, kind="stable").astype(np.int32)
    info = TraceInfo(
        model="m", digest="", text="t", prompt_tokens=64 * 4, chunk_size=4, selected=4,
        chunk_capacity=chunks, page_bytes=64, index="moments", group_rule="mean",
    )  # fmt: skip
    return Trace(
        info=info,
        ids=ids,
        scores=np.take_along_axis(drift, ids, axis=-1),
        warm=np.argsort(-drift[0], axis=-1, kind="stable").astype(np.int32),
    )


def test_requests_are_what_the_windows_miss() -> None:
    trace = random_trace()
    asked = requests(trace, ratio=1 / 16, multiple=2, prefetch=2)
    layout = WindowLayout.uniform(2, 2, slots_of(2, 4), 4)
    expected = replay(trace, layout, EVICTION)
    np.testing.assert_array_equal((asked.missed >= 0).sum(axis=-1), expected.missed)
    assert asked.likely.shape[-1] == 8
    for step in range(trace.steps):
        # What was selected is in a window now, so it is not what may come next.
        now, likely = trace.selection[step], asked.likely[step]
        assert not any(
            set(now[at].tolist()) & set(likely[at].tolist()) - {-1} for at in np.ndindex(2, 2)
        )


@pytest.mark.parametrize("cold", [False, True])
def test_reads_are_compared_and_checked(cold: bool) -> None:
    row = compare(4096, 1 << 20, 8, 1, cold=cold)
    assert set(row["GB_per_s"]) == {"store", "tensorstore", "preadv"}
    assert min(row["GB_per_s"].values()) > 0


@pytest.mark.parametrize("name", tier_store.ARRANGEMENTS)
def test_every_arrangement_fetches_what_is_asked(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_store, "LAYERS", 2)
    monkeypatch.setattr(tier_store, "KV_HEADS", 2)
    one = requests(random_trace(), ratio=1 / 16, multiple=1, prefetch=1.5)
    asked = Requests(
        missed=one.missed, likely=one.likely, warm=one.warm, windowed=4, chunks=one.chunks
    )
    result = tier_store.fetch_times(
        asked,
        tier_store.ARRANGEMENTS[name],
        directory=str(tmp_path),
        dram_bytes=650_000,
        extent_bytes=4096,
        steps=9,
        pause_s=0,
        link=Link(1e9),
        cold=False,
    )
    found = result["pages"]
    assert found["dram"] + found["ssd"] == (one.missed >= 0).sum()
    assert (found["dram"] == 0) == (name in ("layerwise", "blockwise"))
    assert result["ssd_bytes_per_step"] > 0
    assert list(tmp_path.iterdir()) == []


def test_arrangements_of_the_engine_generate_the_same() -> None:
    model, tokenizer = tiny_model(), CharacterTokenizer()
    prompt = random_prompt(300)
    runs = {
        share: tier_engine.run(
            model,
            tokenizer,
            tier_engine.config(budget=32, window=1.5, ssd_dir="made", extent_bytes=1024),
            [prompt],
            12,
            share=share,
        )
        for share in (0.25, 0.75)
    }
    assert runs[0.25]["tokens"] == runs[0.75]["tokens"]
    for share, stats in runs.items():
        row = tier_engine.summary(stats)
        assert row["pages"]["ssd"] > 0
        whole = 3 * 2 * 64 * 2 * 4 * 16 * 4  # 64 chunks of each of 6 heads
        assert row["dram_peak_bytes"] > share * whole * 0.5


def test_options() -> None:
    assert set(FIGURES) == {
        "read", "fig5", "fig12", "fig21a", "fig21b", "warm", "precision", "session",
    }  # fmt: skip
    link = parse_link("3.5,80")
    assert link.bytes_per_s == 3.5e9
    assert link.latency_s == pytest.approx(8e-5)
    assert parser().parse_args(["all", "--cold"]).cold
