"""int8 weights: what is kept of them, and what they change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvdrive_jax import compat
from kvdrive_jax.config import KVDriveConfig
from kvdrive_jax.engine import Engine
from kvdrive_jax.models.packed import FEW_ROWS, Packed, pack, packed_product, restore
from kvdrive_jax.models.packing import pack_model
from tests.tiny import CharacterTokenizer, random_prompt, tiny_model

TOKENIZER: Any = CharacterTokenizer()
product = jax.jit(packed_product)


@pytest.mark.parametrize("inputs", [32, 33, 80])
@pytest.mark.parametrize("rows", [(), (2, 3), (FEW_ROWS + 1,)])
def test_products_are_those_of_the_weight_that_is_kept(inputs: int, rows: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((inputs, 7)).astype(np.float32)
    weight[:, 3] = 0.0
    x = rng.standard_normal((*rows, inputs)).astype(np.float32)
    packed = pack(jnp.asarray(weight))
    kept = np.asarray(restore(packed))
    for first in range(0, inputs, 32):
        largest = np.abs(weight[first : first + 32]).max(axis=0)
        off = np.abs(kept - weight)[first : first + 32].max(axis=0)
        assert (off <= largest / 253).all()
    np.testing.assert_allclose(np.asarray(product(x, packed)), x @ kept, atol=1e-4)
    assert packed.size == weight.size
    # Of several layers in one array, the one that is meant.
    stacked = Packed(
        jnp.stack([packed.codes * 0, packed.codes]),
        jnp.stack([packed.scale * 0, packed.scale]),
        inputs,
        jnp.int32(1),
    )
    np.testing.assert_array_equal(np.asarray(product(x, stacked)), np.asarray(product(x, packed)))
    assert stacked.nbytes == packed.nbytes


def test_products_with_what_is_not_finite_are_not_finite() -> None:
    packed = pack(jnp.ones((32, 2)))
    for bad in (np.nan, np.inf):
        assert not np.isfinite(np.asarray(product(jnp.full((32,), bad), packed))).any()


def test_an_engine_with_int8_weights_is_that_of_the_widened_weights() -> None:
    model = tiny_model()
    packed = pack_model(model)

    def widen(leaf: Any) -> Any:
        return restore(leaf) if isinstance(leaf, Packed) else leaf

    widened = replace(
        packed,
        layers=tuple(tuple(map(widen, leaves)) for leaves in packed.layers),
        ends=tuple(map(widen, packed.ends)),
    )
    tokens = []
    for one, weights in ((model, "int8"), (widened, "model")):
        config = KVDriveConfig(weights_dtype=weights)
        with Engine(one, TOKENIZER, config) as engine:
            stream = engine.stream_ids([random_prompt(90)], max_new_tokens=12, ignore_eos=True)
            *_, last = stream
            assert last.generation is not None
            tokens.append(last.generation.token_ids)
            assert ("weights int8" in engine.config_line()) == (weights == "int8")
            held = engine._ledger.accounts("hbm")["weights"]
            assert held == engine.plan([90], 12).bytes_of("hbm", "weights") == engine.model.nbytes
    assert tokens[0] == tokens[1]
    assert packed.nbytes < 0.5 * model.nbytes
    assert packed.parameter_count - model.parameter_count in (0, model.ends[0].size)
    assert packed.digest != model.digest


def test_int8_weights_are_refused_where_no_product_is_fast() -> None:
    with (
        patch.object(compat, "platform", lambda: "gpu"),
        pytest.raises(NotImplementedError, match="int8 needs a CPU"),
    ):
        pack_model(tiny_model())
