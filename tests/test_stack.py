"""Layer stacks: schedules compute the same, and stages see recorded tokens and real heads' KV."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import stack_kv
from benchmarks.pipeline_cases import few, shortest_s
from benchmarks.stack import Stack
from benchmarks.stack_kv import OBSERVED, SINK, HeadShape, RealKV, RealText
from benchmarks.stack_run import StepSpans, same_outputs
from kvdrive_jax import KVDriveConfig, RetrievalConfig, WindowConfig
from kvdrive_jax.pipeline.parts import Arrangement
from kvdrive_jax.timeline import Span

CONTEXTS = (300, 41, 187, 230)
STEPS = 3


@pytest.fixture(scope="module")
def stack() -> Stack:
    return Stack("tiny", 2, CONTEXTS, steps=STEPS, kv="random")


def test_arrangements_compute_the_same(stack: Stack) -> None:
    config = KVDriveConfig(
        batch_size=4, retrieval=RetrievalConfig(budget=32), window=WindowConfig(multiple=1.0)
    )
    runs = {}
    with stack.open(config) as session:
        for micro_batch, cohorts in ((4, 1), (2, 1)):
            session.arrange(micro_batch, cohorts)
            runs[f"{micro_batch}, {cohorts}"] = run = session.run(warm_up=1)
            assert run.bytes["dram_to_hbm"] > 0
            assert sum(run.missed) <= sum(run.selected)
            assert {span.name for span in run.spans[0].spans} >= {"select", "compute", "gather"}
    assert same_outputs(runs) == {"2, 1": 0}
    assert runs["2, 1"].missed == runs["4, 1"].missed  # from the same windows on
    assert len({*run.digests}) == STEPS
    run.digests[-1] = "other"
    with pytest.raises(RuntimeError, match="from step 2 on"):
        same_outputs(runs)


def test_rows_get_their_recorded_tokens(stack: Stack) -> None:
    model, rows, step = stack.model, slice(1, 3), 2
    bank = stack.source.bank(1)

    def inputs(hidden: jax.Array, positions: jax.Array, numbers: jax.Array) -> Any:
        layer = model.static.merge_layer(model.layers[1])
        frequencies = jnp.ones((2, model.config.head_dim // 2))
        return layer.attention_inputs(hidden, positions, frequencies, numbers)

    arguments = (
        jnp.ones((2, model.config.hidden_size)),
        jnp.asarray(CONTEXTS[rows], jnp.int32) + step,
        jnp.arange(1.0, 5.0)[rows],
    )
    compiled = jax.jit(inputs).lower(*arguments).compile()
    for got, recorded in zip(compiled(*arguments), bank, strict=True):
        np.testing.assert_array_equal(got, recorded[rows, step])
    # What the projection costs is part of what is measured.
    cost = compiled.cost_analysis()
    assert cost["flops"] >= 2 * 2 * model.config.hidden_size * model.config.qkv_width


PROMPT, FILLER, AFTER = 120, 80, 8


@patch.multiple(stack_kv, PROMPT=PROMPT, FILLER=FILLER, STEPS=AFTER)
def test_real_heads_keep_their_attention() -> None:
    draw = np.random.default_rng(0)
    pairs, dim = stack_kv.PAIRS, 4

    def normal(*shape: int) -> Any:
        return draw.standard_normal(shape).astype(np.float16)

    tokens = PROMPT + AFTER
    texts = [
        RealText(
            k=normal(pairs, tokens, dim),
            v=normal(pairs, tokens, dim),
            q=normal(pairs, OBSERVED + AFTER, 3, dim),
        )
        for _ in range(3)
    ]
    shape = HeadShape(layers=1, heads=8, kv_heads=2, head_dim=12, dtype=np.dtype("float32"))
    context = PROMPT + FILLER + 10
    with patch.object(stack_kv, "real_texts", lambda count, folder: texts[:count]):
        source = RealKV(shape, [context, 50], steps=5)
    prompt, short = source.prompt(0, 0, context + 7), source.prompt(1, 0, 64)
    q, k, _ = source.bank(0)
    head = stack_kv.PAIRS // 2  # of the second kv head: two are spread over all there are
    exact = texts[0].q[head, OBSERVED + 2, 1].astype(np.float32) @ texts[0].k[
        head, PROMPT - 9 : PROMPT
    ].T.astype(np.float32)
    got = np.asarray(prompt.k[1, context - 9 : context]) @ q[0, 2, 4 + 1]
    np.testing.assert_allclose(got / np.sqrt(12), exact / np.sqrt(dim), rtol=1e-5, atol=1e-6)
    # One sink, then other texts, then the text itself to the end; what comes next goes on there.
    sizes = np.asarray(jnp.square(prompt.v[0]).sum(-1))
    expected = np.square(texts[0].v[0].astype(np.float32)).sum(-1)
    np.testing.assert_allclose(sizes[:SINK], expected[:SINK], rtol=1e-5)
    np.testing.assert_allclose(sizes[context - 100 : context], expected[PROMPT - 100 : PROMPT],
                               rtol=1e-5)  # fmt: skip
    assert not sizes[context:].any()
    assert sizes[:context].all()
    np.testing.assert_allclose(
        np.square(k[0, 0, 0]).sum(), np.square(texts[0].k[0, PROMPT].astype(np.float32)).sum(),
        rtol=1e-5,
    )  # fmt: skip
    assert np.asarray(jnp.square(short.v[0]).sum(-1) > 0).sum() == 50


def test_the_critical_path_is_the_longest_of_device_link_and_chains() -> None:
    def step(transfer: float, compute: float) -> StepSpans:
        spans = (
            Span("device", "select", 0, 1, 0, 0, 0),
            Span("device", "select", 1, 2, 0, 1, 0),
            Span("host gather", "gather", 1, 1.5, 0, 0),
            Span("DRAM->HBM", "transfer", 2, 2 + transfer, 0, 0),
            Span("DRAM->HBM", "transfer", 2 + transfer, 2 + 2 * transfer, 0, 1),
            Span("device", "compute", 20, 20 + compute, 0, -1, 0),
        )
        return StepSpans(start=0, end=40, spans=spans)

    assert shortest_s(step(1, 2)) == 1 + (0.5 + 1) + 2
    assert shortest_s(step(9, 0.5)) == 2 * 9
    assert shortest_s(step(0.1, 9)) == 2 + 9


def test_few_arrangements_never_compute_one_session_alone() -> None:
    for batch in (2, 3, 4, 8, 16):
        found = few(batch)
        assert found[0] == Arrangement(batch)
        assert len(set(found)) == len(found)
        assert all(batch // one.cohorts >= 2 for one in found)
    assert few(1) == [Arrangement(1)]
