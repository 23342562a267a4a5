"""The figures of one call, in the form of ``--stats-json`` (see ``docs/stats.md``)."""

from __future__ import annotations

from typing import Any

from kvdrive_jax.session import Session
from kvdrive_jax.telemetry import TIERS, Ledger, StageClock, Traffic


class RunReport:
    """Counters of one call over all its batches. Times are wall-clock seconds.

    prefill_s: prompts through the layers, offload included; index_s: index, importance and warm-up
    of the windows; decode_s: everything after prefill; save_s: saving the session. They do not
    overlap.
    """

    def __init__(self, model: str = "") -> None:
        self.model = model
        self.save_s = 0.0
        self.traffic = Traffic()
        self.clock = StageClock()
        self.sessions: list[Session] = []
        self.prefill_s = 0.0
        self.index_s = 0.0
        self.decode_s = 0.0
        self.decode_tokens = 0

    def to_dict(self, ledger: Ledger) -> dict[str, Any]:
        """Nested plain values."""
        measured = self.clock.snapshot()
        other = max(0.0, self.decode_s - sum(measured.values()))
        stages: dict[str, float] = {str(stage): s for stage, s in measured.items()}
        stages["other"] = other
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
            "stage_s": stages,
        }
