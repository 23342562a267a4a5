"""The pictures of `windows`; they need matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MIB = 2**20


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    _pyplot().close(figure)


def fig3(result: dict[str, Any], path: Path) -> None:
    """Bytes per step and HBM against window size."""
    rows = [row for row in result["rows"] if row["eviction"] == "smoothed"]
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=(10, 4.3))
    for ratio, colour in ((1 / 64, "tab:blue"), (1 / 16, "tab:orange")):
        for tokens in sorted({row["prompt_tokens"] for row in rows}):
            of = [
                row
                for row in rows
                if (row["budget_ratio"], row["prompt_tokens"]) == (ratio, tokens)
            ]
            if not of:
                continue
            style = "--" if tokens < 5000 else "-"
            label = f"{100 * ratio:.2f} %, {of[0]['text']}, {tokens:,} tokens"
            x = [row["window"] for row in of[:4]]
            left.plot(
                x,
                [row["bytes_per_step"] / MIB for row in of[:4]],
                "o" + style,
                color=colour,
                label=label,
                alpha=0.8,
            )
            right.plot(
                x, [row["hbm_bytes"] / MIB for row in of[:4]], "o" + style, color=colour, alpha=0.8
            )
    left.set_yscale("log")
    left.set_ylabel("fetched per step, MiB")
    right.set_ylabel("windows in HBM, MiB")
    for axes in (left, right):
        axes.set_xlabel("window, multiple of the budget")
        axes.set_xticks([0, 1, 2, 3])
    left.legend(fontsize=7)
    figure.suptitle("Paper figure 3: what a window saves and costs (bundled model, float32)")
    _save(figure, path)


def fig7(result: dict[str, Any], path: Path) -> None:
    """Overlap of consecutive steps, one line per head."""
    figure, sides = _pyplot().subplots(1, 2, figsize=(10, 4.3))
    for axes, (tokens, curve) in zip(sides, result["curves"].items(), strict=True):
        found = np.array(curve["found_tokens"])
        heads = found.reshape(len(found), -1)
        axes.plot(curve["m_tokens"], heads, color="tab:blue", alpha=0.12, lw=0.8)
        axes.plot(curve["m_tokens"], heads.mean(axis=1), color="black", lw=2, label="mean")
        axes.axvline(1.25 * int(tokens), color="grey", ls=":", label="M = 1.25 K")
        axes.axhline(int(tokens), color="grey", lw=0.8)
        axes.set_xlabel("M: best tokens of this step")
        axes.set_ylabel(f"of them in the next step's best K = {tokens} tokens")
        axes.legend(fontsize=8)
    figure.suptitle("Paper figure 7: overlap of consecutive steps, one line per (layer, kv head)")
    _save(figure, path)


def fig8(result: dict[str, Any], path: Path) -> None:
    """Saved bytes against window size, one panel for some layers, one line per head."""
    saved = np.array(result["saved_bytes_per_step"]) / 1024
    layers = np.linspace(0, len(saved) - 1, 6).astype(int)
    figure, grid = _pyplot().subplots(2, 3, figsize=(10, 6), sharex=True, sharey=True)
    for axes, layer in zip(grid.ravel(), layers, strict=True):
        for head, curve in enumerate(saved[layer]):
            axes.plot(result["windows"], curve, "o-", ms=3, label=f"kv head {head}")
        axes.set_title(f"layer {layer}", fontsize=9)
    for axes in grid[:, 0]:
        axes.set_ylabel("saved per step, KiB")
    for axes in grid[-1]:
        axes.set_xlabel("window, multiple of the budget")
    grid[0, 0].legend(fontsize=7)
    figure.suptitle("Paper figure 8: what a larger window saves differs by layer and head")
    _save(figure, path)


def fig15(result: dict[str, Any], path: Path) -> None:
    """Bytes saved against uniform windows in equal HBM."""
    rows = result["rows"]
    figure, axes = _pyplot().subplots(figsize=(8, 4.3))
    groups = sorted({(row["budget_ratio"], row["window"]) for row in rows})
    for offset, (name, colour) in enumerate(
        (("from other texts", "tab:blue"), ("from this text", "tab:orange"))
    ):
        for at, group in enumerate(groups):
            values = [
                100 * row[f"{name}, saved"]
                for row in rows
                if (row["budget_ratio"], row["window"]) == group
            ]
            x = at + 0.35 * offset - 0.17
            axes.bar(x, np.mean(values), 0.32, color=colour, alpha=0.6, label=None if at else name)
            axes.plot([x] * len(values), values, ".", color="black", ms=4)
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xticks(range(len(groups)))
    axes.set_xticklabels([f"{100 * r:.2f} %, x{m:g}" for r, m in groups])
    axes.set_xlabel("budget, mean window")
    axes.set_ylabel("fewer bytes than uniform windows, %")
    axes.legend(title="sizes made", fontsize=8)
    axes.set_title("Paper figure 15: windows by layer and head in equal HBM (dots: eight texts)")
    _save(figure, path)


def policies(result: dict[str, Any], path: Path) -> None:
    """Share of the gap from LRU to Belady that each policy closes."""
    rows = result["rows"]
    names = [name for name in rows[0]["hit_rate"] if name not in ("lru", "belady")]
    groups = sorted({(row["budget_ratio"], row["window"]) for row in rows})
    figure, axes = _pyplot().subplots(figsize=(8, 4.3))
    for offset, name in enumerate(names):
        for at, group in enumerate(groups):
            values = [
                100 * row["gap_closed"][name]
                for row in rows
                if (row["budget_ratio"], row["window"]) == group
            ]
            x = at + 0.2 * offset - 0.3
            label = None if at else name
            axes.bar(x, np.mean(values), 0.19, color=f"C{offset}", alpha=0.6, label=label)
            axes.plot([x] * len(values), values, ".", color="black", ms=3)
    axes.axhline(0, color="black", lw=0.8)
    axes.axhline(50, color="grey", ls=":", lw=0.8)
    axes.set_xticks(range(len(groups)))
    axes.set_xticklabels([f"{100 * r:.2f} %, x{m:g}" for r, m in groups])
    axes.set_xlabel("budget, window")
    axes.set_ylabel("of the way from LRU (0) to Belady (100), %")
    axes.legend(fontsize=8)
    axes.set_title("What policies collect of what the future allows (dots: eight texts)")
    _save(figure, path)


PLOTS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "fig3": fig3,
    "fig7": fig7,
    "fig8": fig8,
    "fig15": fig15,
    "policies": policies,
}
