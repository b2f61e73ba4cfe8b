"""The engine in trouble: Ctrl-C, models that fail at run time, calls that are left early, forks."""

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import gc
import itertools
import os
import signal
import sys
import threading
import time
import weakref
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from jaxpaged import Engine, SamplingParams
from jaxpaged._engine import books as books_module
from jaxpaged._engine.books import Books
from jaxpaged._engine.interrupts import Latch, without_interrupts
from jaxpaged._engine.runner import Runner
from jaxpaged._slice.packing import pack
from tests import toy_model
from tests.toy_model import (
    BLOCKS,
    MAX_REQUESTS,
    MAX_TOKENS,
    STEPS,
    create_engine,
    finish,
    not_compiled,
    random_weights,
    shared_engine,
)

PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
LONG = SamplingParams(max_tokens=30, temperature=1.0, seed=3)


def read_tokens(outputs):
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.fixture(autouse=True)
def interrupts():
    """SIGINT raises `KeyboardInterrupt`, also if pytest runs in the background, where a shell has it ignored."""
    before = {which: signal.getsignal(which) for which in (signal.SIGINT, signal.SIGALRM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for which, handler in before.items():
        signal.signal(which, handler)


@pytest.fixture(scope="module")
def expected():
    return read_tokens(shared_engine(16).generate(PROMPTS, LONG))


def assert_ready(engine, expected):
    """Nothing of earlier requests is left that could change the tokens of others or hold blocks."""
    assert engine._books.is_settled
    assert read_tokens(engine.generate(PROMPTS, LONG)) == expected
    assert int(engine._runner.state.allocator.num_free) == BLOCKS


def interrupt_waits(monkeypatch, number, raised=KeyboardInterrupt):
    """Ctrl-C while the engine waits for a slice, that number of waits from now: 0 is the one of the requests before."""
    wait, waits = Latch.wait, iter(range(1_000_000))

    def interrupted_wait(latch, seconds):
        if next(waits) == number:
            raise raised
        return wait(latch, seconds)

    monkeypatch.setattr(Latch, "wait", interrupted_wait)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, TimeoutError("an alarm")])
@pytest.mark.parametrize("number", [1, 3], ids=["the first slice", "one in the middle"])
def test_an_interrupted_step_loses_no_token(expected, monkeypatch, number, raised):
    engine = shared_engine(16)
    requests = [engine.add_request(prompt, LONG) for prompt in PROMPTS]
    outputs, num_interrupts = {}, 0
    interrupt_waits(monkeypatch, number, raised)
    while engine.has_unfinished_requests:
        try:
            outputs |= {output.request_id: output for output in engine.step()}
        except (KeyboardInterrupt, TimeoutError):
            num_interrupts += 1
    assert num_interrupts == 1
    assert read_tokens(outputs[request] for request in requests) == expected
    assert {outputs[request].outputs[0].finish_reason for request in requests} == {"length"}
    assert_ready(engine, expected)


@pytest.mark.parametrize("number", [1, 3], ids=["the first slice", "one in the middle"])
def test_an_interrupted_generate_leaves_nothing(expected, monkeypatch, number):
    engine = shared_engine(16)
    interrupt_waits(monkeypatch, number)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, LONG)
    assert_ready(engine, expected)


def test_an_abort_after_an_interrupt_spares_who_got_the_place(monkeypatch):
    """The request ends in a slice that is not read when it is aborted, and the slice after that is already sent."""
    engine, params = shared_engine(16), SamplingParams(max_tokens=MAX_TOKENS - 1, temperature=0)
    first = engine.add_request([1], dataclasses.replace(params, max_tokens=STEPS + 2))
    engine.step()
    engine.step()  # it has a place
    second = engine.add_request([2], params)
    interrupt_waits(monkeypatch, 0)
    with pytest.raises(KeyboardInterrupt):
        engine.step()  # sends the slice in which the second gets this place
    engine.abort(first)
    outputs = finish(engine)
    assert [outputs[request].outputs[0].finish_reason for request in (first, second)] == ["length", "length"]


def was_interrupted(interrupt, number, functions, engine, params, expected):
    """Whether there was one, while the engine served two requests. Nothing is lost."""
    requests = [engine.add_request(prompt, params) for prompt in PROMPTS[:2]]
    outputs, is_interrupted = {}, False
    with interrupt(number, functions):
        for _ in itertools.takewhile(lambda _: engine.has_unfinished_requests, range(1_000)):  # far too many
            reported = []
            try:
                reported = engine.step()
                str(reported)  # where Python looks
            except KeyboardInterrupt:
                is_interrupted = True
            outputs |= {output.request_id: output for output in reported}
    assert read_tokens(outputs[request] for request in requests) == expected, number
    assert all(outputs[request].finished for request in requests)
    return is_interrupted


BOOKS = {"advance", "_send", "send", "receive", "_take", "take_places", "take_tokens", "_finish", "_mark_new"}
BOOKS |= {"num_open", "has_more", "wants_logprobs", "undisturbed", "_drop"}


@contextlib.contextmanager
def interrupted_at_line(number, functions, interrupt, files=("_engine/runner.py", "_engine/books.py")):
    """Calls `interrupt` before that line, counted from 0 over all that run in these functions; None: in all."""
    lines = iter(range(1_000_000))

    def trace(frame, event, arg):
        in_file = frame.f_code.co_filename.endswith(files)
        is_ours = in_file and (functions is None or frame.f_code.co_name in functions)
        if event == "line" and is_ours and next(lines) == number:
            interrupt()
        return trace if is_ours else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="only the main thread gets SIGINT"
)
@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGALRM], ids=["ctrl-c", "an alarm"])
def test_a_signal_before_any_line_of_the_books_loses_nothing(expected, which):
    signal.signal(which, signal.default_int_handler)
    engine, interrupt = shared_engine(16), functools.partial(signal.raise_signal, which)
    at_line = functools.partial(interrupted_at_line, interrupt=interrupt)
    number = 0
    while was_interrupted(at_line, number, BOOKS, engine, LONG, expected[:2]):
        number += 7
    assert number > 200
    assert_ready(engine, expected)


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="only the main thread gets SIGINT"
)
def test_ctrl_c_in_any_lock_leaves_the_engines_thread_at_work(expected, monkeypatch):
    engine, run = shared_engine(16), Runner.run
    monkeypatch.setattr(Runner, "run", lambda *args: time.sleep(0.002) or run(*args))  # so that there are waits
    files = "concurrent/futures/_base.py", "threading.py", "_engine/interrupts.py"
    interrupt = functools.partial(signal.raise_signal, signal.SIGINT)
    for number in range(0, 600, 5):
        with contextlib.suppress(KeyboardInterrupt), interrupted_at_line(number, None, interrupt, files):
            engine.generate(PROMPTS[:1], dataclasses.replace(LONG, max_tokens=1))
        assert engine._runner.thread.submit(int).result(timeout=10) == 0, number
    assert_ready(engine, expected)


def test_an_engine_whose_thread_has_ended_says_so(monkeypatch):
    with not_compiled():
        engine = create_engine(batch_invariant=True)
    request = engine.add_request(PROMPTS[0], LONG)
    monkeypatch.setattr(concurrent.futures.Future, "set_exception", None)  # an error where the thread catches none
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"engine is lost.* the thread that runs its slices has ended"):
            finish(engine)
    with pytest.raises(RuntimeError, match="add the 1 unfinished requests again"):
        engine.abort(request)


@pytest.mark.parametrize(
    ("functions", "numbers"),
    [(BOOKS | {"take_outputs"}, range(0, 200, 7)), ({"send"}, range(0, 60, 3))],
    ids=["all", "send"],
)
def test_a_stream_that_was_left_may_be_collected_at_any_line(functions, numbers, expected):
    """In a cycle, as with the traceback of an exception, it is closed whenever Python looks for garbage."""
    engine = shared_engine(16)

    def leave():
        short = dataclasses.replace(LONG, max_tokens=3)  # so that each slice takes others
        stream = engine.stream([[9], [8, 7]] * (2 * MAX_REQUESTS), short)  # more than the device holds
        next(stream)
        cycle = [stream]
        cycle.append(cycle)

    gc.collect()
    gc.disable()
    try:
        for number in numbers:
            leave()
            requests, outputs = [engine.add_request(prompt, LONG) for prompt in PROMPTS], {}
            with interrupted_at_line(number, functions, gc.collect):
                while engine.has_unfinished_requests:
                    outputs |= {output.request_id: output for output in engine.step()}
            assert read_tokens(outputs[request] for request in requests) == expected, number
            assert all(outputs[request].finished for request in requests), number
    finally:
        gc.enable()
    assert_ready(engine, expected)


def test_weights_may_be_donated_once_generate_has_returned(expected, monkeypatch):
    engine = shared_engine(16)
    run = engine._runner.run

    def run_late(*arguments):
        time.sleep(0.05)
        return run(*arguments)

    monkeypatch.setattr(engine._runner, "run", run_late)
    weights = random_weights()
    engine.update_weights(weights)
    assert read_tokens(engine.generate(PROMPTS, LONG)) == expected
    jax.tree.map(lambda x: x.delete(), weights)
    engine.update_weights(random_weights())
    assert_ready(engine, expected)


@contextlib.contextmanager
def interrupted_behind_line(number, functions):
    """Ctrl-C before that line, counted from 0 over all in these functions. It is raised where Python looks for it."""
    interrupt = ctypes.pythonapi.PyErr_SetInterrupt
    interrupt.argtypes, interrupt.restype = [ctypes.py_object], None
    lines, monitoring, tool = iter(range(10_000)), sys.monitoring, sys.monitoring.DEBUGGER_ID

    def count(code, line):
        if next(lines) == number:
            monitoring.register_callback(tool, monitoring.events.LINE, None)
            victim = set()
            _reference = weakref.ref(victim, interrupt)
            del victim  # calls it, and after a `del` Python does not look

    monitoring.use_tool_id(tool, "ctrl-c")
    monitoring.register_callback(tool, monitoring.events.LINE, count)
    try:
        for function in functions:
            monitoring.set_local_events(tool, function.__code__, monitoring.events.LINE)
        yield
    finally:
        for function in functions:
            monitoring.set_local_events(tool, function.__code__, 0)
        monitoring.free_tool_id(tool)


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="only the main thread gets SIGINT"
)
def test_ctrl_c_while_step_returns_loses_nothing(expected):
    engine, params = shared_engine(16), dataclasses.replace(LONG, max_tokens=STEPS + 1)

    tokens, functions = [x[: STEPS + 1] for x in expected[:2]], (Engine.step, Books.take_outputs)
    number = 0
    while was_interrupted(interrupted_behind_line, number, functions, engine, params, tokens):
        number += 1
    assert number > 20
    assert_ready(engine, expected)


def test_interrupts_wait_for_the_end_and_find_the_handlers_of_before():
    handled, done = [], []

    def handle(number, frame):
        handled.append(number)
        raise KeyboardInterrupt

    signals = signal.SIGALRM, signal.SIGINT
    for which in signals:
        signal.signal(which, handle)

    @without_interrupts()
    @without_interrupts()
    def work():
        for which in (*signals, signal.SIGALRM):
            signal.raise_signal(which)
        assert not handled
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done
    assert handled == list(signals)
    assert all(signal.getsignal(which) is handle for which in signals)


class Failing:
    """The toy model, and a call of the host in it that fails on demand."""

    def __init__(self):
        self.fails = False

    def call(self, x):
        if self.fails:
            raise ValueError("the model fails")
        return x

    def apply(self, weights, tokens, positions, cache, step):
        cache, hidden = toy_model.apply(weights, tokens, positions, cache, step)
        return cache, jax.pure_callback(self.call, jax.ShapeDtypeStruct(hidden.shape, hidden.dtype), hidden)


def test_an_engine_whose_model_fails_says_so_and_refuses_everything(expected):
    model = Failing()
    cache = jax.tree.map(jnp.zeros_like, shared_engine(16)._runner.state.caches)
    engine = create_engine(model=model.apply, weights=random_weights(), cache=cache, batch_invariant=True)
    assert read_tokens(engine.generate(PROMPTS, LONG)) == expected
    request = engine.add_request(PROMPTS[0], LONG)
    engine.step()
    engine.add_request(PROMPTS[1], LONG)
    assert engine._runner.state  # the slice is over
    model.fails = True
    assert [output.request_id for output in engine.step()] == [request]  # of the slice before
    for call in (
        engine.step,
        engine.step,
        lambda: engine.abort(request),
        engine.abort,
        lambda: engine.add_request([1], LONG),
        lambda: engine.generate([[1]], LONG),
        lambda: next(engine.stream([[1]], LONG)),
        lambda: engine.update_weights(random_weights()),
    ):
        with pytest.raises(RuntimeError, match="this engine is lost") as caught:
            call()
        assert "add the 2 unfinished requests again" in str(caught.value)
        assert "the model fails" in str(caught.value.__cause__)
        assert "the model fails" in str(caught.value)
        model.fails = False
    assert engine.stats().num_generated > 0


def test_an_engine_is_lost_too_if_a_failure_shows_only_in_the_report():
    """As on a GPU, where a call may return before what it started has failed."""

    class Broken:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    with not_compiled():
        engine = create_engine(batch_invariant=True)
    engine.add_request(PROMPTS[0], LONG)
    runner = engine._runner
    fake = dict(run=lambda weights, state, last_report, inbox: (state, Broken()), copy=lambda report: report)
    runner.program = dataclasses.replace(runner.program, **fake)
    engine.step()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"this engine is lost.* RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS"):
            engine.step()


def test_a_stream_that_is_left_leaves_nothing(expected):
    engine = shared_engine(16)
    for output in engine.stream(PROMPTS * 10, LONG):  # more than the device holds
        assert not output.finished
        break
    assert_ready(engine, expected)
    stream = engine.stream(PROMPTS, LONG)
    next(stream)
    stream.close()
    assert_ready(engine, expected)


@pytest.mark.parametrize("failure", [MemoryError("no room for an inbox"), SystemExit("no room for an inbox")])
def test_a_slice_that_cannot_be_sent_loses_nothing(expected, monkeypatch, failure):
    engine, failures = shared_engine(16), [failure]

    def failing(inbox):
        if failures:
            raise failures.pop()
        return pack(inbox)

    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, LONG)
        if i == 1:
            engine.step()
    monkeypatch.setattr("jaxpaged._engine.runner.pack", failing)
    with pytest.raises(type(failure), match="no room for an inbox"):
        engine.step()
    outputs = finish(engine)
    assert read_tokens(outputs[request_id] for request_id in sorted(outputs)) == expected
    assert_ready(engine, expected)


def test_a_failed_generate_leaves_nothing(expected):
    engine, donated = shared_engine(16), random_weights()
    engine.update_weights(donated)
    donated["head"].delete()
    with pytest.raises(RuntimeError, match=r"weights at \['head'\] were deleted.* update_weights") as caught:
        engine.generate(PROMPTS, LONG)
    assert "deleted" in str(caught.value.__cause__)
    engine.update_weights(random_weights())
    assert_ready(engine, expected)


def test_slices_that_failed_for_deleted_weights_are_sent_again_with_new_ones(expected):
    engine, donated = shared_engine(16), random_weights()
    requests = [engine.add_request(PROMPTS[0], LONG)]
    engine.step()
    engine.update_weights(donated)
    donated["head"].delete()
    requests += [engine.add_request(prompt, LONG) for prompt in PROMPTS[1:]]
    engine.step()  # reads the slice before, and sends one that fails
    engine.update_weights(random_weights())
    outputs = finish(engine)
    assert read_tokens(outputs[request] for request in requests) == expected
    assert_ready(engine, expected)


def test_deleted_weights_are_refused(expected):
    engine, donated = shared_engine(16), random_weights()
    donated["head"].delete()
    for use in (engine.update_weights, lambda weights: create_engine(weights=weights, cache=())):
        with pytest.raises(ValueError, match=r"the one at \['head'\] was deleted.* your learner returned"):
            use(donated)
    assert_ready(engine, expected)


def test_sleep_counts_the_requests_whose_end_was_not_returned(monkeypatch):
    engine = shared_engine(16)
    for prompt in PROMPTS[:2]:
        engine.add_request(prompt, dataclasses.replace(LONG, max_tokens=2))
    monkeypatch.setattr(books_module, "make_output", mock.Mock(side_effect=[mock.Mock(), KeyboardInterrupt]))
    with pytest.raises(KeyboardInterrupt):
        finish(engine)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="2 requests are unfinished or not yet reported as finished"):
        engine.sleep()
    finish(engine)


def test_a_slice_behind_a_failed_one_does_not_run(monkeypatch):
    """With the first slice of other weights, cached prefixes are forgotten. If it fails, the next must not use them."""
    engine = shared_engine(16, prefix_cache=True)
    weights, prompts, params = random_weights(), [[*range(2, 30)]], dataclasses.replace(LONG, max_tokens=4)
    other = random_weights(1)
    expected = {}
    for key, given in (("other", other), ("before", weights)):
        engine.update_weights(given)
        expected[key] = read_tokens(engine.generate(prompts, params))
    assert expected["other"] != expected["before"]
    assert engine._runner.state  # the slices are over
    runner, failures = engine._runner, [RuntimeError("no room for the call")]
    run = runner.program.run

    def failing(*args):
        if failures:
            raise failures.pop()
        return run(*args)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "program", dataclasses.replace(runner.program, run=failing))
        engine.update_weights(other)
        num_found = engine.stats().num_found
        requests = [engine.add_request(prompts[0], params)]
        runner.advance()
        requests.append(engine.add_request(prompts[0], params))
        with pytest.raises(RuntimeError, match="no room for the call"):
            engine.step()
        outputs = finish(engine)
    assert read_tokens(outputs[request] for request in requests) == expected["other"] * 2
    assert engine.stats().num_found - num_found == 24  # by the second request, of the first one's prompt
    engine.update_weights(weights)
    assert read_tokens(engine.generate(prompts, params)) == expected["before"]


def test_generate_spares_the_requests_of_others(expected):
    engine = shared_engine(16)
    first = engine.add_request(PROMPTS[0], LONG)
    engine.step()
    assert read_tokens(engine.generate(PROMPTS[1:3], LONG)) == expected[1:3]
    stream = engine.stream(PROMPTS[3:], LONG)
    second = engine.add_request(PROMPTS[1], LONG)
    *_, last = stream
    assert read_tokens([last]) == expected[3:]
    outputs = finish(engine)
    assert read_tokens(outputs[request] for request in (first, second)) == expected[:2]


def test_abort_says_whom_it_knew_and_ends_all_without_an_id(expected):
    engine, params = shared_engine(16), SamplingParams(max_tokens=MAX_TOKENS - 4, n=2)
    assert not engine.abort()
    requests = [engine.add_request(prompt, params) for prompt in PROMPTS * 10]
    assert not engine.abort(requests[-1] + 1)
    engine.step()
    assert engine.abort(requests[0])
    assert engine.abort(requests[1], 1)
    assert not engine.abort(requests[1], 2)
    assert engine.abort()
    outputs = finish(engine)
    assert outputs.keys() == set(requests)
    assert {completion.finish_reason for output in outputs.values() for completion in output.outputs} == {"abort"}
    assert all(len(tokens) < 3 * STEPS for tokens in read_tokens(outputs.values()))
    assert not engine.abort(requests[0])
    with pytest.raises(ValueError, match="pass the request_id of the completion; got completion=1 alone"):
        engine.abort(completion=1)
    assert_ready(engine, expected)


def test_an_engine_from_before_a_fork_says_so(monkeypatch):
    engine, process = shared_engine(16), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    with pytest.raises(RuntimeError, match=r"made before os.fork\(\)"):
        engine.generate(PROMPTS, LONG)
