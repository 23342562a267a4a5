"""Attention over any part of the keys, as mergeable partials."""

from kvdrive_jax.pallas.attention.api import attend_prompt
from kvdrive_jax.pallas.attention.reference import Partial, attend, attend_one, combine

__all__ = ["Partial", "attend", "attend_one", "attend_prompt", "combine"]
