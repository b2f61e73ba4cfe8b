"""The host's account of an engine: where each request is, as of the last report. It needs no device."""

import contextlib
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from jaxpaged._engine.grammar_room import Part
from jaxpaged._engine.host_tier.tier import Moves
from jaxpaged._engine.interrupts import Latch, without_interrupts
from jaxpaged._engine.records import RequestOutput
from jaxpaged._engine.requests import FINISH_REASONS, CompletionState, make_output, make_rows, new_scores, new_tokens
from jaxpaged._engine.sampling_params import SamplingParams
from jaxpaged._scheduler.records import RequestStatus, SubmitStatus
from jaxpaged._slice.state import Report


@dataclasses.dataclass
class Sent:
    """A slice in flight: what was sent with it, and its results."""

    rows: list[CompletionState]
    aborts: list[int]
    forgets: np.ndarray
    version: int  # weight updates before it
    num_steps: int = 0  # at most
    words: Future[jax.Array] | None = None  # its report, packed
    began: float | None = None  # time of its call, on the engine's thread
    ended: float | None = None  # time when the device had finished it
    has_returned: Latch = dataclasses.field(default_factory=Latch)  # set once `words` is done
    parts: list[Part] = dataclasses.field(default_factory=list)  # of grammars, copied to the device before it
    moves: Moves = dataclasses.field(default_factory=Moves)  # pages of the host tier moved before it
    failure: Exception | None = None  # of the moves; the slice ran without them

    def result(self) -> jax.Array:
        assert self.words is not None
        return self.words.result()


class Books:
    """Completions (rows) wait in `queue`, are sent with a slice of `under_way`, and are `on_device` until they end.

    A request stays in `requests` until its end is reported or it is dropped; its rows may be on the device longer.
    `on_device` is keyed by place: the scheduler's index of a request.
    """

    def __init__(self, *, max_requests: int, seed: int, num_adapters: int = 0):
        self._max_requests, self._seed = max_requests, seed
        self.queue: deque[CompletionState] = deque()
        self.under_way: deque[Sent] = deque()
        self.on_device: dict[int, CompletionState] = {}
        self.requests: dict[int, list[CompletionState]] = {}  # unfinished, or their end is not yet reported
        self.served: set[int] = set()  # ids of requests of `generate` and other calls that collect their own outputs
        self._dropped: list[int] = []  # ids of dropped requests that have not ended
        self._is_undisturbed = False
        self.next_id = 0
        self.version = 0  # weight updates so far
        # Whether the next slice forgets cached prefixes: those without an adapter, then those of each adapter.
        self.forgets = np.zeros(1 + num_adapters, np.bool_)
        self._new_outputs: dict[int, list[CompletionState]] = {}  # requests with new output, oldest first
        self._aborts: list[int] = []  # places, for the next slice
        self._num_sent = 0
        self._num_held = 0  # rows that `send` left in the queue

    @property
    def num_open(self) -> int:
        """The number of rows that have not ended."""
        return self._num_sent + len(self.queue)

    @property
    def rows_sent(self) -> list[CompletionState]:
        """Rows on the device, or in flight to it."""
        return [*self.on_device.values(), *itertools.chain.from_iterable(sent.rows for sent in self.under_way)]

    @property
    def num_unsettled(self) -> int:
        """The number of requests that have not ended, or whose end is not reported."""
        return len(self.requests.keys() | self._new_outputs.keys())

    @property
    def has_some_for_step(self) -> bool:
        """True while a request from `add_request` has not been reported as finished."""
        return not self.requests.keys() <= self.served or not self._new_outputs.keys() <= self.served

    @property
    def num_unfinished(self) -> int:
        return sum(any(row.finish_reason is None for row in rows) for rows in self.requests.values())

    @property
    def has_more(self) -> bool:
        """Whether another slice can send queued rows now: no row before them is held back."""
        return bool(self.queue) and not self._num_held and self._num_sent < self._max_requests

    @property
    def is_device_empty(self) -> bool:
        return not self.on_device and not any(sent.rows for sent in self.under_way)

    @property
    def wants_logprobs(self) -> bool:
        return any(row.wants_logprobs for row in self.rows_sent)

    @without_interrupts()
    def add(self, prompt: np.ndarray, params: SamplingParams, given: np.ndarray | None = None) -> int:
        """Queues a request and returns its id. `given`: tokens to score; all but the last of them end the prompt."""
        request_id = self.next_id
        self.next_id += 1
        seed = params.seed
        if seed is None:
            seed = int(np.random.SeedSequence([self._seed, request_id]).generate_state(1)[0])
        self.requests[request_id] = make_rows(request_id, prompt, params, seed, given)
        self.queue.extend(self.requests[request_id])
        return request_id

    @without_interrupts()
    def put_longest_first(self, request_ids: Container[int]) -> None:
        """Moves the queued rows of these requests to the end of the queue, those with the largest `max_tokens` first.

        Shorter requests then fill the seats that the longest leave free. [order_h100]
        """
        others = [row for row in self.queue if row.request_id not in request_ids]
        rows = [row for row in self.queue if row.request_id in request_ids]
        self.queue = deque([*others, *sorted(rows, key=lambda row: -row.params.max_tokens)])

    def forget(self, adapters: Iterable[int] | None = None) -> None:
        """Makes the next slice forget the cached prefixes of these adapters; None: all prefixes."""
        self.forgets[slice(None) if adapters is None else [1 + adapter for adapter in adapters]] = True

    def find(self, request_id: int | None, completion: int | None) -> list[CompletionState]:
        """The rows of a request (None: of all requests), or of just one of its completions."""
        # After Ctrl-C in `take_outputs`, a request whose end is not reported may be in the new outputs only.
        if request_id is None:
            return list(itertools.chain.from_iterable((self._new_outputs | self.requests).values()))
        rows = self.requests.get(request_id) or self._new_outputs.get(request_id, [])
        return [row for index, row in enumerate(rows) if completion in (None, index)]

    @without_interrupts()
    def end(self, rows: Iterable[CompletionState]) -> None:
        """Aborts rows: queued rows at once, rows on the device with the next slice."""
        for row in rows:
            if row.finish_reason is not None or row.is_aborted:
                continue
            row.is_aborted = True
            if row.place is not None:
                self._aborts.append(row.place)
        queued = [row for row in self.queue if row.is_aborted]
        self.queue = deque(row for row in self.queue if not row.is_aborted)
        for row in queued:
            self._finish(row, RequestStatus.ABORTED)

    def drop(self, request_ids: Iterable[int]) -> None:
        """Aborts requests and discards their output.

        May run inside the garbage collector, when an abandoned stream is closed. It therefore waits for the end of an
        `undisturbed` block.
        """
        self._dropped.extend(request_ids)
        if not self._is_undisturbed:
            self._drop()

    @without_interrupts()
    def _drop(self) -> None:
        request_ids, self._dropped = self._dropped, []
        rows = [row for request_id in request_ids for row in self.requests.get(request_id, ())]
        if rows:
            self.end(rows)
        for row in rows:
            row.is_dropped = True
        for request_id in request_ids:
            self.requests.pop(request_id, None)
            self._new_outputs.pop(request_id, None)
            self.served.discard(request_id)

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Delays `drop` to the end of the block."""
        self._is_undisturbed = True
        try:
            yield
        finally:
            self._is_undisturbed = False
            if self._dropped:
                self._drop()

    def take_outputs(
        self, request_ids: Container[int] | None = None, *, may_wait: Container[int] = (), finished_only: bool = False
    ) -> list[RequestOutput]:
        """The new output of these requests; by default of all requests from `add_request`.

        Unfinished requests are left out, with `may_wait` until a later call, with `finished_only` for good.
        """
        left, outputs = {}, []
        for request_id, rows in list(self._new_outputs.items()):
            if rows[0].is_dropped:  # by the garbage collector, since the loop began
                continue
            if request_id in self.served if request_ids is None else request_id not in request_ids:
                left[request_id] = rows
                continue
            can_wait = request_id in may_wait
            if (finished_only or can_wait) and any(row.finish_reason is None for row in rows):
                if can_wait:
                    left[request_id] = rows
                continue
            outputs.append(make_output(request_id, rows))
            if outputs[-1].finished:
                self.requests.pop(request_id, None)
        # After an interrupt before this line all outputs are reported again. None comes between these two lines.
        self._new_outputs = left
        return outputs

    def send(self, most: int, is_held: Callable[[CompletionState], bool] | None = None) -> Sent:
        """Prepares the next slice with up to `most` queued rows. Rows for which `is_held` is true stay in the queue.

        `is_held` is called for rows in their order.
        """
        room = min(most, self._max_requests - self._num_sent)
        rows: list[CompletionState] = []
        held: list[CompletionState] = []
        for row in itertools.islice(self.queue, room + most):
            if len(rows) == room or len(held) == most:
                break
            if is_held is not None and is_held(row):
                held.append(row)
            else:
                rows.append(row)
        for _ in range(len(rows) + len(held)):
            self.queue.popleft()
        self.queue.extendleft(reversed(held))
        self._num_sent += len(rows)
        self._num_held = len(held)
        # Each abort is sent once, before its place can belong to another request.
        sent = Sent(rows, self._aborts, self.forgets, self.version)
        self._aborts, self.forgets = [], np.zeros_like(self.forgets)
        self.under_way.append(sent)
        return sent

    @without_interrupts()
    def take_back(self) -> Sent:
        """Undoes the last `send`, because the slice failed: its rows, aborts and other inputs are sent again."""
        failed = self.under_way.pop()
        self.queue.extendleft(reversed([row for row in failed.rows if not row.is_aborted]))
        self._num_sent -= len(failed.rows)
        for row in failed.rows:
            if row.is_aborted:
                self._finish(row, RequestStatus.ABORTED)
        self._aborts = failed.aborts + self._aborts
        self.forgets |= failed.forgets
        return failed

    def take_places(self, report: Report) -> Sent:
        """Records the places of the rows of the oldest slice in flight, from its report."""
        sent = self.under_way.popleft()
        for row, place, refusal in zip(
            sent.rows, report.request_ids.tolist(), report.submit_statuses.tolist(), strict=False
        ):
            if refusal != SubmitStatus.ACCEPTED:
                raise RuntimeError(
                    f"the scheduler refused a request that the engine accepted: {SubmitStatus(refusal).name}."
                )
            row.place = place
            self.on_device[place] = row
            if row.is_aborted and not report.outbox.finished[place]:  # else another request may have the place by now
                self._aborts.append(place)
        return sent

    def take_tokens(self, report: Report, version: int) -> dict[str, Any]:
        """Enters the tokens and scores of a slice, and the rows that ended. Returns numbers of tokens for the stats."""
        num_generated = num_scored = 0
        for place, tokens, logprobs, top_logprobs, aux in new_tokens(report):
            row = self.on_device[place]
            if row.given is not None:
                continue
            row.take_tokens(tokens, logprobs, top_logprobs, aux, version)
            if report.num_cached is not None:
                row.num_cached = int(report.num_cached[place])
            self._mark_new(row)
            num_generated += len(tokens)
        for place, scores in new_scores(report):
            num_scored += self.on_device[place].take_scores(*scores)
        for place in np.flatnonzero(report.outbox.finished).tolist():
            self._num_sent -= 1
            self._finish(self.on_device.pop(place), RequestStatus(int(report.outbox.finished[place])))
        # After an interrupt the next slice is in flight already, and may have given the place to another request.
        self._aborts = [place for place in self._aborts if place in self.on_device]
        return dict(num_generated=num_generated, num_scored=num_scored)

    def _finish(self, row: CompletionState, status: RequestStatus) -> None:
        row.finish_reason = FINISH_REASONS[status]
        self._mark_new(row)

    def _mark_new(self, row: CompletionState) -> None:
        rows = self.requests.get(row.request_id)
        if rows is not None:  # else it was dropped
            self._new_outputs[row.request_id] = rows
