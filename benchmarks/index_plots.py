"""The two plots of `index_recall`: recall against bytes, output error against budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(report: dict[str, Any], folder: Path) -> None:
    """Writes index_recall_bytes.png and index_error_budget.png; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    budgets = report["budgets"]
    shown = budgets.index(512) if 512 in budgets else len(budgets) - 1
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    families: dict[str, list[tuple[float, float, str]]] = {}
    for name, form in report["forms"].items():
        if form["rule"] != "softmax-sum":
            continue
        family = name.partition(":")[0].partition(" of")[0]
        # What a name says after its comma is a family of its own.
        _, comma, variant = name.partition(", ")
        if comma:
            family = f"{family}, {'two levels' if variant.endswith('scanned') else variant}"
        recall = report["mean"][name]["recall"][shown]
        tokens = next(iter(report["texts"].values()))["prompt_tokens"]
        read = form["bytes_scanned_per_step"] / tokens
        families.setdefault(family, []).append((read, recall, name))
    for family, points in families.items():
        points.sort()
        axes.plot([p[0] for p in points], [p[1] for p in points], "o-", label=family)
    axes.axhline(report["mean"]["oracle"]["recall"][shown], color="grey", ls=":", label="oracle")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes of index read per step, token and kv head")
    axes.set_ylabel(f"recall with {budgets[shown]} tokens")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "index_recall_bytes.png", dpi=120)
    pyplot.close(figure)

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    lines = ("clusters", "chunks:4", "bounds:4", "moments:4", "moments:2", "oracle")
    for name in lines:
        if name in report["mean"]:
            axes.plot(budgets, report["mean"][name]["error"], "o-", label=name)
    if "moments:4" in report["mean"]:
        values = report["mean"]["moments:4"]["error, chunks estimated"]
        axes.plot(budgets, values, "o--", label="moments:4, unselected chunks estimated")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("budget, tokens")
    axes.set_ylabel("relative error of the attention output")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "index_error_budget.png", dpi=120)
    pyplot.close(figure)
