"""What was measured once per model: how much each window size saves, per layer and head.

A JSON file, versioned and keyed by everything that changes which chunks a step selects. It holds
curves and not sizes, so that one profile serves every HBM budget (`allocation`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdrive_jax.files import (
    cache_folder,
    name_of,
    number,
    of_kind,
    read_json,
    typed,
    write_json,
)

VERSION: Final = 1
LARGEST_BYTES: Final = 64 << 20
"""A file larger than this is no profile."""


@dataclass(frozen=True, kw_only=True)
class ProfileKey:
    """Of what a profile is: model digest, geometry, selection and policy; budget in tokens."""

    digest: str
    chunk_size: int
    budget: int
    index: str
    group_rule: str
    eviction: str


@dataclass(frozen=True, kw_only=True)
class ProfiledText:
    """One text that a profile was made from."""

    name: str
    tokens: int
    steps: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """Mean hits per step by window size.

    Attributes:
        key: what it is of; model: its name, for people.
        multiples: [W] window sizes as multiples of the budget, ascending from 0.
        hits: [L, K, W] chunks per step that a window of each size serves, mean over steps.
        selected: chunks per step and head, mean over steps.
        texts: what was read.
    """

    key: ProfileKey
    model: str
    multiples: tuple[float, ...]
    hits: npt.NDArray[np.float64]
    selected: float
    texts: tuple[ProfiledText, ...]

    def __post_init__(self) -> None:
        if self.hits.ndim != 3 or not self.hits.size or self.hits.shape[2] != len(self.multiples):
            raise ValueError(
                f"hits must be [layers, kv_heads, {len(self.multiples)}], got "
                f"{list(self.hits.shape)}"
            )
        if not np.isfinite(self.hits).all() or self.hits.min() < 0:
            raise ValueError("hits must be finite and at least 0")
        if not np.isfinite([*self.multiples, self.selected]).all():
            raise ValueError("multiples and selected must be finite")
        if self.selected <= 0:
            raise ValueError(f"selected must be above 0, got {self.selected}")
        ascending = list(self.multiples) == sorted(set(self.multiples))
        if len(self.multiples) < 2 or self.multiples[0] != 0 or not ascending:
            raise ValueError(f"multiples must ascend from 0, got {self.multiples}")
        if self.multiples[1] < 1:
            raise ValueError(f"multiples must be 0 or at least 1, got {self.multiples[1]}")
        if not self.texts:
            raise ValueError("texts must name at least one text, got none")
        for text in self.texts:
            if text.tokens < 0 or text.steps < 1:
                raise ValueError(
                    f"texts must have tokens of at least 0 and steps of at least 1, got {text}"
                )

    def require(self, key: ProfileKey, path: str | os.PathLike[str]) -> None:
        """ValueError, saying what differs, when the profile is not for ``key``."""
        if not key.digest:
            raise ValueError(
                f"window profile {path}: the model has no digest to know it by; load it from files"
            )
        for field in dataclasses.fields(ProfileKey):
            mine, wanted = getattr(self.key, field.name), getattr(key, field.name)
            if mine != wanted:
                raise ValueError(
                    f"window profile {path} is for {field.name} {mine}, this run has {wanted}: "
                    "make one with python -m kvdrive_jax.profile record"
                )


def merge(profiles: Sequence[Profile]) -> Profile:
    """One profile of several with the same key, each weighted by its steps."""
    if not profiles:
        raise ValueError("there is no profile to merge")
    first = profiles[0]
    for other in profiles[1:]:
        if (other.key, other.multiples, other.hits.shape) != (
            first.key,
            first.multiples,
            first.hits.shape,
        ):
            raise ValueError(
                "profiles must be of one key, the same multiples and the same layers and heads, "
                f"got {_form(first)} and {_form(other)}"
            )
    weights = [sum(text.steps for text in profile.texts) for profile in profiles]
    return dataclasses.replace(
        first,
        hits=np.average([profile.hits for profile in profiles], axis=0, weights=weights),
        selected=float(np.average([profile.selected for profile in profiles], weights=weights)),
        texts=tuple(text for profile in profiles for text in profile.texts),
    )


def profile_path(key: ProfileKey) -> str:
    """The default place of a profile: under ``XDG_CACHE_HOME``, else under ``~/.cache``."""
    return os.path.join(cache_folder("profiles"), f"{name_of([VERSION, asdict(key)])}.json")


def write_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """In one piece: what was there before stays until the new file is complete."""
    values = {"version": VERSION, **asdict(profile)}
    values["hits"] = profile.hits.tolist()
    write_json(path, values)


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """The profile of a file. Raises ValueError, naming it, for one that is none."""
    try:
        return _parse(read_json(path, LARGEST_BYTES))
    except OSError as error:
        raise ValueError(f"window profile {path}: {error.strerror}") from error
    except KeyError as error:
        raise ValueError(f"window profile {path} has no {error}") from error
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"window profile {path} cannot be used: {error}") from error


def _form(profile: Profile) -> str:
    return f"{profile.key}, multiples {profile.multiples}, hits {list(profile.hits.shape)}"


def _parse(values: Any) -> Profile:
    version = values.get("version") if isinstance(values, dict) else None
    if type(version) is not int or version != VERSION:
        raise ValueError(f"its version must be {VERSION}, got {version!r}")
    return Profile(
        key=typed(ProfileKey, values["key"], "key"),
        model=of_kind(str, values["model"], "model"),
        multiples=tuple(
            number(n, "multiples") for n in of_kind(list, values["multiples"], "multiples")
        ),
        hits=_curves(values["hits"]),
        selected=number(values["selected"], "selected"),
        texts=tuple(
            typed(ProfiledText, text, "texts") for text in of_kind(list, values["texts"], "texts")
        ),
    )


def _curves(values: Any) -> npt.NDArray[np.float64]:
    """NumPy alone would take strings, true and false for numbers."""
    for value in _leaves(values):
        number(value, "hits")
    return np.array(values, np.float64)


def _leaves(values: Any) -> Iterator[Any]:
    if isinstance(values, list):
        for value in values:
            yield from _leaves(value)
    else:
        yield values
