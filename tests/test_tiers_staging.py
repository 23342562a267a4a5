"""The staging ring and the scratch buffers: who owns a buffer, and when."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest

from kvdrive_jax.telemetry import BudgetError, Ledger
from kvdrive_jax.tiers import PageGeometry, StagingRing
from kvdrive_jax.tiers.staging import ScratchPool

GEOMETRY = PageGeometry(
    layers=1, kv_heads=1, chunk_size=3, head_dim=5, dtype=np.dtype(ml_dtypes.bfloat16)
)


def test_buffers_are_typed_aligned_reserved_and_released() -> None:
    ledger = Ledger(dram=10_000)
    with StagingRing(3, 7, GEOMETRY, ledger) as ring:
        assert ledger.used("dram") == 3 * 7 * GEOMETRY.page_bytes
        held = [ring.acquire() for _ in range(3)]
        for staging in held:
            assert staging.buffer.shape == (7, 2, 3, 5)
            assert staging.buffer.dtype == GEOMETRY.dtype
            assert staging.buffer.ctypes.data % 64 == 0
        assert len({staging.index for staging in held}) == 3
    assert ledger.used("dram") == 0
    ring.close()
    with pytest.raises(RuntimeError, match="closed"):
        ring.acquire()


def test_a_buffer_has_one_owner_and_generations_tell_them_apart() -> None:
    ring = StagingRing(1, 1, GEOMETRY, Ledger())
    first = ring.acquire()
    with pytest.raises(RuntimeError, match="all 1 staging buffers are in flight"):
        ring.acquire()
    with pytest.raises(RuntimeError, match="in flight"):
        ring.acquire(timeout=0.01)
    ring.release(first)
    assert not ring.current(first)
    second = ring.acquire()
    assert second.index == first.index
    assert second.generation == first.generation + 1
    assert ring.current(second)
    with pytest.raises(RuntimeError, match="released already"):
        ring.release(first)
    ring.release(second)
    with pytest.raises(RuntimeError, match="released already"):
        ring.release(second)


def test_acquire_waits_for_a_release() -> None:
    ring = StagingRing(1, 1, GEOMETRY, Ledger())
    staging = ring.acquire()
    timer = threading.Timer(0.05, ring.release, [staging])
    timer.start()
    assert ring.acquire(timeout=None).generation == 2
    timer.join()


def test_a_ring_over_the_budget_reserves_nothing() -> None:
    ledger = Ledger(dram=100)
    with pytest.raises(BudgetError, match="staging ring"):
        StagingRing(3, 7, GEOMETRY, ledger)
    assert ledger.used("dram") == 0
    with pytest.raises(ValueError, match="count"):
        StagingRing(0, 7, GEOMETRY, ledger)


def test_scratch_is_not_reused_after_an_error() -> None:
    pool = ScratchPool(1, "a buffer")
    pool.resize(128)
    with pool.borrow() as buffer:
        assert buffer.nbytes == 128
        kept = buffer
    with pool.borrow() as buffer:
        assert buffer is kept

    def interrupted() -> None:
        with pool.borrow():
            raise OSError("interrupted read")

    with pytest.raises(OSError, match="interrupted"):
        interrupted()
    with pool.borrow() as buffer:
        assert buffer is not kept
    pool.resize(64)
    with pool.borrow() as buffer:
        assert buffer.nbytes == 64
