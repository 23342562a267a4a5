"""The decoder against transformers in float32: small random models, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kvdrive_jax.models.model import Model
from kvdrive_jax.models.weights import load_pretrained
from tests.dense_reference import dense_logits

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 2e-4
VOCABULARY = 203
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def longrope(pairs: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.02 * i for i in range(pairs)],
        "long_factor": [1.0 + 0.7 * i for i in range(pairs)],
    }


def small(family: str, *, heads: int, kv_heads: int, head_dim: int, **settings: Any) -> Any:
    """A random transformers model whose every weight matters: uneven norms, large biases."""
    hidden = settings.pop("hidden_size", heads * head_dim)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=150,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        initializer_range=0.08,
        pad_token_id=0,
        **{"max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, **settings},
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.normal_(0, 0.5)
    return model


def saved(model: Any, folder: Path) -> Model:
    model.save_pretrained(folder)
    return load_pretrained(str(folder))


def expected(model: Any, tokens: np.ndarray, positions: np.ndarray | None = None) -> np.ndarray:
    with torch.no_grad():
        given = {} if positions is None else {"position_ids": torch.tensor(positions)}
        return model(torch.tensor(tokens), **given).logits.numpy()


def assert_same(model: Any, ours: Model, length: int, batch: int = 1) -> None:
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (batch, length))
    want = expected(model, tokens)
    got = np.asarray(dense_logits(ours, tokens))
    assert want.std() > 0.3  # logits that differ enough for the tolerance to mean something
    assert np.abs(got - want).max() < TOLERANCE


@pytest.mark.parametrize(
    ("family", "heads", "kv_heads", "head_dim", "tied", "settings"),
    [
        ("Llama", 3, 3, 64, False, {}),
        ("Llama", 9, 3, 64, True, {}),
        ("Llama", 4, 1, 96, False, {"attention_bias": True, "mlp_bias": True}),
        ("Qwen2", 7, 1, 64, True, {}),
        ("Qwen2", 6, 2, 96, False, {}),
        ("Qwen3", 4, 1, 128, False, {"hidden_size": 192}),
        ("Qwen3", 3, 1, 64, True, {"hidden_size": 96, "attention_bias": True}),
        ("Phi3", 4, 4, 96, False, {}),
        ("Phi3", 3, 1, 128, True, {"rope_parameters": {"partial_rotary_factor": 0.75}}),
    ],
)
def test_families(
    tmp_path: Path,
    family: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    tied: bool,
    settings: dict[str, Any],
) -> None:
    settings = {"tie_word_embeddings": tied, **settings}
    model = small(family, heads=heads, kv_heads=kv_heads, head_dim=head_dim, **settings)
    ours = saved(model, tmp_path)
    assert ours.config.group_size == heads // kv_heads
    assert ours.config.tied_embeddings == tied
    assert ours.config.eos_token_ids == (2,)
    assert ours.config.bos_token_id == 1
    assert ours.parameter_count == sum(p.numel() for p in model.parameters())
    assert_same(model, ours, length=37, batch=2)


@pytest.mark.parametrize(
    ("family", "rope", "length"),
    [
        ("Llama", {"rope_type": "default", "rope_theta": 3580165449.0}, 300),
        ("Llama", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, 300),
        ("Llama", LLAMA3, 300),
        ("Qwen2", YARN, 300),
        ("Qwen3", YARN | {"attention_factor": 0.8, "beta_fast": 20, "beta_slow": 2}, 256),
        ("Qwen3", YARN | {"mscale": 0.707, "mscale_all_dim": 1.0, "truncate": False}, 256),
    ],
)
def test_rope_past_the_original_context(
    tmp_path: Path, family: str, rope: dict[str, Any], length: int
) -> None:
    model = small(family, heads=4, kv_heads=2, head_dim=64, rope_parameters=dict(rope))
    ours = saved(model, tmp_path)
    assert ours.config.rope.type == rope["rope_type"]
    assert_same(model, ours, length)


@pytest.mark.parametrize(("partial", "lengths"), [(0.75, (64, 65, 200)), (1.0, (65,))])
def test_longrope_on_both_sides_of_the_switch(
    tmp_path: Path, partial: float, lengths: tuple[int, ...]
) -> None:
    rope = longrope(int(64 * partial) // 2) | {"partial_rotary_factor": partial}
    model = small(
        "Phi3",
        heads=3,
        kv_heads=1,
        head_dim=64,
        original_max_position_embeddings=64,
        rope_parameters=rope,
    )
    ours = saved(model, tmp_path)
    assert ours.config.rope.rotary_dim == int(64 * partial)
    for length in lengths:
        assert_same(model, ours, length)


def test_longrope_prompt_that_will_cross_the_switch(tmp_path: Path) -> None:
    """A prompt inside the original context, in a session that ends past it, has the logits that the
    whole session would have: transformers run over the final sequence is the measure."""
    model = small(
        "Phi3",
        heads=3,
        kv_heads=1,
        head_dim=64,
        original_max_position_embeddings=64,
        rope_parameters=longrope(32) | {"partial_rotary_factor": 1.0},
    )
    ours = saved(model, tmp_path)
    tokens = np.random.default_rng(2).integers(0, VOCABULARY, (1, 90))
    want = expected(model, tokens)[:, :60]
    got = np.asarray(dense_logits(ours, tokens[:, :60], final_length=90))
    assert np.abs(got - want).max() < TOLERANCE
    inside = np.asarray(dense_logits(ours, tokens[:, :60]))
    assert np.abs(inside - want).max() > 10 * TOLERANCE  # the choice is visible


def test_llama3_at_positions_past_8192(tmp_path: Path) -> None:
    rope = LLAMA3 | {"original_max_position_embeddings": 8192}
    model = small(
        "Llama",
        heads=4,
        kv_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters=rope,
    )
    ours = saved(model, tmp_path)
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, (1, 24))
    positions = np.concatenate([np.arange(8), 8188 + np.arange(8), 65530 + np.arange(8)])[None]
    want = expected(model, tokens, positions)
    got = np.asarray(dense_logits(ours, tokens, positions=positions))
    assert np.abs(got - want).max() < TOLERANCE


def test_leading_dimensions_do_not_matter(tmp_path: Path) -> None:
    ours = saved(small("Qwen3", heads=3, kv_heads=1, head_dim=64), tmp_path)
    tokens = np.random.default_rng(4).integers(0, VOCABULARY, (2, 11))
    together = np.asarray(dense_logits(ours, tokens))
    assert together.dtype == np.float32
    for row in range(2):
        alone = np.asarray(dense_logits(ours, tokens[row]))
        np.testing.assert_allclose(alone, together[row], atol=1e-5)
    one = np.asarray(dense_logits(ours, tokens[:, :1]))
    np.testing.assert_allclose(one, together[:, :1], atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_stay_close(tmp_path: Path, dtype: str) -> None:
    model = small("Llama", heads=4, kv_heads=2, head_dim=64)
    model.save_pretrained(tmp_path)
    ours = load_pretrained(str(tmp_path), dtype)
    assert ours.dtype == jnp.dtype(dtype)
    assert {leaf.dtype.name for leaves in (ours.ends, *ours.layers) for leaf in leaves} == {dtype}
    tokens = np.random.default_rng(5).integers(0, VOCABULARY, (1, 40))
    want = expected(model, tokens)
    got = dense_logits(ours, tokens)
    assert got.dtype == jnp.float32
    assert np.abs(np.asarray(got) - want).max() < 0.1 * want.std()
