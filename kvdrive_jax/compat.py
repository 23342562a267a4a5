"""The only file that knows JAX versions and backends."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

# The one place where the warning is silenced that the Triton path of Pallas gives from jax 0.11 on.
# docs/architecture.md says what a move to Mosaic GPU would take.
TRITON_WARNING = "The Pallas Triton backend is deprecated"
warnings.filterwarnings("ignore", message=TRITON_WARNING, category=DeprecationWarning)

_compiling_for: ContextVar[str | None] = ContextVar("compiling_for", default=None)


def platform() -> str:
    """``cpu``, ``gpu`` or ``tpu``: where arrays live by default, or what is compiled for."""
    return _compiling_for.get() or jax.default_backend()


@contextmanager
def compiling_for(name: str) -> Iterator[None]:
    """Within it, `platform` is `name`: for ahead-of-time compilation without the device."""
    token = _compiling_for.set(name)
    try:
        yield
    finally:
        _compiling_for.reset(token)


def is_ready(array: jax.Array) -> bool:
    """Whether an array has been computed: asking does not wait."""
    ready: bool = array.is_ready()  # type: ignore[attr-defined]
    return ready


def start_copy(array: jax.Array) -> None:
    """Send an array to the host as soon as it is computed; on CPU it is there."""
    if platform() != "cpu":
        array.copy_to_host_async()


def device_name() -> str:
    """The kind of the default device, for reports."""
    device = jax.devices()[0]
    return f"{device.platform}:{device.device_kind}"


def device_memory_limit() -> int | None:
    """Bytes the default device lets this process use, or None where the backend does not say."""
    stats = jax.devices()[0].memory_stats()
    return None if not stats else stats.get("bytes_limit")
