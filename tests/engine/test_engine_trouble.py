"""The engine after a fault: Ctrl-C, models that fail at run time, abandoned calls, forks."""

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
import pytest

from jaxpaged import Engine, SamplingParams
from jaxpaged._engine.books import Books
from jaxpaged._engine.interrupts import Latch, without_interrupts
from jaxpaged._engine.runner import Runner
from jaxpaged._slice.packing import pack
from tests import toy_model
from tests.toy_model import (
    MAX_REQUESTS,
    MAX_TOKENS,
    STEPS,
    assert_idle,
    continuation,
    counting,
    create_engine,
    finish,
    greedy,
    not_compiled,
    random_weights,
    shared_engine,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("idle_engines")
needs_the_main_thread = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="only the main thread gets SIGINT"
)

PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
LONG = SamplingParams(max_tokens=30, seed=3)


@pytest.fixture(autouse=True)
def interrupts():
    """Makes SIGINT raise `KeyboardInterrupt`, even if pytest runs in the background, where shells ignore the signal."""
    before = {which: signal.getsignal(which) for which in (signal.SIGINT, signal.SIGALRM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for which, handler in before.items():
        signal.signal(which, handler)


@pytest.fixture(scope="module")
def expected():
    return tokens_of(shared_engine().generate(PROMPTS, LONG))


def assert_ready(engine, expected):
    """Asserts that earlier requests left nothing that changes tokens of others or holds blocks."""
    assert not engine._books.num_unsettled
    assert tokens_of(engine.generate(PROMPTS, LONG)) == expected
    assert_idle(engine)


def serve(engine, requests):
    """The tokens of these requests. All of them finish."""
    outputs = finish(engine)
    assert {outputs[request].outputs[0].finish_reason for request in requests} == {"length"}
    return tokens_of(outputs[request] for request in requests)


def interrupt_waits(monkeypatch, number, raised=KeyboardInterrupt):
    """Ctrl-C while the engine waits for a slice, in wait `number` from now; wait 0 is for earlier requests."""
    wait, waits = Latch.wait, iter(range(1_000_000))

    def interrupted_wait(latch, seconds):
        if next(waits) == number:
            raise raised
        return wait(latch, seconds)

    monkeypatch.setattr(Latch, "wait", interrupted_wait)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, TimeoutError("an alarm")])
@pytest.mark.parametrize("number", [1, 3], ids=["the first slice", "one in the middle"])
def test_an_interrupted_step_loses_no_token(expected, monkeypatch, number, raised):
    engine = shared_engine()
    requests = [engine.add_request(prompt, LONG) for prompt in PROMPTS]
    outputs, num_interrupts = {}, 0
    interrupt_waits(monkeypatch, number, raised)
    while engine.has_unfinished_requests:
        try:
            outputs |= {output.request_id: output for output in engine.step()}
        except (KeyboardInterrupt, TimeoutError):
            num_interrupts += 1
    assert num_interrupts == 1
    assert tokens_of(outputs[request] for request in requests) == expected
    assert_ready(engine, expected)


@pytest.mark.parametrize("number", [1, 3], ids=["the first slice", "one in the middle"])
def test_an_interrupted_generate_leaves_nothing(expected, monkeypatch, number):
    engine = shared_engine()
    interrupt_waits(monkeypatch, number)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, LONG)
    assert_ready(engine, expected)


def test_an_abort_after_an_interrupt_spares_the_next_request_in_its_place(monkeypatch):
    """The aborted request ends in a slice that is not read yet, and the following slice is already sent."""
    engine = shared_engine()
    first = engine.add_request([1], greedy(STEPS + 2))
    engine.step()
    engine.step()  # the request has a place
    second = engine.add_request([2], greedy(MAX_TOKENS - 1))
    interrupt_waits(monkeypatch, 0)
    with pytest.raises(KeyboardInterrupt):
        engine.step()  # sends the slice in which the second gets this place
    engine.abort(first)
    serve(engine, (first, second))


def was_interrupted(interrupt, number, functions, engine, params, expected):
    """Serves two requests and returns whether an interrupt occurred. Nothing may be lost."""
    requests = [engine.add_request(prompt, params) for prompt in PROMPTS[:2]]
    outputs, is_interrupted = {}, False
    with interrupt(number, functions):
        for _ in itertools.takewhile(lambda _: engine.has_unfinished_requests, range(1_000)):  # far too many
            reported = []
            try:
                reported = engine.step()
                str(reported)  # Python handles signals here
            except KeyboardInterrupt:
                is_interrupted = True
            outputs |= {output.request_id: output for output in reported}
    assert tokens_of(outputs[request] for request in requests) == expected, number
    assert all(outputs[request].finished for request in requests)
    return is_interrupted


BOOKS = {"advance", "_send", "send", "receive", "_take", "take_places", "take_tokens", "_finish", "_mark_new"}
BOOKS |= {"num_open", "has_more", "wants_logprobs", "undisturbed", "_drop"}


@contextlib.contextmanager
def interrupt_at_line(number, functions, interrupt, files=("_engine/runner.py", "_engine/books.py")):
    """Calls `interrupt` before line `number`, counted over the executed lines of these functions; None: of all."""
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


@needs_the_main_thread
@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGALRM], ids=["ctrl-c", "an alarm"])
def test_a_signal_before_any_line_of_the_books_loses_nothing(expected, which):
    signal.signal(which, signal.default_int_handler)
    engine, interrupt = shared_engine(), functools.partial(signal.raise_signal, which)
    at_line = functools.partial(interrupt_at_line, interrupt=interrupt)
    number = 0
    while was_interrupted(at_line, number, BOOKS, engine, LONG, expected[:2]):
        number += 7
    assert number > 200
    assert_ready(engine, expected)


@needs_the_main_thread
def test_ctrl_c_in_any_lock_leaves_the_engines_thread_at_work(expected, monkeypatch):
    engine, run = shared_engine(), Runner.run
    monkeypatch.setattr(Runner, "run", lambda *args: time.sleep(0.002) or run(*args))  # makes the engine wait
    files = "concurrent/futures/_base.py", "threading.py", "_engine/interrupts.py"
    interrupt = functools.partial(signal.raise_signal, signal.SIGINT)
    for number in range(0, 600, 5):
        with contextlib.suppress(KeyboardInterrupt), interrupt_at_line(number, None, interrupt, files):
            engine.generate(PROMPTS[:1], dataclasses.replace(LONG, max_tokens=1))
        assert engine._runner.thread.submit(int).result(timeout=10) == 0, number
    assert_ready(engine, expected)


def test_a_call_after_the_engines_thread_has_ended_raises(monkeypatch):
    with not_compiled():
        engine = create_engine(batch_invariant=True)
    request = engine.add_request(PROMPTS[0], LONG)
    monkeypatch.setattr(concurrent.futures.Future, "set_exception", None)  # an error that the thread does not catch
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
def test_an_abandoned_stream_may_be_collected_at_any_line(functions, numbers, expected):
    """A stream in a reference cycle, as in the traceback of an exception, is closed whenever garbage is collected."""
    engine = shared_engine()

    def leave():
        short = dataclasses.replace(LONG, max_tokens=3)  # so that requests change in each slice
        stream = engine.stream([[9], [8, 7]] * MAX_REQUESTS, short)  # more than the device holds
        next(stream)
        cycle = [stream]
        cycle.append(cycle)

    gc.collect()
    gc.disable()
    try:
        for number in numbers:
            leave()
            requests = [engine.add_request(prompt, LONG) for prompt in PROMPTS]
            with interrupt_at_line(number, functions, gc.collect):
                assert serve(engine, requests) == expected, number
    finally:
        gc.enable()
    assert_ready(engine, expected)


def test_weights_may_be_donated_once_generate_has_returned(expected, monkeypatch):
    engine = shared_engine()
    run = engine._runner.run
    monkeypatch.setattr(engine._runner, "run", lambda *args: time.sleep(0.05) or run(*args))
    weights = random_weights()
    engine.update_weights(weights)
    assert tokens_of(engine.generate(PROMPTS, LONG)) == expected
    assert all(sent.has_returned.is_set for sent in engine._books.under_way)  # no slice still reads the weights
    jax.tree.map(lambda x: x.delete(), weights)
    engine.update_weights(random_weights())
    assert_ready(engine, expected)


@contextlib.contextmanager
def interrupt_after_line(number, functions):
    """Ctrl-C before line `number` of these functions. It is raised at the next point where Python handles signals."""
    interrupt = ctypes.pythonapi.PyErr_SetInterrupt
    interrupt.argtypes, interrupt.restype = [ctypes.py_object], None
    lines, monitoring, tool = iter(range(10_000)), sys.monitoring, sys.monitoring.DEBUGGER_ID

    def count(code, line):
        if next(lines) == number:
            monitoring.register_callback(tool, monitoring.events.LINE, None)
            victim = set()
            _reference = weakref.ref(victim, interrupt)
            del victim  # calls it; after a `del` Python does not handle signals

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


@needs_the_main_thread
def test_ctrl_c_while_step_returns_loses_nothing(expected):
    engine, params = shared_engine(), dataclasses.replace(LONG, max_tokens=STEPS + 1)

    tokens, functions = [x[: STEPS + 1] for x in expected[:2]], (Engine.step, Books.take_outputs)
    number = 0
    while was_interrupted(interrupt_after_line, number, functions, engine, params, tokens):
        number += 1
    assert number > 20
    assert_ready(engine, expected)


def test_interrupts_are_deferred_and_handlers_restored():
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


def test_an_engine_whose_model_fails_raises_and_refuses_every_call(expected):
    failures = []

    def call(x):
        if failures:
            raise failures.pop()
        return x

    def apply(*args):
        cache, hidden = toy_model.apply(*args)
        return cache, jax.pure_callback(call, jax.typeof(hidden), hidden)

    engine = create_engine(model=apply, batch_invariant=True)
    assert tokens_of(engine.generate(PROMPTS, LONG)) == expected
    request = engine.add_request(PROMPTS[0], LONG)
    engine.step()
    engine.add_request(PROMPTS[1], LONG)
    assert engine._runner.state  # the slice is over
    failures.append(ValueError("the model fails"))
    assert [output.request_id for output in engine.step()] == [request]  # from the slice before
    for use in (
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
            use()
        assert "add the 2 unfinished requests again" in str(caught.value)
        assert "the model fails" in str(caught.value.__cause__)
        assert "the model fails" in str(caught.value)
    assert engine.stats().num_generated > 0


def test_a_failure_that_appears_only_in_the_report_loses_the_engine():
    """As on a GPU, where a call may return before its work fails."""

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


def test_an_abandoned_stream_leaves_nothing_behind(expected):
    engine = shared_engine()
    for _ in engine.stream(PROMPTS * 10, LONG):  # more than the device holds
        break
    assert_ready(engine, expected)
    with contextlib.closing(engine.stream(PROMPTS, LONG)) as stream:
        next(stream)
    assert_ready(engine, expected)


@pytest.mark.parametrize("failure", [MemoryError("no room for an inbox"), SystemExit("no room for an inbox")])
def test_a_slice_that_cannot_be_sent_loses_nothing(expected, monkeypatch, failure):
    engine, failures = shared_engine(), [failure]

    def failing(inbox):
        if failures:
            raise failures.pop()
        return pack(inbox)

    requests = [engine.add_request(prompt, LONG) for prompt in PROMPTS[:2]]
    engine.step()
    requests += [engine.add_request(prompt, LONG) for prompt in PROMPTS[2:]]
    monkeypatch.setattr("jaxpaged._engine.runner.pack", failing)
    with pytest.raises(type(failure), match="no room for an inbox"):
        engine.step()
    assert serve(engine, requests) == expected
    assert_ready(engine, expected)


@pytest.mark.parametrize("is_reported", [False, True])
def test_slices_that_failed_for_deleted_weights_are_sent_again_with_new_ones(expected, is_reported):
    engine, donated = shared_engine(), random_weights()
    requests = [engine.add_request(PROMPTS[0], LONG)]
    engine.step()
    engine.update_weights(donated)
    donated["head"].delete()
    requests += [engine.add_request(prompt, LONG) for prompt in PROMPTS[1:]]
    aborted = engine.add_request([1], LONG)
    engine.step()  # reads the previous slice, and sends one that fails
    if is_reported:
        with pytest.raises(RuntimeError, match=r"weights at \['head'\] were deleted.* update_weights") as caught:
            engine.step()
        assert "deleted" in str(caught.value.__cause__)
    engine.abort(aborted)
    engine.update_weights(random_weights())
    assert serve(engine, requests) == expected
    assert_ready(engine, expected)


def test_sleep_counts_the_requests_whose_end_was_not_returned(monkeypatch):
    engine = shared_engine()
    for prompt in PROMPTS[:2]:
        engine.add_request(prompt, dataclasses.replace(LONG, max_tokens=2))
    monkeypatch.setattr("jaxpaged._engine.books.make_output", mock.Mock(side_effect=[mock.Mock(), KeyboardInterrupt]))
    with pytest.raises(KeyboardInterrupt):
        finish(engine)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="2 requests are unfinished or not yet reported as finished"):
        engine.sleep()
    finish(engine)


def test_a_slice_after_a_failed_one_does_not_run(monkeypatch):
    """The first slice with new weights forgets cached prefixes. If it fails, the next slice must not match any."""
    engine, prompt, params = shared_engine(prefix_cache=True), [*range(2, 30)], dataclasses.replace(LONG, max_tokens=4)
    before = tokens_of(engine.generate([prompt], params))
    expected = continuation(random_weights(1), prompt, params)[0]
    assert before != [expected]
    assert engine._runner.state  # the slices are over
    runner, failures = engine._runner, [RuntimeError("no room for the call")]
    run = runner.program.run

    def failing(*args):
        if failures:
            raise failures.pop()
        return run(*args)

    with monkeypatch.context() as patch, counting(engine) as counts:
        patch.setattr(runner, "program", dataclasses.replace(runner.program, run=failing))
        engine.update_weights(random_weights(1))
        requests = [engine.add_request(prompt, params)]
        runner.advance()
        requests.append(engine.add_request(prompt, params))
        with pytest.raises(RuntimeError, match="no room for the call"):
            engine.step()
        assert serve(engine, requests) == [expected] * 2
    assert counts.num_found == 24  # matched by the second request in the first one's prompt
    engine.update_weights(random_weights())
    assert tokens_of(engine.generate([prompt], params)) == before


def test_abort_returns_if_it_found_requests_and_ends_all_without_an_id(expected):
    engine, params = shared_engine(), SamplingParams(max_tokens=MAX_TOKENS - 4, n=2)
    assert not engine.abort()
    requests = [engine.add_request(prompt, params) for prompt in PROMPTS * 10]
    assert not engine.abort(requests[-1] + 1)
    engine.step()
    assert engine.abort(requests[0])
    assert engine.abort(requests[1], 1)
    assert not engine.abort(requests[1], 2)
    assert engine.abort()
    outputs = finish(engine)
    assert outputs.keys() == {*requests}
    assert {completion.finish_reason for output in outputs.values() for completion in output.outputs} == {"abort"}
    assert all(len(tokens) < 3 * STEPS for tokens in tokens_of(outputs.values()))
    assert not engine.abort(requests[0])
    assert_ready(engine, expected)


def test_an_engine_from_before_a_fork_raises(monkeypatch):
    engine, process = shared_engine(), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    with pytest.raises(RuntimeError, match=r"made before os.fork\(\)"):
        engine.generate(PROMPTS, LONG)
