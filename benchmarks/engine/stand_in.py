"""An engine that computes nothing and returns made-up tokens at a given rate: what is left is the server's work."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from jaxpaged import EngineStats, RequestOutput, SamplingParams
from jaxpaged._engine.requests import Row, checked_prompt, make_output
from jaxpaged._engine.runner import AHEAD, spared


class StandIn:
    """Serves requests as an `Engine` does, in slices of sleep.

    A slice begins once a thread of its own has sent it and the one before it is over, as on a GPU. Steps take the same
    time whether seats are taken or not. `host_seconds` are spent in Python to send a slice, as many in the thread, and
    as many to read it.
    """

    def __init__(
        self, *, num_seats: int, steps_per_slice: int, tokens_per_s: float, vocab_size: int, host_seconds: float = 0
    ):
        self._num_seats, self._steps_per_slice, self._vocab_size = num_seats, steps_per_slice, vocab_size
        self._slice_seconds = num_seats * steps_per_slice / tokens_per_s
        self._host_seconds, self._end = host_seconds, 0.0  # of the slice that was sent last
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stand-in")
        self._waiting: deque[Row] = deque()
        self._seats: list[Row] = []
        self._under_way: deque[tuple[list[Row], Future[float]]] = deque()
        self._num_open = self._next_id = 0
        self._since = 0.0  # when the last slice was read
        self._stats = EngineStats()
        self.on_slice_end: Callable[[], None] = lambda: None  # never called: slices end when they are expected to

    @property
    def has_unfinished_requests(self) -> bool:
        return self._num_open > 0

    @property
    def seconds_to_spare(self) -> float:
        is_running = bool(self._under_way)
        return max(self._since + spared(self._slice_seconds) - time.perf_counter(), 0.0) if is_running else 0.0

    def stats(self) -> EngineStats:
        return dataclasses.replace(self._stats, num_running=len(self._seats))

    def add_request(self, prompt: Sequence[int], params: SamplingParams) -> int:
        if params.n > 1:
            raise ValueError(f"a stand-in makes one completion of a request; got n={params.n}.")
        self._next_id, self._num_open = self._next_id + 1, self._num_open + 1
        self._waiting.append(Row(self._next_id, checked_prompt(prompt), params, 0))
        return self._next_id

    def abort(self, request_id: int, completion: int | None = None) -> bool:
        rows = [row for row in (*self._waiting, *self._seats) if row.request_id == request_id]
        for row in rows:
            row.is_aborted = True
        return bool(rows)

    def step(self) -> list[RequestOutput]:
        while len(self._under_way) <= AHEAD:
            while self._waiting and len(self._seats) < self._num_seats:
                self._seats.append(self._waiting.popleft())
            work(self._host_seconds)
            self._under_way.append((list(self._seats), self._thread.submit(self._send)))
        rows, end = self._under_way.popleft()
        time.sleep(max(end.result() - time.perf_counter(), 0))
        self._since = time.perf_counter()
        work(self._host_seconds)
        self._stats = dataclasses.replace(self._stats, num_slices=self._stats.num_slices + 1)
        return [self._continue(row) for row in rows if row.finish_reason is None]

    def _send(self) -> float:
        """When the slice will be over."""
        work(self._host_seconds)
        self._end = max(self._end, time.perf_counter()) + self._slice_seconds
        return self._end

    def _continue(self, row: Row) -> RequestOutput:
        end = min(len(row.token_ids) + self._steps_per_slice, row.params.max_tokens)
        new = [] if row.is_aborted else made_up(row.prompt.tolist(), len(row.token_ids), end, self._vocab_size)
        row.token_ids += new
        self._stats = dataclasses.replace(self._stats, num_generated=self._stats.num_generated + len(new))
        if row.is_aborted or end == row.params.max_tokens:
            row.finish_reason = "abort" if row.is_aborted else "length"
            self._seats.remove(row)
            self._num_open -= 1
        return make_output(row.request_id, [row])


def work(seconds: float) -> None:
    """Spends as much of a processor's time, and gives Python's lock away in the middle, as calls of JAX do."""
    for _ in range(2):
        end = time.thread_time() + seconds / 2
        while time.thread_time() < end:
            pass
        time.sleep(0)


def made_up(prompt: list[int], begin: int, end: int, vocab_size: int) -> list[int]:
    """The stand-in's tokens `begin` to `end` behind a prompt."""
    start = sum(prompt)
    return [(start + 7919 * i) % vocab_size for i in range(begin, end)]
