"""Requests of an event loop to one or several engines: places, routing, outputs, aborts and draining.

An engine runs in its own thread (`engine_thread.py`) or process (`engine_process.py`). With several engines,
`router.py` chooses one for each request.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from jaxpaged import Engine, EngineStats, RequestOutput, SamplingParams
from lib.command_line import say
from lib.engine_loop import Request
from lib.engine_runner import EngineFailedError, EngineRunner
from lib.router import Room, Router


class QueueFullError(Exception):
    """Too many completions are under way."""


class DrainingError(Exception):
    """No more requests are accepted."""


@dataclasses.dataclass(eq=False)
class Generation:
    """Requests that one client sent together.

    Attributes:
        unfinished: number of unfinished completions of each request; before `start` one number for all.
        requests: prompts and parameters; empty before `start`.
        engines: index of each request's engine; empty before `start`.
        unread: for each request, its latest output, if `outputs` has not read it yet. A slow reader never holds more
            than one output per request.
        has_unread: set when there is unread output or a failure.
        failure: the error that ended one of its engines.
    """

    unfinished: list[int]
    requests: list[Request] = dataclasses.field(default_factory=list)
    engines: list[int] = dataclasses.field(default_factory=list)
    unread: dict[int, RequestOutput] = dataclasses.field(default_factory=dict)
    has_unread: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    failure: EngineFailedError | None = None

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yields the index of each request with new output, and its output so far. Ends after the last request.

        Raises:
            EngineFailedError: the engine of one of the requests failed.
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
        self.has_unread.set()

    def fail(self, failure: EngineFailedError) -> None:
        self.failure = failure
        self.has_unread.set()


Key = tuple[Generation, int]  # a request, as the index in its generation


class Engines:
    """Runs equal engines within `running()`.

    If an engine fails, its requests fail, and the other engines continue.

    Args:
        runners: the engines, each in its own thread or process.
        most_completions: maximum number of completions under way at once, on all engines together.
        router: chooses an engine for each request, if there are several.

    Attributes:
        num_sent: number of unfinished completions sent to each engine.
        finished: number of completions by finish reason.
        num_refused: number of generations refused because too many completions were under way.
        is_draining: whether new requests are refused.
        on_failure: called when the last engine has failed.
    """

    def __init__(self, runners: Sequence[EngineRunner[Key]], *, most_completions: int, router: Router | None = None):
        self.runners = runners
        self.most_completions, self.router = most_completions, router or Router()
        self.num_sent = [0] * len(runners)
        self.finished: collections.Counter[str] = collections.Counter()
        self.num_refused = 0
        self.is_draining = False
        self.on_failure: Callable[[], None] = lambda: None
        self._open: dict[Generation, None] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for i, runner in enumerate(self.runners):
                await stack.enter_async_context(runner.running(self._deliver, functools.partial(self._end, i)))
            try:
                yield
            finally:
                for runner in self.runners:  # all at once
                    runner.stop()

    @property
    def num_open(self) -> int:
        """Number of completions under way, including waiting ones."""
        return sum(sum(generation.unfinished) for generation in self._open)

    @property
    def working(self) -> list[int]:
        """Indices of the engines that have not failed."""
        return [i for i, runner in enumerate(self.runners) if runner.failure is None]

    @property
    def failure(self) -> BaseException | None:
        """The error of the first engine that has failed."""
        return next((runner.failure for runner in self.runners if runner.failure is not None), None)

    @property
    def stats(self) -> EngineStats:
        """Statistics after the last steps. Counts of requests, blocks, steps and tokens are sums over the engines."""
        first = self.runners[0].stats
        if len(self.runners) == 1:
            return first
        counts = [name for name in vars(first) if name.startswith("num_")]
        return dataclasses.replace(
            first, **{name: sum(getattr(runner.stats, name) for runner in self.runners) for name in counts}
        )

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
        """Sends the requests to the engines.

        Raises:
            DrainingError: draining exceeded its time, and the places were released.
        """
        if generation not in self._open:
            raise DrainingError
        generation.requests, generation.unfinished = requests, [params.n for _, params in requests]
        sent: dict[int, dict[Key, Request]] = {}
        for index, (prompt, params) in enumerate(requests):
            engine = self._choose(prompt, params)
            self.num_sent[engine] += params.n
            generation.engines.append(engine)
            sent.setdefault(engine, {})[generation, index] = prompt, params
        for engine, of_engine in sent.items():
            self.runners[engine].add(of_engine)

    def _choose(self, prompt: list[int], params: SamplingParams) -> int:
        if len(working := self.working) == 1:
            return working[0]
        rooms = {i: Room.of(self.runners[i].stats, self.num_sent[i]) for i in working}
        return self.router.choose(prompt, params.adapter, rooms)

    def close(self, generation: Generation) -> None:
        """Aborts the rest of a generation. Its blocks are freed within two slices, and then its places."""
        if not generation.requests:
            self._forget(generation)
        elif generation in self._open:
            for index, engine in enumerate(generation.engines):
                if generation.unfinished[index]:
                    self.runners[engine].abort((generation, index))

    def end(self, generation: Generation, index: int, completion: int) -> None:
        """Aborts one completion of the request with this index; the others continue."""
        self.runners[generation.engines[index]].abort((generation, index), completion)

    async def call(self, prepare: Callable[[Any], Callable[[Engine], Any]]) -> None:
        """Calls `EngineRunner.call` of all working engines. An error of one is raised when the others are done too.

        Raises:
            DrainingError: no more requests are accepted.
            EngineFailedError: an engine failed.
            Exception: `prepare` raised it.
        """
        if self.is_draining:
            raise DrainingError
        calls = [self.runners[i].call(prepare) for i in self.working]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def drain(self, seconds: float) -> None:
        """Refuses new requests and waits for the running ones. After `seconds`, aborts the rest."""
        self.is_draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            for generation in list(self._open):
                self.close(generation)
            await self._idle.wait()

    def _deliver(self, outputs: list[tuple[Key, RequestOutput]]) -> None:
        """Receives the outputs of one step."""
        for (generation, index), output in outputs:
            generation.put(index, output)
            self._set_unfinished(generation, index, sum(one.finish_reason is None for one in output.outputs))
            if output.finished:
                self.finished.update(str(completion.finish_reason) for completion in output.outputs)
            if not any(generation.unfinished):
                self._forget(generation)

    def _set_unfinished(self, generation: Generation, index: int, count: int) -> None:
        self.num_sent[generation.engines[index]] -= generation.unfinished[index] - count
        generation.unfinished[index] = count

    def _forget(self, generation: Generation) -> None:
        self._open.pop(generation, None)
        if not self._open:
            self._idle.set()

    def _end(self, engine: int) -> None:
        """Handles the end of an engine, at the end of `running` or after its failure."""
        runner = self.runners[engine]
        if runner.failure is None:
            self.is_draining = True
            return
        is_last = not self.working
        self.is_draining |= is_last
        # Its counts of tokens and steps stay, because counters must not fall.
        none_left: dict[str, Any] = dict.fromkeys(("num_running", "num_blocks", "num_free_blocks"), 0)
        runner.stats = dataclasses.replace(runner.stats, **none_left)
        for generation in list(self._open):
            lost = [i for i, own in enumerate(generation.engines) if own == engine and generation.unfinished[i]]
            if lost or is_last:
                generation.fail(EngineFailedError("The engine failed."))
            for index in lost:
                self._set_unfinished(generation, index, 0)
            if is_last or not any(generation.unfinished):
                self._forget(generation)
        if is_last:
            self.on_failure()
        else:
            say(f"Engine {engine} failed: {runner.failure}. The others continue.")
