"""Continuous batching inside jit, for an engine of your own: a scheduler and the records that it accepts and returns.

`jaxpaged.Engine` runs this scheduler; use it directly if the serving loop must be part of a larger compiled program.
"""

from jaxpaged._publish import publish as _publish
from jaxpaged._scheduler.records import Requests, RequestStatus, Sampling, SubmitStatus
from jaxpaged._scheduler.scheduler import Scheduler

__all__ = ["RequestStatus", "Requests", "Sampling", "Scheduler", "SubmitStatus"]

_publish(globals())
