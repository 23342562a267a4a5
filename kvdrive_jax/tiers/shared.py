"""What the sessions of one store share."""

from __future__ import annotations

import concurrent.futures as futures
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdrive_jax.config import TierConfig
from kvdrive_jax.telemetry import Ledger, Traffic
from kvdrive_jax.tiers.directory import SsdDirectory
from kvdrive_jax.tiers.dram import SlabAllocator
from kvdrive_jax.tiers.link import Link
from kvdrive_jax.tiers.pages import PageError, PageGeometry
from kvdrive_jax.tiers.staging import Transit
from kvdrive_jax.timeline import Timeline

if TYPE_CHECKING:
    from kvdrive_jax.tiers.session_pages import SessionPages


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Of a store, for its sessions."""

    geometry: PageGeometry
    tiers: TierConfig
    ledger: Ledger
    traffic: Traffic
    transit: Transit
    offloaders: futures.ThreadPoolExecutor
    directory: SsdDirectory | None
    failed: Callable[[PageError], None]
    """Called once by a worker when a session has failed."""
    seen: Callable[[PageError], None]
    """Called when the session's user was told of that failure."""
    notice: Callable[[str], None]
    """Called by a worker with a line for the user."""
    closed: Callable[[SessionPages], None]
    read_ahead: Callable[..., futures.Future[None] | None]
    """Runs a function on a worker, or not: there is a limit."""
    timeline: Timeline
    link: Link | None = None
    allocate: SlabAllocator | None = None
