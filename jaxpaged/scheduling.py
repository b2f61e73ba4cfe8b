"""Continuous batching inside `jax.jit`: a scheduler, and the records that it accepts and returns.

`jaxpaged.Engine` runs this scheduler. Use the scheduler directly to make the serving loop part of a larger compiled
program.
"""

from jaxpaged._publish import publish as _publish
from jaxpaged._scheduler.records import Requests, RequestStatus, Sampling, SubmitStatus
from jaxpaged._scheduler.scheduler import Scheduler

__all__ = ["RequestStatus", "Requests", "Sampling", "Scheduler", "SubmitStatus"]

_publish(globals())
