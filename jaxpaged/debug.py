"""Tools for wrong tokens and slow calls: run-time checks, the reason for a chosen kernel, and a plot of the blocks."""

from jaxpaged._allocator.plot import plot_blocks
from jaxpaged._attention.explain import Explanation, explain
from jaxpaged._debug import debug_checks
from jaxpaged._publish import publish as _publish

__all__ = ["Explanation", "debug_checks", "explain", "plot_blocks"]

_publish(globals())
