"""The parts of ``benchmarks.gpu_check``, one file each, imported where they run."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """module: its file, with a function ``run(bench)``; seconds: what it may take on a GPU."""

    module: str
    seconds: float
    about: str


PARTS = {
    "kernels": Part("check_kernels", 60, "every kernel against float64"),
    "speed": Part("speed", 55, "time of every kernel and its share of the floor"),
    "transfers": Part("transfers", 45, "host memory, copies, callbacks, top-k, dispatch"),
    "decode": Part("decode", 80, "decode at Llama-3-8B shape, full and kvdrive"),
    "smollm2": Part("smollm2", 40, "SmolLM2 end to end (needs --weights)"),
}
"""In the order they run: correctness before speed. Not all take what they may."""
