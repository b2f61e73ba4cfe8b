"""Benchmarks of the engine under load, at toy sizes, and what they check can fail."""

import json

import pytest

from benchmarks.engine import server, stream_clients
from benchmarks.engine.stand_in import StandIn, made_up
from jaxpaged import SamplingParams

STREAMED = (
    b'HTTP/1.1 200 OK\r\n\r\n1f\r\ndata: {"choices": [{"text": "a"}]}\n\n\r\n'
    b'30\r\ndata: {"choices": [], "usage": {"completion_tokens": 1}}\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n'
)


def test_a_stand_in_serves_as_an_engine_does():
    engine = StandIn(num_seats=2, steps_per_slice=3, tokens_per_s=1e6, vocab_size=100)
    prompts = [[1, 2], [3], [4, 5]]
    ids = [engine.add_request(prompt, SamplingParams(max_tokens=4)) for prompt in prompts]
    outputs = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            completion = output.outputs[0]
            assert completion.token_ids[: len(outputs.get(output.request_id, []))] == outputs.get(output.request_id, [])
            outputs[output.request_id] = completion.token_ids
            assert completion.finish_reason == ("length" if output.finished else None)
    assert [outputs[i] for i in ids] == [made_up(prompt, 0, 4, 100) for prompt in prompts]
    assert engine.stats().num_generated == 3 * 4
    aborted = engine.add_request([1], SamplingParams(max_tokens=1000))
    assert engine.abort(aborted)
    while engine.has_unfinished_requests:
        (output,) = engine.step() or [output]
    assert output.outputs[0].finish_reason == "abort"


@pytest.fixture
def needs_server():
    pytest.importorskip("uvicorn")


def run_server(*options):
    server.main(["--model=toy", "--stand-in=20000", "--clients=3", "--requests=7", *options])


def test_streams_of_a_server_are_the_tokens_of_its_engine(needs_server, tmp_path):
    output = tmp_path / "server.json"
    run_server(f"--output={output}")
    points = json.loads(output.read_text())["points"]
    assert set(points) == {"engine", "server"}
    assert points["server"]["of_engine"] > 0
    assert points["server"]["event_loop_us_per_token"] > 0
    assert points["server"]["events"] > 7 * 2


def test_the_check_sees_a_text_of_other_tokens(needs_server, monkeypatch):
    monkeypatch.setattr(server, "made_up", lambda *args: [token + 1 for token in made_up(*args)])
    with pytest.raises(AssertionError, match="another text than its tokens"):
        run_server()


def test_an_answer_that_is_no_whole_stream_is_an_error():
    answer = stream_clients.read_answer(STREAMED, 0.5)
    assert answer == stream_clients.Streamed("a", num_tokens=1, num_events=2, seconds_to_first=0.5)
    for wrong in (STREAMED.replace(b"200", b"429"), STREAMED.replace(b"data: [DONE]", b"")):
        with pytest.raises(AssertionError, match="a client got"):
            stream_clients.read_answer(wrong, 0.5)
