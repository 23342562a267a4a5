"""Page rows by id from host memory into slots of the window: ids never leave the device."""

from kvdrive_jax.pallas.page_gather.api import GatherTuning, gather_pages, why_not

__all__ = ["GatherTuning", "gather_pages", "why_not"]
