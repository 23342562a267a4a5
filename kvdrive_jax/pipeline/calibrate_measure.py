"""What windows cost on this machine: look-up and eviction by window size, and a fetch by its pages.

One layer of the batch at hand, with made-up scores and pages. Policy, choice of victims and history
are the engine's own, and so is the write of pages into their slots; the gather is what the store
does for pages in DRAM, and the link to HBM is the imitated one where there is one. Made before
prefill, so that the memory it takes is memory that the batch will take anyway. Of repetitions the
quickest counts: whatever else the machine does only adds to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from kvdrive_jax.pipeline.calibrate import WindowCosts
from kvdrive_jax.pipeline.stages import write_stage
from kvdrive_jax.tiers.link import Link
from kvdrive_jax.tiers.pages import PageGeometry, page_rows, touched_bytes
from kvdrive_jax.window.allocation import slots_of
from kvdrive_jax.window.directory import Directory, empty_directory, find_victims
from kvdrive_jax.window.eviction import policy, smooths
from kvdrive_jax.window.history import advance

MEASURE_S: Final = 2.5
"""Seconds after which no further window size is measured."""
MULTIPLES: Final = (1.0, 2.0, 4.0, 8.0, 16.0)
SLAB_BYTES: Final = 64 << 20
"""Pages are gathered from at most so much: more than caches hold."""
WARM, STEPS = 3, 12
FEW_PAGES = 16


@dataclass(frozen=True, kw_only=True)
class WindowCase:
    """One layer of a batch: B, K, N and P, who leaves a full window, and the pages."""

    batch: int
    chunk_capacity: int
    selected: int
    eviction: str
    geometry: PageGeometry

    @property
    def pages(self) -> int:
        """Selected in one layer and step."""
        return self.batch * self.geometry.kv_heads * self.selected

    def sizes(self, largest: float) -> tuple[float, ...]:
        """Window sizes to measure, up to about the largest there is room for."""
        most = min(largest, self.chunk_capacity / self.selected)
        return tuple(size for size in MULTIPLES if size == 1 or size < 2 * most)

    def hbm_bytes(self, largest: float) -> int:
        """Bytes on the device while measuring."""
        pairs = self.batch * self.geometry.kv_heads
        slots = slots_of(self.sizes(largest)[-1], self.selected)
        maps = pairs * 4 * (2 * self.chunk_capacity + 4 * slots)
        scores = pairs * 4 * (self.chunk_capacity + 2 * slots)
        return maps + scores + 3 * self.pages * self.geometry.page_bytes

    @property
    def slab_pages(self) -> int:
        """Pages to gather from."""
        stored = self.batch * self.geometry.kv_heads * self.chunk_capacity * self.geometry.layers
        return max(1, min(stored, SLAB_BYTES // self.geometry.dram_page_bytes))

    @property
    def dram_bytes(self) -> int:
        """Bytes of host memory while measuring."""
        return (self.slab_pages + self.pages) * self.geometry.dram_page_bytes


def measure_windows(
    case: WindowCase,
    largest: float,
    link: Link | None = None,
    *,
    limit_s: float = MEASURE_S,
    clock: Callable[[], float] = time.perf_counter,
) -> WindowCosts | None:
    """Costs of windows up to about ``largest`` times the budget; None when fewer than two sizes
    were measured in time.

    The smallest and the largest size come first. A fetch is measured with few pages and with all,
    its cost taken to grow by the same for each.
    """
    start = clock()
    fetch_s, page_s = _fetch_seconds(case, link, clock)
    sizes = case.sizes(largest)
    order = [sizes[0], *reversed(sizes[1:])]
    looked: dict[float, float] = {}
    slowest = 0.0
    for size in order:
        begin = clock()
        if begin - start + slowest > limit_s:
            break
        looked[size] = _lookup_seconds(case, slots_of(size, case.selected), clock)
        slowest = max(slowest, clock() - begin)
    if len(looked) < 2:
        return None
    multiples = tuple(sorted(looked))
    return WindowCosts(
        multiples=multiples,
        lookup_s=tuple(looked[size] for size in multiples),
        fetch_s=fetch_s,
        page_s=page_s,
    )


@partial(jax.jit, static_argnames=("eviction", "selected"), donate_argnames="directory")
def _evict(
    directory: Directory,
    scores: jax.Array,
    held: jax.Array,
    wanted: jax.Array,
    *,
    eviction: str,
    selected: int,
) -> tuple[Directory, jax.Array]:
    """Of look-up and eviction what grows with the window, at a tenth of the time that compiling all
    of it takes."""
    priority = policy(eviction)(directory, scores)
    victims = find_victims(directory, priority, held, wanted, selected)
    return replace(directory, history=advance(directory.history, held, ~held)), victims


def _lookup_seconds(case: WindowCase, slots: int, clock: Callable[[], float]) -> float:
    rng = np.random.default_rng(0)
    heads = (case.batch, case.geometry.kv_heads)
    form = jax.eval_shape(
        partial(
            empty_directory,
            *heads,
            case.chunk_capacity,
            slots,
            slots,
            smooths=smooths(case.eviction),
        )
    )
    # Made by NumPy: what runs once is not worth compiling.
    directory: Directory = jax.tree.map(
        lambda leaf: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)), form
    )
    ids = np.arange(slots, dtype=np.int32) % case.chunk_capacity
    directory = replace(
        directory,
        chunk_of_slot=jnp.asarray(np.broadcast_to(ids, (*heads, slots))),
        capacity=jnp.asarray(np.full(heads[1], slots, np.int32)),
        keeps=jnp.asarray(np.ones(heads[1], bool)),
    )
    scores = jnp.asarray(rng.standard_normal((*heads, case.chunk_capacity), np.float32))
    held = jnp.asarray(
        np.broadcast_to(rng.permutation(slots) < case.selected * 3 // 4, (*heads, slots))
    )
    wanted = jnp.asarray(np.full(heads, case.selected // 4, np.int32))
    taken = []
    for _ in range(WARM + STEPS):
        start = clock()
        out = _evict(
            directory, scores, held, wanted, eviction=case.eviction, selected=case.selected
        )
        jax.block_until_ready(out)
        directory = out[0]
        taken.append(clock() - start)
    return min(taken[WARM:])


def _fetch_seconds(
    case: WindowCase, link: Link | None, clock: Callable[[], float]
) -> tuple[float, float]:
    """Seconds of a fetch, and of each of its pages."""
    geometry, rng = case.geometry, np.random.default_rng(1)
    nbytes = geometry.dram_page_bytes
    slab = touched_bytes(case.slab_pages * nbytes, "a slab to measure with").reshape(-1, nbytes)
    counts = sorted({min(FEW_PAGES, case.pages), case.pages})
    staging = np.empty((case.pages, *geometry.dram_shape), geometry.dram_dtype)
    window = jnp.zeros((1, case.pages, *geometry.page_shape), geometry.dtype)
    quickest = []
    for count in counts:
        taken = []
        for _ in range(STEPS // 2):
            chosen = rng.integers(0, len(slab), count, np.int32)
            target = rng.permutation(case.pages)[:count].astype(np.int32)
            pages = staging[:count]
            start = clock()
            with nullcontext() if link is None else link.carry(count * nbytes):
                slab.take(chosen, axis=0, out=page_rows(pages, nbytes), mode="clip")
                window = write_stage(window, pages, target, geometry.dram)
                window.block_until_ready()
            taken.append(clock() - start)
        quickest.append(min(taken[1:]))
    if len(counts) == 1:
        return 0.0, quickest[0] / counts[0]
    page_s = max(0.0, (quickest[1] - quickest[0]) / (counts[1] - counts[0]))
    return max(0.0, quickest[0] - counts[0] * page_s), page_s
