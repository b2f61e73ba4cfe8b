"""Runs an `Engine` in its own thread, for the coroutines of an event loop.

Requests reach the thread through a queue, and outputs return through `call_soon_threadsafe`. The event loop never waits
for a step of the model, and only this thread calls the engine. `engines.py` limits and routes the requests.

All threads need Python's lock. While the event loop is busy, streams get several tokens at once, so that output for
many clients does not delay the engine's next slices.
"""

import asyncio
import contextlib
import functools
import math
import queue
import time
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor

from jaxpaged import Engine, EngineStats, RequestOutput, SamplingParams

LOOP_SHARE = 0.15  # outputs wait if the event loop works for more than this fraction of the time
MOST_HELD_SECONDS = 0.2  # maximum wait of an output

Request = tuple[list[int], SamplingParams]


class EngineFailedError(Exception):
    """The engine raised, and accepts no more requests."""


class EngineThread[Key: Hashable]:
    """Runs an engine in its own thread, within `running()`. The caller names its requests by keys.

    `_run`, `_do_messages`, `_add`, `_abort` and the inbox messages run in the thread; everything else runs in the event
    loop.

    Attributes:
        stats: the engine's statistics after its last step.
        failure: the error that ended the engine.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.stats: EngineStats = engine.stats()
        self.failure: BaseException | None = None
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()  # None: the end
        self._calls: set[Future] = set()
        self._ids: dict[Key, int] = {}  # the engine's request ids; only for the thread, like the next
        self._keys: dict[int, Key] = {}
        self._begun: set[int] = set()  # the requests that have had output: more of it may wait
        self._due = 0.0  # when the event loop gets all outputs again
        self._worked = 0.0  # the event loop's working time after it got all outputs

    @contextlib.asynccontextmanager
    async def running(
        self, on_outputs: Callable[[list[tuple[Key, RequestOutput]]], None], on_end: Callable[[], None]
    ) -> AsyncIterator[None]:
        """Starts the thread, and ends it on exit.

        Args:
            on_outputs: called in the event loop after each step, with requests that have new output. Their first and
                last output is delivered at once.
            on_end: called in the event loop when the thread has ended, on exit or after a `failure`.
        """
        self._loop, self._on_outputs = asyncio.get_running_loop(), on_outputs
        self._worked = time.thread_time()
        self.engine.on_slice_end = functools.partial(self._inbox.put, lambda: None)  # wakes the thread
        with ThreadPoolExecutor(1, thread_name_prefix="engine") as threads:
            ended = self._loop.run_in_executor(threads, self._run)
            ended.add_done_callback(functools.partial(self._stop, on_end))
            try:
                yield
            finally:
                self._inbox.put(None)
                await asyncio.wait([ended])

    def add(self, requests: dict[Key, Request]) -> None:
        """Sends requests to the engine, all before its next step."""
        self._inbox.put(functools.partial(self._add, requests))

    def abort(self, key: Key, completion: int | None = None) -> None:
        """Aborts a request, or just one of its completions. A request that has ended is ignored."""
        self._inbox.put(functools.partial(self._abort, key, completion))

    async def call[Result](self, function: Callable[[Engine], Result]) -> Result:
        """Runs a function in the engine's thread between two steps, and returns its result.

        Raises:
            EngineFailedError: the engine failed.
        """
        if self.failure is not None:
            raise EngineFailedError("The engine failed.")
        result: Future[Result] = Future()
        self._calls.add(result)

        def run() -> None:
            if result.set_running_or_notify_cancel():
                result.set_result(function(self.engine))

        self._inbox.put(run)
        try:
            return await asyncio.wrap_future(result)
        finally:
            self._calls.discard(result)

    def _stop(self, on_end: Callable[[], None], ended: asyncio.Future[None]) -> None:
        failure = ended.exception()
        if failure is not None:
            self.failure = failure.__cause__ or failure  # the cause, without the engine's advice to create a new engine
            for result in self._calls:
                if not result.done():
                    result.set_exception(EngineFailedError("The engine failed."))
        on_end()

    def _report(self, outputs: list[tuple[Key, RequestOutput]], stats: EngineStats, is_all: bool) -> None:
        self.stats = stats
        self._on_outputs(outputs)
        if is_all:
            self._loop.call_soon(self._rest, time.monotonic())  # after the coroutines that the outputs wake

    def _rest(self, since: float) -> None:
        """Lets the event loop rest: it gets all outputs again when it has been idle long enough."""
        worked = time.thread_time()
        self._due = since + min((worked - self._worked) / LOOP_SHARE, MOST_HELD_SECONDS)
        self._worked = worked

    def _run(self) -> None:
        # A step sends the slice after the running one. Requests that arrive before it are served one slice earlier.
        while self._do_messages():
            if is_due := time.monotonic() >= self._due:
                self._due = math.inf  # until the event loop has worked on them
            may_wait = () if is_due else self._begun
            outputs = self.engine.step(may_wait=may_wait) if self.engine.has_unfinished_requests else []
            new = [(self._keys[output.request_id], output) for output in outputs]
            for output in outputs:
                self._begun.add(output.request_id)
                if output.finished:
                    self._begun.remove(output.request_id)
                    del self._ids[self._keys.pop(output.request_id)]
            self._loop.call_soon_threadsafe(self._report, new, self.engine.stats(), is_due)

    def _do_messages(self) -> bool:
        """Handles inbox messages until the engine needs its next step. The end of a slice is a message too.

        Returns whether to continue.
        """
        while True:
            is_idle = not self.engine.has_unfinished_requests
            try:
                message = self._inbox.get(timeout=None if is_idle else self.engine.seconds_to_spare)
            except queue.Empty:
                return True
            if message is None:
                return False
            message()

    def _add(self, requests: dict[Key, Request]) -> None:
        for key, request in requests.items():
            request_id = self.engine.add_request(*request)
            self._ids[key], self._keys[request_id] = request_id, key

    def _abort(self, key: Key, completion: int | None) -> None:
        if key in self._ids:
            self.engine.abort(self._ids[key], completion)
