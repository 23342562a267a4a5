"""Converted weights on disk: used when right, made again when not, never in the way."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvdrive_jax.models import cache, gguf
from kvdrive_jax.models.config import ModelConfig
from kvdrive_jax.models.model import Model
from kvdrive_jax.models.rope import RopeConfig
from kvdrive_jax.models.weights import build_model, expected_tensors

CONFIG = ModelConfig(
    architecture="qwen2",
    vocab_size=37,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    head_dim=8,
    rms_norm_eps=1e-6,
    max_positions=64,
    rope=RopeConfig(rotary_dim=8),
    attention_bias=True,
    tied_embeddings=True,
)


class Source:
    """Weights that count how often they are converted, and the notices that the cache gave."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        self.folder, self.dtype, self.builds = folder, dtype, 0
        self.notices: list[str] = []

    def build(self) -> Model:
        self.builds += 1
        rng = np.random.default_rng(3)
        shapes = expected_tensors(CONFIG)
        tensors = ((n, rng.standard_normal(s).astype(np.float32)) for n, s in shapes.items())
        return build_model(CONFIG, tensors, self.dtype, source="test", digest="d1")

    def load(self, digest: str = "d1", config: ModelConfig = CONFIG) -> Model:
        return cache.cached_model(
            config, self.dtype, digest, self.build, str(self.folder), notify=self.notices.append
        )

    @property
    def entry(self) -> Path:
        return self.folder / cache.entry_name("d1", self.dtype)


def assert_same(a: Model, b: Model) -> None:
    assert a.static == b.static
    assert hash(a.static) == hash(b.static)
    pairs = zip(
        jax.tree.leaves((a.layers, a.ends)), jax.tree.leaves((b.layers, b.ends)), strict=True
    )
    for x, y in pairs:
        assert isinstance(y, jax.Array)
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_second_start_reads_what_the_first_made(dtype: str, tmp_path: Path) -> None:
    source = Source(tmp_path / "deep" / "cache", dtype)
    first, second = source.load(), source.load()
    assert source.builds == 1
    assert source.notices == []
    assert second.digest == "d1"
    assert_same(first, second)
    assert [p.name for p in source.folder.iterdir()] == [source.entry.name]  # nothing left over


def test_each_source_and_dtype_has_its_own_entry(tmp_path: Path) -> None:
    source = Source(tmp_path)
    source.load()
    source.load(digest="d2")
    source.dtype = "bfloat16"
    assert source.load().dtype == jnp.bfloat16
    assert source.builds == 3
    assert len(list(tmp_path.iterdir())) == 3


def test_no_folder_means_no_cache(tmp_path: Path) -> None:
    source = Source(tmp_path)
    model = cache.cached_model(CONFIG, "float32", "d1", source.build, None)
    assert_same(model, source.build())
    assert list(tmp_path.iterdir()) == []


def largest_file(entry: Path) -> Path:
    return max((p for p in entry.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(entry: Path) -> None:
    file = largest_file(entry)
    file.write_bytes(file.read_bytes()[:-100])


def empty(entry: Path) -> None:
    largest_file(entry).write_bytes(b"")


def flip(entry: Path) -> None:
    file = largest_file(entry)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(bytes(content))


def remove_leaf(entry: Path) -> None:
    shutil.rmtree(largest_file(entry).parent)


def remove_manifest(entry: Path) -> None:
    (entry / "manifest.json").unlink()


def garble_manifest(entry: Path) -> None:
    (entry / "manifest.json").write_text('{"format": 1, "dig')


def change_manifest(**changes: Any) -> Callable[[Path], None]:
    def change(entry: Path) -> None:
        path = entry / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def change_checksum(entry: Path) -> None:
    path = entry / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["leaves"]["ends.embedding"][1] += 1
    path.write_text(json.dumps(manifest))


def swap_leaves(entry: Path) -> None:
    leaves = entry / "weights"
    qkv, down = leaves / "layer0000.qkv", leaves / "layer0000.down"
    qkv.rename(leaves / "aside")
    down.rename(qkv)
    (leaves / "aside").rename(down)


def replace_by_file(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_text("not a folder")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "files"),
        (empty, "files"),
        (flip, "checksum"),
        (remove_leaf, "files"),
        (remove_manifest, "manifest.json"),
        (garble_manifest, "JSONDecodeError"),
        (change_manifest(format=0), "format: expected 1, got 0"),
        (change_manifest(digest="other"), "digest: expected d1, got other"),
        (change_manifest(dtype="bfloat16"), "dtype: expected float32, got bfloat16"),
        (change_manifest(tied_embeddings=False), "config: expected"),
        (change_manifest(leaves={}), "leaves: expected"),
        (change_checksum, "ends.embedding: its checksum differs"),
        (swap_leaves, "layer0000"),
        (replace_by_file, "manifest.json"),
    ],
)
def test_a_stale_or_damaged_entry_is_made_again(
    damage: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    source = Source(tmp_path)
    good = source.load()
    damage(source.entry)

    again = source.load()

    assert source.builds == 2
    assert_same(good, again)
    (notice,) = source.notices
    assert notice.count("\n") == 0
    assert "is stale or damaged" in notice
    assert said in notice
    assert_same(good, source.load())  # the new entry is right
    assert source.builds == 2
    assert [p.name for p in tmp_path.iterdir()] == [source.entry.name]


def test_another_configuration_of_the_same_source_is_not_used(tmp_path: Path) -> None:
    source = Source(tmp_path)
    source.load()
    source.load(config=dataclasses.replace(CONFIG, rms_norm_eps=1e-5))
    assert source.builds == 2
    assert "config: expected" in source.notices[0]


def test_a_cache_that_cannot_be_written_costs_a_notice(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    source = Source(tmp_path / "file" / "cache")
    model = source.load()
    assert source.builds == 1
    assert model.config == CONFIG
    (notice,) = source.notices
    assert "cannot write" in notice
    assert "going on without" in notice


def test_a_full_disk_costs_a_notice_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 10))
    source = Source(tmp_path)
    source.load()
    assert "bytes needed, 10 free" in source.notices[0]
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_when_old(tmp_path: Path) -> None:
    source = Source(tmp_path)
    recent, old = (tmp_path / f"{source.entry.name}.{name}.tmp" for name in ("a", "b"))
    for folder in (recent, old):
        folder.mkdir()
        (folder / "part").write_bytes(b"x")
    os.utime(old, (0, 0))
    source.load()
    assert {p.name for p in tmp_path.iterdir()} == {source.entry.name, recent.name}


def test_an_error_of_the_source_is_the_callers(tmp_path: Path) -> None:
    def build() -> Model:
        raise ValueError("no such tensor")

    with pytest.raises(ValueError, match="no such tensor"):
        cache.cached_model(CONFIG, "float32", "d1", build, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_default_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_cache_dir() == str(tmp_path / "kvdrive_jax" / "weights")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.default_cache_dir() == str(tmp_path / "home/.cache/kvdrive_jax/weights")


def test_notices_go_to_stderr_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    cache.tell("one line")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "one line\n")


def test_gguf_through_the_cache_is_the_same_model(demo_gguf: Path, tmp_path: Path) -> None:
    first = gguf.load_gguf(str(demo_gguf), "bfloat16", cache_dir=str(tmp_path))
    second = gguf.load_gguf(str(demo_gguf), "bfloat16", cache_dir=str(tmp_path))
    assert_same(first, second)
    assert len(list(tmp_path.iterdir())) == 1
