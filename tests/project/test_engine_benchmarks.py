"""Benchmarks of the engine under load, at toy sizes, and what they check can fail."""

import functools
import json
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.engine import adapters, online, prefixes, score, server, stream_clients, vllm_peer
from benchmarks.engine.model import CONFIGS, random_weights
from benchmarks.engine.stand_in import StandIn, made_up
from benchmarks.engine.workload import SIZES, create_engine, rollout_work, workload
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


def test_the_products_of_adapters(tmp_path, monkeypatch):
    monkeypatch.setattr(adapters, "read_bandwidth", lambda: 1e12)
    output = tmp_path / "adapters.json"
    adapters.main(["--toy", "--layers=0", f"--output={output}"])
    points = json.loads(output.read_text())["points"]
    assert set(points) == {"products, 8 rows", "products, 24 rows"}
    # A and B of 4 adapters of rank 16, of two bytes a number: q, k, v and o
    assert points["products, 8 rows"]["floor"] == pytest.approx(2 * 4 * 16 * (4 * 256 + 256 + 64 + 64 + 256) / 1e6)
    lora = adapters.lora
    monkeypatch.setattr(adapters, "lora", lambda x, a, b, ids: lora(x, a, b, jnp.roll(ids, 1)))
    shape, (qkv, _) = adapters.TOY, adapters.make_layer(adapters.TOY, 0)
    rows = 9  # not compiled before
    with pytest.raises(AssertionError, match="wrong result"):
        adapters.check(jnp.ones((rows, shape.features), jnp.bfloat16), shape.ids(rows), qkv)


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
    vllm_peer.main([*arguments, "--rollout", "--prefixes"])
    results = json.loads(path.read_text())
    points = results["points"]
    for count in (70, 3):
        assert points.pop(f"engine {count}")["tokens"] == sum(new for _, new in workload(70, 64)[:count])
    long, num_completions = prefixes.rows(prefixes.REQUESTS, SIZES["toy"])["long completions"]
    assert points.pop("long completions")["tokens"] == num_completions * sum(new for _, new in long)
    for i in range(2):
        assert points.pop(f"round {i + 1}")["tokens"] == 8 * sum(new for _, new in rollout_work(64, 64, seed=i))
    check_points(points)
    assert results["device"] == "NVIDIA H200"
    assert results["settings"] == dict(engine="vllm 1.2", num_seats=4, step_tokens=8, seconds=0.2)


def test_the_products_of_scoring_are_those_of_the_model():
    config = CONFIGS["toy"]
    layer = 128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 256  # q, k and v; out; gate, up and down
    of_token = 2 * layer + 1000 * 128
    pairs = 1 + 2 + 3  # each token sees itself and those before it
    attended = 2 * 4 * 32 * 2 * pairs  # scores and values of 4 heads in 2 layers
    expected = 2 * 5 * (3 * of_token + attended)
    assert score.num_products(config, random_weights(config), 5, 3) == expected


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


class Sparing(StandIn):
    """Has always as many seconds to spare."""

    seconds_to_spare = 0.0

    def __init__(self):
        super().__init__(num_seats=2, steps_per_slice=8, tokens_per_s=1e5, vocab_size=100)


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
