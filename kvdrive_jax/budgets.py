"""How many bytes each tier may use: as configured, or found out from the machine."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from kvdrive_jax import compat
from kvdrive_jax.config import TierConfig
from kvdrive_jax.telemetry import Tier, host_memory_bytes


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes each tier may use; ssd 0 means that there is no SSD tier."""

    hbm: int
    dram: int
    ssd: int

    def of(self, tier: Tier) -> int:
        """The budget of one tier."""
        return {"hbm": self.hbm, "dram": self.dram, "ssd": self.ssd}[tier]


def resolve_budgets(tiers: TierConfig) -> Budgets:
    """Budgets with what was left open found out from the machine.

    HBM: nine tenths of what the device allows; on a CPU, where device memory is host memory, half
    of what is free. DRAM: four fifths of what is free (on a CPU two fifths). SSD: nine tenths of
    the free space where ssd_dir is given, else none. Raises ValueError when ssd_dir is no
    directory.
    """
    free = host_memory_bytes()
    limit = compat.device_memory_limit()
    on_cpu = compat.platform() == "cpu"
    hbm = tiers.hbm_budget
    if hbm is None:
        hbm = free // 2 if limit is None or on_cpu else limit * 9 // 10
    dram = tiers.dram_budget
    if dram is None:
        dram = free * 2 // 5 if on_cpu else free * 4 // 5
    ssd = 0
    if tiers.ssd_dir is not None:
        if not Path(tiers.ssd_dir).is_dir():
            raise ValueError(
                f"ssd_dir must be an existing directory, got {tiers.ssd_dir!r}: create it, or "
                "give another one"
            )
        free = shutil.disk_usage(tiers.ssd_dir).free * 9 // 10
        ssd = free if tiers.ssd_budget is None else tiers.ssd_budget
    return Budgets(hbm=hbm, dram=dram, ssd=ssd)
