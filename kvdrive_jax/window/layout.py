"""How large each window is and where its slots lie: all windows of a session in one pool of rows.

A pool is one array of page rows, the same for every layer, so that windows of different sizes leave
every compiled shape alone. Layer by layer and head by head, each window has the rows from `first`
on. A window of size 0 has none of its own: it borrows the landing area of its kv head, which all
layers share, for the pages of one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class WindowLayout:
    """Sizes of the windows of one session.

    Attributes:
        selected: P, chunks that one step selects.
        slots: [L][K], slots of each window: 0, or at least P.

    Raises ValueError for sizes that are not so.
    """

    selected: int
    slots: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.selected < 1:
            raise ValueError(f"selected must be at least 1, got {self.selected}")
        if not self.slots or not self.slots[0] or len({len(row) for row in self.slots}) > 1:
            raise ValueError(f"slots must be [layers][kv_heads], got {self.slots!r}")
        for row in self.slots:
            for slots in row:
                if slots != 0 and slots < self.selected:
                    raise ValueError(
                        f"slots must be 0 or at least selected = {self.selected}, got {slots}"
                    )

    @classmethod
    def uniform(cls, layers: int, kv_heads: int, slots: int, selected: int) -> WindowLayout:
        """The same size everywhere."""
        return cls(selected=selected, slots=((slots,) * kv_heads,) * layers)

    @classmethod
    def of(cls, slots: npt.NDArray[np.integer[Any]], selected: int) -> WindowLayout:
        """Of sizes [L, K]."""
        return cls(selected=selected, slots=tuple(tuple(int(n) for n in row) for row in slots))

    @property
    def layers(self) -> int:
        """L."""
        return len(self.slots)

    @property
    def kv_heads(self) -> int:
        """K."""
        return len(self.slots[0])

    @cached_property
    def _table(self) -> npt.NDArray[np.int64]:
        return np.array(self.slots, np.int64)

    @cached_property
    def keeps(self) -> npt.NDArray[np.bool_]:
        """[L, K], False for windows of size 0."""
        keeps: npt.NDArray[np.bool_] = self._table > 0
        return keeps

    @cached_property
    def capacity(self) -> npt.NDArray[np.int32]:
        """[L, K], slots that one step can use: P where the window is of size 0."""
        return np.where(self.keeps, self._table, self.selected).astype(np.int32)

    @property
    def landing(self) -> int:
        """Rows of the shared landing areas."""
        return 0 if self.keeps.all() else self.kv_heads * self.selected

    @cached_property
    def first(self) -> npt.NDArray[np.int32]:
        """[L, K], the row of each window's first slot."""
        before = np.cumsum(self._table.reshape(-1)) - self._table.reshape(-1)
        own = self.landing + before.reshape(self._table.shape)
        shared = np.arange(self.kv_heads) * self.selected
        return np.where(self.keeps, own, shared).astype(np.int32)

    @cached_property
    def rows(self) -> int:
        """R, page rows of the pool."""
        return self.landing + int(self._table.sum())

    @cached_property
    def largest(self) -> int:
        """S, the most slots that one step can use in any window."""
        return int(self.capacity.max())

    @cached_property
    def mean_multiple(self) -> float:
        """Mean size as a multiple of P."""
        return float(self._table.mean()) / self.selected
