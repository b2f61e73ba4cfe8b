"""The engine's host-side bookkeeping, with hand-written reports: no device, no model."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxpaged import SamplingParams
from jaxpaged._engine import books as books_module
from jaxpaged._engine.books import Books
from jaxpaged._scheduler.records import RequestStatus, SubmitStatus

MAX_REQUESTS = 3
NOBODY = MAX_REQUESTS


def take(books, places=(), tokens=(), finished=()):
    """Passes a report to the books: `places` of the sent rows, `tokens` as (place, token) in the order of steps, and
    `finished` places."""
    ends = np.zeros(MAX_REQUESTS, np.int32)
    ends[list(finished)] = RequestStatus.EXHAUSTED
    owners, drawn = np.array(list(tokens) or [(NOBODY, 0)], np.int32).T
    scores = dict.fromkeys(("request_ids", "positions", "logprobs", "is_best"), np.full(1, NOBODY))
    report = SimpleNamespace(
        request_ids=np.array(places, np.int32),
        submit_statuses=np.full(len(places), SubmitStatus.ACCEPTED),
        outbox=SimpleNamespace(request_ids=owners, tokens=drawn, finished=ends),
        logprobs=np.zeros(len(owners), np.float32),
        top_logprobs=None,
        aux=None,
        scores=SimpleNamespace(**scores, top_logprobs=None),
        num_cached=None,
    )
    return books.take_tokens(report, books.take_places(report).version)


@pytest.fixture
def books():
    return Books(max_requests=MAX_REQUESTS, seed=0)


def add(books, count, **options):
    params = SamplingParams(max_tokens=8, **options)
    return [books.add(np.array([1, 2], np.int32), params) for _ in range(count)]


def ids(rows):
    return [row.request_id for row in rows]


def take_tokens(books):
    return [(output.request_id, output.outputs[0].token_ids) for output in books.take_outputs()]


def test_output_that_may_wait_comes_later_or_at_the_end(books):
    first, second = add(books, 2)
    books.send(2)
    take(books, places=[0, 1], tokens=[(0, 5), (1, 6)])
    assert [output.request_id for output in books.take_outputs(may_wait={first})] == [second]
    books.send(0)
    take(books, tokens=[(0, 7)])
    assert books.take_outputs(may_wait={first, second}) == []
    assert take_tokens(books) == [(first, [5, 7])]
    books.send(0)
    take(books, tokens=[(0, 8), (1, 9)], finished=[1])
    (output,) = books.take_outputs(may_wait={first, second})
    assert (output.request_id, output.outputs[0].token_ids, output.finished) == (second, [6, 9], True)
    assert take_tokens(books) == [(first, [5, 7, 8])]


def test_a_row_waits_is_sent_and_ends(books):
    first, second = add(books, 2)
    sent = books.send(1)
    assert ids(sent.rows) == [first]
    assert ids(books.queue) == [second]
    assert books.num_open == 2
    assert take(books, [2], [(2, 7), (2, 8)])["num_generated"] == 2
    assert list(books.on_device) == [2]
    assert take_tokens(books) == [(first, [7, 8])]
    assert take_tokens(books) == []
    books.send(1)
    take(books, [0], [(2, 9), (0, 5)], finished=[2])
    assert list(books.on_device) == [0]
    assert dict(take_tokens(books)) == {first: [7, 8, 9], second: [5]}
    assert list(books.requests) == [second]
    assert books.num_open == books.num_unfinished == 1


def test_no_more_rows_are_sent_than_the_device_has_places(books):
    add(books, 5)
    assert len(books.send(2).rows) == 2
    assert books.has_more
    assert len(books.send(2).rows) == 1
    assert not books.has_more
    assert len(books.queue) == 2
    assert not books.is_device_empty


def test_only_the_requests_of_a_call_are_put_longest_first(books):
    def queue():
        return [(row.request_id, row.seed) for row in books.queue]

    (other,) = add(books, 1)
    params = [SamplingParams(max_tokens=most, n=n) for most, n in ((2, 1), (9, 2), (4, 1), (9, 1))]
    short, long, middle, long_too = calls = [books.add(np.array([1, 2], np.int32), of_one) for of_one in params]
    given = queue()
    books.put_longest_first(range(calls[0], calls[-1] + 1))
    assert ids(books.queue) == [other, long, long, long_too, middle, short]
    assert sorted(queue()) == sorted(given)


def test_adapters_are_forgotten_one_by_one():
    books = Books(max_requests=MAX_REQUESTS, seed=0, num_adapters=2)
    books.forget([1])
    assert books.send(1).forgets.tolist() == [False, False, True]  # the first entry is for requests without an adapter
    books.forget([0])
    books.take_back()
    assert books.send(1).forgets.tolist() == [False, True, True]
    assert not books.forgets.any()
    books.forget()
    assert books.forgets.all()


def test_requests_and_aborts_of_a_failed_slice_are_restored_in_order(books):
    first, *others = add(books, 3)
    books.send(1)
    take(books, [2])
    books.forget()
    sent = books.send(2)
    assert sent.forgets.all()
    assert not books.forgets.any()
    books.end(books.find(first, None))  # after the slice was sent
    assert (sent.aborts, ids(sent.rows)) == ([], others)
    books.end(books.find(others[0], None))
    books.take_back()
    assert books.forgets.all()
    again = books.send(2)
    assert (again.aborts, ids(again.rows)) == ([2], others[1:])
    # The device has not ended the first request yet.
    assert [(output.request_id, output.finished) for output in books.take_outputs()] == [(others[0], True)]


def test_slices_are_restored_last_first(books):
    requests = add(books, 3)
    books.send(1)
    take(books, [1])
    books.end(books.find(requests[0], None))
    assert books.send(1).aborts == [1]
    books.send(1)
    for _ in range(2):
        books.take_back()
    again = books.send(2)
    assert (again.aborts, ids(again.rows)) == ([1], requests[1:])


def test_an_abort_of_a_sent_row_waits_until_its_place_is_known(books):
    (request,) = add(books, 1)
    books.send(1)
    books.end(books.find(request, None))
    assert books.send(1).aborts == []
    take(books, [1])
    assert books.send(1).aborts == [1]
    assert books.send(1).aborts == []


def test_an_abort_is_not_sent_to_a_place_that_is_free_again(books):
    (request,) = add(books, 1)
    books.send(1)
    books.end(books.find(request, None))
    take(books, [1], [(1, 4)], finished=[1])
    assert books.send(1).aborts == []


def test_find_by_request_and_completion(books):
    (request,) = add(books, 1, n=3, temperature=1.0)
    other = add(books, 1)[0]
    assert [row is books.requests[request][1] for row in books.find(request, 1)] == [True]
    assert len(books.find(request, None)) == 3
    assert len(books.find(None, None)) == 4
    assert books.find(other + 1, None) == []


def test_an_end_that_ctrl_c_interrupted_is_still_reported(books, monkeypatch):
    requests = add(books, 2)
    books.send(2)
    take(books, [0, 1], [(0, 3), (1, 4)], finished=[0, 1])
    outputs, make_output = iter(range(1, 100)), books_module.make_output

    def make_until(*arguments):
        if next(outputs) == 2:
            raise KeyboardInterrupt
        return make_output(*arguments)

    monkeypatch.setattr(books_module, "make_output", make_until)
    with pytest.raises(KeyboardInterrupt):
        books.take_outputs()
    assert [len(books.find(request, None)) for request in requests] == [1, 1]
    assert len(books.find(None, None)) == 2
    assert [request for request, _ in take_tokens(books)] == requests
    assert [books.find(request, None) for request in (*requests, None)] == [[], [], []]


def test_dropped_requests_are_not_reported(books):
    requests = add(books, 2)
    books.send(1)
    books.drop(requests)
    assert not books.requests
    assert not books.queue
    take(books, [0], [(0, 3)])
    assert take_tokens(books) == []
    assert books.send(1).aborts == [0]
    take(books, finished=[0])
    assert books.is_device_empty


def test_logprobs_are_computed_while_a_sent_request_wants_them(books):
    add(books, 1, logprobs=True)
    assert not books.wants_logprobs
    books.send(1)
    assert books.wants_logprobs
    take(books, [0])
    assert books.wants_logprobs
    books.send(1)
    take(books, finished=[0])
    assert not books.wants_logprobs


def test_held_rows_keep_their_order(books):
    first, second, third = add(books, 3)
    assert books.send(1, lambda row: True).rows == []  # looks at one row
    assert ids(books.queue) == [first, second, third]
    assert not books.has_more  # it would be held in every slice
    sent = books.send(10, lambda row: row.request_id != second)
    assert ids(sent.rows) == [second]
    assert ids(books.queue) == [first, third]
    assert not books.has_more
    assert ids(books.send(10).rows) == [first, third]
