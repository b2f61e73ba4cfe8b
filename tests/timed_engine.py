"""An engine whose slices only sleep, for tests of code that serves an engine's requests."""

import dataclasses
import time
from collections.abc import Callable, Container, Sequence

from jaxpaged import Completion, EngineStats, RequestOutput, SamplingParams


@dataclasses.dataclass
class Row:
    request_id: int
    max_tokens: int
    num_tokens: int = 0
    is_aborted: bool = False


class TimedEngine:
    """Serves requests like an `Engine`. The i-th token of every request is i."""

    def __init__(self, *, num_seats: int = 2, steps_per_slice: int = 1, slice_seconds: float = 0.0):
        self._num_seats, self._steps_per_slice, self._slice_seconds = num_seats, steps_per_slice, slice_seconds
        self._rows: list[Row] = []  # rows with a seat come first
        self._next_id, self._since = 0, 0.0
        self._stats = EngineStats()
        self.on_slice_end: Callable[[], None] = lambda: None  # never called: slices end as predicted

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._rows)

    @property
    def seconds_to_spare(self) -> float:
        left = self._since + 0.9 * self._slice_seconds - time.perf_counter()  # leaves time on a busy machine
        return max(left, 0.0) if self._rows else 0.0

    def stats(self) -> EngineStats:
        return self._stats

    def add_request(self, prompt: Sequence[int], params: SamplingParams) -> int:
        self._next_id += 1
        self._rows.append(Row(self._next_id, params.max_tokens))
        return self._next_id

    def abort(self, request_id: int, completion: int | None = None) -> bool:
        rows = [row for row in self._rows if row.request_id == request_id]
        for row in rows:
            row.is_aborted = True
        return bool(rows)

    def step(self, *, may_wait: Container[int] = ()) -> list[RequestOutput]:
        rows = self._rows[: self._num_seats]
        time.sleep(max(self._since + self._slice_seconds - time.perf_counter(), 0))
        self._since = time.perf_counter()
        self._stats = dataclasses.replace(self._stats, num_slices=self._stats.num_slices + 1)
        outputs = [self._advance(row) for row in rows]
        return [output for output in outputs if output.finished or output.request_id not in may_wait]

    def _advance(self, row: Row) -> RequestOutput:
        if not row.is_aborted:
            row.num_tokens = min(row.num_tokens + self._steps_per_slice, row.max_tokens)
        is_finished = row.is_aborted or row.num_tokens == row.max_tokens
        reason = ("abort" if row.is_aborted else "length") if is_finished else None
        if is_finished:
            self._rows.remove(row)
        return RequestOutput(row.request_id, [Completion(list(range(row.num_tokens)), None, reason)], is_finished)
