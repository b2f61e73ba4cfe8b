"""The engine: the host's side of continuous batching. It submits and drains; which request runs is decided in jit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged import _device
from jaxpaged._allocator.state import checked_windows
from jaxpaged._attention.decide import check_new_gpu
from jaxpaged._engine.books import Books, Sent
from jaxpaged._engine.counting import counted
from jaxpaged._engine.defaults import (
    chosen_compiler_options,
    chosen_least_spared,
    chosen_sizes,
    chosen_steps,
    step_cost,
)
from jaxpaged._engine.drafting import Draft
from jaxpaged._engine.host_tier import HostTier, NoHostTier
from jaxpaged._engine.inputs import own, pool_sizes, pools_of
from jaxpaged._engine.interrupts import without_interrupts
from jaxpaged._engine.kinds import make_kinds
from jaxpaged._engine.on_mesh import find_mesh, on_each_device, replicate
from jaxpaged._engine.packing import pack, unpack
from jaxpaged._engine.progress_bar import ProgressBar
from jaxpaged._engine.pytrees import difference
from jaxpaged._engine.records import EngineStats, RequestOutput, SamplingParams, Score
from jaxpaged._engine.requests import (
    checked_prompt,
    checked_request,
    make_inbox,
    params_for_each,
)
from jaxpaged._engine.rollouts import Collector, Rollout
from jaxpaged._engine.slices import Apply, Setup, run_packed, tell
from jaxpaged._engine.state import Report, State
from jaxpaged._integers import checked_size, checked_tuple
from jaxpaged._scheduler.records import MOST_ADAPTERS

MOST_ARRIVALS = 64  # requests that a slice takes; more are fed by slices of no steps
AHEAD = 1  # slices that run while the host reads the one before


class Engine:
    """Continuous batching for a model that you bring: requests join and leave a running batch in one compiled program.

    The program is a slice: up to `steps_per_slice` steps of the model, and every decision between them. The host sends
    new requests in with a slice, and while it runs, reads the results of the one before. The program is compiled once,
    when you make the engine.

    An engine is not thread-safe.

    Args:
        apply: the model over packed tokens, `caches, logits = apply(weights, tokens, positions, caches, attend)`.
            `tokens` and `positions` are int32 `[tokens]`. In each layer, `cache, out = attend(q, k, v, cache)` writes
            to the cache and attends (`StepAttention`). Before the head, `attend.newest(x)` picks the newest token of
            each sequence, `[seqs, ...]` from x `[tokens, ...]`; the logits are `[seqs, vocab]`. `apply` is traced for
            each of `widths`, for `num_seats` and for `num_seats + chunk_tokens` tokens. Apart from `attend`, it must
            treat tokens one by one, so that padding disturbs nothing.
        weights: a pytree of arrays, passed to `apply`.
        caches: a pytree of `KVCache`s with the same number of blocks and the same block size. They are donated: do not
            use them afterwards. If they lie on several devices, each device runs `apply` inside `jax.shard_map` on
            its part of weights and caches (`docs/several_gpus.md`).
        num_seats: the requests that run at once. This and the next three are chosen if they are None; `stats()` tells
            what was chosen, and `docs/engine.md` how.
        max_length: the most tokens of a request, prompt and new ones together.
        chunk_tokens: the prompt tokens that a step can compute, beside one token of each seat. More make long prompts
            faster, and the steps with prompts slower.
        widths: the rows of narrower steps, for when few seats need a token. Each takes time to compile. (): none.
        max_requests: the requests on the device, running or waiting; more wait on the host. None: four for each seat.
        steps_per_slice: the steps between two looks of the host. New requests and aborts wait for the end of a slice.
            None: 2 in `step` and `stream` while a seat is free for what arrives, else 32.
        num_stop_ids: the most stop tokens of a request.
        num_adapters: the adapters of the model, which requests name from 0 on. `apply` finds each token's in
            `attend.adapters` (`docs/engine.md`).
        windows: for each group of layers the window that they attend with, or None, as in `BlockAllocator.create`. With
            several groups there is a cache for each layer of a group, which its counterparts in the other groups share,
            and `attend` gets the `group` of each layer (`layer_groups`).
        prefix_cache: whether requests that begin alike share blocks, instead of each computing its own.
        host_cache_bytes: host memory for blocks of the prefix cache, which come back from there once the pool has lost
            them. Needs `prefix_cache`, and one group of layers without a window. None: none.
        drafts: the most guesses of a request's next tokens that a step computes beside its newest token; 0: none. The
            tokens are the same as without. `apply` is then traced with a step in which `attend.newest(x)` returns all
            of x.
        draft: what guesses, `drafts = draft(weights, tokens, lengths)`, traced into the program: `tokens` are
            int32 `[num_seats, max_length]`, of which each seat's request knows the first `lengths`, int32
            `[num_seats]`. Returns int32 `[num_seats, drafts]`; the first -1 ends a seat's drafts. None: what followed
            when the newest tokens of a request occurred before, in it or in another of its completions.
        hidden: the shape and dtype of a token's hidden state, for a `draft` that is a head on the model. `apply` then
            returns `(caches, logits, hidden)`, the last `[tokens, *hidden.shape]`, and the engine calls `draft(weights,
            tokens, lengths, hidden)` with that of the token before each seat's newest one, from which the newest was
            drawn, `[num_seats, *hidden.shape]`. None: there is none.
        exact: whether a request's logprobs are the same to the last bit whatever shares its steps. Every step then has
            `num_seats + chunk_tokens` rows, and attention one partition; `docs/engine.md` says what that costs.
        processed_logprobs: whether the logprobs of new tokens are those of the distribution that they are drawn from,
            after temperature, `top_k` and `top_p`; vLLM's `logprobs_mode="processed_logprobs"`. Those of greedy tokens,
            of prompts and of `score` stay the model's.
        max_logprobs: the most `top_logprobs` of a request. If it is not 0, a step in which a request wants logprobs
            looks for so many of the most likely tokens of each row.
        seed: at least 0; seeds the requests that bring none.
        compiler_options: passed to `jax.jit`. None: on a GPU, those with which cuBLAS computes matrix products.

    Raises:
        ValueError: a size that is no int or too small, arguments that do not go together, weights that are not arrays,
            caches that do not fit together, or an `apply` that does not return what it should.

    Example: see `docs/engine.md`.
    """

    def __init__(
        self,
        apply: Apply,
        weights: Any,
        caches: Any,
        *,
        num_seats: int | None = None,
        max_length: int | None = None,
        chunk_tokens: int | None = None,
        widths: Sequence[int] | None = None,
        max_requests: int | None = None,
        steps_per_slice: int | None = None,
        num_stop_ids: int = 4,
        num_adapters: int = 0,
        windows: Sequence[int | None] = (None,),
        prefix_cache: bool = False,
        host_cache_bytes: int | None = None,
        drafts: int = 0,
        draft: Draft | None = None,
        hidden: jax.ShapeDtypeStruct | None = None,
        exact: bool = False,
        processed_logprobs: bool = False,
        max_logprobs: int = 0,
        seed: int = 0,
        compiler_options: dict[str, Any] | None = None,
    ):
        num_blocks, block_size = pool_sizes(caches)
        check_new_gpu()
        windows, is_gpu = checked_windows(windows), _device.is_gpu()
        sizes = chosen_sizes(
            (num_blocks - 1) // max(len(windows), 1) + 1,
            block_size,
            num_seats=num_seats,
            max_length=max_length,
            chunk_tokens=chunk_tokens,
            widths=widths,
            is_gpu=is_gpu,
            drafts=drafts,
            exact=exact,
        )
        if draft is not None and not (callable(draft) and drafts):
            raise ValueError(f"draft must be a function, and goes with drafts of at least 1; got {draft=}, {drafts=}.")
        if hidden is not None and not (isinstance(hidden, jax.ShapeDtypeStruct) and draft is not None):
            raise ValueError(f"hidden must be a jax.ShapeDtypeStruct, and goes with draft; got {hidden=}, {draft=}.")
        num_seats, max_length = sizes.num_seats, sizes.max_length
        drafts = int(drafts)  # checked with the sizes
        max_requests = 4 * num_seats if max_requests is None else checked_size("max_requests", max_requests)
        self._weights, self._num_blocks = own(weights), num_blocks
        self._steps = chosen_steps(steps_per_slice)
        self._max_requests, num_stop_ids = max_requests, checked_size("num_stop_ids", num_stop_ids, 0)
        self._num_adapters = checked_size("num_adapters", num_adapters, 0, MOST_ADAPTERS)
        seed, max_logprobs = checked_size("seed", seed, 0), checked_size("max_logprobs", max_logprobs, 0)
        self._books = Books(max_requests=max_requests, seed=seed, num_adapters=num_adapters)
        self._check = functools.partial(
            checked_request,
            max_length=max_length,
            num_blocks=num_blocks,
            block_size=block_size,
            windows=windows,
            num_stop_ids=num_stop_ids,
            num_adapters=num_adapters,
            max_logprobs=max_logprobs,
        )
        shares = prefix_cache and not exact and windows == (None,)
        least_spared = chosen_least_spared(caches) if shares else None
        cost = functools.partial(step_cost, is_gpu=is_gpu)
        self._kinds = make_kinds(
            num_seats,
            sizes.chunk_tokens,
            sizes.widths,
            exact=exact,
            least_spared=least_spared,
            cost=cost if drafts else None,
        )
        self._state_of_slice = State.create(
            caches,
            self._kinds,
            sizes,
            max_requests=max_requests,
            max_steps=self._steps.most,
            num_stop_ids=num_stop_ids,
            num_adapters=num_adapters,
            windows=windows,
            prefix_cache=prefix_cache,
            drafts=drafts,
            max_logprobs=max_logprobs,
            hidden=hidden,
        )
        self._inbox_of = functools.partial(
            make_inbox,
            num_rows=min(MOST_ARRIVALS, max_requests),
            max_length=max_length,
            max_requests=max_requests,
            num_stop_ids=num_stop_ids,
        )
        no_news = self._inbox_of([], [], wants_logprobs=False, num_steps=0, forgets=self._books.forgets)
        setup = Setup(
            apply,
            kinds=self._kinds,
            has_host_tier=host_cache_bytes is not None,
            draft=draft,
            row_cost=math.inf if exact else cost(0),  # an exact engine has the rows anyway
            is_processed=bool(processed_logprobs),
            num_likely=max_logprobs,
            hidden=hidden,
        )
        function: Any = functools.partial(run_packed, setup, no_news)
        self._mesh = find_mesh(caches)
        if self._mesh is not None:
            self._weights, self._state_of_slice = replicate(self._mesh, (self._weights, self._state_of_slice))
            function = on_each_device(self._mesh, function, self._weights, self._state_of_slice)
        compiler_options = chosen_compiler_options(compiler_options)
        self._tier = NoHostTier()
        if host_cache_bytes is not None:
            self._tier = HostTier.create(
                host_cache_bytes,
                self._state_of_slice,
                self._mesh,
                least_tokens=sizes.chunk_tokens // 2,
                growth=(AHEAD + 1) * self._steps.most,
                compiler_options=compiler_options,
            )
        jitted = jax.jit(function, donate_argnums=1, compiler_options=compiler_options)
        # Compiled, and not jitted: another shape or dtype would be an error, and never a second program.
        self._run_slice = jitted.lower(self._weights, self._state_of_slice, pack(no_news)).compile()
        rows = no_news.prompt_lengths
        _, self._report_types = jax.eval_shape(functools.partial(tell, setup), self._state_of_slice, rows, rows)
        # A call with a loop in it returns when the loop ends. Meanwhile this thread does the host's work.
        self._thread, self._process = ThreadPoolExecutor(1, thread_name_prefix="jaxpaged"), os.getpid()
        self._asleep: list[tuple[jax.Array, Any, Any]] = []  # arrays that are gone, their types and shardings
        self._failure: BaseException | None = None  # of the slice that took the state with it

        self._collector: Collector | None = None  # of the rollout under way
        self._since = time.perf_counter()  # when the stats were last counted, or the first request came
        self._stats = EngineStats(
            num_blocks=num_blocks - 1, num_free_blocks=num_blocks - 1, **dataclasses.asdict(sizes)
        )

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether to call `step` again: a request is not finished, or `step` has not returned its end."""
        return bool(self._books.requests)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continues all prompts, and returns their outputs in order once the last is finished.

        If it raises, also by Ctrl-C, its requests are aborted and the engine is ready for others. Requests from
        `add_request` run on meanwhile; `step` returns their news.

        Args:
            prompts: the token ids of each prompt. There may be more prompts than the device holds.
            params: one for all prompts, or one for each.
            progress: draw a progress bar on stderr. For anything else use `stream`.

        Raises:
            ValueError: a request can never be served. No request is started then.
            RuntimeError: the engine is lost, as in `step`.
        """
        outputs: dict[int, RequestOutput] = {}
        with self._serving(prompts, params) as request_ids:
            bar, num_generated = ProgressBar(len(prompts)) if progress else None, self._stats.num_generated
            while len(outputs) < len(request_ids):
                self._advance(is_watched=False)
                outputs |= {
                    output.request_id: output for output in self._books.take_news(request_ids, finished_only=True)
                }
                if bar is not None:
                    bar.show(len(outputs), self._stats.num_generated - num_generated)
        return [outputs[request_id] for request_id in request_ids]

    def stream(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields each request whenever it has new tokens. Request ids are in the prompts' order.

        If you leave the loop early, requests that are not finished are aborted.
        """
        with self._serving(prompts, params) as request_ids:
            while not self._books.requests.keys().isdisjoint(request_ids):
                self._advance()
                yield from self._books.take_news(request_ids)

    def rollout(self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]) -> Rollout:
        """Like `generate`, but returns arrays on the device for a learner: tokens, logprobs, mask, weights' versions.

        Logprobs come without asking. Each shape of the arrays compiles a small program, apart from the engine's.

        Raises:
            ValueError: no prompts, or as in `generate`.
            RuntimeError: the engine is lost, as in `step`.
        """
        each = [dataclasses.replace(of_one, logprobs=True) for of_one in params_for_each(prompts, params)]
        if not each:
            raise ValueError("pass at least one prompt; got none.")
        with self._serving(prompts, each) as request_ids:
            rows = [row for request_id in request_ids for row in self._books.requests[request_id]]
            self._collector = collector = Collector(rows, self._report_types)
            try:
                while any(row.finish_reason is None for row in rows):
                    self._advance(is_watched=False)
            finally:
                self._collector = None
        return collector.result()

    def score(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        *,
        top_logprobs: int = 0,
        adapter: int | None = None,
    ) -> list[Score]:
        """The log probabilities of given tokens after prompts, in order, under the model.

        They are computed in the steps that generate for other requests. If it raises, nothing is left of it, as with
        `generate`. Prompts that begin alike share blocks with a prefix cache, but for the last token of each.

        Args:
            prompts: the token ids of each prompt.
            tokens: at least one token id for each prompt, those that follow it.
            top_logprobs: how many of the most likely tokens to return beside each, at most the engine's `max_logprobs`.
            adapter: the adapter with which they are scored, as in `SamplingParams`.

        Raises:
            ValueError: another number of prompts than of tokens, or one that can never be served. Nothing is started
                then.
            RuntimeError: the engine is lost, as in `step`.

        Example:
            >>> [score] = engine.score([prompt], [continuation])  # doctest: +SKIP
            >>> sum(score.logprobs), all(score.is_greedy)  # lm-eval's loglikelihood  # doctest: +SKIP
        """
        if len(prompts) != len(tokens):
            raise ValueError(f"pass tokens for each prompt; got {len(prompts)=}, {len(tokens)=}.")
        given = [checked_prompt(of_one, "tokens to score") for of_one in tokens]
        known = [np.append(checked_prompt(prompt), more) for prompt, more in zip(prompts, given, strict=True)]
        params = SamplingParams(max_tokens=1, temperature=0, top_logprobs=top_logprobs, adapter=adapter)
        with self._serving([of_one[:-1].tolist() for of_one in known], params, given=given) as request_ids:
            rows = [self._books.requests[request_id][0] for request_id in request_ids]
            while any(row.finish_reason is None for row in rows):
                self._advance(is_watched=False)
        return [row.score() for row in rows]

    def add_request(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Adds a request and returns its id. It starts with the next slice that has room.

        Token ids past the end of the vocabulary are not refused: only the model knows where it ends.

        Raises:
            ValueError: the request can never be served; the message says why.
            RuntimeError: the engine is lost, as in `step`.
        """
        self._check_usable()
        return self._add(*self._check(prompt, params))

    def abort(self, request_id: int | None = None, completion: int | None = None) -> bool:
        """Ends a request, or all of them. The blocks are free within a slice, and `step` returns the end.

        Args:
            request_id: what `add_request` returned. None: every request.
            completion: end only this one of the request's `n` completions, counted from 0. None: all of them.

        Returns:
            Whether the engine knew it. It forgets a request once `step` has returned its end.

        Raises:
            RuntimeError: the engine is lost, as in `step`.
        """
        self._check_usable()
        if request_id is None and completion is not None:
            raise ValueError(f"pass the request_id of the completion; got {completion=} alone.")
        named = self._books.named(request_id, completion)
        self._books.end(named)
        return bool(named)

    def step(self) -> list[RequestOutput]:
        """Starts a slice, reads the one before it, and returns the requests that have news.

        Ctrl-C loses nothing: call `step` again.

        Raises:
            RuntimeError: a slice failed. If it had started, the donated caches are gone and the engine is lost: this
                call and every later one except `stats` raise this error, with the failure as its cause. Make another
                engine, and add the unfinished requests again.
        """
        self._advance()
        return self._books.take_news(self._books.requests)

    def update_weights(self, weights: Any, *, adapters: Sequence[int] | None = None) -> None:
        """Uses other weights of the same shapes from the next slice on. Nothing is compiled.

        Running requests keep the keys and values that the old weights made; to avoid that, finish or abort them first.
        `Completion.versions` says which weights made each token.
        The prefix cache finds nothing that was computed with the old weights, nor by a request that began with them.

        Args:
            weights: all weights.
            adapters: what differs is only these adapters: the prefix cache keeps what was computed without an adapter
                and with others. None: anything may differ.

        Raises:
            ValueError: weights of another structure, shape or dtype, or an adapter that the engine does not have.
            RuntimeError: the engine is lost, as in `step`.
        """
        self._check_usable()
        weights = own(weights)
        if found := difference(self._weights, weights):
            raise ValueError(f"weights must be like those before; {found}.")
        adapters = None if adapters is None else checked_tuple("adapters", adapters)
        for adapter in adapters or ():
            if checked_size("adapters", adapter, 0) >= (num_adapters := self._num_adapters):
                raise ValueError(f"adapters must be below the engine's {num_adapters=}; got adapters={adapter}.")
        self._books.version += 1
        self._books.forget(adapters)
        self._weights = weights if self._mesh is None else replicate(self._mesh, weights)

    def sleep(self) -> None:
        """Frees the memory of the caches' keys and values, for instance for a learner. Does nothing if asleep already.

        What the prefix cache knew is lost, in host memory too. Until `wake_up`, requests are taken but
        not served, and weights may change; the engine keeps its references to the weights. Scales that a cache has
        beside its keys and values stay.

        Raises:
            RuntimeError: requests are not finished: finish or abort them first; or the engine is lost, as in `step`.
        """
        self._check_usable()
        if self._asleep:
            return
        if self._books.requests:
            raise RuntimeError(
                f"{len(self._books.requests)} requests are not finished. Call step until has_unfinished_requests is "
                "False, or abort() before, and then sleep."
            )
        while not self._books.is_device_empty:  # requests that were dropped
            self._advance()
        pools = [(x, jax.typeof(x), x.sharding) for x in pools_of(self._state.caches)]
        with without_interrupts():
            self._tier.clear()
            self._asleep = pools
            for pool, *_ in pools:
                pool.delete()

    def wake_up(self) -> None:
        """Takes memory for the caches again, after `sleep`. The engine's program is not compiled again."""
        self._check_usable()
        if self._asleep:
            fresh = {id(x): jnp.zeros(kind.shape, kind.dtype, device=where) for x, kind, where in self._asleep}
            caches = jax.tree.map(lambda x: fresh.get(id(x), x), self._state_of_slice.caches)
            self._books.forget()  # first: Ctrl-C may come anywhere
            self._state_of_slice = dataclasses.replace(self._state_of_slice, caches=caches)
            self._asleep = []

    def stats(self) -> EngineStats:
        """The sizes, and the counts as of the last slice that the host has read."""
        num_waiting = len(self._books.on_device) - self._stats.num_running
        return dataclasses.replace(
            self._stats,
            num_queued=len(self._books.queue),
            num_waiting=max(num_waiting, 0),
            num_brought=self._tier.num_brought,
            host_bytes=self._tier.host_bytes,
        )

    @property
    def _state(self) -> State:
        """The state, once the slices under way are over."""
        for sent in self._books.under_way:
            sent.result()
        return self._state_of_slice

    @contextlib.contextmanager
    def _serving(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        given: Sequence[np.ndarray] | None = None,
    ) -> Iterator[range]:
        """Takes requests, and gives their ids. However the block ends, nothing is left of them."""
        self._check_usable()
        each = params_for_each(prompts, params)
        requests = [self._check(*request) for request in zip(prompts, each, strict=True)]
        request_ids = range(self._books.next_id, self._books.next_id + len(requests))
        try:
            for i, request in enumerate(requests):
                self._add(*request, given[i] if given else None)
            yield request_ids
        finally:
            self._books.drop(request_ids)

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                "this engine is lost: a slice failed, and took the caches with it, which were donated. Make another "
                f"engine, and add the {self._books.num_unfinished} unfinished requests again. The failure was "
                f"{type(self._failure).__name__}: {self._failure}"
            ) from self._failure
        if self._process != os.getpid():
            raise RuntimeError(
                "this engine was made before os.fork(), and its thread and its device stayed with the parent process. "
                "Make engines in the process that uses them; start processes with multiprocessing's 'spawn'."
            )

    def _add(self, prompt: np.ndarray, params: SamplingParams, given: np.ndarray | None = None) -> int:
        if not self._books.num_open:
            self._since = time.perf_counter()
        return self._books.add(prompt, params, given)

    def _advance(self, *, is_watched: bool = True) -> None:
        """`is_watched`: whether the caller can add requests, or show tokens, before the last one ends."""
        self._check_usable()
        if self._asleep:
            raise RuntimeError("the engine is asleep, and its caches are gone; call wake_up() first.")
        if self._books.is_device_empty:
            self._tier.wait(self._books.queue)
        if len(self._books.under_way) <= AHEAD:  # an interrupt may have left more
            is_light = is_watched and self._books.num_open < self._stats.num_seats
            num_steps = self._steps.few if is_light else self._steps.most
            if self._tier.needs_looks:
                num_steps = max(self._steps.few, num_steps // 4)
            self._send(num_steps)
        while len(self._books.under_way) > AHEAD:
            self._receive()

    @without_interrupts()
    def _send(self, num_steps: int) -> None:
        """Starts a slice of at most so many steps. If more requests wait than it takes, slices of none before it take
        the others."""
        self._tier.look_again()
        while True:
            sent = self._books.send(MOST_ARRIVALS, self._tier.holds)
            sent.moves = self._tier.next_moves()
            has_more = self._books.has_more
            inbox = self._inbox_of(
                sent.rows,
                sent.aborts,
                wants_logprobs=self._books.wants_logprobs,
                num_steps=0 if has_more else num_steps,
                forgets=sent.forgets,
            )
            sent.words = self._thread.submit(self._run, self._weights, pack(inbox), sent)
            if not has_more:
                return

    def _run(self, weights: Any, inbox: np.ndarray, sent: Sent) -> jax.Array:
        """From a packed inbox to a packed report. On the engine's own thread, one slice after the other: what else this
        thread does, the GPU waits for."""
        try:
            for state in self._tier.move(self._state_of_slice, sent.moves):
                self._state_of_slice = state
            self._state_of_slice, words = self._run_slice(weights, self._state_of_slice, inbox)
        except Exception as failure:
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state_of_slice)):
                raise StateLostError from failure
            raise
        return words

    def _receive(self) -> None:
        """Waits for the slice that was sent first, and takes what came of it. An interrupted wait changes nothing."""
        sent = self._books.under_way[0]
        try:
            report = self._read(sent.result())
        except StateLostError as lost:
            self._failure = lost.__cause__
            self._check_usable()
        except Exception as failure:
            if sent.has_failed_with(failure):  # else only the wait has: Ctrl-C in its locks may raise other errors
                self._books.take_back()
                self._tier.lose(sent.moves)
            raise
        else:  # the slice came to pass: if this fails, the next call does it again
            self._take(report)

    def _read(self, words: jax.Array) -> Report:
        """The report in NumPy's arrays."""
        try:
            return unpack(np.asarray(words), self._report_types)
        except Exception as failure:  # the call had returned by then, and the new state is as broken as the report
            raise StateLostError from failure

    @without_interrupts()
    def _take(self, report: Report) -> None:
        sent = self._books.take_places(report)
        self._tier.take(report, sent.moves)
        if self._collector is not None:
            self._collector.take(sent.result(), report, self._books.on_device, sent.version)
        counts = self._books.take_tokens(report, sent.version)
        since, self._since = self._since, time.perf_counter()
        self._stats = counted(self._stats, report, self._kinds, seconds=self._since - since, **counts)


class StateLostError(Exception):
    """A slice failed after its state was donated to it."""
