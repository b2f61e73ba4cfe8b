"""Runs slices: the caller queues them, a worker thread runs them in order, and the caller reads their reports."""

import dataclasses
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged._engine.books import Books, Sent
from jaxpaged._engine.counting import count_report
from jaxpaged._engine.grammar_room import GrammarRoom, Part, compile_put
from jaxpaged._engine.host_tier.copies import HostCopies, check_host_tier
from jaxpaged._engine.host_tier.tier import HostTier, Moves
from jaxpaged._engine.inputs import find_deleted, keys_and_values, own
from jaxpaged._engine.interrupts import without_interrupts
from jaxpaged._engine.on_mesh import find_mesh, warn_of_old_nccl
from jaxpaged._engine.program import compile_program, first_state
from jaxpaged._engine.prompt_aux import PromptAux
from jaxpaged._engine.records import EngineStats
from jaxpaged._engine.requests import MOST_ARRIVALS
from jaxpaged._engine.rollouts import Collector
from jaxpaged._integers import checked_size, checked_tuple
from jaxpaged._slice.model import Functions
from jaxpaged._slice.options import ResolvedOptions
from jaxpaged._slice.packing import pack, unpack
from jaxpaged._slice.pytrees import difference
from jaxpaged._slice.state import Report, State

AHEAD = 1  # slices in flight while the host reads the one before them
# The next slice is sent this long before the end of the running one, at least: seconds, and a part of the slice.
SEND_SECONDS, SEND_PART = 4e-3, 0.25
NUM_TIMED = 4  # slices: the expected time of a step is that of the quickest of them


def time_to_spare(seconds: float) -> float:
    """How long after the start of a slice of this many seconds the next one can be sent."""
    return seconds - max(SEND_SECONDS, SEND_PART * seconds)


class Runner:
    """Runs slices for an engine, whose books say what to send with them. Holds the weights and the state.

    Attributes:
        books: the engine's books.
        weights: the weights of the next slice.
        state_of_slice: the state returned by the last slice that the thread has started.
        collector: the collector of the running rollout, if any.
        since: time of the last update of the stats, or of the first request since the engine was idle.
        on_slice_end: called on a thread of the runner at the end of each slice.
        counts: the stats as of the last slice that was read.
    """

    def __init__(self, functions: Functions, weights: Any, caches: Any, options: ResolvedOptions, books: Books):
        self.books, self.options = books, options
        self.mesh = find_mesh(caches)
        if self.mesh is not None and options.is_gpu:
            warn_of_old_nccl()
        check_host_tier(options)
        setup, weights, state = first_state(functions, weights, caches, self.mesh, options)
        self.kinds = setup.kinds
        self.weights, self.state_of_slice = weights, state
        self.tier: HostTier | None = None
        if options.host_cache_bytes is not None:
            copies = HostCopies(options.host_cache_bytes, state, self.mesh, options.compiler_options)
            self.tier = HostTier(copies, least_tokens=options.chunk_tokens // 2, growth=options.growth)
        self.room: GrammarRoom | None = None
        if state.grammars is not None:
            self.room = GrammarRoom(options.num_grammar_states, options.num_grammar_masks)
            self._put_part = compile_put(state.grammars.pool, self.mesh)
        self.program = compile_program(setup, weights, state, self.mesh)
        self.prompt_aux = PromptAux(self.program.aux, options) if options.prompt_aux else None
        self._last_report = self.program.no_report
        # The call of a slice needs milliseconds. On a CPU, or if the model has a loop, it blocks until its steps end.
        self.thread, self._process = ThreadPoolExecutor(1, thread_name_prefix="jaxpaged"), os.getpid()
        self._worker = self.thread.submit(threading.current_thread).result()
        # Another thread waits for the ends of slices and records their times: a caller may read them much later.
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="jaxpaged-watcher")
        self.on_slice_end: Callable[[], None] = do_nothing
        self._asleep: list[tuple[jax.Array, Any, Any]] = []  # deleted arrays, their types and shardings
        self._failure: BaseException | None = None  # the failure of a slice to which the state was donated
        self._unread_failure: Exception | None = None  # the failure of a slice: later ones do not run
        self.collector: Collector | None = None
        self.since = time.perf_counter()
        self._step_seconds: deque[float] = deque(maxlen=NUM_TIMED)  # time of a step in each of the last slices
        self._ended = self.since  # end of the last slice that was read
        num_blocks = options.num_blocks - 1
        self.counts = EngineStats(
            max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len,
            chunk_tokens=options.chunk_tokens,
            widths=options.widths,
            steps_per_slice=options.steps_per_slice,
            num_blocks=num_blocks,
            num_free_blocks=num_blocks,
            steps_by_kind={kind.name: 0 for kind in self.kinds},
        )

    @property
    def state(self) -> State:
        """The state after the slices in flight. Reading its arrays waits for them."""
        for sent in self.books.under_way:
            if (failure := self.wait_for(sent)) is not None:
                raise failure
        return self.state_of_slice

    @property
    def seconds_to_spare(self) -> float:
        if not self.books.under_way or self.books.under_way[0].ended is not None or not self._step_seconds:
            return 0.0
        now, running = time.perf_counter(), self.books.under_way[0]
        began = max(running.began or now, self._ended)
        return max(began + time_to_spare(running.num_steps * min(self._step_seconds)) - now, 0.0)

    def stats(self) -> EngineStats:
        num_waiting = len(self.books.on_device) - self.counts.num_running
        room = None if self.books.is_device_empty else self.room  # else nothing uses it, and nothing waits for it
        return dataclasses.replace(
            self.counts,
            num_queued=len(self.books.queue),
            num_waiting=max(num_waiting, 0),
            num_brought=0 if self.tier is None else self.tier.num_brought,
            host_bytes=0 if self.tier is None else self.tier.host_bytes,
            num_grammar_states=0 if room is None else room.num_used_states,
            waits_for_grammar_room=room is not None and room.is_full,
        )

    def check_usable(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError(
                "this engine was made before os.fork(): its thread and its device belong to the parent process. "
                "Make engines in the process that uses them; start processes with multiprocessing's 'spawn'."
            )
        if self._failure is not None:
            raise RuntimeError(
                "this engine is lost: a slice failed, and its donated caches are gone. Make another engine, and add "
                f"the {self.books.num_unfinished} unfinished requests again. The failure was "
                f"{type(self._failure).__name__}: {self._failure}"
            ) from self._failure

    def advance(self) -> None:
        """Sends a slice, and reads those before it."""
        self.check_usable()
        if self._asleep:
            raise RuntimeError("the engine is asleep and has no caches; call wake_up() first.")
        with self.books.undisturbed():
            if self.tier is not None and self.books.is_device_empty:
                self.tier.wait()
            if len(self.books.under_way) <= AHEAD:  # an interrupt may have left more
                self._send()
            while len(self.books.under_way) > AHEAD:
                self.receive()
            if not self.books.num_open:  # the caller may donate the weights after this call
                for sent in self.books.under_way:
                    self.wait_for(sent)

    @without_interrupts()
    def _send(self) -> None:
        """Starts a slice. If more requests wait than one slice accepts, slices without steps before it accept them."""
        waiting = [each for each in (self.tier, self.room) if each is not None]
        for each in waiting:
            each.before_send(self.books.rows_sent)
        while True:
            sent = self.books.send(MOST_ARRIVALS, lambda row: any(each.holds(row) for each in waiting))
            has_more = self.books.has_more
            sent.num_steps = 0 if has_more else self.options.steps_per_slice
            try:
                if self.tier is not None:
                    sent.moves = self.tier.next_moves()
                if self.room is not None:
                    sent.parts = self.room.parts_for(sent.rows)
                inbox = self.program.inbox_of(
                    sent.rows,
                    sent.aborts,
                    wants_logprobs=self.books.wants_logprobs,
                    num_steps=sent.num_steps,
                    forgets=sent.forgets,
                )
                # Copied to the device while the slice before it runs.
                words = jax.device_put(pack(inbox), self.program.no_report.sharding)
                sent.words = self.thread.submit(self.run, self.weights, words, sent)
                sent.words.add_done_callback(sent.has_returned.set)
            except BaseException:
                self._take_back_last()
                raise
            if not has_more:
                return

    def run(self, weights: Any, inbox: jax.Array, sent: Sent) -> jax.Array:
        """Runs a slice from a packed inbox to a packed report. Runs on the engine's thread, which must do nothing else:
        the GPU waits for it."""
        sent.began = time.perf_counter()
        if self._unread_failure is not None:  # its aborts and forgotten prefixes have not taken effect
            raise self._unread_failure
        try:
            try:
                if self.tier is not None:
                    for state in self.tier.run(self.state_of_slice, sent.moves):
                        self.state_of_slice = state
            except Exception as failure:
                sent.failure = failure  # the slice runs anyway: later ones rely on its inbox
            for part in sent.parts:
                self.state_of_slice = self._with_part(self.state_of_slice, part)
            state, report = self.program.run(weights, self.state_of_slice, self._last_report, inbox)
            words = self.program.copy(report)
            self._watcher.submit(self._watch, sent, words)
            self.state_of_slice, self._last_report = state, report
        except Exception as failure:
            if any(leaf.is_deleted() for leaf in jax.tree.leaves((self.state_of_slice, self._last_report))):
                raise StateLostError from sent.failure or failure
            if (path := find_deleted(weights)) is None:
                self._unread_failure = failure
                raise
            self._unread_failure = RuntimeError(
                f"the engine's weights at {path} were deleted, as jit does with arrays that are donated to it. Pass "
                "the new ones to update_weights and continue: no request of add_request is lost."
            )
            raise self._unread_failure from failure
        return words

    def _with_part(self, state: State, part: Part) -> State:
        assert state.grammars is not None
        pool = self._put_part(state.grammars.pool, *part)
        return dataclasses.replace(state, grammars=dataclasses.replace(state.grammars, pool=pool))

    def _watch(self, sent: Sent, words: jax.Array) -> None:
        """Waits for the end of a slice, on the watcher's thread. A failure is raised where the slice is read."""
        try:
            words.block_until_ready()
        finally:
            sent.ended = time.perf_counter()
            self.on_slice_end()

    def wait_for(self, sent: Sent) -> BaseException | None:
        """Waits for the call of a slice to return, and returns its failure, if any."""
        assert sent.words is not None
        while not sent.has_returned.wait(1.0):
            if self._worker not in threading.enumerate():  # `is_alive` may wrongly return False after Ctrl-C
                self._failure = RuntimeError("the thread that runs its slices has ended")
                self.check_usable()
        return sent.words.exception()

    def receive(self) -> None:
        """Waits for the oldest slice in flight and enters its report. An interrupted wait changes nothing."""
        sent = self.books.under_way[0]
        if (failure := self.wait_for(sent)) is None:
            # If this fails, the next call repeats it.
            self._take(self.read(sent.result()))
            failure = sent.failure
        elif isinstance(failure, StateLostError):
            self._failure = failure.__cause__
            self.check_usable()
        else:
            self._take_back()
        if failure is not None:
            raise failure

    @without_interrupts()
    def _take_back(self) -> None:
        """After a failed slice, which stops the slices after it: prepares what was sent with them to be sent again."""
        while self.books.under_way and self.wait_for(self.books.under_way[-1]) is not None:
            self._take_back_last()
        self._unread_failure = None

    def _take_back_last(self) -> None:
        sent = self.books.take_back()
        if self.tier is not None:
            self.tier.lose(sent.moves)

    def read(self, words: jax.Array) -> Report:
        """The report as NumPy arrays."""
        try:
            return unpack(np.asarray(words), self.program.report_types)
        except RuntimeError as failure:  # the call had returned, so the new state is broken too
            self._failure = failure
            self.check_usable()
            raise

    @without_interrupts()
    def _take(self, report: Report) -> None:
        if self.collector is not None:  # first: if a rollout lacks memory, nothing else has changed
            sent = self.books.under_way[0]
            places = dict(zip(report.request_ids.tolist(), sent.rows, strict=False))
            self.collector.take(sent.result(), report, self.books.on_device | places, sent.version)
        sent = self.books.take_places(report)
        if self.room is not None:
            self.room.note_arrival(sent.rows)
        rows = list(self.books.on_device.values())
        if self.prompt_aux is not None:
            self.prompt_aux.take(report, sent.moves, self.books.on_device)
        counts = self.books.take_tokens(report, sent.version)
        if self.tier is not None:
            if sent.failure is not None:
                self.tier.lose(sent.moves)
                sent.moves = Moves()
            self.tier.after_report(report, sent.moves, rows)
        since, self.since = self.since, time.perf_counter()
        began, self._ended = max(sent.began or since, self._ended), sent.ended or self.since
        if num_steps := int(report.outbox.num_steps):  # time on the device: waits of the caller do not count
            self._step_seconds.append((self._ended - began) / num_steps)
        self.counts = count_report(self.counts, report, self.kinds, seconds=self.since - since, **counts)

    def update_weights(self, weights: Any, adapters: Sequence[int] | None) -> None:
        self.check_usable()
        weights = own(weights)
        if found := difference(self.weights, weights):
            before, after = (type(x).__name__ for x in (self.weights, weights))
            if before == "State" != after:  # Flax NNX
                found = f"it was a State and is a {after}: pass nnx.state(model)"
            raise ValueError(f"weights must have the structure, shapes and dtypes of the old ones; {found}.")
        adapters = None if adapters is None else checked_tuple("adapters", adapters)
        for adapter in adapters or ():
            if checked_size("adapters", adapter, 0) >= (num_adapters := self.options.num_adapters):
                raise ValueError(f"adapters must be below the engine's {num_adapters=}; got adapters={adapter}.")
        if self.mesh is not None:
            weights = jax.device_put(weights, jax.tree.map(lambda x: x.sharding, self.weights))
        if find_deleted(self.weights) is not None:  # failed slices are sent again, with the new weights
            for sent in self.books.under_way:
                self.wait_for(sent)
            if self._unread_failure is not None:
                self._take_back()
        with without_interrupts():
            self.books.version += 1
            self.books.forget(adapters)
            self.weights = weights

    def sleep(self) -> None:
        self.check_usable()
        if self._asleep:
            return
        if self.books.num_unsettled:
            raise RuntimeError(
                f"{self.books.num_unsettled} requests are unfinished or not yet reported as finished. Call step until "
                "has_unfinished_requests is False, or abort() first, and close every stream; then sleep."
            )
        while not self.books.is_device_empty:  # dropped requests
            self.advance()
        while self.books.under_way:  # they hold memory, and their failures are reported once
            self.receive()
        pools = [(x, jax.typeof(x), x.sharding) for x in keys_and_values(self.state.caches)]
        with without_interrupts():
            if self.tier is not None:
                self.tier.clear()
            self._asleep = pools
            for pool, *_ in pools:
                pool.delete()

    def wake_up(self) -> None:
        self.check_usable()
        if self._asleep:
            fresh = {id(x): jnp.zeros(kind.shape, kind.dtype, device=where) for x, kind, where in self._asleep}
            caches = jax.tree.map(lambda x: fresh.get(id(x), x), self.state_of_slice.caches)
            self.books.forget()  # first, because Ctrl-C may come anywhere
            self.state_of_slice = dataclasses.replace(self.state_of_slice, caches=caches)
            self._asleep = []


def do_nothing() -> None:
    pass


class StateLostError(Exception):
    """A slice failed after the state was donated to it."""
