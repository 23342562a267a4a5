"""The methods by name."""

from __future__ import annotations

from kvdrive_jax.methods.base import BatchMethod
from kvdrive_jax.methods.full import FullAttention
from kvdrive_jax.methods.kvdrive import KVDrive

METHODS: dict[str, type[BatchMethod]] = {"kvdrive": KVDrive, "full": FullAttention}
