"""Runs an `Engine` for requests that arrive while it runs.

The loop knows neither threads nor processes: messages reach its inbox, and it calls `report`. `engine_thread.py` runs
it in a thread, `engine_process.py` in a process of its own.
"""

import math
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jaxpaged import Engine, SamplingParams

Request = tuple[list[int], SamplingParams]
Message = tuple[Any, ...]  # the name of a method of `EngineLoop`, and its arguments
WAKE_UP: Message = ("wake_up",)


class EngineLoop:
    """Does the steps of an engine, and what the messages in its inbox say. The sender names its requests by numbers.

    Args:
        engine: the engine. Nothing else may call it.
        report: called with a name and arguments. `"outputs"` after each step: pairs of a request's number and its new
            output, the engine's statistics, and whether output may have been held back. `"answer"`: the number of a
            call, its result and its error.
        model: the argument of the functions that `call` runs.
        inbox: the messages.
    """

    def __init__(
        self,
        engine: Engine,
        report: Callable[..., None],
        *,
        model: Any = None,
        inbox: "queue.SimpleQueue[Message] | None" = None,
    ):
        self.engine, self.model = engine, model
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue() if inbox is None else inbox
        self._report = report
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="call")
        self._is_stopped = False
        self._due = 0.0  # when all requests may have output again
        self._ids: dict[int, int] = {}  # the engine's request ids by number
        self._numbers: dict[int, int] = {}
        self._begun: set[int] = set()  # the requests that have had output: more of it may wait

    def run(self) -> None:
        """Returns after the message `stop`."""
        self.engine.on_slice_end = lambda: self.inbox.put(WAKE_UP)
        # A step sends the slice after the running one. Requests that arrive before it are served one slice earlier.
        while self._do_messages():
            if is_all := time.monotonic() >= self._due:
                self._due = math.inf  # until `resume`
            may_wait = () if is_all else self._begun
            outputs = self.engine.step(may_wait=may_wait) if self.engine.has_unfinished_requests else []
            new = [(self._numbers[output.request_id], output) for output in outputs]
            for output in outputs:
                self._begun.add(output.request_id)
                if output.finished:
                    self._begun.remove(output.request_id)
                    del self._ids[self._numbers.pop(output.request_id)]
            self._report("outputs", new, self.engine.stats(), is_all)

    def _do_messages(self) -> bool:
        """Handles messages until the engine needs its next step. The end of a slice is a message too.

        Returns whether to continue.
        """
        while not self._is_stopped:
            is_idle = not self.engine.has_unfinished_requests
            try:
                name, *arguments = self.inbox.get(timeout=None if is_idle else self.engine.seconds_to_spare)
            except queue.Empty:
                return True
            getattr(self, name)(*arguments)
        return False

    # The messages.

    def add(self, requests: dict[int, Request]) -> None:
        """Adds requests, all before the next step."""
        for number, request in requests.items():
            request_id = self.engine.add_request(*request)
            self._ids[number], self._numbers[request_id] = request_id, number

    def abort(self, number: int, completion: int | None) -> None:
        """Aborts a request, or just one of its completions. A request that has ended is ignored."""
        if number in self._ids:
            self.engine.abort(self._ids[number], completion)

    def call(self, number: int, prepare: Callable[[Any], Callable[[Engine], Any]]) -> None:
        """Runs `prepare(model)` in a thread, while the engine continues, and its result, a function of the engine,
        between two steps. An error of `prepare` is the answer; an error of the function ends the engine."""
        self._preparing.submit(prepare, self.model).add_done_callback(lambda done: self._put_change(number, done))

    def _put_change(self, number: int, prepared: Future) -> None:
        if (error := prepared.exception()) is not None:
            self._report("answer", number, None, error)
        else:
            self.inbox.put(("change", number, prepared.result()))

    def change(self, number: int, function: Callable[[Engine], Any]) -> None:
        self._report("answer", number, function(self.engine), None)

    def resume(self, due: float) -> None:
        """Lets all requests have output again, once `time.monotonic()` is `due`."""
        self._due = due

    def wake_up(self) -> None:
        """Does nothing: the loop looks again whether the engine needs a step."""

    def stop(self) -> None:
        self._is_stopped = True
        self._preparing.shutdown(wait=False)
