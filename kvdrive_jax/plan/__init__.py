"""What will be, before anything runs: where every byte goes (`memory`), and what time a step takes
(`predict`, from `hardware`, `work` and `simulate`)."""

from kvdrive_jax.plan.memory import WORKERS as WORKERS
from kvdrive_jax.plan.memory import Line as Line
from kvdrive_jax.plan.memory import Plan as Plan
from kvdrive_jax.plan.memory import plan_batch as plan_batch
from kvdrive_jax.plan.memory import plan_for as plan_for
