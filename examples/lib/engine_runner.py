"""An engine as the coroutines of an event loop see it, wherever its `EngineLoop` runs.

The event loop never waits for a step of the model. While it is busy, streams get several tokens at once: the engine
holds their output back until the event loop has done its work on the last output, and has rested.
"""

import abc
import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Hashable
from typing import Any

from jaxpaged import Engine, EngineStats, RequestOutput
from lib.engine_loop import Request

MOST_HELD_SECONDS = 0.2  # maximum wait of an output


class EngineFailedError(Exception):
    """The engine failed, and accepts no more requests."""


class EngineRunner[Key: Hashable](abc.ABC):
    """Runs an engine within `running()`. The caller names its requests by keys. All methods are for the event loop.

    Attributes:
        loop_share: outputs wait if the event loop works for more than this fraction of the time.
        stats: the engine's statistics after its last step.
        failure: the error that ended the engine.
    """

    loop_share: float

    def __init__(self, stats: EngineStats):
        self.stats = stats
        self.failure: BaseException | None = None
        self._counter = itertools.count()
        self._numbers: dict[Key, int] = {}  # the unfinished requests
        self._keys: dict[int, Key] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._worked = 0.0  # the event loop's working time after it got all outputs

    @contextlib.asynccontextmanager
    async def running(
        self, on_outputs: Callable[[list[tuple[Key, RequestOutput]]], None], on_end: Callable[[], None]
    ) -> AsyncIterator[None]:
        """Starts the engine, and ends it on exit.

        Args:
            on_outputs: called after each step, with requests that have new output. Their first and last output is
                delivered at once.
            on_end: called when the engine has ended, on exit or after a `failure`.
        """
        self._loop, self._on_outputs, self._on_end = asyncio.get_running_loop(), on_outputs, on_end
        self._ended = asyncio.Event()
        self._worked = time.thread_time()
        self._start()
        try:
            yield
        finally:
            self.stop()
            await self._ended.wait()

    @abc.abstractmethod
    def _start(self) -> None:
        """Starts the `EngineLoop`. Its reports go to `_receive`; at its end `_end` is called, then `_ended` set."""

    @abc.abstractmethod
    def _send(self, name: str, *arguments: Any) -> None:
        """Puts a message into the inbox of the `EngineLoop`. Python's garbage collector may call it."""

    def stop(self) -> None:
        """Begins to end the engine. `running` does it too, and waits for the end."""
        self._send("stop")

    def add(self, requests: dict[Key, Request]) -> None:
        """Sends requests to the engine, all before its next step."""
        numbered = {}
        for key, request in requests.items():
            number = next(self._counter)
            self._numbers[key], self._keys[number] = number, key
            numbered[number] = self._pack(request)
        self._send("add", numbered)

    def _pack(self, request: Request) -> Any:
        """The request as it is in a message."""
        return request

    def abort(self, key: Key, completion: int | None = None) -> None:
        """Aborts a request, or just one of its completions. A request that has ended is ignored."""
        if key in self._numbers:
            self._send("abort", self._numbers[key], completion)

    async def call[Result](self, prepare: Callable[[Any], Callable[[Engine], Result]]) -> Result:
        """Runs `prepare(model)` while the engine continues, then its result, a function of the engine, between two
        steps, and returns what that returns.

        Raises:
            EngineFailedError: the engine failed.
            Exception: `prepare` raised it.
        """
        if self.failure is not None:
            raise EngineFailedError("The engine failed.")
        number, result = next(self._counter), self._loop.create_future()
        self._calls[number] = result
        try:
            self._send("call", number, prepare)
            return await result
        finally:
            del self._calls[number]

    def _receive(self, name: str, *arguments: Any) -> None:
        """Handles a report of the `EngineLoop`."""
        handle: Callable[..., None] = self._deliver if name == "outputs" else self._answer
        handle(*arguments)

    def _deliver(self, outputs: list[tuple[int, RequestOutput]], stats: EngineStats, is_all: bool) -> None:
        self.stats = stats
        new = [(self._keys[number], output) for number, output in outputs]
        for number, output in outputs:
            if output.finished:
                del self._numbers[self._keys.pop(number)]
        self._on_outputs(new)
        if is_all:
            self._loop.call_soon(self._rest, time.monotonic())  # after the coroutines that the outputs wake

    def _rest(self, since: float) -> None:
        """Lets the event loop rest: it gets all outputs again when it has been idle long enough."""
        worked = time.thread_time()
        self._send("resume", since + min((worked - self._worked) / self.loop_share, MOST_HELD_SECONDS))
        self._worked = worked

    def _answer(self, number: int, result: Any, error: BaseException | None) -> None:
        call = self._calls.get(number)
        if call is None or call.done():  # cancelled
            return
        if error is None:
            call.set_result(result)
        else:
            call.set_exception(error)

    def _end(self, failure: BaseException | None) -> None:
        self.failure = failure
        for number in self._calls:
            self._answer(number, None, EngineFailedError("The engine failed."))
        self._on_end()
