"""A model of the scheduler in dicts and lists, one request at a time, with a bound on its progress."""

import dataclasses

from jaxpaged.scheduling import RequestStatus, SubmitStatus
from tests.allocator_model import Model


@dataclasses.dataclass
class Request:
    tokens: list[int]
    prompt_length: int
    limit: int
    stop_ids: list[int]
    key: int
    arrival: int
    adapter: int
    status: RequestStatus = RequestStatus.WAITING

    @property
    def rank(self) -> tuple[int, int]:
        return self.key, self.arrival

    @property
    def is_live(self) -> bool:
        return self.status in (RequestStatus.WAITING, RequestStatus.RUNNING)


@dataclasses.dataclass
class Planned:
    tokens: list[list[int]]  # tokens of each seat
    positions: list[list[int]]
    slots: list[list[int]]
    drafts: list[list[int]]  # the last tokens of each seat
    sampled: list[int]  # seats
    victim: int | None


class SchedulerModel:
    has_cache = False

    def __init__(self, max_requests: int, num_seats: int, max_length: int, max_steps: int, pool: Model):
        self.max_requests, self.max_length, self.max_steps, self.pool = max_requests, max_length, max_steps, pool
        self.requests: dict[int, Request] = {}
        self.seats: list[int | None] = [None] * num_seats
        self.was_refused = False
        self.next_arrival = 0
        self.steps: list[dict[int, list[int]]] = []  # request -> its tokens
        self.num_computed = self.num_recomputed = self.num_preempted = self.num_accepted = 0
        self.first: int | None = None  # first in rank of the seated; for how many steps; refusals in a row
        self.steps_as_first = self.refused_in_a_row = self.bound = 0

    # Arrival and end of requests

    def submit(
        self,
        prompt: list[int],
        width: int,
        max_new_tokens: int,
        head_start: int,
        stop_ids: list[int],
        adapter: int = -1,
    ) -> tuple[int, SubmitStatus]:
        limit = len(prompt) + max_new_tokens
        free = [i for i in range(self.max_requests) if i not in self.requests]
        if not prompt:
            return self.max_requests, SubmitStatus.NO_PROMPT
        if max_new_tokens < 1:
            return self.max_requests, SubmitStatus.NO_NEW_TOKENS
        if limit > self.max_length or len(prompt) > width:
            return self.max_requests, SubmitStatus.TOO_LONG
        if not self.fits(limit):
            return self.max_requests, SubmitStatus.NEVER_FITS
        if not free:
            return self.max_requests, SubmitStatus.QUEUE_FULL
        key = self.key(self.next_arrival, head_start)
        self.requests[free[0]] = Request(list(prompt), len(prompt), limit, stop_ids, key, self.next_arrival, adapter)
        self.next_arrival += 1
        return free[0], SubmitStatus.ACCEPTED

    # Each one-line rule is a method, so that a test can change it.

    def fits(self, limit: int) -> bool:
        return self.pool.num_blocks_for(limit - 1) <= min(self.pool.num_blocks - 1, self.pool.max_blocks)

    def key(self, arrival: int, head_start: int) -> int:
        return arrival - head_start

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

    def leave_after_commit(self, sampled: list[int], leaving: list[int]) -> None:
        self.leave(leaving)

    def leave(self, seats: list[int]) -> None:
        self.pool.free_rows([seat in seats for seat in range(len(self.seats))])
        self.seats = [None if seat in seats else i for seat, i in enumerate(self.seats)]

    def drain(self) -> tuple[list[dict[int, list[int]]], dict[int, RequestStatus]]:
        finished = {i: self.requests.pop(i).status for i in self.finished()}
        steps, self.steps = self.steps, []
        return steps, finished

    # A step

    def seated(self) -> list[int]:
        """Occupied seats, in order of rank."""
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
        return min(self.pool.num_blocks_for(len(request.tokens)) + 1, self.pool.num_blocks_for(request.limit - 1))

    def admit(self) -> None:
        if self.was_refused:
            return
        for i in self.waiting():
            request = self.requests[i]
            left = len(self.pool.free)
            left -= sum(self.reserve(self.seats[s]) - len(self.pool.blocks[s]) for s in self.seated())
            enters = self.pool.num_blocks_for(min(len(request.tokens) + 1, request.limit - 1))
            if None not in self.seats or enters > left:
                return
            self.seats[self.seats.index(None)] = i
            request.status = RequestStatus.RUNNING

    def grant_drafts(
        self, guesses: list[list[int]], given: dict[int, int], num_rows: int
    ) -> tuple[list[list[int]], dict[int, int]]:
        """The drafts of each seat, and the number of its tokens with them."""
        drafts: list[list[int]] = [[] for _ in self.seats]
        for turn, seat in self.turns(guesses):
            is_next = (
                given.get(seat, 0) > 0 and self.needed(seat) == given[seat] and -1 not in guesses[seat][: turn + 1]
            )
            if num_rows and is_next and self.may_follow(self.requests[self.seats[seat]], turn + 1):
                drafts[seat].append(guesses[seat][turn])
                num_rows -= 1
        lengths = self.pool.lengths
        blocks = [
            self.pool.num_blocks_for(lengths[s] + given.get(s, 0) + len(of_seat)) - len(self.pool.blocks[s])
            for s, of_seat in enumerate(drafts)
        ]
        if self.exceeds_the_pool(sum(blocks)):
            for s, of_seat in enumerate(drafts):
                known = lengths[s] + given.get(s, 0)
                drafts[s] = of_seat[: self.pool.num_blocks_for(known) * self.pool.block_size - known]
        return drafts, {seat: given[seat] + len(drafts[seat]) for seat in given}

    def turns(self, guesses: list[list[int]]) -> list[tuple[int, int]]:
        return [(turn, seat) for turn in range(len(guesses[0])) for seat in range(len(guesses))]

    def may_follow(self, request: Request, turn: int) -> bool:
        return len(request.tokens) + turn < request.limit

    def exceeds_the_pool(self, num_blocks: int) -> bool:
        return num_blocks > len(self.pool.free)

    def accepts(self, draft: int, token: int, request: Request) -> bool:
        return draft == token and request.is_live

    def num_kept(self, request: Request) -> int:
        return len(request.tokens) - 1

    def plan(self, chunk_tokens: int, step_width: int | None = None, guesses: list[list[int]] | None = None) -> Planned:
        planned = Planned(*([[] for _ in self.seats] for _ in range(4)), [], None)
        self.admit()
        if len(self.steps) == self.max_steps:
            return planned
        order = self.seated()
        served = [seat for seat in self.to_share() if self.needed(seat)][:step_width]
        given = {seat: int(seat in served) for seat in order}
        most = len(self.seats) + chunk_tokens if step_width is None else step_width
        left = most - sum(given.values()) if chunk_tokens else 0
        for seat in self.to_share():
            more = min(self.needed(seat) - given[seat], left)
            given[seat] += more
            left -= more

        sampled = [seat for seat in order if self.needed(seat) == given[seat] > 0]
        if guesses is not None:
            planned.drafts, given = self.grant_drafts(guesses, given, most - sum(given.values()))

        lengths, order = self.pool.lengths, self.to_grant()
        blocks = [self.pool.num_blocks_for(lengths[s] + given[s]) - len(self.pool.blocks[s]) for s in order]
        oks = self.pool.grant(blocks)
        self.was_refused = not all(oks)
        self.watch_progress(given, dict(zip(order, oks, strict=True)), chunk_tokens, step_width)
        for seat, need, ok in zip(order, blocks, oks, strict=True):
            if ok:
                known = self.requests[self.seats[seat]].tokens + planned.drafts[seat]
                if seat in sampled:
                    planned.sampled.append(seat)
                self.pool.blocks[seat] += [self.pool.take() for _ in range(need)]
                planned.positions[seat] = list(range(lengths[seat], lengths[seat] + given[seat]))
                planned.tokens[seat] = [known[position] for position in planned.positions[seat]]
                self.pool.tokens[seat] = self.pool.tokens[seat] + planned.tokens[seat]
                planned.slots[seat] = [self.pool.slot(seat, position) for position in planned.positions[seat]]
                self.num_computed += given[seat]
            else:
                planned.drafts[seat] = []
        first, *others = self.seated() or [None]
        holders = [seat for seat in others if self.pool.blocks[seat]]
        assert holders or dict(zip(order, oks, strict=True)).get(first, True)  # else nothing could free blocks for it
        if self.was_refused and holders:
            planned.victim = self.victim(holders)
        return planned

    def watch_progress(
        self, given: dict[int, int], oks: dict[int, bool], chunk_tokens: int, step_width: int | None
    ) -> None:
        """Asserts that the first-ranked seated request ends within its bound."""
        order = self.seated()
        if not order:
            self.first = None
            return
        first, request = order[0], self.requests[self.seats[order[0]]]
        others = len(self.seats) - 1
        if self.first != request.arrival:
            self.first, self.steps_as_first, self.refused_in_a_row = request.arrival, 0, 0
            new_blocks = self.pool.num_blocks_for(request.limit - 1) - len(self.pool.blocks[first])
            self.bound = self.needed(first) + request.limit - len(request.tokens) + others * new_blocks
        self.steps_as_first += 1
        self.refused_in_a_row = 0 if oks[first] else self.refused_in_a_row + 1
        assert self.refused_in_a_row <= others
        assert self.steps_as_first <= self.bound
        assert given[first] >= min(self.needed(first), 1 + (chunk_tokens if step_width is None else 0))
        assert all(given[seat] >= 1 for seat in order[:step_width])  # no seat is starved

    def commit(self, planned: Planned, sampled: list[list[int]], request_ids: list[int | None]) -> None:
        """`request_ids` are the requests in the seats when the step was planned."""
        here = [i is not None and i == self.seats[seat] for seat, i in enumerate(request_ids)]
        step: dict[int, list[int]] = {}
        leaving = []
        behind: list[list[int]] = [[] for _ in self.seats]
        sampled_seats = [seat for seat in planned.sampled if here[seat]]
        for seat in sampled_seats:
            i = self.seats[seat]
            request = self.requests[i]
            step[i] = []
            for turn, token in enumerate(sampled[seat][: len(planned.drafts[seat]) + 1]):
                if turn and not self.accepts(planned.drafts[seat][turn - 1], sampled[seat][turn - 1], request):
                    break
                request.tokens.append(token)
                step[i].append(token)
                request.status = self.ends(request)
            self.num_accepted += len(step[i]) - 1
            if planned.drafts[seat]:
                self.pool.tokens[seat] = request.tokens[: self.num_kept(request)]
                num_held = self.pool.num_blocks_for(self.pool.lengths[seat])
                behind[seat] = self.pool.blocks[seat][num_held:]
                self.pool.blocks[seat] = self.pool.blocks[seat][:num_held]
            if not request.is_live:
                leaving.append(seat)
        self.pool.release(behind)
        victim = planned.victim
        if victim is not None and here[victim] and victim not in leaving:
            self.num_preempted += 1
            self.num_recomputed += self.pool.lengths[victim]
            self.requests[self.seats[victim]].status = RequestStatus.WAITING
            leaving.append(victim)
        self.leave_after_commit(sampled_seats, leaving)
        if len(self.steps) < self.max_steps:
            self.steps.append(step)


class PrefixSchedulerModel(SchedulerModel):
    """The model with the pool's prefix cache, which finds blocks by all tokens up to their end."""

    has_cache = True

    def __init__(self, max_requests: int, num_seats: int, max_length: int, max_steps: int, pool: Model):
        super().__init__(max_requests, num_seats, max_length, max_steps, pool)
        self.rounds, self.is_due = [0, 0, 0], False  # forgets of each adapter; the last entry is for no adapter
        self.num_inserted = [0.0] * num_seats  # full blocks inserted; infinite: none before the end
        self.left: list[int | None] = [None] * num_seats  # requests whose blocks stay until `change_seats`
        self.num_hits = self.num_lookups = 0

    # Causes of a change of seats

    def submit(self, *args) -> tuple[int, SubmitStatus]:
        request, refusal = super().submit(*args)
        self.is_due |= refusal == SubmitStatus.ACCEPTED
        return request, refusal

    def abort(self, marked: list[int]) -> None:
        self.is_due |= any(i in self.requests and self.requests[i].is_live for i in marked)
        super().abort(marked)

    def drain(self) -> tuple[list[dict[int, list[int]]], dict[int, RequestStatus]]:
        self.is_due |= None in self.seats and bool(self.waiting())
        return super().drain()

    def finished(self) -> list[int]:
        return [i for i in super().finished() if i not in self.left]

    def plan(self, *args) -> Planned:
        was_refused = self.was_refused
        planned = super().plan(*args)
        self.is_due |= was_refused and not self.was_refused
        return planned

    def leave_after_commit(self, sampled: list[int], leaving: list[int]) -> None:
        for seat in range(len(self.seats)):
            num_full = self.full(self.pool.lengths[seat])
            self.is_due |= num_full > self.num_inserted[seat]
            self.num_inserted[seat] = max(num_full, self.num_inserted[seat])
            if seat in sampled or seat in leaving:
                self.num_inserted[seat] = float("inf")
        for seat in leaving:
            self.left[seat], self.seats[seat] = self.seats[seat], None
            self.is_due = True

    # The change of seats

    def admit(self) -> None:
        pass  # not part of planning

    def change_seats(self) -> None:
        self.list_blocks()
        self.pool.free_rows([i is not None for i in self.left])
        self.left = [None] * len(self.seats)
        candidates = self.waiting()[: len(self.seats)]
        if not self.was_refused:
            for i in candidates:
                if not self.is_held_back(i, candidates) and not self.enter(i):
                    break
        self.is_due = False

    def list_blocks(self) -> None:
        self.pool.insert(self.max_length)

    def salt(self, i: int) -> tuple[int, int]:
        adapter = self.requests[i].adapter
        return adapter, self.rounds[adapter]

    def enter(self, i: int) -> bool:
        request, hits = self.requests[i], self.found(i)
        needed = self.pool.num_blocks_for(min(len(request.tokens) + 1, request.limit - 1)) - self.saved(hits)
        left = len(self.pool.free)
        left -= sum(self.reserve(self.seats[s]) - len(self.pool.blocks[s]) for s in self.seated())
        if None not in self.seats or needed > left:
            return False
        seat = self.seats.index(None)
        self.seats[seat] = i
        request.status = RequestStatus.RUNNING
        prompts = [request.tokens if s == seat else [] for s in range(len(self.seats))]
        self.pool.match_prefix(prompts, [self.salt(i)] * len(self.seats))
        self.pool.salts[seat] = self.salt(i)
        self.num_inserted[seat] = len(hits)
        self.num_hits += len(hits)
        self.num_lookups += self.full(len(request.tokens) - 1)
        return True

    def found(self, i: int) -> list[int]:
        """The cached blocks of a request's tokens, except for the last token."""
        cached, hits = {key: block for block, key in self.pool.cached.items()}, []
        tokens = self.requests[i].tokens
        for column in range(self.full(len(tokens) - 1)):
            key = self.pool.key(self.salt(i), tokens, column)
            if key not in cached:
                break
            hits.append(cached[key])
        return hits

    def full(self, num_tokens: int) -> int:
        return num_tokens // self.pool.block_size

    def saved(self, hits: list[int]) -> int:
        """The number of blocks that need not be free because others hold them."""
        return sum(self.pool.holders[block] > 0 for block in hits)

    def is_held_back(self, i: int, candidates: list[int]) -> bool:
        """Whether an earlier request computes the first block that this one lacks."""
        tokens, column = self.requests[i].tokens, len(self.found(i))
        if column == self.full(len(tokens) - 1):
            return False
        key = self.pool.key(self.salt(i), tokens, column)
        computing = [(self.salt(j), j) for j in candidates]
        computing += [(self.pool.salts[s], self.seats[s]) for s in self.seated() if self.num_inserted[s] <= column]
        others = [(salt, self.requests[j].tokens) for salt, j in computing if self.comes_before(j, i)]
        return any(
            column < self.full(len(other)) and self.pool.key(salt, other, column) == key for salt, other in others
        )

    def comes_before(self, j: int, i: int) -> bool:
        return self.requests[j].rank < self.requests[i].rank

    def forget(self, adapters: list[int]) -> None:
        self.is_due |= bool(adapters)
        for adapter in adapters:
            self.rounds[adapter] += 1
