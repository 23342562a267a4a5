"""Converted weights on disk, so that the second start neither dequantises nor fuses.

An entry is a folder named by a hash of what it was made from (source digest, dtype, format), with
the leaves as an Orbax checkpoint and a manifest beside it. The manifest is written last, the folder
appears by one rename, and each leaf is checked against it when read: an entry is right or it is
made again. A cache that cannot be used costs a notice, never the run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from kvdrive_jax.files import cache_folder
from kvdrive_jax.models.config import ModelConfig
from kvdrive_jax.models.model import Leaves, Model, define

if TYPE_CHECKING:
    from orbax.checkpoint import PyTreeCheckpointHandler

FORMAT: Final = 1  # of the entry and of the leaves' layout: raise it when either changes
_MANIFEST, _WEIGHTS = "manifest.json", "weights"
_ABANDONED_S: Final = 3600.0


def default_cache_dir() -> str:
    """Returns the user's cache folder for converted weights: under ``XDG_CACHE_HOME``, else under
    ``~/.cache``.
    """
    return cache_folder("weights")


def tell(message: str) -> None:
    """Prints one line for the user, on stderr."""
    print(message, file=sys.stderr, flush=True)


def cached_model(
    config: ModelConfig,
    dtype: Any,
    digest: str,
    build: Callable[[], Model],
    cache_dir: str | None,
    *,
    notify: Callable[[str], None] = tell,
) -> Model:
    """Returns the model from the cache, or builds it and puts it there.

    Args:
        config: what the model is; whether its embeddings are tied may be settled by the tensors
            only, and is then read from the entry.
        dtype: of the weights, resolved.
        digest: names the source: configuration and weights.
        build: makes the model from the source. Its errors are the caller's.
        cache_dir: where entries are; None goes straight to ``build``.
        notify: gets one line when an entry is damaged or cannot be written.
    """
    if cache_dir is None:
        return build()
    kind = jnp.dtype(dtype)
    entry = Path(cache_dir) / entry_name(digest, kind)
    # Anything may be wrong with files that anyone may have touched, and a checkpoint library raises
    # anything: whatever it is, it is told, and the entry is made anew from the source.
    if entry.exists():
        try:
            return _read(entry, config, kind, digest)
        except Exception as err:
            notify(
                f"weights cache: {entry} is stale or damaged ({_one_line(err)}); converting again"
            )
    model = build()
    try:
        _write(entry, model, digest)
    except Exception as err:
        notify(f"weights cache: cannot write {entry} ({_one_line(err)}); going on without")
    return model


def entry_name(digest: str, dtype: Any) -> str:
    """Returns the folder name of an entry."""
    key = json.dumps([digest, jnp.dtype(dtype).name, FORMAT]).encode()
    return hashlib.blake2b(key, digest_size=16).hexdigest()


def _named(model: Model) -> dict[str, jax.Array]:
    found = {f"ends.{n}": leaf for n, leaf in zip(model.ends_def.names, model.ends, strict=True)}
    for i, leaves in enumerate(model.layers):
        found |= {
            f"layer{i:04}.{n}": leaf for n, leaf in zip(model.layer_def.names, leaves, strict=True)
        }
    return found


def _write(entry: Path, model: Model, digest: str) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(entry)
    made = _temporary(entry)
    made.mkdir()
    try:
        # Each leaf once on the host, for its checksum and for Orbax.
        leaves = {name: np.asarray(leaf) for name, leaf in _named(model).items()}
        need, free = sum(leaf.nbytes for leaf in leaves.values()), shutil.disk_usage(made).free
        if need > free:
            raise OSError(f"{need} bytes needed, {free} free")
        _Checkpointer().save(made.absolute() / _WEIGHTS, leaves)
        manifest = {
            "format": FORMAT,
            "digest": digest,
            "dtype": model.dtype.name,
            "config": repr(model.config),
            "tied_embeddings": model.config.tied_embeddings,
            "files": _files(made / _WEIGHTS),
            "leaves": {name: [list(leaf.shape), _checksum(leaf)] for name, leaf in leaves.items()},
        }
        (made / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        _replace(entry, made)
    finally:
        _remove(made)


def _replace(entry: Path, made: Path) -> None:
    """Puts a finished entry in place of whatever is there.

    Of two processes that do, the later one stays.
    """
    if entry.exists():
        old = _temporary(entry)
        entry.rename(old)
        _remove(old)
    made.rename(entry)


def _temporary(entry: Path) -> Path:
    return entry.with_name(f"{entry.name}.{uuid.uuid4().hex}.tmp")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _remove_abandoned(entry: Path) -> None:
    """Removes what a process that was killed while it wrote this entry left, once that is an hour
    old.
    """
    for path in entry.parent.glob(f"{entry.name}.*.tmp"):
        if time.time() - path.stat().st_mtime > _ABANDONED_S:
            _remove(path)


def _files(folder: Path) -> dict[str, int]:
    """Every file under a folder and its size in bytes."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in found}


def _read(entry: Path, config: ModelConfig, dtype: np.dtype[Any], digest: str) -> Model:
    manifest = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
    config = dataclasses.replace(config, tied_embeddings=bool(manifest["tied_embeddings"]))
    for name, expected in (
        ("format", FORMAT),
        ("digest", digest),
        ("dtype", dtype.name),
        ("config", repr(config)),
    ):
        if manifest[name] != expected:
            raise ValueError(f"{name}: expected {expected}, got {manifest[name]}")
    static, layer, ends = define(config, dtype)
    abstract = Model(static, (layer,) * config.num_layers, ends, digest)
    wanted = _named(abstract)
    if wanted.keys() != manifest["leaves"].keys():
        raise ValueError(f"leaves: expected {len(wanted)}, got {len(manifest['leaves'])}")
    # Looked at first: Orbax leaves reads in flight behind when one of many fails.
    if _files(entry / _WEIGHTS) != manifest["files"]:
        raise ValueError("its files are not those that were written, or not of their size")
    found = _Checkpointer().restore(entry.absolute() / _WEIGHTS, wanted)
    for name, leaf in wanted.items():
        array = found[name]
        if array.shape != leaf.shape or array.dtype != dtype:
            raise ValueError(
                f"{name}: expected {leaf.shape} of {dtype}, got {array.shape} of {array.dtype}"
            )
        if _checksum(array) != manifest["leaves"][name][1]:
            raise ValueError(f"{name}: its checksum differs")
    placed = {name: jax.device_put(found.pop(name)) for name in wanted}

    def take(prefix: str, names: tuple[str, ...]) -> Leaves:
        return tuple(placed[f"{prefix}.{name}"] for name in names)

    layers = tuple(take(f"layer{i:04}", static.layer_def.names) for i in range(config.num_layers))
    return Model(static, layers, take("ends", static.ends_def.names), digest)


class _Checkpointer:
    """Orbax, as plain files: one per leaf reads several times faster than its merged database."""

    def __init__(self) -> None:
        import orbax.checkpoint as ocp

        self._ocp = ocp
        self._handler: PyTreeCheckpointHandler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=False, use_compression=False
        )

    def save(self, path: Path, leaves: dict[str, npt.NDArray[Any]]) -> None:
        self._handler.save(path, args=self._ocp.args.PyTreeSave(leaves))

    def restore(self, path: Path, wanted: dict[str, jax.Array]) -> dict[str, npt.NDArray[Any]]:
        kinds = {name: self._ocp.RestoreArgs(restore_type=np.ndarray) for name in wanted}
        found: dict[str, npt.NDArray[Any]] = self._handler.restore(
            path, args=self._ocp.args.PyTreeRestore(item=wanted, restore_args=kinds)
        )
        return found


def _checksum(array: npt.NDArray[Any]) -> int:
    """Sum of the bytes taken as 64-bit words, modulo 2**64: as fast as memory, and any one changed
    word changes it.
    """
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = flat.size // 8 * 8
    words = np.add.reduce(flat[:whole].view(np.uint64), dtype=np.uint64)
    rest = int.from_bytes(flat[whole:].tobytes(), "little")
    return (int(words) + rest) % 2**64


def _one_line(err: Exception) -> str:
    return f"{type(err).__name__}: {err}".splitlines()[0][:200]
