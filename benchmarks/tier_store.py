"""The store at the size of Llama-3-8B, asked for what real traces ask: paper figure 21a.

Pages are made up, and say which chunk they are of, so that every one that is fetched is checked.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tier_reads import drop_cached
from benchmarks.tier_traces import Requests
from kvdrive_jax.config import TierConfig
from kvdrive_jax.telemetry import Ledger, Traffic
from kvdrive_jax.tiers import PageGeometry, PageStore
from kvdrive_jax.tiers.link import Link

LAYERS, KV_HEADS, HEAD_DIM = 32, 8, 128

ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "layerwise": {"sync": "layerwise"},
    "blockwise": {"sync": "blockwise"},
    "hierarchical, not warm": {"sync": "hierarchical", "warm_up": "none"},
    "hierarchical": {"sync": "hierarchical"},
    "adaptive, not warm": {"sync": "adaptive", "warm_up": "none"},
    "adaptive": {"sync": "adaptive"},
    "adaptive, nothing read ahead": {"sync": "adaptive", "prefetch": 1.0},
    "adaptive, lru": {"sync": "adaptive", "dram_eviction": "lru"},
}


def geometry() -> PageGeometry:
    """Pages of 2 KiB: bfloat16, as bytes."""
    return PageGeometry(
        layers=LAYERS,
        kv_heads=KV_HEADS,
        chunk_size=4,
        head_dim=HEAD_DIM,
        dtype=np.dtype(np.uint16),
    )


def fetch_times(
    asked: Requests,
    options: dict[str, Any],
    *,
    directory: str,
    dram_bytes: int,
    extent_bytes: int,
    steps: int,
    pause_s: float,
    link: Link | None,
    cold: bool,
) -> dict[str, Any]:
    """Seconds that a step waits for its pages, and what was moved, over ``steps`` steps.

    pause_s: computation between the fetches of two layers, in which pages may be read ahead; cold:
    the page cache is emptied before every step.
    """
    made, ledger, traffic = geometry(), Ledger(dram=dram_bytes), Traffic()
    tiers = TierConfig(
        ssd_dir=directory, extent_bytes=extent_bytes, dram_budget=dram_bytes, **options
    )
    n = asked.chunks
    rng = np.random.default_rng(0)
    out = np.zeros((KV_HEADS * asked.missed.shape[-1], *made.page_shape), made.dtype)
    with PageStore(made, tiers, ledger, traffic, link=link) as store:
        session = store.open(n, None, True, "0", prompt_chunks=n)
        begin = time.perf_counter()
        _fill(session, asked, options, rng)
        session.wait()
        written_s = time.perf_counter() - begin
        (path,) = Path(directory).glob("kvdrive-*")
        seconds, before = [], traffic.snapshot()["ssd_to_dram"]
        needed = wrong = 0
        for step in range(steps):
            if cold:
                drop_cached(path)
            store.begin_step()
            waited = 0.0
            for layer in range(LAYERS):
                missed = asked.missed[step, layer]
                head, at = np.nonzero(missed >= 0)
                chunk = missed[head, at].astype(np.int32)
                head = head.astype(np.int32)
                needed += len(chunk)
                start = time.perf_counter()
                if len(chunk):
                    store.fetch(layer, [session], head * 0, head, chunk, out)
                waited += time.perf_counter() - start
                wrong += _wrong(out, layer, head, chunk)
                if options.get("prefetch", 1.25) > 1:
                    store.rank(layer, [session], asked.likely[step, layer][None])
                time.sleep(pause_s)
            seconds.append(waited)
        if wrong:
            raise RuntimeError(f"{wrong} pages were not those asked for")
        read = traffic.snapshot()["ssd_to_dram"] - before
        return {
            "fetch_s": seconds,
            "mean_fetch_s": float(np.mean(seconds)),
            "later_fetch_s": float(np.mean(seconds[steps // 2 :])),
            "pages_per_step": needed / steps,
            "pages": dict(traffic.pages()),
            "ssd_bytes_per_step": read / steps,
            "dram_bytes": ledger.peak("dram"),
            "ssd_bytes": session.plan.ssd_bytes,
            "read_amplification": read
            / max(1, made.page_bytes * sum(traffic.pages()[s] for s in ("ssd", "ahead"))),
            "written_s": written_s,
        }


def _fill(session: Any, asked: Requests, options: dict[str, Any], rng: Any) -> None:
    made, n = geometry(), asked.chunks
    above = [asked.windowed] * KV_HEADS
    noise = rng.integers(0, 2**16, (KV_HEADS, n, made.page_bytes // 2), np.uint16)
    for layer in range(LAYERS):
        pages = noise.copy()
        head, chunk = np.indices((KV_HEADS, n))
        pages[..., 0], pages[..., 1] = layer * KV_HEADS + head, chunk % 2**16
        pages[..., 2] = chunk // 2**16
        importance = np.zeros((KV_HEADS, n), np.float32)
        for k in range(KV_HEADS):
            warm = asked.warm[layer, k]
            warm = warm[warm >= 0]
            importance[k, warm] = np.arange(len(warm), 0, -1)
        session.offload(
            layer, pages.reshape(KV_HEADS, n, *made.page_shape), n, None, importance, above
        )
        session.wait()


def _wrong(out: Any, layer: int, head: Any, chunk: Any) -> int:
    rows = out.reshape(len(out), -1)[: len(chunk), :3].astype(np.int64)
    right = (rows[:, 0] == layer * KV_HEADS + head) & (rows[:, 1] + rows[:, 2] * 2**16 == chunk)
    return int((~right).sum())


def room(directory: str | None, nbytes: int) -> str:
    """A directory on a disk with so much room; RuntimeError when there is none."""
    path = tempfile.mkdtemp(prefix="tiers-", dir=directory)
    free = shutil.disk_usage(path).free
    if free < nbytes * 5 // 4:
        Path(path).rmdir()
        raise RuntimeError(f"{path} has {free:,} bytes free, {nbytes * 5 // 4:,} are needed")
    return path
