"""Long-context LLM inference with the KV cache over HBM, DRAM and SSD.

Names are loaded on first use: ``--help`` and usage errors of the command do not wait for JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdrive_jax.config import (
        KVDriveConfig,
        PipelineConfig,
        RetrievalConfig,
        TierConfig,
        WindowConfig,
    )
    from kvdrive_jax.engine import Engine
    from kvdrive_jax.sampling import SamplingConfig
    from kvdrive_jax.session import Generation, StreamEvent

__all__ = [
    "Engine",
    "Generation",
    "KVDriveConfig",
    "PipelineConfig",
    "RetrievalConfig",
    "SamplingConfig",
    "StreamEvent",
    "TierConfig",
    "WindowConfig",
]

_HOMES = {
    "Engine": "engine",
    "Generation": "session",
    "KVDriveConfig": "config",
    "PipelineConfig": "config",
    "RetrievalConfig": "config",
    "SamplingConfig": "sampling",
    "StreamEvent": "session",
    "TierConfig": "config",
    "WindowConfig": "config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
