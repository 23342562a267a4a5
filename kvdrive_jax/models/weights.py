"""From named tensors to a model: families, dtypes, fusing, checking.

`load_pretrained` is the entrance. `build_model` is the part that every source of tensors shares: it
takes them one at a time in any order, so that the host holds little more than the tensor at hand.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from kvdrive_jax.models import folder as folders
from kvdrive_jax.models.assembly import Assembler, Key, Place, places
from kvdrive_jax.models.config import ModelConfig
from kvdrive_jax.models.family import Family, required, usable_positions
from kvdrive_jax.models.llama import LLAMA
from kvdrive_jax.models.model import Model, define
from kvdrive_jax.models.phi import PHI3
from kvdrive_jax.models.qwen import QWEN2, QWEN3

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, QWEN2, QWEN3, PHI3)}
DTYPES = ("float32", "bfloat16", "float16")
HEAD: Key = (None, "head")
EMBEDDING: Key = (None, "embedding")
# Old checkpoints carry the RoPE frequencies, which are computed here.
IGNORED = re.compile(r"(?:.*\.)?rotary_emb\.inv_freq")


def resolve_dtype(dtype: Any, stored: str | None = None) -> np.dtype[Any]:
    """The dtype to run in.

    Args:
        dtype: "auto", or one of `DTYPES` by name or as a dtype. "auto" is the checkpoint's own on
            an accelerator and float32 on a CPU, where narrower types are slower.
        stored: the checkpoint's dtype; None where it is quantised, which counts as bfloat16.

    Raises:
        ValueError: any other dtype.
    """
    if isinstance(dtype, str) and dtype == "auto":
        on_cpu = jax.default_backend() == "cpu"
        dtype = "float32" if on_cpu else stored or "bfloat16"
    try:
        kind = jnp.dtype(dtype)
    except TypeError:
        kind = None
    if kind is None or kind.name not in DTYPES:
        raise ValueError(f"dtype: expected 'auto' or one of {', '.join(DTYPES)}, got {dtype!r}")
    return kind


def parse_config(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    *,
    context_length: int | None = None,
) -> ModelConfig:
    """A Hugging Face config.json, and generation_config.json if there is one, as a `ModelConfig`.

    Args:
        raw: config.json. Both the transformers 5 and the older spellings of RoPE settings are read.
        generation: generation_config.json; its end tokens join those of config.json.
        context_length: longest context that will be used, for models with sliding windows.

    Raises:
        ValueError: an architecture, RoPE type or setting that is unknown or incomplete.
        NotImplementedError: a sliding window shorter than the context, or quantised weights.
    """
    family = _family_of(raw)
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unnamed")
        raise NotImplementedError(f"quantised checkpoints are not supported, got {method!r}")
    ends: dict[int, None] = {}
    for source in (raw, generation or {}):
        ids = source.get("eos_token_id")
        ends |= dict.fromkeys([] if ids is None else ids if isinstance(ids, list) else [ids])
    config = ModelConfig(
        architecture=family.name,
        eos_token_ids=tuple(int(i) for i in ends),
        bos_token_id=raw.get("bos_token_id"),
        **family.parse(raw),
    )
    usable = usable_positions(config, family.windows(raw), context_length)
    return dataclasses.replace(config, max_positions=usable)


def _family_of(raw: Mapping[str, Any]) -> Family:
    named = raw.get("architectures") or []
    for family in FAMILIES.values():
        if family.hf_architecture in named:
            return family
    if not named:
        for family in FAMILIES.values():
            if family.model_type == required(raw, "model_type"):
                return family
    supported = ", ".join(family.hf_architecture for family in FAMILIES.values())
    got = ", ".join(named) if named else f"model_type {raw['model_type']!r}"
    raise ValueError(f"architecture: expected one of {supported}, got {got}")


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this configuration holds, as Hugging Face
    stores them.

    The head is listed unless the configuration says it is tied.
    """
    return {
        name: place.shape
        for name, place in _places(config).items()
        if not (config.tied_embeddings and place.key == HEAD)
    }


def check_names(config: ModelConfig, names: Iterable[str], *, source: str) -> None:
    """Checks before anything is read that a checkpoint holds what the model needs and nothing else.

    Raises:
        ValueError: missing or unused tensors, named.
    """
    known, given = _places(config), set(names)
    unused = sorted(name for name in given - known.keys() if not IGNORED.fullmatch(name))
    missing = [name for name, place in known.items() if name not in given and place.key != HEAD]
    _reject(source, missing, unused)


def _places(config: ModelConfig) -> dict[str, Place]:
    return places(config, FAMILIES[config.architecture].rules)


def _reject(source: str, missing: list[str], unused: list[str]) -> None:
    problems = [
        f"{len(names)} {kind} tensor{'s' if len(names) > 1 else ''}: {', '.join(names[:8])}"
        + (", ..." if len(names) > 8 else "")
        for kind, names in (("missing", missing), ("unused", unused))
        if names
    ]
    if problems:
        raise ValueError(f"{source}: " + "; ".join(problems))


def build_model(
    config: ModelConfig,
    tensors: Iterable[tuple[str, npt.NDArray[Any]]],
    dtype: Any,
    *,
    source: str,
    digest: str,
) -> Model:
    """A model from its tensors, each parameter put on the device as soon as its parts are
    there.

    Args:
        config: what the model is. Whether its embeddings are tied is decided by the tensors:
            without a head they are, and with a head that equals the embedding if the configuration
            says tied.
        tensors: names as Hugging Face checkpoints of the family have them, and arrays as stored
            there ([out, in]), in any order. Arrays must not be changed afterwards.
        dtype: "auto" or one of `DTYPES`; every weight is converted to it.
        source: what messages call the checkpoint.
        digest: identifies configuration and weights.

    Raises:
        ValueError: a tensor that is missing, unused, given twice or of the wrong shape, named.
    """
    kind = resolve_dtype(dtype)
    known = _places(config)
    done: dict[Key, jax.Array] = {}
    seen: set[str] = set()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        assembler = Assembler(kind, pool)
        for name, array in tensors:
            if IGNORED.fullmatch(name):
                continue
            if name not in known:
                _reject(source, [], [name])
            if name in seen:
                raise ValueError(f"{source}: tensor {name}: duplicate")
            seen.add(name)
            place = known[name]
            if array.shape != place.shape:
                raise ValueError(
                    f"{source}: tensor {name}: expected shape {place.shape}, got {array.shape}"
                )
            parameter = assembler.add(place, array)
            if parameter is not None:
                # Transfers run behind: without waiting, the host would fill with what is under way.
                done[place.key] = jax.device_put(parameter).block_until_ready()
            del parameter, array
    missing = [name for name, place in known.items() if name not in seen and place.key != HEAD]
    _reject(source, missing, [])

    tied = HEAD not in done or (
        config.tied_embeddings and bool(jnp.array_equal(done[HEAD], done[EMBEDDING].T))
    )
    static, _, _ = define(dataclasses.replace(config, tied_embeddings=tied), kind)
    layers = tuple(
        tuple(done[i, name] for name in static.layer_def.names) for i in range(config.num_layers)
    )
    ends = tuple(done[None, name] for name in static.ends_def.names)
    return Model(static, layers, ends, digest)


@dataclass(frozen=True)
class Description:
    """What can be known of a model without its weights: shape, dtype, stored parameters, digest."""

    config: ModelConfig
    dtype: np.dtype[Any]
    parameters: int
    digest: str


def describe_pretrained(
    path: str, dtype: Any = "auto", *, context_length: int | None = None
) -> Description:
    """What `load_pretrained` with these arguments would load; reads no weights.

    Raises:
        ValueError, NotImplementedError: as `load_pretrained`.
    """
    if path == "demo" or path.endswith(".gguf"):
        from kvdrive_jax.models import gguf
        from kvdrive_jax.models.gguf_file import open_gguf

        file = open_gguf(gguf.demo_path() if path == "demo" else path)
        config, kind = gguf.gguf_config(file, context_length=context_length), resolve_dtype(dtype)
        digest = file.digest()
    else:
        config, located = _open_folder(path, context_length)
        kind = resolve_dtype(dtype, folders.stored_dtype(located))
        digest = folders.digest(Path(path), located)
        if "lm_head.weight" not in located and not config.tied_embeddings:
            config = dataclasses.replace(config, tied_embeddings=True)
    _, layer, ends = define(config, kind)
    sizes = [math.prod(leaf.shape) for leaf in (*layer * config.num_layers, *ends)]
    return Description(config, kind, sum(sizes), digest)


def _open_folder(path: str, context_length: int | None) -> tuple[ModelConfig, dict[str, Any]]:
    """Configuration of a Hugging Face folder, and where its tensors are; names are checked."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"model: expected 'demo', a .gguf file or a model folder, got {path!r}")
    raw = folders.read_json(folder, "config.json")
    has_generation = (folder / "generation_config.json").is_file()
    generation = folders.read_json(folder, "generation_config.json") if has_generation else None
    config = parse_config(raw, generation, context_length=context_length)
    located = folders.read_shards(folder)
    check_names(config, located, source=path)
    return config, located


def load_pretrained(
    path: str,
    dtype: Any = "auto",
    *,
    context_length: int | None = None,
    cache_dir: str | None = None,
) -> Model:
    """Loads a model.

    Args:
        path: "demo" (the bundled model), a .gguf file, or a Hugging Face folder.
        dtype: "auto" (the checkpoint's on an accelerator, float32 on a CPU) or one of `DTYPES`.
        context_length: longest context that will be used; lets a model with sliding windows load if
            they cover it, and then bounds `config.max_positions`.
        cache_dir: where the converted weights of a GGUF file are kept for the next start (None:
            nowhere). Folders need no conversion.

    Raises:
        ValueError: nothing there, an incomplete or damaged folder, or a model that is not
            supported, with what was expected and what was found.
        NotImplementedError: see `parse_config`.
    """
    if path == "demo" or path.endswith(".gguf"):
        from kvdrive_jax.models import gguf

        return gguf.load_gguf(
            gguf.demo_path() if path == "demo" else path,
            dtype,
            context_length=context_length,
            cache_dir=cache_dir,
        )
    config, located = _open_folder(path, context_length)
    return build_model(
        config,
        folders.stream(located),
        resolve_dtype(dtype, folders.stored_dtype(located)),
        source=path,
        digest=folders.digest(Path(path), located),
    )
