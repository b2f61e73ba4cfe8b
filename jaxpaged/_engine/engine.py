"""The engine: the host's side of continuous batching. It submits and drains; which request runs is decided in jit."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxpaged._attention.decide import check_new_gpu
from jaxpaged._engine.books import Books
from jaxpaged._engine.defaults import resolve_options
from jaxpaged._engine.inputs import bytes_on_a_device, own
from jaxpaged._engine.progress_bar import ProgressBar
from jaxpaged._engine.records import EngineStats, RequestOutput, SamplingParams, Score
from jaxpaged._engine.requests import check_vocabulary, checked_prompt, checked_request, params_for_each
from jaxpaged._engine.rollouts import Collector, Rollout
from jaxpaged._engine.runner import Runner
from jaxpaged._slice.drafting import Draft, check_draft
from jaxpaged._slice.model import Apply, ApplyHead
from jaxpaged._slice.options import EngineOptions

DEFAULTS = EngineOptions()


class Engine:
    """Continuous batching for a model that you bring: requests join and leave a running batch in one compiled program.

    The program is a slice: `steps_per_slice` steps of the model, and every decision between them. The host sends
    new requests in with a slice, and while it runs, reads the results of the one before. The program is compiled once,
    when you make the engine.

    An engine is not thread-safe.

    Args:
        apply: the model over packed tokens, `caches, hidden = apply(weights, tokens, positions, caches, step)`.
            `tokens` and `positions` are int32 `[tokens]`. In each layer, `cache, out = step.attend(q, k, v, cache)`
            writes to the cache and attends (`AttentionStep`). `hidden` is what the head needs: an array `[tokens, ...]`
            or a pytree of arrays. `apply` may return `(caches, hidden, aux)`, with small arrays `[tokens, ...]` of 32
            bits or bool that come back with the tokens (`Completion.aux`). It is traced once for each number of tokens:
            each of `widths`, `max_num_seqs`, and `max_num_seqs + chunk_tokens`. Apart from `step.attend`, it must treat
            tokens one by one, so that padding disturbs nothing.
        weights: a pytree of arrays, passed to `apply`.
        caches: a pytree of `KVCache`s with the same number of blocks and the same block size. They are donated: do not
            use them afterwards. If they lie on several devices, each device runs `apply` inside `jax.shard_map` on
            its part of weights and caches (`docs/several_gpus.md`).
        head: `logits = head(weights, hidden)`, `[rows, vocab]`, of those rows of `hidden` whose next tokens are drawn
            or scored. None: `apply` returns the logits of every token in place of `hidden`, which takes much memory if
            the vocabulary is large.
        draft: a function that drafts, `drafts = draft(weights, tokens, lengths, hidden)`, traced into the program:
            `tokens` are int32 `[max_num_seqs, max_model_len]`, of which each running request knows the first `lengths`,
            int32 `[max_num_seqs]`. `hidden` is that of the token before the newest one, from which the newest was
            drawn, each leaf `[max_num_seqs, ...]`. Returns int32 `[max_num_seqs, num_speculative_tokens]`; the first -1
            ends a request's drafts. None: what followed when the newest tokens of a request occurred before, in it or
            in another of its completions.
        options: sizes and features. By default the engine chooses its sizes.

    Raises:
        ValueError: options that do not go together, weights that are not arrays, caches that do not fit together, or an
            `apply` that does not return what it should.
        MemoryError: the GPU has no room to compile the engine or for its scratch memory.

    Example: see `docs/engine.md`.
    """

    def __init__(
        self,
        apply: Apply,
        weights: Any,
        caches: Any,
        *,
        head: ApplyHead | None,
        draft: Draft | None = None,
        options: EngineOptions = DEFAULTS,
    ):
        weights = own(weights)
        if not isinstance(options, EngineOptions):
            raise ValueError(f"options must be EngineOptions; got {options!r}.")
        resolved = resolve_options(options, caches, bytes_on_a_device(weights))
        check_draft(draft, resolved)
        check_new_gpu()
        self._options = resolved
        self._books = Books(max_requests=resolved.max_requests, seed=resolved.seed, num_adapters=resolved.num_adapters)
        self._runner = Runner(apply, head, weights, caches, draft, resolved, self._books)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether to call `step` again: it has not returned the end of each request that was added by `add_request`."""
        return self._books.has_some_for_step

    @property
    def seconds_to_spare(self) -> float:
        """How long the next `step` can wait for requests: the slice that runs is expected to take longer.

        `step` sends the next slice at once, and then waits for the one that runs. What is added until then goes out
        with the next slice, and what is added later with the one behind it. 0.0 if nothing runs.

        A slice can end early, when its requests do: set `on_slice_end` and stop waiting when it is called.
        """
        return self._runner.seconds_to_spare

    @property
    def on_slice_end(self) -> Callable[[], None]:
        """Called whenever the device has finished a slice, on a thread of the engine; does nothing by default.

        It must be quick and must not call the engine: set an event, or put something into a queue.
        """
        return self._runner.on_slice_end

    @on_slice_end.setter
    def on_slice_end(self, callback: Callable[[], None]) -> None:
        self._runner.on_slice_end = callback

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continues all prompts, and returns their outputs in order once the last is finished.

        If it raises, also by Ctrl-C, its requests are aborted and the engine is ready for others. Requests from
        `add_request` run on meanwhile; `step` returns their new output.

        Args:
            prompts: the token ids of each prompt. There may be more prompts than the device holds.
            params: one for all prompts, or one for each.
            progress: draw a progress bar on stderr. For anything else use `stream`.

        Raises:
            ValueError: a request can never be served. No request is started then.
            RuntimeError: the engine is asleep or lost, as in `step`.
        """
        outputs: dict[int, RequestOutput] = {}
        with self._serving(prompts, params) as request_ids:
            bar, num_generated = ProgressBar(len(prompts)) if progress else None, self._runner.counts.num_generated
            while len(outputs) < len(request_ids):
                self._runner.advance()
                outputs |= {
                    output.request_id: output for output in self._books.take_outputs(request_ids, finished_only=True)
                }
                if bar is not None:
                    bar.show(len(outputs), self._runner.counts.num_generated - num_generated)
        return [outputs[request_id] for request_id in request_ids]

    def stream(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields each request whenever it has new tokens. Request ids are in the prompts' order.

        If you leave the loop early, requests that are not finished are aborted. In the loop you may call `step` and
        `generate`: what is new of this call's requests meanwhile comes with its next outputs. It raises what `generate`
        raises, but only once it is asked for the first output.
        """
        with self._serving(prompts, params) as request_ids:
            while not self._books.requests.keys().isdisjoint(request_ids):
                self._runner.advance()
                yield from self._books.take_outputs(request_ids)

    def rollout(self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]) -> Rollout:
        """Like `generate`, but returns arrays on the device for a learner (`Rollout`).

        Logprobs come without asking. Each shape of the arrays compiles a small program, apart from the engine's.

        Raises:
            ValueError: no prompts, or as in `generate`.
            RuntimeError: the engine is asleep or lost, as in `step`.
        """
        each = [dataclasses.replace(of_one, logprobs=True) for of_one in params_for_each(prompts, params)]
        if not each:
            raise ValueError("pass at least one prompt; got none.")
        with self._serving(prompts, each) as request_ids:
            rows = [row for request_id in request_ids for row in self._books.requests[request_id]]
            collector = Collector(rows, self._runner.program.report_types)
            try:
                self._runner.collector = collector
                while any(row.finish_reason is None for row in rows):
                    self._runner.advance()
            finally:
                self._runner.collector = None
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
            RuntimeError: the engine is asleep or lost, as in `step`.

        Example:
            >>> [score] = engine.score([prompt], [continuation])  # doctest: +SKIP
            >>> sum(score.logprobs), all(score.is_greedy)  # lm-eval's loglikelihood  # doctest: +SKIP
        """
        if len(prompts) != len(tokens):
            raise ValueError(f"pass tokens for each prompt; got {len(prompts)=}, {len(tokens)=}.")
        given = [checked_prompt(of_one, "tokens to score") for of_one in tokens]
        for of_one in given:
            check_vocabulary(of_one, self._options)
        known = [np.append(checked_prompt(prompt), more) for prompt, more in zip(prompts, given, strict=True)]
        params = SamplingParams(max_tokens=1, temperature=0, top_logprobs=top_logprobs, adapter=adapter)
        with self._serving([of_one[:-1].tolist() for of_one in known], params, given=given) as request_ids:
            rows = [self._books.requests[request_id][0] for request_id in request_ids]
            while any(row.finish_reason is None for row in rows):
                self._runner.advance()
        return [row.score() for row in rows]

    def add_request(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Adds a request and returns its id. It starts with the next slice that has room.

        Raises:
            ValueError: the request can never be served; the message says why.
            RuntimeError: the engine is lost, as in `step`.
        """
        self._runner.check_usable()
        return self._add(*checked_request(prompt, params, self._options))

    def abort(self, request_id: int | None = None, completion: int | None = None) -> bool:
        """Ends a request, or all of them. The blocks are free within a slice, and `step` returns the end.

        Args:
            request_id: what `add_request` returned. None: every request.
            completion: end only this one of the request's `n` completions, counted from 0. None: all of them.

        Returns:
            Whether the engine knew it. It forgets a request once `step` has returned its end.

        Raises:
            ValueError: a completion without its request.
            RuntimeError: the engine is lost, as in `step`.
        """
        self._runner.check_usable()
        if request_id is None and completion is not None:
            raise ValueError(f"pass the request_id of the completion; got {completion=} alone.")
        rows = self._books.find(request_id, completion)
        self._books.end(rows)
        return bool(rows)

    def step(self) -> list[RequestOutput]:
        """Starts a slice, reads the one before it, and returns the requests from `add_request` that have new output.

        Ctrl-C in it loses nothing: call `step` again. Results already returned are not reported again.

        Raises:
            RuntimeError: the engine is asleep; or a slice failed. If it had started, the donated caches are gone and
                the engine is lost: this call and every later one except `stats` raise this error, with the failure as
                its cause. Make another engine, and add the unfinished requests again.
        """
        self._runner.advance()
        return self._books.take_outputs()

    def update_weights(self, weights: Any, *, adapters: Sequence[int] | None = None) -> None:
        """Uses other weights of the same shapes from the next slice on. Nothing is compiled.

        Running requests keep the keys and values that the old weights made; to avoid that, finish or abort them first.
        `Completion.weight_versions` says which weights made each token.
        The prefix cache finds nothing that was computed with the old weights, nor by a request that began with them.

        Args:
            weights: all weights.
            adapters: what differs is only these adapters: the prefix cache keeps what was computed without an adapter
                and with others. None: anything may differ.

        Raises:
            ValueError: weights of another structure, shape or dtype, or an adapter that the engine does not have.
            RuntimeError: the engine is lost, as in `step`.
        """
        self._runner.update_weights(weights, adapters)

    def sleep(self) -> None:
        """Frees the memory of the caches' keys and values, for instance for a learner. Does nothing if asleep already.

        What the prefix cache knew is lost, in host memory too. Until `wake_up`, `add_request` takes requests that
        nothing serves yet, and weights may change; the engine keeps its references to the weights. Scales that a cache
        has beside its keys and values stay.

        Raises:
            RuntimeError: requests are not finished: finish or abort them first; or a slice failed, as in `step`: once
                told, `sleep` does its work if called again.
        """
        self._runner.sleep()

    def wake_up(self) -> None:
        """Takes memory for the caches again, after `sleep`. The engine's program is not compiled again.

        Raises:
            RuntimeError: the engine is lost, as in `step`.
        """
        self._runner.wake_up()

    def stats(self) -> EngineStats:
        """The sizes, and the counts as of the last slice that the host has read."""
        return self._runner.stats()

    @contextlib.contextmanager
    def _serving(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        given: Sequence[np.ndarray] | None = None,
    ) -> Iterator[range]:
        """Takes requests, and gives their ids. However the block ends, nothing is left of them."""
        self._runner.check_usable()
        each = params_for_each(prompts, params)
        requests = [checked_request(*request, self._options) for request in zip(prompts, each, strict=True)]
        request_ids = range(self._books.next_id, self._books.next_id + len(requests))
        try:
            self._books.served.update(request_ids)
            for i, request in enumerate(requests):
                self._add(*request, given[i] if given else None)
            yield request_ids
        finally:
            self._books.drop(request_ids)

    def _add(self, prompt: np.ndarray, params: SamplingParams, given: np.ndarray | None = None) -> int:
        if not self._books.num_open:
            self._runner.since = time.perf_counter()
        return self._books.add(prompt, params, given)
