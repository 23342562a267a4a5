"""The statistics of a run as a person reads them (``docs/stats.md`` says what they mean)."""

from __future__ import annotations

from typing import Any

from kvdrive_jax.config import format_size

CAUSE_LABELS = {"engine": "engine (host)"}


def summary(stats: dict[str, Any]) -> str:
    """What a person wants to know of a run, in a few lines."""
    sessions = stats["sessions"]
    prompt = sum(session["prompt_tokens"] for session in sessions)
    new = sum(session["new_tokens"] for session in sessions)
    ends = ", ".join(sorted({str(session["finish_reason"]) for session in sessions}))
    prefill = stats["prefill_s"]
    rate = f" ({prompt / prefill:,.0f} tokens/s)" if prefill else ""
    lines = [
        f"prefill {prompt:,} tokens in {prefill:.1f} s{rate}, index {stats['index_s']:.1f} s; "
        f"decode {new:,} tokens in {stats['decode_s']:.1f} s "
        f"({stats['decode_tokens_per_s'] or 0:.1f} tokens/s); ended by {ends or 'nothing'}"
    ]
    hit_rate = _hit_rate(stats)
    if hit_rate is not None:
        lines.append(f"hit rate {100 * hit_rate:.1f} %; moved: {_moved(stats)}")
    peaks = ", ".join(
        f"{tier.upper()} {format_size(held['peak_bytes'])}"
        for tier, held in stats["tiers"].items()
        if held["peak_bytes"]
    )
    lines.append(f"peak: {peaks}")
    return "\n".join(lines)


def stats_table(stats: dict[str, Any]) -> str:
    """``--stats``: where the time of a decode step went, and what was moved for it."""
    timeline = stats["timeline"]
    steps, wall = timeline["steps"], timeline["wall_s"]
    warm_up = f"{timeline['warm_up_steps']:,} more in {timeline['warm_up_s']:.2f} s before them"
    if not steps or not wall:
        return f"decode: no steady step, {warm_up}"
    work, stalls = timeline["work_s"], timeline["stall_s"]
    per_step = 1e3 / steps
    rate = stats["decode_tokens_per_s"]
    lines = [
        f"decode: {rate or 0:.1f} tokens/s with the warm-up; {steps:,} steps in {wall:.2f} s, "
        f"{wall * per_step:.2f} ms a step; {warm_up}",
        f"{'':20}{'ms a step':>12}{'of wall time':>14}",
    ]

    def row(name: str, seconds: float) -> str:
        return f"{name:20}{seconds * per_step:12.2f}{100 * seconds / wall:12.1f} %"

    lines.append(row("device busy", timeline["device_busy_s"]))
    lines += [row(f"  {name}", work[name]) for name in ("select", "compute", "other")]
    lines.append(row("stalls", sum(stalls.values())))
    lines += [row(f"  {CAUSE_LABELS.get(cause, cause)}", s) for cause, s in stalls.items()]
    lines.append(row("work of all stages", sum(work.values())))
    lines += [row(f"  {name}", seconds) for name, seconds in work.items()]
    lines.append(f"overlap efficiency {timeline['overlap_efficiency']:.2f} (work / wall time)")
    lines.append(f"{'lane':20}{'ms a step':>12}{'bytes a step':>14}{'bytes/s':>14}")
    for name, lane in timeline["lanes"].items():
        if not lane["bytes"]:
            continue
        speed = format_size(int(lane["bytes"] / lane["seconds"])) if lane["seconds"] else ""
        size = format_size(int(lane["bytes"] / steps))
        lines.append(f"{name:20}{lane['seconds'] * per_step:12.2f}{size:>14}{speed:>14}")
    lines.append(f"bytes in all: {_moved(stats)}")
    hit_rate = _hit_rate(stats)
    lines.append("hit rate: nothing was selected" if hit_rate is None else _hits(stats, hit_rate))
    return "\n".join(lines)


def _hits(stats: dict[str, Any], hit_rate: float) -> str:
    hits, misses = stats["timeline"]["hits"], stats["timeline"]["misses"]
    counted = f"; of these steps {hits:,} hits, {misses:,} misses" if hits + misses else ""
    return f"hit rate {100 * hit_rate:.1f} %{counted}"


def _hit_rate(stats: dict[str, Any]) -> float | None:
    """The mean over the sessions that selected anything."""
    rates = [session["hit_rate"] for session in stats["sessions"]]
    known = [rate for rate in rates if rate is not None]
    return sum(known) / len(known) if known else None


def _moved(stats: dict[str, Any]) -> str:
    moved = [
        f"{name.replace('_', ' ')} {format_size(nbytes)}"
        for name, nbytes in stats["bytes"].items()
        if nbytes
    ]
    return ", ".join(moved) or "nothing"
