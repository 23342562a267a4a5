"""What every kernel folder shares: the choice of implementation, and calls of Triton kernels.

Each folder has ``reference.py``, the short XLA specification; ``triton.py``, the kernel;
``api.py``, which one runs and why not the other.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kvdrive_jax import compat

Implementation = Literal["xla", "triton"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)


def why_not_triton(dtype: Any = jnp.float32) -> str | None:
    """The reason no Triton kernel can run here on arrays of this dtype, or None when one can."""
    if compat.platform() not in ("gpu", "cuda"):
        return f"Triton kernels need an NVIDIA GPU, the backend is {compat.platform()}"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"kernels take bfloat16, float16 or float32, not {jnp.dtype(dtype).name}"
    return None


def choose(
    kernel: str, implementation: Implementation | None, reason: str | None, *, interpret: bool
) -> Implementation:
    """The implementation of `kernel`: the named one, or Triton where it can.

    Args:
        kernel: its name, for errors.
        implementation: as the caller gave it.
        reason: why Triton cannot serve this case, None when it can.
        interpret: run Triton kernels in the interpreter, which any backend can.

    Raises:
        ValueError: unknown implementation.
        NotImplementedError: the named one cannot do the case; says why.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be None or one of {', '.join(IMPLEMENTATIONS)}; "
            f"got {implementation!r}"
        )
    if implementation == "triton" and reason is not None:
        raise NotImplementedError(f"{kernel}: {reason}")
    if implementation is None:
        return "triton" if reason is None and not interpret else "xla"
    return implementation


def triton_call(
    body: Any,
    *,
    out_shape: Any,
    grid: tuple[int, ...],
    in_specs: Any,
    out_specs: Any,
    num_warps: int,
    num_stages: int,
    interpret: bool,
    name: str,
    input_output_aliases: dict[int, int] | None = None,
) -> Any:
    """`pl.pallas_call` that goes through Triton on every JAX version."""
    return pl.pallas_call(
        body,
        out_shape=out_shape,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
        input_output_aliases=input_output_aliases or {},
    )


def places(start: int | jax.Array, size: int) -> Any:
    """`size` places of a ref from `start` on, that may reach past its end under a mask.

    jax 0.12 refuses such a slice when its start is a number; what is traced it leaves to the mask.
    """
    if isinstance(start, int):
        start = jnp.full((), start, jnp.int32)  # traced inside a kernel
    return pl.ds(start, size)


def tile(size: int, smallest: int = 1) -> int:
    """The smallest power of two that is at least `size` and `smallest`."""
    return max(smallest, 1 << max(0, size - 1).bit_length())
