"""The engine: continuous batching for a model. Scheduling runs in jit; the host only submits and collects."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import numpy as np

from jaxpaged._attention.run import check_new_gpu
from jaxpaged._engine.books import Books
from jaxpaged._engine.defaults import resolve_options
from jaxpaged._engine.inputs import bytes_on_a_device, own
from jaxpaged._engine.progress_bar import ProgressBar
from jaxpaged._engine.records import EngineStats, RequestOutput, Score
from jaxpaged._engine.requests import check_vocabulary, checked_prompt, checked_request, params_for_each
from jaxpaged._engine.rollouts import Collector, Rollout
from jaxpaged._engine.runner import Runner
from jaxpaged._engine.sampling_params import SamplingParams
from jaxpaged._grammar.vocabulary import Vocabulary
from jaxpaged._slice.drafting import Draft, check_draft
from jaxpaged._slice.model import Apply, ApplyHead, Functions
from jaxpaged._slice.options import EngineOptions
from jaxpaged._slice.process_logits import ProcessLogits

DEFAULTS = EngineOptions()


class Engine:
    """Continuous batching for a model that you bring: requests join and leave a running batch in one compiled program.

    The program is a slice: `steps_per_slice` steps of the model, and every decision between them. The host sends new
    requests with each slice, and reads the results of a slice while the next one runs. The program is compiled once,
    when you make the engine.

    An engine is not thread-safe.

    Args:
        apply: the model over packed tokens, `caches, hidden = apply(weights, tokens, positions, caches, step)`.
            `tokens` and `positions` are int32 `[tokens]`. In each layer, `cache, out = step.attend(q, k, v, cache)`
            writes to the cache and attends (`AttentionStep`). `hidden` is what the head needs: an array `[tokens, ...]`
            or a pytree of arrays. `apply` may return `(caches, hidden, aux)`, with small arrays `[tokens, ...]` of 8,
            16 or 32 bits or bool that come back with the tokens (`Completion.aux`, `Completion.prompt_aux`). It is
            traced once for each number of tokens: each of `widths`, `max_num_seqs`, and `max_num_seqs + chunk_tokens`.
            Apart from `step.attend`, it must process each token independently: some tokens are padding.
        weights: a pytree of arrays, passed to `apply`.
        caches: a pytree of `KVCache`s with the same number of blocks and the same block size. They are donated: do not
            use them afterwards. If they are sharded over several devices, each device runs `apply` inside
            `jax.shard_map` on its shards of weights and caches (`docs/several_gpus.md`).
        head: `logits = head(weights, hidden)`, `[rows, vocab]`, for the rows of `hidden` whose next tokens are sampled
            or scored. None: `apply` returns the logits of every token in place of `hidden`, which needs much memory if
            the vocabulary is large.
        draft: `drafts = draft(weights, tokens, lengths, hidden)`, a function that guesses next tokens, traced into the
            program. `tokens` is int32 `[max_num_seqs, max_model_len]`, of which the first `lengths`, int32
            `[max_num_seqs]`, are known. `hidden` is the hidden state that the newest token was sampled from, each leaf
            `[max_num_seqs, ...]`. Returns int32 `[max_num_seqs, num_speculative_tokens]`; the first -1 ends a request's
            drafts. None: prompt lookup, which drafts what followed an earlier occurrence of the newest tokens, in the
            request or in another of its completions.
        process_logits: `logits = process_logits(logits, context)`, a function that changes the logits, float32 `[rows,
            vocab]`, from which new tokens are drawn. It is traced into the program and runs after penalties and the
            other parameters of `SamplingParams`. `context` is a `LogitsContext`: the tokens of each sequence, and the
            sequence of each row. A row of the result may depend only on the same row of the logits and on its own
            sequence. Scored tokens always see the model's logits.
        vocabulary: the bytes of each token (`jaxpaged.grammar`), as many as there are logits, for requests with a
            `grammar`. None: no request may have one.
        options: sizes and features. By default the engine chooses its sizes.

    Raises:
        ValueError: options that exclude each other, weights that are not arrays, caches of different sizes, or an
            `apply` with a wrong result.
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
        process_logits: ProcessLogits | None = None,
        vocabulary: Vocabulary | None = None,
        options: EngineOptions = DEFAULTS,
    ):
        weights = own(weights)
        if not isinstance(options, EngineOptions):
            raise ValueError(f"options must be EngineOptions; got {options!r}.")
        resolved = resolve_options(options, caches, bytes_on_a_device(weights))
        check_draft(draft, resolved)
        if process_logits is not None and not callable(process_logits):
            raise ValueError(f"process_logits must be a function of logits and context; got {process_logits!r}.")
        if vocabulary is not None and not isinstance(vocabulary, Vocabulary):
            raise ValueError(f"vocabulary must be a jaxpaged.grammar.Vocabulary; got {vocabulary!r}.")
        functions = Functions(apply, head, draft, process_logits, vocabulary)
        check_new_gpu()
        self._options, self._vocabulary = resolved, vocabulary
        self._books = Books(max_requests=resolved.max_requests, seed=resolved.seed, num_adapters=resolved.num_adapters)
        self._runner = Runner(functions, weights, caches, resolved, self._books)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether to call `step` again: whether any request from `add_request` has yet to be reported as finished."""
        return self._books.has_some_for_step

    @property
    def seconds_to_spare(self) -> float:
        """How long the caller can wait for requests before the next `step` without idling the device; 0.0 if idle.

        `step` sends the next slice at once, then waits for the running one. A request added before `step` is part of
        the next slice; a later one waits for the slice after it.

        A slice can end early, when its requests do: set `on_slice_end` and stop waiting when it is called.
        """
        return self._runner.seconds_to_spare

    @property
    def on_slice_end(self) -> Callable[[], None]:
        """A callback for the end of each slice on the device, called on a thread of the engine. Does nothing by
        default.

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

        Requests with the largest `max_tokens` start first: started last, they would run on alone at the end, in steps
        with few rows. `stream` and `add_request` start requests in the order given.

        If it raises, for instance after Ctrl-C, its requests are aborted and the engine stays usable. Requests from
        `add_request` run at the same time; `step` returns their output.

        Args:
            prompts: the token ids of each prompt. There may be more prompts than the device holds.
            params: one for all prompts, or one for each.
            progress: draw a progress bar on stderr. For anything else use `stream`.

        Raises:
            ValueError: a request that can never be served. No request is started.
            RuntimeError: the engine is asleep or lost, as in `step`.
        """
        outputs: dict[int, RequestOutput] = {}
        with self._serving(prompts, params) as request_ids:
            self._books.put_longest_first(request_ids)
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
        """Like `generate`, but yields a request whenever it has new tokens. Request ids follow the order of prompts.

        Leaving the loop early aborts the unfinished requests. The loop may call `step` and `generate`. Tokens that
        those calls produce for this stream's requests come with the stream's next outputs. Errors are those of
        `generate`, raised when the first output is requested.
        """
        with self._serving(prompts, params) as request_ids:
            while not self._books.requests.keys().isdisjoint(request_ids):
                self._runner.advance()
                yield from self._books.take_outputs(request_ids)

    def rollout(self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]) -> Rollout:
        """Like `generate`, but returns arrays on the device for a learner (`Rollout`).

        Logprobs are always returned. Each shape of the arrays compiles a small program of its own.

        Raises:
            ValueError: no prompts, or as in `generate`.
            RuntimeError: the engine is asleep or lost, as in `step`.
        """
        each = [dataclasses.replace(of_one, logprobs=True) for of_one in params_for_each(prompts, params)]
        if not each:
            raise ValueError("pass at least one prompt; got none.")
        with self._serving(prompts, each) as request_ids:
            rows = [row for request_id in request_ids for row in self._books.requests[request_id]]
            self._books.put_longest_first(request_ids)
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
        """The log probabilities under the model of given tokens after prompts, in order.

        Scoring shares the steps of other requests. If it raises, its requests are aborted, as in `generate`. With a
        prefix cache, prompts with a common prefix share its blocks, except the last token of each prompt.

        Args:
            prompts: the token ids of each prompt.
            tokens: the token ids to score after each prompt, at least one.
            top_logprobs: the number of most likely tokens to return for each, at most the engine's `max_logprobs`.
            adapter: the adapter to score with, as in `SamplingParams`.

        Raises:
            ValueError: different numbers of prompts and tokens, or a request that can never be served. No request is
                started.
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
        """Adds a request and returns its id. The request starts with the next slice that has room.

        Raises:
            ValueError: a request that can never be served; the message says why.
            RuntimeError: the engine is lost, as in `step`.
        """
        self._runner.check_usable()
        return self._add(*checked_request(prompt, params, self._options, self._vocabulary))

    def abort(self, request_id: int | None = None, completion: int | None = None) -> bool:
        """Aborts a request, or all. Its blocks are free within a slice, and `step` reports it as finished.

        Args:
            request_id: the id from `add_request`. None: every request.
            completion: index of the completion to abort, from 0. None: all `n` completions of the request.

        Returns:
            Whether the engine has such a request. It forgets a request once `step` has reported it as finished.

        Raises:
            ValueError: a completion without a request_id.
            RuntimeError: the engine is lost, as in `step`.
        """
        self._runner.check_usable()
        if request_id is None and completion is not None:
            raise ValueError(f"pass the request_id of the completion; got {completion=} alone.")
        rows = self._books.find(request_id, completion)
        self._books.end(rows)
        return bool(rows)

    def step(self, *, may_wait: Container[int] = ()) -> list[RequestOutput]:
        """Starts a slice, reads the one before it, and returns the requests from `add_request` that have new output.

        Ctrl-C loses nothing: call `step` again. Results already returned are not reported again.

        Args:
            may_wait: ids of requests whose output is returned by a later call without them, or when they finish. To
                make an output costs the host several microseconds.

        Raises:
            RuntimeError: the engine is asleep, or a slice failed. If the slice had started, the donated caches are
                gone and the engine is lost: this call and all later ones except `stats` raise this error, with the
                failure as its cause. Make another engine, and add the unfinished requests again.
        """
        self._runner.advance()
        return self._books.take_outputs(may_wait=may_wait)

    def update_weights(self, weights: Any, *, adapters: Sequence[int] | None = None) -> None:
        """Uses new weights of the same shapes from the next slice on, without compiling.

        Running requests keep the keys and values of the old weights; to avoid that, finish or abort them first.
        `Completion.weight_versions` tells which weights computed each token. The prefix cache forgets all blocks
        computed with the old weights, and those of requests that started with them.

        Args:
            weights: all weights.
            adapters: the adapters that changed, if nothing else did: the prefix cache keeps the blocks of other
                adapters and of no adapter. None: anything may have changed.

        Raises:
            ValueError: weights of another structure, shape or dtype, or an adapter that the engine does not have.
            RuntimeError: the engine is lost, as in `step`.
        """
        self._runner.update_weights(weights, adapters)

    def sleep(self) -> None:
        """Frees the memory that holds the caches' keys and values, for instance so that a training step can use it.
        Does nothing if asleep already.

        The prefix cache is emptied, in host memory too. Until `wake_up`, `add_request` only queues requests, and
        weights may change; the engine keeps its references to the weights. Scales of quantised caches stay allocated.

        Raises:
            RuntimeError: there are unfinished requests (finish or abort them first), or a slice failed, as in `step`.
                Once that failure has been raised, call `sleep` again.
        """
        self._runner.sleep()

    def wake_up(self) -> None:
        """Allocates the caches again after `sleep`. Nothing is compiled again.

        Raises:
            RuntimeError: the engine is lost, as in `step`.
        """
        self._runner.wake_up()

    def stats(self) -> EngineStats:
        """The engine's sizes, and counts as of the last slice that the host has read."""
        return self._runner.stats()

    @contextlib.contextmanager
    def _serving(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        given: Sequence[np.ndarray] | None = None,
    ) -> Iterator[range]:
        """Adds requests and yields their ids. They are dropped at the end of the block, however it ends."""
        self._runner.check_usable()
        each = params_for_each(prompts, params)
        requests = [
            checked_request(*request, self._options, self._vocabulary) for request in zip(prompts, each, strict=True)
        ]
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
