"""The largest context and the largest batch that a plan still fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvdrive_jax.budgets import resolve_budgets
from kvdrive_jax.checks import check_config
from kvdrive_jax.config import KVDriveConfig
from kvdrive_jax.models.packing import held
from kvdrive_jax.models.weights import describe_pretrained
from kvdrive_jax.plan import plan_batch

MOST_SESSIONS = 4096
"""No larger batch is looked for."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """prompt_tokens: the longest prompts that fit, as many as there are, 0 for none; context: the
    most that the model or configuration allows; sessions: how many prompts as long as the longest
    fit together, 0 for none."""

    prompt_tokens: int
    context: int
    sessions: int

    def line(self, batch: int, longest: int, max_new_tokens: int) -> str:
        """For people."""
        bound = " (all that the model has)" if self.prompt_tokens == self.context else ""
        return (
            f"largest prompts that fit: {self.prompt_tokens:,} tokens{bound}, {batch} at a time "
            f"with {max_new_tokens:,} new ones; prompts of {longest:,} tokens: "
            f"{self.sessions:,} at a time"
        )


def find_limits(
    model: str, config: KVDriveConfig, prompt_tokens: Sequence[int], max_new_tokens: int
) -> Limits:
    """Limits around a batch of prompts, by trying plans; no weights are loaded.

    Raises ValueError as ``plan_for`` does.
    """
    known = describe_pretrained(model, config.dtype, context_length=config.context_length)
    parameters, digest = held(
        known.config, known.dtype, known.parameters, known.digest, config.weights_dtype
    )
    context = check_config(config, known.config, known.dtype)
    budgets = resolve_budgets(config.tiers)

    def fits(lengths: Sequence[int]) -> bool:
        try:
            plan = plan_batch(
                known.config,
                known.dtype,
                parameters,
                config,
                lengths,
                max_new_tokens,
                budgets=budgets,
                digest=digest,
            )
        except ValueError:
            return False
        return plan.fits

    batch, longest = len(prompt_tokens), max(prompt_tokens)
    most = max(0, context - max_new_tokens)
    return Limits(
        prompt_tokens=_largest(lambda tokens: fits([tokens] * batch), most),
        context=most,
        sessions=_largest(lambda count: fits([longest] * count), MOST_SESSIONS),
    )


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits, if what is smaller does; 0 for none."""
    low, high = 0, 1
    while high < most and fits(high):
        low, high = high, min(most, 2 * high)
    if high >= most and most and fits(most):
        return most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
