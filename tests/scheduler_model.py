"""What the scheduler must do, in dicts and lists, one request after the other; and the bound on its progress."""

import dataclasses

from jaxpaged import Refusal, RequestStatus
from tests.allocator_model import Model


@dataclasses.dataclass
class Request:
    tokens: list[int]
    limit: int
    stop_ids: list[int]
    key: int
    arrival: int
    status: RequestStatus = RequestStatus.WAITING

    @property
    def rank(self) -> tuple[int, int]:
        return self.key, self.arrival

    @property
    def is_live(self) -> bool:
        return self.status in (RequestStatus.WAITING, RequestStatus.RUNNING)


@dataclasses.dataclass
class Planned:
    tokens: list[list[int]]  # of each seat
    positions: list[list[int]]
    slots: list[list[int]]
    sampled: list[int]  # seats
    victim: int | None


class SchedulerModel:
    def __init__(self, max_requests: int, num_seats: int, max_tokens: int, max_steps: int, pool: Model):
        self.max_requests, self.max_tokens, self.max_steps, self.pool = max_requests, max_tokens, max_steps, pool
        self.requests: dict[int, Request] = {}
        self.seats: list[int | None] = [None] * num_seats
        self.was_refused = False
        self.next_arrival = 0
        self.steps: list[dict[int, int]] = []  # request -> token
        self.num_computed = self.num_recomputed = self.num_preempted = 0
        self.first: int | None = None  # in rank of the seated, since so many steps, and refused so often in a row
        self.steps_as_first = self.refused_in_a_row = self.bound = 0

    # Requests come and go.

    def submit(
        self, prompt: list[int], width: int, max_new_tokens: int, priority: int, stop_ids: list[int]
    ) -> tuple[int, Refusal]:
        limit = len(prompt) + max_new_tokens
        free = [i for i in range(self.max_requests) if i not in self.requests]
        if not prompt:
            return self.max_requests, Refusal.NO_PROMPT
        if max_new_tokens < 1:
            return self.max_requests, Refusal.NO_NEW_TOKENS
        if limit > self.max_tokens or len(prompt) > width:
            return self.max_requests, Refusal.TOO_LONG
        if not self.fits(limit):
            return self.max_requests, Refusal.NEVER_FITS
        if not free:
            return self.max_requests, Refusal.QUEUE_FULL
        key = self.key(self.next_arrival, priority)
        self.requests[free[0]] = Request(list(prompt), limit, stop_ids, key, self.next_arrival)
        self.next_arrival += 1
        return free[0], Refusal.ACCEPTED

    # The rules that are a line each stand by themselves, so that a test can change one.

    def fits(self, limit: int) -> bool:
        return self.pool.num_blocks_of(limit - 1) <= min(self.pool.num_blocks - 1, self.pool.max_blocks)

    def key(self, arrival: int, priority: int) -> int:
        return arrival - priority

    def finished(self) -> list[int]:
        return [i for i, request in self.requests.items() if not request.is_live]

    def ends(self, request: Request) -> RequestStatus:
        if request.tokens[-1] in request.stop_ids:
            return RequestStatus.STOPPED
        return RequestStatus.EXHAUSTED if len(request.tokens) == request.limit else request.status

    def to_share(self) -> list[int]:
        return self.seated()

    def to_grant(self) -> list[int]:
        return self.seated()

    def victim(self, holders: list[int]) -> int:
        return holders[-1]

    def abort(self, marked: list[int]) -> None:
        marked = [i for i in marked if i in self.requests and self.requests[i].is_live]
        for i in marked:
            self.requests[i].status = RequestStatus.ABORTED
        self.leave([seat for seat, i in enumerate(self.seats) if i in marked])

    def leave(self, seats: list[int]) -> None:
        self.pool.free_rows([seat in seats for seat in range(len(self.seats))])
        self.seats = [None if seat in seats else i for seat, i in enumerate(self.seats)]

    def drain(self) -> tuple[list[dict[int, int]], dict[int, RequestStatus]]:
        finished = {i: self.requests.pop(i).status for i in self.finished()}
        steps, self.steps = self.steps, []
        return steps, finished

    # A step.

    def seated(self) -> list[int]:
        """Seats that are taken, in order of rank."""
        taken = [seat for seat, i in enumerate(self.seats) if i is not None]
        return sorted(taken, key=lambda seat: self.requests[self.seats[seat]].rank)

    def waiting(self) -> list[int]:
        ids = [i for i, request in self.requests.items() if request.status == RequestStatus.WAITING]
        return sorted(ids, key=lambda i: self.requests[i].rank)

    def needed(self, seat: int) -> int:
        i = self.seats[seat]
        return 0 if i is None else len(self.requests[i].tokens) - len(self.pool.tokens[seat])

    def reserve(self, i: int) -> int:
        request = self.requests[i]
        return min(self.pool.num_blocks_of(len(request.tokens)) + 1, self.pool.num_blocks_of(request.limit - 1))

    def admit(self) -> None:
        if self.was_refused:
            return
        for i in self.waiting():
            request = self.requests[i]
            left = len(self.pool.free)
            left -= sum(self.reserve(self.seats[s]) - len(self.pool.blocks[s]) for s in self.seated())
            enters = self.pool.num_blocks_of(min(len(request.tokens) + 1, request.limit - 1))
            if None not in self.seats or enters > left:
                return
            self.seats[self.seats.index(None)] = i
            request.status = RequestStatus.RUNNING

    def plan(self, chunk_tokens: int, num_places: int | None = None) -> Planned:
        planned = Planned([[] for _ in self.seats], [[] for _ in self.seats], [[] for _ in self.seats], [], None)
        if len(self.steps) == self.max_steps:
            return planned
        self.admit()
        order = self.seated()
        served = [seat for seat in self.to_share() if self.needed(seat)][:num_places]
        given = {seat: int(seat in served) for seat in order}
        places = len(self.seats) + chunk_tokens - sum(given.values()) if chunk_tokens else 0
        for seat in self.to_share():
            more = min(self.needed(seat) - given[seat], places)
            given[seat] += more
            places -= more

        lengths, order = self.pool.lengths, self.to_grant()
        blocks = [self.pool.num_blocks_of(lengths[s] + given[s]) - len(self.pool.blocks[s]) for s in order]
        oks = self.pool.grant(blocks)
        self.was_refused = not all(oks)
        self.watch_progress(given, dict(zip(order, oks, strict=True)), chunk_tokens, num_places)
        for seat, need, ok in zip(order, blocks, oks, strict=True):
            if ok:
                known = self.requests[self.seats[seat]].tokens
                if self.needed(seat) == given[seat] > 0:
                    planned.sampled.append(seat)
                self.pool.blocks[seat] += [self.pool.take() for _ in range(need)]
                planned.positions[seat] = list(range(lengths[seat], lengths[seat] + given[seat]))
                planned.tokens[seat] = [known[position] for position in planned.positions[seat]]
                self.pool.tokens[seat] = self.pool.tokens[seat] + planned.tokens[seat]
                planned.slots[seat] = [self.pool.slot(seat, position) for position in planned.positions[seat]]
                self.num_computed += given[seat]
        first, *others = self.seated() or [None]
        holders = [seat for seat in others if self.pool.blocks[seat]]
        assert holders or dict(zip(order, oks, strict=True)).get(first, True)  # else nothing could free blocks for it
        if self.was_refused and holders:
            planned.victim = self.victim(holders)
        return planned

    def watch_progress(
        self, given: dict[int, int], oks: dict[int, bool], chunk_tokens: int, num_places: int | None
    ) -> None:
        """Asserts that the first in rank of the seated ends within its bound."""
        order = self.seated()
        if not order:
            self.first = None
            return
        first, request = order[0], self.requests[self.seats[order[0]]]
        others = len(self.seats) - 1
        if self.first != request.arrival:
            self.first, self.steps_as_first, self.refused_in_a_row = request.arrival, 0, 0
            new_blocks = self.pool.num_blocks_of(request.limit - 1) - len(self.pool.blocks[first])
            self.bound = self.needed(first) + request.limit - len(request.tokens) + others * new_blocks
        self.steps_as_first += 1
        self.refused_in_a_row = 0 if oks[first] else self.refused_in_a_row + 1
        assert self.refused_in_a_row <= others
        assert self.steps_as_first <= self.bound
        assert given[first] >= min(self.needed(first), 1 + chunk_tokens)
        assert all(given[seat] >= 1 for seat in order[:num_places])  # nobody who has a seat is starved

    def commit(self, planned: Planned, sampled: list[int], request_ids: list[int | None]) -> None:
        """`request_ids`: who had the seats when it was planned."""
        here = [i is not None and i == self.seats[seat] for seat, i in enumerate(request_ids)]
        step, leaving = {}, []
        for seat in planned.sampled:
            if not here[seat]:
                continue
            i, token = self.seats[seat], sampled[seat]
            request = self.requests[i]
            request.tokens.append(token)
            step[i] = token
            request.status = self.ends(request)
            if not request.is_live:
                leaving.append(seat)
        victim = planned.victim
        if victim is not None and here[victim] and victim not in leaving:
            self.num_preempted += 1
            self.num_recomputed += self.pool.lengths[victim]
            self.requests[self.seats[victim]].status = RequestStatus.WAITING
            leaving.append(victim)
        self.leave(leaving)
        if len(self.steps) < self.max_steps:
            self.steps.append(step)
