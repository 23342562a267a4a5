"""The tiers below HBM: DRAM and SSD behind one store. Ids in, pages out; a query is never seen."""

from kvdrive_jax.tiers.pages import FetchCount as FetchCount
from kvdrive_jax.tiers.pages import PageError as PageError
from kvdrive_jax.tiers.pages import PageGeometry as PageGeometry
from kvdrive_jax.tiers.placement import SessionPlan as SessionPlan
from kvdrive_jax.tiers.placement import SessionSize as SessionSize
from kvdrive_jax.tiers.placement import plan_session as plan_session
from kvdrive_jax.tiers.placement import plan_sessions as plan_sessions
from kvdrive_jax.tiers.session_pages import SessionPages as SessionPages
from kvdrive_jax.tiers.staging import Staging as Staging
from kvdrive_jax.tiers.staging import StagingRing as StagingRing
from kvdrive_jax.tiers.store import PageStore as PageStore
