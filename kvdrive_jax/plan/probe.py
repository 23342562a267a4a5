"""This CPU in numbers: what its memory, its products, its dispatch and its gathers take.

A few seconds. Needs JAX on CPU; half of the fetch path on a CPU is NumPy, and probed as such.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvdrive_jax.plan.hardware import Hardware
from kvdrive_jax.telemetry import host_memory_bytes

STREAM_BYTES = 1 << 28
PRODUCT = (1024, 2048)
PAGE_BYTES = 2048
PAGES = 4096


def seconds(call: Callable[[], Any], repeats: int = 7) -> float:
    """Median of so many calls, after one that is not counted."""
    call()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def stream() -> float:
    """Bytes/s of reading a vector that no cache holds by one matrix-vector product."""
    rows = STREAM_BYTES // 4 // 4096
    matrix, vector = jnp.ones((rows, 4096), jnp.float32), jnp.ones(4096, jnp.float32)
    product = jax.jit(lambda m, v: m @ v)
    return STREAM_BYTES / seconds(lambda: product(matrix, vector).block_until_ready())


def product_rate() -> float:
    """float32 operations/s of a matrix product."""
    rows, width = PRODUCT
    left, right = jnp.ones((rows, width), jnp.float32), jnp.ones((width, width), jnp.float32)
    product = jax.jit(jnp.matmul)
    taken = seconds(lambda: product(left, right).block_until_ready())
    return 2.0 * rows * width * width / taken


def dispatch() -> float:
    """Seconds to hand over a compiled function of a dozen arrays."""
    arrays = tuple(jnp.ones(8) for _ in range(12))
    small = jax.jit(lambda leaves: tuple(leaf + 1 for leaf in leaves))

    def many() -> None:
        for _ in range(50):
            made = small(arrays)
        made[-1].block_until_ready()

    return seconds(many) / 50


def gather() -> float:
    """Bytes/s of pages that one thread puts together."""
    slab: np.ndarray[Any, Any] = np.ones((1 << 16, PAGE_BYTES // 4), np.float32)
    at = np.random.default_rng(0).integers(0, len(slab), PAGES)
    out = np.empty((PAGES, PAGE_BYTES // 4), np.float32)
    return PAGES * PAGE_BYTES / seconds(lambda: np.take(slab, at, axis=0, out=out, mode="clip"))


def copy() -> float:
    """Bytes/s of NumPy memory into a new array of the device."""
    source: np.ndarray[Any, Any] = np.ones(1 << 22, np.float32)
    return source.nbytes / seconds(
        lambda: jax.device_put(source, may_alias=False).block_until_ready()
    )


def this_cpu() -> Hardware:
    """The machine this runs on, as a device with its host.

    Raises NotImplementedError where JAX does not run on a CPU.
    """
    if jax.default_backend() != "cpu":
        raise NotImplementedError(
            f"this machine can be probed with JAX on cpu only, got {jax.default_backend()}: "
            "set JAX_PLATFORMS=cpu"
        )
    bandwidth, rate, moved = stream(), product_rate(), copy()
    handing = dispatch()
    return Hardware(
        name=f"CPU, {len(os.sched_getaffinity(0))} cores",
        hbm=bandwidth,
        tensor=rate,
        vector=rate / 2,
        pcie=moved,
        pcie_latency=handing,
        memory=host_memory_bytes(),
        dram=host_memory_bytes(),
        gather=gather(),
        miss_list=handing,
        dispatch=handing,
        host_bandwidth=bandwidth,
        host_operations=rate,
        source="measured here",
    )
