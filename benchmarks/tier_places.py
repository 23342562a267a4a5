"""Where each chunk of a prompt is when decode starts, for `tiers.py`."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks import tier_engine
from kvdrive_jax import Engine
from kvdrive_jax.methods.kvdrive import KVDrive

SSD, DRAM, HBM = 0, 1, 2


def places(model: Any, tokenizer: Any, prompt: Sequence[int], extent_bytes: int) -> Any:
    """uint8 [L * K, N]: `SSD` alone, `DRAM`, or `HBM`, with a quarter of the pages in DRAM."""
    found: list[Any] = []
    finish = KVDrive.finish_prefill

    def look(method: KVDrive) -> None:
        finish(method)
        assert method._tiers is not None
        session = method._tiers.sessions[0]
        assert session is not None
        for layer, directory in enumerate(method._state.directory[0]):
            n = session.stored(layer)
            in_window = np.asarray(directory.slot_of_chunk[0])[:, :n] >= 0
            held = np.where(session.in_dram(layer)[:, :n], DRAM, SSD)
            found.append(np.where(in_window, HBM, held).astype(np.uint8))

    with tempfile.TemporaryDirectory() as directory:
        how = tier_engine.config(ssd_dir=directory, extent_bytes=extent_bytes)
        nbytes = tier_engine.dram_budget(model, tokenizer, how, [len(prompt)], 2, 0.25)
        tiers = dataclasses.replace(how.tiers, dram_budget=nbytes)
        how = dataclasses.replace(how, tiers=tiers)
        with (
            patch.object(KVDrive, "finish_prefill", look),
            Engine(model, tokenizer, how) as engine,
        ):
            list(engine.stream_ids([list(prompt)], max_new_tokens=2))
    return np.concatenate(found)
