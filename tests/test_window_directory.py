"""The directory against a plain Python model, step by step."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from kvdrive_jax.window import directory as directories
from kvdrive_jax.window import eviction, warm
from kvdrive_jax.window.directory import Directory

place = jax.jit(directories.place, donate_argnums=0)
insert_row = jax.jit(directories.insert_row, donate_argnums=0)
clear_row = jax.jit(directories.clear_row, donate_argnums=0)


@jax.jit
def lookahead_step(
    directory: Directory, ids: jax.Array, scores: jax.Array
) -> tuple[Directory, jax.Array, jax.Array]:
    return directories.place(directory, ids, eviction.lookahead(directory, scores))


class Model:
    """One (session, kv head): slots as a list, nothing else."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.slots: list[int] = [-1] * slots
        self.capacity = capacity

    def place(self, ids: list[int], priority: list[float]) -> tuple[list[int], list[bool]]:
        before = list(self.slots)
        selected = {i for i in ids if i >= 0}
        free = [s for s in range(self.capacity) if before[s] not in selected]
        order = sorted(free, key=lambda s: (before[s] >= 0, before[s] >= 0 and priority[s], s))
        where, miss = [], []
        for chunk in ids:
            missing = chunk >= 0 and chunk not in before
            miss.append(missing)
            if missing:
                slot = order.pop(0) if order else -1
                if slot >= 0:
                    self.slots[slot] = chunk
                where.append(slot)
            else:
                where.append(before.index(chunk) if chunk >= 0 else -1)
        return where, miss


def check_maps(directory: Directory, n_chunks: np.ndarray[Any, Any] | None = None) -> None:
    """The two maps are each other's inverse, inside capacity and the session's chunks."""
    slot_of_chunk = np.asarray(directory.slot_of_chunk)
    chunk_of_slot = np.asarray(directory.chunk_of_slot)
    capacity = np.asarray(directory.capacity)
    for b, k in np.ndindex(*slot_of_chunk.shape[:2]):
        forward = {(c, s) for c, s in enumerate(slot_of_chunk[b, k]) if s >= 0}
        backward = {(c, s) for s, c in enumerate(chunk_of_slot[b, k]) if c >= 0}
        assert forward == backward
        assert all(s < capacity[k] for _, s in forward)
        if n_chunks is not None:
            assert all(c < n_chunks[b] for c, _ in forward)


def pick(rng: np.random.Generator, n_chunks: int, count: int, near: int) -> np.ndarray[Any, Any]:
    """Distinct ids below n_chunks, mostly near a drifting place so that there are hits."""
    taken = min(count, n_chunks)
    weight = np.exp(-np.abs(np.arange(n_chunks) - near % max(n_chunks, 1)) / 3) + 0.02
    ids = rng.choice(n_chunks, taken, replace=False, p=weight / weight.sum()) if taken else []
    return np.concatenate([ids, np.full(count - taken, -1)]).astype(np.int32)


@pytest.mark.parametrize(
    ("slots", "count", "capacity"), [(9, 5, [9, 6, 5]), (4, 4, [4, 4, 4]), (16, 1, [1, 7, 16])]
)
def test_equals_a_plain_model_over_random_steps_with_sessions_that_come_and_go(
    slots: int, count: int, capacity: list[int]
) -> None:
    rng = np.random.default_rng(slots)
    batch, heads, chunks = 2, 3, 40
    directory = directories.empty_directory(batch, heads, chunks, slots, jnp.array(capacity))
    models = [[Model(slots, capacity[k]) for k in range(heads)] for _ in range(batch)]
    n_chunks = np.array([0, 7])
    for step in range(1500):
        event = rng.random()
        row = int(rng.integers(batch))
        if event < 0.02:
            directory = clear_row(directory, row)
            n_chunks[row] = rng.integers(0, chunks + 1)
            models[row] = [Model(slots, capacity[k]) for k in range(heads)]
        elif event < 0.05:
            n_chunks[row] = rng.integers(0, chunks + 1)
            warm = np.full((heads, slots), -1, np.int32)
            for k in range(heads):
                some = rng.permutation(n_chunks[row])[: rng.integers(0, capacity[k] + 1)]
                warm[k, rng.permutation(capacity[k])[: len(some)]] = some
                models[row][k] = Model(slots, capacity[k])
                models[row][k].slots = warm[k].tolist()
            directory = insert_row(directory, row, jnp.asarray(warm))
        elif event < 0.2:
            n_chunks[row] = min(chunks, n_chunks[row] + 2)
        ids = np.stack(
            [
                [pick(rng, n_chunks[b], count, step // 9 + k) for k in range(heads)]
                for b in range(batch)
            ]
        )
        # Few distinct values, -0.0 and infinities among them: ties are the rule here.
        values = np.array([-np.inf, -1.5, -0.0, 0.0, 2.0, np.inf], np.float32)
        priority = rng.choice(values, (batch, heads, slots))
        before = np.asarray(directory.chunk_of_slot).copy()
        directory, where, miss = place(directory, jnp.asarray(ids), jnp.asarray(priority))
        where, miss = np.asarray(where), np.asarray(miss)
        for b, k in np.ndindex(batch, heads):
            slots_of, missed = models[b][k].place(ids[b, k].tolist(), priority[b, k].tolist())
            assert miss[b, k].tolist() == missed
            # Which miss takes which of the freed slots is free.
            assert sorted(where[b, k].tolist()) == sorted(slots_of)
            models[b][k].slots = np.asarray(directory.chunk_of_slot)[b, k].tolist()
            # Everything selected is in its slot afterwards, and hits did not move.
            for chunk, slot, missing in zip(ids[b, k], where[b, k], miss[b, k], strict=True):
                if chunk >= 0:
                    assert models[b][k].slots[slot] == chunk
                    assert missing == (before[b, k, slot] != chunk)
        if step % 50 == 0:
            check_maps(directory, n_chunks)
    check_maps(directory, n_chunks)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(
        [(1, 1, 1, 1, 1), (2, 3, 12, 8, 5), (1, 2, 5, 7, 7), (2, 1, 0, 3, 2), (1, 3, 9, 3, 1)]
    ),
    st.integers(0, 99),
)
def test_any_shape_keeps_the_maps_inverse(shape: tuple[int, int, int, int, int], seed: int) -> None:
    batch, heads, chunks, slots, count = shape
    rng = np.random.default_rng(seed)
    directory = directories.empty_directory(batch, heads, chunks, slots, slots)
    for step in range(4):
        ids = np.stack(
            [[pick(rng, chunks, count, step) for _ in range(heads)] for _ in range(batch)]
        )
        scores = jnp.asarray(rng.standard_normal((batch, heads, chunks)), jnp.float32)
        directory, where, miss = lookahead_step(directory, jnp.asarray(ids), scores)
        check_maps(directory)
        assert np.array_equal(np.asarray(where) >= 0, ids >= 0)
        assert not np.any(np.asarray(miss) & (ids < 0))


def test_capacity_is_used_to_the_last_slot_and_never_beyond() -> None:
    directory = directories.empty_directory(1, 2, 64, 8, jnp.array([8, 3]))
    for start in range(0, 60, 3):
        ids = jnp.broadcast_to(jnp.arange(start, start + 3), (1, 2, 3)).astype(jnp.int32)
        directory, _, miss = place(directory, ids, jnp.zeros((1, 2, 8)))
        assert bool(miss.all())
    held = (np.asarray(directory.chunk_of_slot) >= 0).sum(-1)
    assert held.tolist() == [[8, 3]]


def test_inserted_row_drops_what_lies_beyond_capacity_and_leaves_other_rows() -> None:
    directory = directories.empty_directory(2, 1, 10, 4, 2)
    directory = directories.insert_row(directory, 1, jnp.array([[5, 6, 7, 8]]))
    assert np.asarray(directory.chunk_of_slot).tolist() == [[[-1] * 4], [[5, 6, -1, -1]]]
    check_maps(directory)
    directory = directories.clear_row(directory, 1)
    assert not np.any(np.asarray(directory.slot_of_chunk) >= 0)


def test_lookahead_keeps_the_best_m_while_anything_worse_is_there() -> None:
    rng = np.random.default_rng(3)
    chunks, slots, count = 50, 12, 4
    best = 5  # M in chunks: 1.25 x count
    directory = directories.empty_directory(1, 1, chunks, slots, slots)
    for _ in range(200):
        scores = jnp.asarray(rng.standard_normal((1, 1, chunks)), jnp.float32)
        ranked = np.argsort(-np.asarray(scores)[0, 0])
        held = set(np.asarray(directory.chunk_of_slot)[0, 0].tolist()) - {-1}
        ids = jnp.asarray(ranked[:count].astype(np.int32))[None, None]
        directory, _, _ = lookahead_step(directory, ids, scores)
        after = set(np.asarray(directory.chunk_of_slot)[0, 0].tolist())
        if held & set(ranked[best:].tolist()) & after:
            assert held & set(ranked[:best].tolist()) <= after


def test_second_step_of_a_shape_compiles_nothing() -> None:
    step = jax.jit(lambda d, i, p: directories.place(d, i, p)[0], donate_argnums=0)
    directory = directories.empty_directory(1, 1, 8, 4, 4)
    for start in range(3):
        ids = jnp.full((1, 1, 2), start, jnp.int32).at[..., 1].add(1)
        directory = step(directory, ids, jnp.zeros((1, 1, 4)))
    assert step._cache_size() == 1


def test_bad_calls_are_refused() -> None:
    directory = directories.empty_directory(1, 1, 8, 2, 2)
    with pytest.raises(ValueError, match="3 chunks, 2 slots"):
        directories.place(directory, jnp.zeros((1, 1, 3), jnp.int32), jnp.zeros((1, 1, 2)))
    with pytest.raises(ValueError, match="slots must be at least 1"):
        directories.empty_directory(1, 1, 8, 0, 0)
    with pytest.raises(ValueError, match=r"ids must be \[kv_heads, slots\] \(1, 2\)"):
        directories.insert_row(directory, 0, jnp.zeros((2, 2), jnp.int32))
    with pytest.raises(ValueError, match="fifo, last-step, none; got 'mru'"):
        eviction.policy("mru")
    assert eviction.policy("lookahead") is eviction.lookahead


class Remembered:
    """What a policy may know, of one (session, kv head), in plain Python."""

    def __init__(self, slots: int) -> None:
        self.entered = dict.fromkeys(range(slots), -1)
        self.used = dict.fromkeys(range(slots), -1)
        self.uses = dict.fromkeys(range(slots), 0)
        self.standing: dict[int, float] = {}

    def priority(self, eviction: str, slot: int, chunk: int, score: float) -> float:
        if eviction == "smoothed":
            return 0.5 * self.standing[chunk] + 0.5 * score
        values = {"lookahead": score, "lru": self.used[slot], "lfu": self.uses[slot]}
        return float(values.get(eviction, self.entered[slot]))


@pytest.mark.parametrize("eviction_name", ["smoothed", "lookahead", "lru", "lfu", "fifo"])
def test_policies_equal_a_plain_model(eviction_name: str) -> None:
    """Over many steps, with a kv head that keeps nothing, and a session that begins anew."""
    heads, chunks, slots, count = 3, 23, 9, 4
    capacity, keeps = [9, 6, 4], [True, True, False]
    directory = directories.empty_directory(
        1, heads, chunks, slots, capacity, keeps, smooths=eviction.smooths(eviction_name)
    )

    @jax.jit
    def step(directory: Directory, ids: jax.Array, scores: jax.Array) -> Any:
        directory = directories.observe(directory, scores, ids)
        priority = eviction.policy(eviction_name)(directory, scores)
        return directories.place(directory, ids, priority)

    rng = np.random.default_rng(8)
    models = [Model(slots, size) for size in capacity]
    memories = [Remembered(slots) for _ in range(heads)]
    for number in range(300):
        if number == 150:
            directory = clear_row(directory, 0)
            models = [Model(slots, size) for size in capacity]
            memories = [Remembered(slots) for _ in range(heads)]
        # Few distinct scores: ties go to the lowest slot.
        scores = rng.integers(-3, 4, (1, heads, chunks)).astype(np.float32) / 4
        ids = np.argsort(-scores, axis=-1, kind="stable")[..., :count].astype(np.int32)
        directory, where, miss = step(directory, jnp.asarray(ids), jnp.asarray(scores))
        held = np.asarray(directory.chunk_of_slot)[0]
        for k in range(heads):
            memory, model, chosen = memories[k], models[k], ids[0, k].tolist()
            for chunk in range(chunks):
                now = float(scores[0, k, chunk]) + 6.0 * (chunk in chosen)
                before = memory.standing.get(chunk)
                memory.standing[chunk] = now if before is None else 0.9 * before + 0.1 * now
            before_slots = list(model.slots)
            priority = [
                memory.priority(eviction_name, s, c, float(scores[0, k, c])) if c >= 0 else 0.0
                for s, c in enumerate(before_slots)
            ]
            free = {s for s, c in enumerate(before_slots[: capacity[k]]) if c not in chosen}
            _, missed = model.place(chosen, priority)
            assert np.asarray(miss)[0, k].tolist() == missed
            if not keeps[k]:
                model.slots = [-1] * slots
                assert sorted(np.asarray(where)[0, k].tolist()) == list(range(count))
                assert (held[k] == -1).all()
                continue
            evicted = {s for s in free if model.slots[s] != before_slots[s]}
            if eviction_name == "smoothed" and len(set(priority)) < len(priority):
                # Sums in float32 may break ties that are ties in float64: any of them will do.
                assert len({s for s in free if held[k, s] != before_slots[s]}) == len(evicted)
            else:
                assert {s for s in free if held[k, s] != before_slots[s]} == evicted
            model.slots = held[k].tolist()
            for slot, chunk in enumerate(model.slots):
                if chunk != before_slots[slot]:
                    memory.entered[slot], memory.uses[slot] = number, 0
                if chunk in chosen:
                    memory.used[slot], memory.uses[slot] = number, memory.uses[slot] + 1
    check_maps(directory)


def test_slots_lie_where_the_layout_says() -> None:
    directory = directories.empty_directory(2, 3, 9, 4, [4, 2, 3], [True, False, True], [7, 0, 11])
    ids = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), (2, 3, 2))
    directory, slots, _ = place(directory, ids, jnp.zeros((2, 3, 4)))
    rows = np.asarray(directories.pool_rows(directory, slots))
    assert [sorted(row) for row in rows[1].tolist()] == [[7, 8], [0, 1], [11, 12]]
    held, chunks = directories.held_slots(directory, slots, ids)
    assert sorted(np.asarray(chunks)[0, 1].tolist()) == [-1] * 4 + [0, 1]
    assert sorted(np.asarray(held)[0, 1].tolist()) == [-1] * 4 + [0, 1]
    assert sorted(np.asarray(chunks)[0, 2].tolist()) == [-1] * 4 + [0, 1]


def test_warm_windows_hold_the_best_and_the_least_of_them_goes_first() -> None:
    importance = jnp.array([[5.0, 1.0, 4.0, 4.0, 9.0], [1.0, 2.0, 3.0, 0.0, 7.0]])
    ranked = warm.rank_chunks(importance, jnp.int32(4), 5)
    assert ranked.tolist() == [[0, 2, 3, 1, -1], [2, 1, 0, 3, -1]]
    slots = warm.warm_slots(ranked, jnp.array([3, 5]), 5)
    assert slots.tolist() == [[3, 2, 0, -1, -1], [-1, 3, 0, 1, 2]]
    directory = directories.empty_directory(1, 2, 5, 5, [3, 5])
    directory = directories.insert_row(directory, 0, slots)
    # Without history everything ties: the lowest slot, and empty ones before it.
    ids = jnp.full((1, 2, 1), 4, jnp.int32)
    directory, where, _ = place(directory, ids, eviction.lru(directory, jnp.zeros((1, 2, 5))))
    assert np.asarray(where).tolist() == [[[0], [0]]]
    check_maps(directory)


def test_the_types_of_a_directory_are_those_after_a_step() -> None:
    """Weak types would compile every stage that takes one twice."""
    directory = directories.empty_directory(1, 2, 9, 3, 3, smooths=True)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(directory))
