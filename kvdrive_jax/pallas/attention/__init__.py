"""Decode attention over any part of the keys, as mergeable partials."""

from kvdrive_jax.pallas.attention.api import (
    attend_pages,
    attend_rows,
    attend_step,
    attend_weighted,
    why_not_decode,
)
from kvdrive_jax.pallas.attention.reference import MASKED, Partial, attend, attend_one, combine
from kvdrive_jax.pallas.attention.triton import DecodeTuning, decode_tuning

__all__ = [
    "MASKED",
    "DecodeTuning",
    "Partial",
    "attend",
    "attend_one",
    "attend_pages",
    "attend_rows",
    "attend_step",
    "attend_weighted",
    "combine",
    "decode_tuning",
    "why_not_decode",
]
