"""The scheduler: which request runs and which of its tokens are computed next, as a pytree, inside jit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._allocator.prefix_cache import PrefixCache
from jaxpaged._integers import as_int32, checked_array, checked_size
from jaxpaged._public_state import public_state
from jaxpaged._scheduler import inspection, planning, progress, seats, submission
from jaxpaged._scheduler.arrays import per_seat
from jaxpaged._scheduler.records import MOST_ADAPTERS, Outbox, Requests, RequestStatus, Sampling, StepPlan
from jaxpaged._scheduler.state import Prefixes, SchedulerState, empty_outbox


@public_state
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scheduler(SchedulerState):
    """Continuous batching: which request has which seat, and which tokens the next step computes. Immutable.

    The seats are the rows of a `BlockAllocator` that nothing else uses. The scheduler knows no model: `plan` says which
    tokens to compute, you compute them and sample, and `commit` gets the sampled tokens.

    There are no phases. A request knows its prompt and its generated tokens; the first `allocator.lengths` of them, in
    the row of its seat, are computed. Prompts, decoding and recomputation after a preemption are the same thing: known
    tokens that are not computed yet.

    Attributes:
        tokens: int32 `[requests, max_length]`, the known tokens of each request, from the start of its row.
        num_known: int32 `[requests]`, the number of known tokens.
        prompt_lengths: int32 `[requests]`, the number of tokens in each prompt as submitted.
        limits: int32 `[requests]`, the most known tokens: the prompt and the new tokens requested.
        stop_ids: int32 `[requests, num_stop_ids]`, tokens that end the request; -1: none.
        sampling: how to sample for each request.
        statuses: int32 `[requests]`, the `RequestStatus` of each request.
        arrivals: int32 `[requests]`, a number that grows with each request submitted.
        keys: int32 `[requests]`, arrival minus head start: requests are served in this order, and by arrival if equal.
        order: int32 `[requests]`, request ids in order of rank. Only `submit` changes it.
        ranks: int32 `[requests]`, each request's index in `order`.
        seated: int32 `[seats]`, the id of the request in each seat; `max_requests` if the seat is free.
        was_refused: bool `[]`, whether the last plan had too few blocks for a seated request.
        outbox: int32 `[max_steps, 2, seats * (num_drafts + 1)]`: `outbox_tokens` and `outbox_request_ids`.
        next_arrival: int32 `[]`.
        counters: int32 `[4]`: `num_steps`, `num_computed`, `num_recomputed` and `num_preempted`.
        prefixes: the prefix cache, and what it tracks for each seat. None: no prefix cache.

    `broken_invariants` checks that all of this is consistent. `docs/scheduler.md` states the policy, proves that each
    accepted request ends, and says what it costs.
    """

    @classmethod
    def create(
        cls,
        *,
        max_requests: int,
        num_seqs: int,
        max_length: int,
        max_steps: int = 64,
        num_stop_ids: int = 4,
        num_drafts: int = 0,
        prefix_cache: PrefixCache | None = None,
        num_adapters: int = 0,
    ) -> Scheduler:
        """A scheduler without requests.

        Args:
            max_requests: the most requests that it holds at once: waiting, running, and finished but not drained.
            num_seqs: the requests that run at once: the number of seats, and `num_seqs` of the allocator.
            max_length: the most tokens of a request, prompt and generated ones together.
            max_steps: the most steps between two drains.
            num_stop_ids: the most stop ids of a request.
            num_drafts: the most drafts of a seat in a step: tokens that are computed before they are known.
            prefix_cache: an empty one of the allocator's sizes. Requests then begin with blocks in which others
                computed the same tokens, and only `change_seats` gives out seats. None: each request computes its own.
            num_adapters: the adapters that requests can name; each has prefixes of its own.

        Raises:
            ValueError: a size that is no int or below 1 (`num_stop_ids`, `num_drafts`, `num_adapters`: below 0), more
                than 65,536 adapters, or `max_length` smaller than a block of the prefix cache.

        Example:
            >>> import jax, jax.numpy as jnp, jaxpaged
            >>> from jaxpaged.scheduling import Requests, RequestStatus, Scheduler
            >>> allocator = jaxpaged.BlockAllocator.create(num_blocks=8, block_size=4, num_seqs=2, max_blocks_per_seq=4)
            >>> scheduler = Scheduler.create(max_requests=4, num_seqs=2, max_length=16)
            >>> def one_step(state):
            ...     scheduler, allocator = state
            ...     scheduler = scheduler.admit(allocator)
            ...     scheduler, allocator, step = scheduler.plan(allocator, chunk_tokens=1)
            ...     sampled = step.tokens[step.last] + 1  # the model
            ...     return scheduler.commit(allocator, step, sampled)
            >>> @jax.jit
            ... def serve(scheduler, allocator, requests):
            ...     scheduler, ids, submit_statuses = scheduler.submit(allocator, requests)
            ...     state = jax.lax.while_loop(lambda state: state[0].has_work, one_step, (scheduler, allocator))
            ...     return state[0].drain()
            >>> prompts, lengths = jnp.array([[11, 12, 13, 14], [21, 22, 0, 0]]), jnp.array([4, 2])
            >>> requests = Requests(prompts, lengths, max_new_tokens=jnp.array([2, 1]))
            >>> scheduler, outbox = serve(scheduler, allocator, requests)
            >>> outbox.request_ids[:3].tolist(), outbox.tokens[:3].tolist()  # 4: nothing was sampled
            ([[4, 4], [0, 1], [0, 4]], [[-1, -1], [15, 23], [16, -1]])
            >>> [RequestStatus(status).name for status in outbox.finished[:2].tolist()]
            ['EXHAUSTED', 'EXHAUSTED']
        """
        max_requests, num_seqs = checked_size("max_requests", max_requests), checked_size("num_seqs", num_seqs)
        max_length, max_steps = checked_size("max_length", max_length), checked_size("max_steps", max_steps)
        num_stop_ids = checked_size("num_stop_ids", num_stop_ids, 0)
        num_drafts = checked_size("num_drafts", num_drafts, 0)
        num_adapters = checked_size("num_adapters", num_adapters, 0, MOST_ADAPTERS)
        prefixes = None
        if prefix_cache is not None:
            if max_length < (block_size := prefix_cache.cached.tokens.shape[1]):
                raise ValueError(f"nothing would ever be cached: {max_length=} is less than a block of {block_size}.")
            prefixes = Prefixes.create(
                prefix_cache, max_requests=max_requests, num_seqs=num_seqs, num_adapters=num_adapters
            )

        # One array each: two leaves that are one buffer cannot both be donated.
        def full(*shape: int, value: int = 0) -> jax.Array:
            return jnp.full(shape, value, jnp.int32)

        return cls(
            tokens=full(max_requests, max_length),
            num_known=full(max_requests),
            prompt_lengths=full(max_requests),
            limits=full(max_requests),
            stop_ids=full(max_requests, num_stop_ids, value=-1),
            sampling=Sampling.create(max_requests),
            statuses=full(max_requests, value=int(RequestStatus.FREE)),
            arrivals=full(max_requests),
            keys=full(max_requests),
            order=jnp.arange(max_requests, dtype=jnp.int32),
            ranks=jnp.arange(max_requests, dtype=jnp.int32),
            seated=full(num_seqs, value=max_requests),
            was_refused=jnp.zeros((), jnp.bool_),
            outbox=empty_outbox(max_steps, num_seqs * (num_drafts + 1), max_requests),
            next_arrival=full(),
            counters=full(4),
            prefixes=prefixes,
        )

    def num_pending(self, allocator: BlockAllocator) -> jax.Array:
        """The tokens of seated requests that await a chunk, beyond one a seat, int32 `[]`."""
        needed = per_seat(self, self.num_known) - allocator.lengths
        return jnp.maximum(needed - 1, 0).sum(dtype=jnp.int32)

    def submit(self, allocator: BlockAllocator, requests: Requests) -> tuple[Scheduler, jax.Array, jax.Array]:
        """Adds requests, in the order of the rows. Refuses only what can never be served.

        Args:
            allocator: only its sizes are read.
            requests: the new requests.

        Returns:
            scheduler: the new one.
            request_ids: int32 `[rows]`, the names of the requests in `abort` and in the outbox; `max_requests` if
                refused. An id is free again once a `drain` has returned the end of its request.
            submit_statuses: int32 `[rows]`, a `SubmitStatus` each; 0 if accepted.

        Raises:
            ValueError: `requests` is no `Requests`, shapes or dtypes that do not fit, or an allocator with another
                number of rows.

        Example: see `create`.
        """
        self._check(allocator)
        return submission.submit(self, allocator, submission.checked(self, requests))

    def abort(self, allocator: BlockAllocator, requests: ArrayLike) -> tuple[Scheduler, BlockAllocator]:
        """Ends the marked requests and frees their blocks. Requests that neither wait nor run stay as they are.

        Args:
            requests: bool `[max_requests]`.

        Raises:
            ValueError: `requests` is not bool `[max_requests]`, or an allocator with another number of rows.
        """
        self._check(allocator)
        marked = checked_array("requests", requests, self.max_requests, dtype=jnp.bool_)
        return progress.abort(self, allocator, marked)

    def admit(self, allocator: BlockAllocator, *, is_open: ArrayLike = True) -> Scheduler:
        """Gives free seats to waiting requests. Call it before each `plan`.

        They enter in order of rank, without overtaking, while the free blocks suffice for all known tokens, theirs and
        the seated requests', and a spare block each. After a plan that refused blocks to a seat, none is admitted.

        With a prefix cache it changes nothing, because `change_seats` admits.

        Args:
            allocator: only what it holds is read.
            is_open: bool `[]`; False admits none.

        Raises:
            ValueError: an allocator with another number of rows.

        Example: see `create`.
        """
        self._check(allocator)
        return self if self.prefixes is not None else planning.admit(self, allocator, is_open)

    def plan(
        self,
        allocator: BlockAllocator,
        *,
        chunk_tokens: int = 0,
        width: int | None = None,
        drafts: ArrayLike | None = None,
    ) -> tuple[Scheduler, BlockAllocator, StepPlan]:
        """Decides what the next step computes, and makes room for it.

        1. Each seat with tokens to compute gets one. With chunks, the remaining rows of the step go to the seats that
           have more, in order of rank.
        2. Blocks are granted in order of rank. A seat that finds too few gets nothing in this step. The request last in
           rank that holds blocks, but never the first in rank, is then the victim: `commit` preempts it.
        3. Rows that are left go to the drafts of seats whose known tokens are all computed: to the first of each seat,
           then to the second, and so on. They never cost another request its blocks.

        Only requests with a seat get tokens: call `admit` or `change_seats` before. Call `commit` after each plan,
        because planned tokens count as computed. When the outbox is full, steps are empty until
        you `drain`.

        Args:
            allocator: the allocator whose rows are the seats.
            chunk_tokens: the step has `num_seqs + chunk_tokens` rows (static). 0: one row for each seat, row i
                for seat i, and no seat gets more than one token.
            width: fewer rows than that (static), for steps in which few seats are occupied or few prompt tokens
                wait. Tokens are packed in seat order. If seats outnumber the rows, the first in rank that need a
                token get one.
            drafts: int32 `[seats, num_drafts]`, guesses of the tokens that follow each seat's known ones; the first -1
                ends them. None: no drafts. A step with drafts has `chunk_tokens`.

        Returns:
            scheduler, allocator: the new ones, for the `commit` of this step.
            step: what to compute. Pass its `query_starts` and `allocator.lengths` to `paged_attention`.

        Raises:
            ValueError: `chunk_tokens` is no int or negative, `width` is no int below `num_seqs + chunk_tokens`,
                `drafts` of another shape or dtype or without `chunk_tokens`, or an allocator with another number of
                rows.

        Example: see `create`.
        """
        self._check(allocator)
        if drafts is not None:
            drafts, shape = as_int32(drafts), (self.num_seqs, self.num_drafts)
            if drafts.shape != shape or drafts.dtype != jnp.int32 or self.num_drafts == 0:
                raise ValueError(
                    f"drafts must be int32 {list(shape)}, num_drafts for each seat, at least 1; got {drafts.dtype} "
                    f"{list(drafts.shape)}. Create the scheduler with num_drafts."
                )
            if chunk_tokens == 0:
                raise ValueError("a step with drafts is a step with chunks; pass chunk_tokens of at least 1.")
        most = self.num_seqs + checked_size("chunk_tokens", chunk_tokens, 0)
        if width is None:
            width = most
        elif checked_size("width", width) >= most:
            raise ValueError(f"width is for steps of fewer rows than num_seqs + chunk_tokens, {most}; got {width=}.")
        return planning.plan(self, allocator, width, is_mixed=chunk_tokens > 0, drafts=drafts)

    def commit(self, allocator: BlockAllocator, step: StepPlan, tokens: ArrayLike) -> tuple[Scheduler, BlockAllocator]:
        """Takes the tokens sampled in a step: requests grow by a token, end, or are preempted.

        A request with drafts grows by the tokens that equal its drafts, up to the first that does not or that ends it,
        and by that one. The room of the other drafts is given back, and what was written there is written again.

        A request ends with the first of its stop ids, which stays its last token, or once it has all its new tokens;
        its blocks are then free. A preempted request waits again and keeps its rank and its tokens. Requests aborted
        after the plan get nothing.

        Args:
            allocator: as `plan` returned it.
            step: what `plan` returned.
            tokens: int32 `[seats]`; read where `step.is_sampled`. With drafts int32 `[seats, num_drafts + 1]`: what was
                sampled at a seat's last known token and then at each of its drafts.

        Raises:
            ValueError: `tokens` is of another shape or dtype, or an allocator with another number of rows.

        Example: see `create`.
        """
        self._check(allocator)
        sampled, shape = as_int32(tokens), (self.num_seqs, self.num_drafts + 1)
        if sampled.shape not in (shape[:1], shape) or sampled.dtype != jnp.int32:
            wanted = f"[{self.num_seqs}]" + (f" or {list(shape)}" if self.num_drafts else "")
            raise ValueError(f"tokens must be int32 {wanted}; got {sampled.dtype} {list(sampled.shape)}.")
        return progress.commit(self, allocator, step, sampled)

    def change_seats(self, allocator: BlockAllocator) -> tuple[Scheduler, BlockAllocator]:
        """With a prefix cache: requests leave and enter the running batch.

        Call it when `is_change_due`, before the next `plan` and before a `drain`; most steps do not need it. Until
        then, a request that ended or was preempted keeps its blocks, its end is not drained, and none is admitted.

        1. The full blocks of all seats are inserted into the prefix cache. The blocks of requests that left are free.
        2. Waiting requests are admitted by the rule of `admit`, each with the blocks that are found for it. A block
           that another request holds costs nothing. While a request before it in rank computes the first block that it
           lacks, a request waits and lets others pass.

        Args:
            allocator: the allocator whose rows are the seats.

        Raises:
            ValueError: the scheduler has no prefix cache, or one of other sizes than the allocator; an allocator with
                another number of rows.

        Example:
            >>> import jax, jax.numpy as jnp, jaxpaged
            >>> from jaxpaged.scheduling import Requests, Scheduler
            >>> allocator = jaxpaged.BlockAllocator.create(num_blocks=9, block_size=4, num_seqs=2, max_blocks_per_seq=4)
            >>> prefix_cache = jaxpaged.PrefixCache.create(num_blocks=9, block_size=4)
            >>> scheduler = Scheduler.create(max_requests=4, num_seqs=2, max_length=16, prefix_cache=prefix_cache)
            >>> @jax.jit
            ... def one_step(scheduler, allocator):
            ...     scheduler, allocator = scheduler.change_seats(allocator)
            ...     scheduler, allocator, step = scheduler.plan(allocator, chunk_tokens=10)
            ...     scheduler, allocator = scheduler.commit(allocator, step, jnp.array([5, 6]))
            ...     return scheduler, allocator, (step.seats < 2).sum()
            >>> prompts = jnp.full((2, 10), 7)  # two equal ones of ten tokens
            >>> requests = Requests(prompts, prompt_lengths=jnp.int32(10), max_new_tokens=jnp.int32(3))
            >>> scheduler, *_ = jax.jit(Scheduler.submit)(scheduler, allocator, requests)
            >>> computed = []  # tokens in each step
            >>> while scheduler.has_work:
            ...     scheduler, allocator, num_tokens = one_step(scheduler, allocator)
            ...     computed.append(int(num_tokens))
            >>> computed  # the second waits for the first, and computes only the end of its prompt
            [10, 3, 2, 1]
        """
        self._check(allocator)
        if self.prefixes is None:
            raise ValueError("seats change by themselves: create the scheduler with a prefix_cache to call this.")
        self.prefixes.cache.check_sizes(allocator)
        return seats.change_seats(self, self.prefixes, allocator)

    def forget_prefixes(self, forgets: ArrayLike = True) -> Scheduler:
        """Forgets every cached block, for instance because the weights changed. Running requests keep theirs.

        Requests that begin later find only each other's blocks.

        Args:
            forgets: bool `[]`; False changes nothing. Or bool `[1 + num_adapters]`: whether to forget what was computed
                without an adapter, and with each.

        Raises:
            ValueError: the scheduler has no prefix cache.
        """
        if self.prefixes is None:
            raise ValueError("there is nothing to forget: create the scheduler with a prefix_cache to call this.")
        salt, forgets = self.prefixes.salt, jnp.asarray(forgets)
        salt = jnp.where(forgets, salt + len(salt), salt)  # a salt that was never used
        forgetful = dataclasses.replace(self, prefixes=dataclasses.replace(self.prefixes, salt=salt))
        return planning.with_due(forgetful, forgets.any())

    def drain(self) -> tuple[Scheduler, Outbox]:
        """Empties the outbox and frees the places of finished requests.

        Returns:
            scheduler: the new one.
            outbox: what was sampled since the last drain, and which requests ended. It shares no buffer with the
                scheduler, so the host may read it while the scheduler is donated to the next call.

        Example: see `create`.
        """
        return progress.drain(self)

    def broken_invariants(self, allocator: BlockAllocator) -> tuple[str, ...]:
        """The names of broken invariants; empty if all is well. Runs on the host, for tests."""
        return inspection.broken_invariants(self, allocator)

    def __str__(self) -> str:
        return inspection.describe(self)

    def _check(self, allocator: BlockAllocator) -> None:
        num_seqs = allocator.lengths.shape[0]
        if num_seqs != self.num_seqs:
            raise ValueError(
                f"the scheduler and its allocator must have the same num_seqs; got {num_seqs=} of the allocator, "
                f"{self.num_seqs} of the scheduler."
            )
