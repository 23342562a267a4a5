"""Fetched pages into their slots of the window, in place."""

from kvdrive_jax.pallas.page_write.api import WriteTuning, why_not, write_pages

__all__ = ["WriteTuning", "why_not", "write_pages"]
