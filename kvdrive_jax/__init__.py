"""Long-context LLM inference with the KV cache over HBM, DRAM and SSD."""

from kvdrive_jax.config import KVDriveConfig, RetrievalConfig, TierConfig, WindowConfig
from kvdrive_jax.engine import Engine
from kvdrive_jax.sampling import SamplingConfig
from kvdrive_jax.session import Generation, StreamEvent

__all__ = [
    "Engine",
    "Generation",
    "KVDriveConfig",
    "RetrievalConfig",
    "SamplingConfig",
    "StreamEvent",
    "TierConfig",
    "WindowConfig",
]
