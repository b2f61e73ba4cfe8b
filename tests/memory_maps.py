"""Keeps the processes of a test run below Linux's limit of memory maps, and reports their number.

Each program that XLA compiles for a CPU keeps memory maps. A process may have vm.max_map_count of them, by default
65,530. Above that a compilation fails with a segmentation fault.
"""

from pathlib import Path
from typing import Any

import jax
import pytest

MAPS = Path("/proc/self/maps")  # Linux only


def count() -> int:
    return MAPS.read_bytes().count(b"\n") if MAPS.exists() else 0


class MemoryMaps:
    """A pytest plugin: after a module's last test, drops the compiled programs of a process with more than a quarter of
    `limit` maps, and fails a run in which a process had more than `limit` at that point. Below a quarter,
    the next module reuses small programs. (The largest module leaves 24,000 maps.)"""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.most: dict[str, int] = {}  # per process: a worker of pytest-xdist, or "main"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Any:
        result = yield
        if nextitem is None or nextitem.path != item.path:
            maps = count()
            self.most["main"] = max(maps, self.most.get("main", 0))
            if maps > self.limit / 4:
                jax.clear_caches()
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Runs in the main process, which collects the numbers of pytest-xdist's workers."""
        if "memory_maps" in getattr(node, "workeroutput", {}):  # missing if the worker crashed
            self.most[node.gateway.id] = node.workeroutput["memory_maps"]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["memory_maps"] = self.most.get("main", 0)
        elif session.exitstatus == pytest.ExitCode.OK and self.too_many():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if MAPS.exists() and self.most:
            found = ", ".join(f"{process} {number:,}" for process, number in sorted(self.most.items()))
            verdict = "ERROR: too many memory maps" if self.too_many() else "memory maps"
            terminalreporter.write_line(f"{verdict}: {found} at most; allowed {self.limit:,}", red=self.too_many())

    def too_many(self) -> bool:
        return max(self.most.values(), default=0) > self.limit
