"""Runs of the bundled model through the tiers, for `tiers.py`: one prompt, many arrangements.

The prompt is prefilled once and given to every engine (`probes.shared_prefill`); index, offload,
warm-up and decode are each engine's own. All of them must generate the same tokens.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from kvdrive_jax import Engine, KVDriveConfig, RetrievalConfig, TierConfig, WindowConfig
from kvdrive_jax.models.model import Model
from kvdrive_jax.models.tokenizer import Tokenizer
from kvdrive_jax.tiers.link import Links

BUDGET = 512
WINDOW = 2.0


def config(
    *, budget: int = BUDGET, window: float | None = WINDOW, batch: int = 1, **tiers: Any
) -> KVDriveConfig:
    """Windows in HBM and what ``tiers`` says of the rest."""
    return KVDriveConfig(
        batch_size=batch,
        retrieval=RetrievalConfig(budget=budget),
        window=WindowConfig(multiple=window),
        tiers=TierConfig(**tiers),
    )


def dram_budget(
    model: Model, tokenizer: Any, how: KVDriveConfig, tokens: Sequence[int], new: int, share: float
) -> int:
    """Bytes of DRAM for this share of the pages, and what moves them."""

    def planned(nbytes: int | None) -> tuple[int, int]:
        tiers = dataclasses.replace(how.tiers, dram_budget=nbytes)
        with Engine(model, tokenizer, dataclasses.replace(how, tiers=tiers)) as engine:
            plan = engine.plan(tokens, new)
        return plan.bytes_of("dram", "staging"), sum(p.slab_bytes for p in plan.sessions)

    staging, pages = planned(None)
    maps = pages // 50
    nbytes = int(share * pages) + staging + maps
    for _ in range(4):
        staging, held = planned(nbytes)
        nbytes += int(share * pages) - held
    return nbytes


def run(
    model: Model,
    tokenizer: Tokenizer | Any,
    how: KVDriveConfig,
    prompts: Sequence[Sequence[int]],
    steps: int,
    *,
    links: Links | None = None,
    share: float | None = None,
) -> dict[str, Any]:
    """What one arrangement takes: the statistics of a run, with its tokens.

    share: of the pages that DRAM is to hold (None: as ``how`` says); SSD directories are made and
    removed.
    """
    with tempfile.TemporaryDirectory() as directory:
        tiers = how.tiers
        if tiers.ssd_dir is not None:
            tiers = dataclasses.replace(tiers, ssd_dir=directory)
        how = dataclasses.replace(how, tiers=tiers)
        lengths = [len(prompt) for prompt in prompts]
        if share is not None:
            nbytes = dram_budget(model, tokenizer, how, lengths, steps, share)
            how = dataclasses.replace(how, tiers=dataclasses.replace(tiers, dram_budget=nbytes))
        with Engine(model, tokenizer, how, links=links) as engine:
            start = time.perf_counter()
            tokens: dict[int, tuple[int, ...]] = {}
            for event in engine.stream_ids(prompts, max_new_tokens=steps, ignore_eos=True):
                if event.generation is not None:
                    if event.generation.error is not None:
                        raise RuntimeError(event.generation.error)
                    tokens[event.session] = event.generation.token_ids
            stats = engine.stats()
            stats["wall_s"] = time.perf_counter() - start
            stats["tokens"] = [list(tokens[number]) for number in sorted(tokens)]
            stats["dram_budget"] = how.tiers.dram_budget
    return stats


def summary(stats: dict[str, Any]) -> dict[str, Any]:
    """The figures of a run that tables show."""
    steps = max(len(tokens) for tokens in stats["tokens"]) - 1
    return {
        "tokens_per_s": stats["decode_tokens_per_s"],
        "fetch_ms_per_step": 1e3 * stats["stage_s"]["fetch"] / steps,
        "step_ms": 1e3 * stats["decode_s"] / steps,
        "ssd_bytes_per_step": stats["bytes"]["ssd_to_dram"] / steps,
        "hbm_bytes_per_step": stats["bytes"]["dram_to_hbm"] / steps,
        "pages": stats["pages"],
        "hit_rate": stats["sessions"][0]["hit_rate"],
        "dram_peak_bytes": stats["tiers"]["dram"]["peak_bytes"],
        "ssd_peak_bytes": stats["tiers"]["ssd"]["peak_bytes"],
        "prefill_s": stats["prefill_s"],
        "index_s": stats["index_s"],
    }
