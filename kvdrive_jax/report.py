"""The figures of one call, in the form of ``--stats-json`` (see ``docs/stats.md``)."""

from __future__ import annotations

from typing import Any

from kvdrive_jax.session import Session
from kvdrive_jax.telemetry import TIERS, Ledger, StageClock, Traffic
from kvdrive_jax.timeline import Timeline


class RunReport:
    """Counters of one call over all its batches. Times are wall-clock seconds.

    prefill_s: prompts through the layers, offload included; index_s: index, importance and warm-up
    of the windows; decode_s: everything after prefill; save_s: saving the session. They do not
    overlap.

    timeline: gets the spans of the call (None: one that keeps none).
    """

    def __init__(self, model: str = "", timeline: Timeline | None = None) -> None:
        self.model = model
        self.save_s = 0.0
        self.traffic = Traffic()
        self.clock = StageClock()
        self.timeline = timeline or Timeline()
        self.timeline.on_step = self.clock.leave_out
        self.sessions: list[Session] = []
        self.prefill_s = 0.0
        self.index_s = 0.0
        self.decode_s = 0.0
        self.decode_tokens = 0

    def to_dict(self, ledger: Ledger) -> dict[str, Any]:
        """Nested plain values."""
        rate = self.decode_tokens / self.decode_s if self.decode_s > 0 else None
        return {
            "sessions": [session.stats() for session in self.sessions],
            "prefill_s": self.prefill_s,
            "index_s": self.index_s,
            "decode_s": self.decode_s,
            "save_s": self.save_s,
            "decode_tokens_per_s": rate,
            "bytes": dict(self.traffic.snapshot()),
            "pages": dict(self.traffic.pages()),
            "tiers": {
                tier: {"budget_bytes": ledger.budget(tier), "peak_bytes": ledger.peak(tier)}
                for tier in TIERS
            },
            "stage_s": self._stages(),
            "timeline": self.timeline.totals(),
        }

    def _stages(self) -> dict[str, float]:
        """Where the wall time of decode went: what the device did, else what it waited for."""
        stages: dict[str, float] = {str(name): s for name, s in self.clock.snapshot().items()}
        for sums in (self.timeline.sums(), self.timeline.warm_up):
            selecting = min(sums.work_s()["select"], sums.device_s)
            stages["select"] += selecting
            stages["compute"] += sums.device_s - selecting
            stages["fetch"] += sum(sums.stalls.values()) - sums.stalls["engine"]
            stages["stall"] += sums.stalls["engine"]
        stages["other"] = max(0.0, self.decode_s - sum(stages.values()))
        return stages
