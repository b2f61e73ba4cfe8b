"""The counts of examples/serve.py, and the page that draws them."""

import re

import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

from lib.app import PAGE_POLICY
from tests.examples.serving import ask, complete


def test_metrics_count_and_the_page_reads_them(server):
    def metrics():
        status, headers, text = ask(server.port, "/metrics", Authorization="")
        assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        return {name: int(value) for name, value in re.findall(r"^jaxpaged_(\S+) (\d+)$", text, re.MULTILINE)}

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
