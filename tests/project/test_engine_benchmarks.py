"""Benchmarks of the engine under load, at toy sizes, and what they check can fail."""

import functools
import json
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks.engine import online, server, stream_clients, throughput, vllm_peer
from benchmarks.engine.model import CONFIGS, random_weights
from benchmarks.engine.workload import create_engine, rollout_work, workload
from tests.timed_engine import TimedEngine

STREAMED = (
    b'HTTP/1.1 200 OK\r\n\r\n1f\r\ndata: {"choices": [{"text": "a"}]}\n\n\r\n'
    b'30\r\ndata: {"choices": [], "usage": {"completion_tokens": 1}}\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n'
)


def test_streams_of_a_server_are_counted(tmp_path, monkeypatch):
    pytest.importorskip("uvicorn")
    engine = TimedEngine(num_seats=3, slice_seconds=1e-3)
    monkeypatch.setattr(server, "create_engine", lambda *_, **__: engine)
    output = tmp_path / "server.json"
    command = ["--model=toy", "--clients=3", "--requests=7", f"--output={output}"]
    server.main(command)
    points = json.loads(output.read_text())["points"]
    assert set(points) == {"engine", "server"}
    assert points["server"]["of_engine"] > 0
    assert points["server"]["event_loop_us_per_token"] > 0
    assert points["server"]["events"] > 7 * 2


def test_an_answer_that_is_no_whole_stream_is_an_error():
    answer = stream_clients.read_answer(STREAMED, 0.5)
    assert answer == stream_clients.Streamed("a", num_tokens=1, num_events=2, seconds_to_first=0.5)
    for wrong in (STREAMED.replace(b"200", b"429"), STREAMED.replace(b"data: [DONE]", b"")):
        with pytest.raises(AssertionError, match="a client got"):
            stream_clients.read_answer(wrong, 0.5)


class FakeVllm:
    """Stands for the module: an engine that gives each request a token a step."""

    __version__ = "1.2"

    def __init__(self, model, **options):
        self.options, self.open, self.llm_engine = options, {}, self
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=8))
        self.is_clean = True
        with open(f"{model}/config.json") as file:
            self.config = json.load(file)

    def has_unfinished_requests(self):
        return bool(self.open)

    def reset_prefix_cache(self):
        self.is_clean = not self.open
        return self.is_clean

    def generate(self, prompts, params, use_tqdm):
        assert self.is_clean, "prompts of the run before are in the cache"
        self.is_clean = False
        outputs = {}
        for i, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            self.add_request(str(i), prompt, each)
        while self.open:
            outputs |= {output.request_id: output for output in self.step()}
        return list(outputs.values())

    def add_request(self, request_id, prompt, params):
        assert prompt["prompt_token_ids"]
        assert getattr(params, "n", 1) == 1 or params.temperature > 0, "vLLM refuses these"
        self.open[request_id] = [params.max_tokens, [], getattr(params, "n", 1)]

    def step(self):
        outputs = []
        for request_id, (wanted, tokens, n) in list(self.open.items()):
            tokens.append(7)
            reason = "length" if len(tokens) == wanted else None
            if reason:
                del self.open[request_id]
            completion = SimpleNamespace(token_ids=tokens, finish_reason=reason)
            outputs.append(SimpleNamespace(request_id=request_id, outputs=[completion] * n, finished=bool(reason)))
        return outputs


@pytest.fixture
def fake_vllm(monkeypatch):
    module = SimpleNamespace(
        __version__="1.2", LLM=FakeVllm, SamplingParams=lambda **options: SimpleNamespace(**options)
    )
    platform = SimpleNamespace(get_device_name=lambda: "NVIDIA H200")
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)


def run_online(path, *options):
    online.main(["--model=toy", "--rates", "50", "100", "--seconds=0.2", f"--output={path}", *options])
    return json.loads(path.read_text())


def check_points(points):
    assert set(points) == {"50 a second", "100 a second"}
    for name, point in points.items():
        assert point["requests"] == int(name.split()[0]) // 5
        for column in ("to_first_ms", "between_tokens_ms", "between_pieces_ms", "to_last_ms"):
            values = list(point[column].values())
            assert values == sorted(values)
        assert 0 < point["to_first_ms"]["p50"] < point["to_last_ms"]["p50"]


@pytest.mark.slow
def test_requests_that_come_one_by_one(tmp_path, monkeypatch):
    quick = functools.partial(create_engine, compiler_options={"xla_backend_optimization_level": 0})
    monkeypatch.setattr(online, "create_engine", quick)
    results = run_online(tmp_path / "online.json", "--steps-per-slice=4")
    check_points(results["points"])
    assert results["settings"]["steps_per_slice"] == 4
    assert results["settings"]["num_seats"] == 8


def test_vllm_gets_the_same_requests(tmp_path, fake_vllm):
    path = tmp_path / "vllm.json"
    arguments = ["--model=toy", "--requests", "70", "3", "--rates", "50", "100", "--seconds=0.2", f"--output={path}"]
    vllm_peer.main([*arguments, "--rollout"])
    results = json.loads(path.read_text())
    points = results["points"]
    for count in (70, 3):
        assert points.pop(f"engine {count}")["tokens"] == sum(new for _, new in workload(70, 64)[:count])
    for i in range(2):
        assert points.pop(f"round {i + 1}")["tokens"] == 8 * sum(new for _, new in rollout_work(64, 64, seed=i))
    check_points(points)
    assert results["device"] == "NVIDIA H200"
    assert results["settings"] == dict(engine="vllm 1.2", num_seats=4, step_tokens=8, seconds=0.2)


def test_the_floor_of_steps():
    config = CONFIGS["toy"]
    layer = 128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 256  # q, k and v; out; gate, up and down
    weights, head, kv = 2 * (layer + 2 * 128), 1000 * 128, 2 * 2 * 2 * 2 * 32  # of two layers, the first with its norms
    rates = dict(bandwidth=1e3, products=1e3)
    floor = throughput.Floor.of(config, random_weights(config), 8, **rates)
    work = [([1, 2], 3)]  # two steps of single tokens, on 2 and on 3 tokens and the one that is computed
    assert floor.seconds({}, work) == pytest.approx((2 * 2 + 3) * kv / 1e3)
    computed = 2 * (weights * 4 + head * 4) / 1e3
    assert floor.seconds({"single_4": 1}, []) == pytest.approx(computed)
    assert floor.seconds({"mixed_24": 2}, []) == pytest.approx(2 * 2 * (weights * 24 + head * 8) / 1e3)
    read = throughput.Floor.of(config, random_weights(config), 8, bandwidth=1e3, products=1e9)
    assert read.seconds({"single_4": 1}, []) == pytest.approx(2 * (weights + head) / 1e3)


def test_logprobs_that_differ_are_seen():
    assert throughput.worst_nats([[-1.0, -2.0], []], [[-1.1, -2.0], []]) == pytest.approx(0.1)
    with pytest.raises(AssertionError, match=r"differ by 1\.000 nats"):
        throughput.worst_nats([[-1.0]], [[-2.0]])
    with pytest.raises(ValueError, match="zip"):
        throughput.worst_nats([[-1.0]], [[-1.0, -2.0]])


def test_both_engines_get_the_same_requests_at_the_same_times():
    assert online.arrival_seconds(20, 5) == online.arrival_seconds(20, 5)
    gaps = np.diff(online.arrival_seconds(20, 1000), prepend=0)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.02)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.02)  # as that of an exponential distribution


def test_waits_are_counted_from_the_arrival():
    work, arrivals = [([1], 5), ([1], 1)], [1.0, 2.0]
    pieces = [[(1.5, 3), (2.5, 5)], [(4.0, 1)]]
    point = online.summary(work, arrivals, pieces)
    assert point["to_first_ms"]["p50"] == pytest.approx(1250)  # of 500 and 2000
    assert point["between_tokens_ms"]["p99"] == pytest.approx(250)
    assert point["between_pieces_ms"]["p50"] == pytest.approx(1000)
    assert point["to_last_ms"]["p50"] == pytest.approx(1750)
    assert point["tokens_per_s"] == pytest.approx(6 / 4)
    for lost in ([[(1.5, 3)], pieces[1]], [pieces[0], []]):
        with pytest.raises(AssertionError, match="not as many tokens"):
            online.summary(work, arrivals, lost)


@pytest.fixture
def seconds(monkeypatch):
    """That have passed, for `serve`: only while it sleeps."""
    seconds = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: seconds[-1], sleep=lambda s: seconds.append(seconds[-1] + s))
    monkeypatch.setattr(online, "time", clock)
    return seconds


class Sparing(TimedEngine):
    """Has always as many seconds to spare."""

    seconds_to_spare = 0.0

    def __init__(self):
        super().__init__(steps_per_slice=8)


def test_a_request_that_arrives_while_there_is_time_comes_before_the_step(monkeypatch, seconds):
    calls, engine = [], Sparing()
    for name in ("add_request", "step"):
        call = getattr(engine, name)
        monkeypatch.setattr(engine, name, lambda *args, name=name, call=call: calls.append(name) or call(*args))
    engine.seconds_to_spare = 0.5
    pieces = online.serve(engine, [([1], 8), ([1], 9), ([1], 1)], [0.0, 0.3, 0.9])
    assert calls[:5] == ["add_request", "add_request", "step", "add_request", "step"]
    assert seconds[:4] == [0.0, 0.3, 0.5, 0.9]
    assert pieces[1][0] == (0.5, 8)


def test_a_request_that_arrives_while_the_engine_is_idle_starts_then(seconds):
    engine = Sparing()
    pieces = online.serve(engine, [([1], 20), ([1], 4)], [0.0, 0.2])
    assert pieces == [[(0.0, 8), (0.0, 16), (0.0, 20)], [(0.2, 4)]]
    assert seconds == [0.0, 0.2]
