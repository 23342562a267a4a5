"""The pictures of `tiers`; they need matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.window_plots import _pyplot, _save


def fig5(result: dict[str, Any], path: Path) -> None:
    """Tokens/s by batch."""
    figure, axis = _pyplot().subplots(figsize=(6, 4))
    rows = result["rows"]
    for name in [key for key in rows[0] if key != "batch"]:
        fits = [row for row in rows if row[name] is not None]
        axis.plot([row["batch"] for row in fits], [row[name] for row in fits], "o-", label=name)
    axis.axvline(3, color="grey", linestyle=":", label="DRAM is full")
    axis.set_xlabel("sessions decoded together")
    axis.set_ylabel("tokens/s")
    axis.set_ylim(bottom=0)
    axis.legend()
    _save(figure, path)


def fig12(result: dict[str, Any], path: Path) -> None:
    """A row for each (layer, kv head), a column for each chunk."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(10, 4.5))
    from matplotlib.colors import ListedColormap

    colours = ListedColormap(["#dfe6ee", "#f2a33a", "#b3202c"])
    places = np.array([[int(place) for place in row] for row in result["places"]])
    axis.imshow(places, aspect="auto", cmap=colours, interpolation="nearest")
    axis.set_xlabel("chunk of the prompt")
    axis.set_ylabel("layer and kv head")
    count = result["chunks"]
    total = sum(count.values())
    axis.set_title(
        "when decode starts: "
        + ", ".join(
            f"{100 * count[tier] / total:.0f} % {name}"
            for tier, name in (("hbm", "HBM (red)"), ("dram", "DRAM (orange)"), ("ssd", "SSD"))
        )
    )
    _save(figure, path)


def fig21a(result: dict[str, Any], path: Path) -> None:
    """Milliseconds per step, logarithmic."""
    figure, axis = _pyplot().subplots(figsize=(8, 4))
    rows = result["rows"]
    values = [1e3 * row["mean_fetch_s"] for row in rows.values()]
    axis.barh(list(rows), values, color="tab:blue")
    for at, value in enumerate(values):
        axis.text(value, at, f" {value:,.1f} ms", va="center")
    axis.set_xscale("log")
    axis.set_xlim(right=4 * max(values))
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds a decode step waits for pages")
    _save(figure, path)


def fig21b(result: dict[str, Any], path: Path) -> None:
    """Tokens/s."""
    figure, axis = _pyplot().subplots(figsize=(8, 4))
    rows = result["rows"]
    values = [row["tokens_per_s"] for row in rows.values()]
    axis.barh(list(rows), values, color="tab:green")
    for at, value in enumerate(values):
        axis.text(value, at, f" {value:.2f}", va="center")
    axis.invert_yaxis()
    axis.set_xlabel("tokens/s")
    _save(figure, path)


PLOTS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "fig5": fig5,
    "fig12": fig12,
    "fig21a": fig21a,
    "fig21b": fig21b,
}
