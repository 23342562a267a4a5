"""The pictures of `pipeline`; they need matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.window_plots import _pyplot, _save

LANES = ("device", "host gather", "DRAM->HBM", "SSD->DRAM")
COLOURS = {
    "select": "tab:orange",
    "compute": "tab:blue",
    "logits": "tab:grey",
    "gather": "tab:olive",
    "transfer": "tab:red",
}


def fig4(result: dict[str, Any], path: Path) -> None:
    """Stacked bars: where a step's time goes."""
    rows = result["rows"]
    figure, axis = _pyplot().subplots(figsize=(8, 0.45 * len(rows) + 1.5))
    names = [f"{row['selection']}, {row['context']:,} x {row['batch']}" for row in rows]
    left = [0.0] * len(rows)
    for stage, colour in (
        ("select", "tab:orange"),
        ("fetch", "tab:red"),
        ("compute", "tab:blue"),
    ):
        values = [row["split_ms"][stage] for row in rows]
        axis.barh(names, values, left=left, color=colour, label=stage)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds of a decode step")
    axis.legend()
    _save(figure, path)


def fig10(result: dict[str, Any], path: Path) -> None:
    """One step of each schedule, lane by lane, on one scale."""
    rows = result["rows"]
    figure, axes = _pyplot().subplots(len(rows), 1, figsize=(11, 1.7 * len(rows)), sharex=True)
    longest = max(row["step_wall_ms"] for row in rows.values())
    for axis, (name, row) in zip(axes, rows.items(), strict=True):
        lanes = [lane for lane in LANES if any(s["lane"] == lane for s in row["step"])]
        for span in row["step"]:
            axis.barh(
                lanes.index(span["lane"]),
                span["end_ms"] - span["start_ms"],
                left=span["start_ms"],
                color=COLOURS.get(span["name"], "tab:grey"),
                alpha=0.6 if span["cohort"] == 1 else 1.0,
                edgecolor="white",
                linewidth=0.5,
            )
        axis.axvline(row["step_wall_ms"], color="black", linewidth=1)
        axis.set_yticks(range(len(lanes)), lanes)
        axis.invert_yaxis()
        axis.set_xlim(0, 1.02 * longest)
        axis.set_title(f"{name}: {row['step_wall_ms']:.0f} ms", fontsize=10, loc="left")
    plt = _pyplot()
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    axes[-1].set_xlabel("milliseconds from the start of a decode step (paler: the second cohort)")
    axes[-1].legend(
        handles, list(COLOURS), ncols=len(COLOURS), loc="upper center", bbox_to_anchor=(0.5, -0.45)
    )
    _save(figure, path)


def _bars(result: dict[str, Any], path: Path) -> None:
    """Milliseconds of a step by setting, a group for each context and batch."""
    rows = result["rows"]
    cases = list(dict.fromkeys((row["context"], row["batch"]) for row in rows))
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    figure, axis = _pyplot().subplots(figsize=(8, 4))
    width = 0.8 / len(settings)
    for at, setting in enumerate(settings):
        values = {
            (row["context"], row["batch"]): row["median_ms"]
            for row in rows
            if row["setting"] == setting
        }
        places = [i + (at - (len(settings) - 1) / 2) * width for i in range(len(cases))]
        axis.bar(places, [values[case] for case in cases], width, label=setting)
    axis.set_xticks(range(len(cases)), [f"{context:,} x {batch}" for context, batch in cases])
    axis.set_xlabel("tokens x sessions")
    axis.set_ylabel("milliseconds of a decode step")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(3, len(settings)))
    _save(figure, path)


def fig24(result: dict[str, Any], path: Path) -> None:
    """Tokens/s by batch."""
    figure, axis = _pyplot().subplots(figsize=(6, 4))
    batches = [row["batch"] for row in result["rows"]]
    axis.plot(batches, [row["tokens_per_s"] for row in result["rows"]], "o-", label="overlapped")
    axis.plot(
        batches,
        [row["sequential"]["tokens_per_s"] for row in result["rows"]],
        "s--",
        label="sequential",
    )
    axis.set_xlabel("sessions decoded together")
    axis.set_ylabel("tokens/s")
    axis.set_ylim(bottom=0)
    axis.legend()
    _save(figure, path)


def aims(result: dict[str, Any], path: Path) -> None:
    """Step times by arrangement against the critical path, and tokens/s by batch."""
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=(11, 4))
    rows = result["arrangements"]
    left.barh(list(rows), [row["median_ms"] for row in rows.values()], color="tab:blue")
    left.plot(
        [row["critical_path_ms"] for row in rows.values()],
        list(rows),
        "k|",
        markersize=18,
        label="critical path",
    )
    left.invert_yaxis()
    left.set_xlabel("milliseconds of a decode step")
    left.legend()
    batches = {int(batch): row["tokens_per_s"] for batch, row in result["by_batch"].items()}
    right.plot(list(batches), list(batches.values()), "o-")
    right.set_xlabel("sessions decoded together")
    right.set_ylabel("tokens/s")
    right.set_ylim(bottom=0)
    _save(figure, path)


PLOTS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "fig4": fig4,
    "fig10": fig10,
    "fig16": _bars,
    "fig17": _bars,
    "fig18": _bars,
    "fig24": fig24,
    "aims": aims,
}
