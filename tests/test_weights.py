"""Loading: what a folder must hold, how tensors become parameters, what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvdrive_jax.models.model import Model
from kvdrive_jax.models.weights import (
    build_model,
    expected_tensors,
    load_pretrained,
    parse_config,
    resolve_dtype,
)
from tests.dense_reference import dense_logits
from tests.model_configs import BIASED, LLAMA, PHI3, QWEN2, QWEN3

Tensors = dict[str, np.ndarray]


def random_tensors(raw: dict[str, Any], dtype: Any = np.float32) -> Tensors:
    rng = np.random.default_rng(7)
    shapes = expected_tensors(parse_config(raw))
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def write(folder: Path, raw: dict[str, Any], tensors: Tensors) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def write_sharded(folder: Path, raw: dict[str, Any], tensors: Tensors) -> str:
    """Three shards with q, k and v of a layer in different ones, and names of no pattern."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    files = ["a.safetensors", "second-part.safetensors", "z_last.safetensors"]
    where = {name: files[i % 3] for i, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return str(folder)


def same(a: Model, b: Model) -> bool:
    pairs = zip((a.ends, *a.layers), (b.ends, *b.layers), strict=True)
    return all(bool(jnp.array_equal(x, y)) for p, q in pairs for x, y in zip(p, q, strict=True))


@pytest.mark.parametrize("raw", [LLAMA, BIASED, QWEN2, QWEN3, PHI3])
def test_sharded_and_single_load_the_same(tmp_path: Path, raw: dict[str, Any]) -> None:
    tensors = random_tensors(raw)
    single = load_pretrained(write(tmp_path / "one", raw, tensors), "float32")
    sharded = load_pretrained(write_sharded(tmp_path / "many", raw, tensors), "float32")
    assert same(single, sharded)
    assert single.parameter_count == sum(t.size for t in tensors.values())
    assert single.nbytes == 4 * single.parameter_count


def test_fused_parameters_hold_their_parts(tmp_path: Path) -> None:
    tensors = random_tensors(BIASED)
    model = load_pretrained(write(tmp_path, BIASED, tensors), "float32")
    layer = dict(zip(model.layer_def.names, model.layers[1], strict=True))
    own = {n.removeprefix("model.layers.1."): t for n, t in tensors.items() if ".1." in n}
    qkv = [own[f"self_attn.{p}_proj.weight"].T for p in "qkv"]
    np.testing.assert_array_equal(layer["qkv"], np.concatenate(qkv, axis=1))
    bias = [own[f"self_attn.{p}_proj.bias"] for p in "qkv"]
    np.testing.assert_array_equal(layer["qkv_bias"], np.concatenate(bias))
    gate_up = [own[f"mlp.{p}_proj.weight"].T for p in ("gate", "up")]
    np.testing.assert_array_equal(layer["gate_up"], np.concatenate(gate_up, axis=1))
    np.testing.assert_array_equal(layer["output"], own["self_attn.o_proj.weight"].T)
    np.testing.assert_array_equal(layer["output_bias"], own["self_attn.o_proj.bias"])
    ends = dict(zip(model.ends_def.names, model.ends, strict=True))
    np.testing.assert_array_equal(ends["head"], tensors["lm_head.weight"].T)
    np.testing.assert_array_equal(ends["embedding"], tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16, np.float64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_converted_once(tmp_path: Path, stored: Any, dtype: str) -> None:
    tensors = random_tensors(LLAMA, stored)
    model = load_pretrained(write(tmp_path, LLAMA, tensors), dtype)
    ends = dict(zip(model.ends_def.names, model.ends, strict=True))
    want = tensors["lm_head.weight"].T.astype(jnp.dtype(dtype))
    assert ends["head"].dtype == want.dtype
    np.testing.assert_array_equal(np.asarray(ends["head"]), want)


def test_tensors_may_come_in_any_order() -> None:
    tensors, config = random_tensors(QWEN3), parse_config(QWEN3)
    forward = build_model(config, tensors.items(), "float32", source="test", digest="x")
    backward = build_model(config, reversed(tensors.items()), "float32", source="test", digest="x")
    assert same(forward, backward)
    assert forward.digest == "x"


def test_the_tensors_decide_whether_embeddings_are_tied(tmp_path: Path) -> None:
    said_untied, said_tied = LLAMA, LLAMA | {"tie_word_embeddings": True}
    tensors = random_tensors(said_untied)
    headless = {n: t for n, t in tensors.items() if n != "lm_head.weight"}
    equal = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    cases = [(said_untied, headless, True), (said_tied, headless, True), (said_tied, equal, True)]
    cases += [(said_untied, tensors, False), (said_tied, tensors, False)]
    for i, (raw, given, tied) in enumerate(cases):
        model = load_pretrained(write(tmp_path / str(i), raw, given), "float32")
        assert model.config.tied_embeddings is tied
        assert ("head" in model.ends_def.names) is not tied


def test_tied_and_untied_heads_agree_on_equal_weights(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    untied = load_pretrained(write(tmp_path / "u", LLAMA, tensors), "float32")
    tied_raw = LLAMA | {"tie_word_embeddings": True}
    tied = load_pretrained(write(tmp_path / "t", tied_raw, tensors), "float32")
    tokens = np.arange(9)
    np.testing.assert_allclose(dense_logits(tied, tokens), dense_logits(untied, tokens), atol=1e-3)


def test_missing_and_unused_tensors_are_named(tmp_path: Path) -> None:
    tensors = random_tensors(QWEN3)
    gone = "model.layers.1.self_attn.k_norm.weight"
    extra = "model.layers.0.self_attn.q_proj.bias"
    changed = {n: t for n, t in tensors.items() if n != gone}
    with pytest.raises(ValueError, match=rf"1 missing tensor: {gone}"):
        load_pretrained(write(tmp_path, QWEN3, changed))
    changed = tensors | {extra: np.zeros(96, np.float32)}
    with pytest.raises(ValueError, match=rf"1 unused tensor: {extra}"):
        load_pretrained(write(tmp_path, QWEN3, changed))


def test_old_rope_buffers_are_ignored(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    load_pretrained(write(tmp_path, LLAMA, tensors))


@pytest.mark.parametrize("how", ["missing", "unused", "duplicate", "shape"])
def test_build_model_checks_what_it_is_given(how: str) -> None:
    config = parse_config(PHI3)
    tensors = list(random_tensors(PHI3).items())
    name, array = tensors[-1]
    if how == "missing":
        tensors.pop()
    elif how == "unused":
        name = "model.layers.2.mlp.down_proj.weight"  # the model has two layers
        tensors.append((name, array))
    elif how == "duplicate":
        tensors.append((name, array))
    else:
        tensors[-1] = (name, np.zeros((3, 5), np.float32))
    with pytest.raises(ValueError, match=name) as error:
        build_model(config, tensors, "float32", source="the source", digest="")
    assert "the source" in str(error.value)
    if how == "shape":
        assert f"expected shape {array.shape}, got (3, 5)" in str(error.value)
    else:
        assert how in str(error.value)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    path = write_sharded(tmp_path, LLAMA, random_tensors(LLAMA))
    (tmp_path / "second-part.safetensors").unlink()
    with pytest.raises(ValueError, match=r"missing shard second-part\.safetensors") as error:
        load_pretrained(path)
    assert "the index says a.safetensors, second-part" in str(error.value)
    assert "the folder has a.safetensors, z_last.safetensors" in str(error.value)


def test_index_that_does_not_match_its_shards(tmp_path: Path) -> None:
    path = write_sharded(tmp_path, LLAMA, random_tensors(LLAMA))
    index = tmp_path / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    where["model.norm.weight"] = next(f for f in where.values() if f != where["model.norm.weight"])
    index.write_text(json.dumps({"weight_map": where}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight: the index says it is in"):
        load_pretrained(path)


def test_truncated_and_damaged_shards(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA, random_tensors(LLAMA))
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=rf"expected {len(whole)} bytes .* got {len(whole) - 100}"):
        load_pretrained(path)
    file.write_bytes(whole[:5])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load_pretrained(path)
    file.write_bytes(whole[:8] + b"\0" * (len(whole) - 8))
    with pytest.raises(ValueError, match="damaged safetensors header"):
        load_pretrained(path)


def test_incomplete_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected 'demo', a \.gguf file or a model folder"):
        load_pretrained(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"expected a file config\.json"):
        load_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: expected JSON"):
        load_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ValueError, match=r"expected model\.safetensors or .*found config\.json"):
        load_pretrained(str(tmp_path))


def test_quantised_checkpoints_are_declined(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="awq"):
        parse_config(LLAMA | {"quantization_config": {"quant_method": "awq"}})
    tensors = random_tensors(LLAMA) | {"model.norm.weight": np.ones(48, np.int8)}
    with pytest.raises(NotImplementedError, match=r"model\.norm\.weight .* dtype I8"):
        load_pretrained(write(tmp_path, LLAMA, tensors))


def test_eos_tokens_of_both_files_join(tmp_path: Path) -> None:
    raw = LLAMA | {"eos_token_id": 5, "bos_token_id": 1}
    path = write(tmp_path, raw, random_tensors(raw))
    assert load_pretrained(path).config.eos_token_ids == (5,)
    generation = {"eos_token_id": [7, 5, 9]}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = load_pretrained(path).config
    assert config.eos_token_ids == (5, 7, 9)
    assert config.bos_token_id == 1


def test_dtype_names() -> None:
    assert resolve_dtype("bfloat16") == jnp.bfloat16
    assert resolve_dtype(jnp.float16) == jnp.float16
    expected = "float32" if jax.default_backend() == "cpu" else "float16"
    assert resolve_dtype("auto", "float16").name == expected
    for wrong in ("int8", "float64", "nonsense"):
        with pytest.raises(ValueError, match=f"dtype: expected 'auto' or one of .*{wrong}"):
            resolve_dtype(wrong)


def test_digest_follows_contents_not_times_or_places(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    first = load_pretrained(write(tmp_path / "a", LLAMA, tensors)).digest
    path = write(tmp_path / "b", LLAMA, tensors)
    os.utime(tmp_path / "b" / "model.safetensors", (1, 1))
    assert load_pretrained(path).digest == first
    assert load_pretrained(path, "bfloat16").digest == first
    tensors["model.norm.weight"][3] += 1
    assert load_pretrained(write(tmp_path / "c", LLAMA, tensors)).digest != first
    tensors["model.norm.weight"][3] -= 1
    other = LLAMA | {"rms_norm_eps": 1e-6}
    assert load_pretrained(write(tmp_path / "d", other, tensors)).digest != first


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak as Linux counts it")
def test_peak_host_memory_of_a_load(tmp_path: Path) -> None:
    """A load holds the weights and little more, counted in a process of its own."""
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4}
    big = LLAMA | sizes | {"vocab_size": 8000, "tie_word_embeddings": True}
    tensors = random_tensors(big, ml_dtypes.bfloat16)
    write(tmp_path / "big", big, tensors)
    write(tmp_path / "small", LLAMA, random_tensors(LLAMA))
    script = (
        "import resource, sys\n"
        "from kvdrive_jax.models.weights import load_pretrained\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "load_pretrained(sys.argv[1], 'float32')\n"  # imports and first uses are not the load's
        "before = peak()\n"
        "model = load_pretrained(sys.argv[2], 'float32')\n"
        "print((peak() - before) / model.nbytes)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "small"), str(tmp_path / "big")],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert float(done.stdout) < 1.3
