"""The pictures of `time_model`; they need matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.window_plots import _pyplot, _save

COLOURS = {"kvdrive": "tab:blue", "full": "tab:orange", "layerwise": "tab:grey"}
LABELS = {"layerwise": "layer-wise offload"}


def throughput(result: dict[str, Any], path: Path, title: str) -> None:
    """Tokens/s by batch: a panel for each model or machine (rows) and context (columns)."""
    rows = result["rows"]
    groups = list(dict.fromkeys((row["hardware"], row["model"]) for row in rows))
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    figure, grid = _pyplot().subplots(
        len(groups),
        len(contexts),
        figsize=(3.6 * len(contexts), 2.9 * len(groups) + 0.5),
        squeeze=False,
        sharex=True,
    )
    for line, (machine, model) in zip(grid, groups, strict=True):
        for axes, context in zip(line, contexts, strict=True):
            of = [
                row
                for row in rows
                if (row["hardware"], row["model"], row["context"]) == (machine, model, context)
            ]
            batches = sorted({row["batch"] for row in of})
            for number, method in enumerate(COLOURS):
                rates = {row["batch"]: row["tokens_per_s"] for row in of if row["method"] == method}
                fits = [batch for batch in batches if rates[batch] is not None]
                axes.plot(
                    fits,
                    [rates[batch] for batch in fits],
                    "o-",
                    color=COLOURS[method],
                    label=LABELS.get(method, method),
                )
                cold = [
                    row["batch"] for row in of if row["method"] == method and row.get("from_ssd")
                ]
                axes.plot(
                    cold,
                    [rates[batch] for batch in cold],
                    "o",
                    color=COLOURS[method],
                    markerfacecolor="white",
                    zorder=3,
                )
                missing = [batch for batch in batches if rates[batch] is None]
                axes.plot(
                    missing,
                    [0.03 + 0.06 * number] * len(missing),
                    "x",
                    color=COLOURS[method],
                    transform=axes.get_xaxis_transform(),
                    label=None,
                )
            axes.set_yscale("log")
            axes.set_xticks(batches)
            axes.set_title(f"{machine}, {model}, {context // 1024}K", fontsize=9)
        line[0].set_ylabel("tokens/s, predicted")
    for axes in grid[-1]:
        axes.set_xlabel("sessions")
    grid[0, 0].legend(fontsize=7)
    figure.suptitle(
        f"PREDICTION, not measured: {title}\nhollow: partly from SSD; x: does not fit", fontsize=10
    )
    _save(figure, path)


def fig13(result: dict[str, Any], path: Path) -> None:
    """L20."""
    throughput(result, path, "paper figure 13, L20")


def fig14(result: dict[str, Any], path: Path) -> None:
    """H20 and RTX 4090."""
    throughput(result, path, "paper figure 14, H20 and RTX 4090")


def fig24(result: dict[str, Any], path: Path) -> None:
    """By batch."""
    throughput(result, path, "paper figure 24, throughput by batch")


def fig11(result: dict[str, Any], path: Path) -> None:
    """Roofs, and what this CPU reaches."""
    figure, axes = _pyplot().subplots(figsize=(7.5, 4.8))
    styles = {"CPU": ("black", "-")}
    for name, roof in result["roofs"].items():
        colour, style = styles.get(name, (None, "--"))
        axes.plot(
            result["intensity"],
            [v / 1e12 for v in roof],
            style,
            color=colour,
            label=f"{name} (roof)",
        )
    axes.axvline(result["intensity_of_model"], color="grey", ls=":", label=result["model"])
    for number, point in enumerate(result["points"]):
        axes.plot(
            point["intensity"],
            point["operations_per_s"] / 1e12,
            "s",
            color="tab:red",
            label="measured, this 2-core CPU" if number == 0 else None,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte of KV")
    axes.set_ylabel("Top/s")
    axes.legend(fontsize=8)
    axes.set_title(f"Paper figure 11: decode attention on the CPU and on {result['gpu']}")
    _save(figure, path)


def validate(result: dict[str, Any], path: Path) -> None:
    """Predicted against measured step times."""
    rows = result["rows"]
    figure, axes = _pyplot().subplots(figsize=(5.5, 5))
    times = [value for row in rows for value in (row["predicted_ms"], row["measured_ms"])]
    ends = [0.8 * min(times), 1.2 * max(times)]
    axes.plot(ends, ends, color="black", lw=0.8)
    axes.fill_between(
        ends, [0.85 * e for e in ends], [1.15 * e for e in ends], color="grey", alpha=0.2,
        label="within 15 %",
    )  # fmt: skip
    for number, schedule in enumerate(dict.fromkeys(row["schedule"] for row in rows)):
        of = [row for row in rows if row["schedule"] == schedule]
        axes.plot(
            [row["measured_ms"] for row in of],
            [row["predicted_ms"] for row in of],
            "o",
            color=f"C{number}",
            label=schedule,
            alpha=0.8,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_xlabel("measured, ms a step")
    axes.set_ylabel("predicted, ms a step")
    axes.legend(fontsize=8)
    axes.set_title(f"The model of time on this CPU, {len(rows)} settings")
    _save(figure, path)


PLOTS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "fig11": fig11,
    "fig13": fig13,
    "fig14": fig14,
    "fig24": fig24,
    "validate": validate,
}
