"""From a trace to the curves of a profile: how much each window size would have served."""

from __future__ import annotations

import numpy as np

from kvdrive_jax.window.allocation import MULTIPLES, slots_of
from kvdrive_jax.window.layout import WindowLayout
from kvdrive_jax.window.profile import Profile, ProfiledText, ProfileKey
from kvdrive_jax.window.replay import replay
from kvdrive_jax.window.trace import Trace


def profile_of(
    trace: Trace, eviction: str, *, multiples: tuple[float, ...] = MULTIPLES, skip: int = 0
) -> Profile:
    """The profile of one trace under a policy; steps before ``skip`` are not counted.

    Raises ValueError as `replay` does, and when no step is left.
    """
    info, steps = trace.info, trace.steps - skip
    if steps < 1:
        raise ValueError(f"a profile needs at least one step, got {trace.steps} and skip {skip}")
    hits = []
    for multiple in multiples:
        slots = slots_of(multiple, info.selected)
        layout = WindowLayout.uniform(trace.layers, trace.kv_heads, slots, info.selected)
        result = replay(trace, layout, eviction, skip=skip)
        hits.append(result.hits)
    return Profile(
        key=ProfileKey(
            digest=info.digest,
            chunk_size=info.chunk_size,
            budget=info.selected * info.chunk_size,
            index=info.index,
            group_rule=info.group_rule,
            eviction=eviction,
        ),
        model=info.model,
        multiples=multiples,
        hits=np.stack(hits, axis=-1),
        selected=float(result.selected.mean()),
        texts=(ProfiledText(name=info.text, tokens=info.prompt_tokens, steps=steps),),
    )
