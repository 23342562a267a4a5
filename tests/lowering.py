"""What a function becomes for an NVIDIA GPU, on a machine without one and without a CUDA plugin."""

from __future__ import annotations

from typing import Any

import jax

from kvdrive_jax import compat

# jax 0.11 wants to know the GPU that it lowers for.
MESH = jax.sharding.AbstractMesh(
    (1,),
    ("x",),
    axis_types=(jax.sharding.AxisType.Auto,),
    abstract_device=jax.sharding.AbstractDevice("NVIDIA H200", 1, platform="cuda"),
)


def cuda_text(fn: Any, *args: Any, donate_argnums: tuple[int, ...] = (), **kwargs: Any) -> str:
    """StableHLO of `fn` at these abstract arguments."""
    with compat.compiling_for("cuda"), jax.sharding.use_abstract_mesh(MESH):
        traced = jax.jit(fn, donate_argnums=donate_argnums).trace(*args, **kwargs)
        return str(traced.lower(lowering_platforms=("cuda",)).as_text())
