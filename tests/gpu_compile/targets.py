"""Six GPUs that need not be there: compile a function for one of them, with XLA's real compiler.

Needs the CUDA plugin of the same version as jax (extra ``aot``), no driver and no GPU, and two
variables in the environment before jax is imported:

    JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m pytest tests/gpu_compile
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kvdrive_jax import compat

FOLDER = Path(__file__).parent / "targets"
TARGETS = ("a100", "l20", "rtx4090", "h20", "h100", "h200")
"""Compute capability 8.0; 8.9 twice; 9.0 three times."""

# From 0.12 on, jax looks the capability of an absent GPU up by name, and does not know all names
# (a GPU that is there is asked). These take the name of one of the same capability; every other
# figure in the description stays.
_KNOWN_AS = {"NVIDIA L20": "NVIDIA L40", "NVIDIA H20": "NVIDIA H100"}


def why_not() -> str | None:
    """The reason nothing can be compiled for CUDA here, or None when it can."""
    for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"):
        if importlib.util.find_spec(name):
            break
    else:
        return "no CUDA plugin: pip install '.[aot]' (make gpu-compile does it)"
    if os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK") != "1":
        return "set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before jax is imported"
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        return "set JAX_PLATFORMS=cpu before jax is imported"
    return None


@functools.cache
def mesh(target: str) -> Mesh:
    """One device of the kind `target`, to compile for."""
    description = (FOLDER / f"{target}.txtpb").read_text()
    for name, known in _KNOWN_AS.items():
        description = description.replace(f'"{name}"', f'"{known}"')
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=description, topology="1x1x1"
    )
    return Mesh(topology.devices, ("x",), axis_types=(AxisType.Auto,))


def lower_for(target: str, fn: Any, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    """`fn` lowered for `target`.

    Args:
        target: one of `TARGETS`.
        fn: a function, or one that `jax.jit` made (which keeps its static and donated arguments).
        args, kwargs: arrays, `jax.ShapeDtypeStruct`, or pytrees of them; static values as they are.

    The platform that `compat.platform()` reports while tracing is ``cuda``, so an api with
    ``implementation=None`` picks Triton where it can.
    """
    place = mesh(target)
    everywhere = NamedSharding(place, PartitionSpec())

    def leaf(x: Any) -> Any:
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)
        return x

    args, kwargs = jax.tree.map(leaf, (args, kwargs))
    jitted = fn if hasattr(fn, "lower") else jax.jit(fn)
    with compat.compiling_for("cuda"), jax.set_mesh(place):
        return jitted.lower(*args, **kwargs)


def compile_for(target: str, fn: Any, *args: Any, **kwargs: Any) -> jax.stages.Compiled:
    """`fn` compiled for `target`; arguments as for `lower_for`."""
    return lower_for(target, fn, *args, **kwargs).compile()
