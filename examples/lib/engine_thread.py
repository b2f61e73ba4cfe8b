"""Runs an `Engine` in its own thread, for the coroutines of an event loop.

Requests reach the thread through a queue, and outputs return through `call_soon_threadsafe`. The event loop never waits
for a step of the model, and only this thread calls the engine.

Both threads need Python's lock. While the event loop is busy, streams get several tokens at once, so that output for
many clients does not delay the engine's next slice.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import queue
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor

from jaxpaged import Engine, EngineStats, RequestOutput, SamplingParams

Request = tuple[list[int], SamplingParams]

LOOP_SHARE = 0.15  # outputs wait if the event loop works for more than this fraction of the time
MOST_HELD_SECONDS = 0.2  # maximum wait of an output


class QueueFullError(Exception):
    """Too many completions are under way."""


class DrainingError(Exception):
    """No more requests are accepted."""


class EngineFailedError(Exception):
    """The engine raised, and accepts no more requests."""


@dataclasses.dataclass(eq=False)
class Generation:
    """Requests that one client sent together.

    Attributes:
        unfinished: number of unfinished completions of each request; before `start` one number for all.
        requests: prompts and parameters; empty before `start`.
        unread: for each request, its latest output, if `outputs` has not read it yet. A slow reader never holds more
            than one output per request.
        has_unread: set when there is unread output or a failure.
        reported: requests that have had output.
        failure: the error that ended the engine.
        request_ids: the engine's request ids, used only by its thread.
    """

    unfinished: list[int]
    requests: list[Request] = dataclasses.field(default_factory=list)
    unread: dict[int, RequestOutput] = dataclasses.field(default_factory=dict)
    has_unread: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    reported: set[int] = dataclasses.field(default_factory=set)
    failure: EngineFailedError | None = None
    request_ids: list[int] = dataclasses.field(default_factory=list)

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yields the index of each request with new output, and its output so far. Ends after the last request.

        Raises:
            EngineFailedError: the engine failed.
        """
        num_left = len(self.requests)
        while num_left:
            await self.has_unread.wait()
            self.has_unread.clear()
            if self.failure is not None:
                raise self.failure
            unread, self.unread = self.unread, {}
            for index, output in unread.items():
                num_left -= output.finished
                yield index, output

    def put(self, index: int, output: RequestOutput) -> None:
        """Stores an output for `outputs`."""
        self.unread[index] = output
        self.reported.add(index)
        self.has_unread.set()

    def fail(self, failure: EngineFailedError) -> None:
        self.failure = failure
        self.has_unread.set()


class EngineThread:
    """Runs an engine in its own thread, within `running()`.

    `_run`, `_add`, `_abort` and the inbox messages run in the thread; everything else runs in the event loop.

    Attributes:
        most_completions: maximum number of completions under way at once.
        stats: the engine's statistics after its last step.
        finished: number of completions by finish reason.
        num_refused: number of generations refused because too many completions were under way.
        is_draining: whether new requests are refused.
        failure: the error that ended the engine.
        on_failure: called when the engine fails.
    """

    def __init__(self, engine: Engine, *, most_completions: int):
        self.most_completions = most_completions
        self.stats: EngineStats = engine.stats()
        self.finished: collections.Counter[str] = collections.Counter()
        self.num_refused = 0
        self.is_draining = False
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._engine = engine
        self._open: dict[Generation, None] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()  # None: the end
        self._askers: dict[int, tuple[Generation, int]] = {}  # by the engine's request id; only for the thread
        self._held: dict[tuple[Generation, int], RequestOutput] = {}  # outputs to be put
        self._timer: asyncio.TimerHandle | None = None  # delivers them

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        # The event loop's working time and the clock at the last delivery.
        self._worked, self._since = time.thread_time(), time.monotonic()
        self._engine.on_slice_end = functools.partial(self._inbox.put, lambda: None)  # wakes the thread
        with ThreadPoolExecutor(1, thread_name_prefix="engine") as threads:
            ended = self._loop.run_in_executor(threads, self._run)
            ended.add_done_callback(self._stop)
            try:
                yield
            finally:
                self._inbox.put(None)
                await asyncio.wait([ended])

    @property
    def num_open(self) -> int:
        """Number of completions under way, including waiting ones."""
        return sum(sum(generation.unfinished) for generation in self._open)

    def open(self, num_completions: int) -> Generation:
        """Reserves places for completions. The caller must call `close` at the end, even after an error.

        Raises:
            QueueFullError: too many completions are under way.
            DrainingError: no more requests are accepted.
        """
        if self.is_draining:
            raise DrainingError
        if self.num_open + num_completions > self.most_completions:
            self.num_refused += 1
            raise QueueFullError
        generation = Generation([num_completions])
        self._open[generation] = None
        self._idle.clear()
        return generation

    def start(self, generation: Generation, requests: list[Request]) -> None:
        """Sends the requests to the engine.

        Raises:
            DrainingError: draining exceeded its time, and the places were released.
        """
        if generation not in self._open:
            raise DrainingError
        generation.requests, generation.unfinished = requests, [params.n for _, params in requests]
        self._inbox.put(functools.partial(self._add, generation))

    def close(self, generation: Generation) -> None:
        """Aborts the rest of a generation. Its blocks are freed within two slices, and then its places."""
        if not generation.requests:
            self._forget(generation)
        elif generation in self._open:
            self._inbox.put(functools.partial(self._abort, generation))

    def end(self, generation: Generation, index: int, completion: int) -> None:
        """Aborts one completion of the request with this index; the others continue."""
        self._inbox.put(lambda: self._engine.abort(generation.request_ids[index], completion))

    async def call[Result](self, function: Callable[[Engine], Result]) -> Result:
        """Runs a function in the engine's thread between two steps, and returns its result.

        Raises:
            DrainingError: no more requests are accepted.
        """
        if self.is_draining:
            raise DrainingError
        result: Future[Result] = Future()

        def run() -> None:
            if result.set_running_or_notify_cancel():
                result.set_result(function(self._engine))

        self._inbox.put(run)
        return await asyncio.wrap_future(result)

    async def drain(self, seconds: float) -> None:
        """Refuses new requests and waits for the running ones. After `seconds`, aborts the rest."""
        self.is_draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            for generation in list(self._open):
                self.close(generation)
            await self._idle.wait()

    def _deliver(self, outputs: list[tuple[Generation, int, RequestOutput]], stats: EngineStats) -> None:
        """Receives the outputs of one step. Delivers a request's first and last output immediately."""
        self.stats = stats
        for generation, index, output in outputs:
            if output.finished or index not in generation.reported:
                self._held.pop((generation, index), None)
                generation.put(index, output)
            else:
                self._held[generation, index] = output
            generation.unfinished[index] = sum(completion.finish_reason is None for completion in output.outputs)
            if output.finished:
                self.finished.update(str(completion.finish_reason) for completion in output.outputs)
            if not any(generation.unfinished):
                self._forget(generation)
        if self._held and self._timer is None:
            self._deliver_held()

    def _deliver_held(self) -> None:
        """Delivers waiting outputs, at once or after the event loop has been idle long enough since the last time."""
        worked, now = time.thread_time(), time.monotonic()
        rest = min((worked - self._worked) / LOOP_SHARE, MOST_HELD_SECONDS) - (now - self._since)
        if rest > 0:
            self._timer = self._loop.call_later(rest, self._deliver_held)
            return
        self._worked, self._since, self._timer = worked, now, None
        held, self._held = self._held, {}
        for (generation, index), output in held.items():
            generation.put(index, output)

    def _forget(self, generation: Generation) -> None:
        self._open.pop(generation, None)
        if not self._open:
            self._idle.set()

    def _stop(self, ended: asyncio.Future[None]) -> None:
        """Handles the end of the thread, at the end of `running` or after an error of the engine."""
        self.is_draining = True
        failure = ended.exception()
        if failure is not None:
            self.failure = failure.__cause__ or failure  # the cause, without the engine's advice to create a new engine
            for generation in list(self._open):
                generation.fail(EngineFailedError("The engine failed."))
                self._forget(generation)
            self.on_failure()

    def _run(self) -> None:
        # A step sends the slice after the running one. Requests that arrive before it are served one slice earlier.
        while self._do_messages():
            outputs = self._engine.step() if self._engine.has_unfinished_requests else []
            new = [(*self._askers[output.request_id], output) for output in outputs]
            for output in outputs:
                if output.finished:
                    del self._askers[output.request_id]
            self._loop.call_soon_threadsafe(self._deliver, new, self._engine.stats())

    def _do_messages(self) -> bool:
        """Handles inbox messages until the engine needs its next step. The end of a slice is a message too.

        Returns whether to continue.
        """
        while True:
            is_idle = not self._engine.has_unfinished_requests
            try:
                message = self._inbox.get(timeout=None if is_idle else self._engine.seconds_to_spare)
            except queue.Empty:
                return True
            if message is None:
                return False
            message()

    def _add(self, generation: Generation) -> None:
        for i, request in enumerate(generation.requests):
            request_id = self._engine.add_request(*request)
            generation.request_ids.append(request_id)
            self._askers[request_id] = generation, i

    def _abort(self, generation: Generation) -> None:
        for request_id in generation.request_ids:
            self._engine.abort(request_id)
