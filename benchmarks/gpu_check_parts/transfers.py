"""Part ``transfers``: host memory, copies, callbacks, top-k, dispatch; what only a device tells."""

from __future__ import annotations

import functools
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from benchmarks.gpu_check_parts.bench import Bench, Row, wall

KIB, MIB = 2**10, 2**20


def run(bench: Bench) -> None:
    """One row per question."""
    toy = bench.toy
    bench.item("this device", lambda row: _device(row))
    bench.item("direct fetch probe", lambda row: _probe(row))
    for size in (8,) if toy else (2, 8, 32, 64, 128, 256):
        name = f"pinned gather, rows of {size} KiB"
        bench.item(name, lambda row, size=size: _gather(bench, row, size * KIB))
    for size in (1,) if toy else (1, 4, 16, 64):
        name = f"device_put, {size} MiB"
        bench.item(name, lambda row, size=size: _put(bench, row, size * MIB))
    bench.item("copy during a matmul", lambda row: _overlap(bench, row))
    bench.item("append to a pinned array in place", lambda row: _append(bench, row))
    bench.item("round trips of 1 KiB", lambda row: _round_trips(row))
    for length in (512,) if toy else (8192, 32768):
        name = f"top-k of 64 x {length}"
        bench.item(name, lambda row, length=length: _top_k(bench, row, length))
    bench.item("dispatch", lambda row: _dispatch(row))


def pinned() -> jax.sharding.SingleDeviceSharding:
    """Pinned host memory of the default device."""
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def on_device() -> jax.sharding.SingleDeviceSharding:
    """Memory of the default device."""
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _device(row: Row) -> None:
    device = jax.devices()[0]
    row["kind"] = device.device_kind
    row["memory_kinds"] = [memory.kind for memory in device.addressable_memories()]
    row["memory_stats"] = device.memory_stats()
    if device.platform != "cpu":
        # What XLA compiles for here, to be compared with what the tests compile for.
        from jaxlib import xla_client

        topology = xla_client.get_topology_for_devices(jax.devices())
        row["target_description"] = str(topology.target_config)


def _probe(row: Row) -> None:
    from kvdrive_jax.pipeline.direct import why_not_direct
    from kvdrive_jax.tiers.pages import PageGeometry

    geometry = PageGeometry(
        layers=1, kv_heads=8, chunk_size=4, head_dim=128, dtype=np.dtype(jnp.bfloat16)
    )
    reason = why_not_direct(geometry)
    row["works"], row["reason"] = reason is None, reason
    row["figure"] = "works" if reason is None else "no"
    if reason is not None and reason.startswith("the probe"):
        row.update(status="failed", why=reason)


@functools.cache
def _slab(bench: Bench) -> tuple[np.ndarray[Any, Any], jax.Array]:
    """Pages of 2 KiB: NumPy's, and in pinned host memory (on a CPU in ordinary memory)."""
    rows = 512 if bench.toy else 2**19
    source = np.asarray(bench.draw.normal((rows, 1024), jnp.bfloat16))
    return source, jax.device_put(source, on_device() if bench.interpret else pinned())


def _gather(bench: Bench, row: Row, row_bytes: int) -> None:
    """Random rows from host memory, by the kernel and by the host through staging."""
    from kvdrive_jax.pallas.page_gather import GatherTuning, gather_pages

    source, host = _slab(bench)
    page = (2, 4, 128)
    page_bytes = 2 * int(np.prod(page))
    held, total = len(source), len(source) // 16
    run_length = row_bytes // page_bytes
    starts = bench.draw.order((held // run_length,))[: total // run_length] * run_length
    ids = (starts[:, None] + np.arange(run_length)).reshape(-1).astype(np.int32)
    slots = bench.draw.order((total,))
    first = jnp.zeros((1, 1), jnp.int32)

    def fresh() -> jax.Array:
        return jnp.zeros((1, total, *page), jnp.bfloat16)

    wanted = np.zeros((total, 1024), source.dtype)
    wanted[slots] = source[ids]
    # All at once, and a piece as small as one layer's misses of one session.
    for label, count in (("all", total), ("1 MiB", max(1, total // 64))):
        missing = jnp.asarray(np.stack([ids[:count], slots[:count]])[:, None, None])
        best = None
        for pages in (1, 4):
            gather = jax.jit(
                partial(
                    gather_pages,
                    implementation="xla" if bench.interpret else "triton",
                    tuning=GatherTuning(pages_per_program=pages),
                ),
                donate_argnums=0,
            )
            window = gather(fresh(), host, missing, first)
            if label == "all" and not np.array_equal(
                np.asarray(window).reshape(total, -1).view(np.uint16), wanted.view(np.uint16)
            ):
                row.update(status="failed", why="the gathered bytes are not those of the rows")
            state = [window]

            def call(gather: Any = gather, state: list[jax.Array] = state, m: Any = missing) -> Any:
                state[0] = gather(state[0], host, m, first)
                return state[0]

            taken = wall(call)
            row[f"{label}, {pages} per program, bytes_per_s"] = count * page_bytes / taken
            best = min(best or taken, taken)
        row[f"{label}, seconds"] = best
    row["bytes_per_s"] = total * page_bytes / row["all, seconds"]
    staging = np.zeros((total, 1024), source.dtype)
    blocks, at = source.reshape(-1, run_length * 1024), starts // run_length

    def staged() -> jax.Array:
        np.take(blocks, at, axis=0, out=staging.reshape(-1, run_length * 1024), mode="clip")
        return jax.device_put(staging, on_device())

    row["staged_bytes_per_s"] = total * page_bytes / wall(staged)
    row["figure"] = f"{row['bytes_per_s'] / 1e9:.1f} GB/s"


def _put(bench: Bench, row: Row, size: int) -> None:
    values = np.asarray(bench.draw.normal((size // 4,)))
    there = jax.device_put(values, on_device())
    host = jax.device_put(values, pinned())
    away = jax.jit(lambda x: x + 1.0)
    seconds = {
        "numpy_to_device": wall(lambda: jax.device_put(values, on_device())),
        "pinned_to_device": wall(lambda: jax.device_put(host, on_device())),
        "device_to_pinned": wall(lambda: jax.device_put(there, pinned())),
    }
    # A result that was read once is kept; so a new one each time.
    taken = []
    for _ in range(5):
        fresh = away(there).block_until_ready()
        start = time.perf_counter()
        np.asarray(fresh)
        taken.append(time.perf_counter() - start)
    seconds["device_to_numpy"] = sorted(taken)[2]
    for name, value in seconds.items():
        row[f"{name}_bytes_per_s"] = size / value
    row["figure"] = f"{row['pinned_to_device_bytes_per_s'] / 1e9:.1f} GB/s in"


def _overlap(bench: Bench, row: Row) -> None:
    """A copy from pinned memory, a chain of products, and both."""
    size, side = (2**16, 64) if bench.toy else (256 * MIB, 8192)
    host = jax.device_put(np.ones(size // 4, np.float32), pinned())
    (a,) = bench.draw.sets(lambda draw: draw.normal((side, side), jnp.bfloat16), 1)

    @jax.jit
    def products(x: jax.Array) -> jax.Array:
        y = x
        for _ in range(4 if bench.toy else 12):
            y = (y @ x) * 1e-2
        return y

    def both() -> Any:
        done = products(a)
        return done, jax.device_put(host, on_device())

    copy = wall(lambda: jax.device_put(host, on_device()))
    compute, together = wall(lambda: products(a)), wall(both)
    row.update(copy_s=copy, compute_s=compute, both_s=together)
    row["overlapped_share"] = max(0.0, min(1.0, (copy + compute - together) / min(copy, compute)))
    row["figure"] = f"{row['overlapped_share']:.0%} hidden"


def _append(bench: Bench, row: Row) -> None:
    """`dynamic_update_slice` into a donated pinned array: correct, in place?"""
    held, new = (1024, 64) if bench.toy else (2**20, 2**12)
    cache = jax.device_put(np.zeros((held, 64), np.float32), pinned())
    rows = jnp.ones((new, 64))
    before = cache.unsafe_buffer_pointer()

    def put(cache: jax.Array, rows: jax.Array) -> jax.Array:
        there = jax.device_put(rows, jax.memory.Space.Host)
        return jax.lax.dynamic_update_slice_in_dim(cache, there, 8, axis=0)

    append = jax.jit(put, donate_argnums=0, out_shardings=pinned())
    cache = append(cache, rows).block_until_ready()
    found = np.asarray(cache)
    if found.sum() != new * 64 or not (found[8 : 8 + new] == 1).all():
        row.update(status="failed", why="the array does not hold what was appended")
    row["in_place"] = cache.unsafe_buffer_pointer() == before
    del found
    state = [cache]

    def call() -> jax.Array:
        state[0] = append(state[0], rows)
        return state[0]

    row["seconds"] = wall(call)
    row["bytes_per_s"] = rows.nbytes / row["seconds"]


def _round_trips(row: Row) -> None:
    x = jnp.ones(256)
    plain = jax.jit(lambda x: x + 1.0)

    def fetched() -> Any:
        y = plain(x)
        y.copy_to_host_async()
        return np.asarray(y)

    def echo(x: Any) -> Any:
        return np.asarray(x) + 1

    shape = jax.ShapeDtypeStruct((256,), jnp.float32)
    called = jax.jit(lambda x: io_callback(echo, shape, x) + 1.0)
    row["copy_to_host_s"] = wall(fetched, 30)
    row["io_callback_s"] = wall(lambda: called(x), 30)
    row["pure_callback_s"] = wall(
        partial(jax.jit(lambda x: jax.pure_callback(echo, shape, x) + 1.0), x), 30
    )
    row["figure"] = f"{row['copy_to_host_s'] * 1e6:.0f} us"


def _top_k(bench: Bench, row: Row, length: int) -> None:
    from kvdrive_jax.pallas.selection.api import select_chunks

    sets = bench.draw.sets(lambda draw: (draw.normal((8, 8, length)),), 4)
    held = jnp.full(8, length, jnp.int32)
    for k in (32,) if bench.toy else (128, 256, 512):
        ways = {"top_k": partial(jax.lax.top_k, k=k)}
        if not bench.interpret:
            ways["kernel"] = partial(
                lambda scores, k: select_chunks(scores, held, k, implementation="triton"), k=k
            )
        try:
            jax.lax.top_k(sets[0][0][0], k, is_stable=False)  # type: ignore[call-arg]
            ways["top_k, unstable"] = partial(jax.lax.top_k, k=k, is_stable=False)
        except TypeError:
            row["unstable"] = "this JAX has no is_stable"
        for name, way in ways.items():
            row[f"{name}, k {k}, s"] = bench.seconds(way, sets)["seconds"]


def _dispatch(row: Row) -> None:
    """What a call costs the host, with as many leaves as a layer has."""
    leaves = tuple(jnp.ones(8) for _ in range(10))
    call = jax.jit(lambda leaves, x: x + leaves[0])
    x = jnp.ones(8)
    jax.block_until_ready(call(leaves, x))
    count = 300
    start = time.perf_counter()
    for _ in range(count):
        x = call(leaves, x)
    row["seconds"] = (time.perf_counter() - start) / count
    jax.block_until_ready(x)
    row["with_wait_s"] = wall(lambda: call(leaves, x), 50)
    row["figure"] = f"{row['seconds'] * 1e6:.1f} us"
