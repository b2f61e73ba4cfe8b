"""The counts and times of examples/serve.py, and the page that plots them."""

import re

from lib import engine_metrics
from lib.app import PAGE_POLICY
from tests.examples.serving import ask, complete, metric_values, read_metrics


def test_metrics_count_and_the_page_reads_them(server):
    before = metric_values(server)
    tokens = complete(server, max_tokens=9, n=2).usage.completion_tokens
    after = metric_values(server)
    assert after["generated_tokens_total"] - before["generated_tokens_total"] == tokens
    assert after["finished_requests_total"] - before["finished_requests_total"] == 2
    assert after["running_requests"] == after["waiting_requests"] == 0
    assert after["found_tokens_total"] >= before["found_tokens_total"] + 16  # the second completion matched them
    assert after["free_blocks"] == after["blocks"] == 64  # 4 seats of 128 tokens in blocks of 8
    status, headers, page = ask(server, "/", Authorization="")
    assert (status, headers["Content-Security-Policy"]) == (200, PAGE_POLICY)
    assert re.findall(r"(?:src|href)=|https?://", page) == []  # no external resources
    assert set(re.findall(r"now\.(\w+)", page)) <= {"time", *after}


def test_completion_times_have_vllms_histograms(server):
    before = metric_values(server)
    options = dict(max_tokens=9, n=2, extra_body={"ignore_eos": True})
    complete(server, **options)
    list(complete(server, stream=True, **options))
    complete(server, max_tokens=1)
    new = metric_values(server) - before
    assert new["time_to_first_token_seconds_count"] == new["e2e_request_latency_seconds_count"] == 5
    assert new["request_time_per_output_token_seconds_count"] == 4
    assert new["inter_token_latency_seconds_count"] >= 4
    assert 0 < new["time_to_first_token_seconds_sum"] < new["e2e_request_latency_seconds_sum"]
    assert 0 < 8 * new["request_time_per_output_token_seconds_sum"] < new["e2e_request_latency_seconds_sum"]
    histograms = {family.name: family.samples for family in read_metrics(server) if family.type == "histogram"}
    assert all(sample.labels["model_name"] == "model" for samples in histograms.values() for sample in samples)
    buckets = [sample.labels.get("le") for sample in histograms["vllm:e2e_request_latency_seconds"]]
    assert [float(bound) for bound in buckets if bound] == [*engine_metrics.REQUEST_BUCKETS, float("inf")]
