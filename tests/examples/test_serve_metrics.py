"""The counts and times of examples/serve.py, and the page that draws them."""

import re

import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

from prometheus_client.parser import text_string_to_metric_families

from lib import engine_metrics
from lib.app import PAGE_POLICY
from tests.examples.serving import ask, complete


def test_metrics_count_and_the_page_reads_them(server):
    def metrics():
        status, headers, text = ask(server.port, "/metrics", Authorization="")
        assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        return {name: float(value) for name, value in re.findall(r"^jaxpaged_(\S+) (\S+)$", text, re.MULTILINE)}

    before = metrics()
    tokens = complete(server, max_tokens=9, n=2).usage.completion_tokens
    after = metrics()
    assert after["generated_tokens_total"] - before["generated_tokens_total"] == tokens
    finished = [sum(n for name, n in m.items() if name.startswith("finished")) for m in (before, after)]
    assert finished[1] - finished[0] == 2
    assert after["running_requests"] == after["waiting_requests"] == 0
    assert after["found_tokens_total"] >= before["found_tokens_total"] + 16  # of the second completion
    assert after["free_blocks"] == after["blocks"] == 64  # 4 seats of 128 tokens in blocks of 8
    status, headers, page = ask(server.port, "/", Authorization="")
    assert status == 200
    assert headers["Content-Security-Policy"] == PAGE_POLICY
    assert re.findall(r"(?:src|href)=|https?://", page) == []  # nothing from elsewhere
    for name in re.findall(r"now\.(\w+)", page):
        assert name == "time" or name in after or name == "finished_requests_total", name


def test_the_times_of_completions_are_vllm_s_histograms(server):
    def histograms():
        families = text_string_to_metric_families(ask(server.port, "/metrics")[2])
        return {family.name.removeprefix("vllm:"): family for family in families if family.type == "histogram"}

    def counts():
        samples = [sample for family in histograms().values() for sample in family.samples]
        assert all(sample.labels["model_name"] == "model" for sample in samples)
        return {sample.name: sample.value for sample in samples if not sample.name.endswith("_bucket")}

    before = counts()
    options = dict(max_tokens=9, n=2, extra_body={"ignore_eos": True})
    complete(server, **options)
    list(complete(server, stream=True, **options))
    complete(server, max_tokens=1)
    new = {name.removeprefix("vllm:"): value - before[name] for name, value in counts().items()}
    assert new["time_to_first_token_seconds_count"] == new["e2e_request_latency_seconds_count"] == 5
    assert new["request_time_per_output_token_seconds_count"] == 4
    assert new["inter_token_latency_seconds_count"] >= 4
    assert 0 < new["time_to_first_token_seconds_sum"] < new["e2e_request_latency_seconds_sum"]
    assert 0 < 8 * new["request_time_per_output_token_seconds_sum"] < new["e2e_request_latency_seconds_sum"]
    buckets = {
        name: [float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")]
        for name, family in histograms().items()
    }
    assert buckets["time_to_first_token_seconds"] == [*engine_metrics.FIRST_TOKEN_BUCKETS, float("inf")]
    assert buckets["request_time_per_output_token_seconds"] == buckets["inter_token_latency_seconds"]
    assert buckets["e2e_request_latency_seconds"][-2] == 7680
