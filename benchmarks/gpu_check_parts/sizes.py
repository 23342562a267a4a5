"""The sizes that are checked and timed."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.gpu_check_parts import kernels, kernels_index
from benchmarks.gpu_check_parts.kernels import Case, Sizes

FAMILIES: tuple[Callable[[Sizes], Case], ...] = (
    kernels.sparse_attention,
    kernels.row_attention,
    kernels.weighted_attention,
    kernels.prompt_attention,
    kernels_index.centroid_scores,
    kernels_index.moments_scores,
    kernels_index.chunk_selection,
    kernels_index.kmeans_assign,
    kernels_index.kmeans_totals,
    kernels.page_write,
    kernels.page_gather,
)

LLAMA = {"heads": 32, "kv_heads": 8, "dim": 128}
QWEN_14B = {"heads": 40, "kv_heads": 8, "dim": 128}
PHI_MINI = {"heads": 24, "kv_heads": 8, "dim": 128}

# Sizes whose answer float64 on the host knows in a moment; odd where a kernel may trip.
CHECKED = (
    Sizes(label="group 4, D 128", batch=2, tokens=4100, **LLAMA),
    Sizes(label="group 5, D 128", batch=1, tokens=2052, **QWEN_14B),
    Sizes(
        label="group 3, D 64, f32", batch=2, heads=9, kv_heads=3, dim=64, tokens=1029,
        dtype="float32",
    ),
    Sizes(
        label="group 7, D 80, f16", batch=1, heads=14, kv_heads=2, dim=80, tokens=999, chunk=1,
        dtype="float16",
    ),
    Sizes(label="group 16, D 96", batch=1, heads=16, kv_heads=1, dim=96, tokens=1302, chunk=2),
    Sizes(label="group 1, D 256", batch=3, heads=2, kv_heads=2, dim=256, tokens=776, chunk=8),
)  # fmt: skip

TIMED = (
    Sizes(label="Llama-3-8B, 128K x 8", batch=8, tokens=131072, **LLAMA),
    Sizes(label="Llama-3-8B, 128K x 1", batch=1, tokens=131072, **LLAMA),
    Sizes(label="Llama-3-8B, 32K x 8", batch=8, tokens=32768, **LLAMA),
    Sizes(label="Qwen3-14B, 128K x 8", batch=8, tokens=131072, **QWEN_14B),
    Sizes(label="Phi-4-mini, 128K x 8", batch=8, tokens=131072, **PHI_MINI),
    Sizes(label="Llama-3-8B, 1M x 1", batch=1, tokens=1048576, **LLAMA),
)

TOY = (
    Sizes(
        label="toy, group 3", batch=2, heads=6, kv_heads=2, dim=16, tokens=50, budget=24,
        dtype="float32",
    ),
)  # fmt: skip
