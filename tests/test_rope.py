"""Frequencies and rotation: against transformers, and what is refused."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kvdrive_jax.models.presets import preset
from kvdrive_jax.models.rope import ROPE_TYPES, RopeConfig, inverse_frequencies, parse_rope, rotate

LONGROPE = {
    "short_factor": [1.0 + 0.01 * i for i in range(24)],
    "long_factor": [1.0 + 0.9 * i for i in range(24)],
}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 3580165449.0},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn-attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 0.9,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
        "original_max_position_embeddings": 2048,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "longrope": {
        "rope_type": "longrope",
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 4096,
        **LONGROPE,
    },
    "longrope-attention": {
        "rope_type": "longrope",
        "partial_rotary_factor": 0.75,
        "attention_factor": 1.25,
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        **LONGROPE,
    },
}


def raw(settings: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **settings}, **extra}


def parse(settings: dict[str, Any], **extra: Any) -> RopeConfig:
    return parse_rope(raw(settings, **extra), head_dim=64, max_positions=131072)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("final_length", [100, 4096, 4097, 100_000])
def test_frequencies_are_those_of_transformers(name: str, final_length: int) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    utilities = pytest.importorskip("transformers.modeling_rope_utils")
    settings = {"rope_theta": 10000.0, **CASES[name]}
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=131072,
        rope_parameters=dict(settings),
    )
    kind = settings["rope_type"]
    if kind == "default":
        module = pytest.importorskip("transformers.models.llama.modeling_llama")
        expected = module.LlamaRotaryEmbedding(config).inv_freq
        expected_factor = 1.0
    else:
        initialise = utilities.ROPE_INIT_FUNCTIONS[kind]
        expected, expected_factor = initialise(config, torch.device("cpu"), seq_len=final_length)
    got, factor = inverse_frequencies(parse(CASES[name]), final_length)
    assert got.dtype == np.float32
    assert factor == pytest.approx(expected_factor, rel=1e-12)
    np.testing.assert_array_max_ulp(got, expected.numpy(), maxulp=2)


def test_longrope_switches_after_the_original_context() -> None:
    rope = parse(CASES["longrope"])
    short, at = (inverse_frequencies(rope, n)[0] for n in (1, 4096))
    past, far = (inverse_frequencies(rope, n)[0] for n in (4097, 131072))
    np.testing.assert_array_equal(short, at)
    np.testing.assert_array_equal(past, far)
    assert (past[1:] < at[1:]).all()


def test_phi_4_mini_attention_factor() -> None:
    stated = preset("Phi-4-mini-instruct").rope
    rope = parse_rope(
        {
            "rope_scaling": {
                "type": "longrope",
                "short_factor": list(stated.short_factor),
                "long_factor": list(stated.long_factor),
            },
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 4096,
        },
        head_dim=128,
        max_positions=131072,
    )
    assert rope == stated


@pytest.mark.parametrize("name", CASES)
def test_older_spelling_reads_the_same(name: str) -> None:
    settings = {"rope_theta": 10000.0, **CASES[name]}
    older = {
        "rope_theta": settings.pop("rope_theta"),
        "partial_rotary_factor": settings.pop("partial_rotary_factor", 1.0),
    }
    settings["type"] = settings.pop("rope_type")
    older["rope_scaling"] = settings
    assert parse_rope(older, head_dim=64, max_positions=131072) == parse(CASES[name])


def test_no_settings_at_all_is_default_rope() -> None:
    rope = parse_rope({"rope_scaling": None}, head_dim=80, max_positions=4096)
    assert rope == RopeConfig(type="default", theta=10000.0, rotary_dim=80)


@pytest.mark.parametrize("kind", ["dynamic", "proportional", "su", "nonsense"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_unknown_type_lists_the_supported(kind: str, key: str) -> None:
    with pytest.raises(ValueError, match=kind) as error:
        parse({key: kind, "factor": 2.0})
    for supported in ROPE_TYPES:
        assert supported in str(error.value)


def test_incomplete_settings_are_named() -> None:
    with pytest.raises(ValueError, match="high_freq_factor"):
        parse({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0})
    with pytest.raises(ValueError, match="long_factor"):
        parse({"rope_type": "longrope", "short_factor": [1.0] * 24})


def test_factors_of_the_wrong_number() -> None:
    with pytest.raises(ValueError, match=r"long_factor: expected 32 .* got 24"):
        parse({"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [1.0] * 24})


def test_odd_rotary_dim() -> None:
    with pytest.raises(ValueError, match=r"rotary_dim: expected an even .* got 63"):
        parse({"partial_rotary_factor": 0.99})


def test_settings_per_layer_type_are_declined() -> None:
    with pytest.raises(NotImplementedError, match="full_attention"):
        parse({"full_attention": {"rope_type": "default"}})


@pytest.mark.parametrize(("dim", "rotary", "heads"), [(64, 64, 3), (128, 96, 1), (80, 60, 7)])
def test_rotation_turns_pairs_and_passes_the_tail(
    rng: np.random.Generator, dim: int, rotary: int, heads: int
) -> None:
    rope = RopeConfig(rotary_dim=rotary, theta=1e6)
    inv_freq, _ = inverse_frequencies(rope, 0)
    x = rng.standard_normal((2, 5, heads, dim)).astype(np.float32)
    positions = np.array([[0, 1, 77, 8191, 131071], [3, 3, 9000, 1, 0]], np.int32)
    got = np.asarray(rotate(jnp.asarray(x), jnp.asarray(positions), jnp.asarray(inv_freq), 1.5))

    angle = (positions[..., None].astype(np.float32) * inv_freq).astype(np.float64)
    turn = 1.5 * np.exp(1j * angle)[..., None, :]
    half = rotary // 2
    pairs = (x[..., :half] + 1j * x[..., half:rotary]) * turn
    expected = np.concatenate([pairs.real, pairs.imag, x[..., rotary:]], axis=-1)
    np.testing.assert_allclose(got, expected, atol=2e-5)
    np.testing.assert_array_equal(got[..., rotary:], x[..., rotary:])


def test_sessions_of_a_batch_may_differ_in_frequencies(rng: np.random.Generator) -> None:
    rope = parse(CASES["longrope"])
    both = [inverse_frequencies(rope, n)[0] for n in (100, 10_000)]
    x = jnp.asarray(rng.standard_normal((2, 3, 64)), jnp.float32)
    positions = jnp.asarray([50, 9000], jnp.int32)
    factors = jnp.asarray([1.0, 1.2])
    together = rotate(x, positions, jnp.asarray(np.stack(both)), factors)
    for i in range(2):
        alone = rotate(x[i], positions[i], jnp.asarray(both[i]), factors[i])
        np.testing.assert_array_equal(together[i], alone)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_dtypes_are_rotated_in_float32(rng: np.random.Generator, dtype: Any) -> None:
    x = jnp.asarray(rng.standard_normal((4, 2, 64)), dtype)
    positions = jnp.asarray([0, 1000, 10001, 100003], jnp.int32)
    inv_freq = jnp.asarray(inverse_frequencies(RopeConfig(rotary_dim=64), 0)[0])
    got = rotate(x, positions, inv_freq, 1.0)
    exact = rotate(x.astype(jnp.float32), positions, inv_freq, 1.0)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, exact.astype(dtype))
