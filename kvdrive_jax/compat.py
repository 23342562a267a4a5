"""The only file that knows JAX versions and backends."""

from __future__ import annotations

import jax


def platform() -> str:
    """``cpu``, ``gpu`` or ``tpu``: where arrays live by default."""
    return jax.default_backend()


def device_name() -> str:
    """The kind of the default device, for reports."""
    device = jax.devices()[0]
    return f"{device.platform}:{device.device_kind}"


def device_memory_limit() -> int | None:
    """Bytes the default device lets this process use, or None where the backend does not say."""
    stats = jax.devices()[0].memory_stats()
    return None if not stats else stats.get("bytes_limit")
