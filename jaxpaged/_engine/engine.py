"""The engine: the host's side of continuous batching. It submits and drains; which request runs is decided in jit."""

from __future__ import annotations

import dataclasses
import functools
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._allocator.prefix_cache import PrefixCache
from jaxpaged._cache.kv_cache import KVCache
from jaxpaged._engine.on_mesh import mesh_of, on_each_device, replicate
from jaxpaged._engine.progress import ProgressBar
from jaxpaged._engine.records import EngineStats, RequestOutput, SamplingParams
from jaxpaged._engine.requests import (
    FINISH_REASONS,
    Row,
    check_params,
    inbox_of,
    new_tokens,
    output_of,
    params_of_each,
    seed_of,
)
from jaxpaged._engine.slices import Apply, Inbox, Report, State, kinds_of_steps, run_slice
from jaxpaged._engine.trees import difference
from jaxpaged._integers import checked_size
from jaxpaged._scheduler.records import Refusal, RequestStatus
from jaxpaged._scheduler.scheduler import Scheduler

MOST_ARRIVALS = 64  # requests that a slice takes; more are fed by slices of no steps
AHEAD = 1  # slices that run while the host reads the one before


class Engine:
    """Continuous batching for a model: requests join and leave a running batch inside one compiled program.

    The program is a slice: up to `steps_per_slice` steps of the model, with everything that is decided between them.
    The host sends requests in with a slice, and reads what came of it while the next one runs. It is compiled once,
    when the engine is made.

    An engine is not thread-safe.

    Args:
        apply: the model over packed tokens, `caches, logits = apply(weights, tokens, positions, caches, attend)`.
            `tokens` and `positions` are int32 `[tokens]`; in each layer `cache, out = attend(q, k, v, cache)` writes
            to the cache and attends (`StepAttention`); `attend.newest(x)` is `[seqs, ...]` of x `[tokens, ...]`, from
            which the head makes the logits `[seqs, vocab]`. Traced for three numbers of tokens: `num_seats // 4`,
            `num_seats`, and `num_seats + chunk_tokens`. All of it but `attend` is on single tokens, so that padding
            disturbs nobody.
        weights: a pytree, handed to `apply`.
        caches: a pytree of `KVCache`s of the same number of blocks and the same block size. The engine takes them
            over: they are donated. If they lie over several devices, each runs `apply` inside `jax.shard_map` with its
            part of weights and caches (`docs/several_gpus.md`).
        num_seats: requests that run at once.
        max_length: the most tokens that a request may have, prompt and new ones.
        chunk_tokens: tokens of prompts that a step computes beside one of each seat. More makes long prompts faster,
            and the steps that they share slower.
        max_requests: requests that the device holds at once, running or waiting. None: four for each seat. Others wait
            on the host.
        steps_per_slice: steps between two looks of the host. New requests and aborts wait for the end of a slice.
        num_stop_ids: the most stop tokens that a request may have.
        prefix_cache: whether requests share the blocks of equal beginnings, instead of computing each its own.
        exact: whether a request's logprobs are equal to the last bit whatever shares its steps. Every step then has
            `num_seats + chunk_tokens` places, and attention one partition; `docs/engine.md` says what that costs.
        seed: of the requests that bring none.
        compiler_options: of `jax.jit`.

    Raises:
        ValueError: a size that is no int or below 1, caches that do not fit together, or an `apply` that does not
            return what it should.

    Example: see `docs/engine.md`.
    """

    def __init__(
        self,
        apply: Apply,
        weights: Any,
        caches: Any,
        *,
        num_seats: int,
        max_length: int,
        chunk_tokens: int = 256,
        max_requests: int | None = None,
        steps_per_slice: int = 32,
        num_stop_ids: int = 4,
        prefix_cache: bool = False,
        exact: bool = False,
        seed: int = 0,
        compiler_options: dict[str, Any] | None = None,
    ):
        num_seats = checked_size("num_seats", num_seats)
        max_requests = 4 * num_seats if max_requests is None else checked_size("max_requests", max_requests)
        num_blocks, block_size = _sizes_of(caches)
        max_length = checked_size("max_length", max_length)
        self._weights, self._seed, self._num_seats = _own(weights), seed, num_seats
        self._steps_per_slice = checked_size("steps_per_slice", steps_per_slice)
        self._max_length, self._num_blocks, self._block_size = max_length, num_blocks, block_size
        self._max_requests, self._num_stop_ids = max_requests, checked_size("num_stop_ids", num_stop_ids, 0)
        self._kinds = kinds_of_steps(num_seats, checked_size("chunk_tokens", chunk_tokens), exact=exact)
        self._state_of_slice = State(
            scheduler=Scheduler.create(
                max_requests=max_requests,
                num_seats=num_seats,
                max_length=max_length,
                max_steps=self._steps_per_slice,
                num_stop_ids=self._num_stop_ids,
                prefix_cache=PrefixCache.create(
                    num_blocks=num_blocks, block_size=block_size, secret=secrets.randbits(128)
                )
                if prefix_cache
                else None,
            ),
            allocator=BlockAllocator.create(
                num_blocks=num_blocks,
                block_size=block_size,
                num_seqs=num_seats,
                max_blocks_per_seq=min(-(-max_length // block_size), num_blocks - 1),
            ),
            caches=caches,
            logprobs=jnp.zeros((self._steps_per_slice, num_seats), jnp.float32),
            num_waited=jnp.zeros((), jnp.int32),
            num_of_kind=jnp.zeros(len(self._kinds), jnp.int32),
        )
        self._inbox_of = functools.partial(
            inbox_of,
            num_rows=min(MOST_ARRIVALS, max_requests),
            max_length=max_length,
            max_requests=max_requests,
            num_stop_ids=self._num_stop_ids,
        )
        no_news = self._inbox_of([], [], wants_logprobs=False, num_steps=0)
        function: Any = functools.partial(run_slice, apply, kinds=self._kinds)
        self._mesh = mesh_of(caches)
        if self._mesh is not None:
            self._weights, self._state_of_slice = replicate(self._mesh, (self._weights, self._state_of_slice))
            function = on_each_device(self._mesh, function, self._weights, self._state_of_slice)
        jitted = jax.jit(function, donate_argnums=1, compiler_options=compiler_options)
        # Compiled, and not jitted: another shape or dtype would be an error, and never a second program.
        self._run_slice = jitted.lower(self._weights, self._state_of_slice, no_news).compile()
        # A call with a loop in it returns when the loop ends. Meanwhile this thread does the host's work.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jaxpaged")

        self._queue: deque[Row] = deque()  # not on the device
        self._on_device: dict[int, Row] = {}  # by place, as far as the host has read
        self._under_way: deque[Slice] = deque()
        self._requests: dict[int, list[Row]] = {}  # unfinished, or with news
        self._news: dict[int, None] = {}  # requests with news, in the order in which they have them
        self._aborts: list[int] = []  # places, to be sent in with the next slice
        self._num_unfinished = self._num_sent = self._next_id = 0
        self._forgets = False  # whether the weights have changed since the last slice
        self._since = time.perf_counter()  # when the stats were last counted, or the first request came
        self._stats = EngineStats(num_blocks=num_blocks - 1, num_free_blocks=num_blocks - 1)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has still to be called: some request is not finished, or its end is not reported."""
        return bool(self._num_unfinished or self._news)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continues all prompts, and returns when the last is finished, in the order of the prompts.

        Args:
            prompts: the token ids of each; more of them than the device holds are fed to it bit by bit.
            params: of each prompt, or of all.
            progress: write a progress bar to stderr. For anything else there is `stream`.

        Raises:
            ValueError: a request that can never be served, before any is begun; or other requests under way.
        """
        self._add_all(prompts, params)
        outputs: dict[int, RequestOutput] = {}
        bar, num_generated = ProgressBar(len(prompts)) if progress else None, self._stats.num_generated
        while self.has_unfinished_requests:
            self._advance()
            outputs |= {output.request_id: output for output in self._news_of(finished_only=True)}
            if bar is not None:
                bar.show(len(outputs), self._stats.num_generated - num_generated)
        return [outputs[request_id] for request_id in sorted(outputs)]

    def stream(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> Iterator[RequestOutput]:
        """As `generate`, but yields each request whenever it has new tokens. Request ids are in the prompts' order."""
        self._add_all(prompts, params)
        while self.has_unfinished_requests:
            yield from self.step()

    def add_request(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Takes a request, and returns its id. It begins with the next slice that has room.

        Token ids are not compared with the vocabulary, which only the model knows.

        Raises:
            ValueError: the request can never be served; the message says why.
        """
        return self._add(*self._check(prompt, params))

    def abort(self, request_id: int, completion: int | None = None) -> None:
        """Ends a request, whose blocks are free within a slice. One that is finished or was never there stays so.

        Args:
            request_id: as `add_request` returned it.
            completion: only this one of its `n` completions, from 0 on; the others go on. None: all.
        """
        for index, row in enumerate(self._requests.get(request_id, [])):
            if row.finish_reason is not None or row.is_aborted or completion not in (None, index):
                continue
            row.is_aborted = True
            if row.place is not None:
                self._aborts.append(row.place)
        queued = [row for row in self._queue if row.is_aborted]
        self._queue = deque(row for row in self._queue if not row.is_aborted)
        for row in queued:
            self._finish(row, RequestStatus.ABORTED)

    def step(self) -> list[RequestOutput]:
        """Starts a slice, reads the one before it, and returns the requests that have news."""
        self._advance()
        return self._news_of(finished_only=False)

    def update_weights(self, weights: Any) -> None:
        """Other weights, of the same shapes, from the next slice on: nothing is compiled.

        Requests under way go on with the keys and values that the old weights made. Finish or abort them first where
        that must not be. A prefix cache finds nothing that was computed with the old weights, or begun with them.

        Raises:
            ValueError: weights of another structure, shape or dtype.
        """
        if found := difference(self._weights, weights):
            raise ValueError(f"weights must be like those before; {found}.")
        weights = _own(weights)
        self._weights, self._forgets = weights if self._mesh is None else replicate(self._mesh, weights), True

    def stats(self) -> EngineStats:
        """Counts, as of the last slice that was read."""
        num_waiting = len(self._on_device) - self._stats.num_running
        return dataclasses.replace(self._stats, num_queued=len(self._queue), num_waiting=max(num_waiting, 0))

    @property
    def _state(self) -> State:
        """The state, once the slices under way are over."""
        for under_way in self._under_way:
            under_way.report.result()
        return self._state_of_slice

    def _add_all(self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]) -> None:
        if self.has_unfinished_requests:
            raise ValueError(
                f"{self._num_unfinished} requests are under way; finish or abort them with step() and abort() first."
            )
        each = params_of_each(prompts, params)
        for request in [self._check(*request) for request in zip(prompts, each, strict=True)]:
            self._add(*request)

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> tuple[np.ndarray, SamplingParams]:
        tokens = np.asarray(prompt)
        if tokens.ndim != 1 or len(tokens) == 0 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"a prompt must be a list of at least one token id; got {prompt!r}.")
        if tokens.min() < 0 or tokens.max() >= 2**31:
            raise ValueError(f"token ids must be from 0 to 2**31 - 1; got {tokens.min()} to {tokens.max()}.")
        check_params(params)
        limit = len(tokens) + params.max_tokens
        if limit > self._max_length:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens and {params.max_tokens} new ones are more than the engine's "
                f"max_length={self._max_length}. Shorten one of them, or make an engine with a larger max_length."
            )
        num_needed = -(-(limit - 1) // self._block_size)  # the last token is never computed
        if num_needed > self._num_blocks - 1:
            raise ValueError(
                f"{limit} tokens need {num_needed} blocks of {self._block_size}, and the caches have "
                f"{self._num_blocks - 1} beside the null block. Make the engine with larger caches."
            )
        if len(params.stop_token_ids) > self._num_stop_ids:
            raise ValueError(
                f"a request has at most num_stop_ids={self._num_stop_ids} stop tokens; got {params.stop_token_ids}."
            )
        return tokens.astype(np.int32), params

    def _add(self, prompt: np.ndarray, params: SamplingParams) -> int:
        request_id = self._next_id
        self._next_id += 1
        if not self._num_unfinished:
            self._since = time.perf_counter()
        seed = params.seed
        if seed is None:
            seed = int(np.random.SeedSequence([self._seed, request_id]).generate_state(1)[0])
        rows = [Row(request_id, prompt, params, seed_of(seed, i)) for i in range(params.n)]
        self._requests[request_id] = rows
        self._queue.extend(rows)
        self._num_unfinished += len(rows)
        return request_id

    def _advance(self) -> None:
        self._send()
        while len(self._under_way) > AHEAD:
            self._receive()

    def _news_of(self, *, finished_only: bool) -> list[RequestOutput]:
        outputs = []
        for request_id in self._news:
            rows = self._requests[request_id]
            is_finished = all(row.finish_reason is not None for row in rows)
            if is_finished or not finished_only:
                outputs.append(output_of(request_id, rows))
            if is_finished:
                del self._requests[request_id]
        self._news.clear()
        return outputs

    def _send(self) -> None:
        """Starts a slice. Where more requests wait than it takes, slices of no steps before it take the others."""
        most = min(MOST_ARRIVALS, self._max_requests)
        while True:
            room = min(most, self._max_requests - self._num_sent)
            rows = [self._queue.popleft() for _ in range(min(room, len(self._queue)))]
            self._num_sent += len(rows)
            is_last = not self._queue or self._num_sent == self._max_requests
            wants_logprobs = any(row.params.logprobs for row in (*rows, *self._on_device.values()))
            wants_logprobs |= any(row.params.logprobs for sent in self._under_way for row in sent.rows)
            num_steps = self._steps_per_slice if is_last else 0
            inbox = self._inbox_of(
                rows, self._aborts, wants_logprobs=wants_logprobs, num_steps=num_steps, forgets=self._forgets
            )
            report = self._thread.submit(self._run, self._weights, inbox)
            self._under_way.append(Slice(rows, self._aborts, self._forgets, report))
            # Each abort is sent once, and before anybody else can have got the place.
            self._aborts, self._forgets = [], False
            if is_last:
                return

    def _run(self, weights: Any, inbox: Inbox) -> Report:
        """On the engine's own thread, one slice after the other."""
        self._state_of_slice, report = self._run_slice(weights, self._state_of_slice, inbox)
        for leaf in jax.tree.leaves(report):
            leaf.copy_to_host_async()
        return report

    def _receive(self) -> None:
        received = self._under_way.popleft()
        try:
            report = jax.tree.map(np.asarray, received.report.result())
        except Exception:  # nothing of it came to pass: what was sent is sent again
            self._queue.extendleft(reversed([row for row in received.rows if not row.is_aborted]))
            self._num_sent -= len(received.rows)
            for row in received.rows:
                if row.is_aborted:
                    self._finish(row, RequestStatus.ABORTED)
            self._aborts = received.aborts + self._aborts
            self._forgets |= received.forgets
            raise
        for row, place, refusal in zip(
            received.rows, report.request_ids.tolist(), report.refusals.tolist(), strict=False
        ):
            if refusal != Refusal.ACCEPTED:
                raise RuntimeError(f"the scheduler refused a request that the engine took: {Refusal(refusal).name}.")
            row.place = place
            self._on_device[place] = row
            if row.is_aborted and not report.outbox.finished[place]:  # else the place is somebody else's by now
                self._aborts.append(place)
        num_generated = 0
        for place, tokens, logprobs in new_tokens(report):
            row = self._on_device[place]
            row.token_ids += tokens
            if row.params.logprobs:
                row.logprobs += logprobs
            self._news[row.request_id] = None
            num_generated += len(tokens)
        for place in np.flatnonzero(report.outbox.finished).tolist():
            self._num_sent -= 1
            self._finish(self._on_device.pop(place), RequestStatus(int(report.outbox.finished[place])))
        self._count(report, num_generated)

    def _finish(self, row: Row, status: RequestStatus) -> None:
        row.finish_reason = FINISH_REASONS[status]
        self._num_unfinished -= 1
        self._news[row.request_id] = None

    def _count(self, report: Report, num_generated: int) -> None:
        before = self._stats

        def total(so_far: int, counter: jax.Array) -> int:  # the device counts modulo 2^32
            return so_far + (int(counter) - so_far) % 2**32

        is_narrow, is_mixed = ([getattr(kind, name) for kind in self._kinds] for name in ("is_narrow", "has_chunk"))
        since, self._since = self._since, time.perf_counter()
        self._stats = EngineStats(
            seconds=before.seconds + self._since - since,
            num_blocks=before.num_blocks,
            num_running=int(report.num_running),
            num_free_blocks=int(report.num_free),
            num_slices=before.num_slices + 1,
            num_steps=before.num_steps + int(report.outbox.num_steps),
            num_narrow_steps=total(before.num_narrow_steps, report.num_of_kind[is_narrow].sum()),
            num_mixed_steps=total(before.num_mixed_steps, report.num_of_kind[is_mixed].sum()),
            num_generated=before.num_generated + num_generated,
            num_computed=total(before.num_computed, report.num_computed),
            num_found=total(before.num_found, report.num_found),
            num_recomputed=total(before.num_recomputed, report.num_recomputed),
            num_preempted=total(before.num_preempted, report.num_preempted),
        )


@dataclasses.dataclass(frozen=True)
class Slice:
    """One under way: what was sent with it, and what will come back."""

    rows: list[Row]
    aborts: list[int]
    forgets: bool
    report: Future[Report]


def _own(weights: Any) -> Any:
    """The same arrays in containers of our own: Flax's learners put other arrays into theirs."""
    return jax.tree.map(lambda x: x, weights)


def _sizes_of(caches: Any) -> tuple[int, int]:
    """Blocks and block size of the caches of a model."""
    found = jax.tree.leaves(caches, is_leaf=lambda x: isinstance(x, KVCache))
    if not found or not all(isinstance(cache, KVCache) for cache in found):
        raise ValueError(f"caches must be a pytree of KVCaches; got {jax.tree.structure(caches)}.")
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(caches)):
        raise ValueError("these caches were donated, perhaps to another engine; make new ones for each.")
    sizes = {cache.k.shape[-4:-2] for cache in found}
    if len(sizes) > 1:
        raise ValueError(f"all caches must have the same [blocks, block_size]; got {sorted(sizes)}.")
    return sizes.pop()
