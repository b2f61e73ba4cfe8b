"""Runs an `EngineLoop` in a thread of this process.

All threads need Python's lock. So the event loop gets few outputs while it is busy, and output for many clients does
not delay the engine's next slices.
"""

import asyncio
import functools
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxpaged import Engine
from lib.engine_loop import EngineLoop
from lib.engine_runner import EngineRunner


class EngineThread[Key: Hashable](EngineRunner[Key]):
    """Runs an engine in its own thread, within `running()`.

    Args:
        engine: the engine. Nothing else may call it within `running()`.
        model: the argument of the functions that `call` runs.
    """

    loop_share = 0.15

    def __init__(self, engine: Engine, model: Any = None):
        super().__init__(engine.stats())
        self.engine, self.model = engine, model
        self._engine_loop = EngineLoop(engine, self._report, model=model)

    def _start(self) -> None:
        threads = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._loop.run_in_executor(threads, self._engine_loop.run).add_done_callback(self._on_thread_end)
        threads.shutdown(wait=False)  # it accepts no more work

    def _send(self, name: str, *arguments: Any) -> None:
        self._engine_loop.inbox.put((name, *arguments))

    def _report(self, name: str, *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(functools.partial(self._receive, name, *arguments))

    def _on_thread_end(self, ended: asyncio.Future[None]) -> None:
        failure = ended.exception()
        # The cause, without the engine's advice to create a new engine.
        self._end(None if failure is None else failure.__cause__ or failure)
        self._ended.set()
