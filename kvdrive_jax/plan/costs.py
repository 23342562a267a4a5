"""What the stages of a step cost: seconds by rows, from floors, and a step made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvdrive_jax.pipeline.parts import Arrangement, cut
from kvdrive_jax.plan import work
from kvdrive_jax.plan.hardware import Hardware
from kvdrive_jax.plan.simulate import Cohort, MicroBatch, StepTimes
from kvdrive_jax.plan.work import Case, Work


class StageCosts(Protocol):
    """Seconds of the device for one call of a stage in one layer."""

    def select(self, rows: int) -> float:
        """Of a micro-batch of so many sessions."""
        ...

    def write(self, pages: float) -> float:
        """Of so many fetched pages."""
        ...

    def compute(self, rows: int) -> float:
        """Of a cohort of so many sessions."""
        ...

    def ends(self, rows: int) -> tuple[float, float]:
        """Before the first layer and after the last, of the whole batch."""
        ...


@dataclass(frozen=True, kw_only=True)
class FloorCosts:
    """The least each stage can take: every kernel at its floor on this hardware.

    speculative: compute makes q, k and v anew.
    """

    case: Case
    hardware: Hardware
    speculative: bool = False

    def _seconds(self, *works: Work) -> float:
        return sum(work.seconds(self.hardware) for work in works)

    def _rows(self, rows: int) -> Case:
        return replace(self.case, batch=rows)

    def select(self, rows: int) -> float:
        """See `StageCosts`."""
        case = self._rows(rows)
        return self._seconds(
            work.projection(case), work.scoring(case), work.selection(case), work.directory(case)
        )

    def write(self, pages: float) -> float:
        """See `StageCosts`."""
        return 2 * pages * self.case.page_bytes / self.hardware.hbm

    def compute(self, rows: int) -> float:
        """See `StageCosts`."""
        case = self._rows(rows)
        anew = (work.projection(case),) if self.speculative else ()
        return self._seconds(*anew, work.sparse_attention(case), work.feed_forward(case))

    def ends(self, rows: int) -> tuple[float, float]:
        """See `StageCosts`."""
        return 0.0, self._seconds(work.logits(self._rows(rows)))


@dataclass(frozen=True, kw_only=True)
class Missing:
    """What a step fetches.

    pages: [L] of one session in each layer; page_bytes: of one; from_ssd: the share that DRAM
    lacks; read_bytes: from SSD for one page.
    """

    pages: Sequence[float]
    page_bytes: float
    from_ssd: float = 0.0
    read_bytes: float = 0.0

    @classmethod
    def of(cls, case: Case, *, from_ssd: float = 0.0, read_bytes: float = 0.0) -> Missing:
        """By the hit rate of a case, the same in each layer."""
        pages = case.model.num_kv_heads * case.selected * (1 - case.hit_rate)
        return cls(
            pages=(pages,) * case.model.num_layers,
            page_bytes=case.page_bytes,
            from_ssd=from_ssd,
            read_bytes=read_bytes,
        )


def step_times(
    costs: StageCosts,
    hardware: Hardware,
    missing: Missing,
    batch: int,
    arrangement: Arrangement,
    *,
    direct: bool = False,
) -> StepTimes:
    """A decode step of ``batch`` sessions, cut as the pipeline cuts it.

    direct: the device fetches, as fast as PCIe carries, and writes meanwhile.
    """
    parts = cut(batch, arrangement)

    def micro_batch(rows: int, pages: float) -> MicroBatch:
        pages *= rows
        cold = pages * missing.from_ssd
        moved = pages * missing.page_bytes
        if direct and pages:
            carried = moved / hardware.pcie + hardware.pcie_latency
            return MicroBatch(select=costs.select(rows), direct=carried)
        return MicroBatch(
            select=costs.select(rows),
            miss_list=hardware.miss_list,
            ssd=cold * missing.read_bytes / hardware.ssd,
            ssd_latency=hardware.ssd_latency if cold else 0.0,
            gather=moved / hardware.gather + hardware.gather_latency if pages else 0.0,
            transfer=moved / hardware.pcie + hardware.pcie_latency if pages else 0.0,
            write=costs.write(pages) if pages else 0.0,
        )

    # Layers that miss as much are the same object: there are few kinds.
    kinds = {
        pages: tuple(
            Cohort(
                micro_batches=tuple(
                    micro_batch(part.last - part.first, pages) for part in cohort.micro_batches
                ),
                compute=costs.compute(cohort.size),
            )
            for cohort in parts
        )
        for pages in set(missing.pages)
    }
    first, last = costs.ends(batch)
    return StepTimes(
        layers=tuple(kinds[pages] for pages in missing.pages),
        first=first,
        last=last,
        dispatch=hardware.dispatch,
        workers=hardware.workers,
    )
