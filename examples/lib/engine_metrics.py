"""Counters of the engines and latencies of completions, in Prometheus' text format."""

import asyncio
import time
from collections.abc import Iterator

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lib.command_line import say
from lib.engines import Engines

REPORT_SECONDS = 10
# Names and buckets are vLLM's, so that its dashboards work.
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
prometheus_client.disable_created_metrics()  # one more series per histogram


class Metrics(Collector):
    """Counters with their current values, and histograms that `CompletionTimes` fills."""

    def __init__(self, engines: Engines, model: str):
        self._engines, self._registry = engines, prometheus_client.CollectorRegistry()
        self._registry.register(self)
        times = {
            "time_to_first_token_seconds": ("From a request to its first token.", FIRST_TOKEN_BUCKETS),
            "inter_token_latency_seconds": ("Between tokens; those that came together share the time.", TOKEN_BUCKETS),
            "request_time_per_output_token_seconds": ("The mean of a completion's after its first.", TOKEN_BUCKETS),
            "e2e_request_latency_seconds": ("From a request to the end of its completion.", REQUEST_BUCKETS),
        }
        self.first_token, self.between_tokens, self.per_token, self.whole = (
            prometheus_client.Histogram(
                f"vllm:{name}", meaning, ["model_name"], buckets=buckets, registry=self._registry
            ).labels(model)
            for name, (meaning, buckets) in times.items()
        )

    def text(self) -> bytes:
        return prometheus_client.generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        engines, stats = self._engines, self._engines.stats
        gauges = {
            "engines": ("Engines that have not failed.", len(engines.working)),
            "running_requests": ("Completions that run.", stats.num_running),
            "waiting_requests": ("Completions that wait for others to end.", num_waiting(engines)),
            "most_requests": ("Completions that may run or wait.", engines.most_completions),
            "free_blocks": ("Blocks of the cache that are free.", stats.num_free_blocks),
            "blocks": ("Blocks of the cache, without the null block.", stats.num_blocks),
        }
        counters = {
            "generated_tokens": ("New tokens.", stats.num_generated),
            "drafted_tokens": ("Tokens guessed.", stats.num_drafted),
            "accepted_tokens": ("Guesses that became tokens.", stats.num_accepted),
            "computed_tokens": ("Tokens computed, prompts included.", stats.num_computed),
            "found_tokens": ("Tokens found in the prefix cache.", stats.num_found),
            "recomputed_tokens": ("Tokens given up by preemption.", stats.num_recomputed),
            "preemptions": ("Preemptions.", stats.num_preempted),
            "steps": ("Steps of the model.", stats.num_steps),
            "refused_requests": ("Requests refused because too many were under way.", engines.num_refused),
        }
        for name, (meaning, value) in gauges.items():
            yield GaugeMetricFamily(f"jaxpaged_{name}", meaning, value=value)
        for name, (meaning, value) in counters.items():
            yield CounterMetricFamily(f"jaxpaged_{name}", meaning, value=value)
        meaning = "Completions that ended; a stop string counts as abort."
        finished = CounterMetricFamily("jaxpaged_finished_requests", meaning, labels=["reason"])
        for reason in ("stop", "length", "abort"):
            finished.add_metric([reason], engines.finished[reason])
        yield finished
        if len(engines.runners) > 1:
            meaning = "Completions that run or wait on an engine; a failed engine has no value."
            of_engine = GaugeMetricFamily("jaxpaged_engine_requests", meaning, labels=["engine"])
            for i in engines.working:
                of_engine.add_metric([str(i)], engines.num_sent[i])
            yield of_engine


class CompletionTimes:
    """Adds the latencies of one completion to the histograms."""

    def __init__(self, metrics: Metrics, begin: float):
        self._metrics, self._begin = metrics, begin
        self._num_tokens, self._first, self._last = 0, 0.0, 0.0

    def add(self, num_tokens: int) -> None:
        """Records the arrival of new tokens."""
        now = time.perf_counter()
        if self._num_tokens == 0:
            self._metrics.first_token.observe(now - self._begin)
            self._first = now
        else:
            self._metrics.between_tokens.observe((now - self._last) / num_tokens)
        self._num_tokens, self._last = self._num_tokens + num_tokens, now

    def end(self) -> None:
        if self._num_tokens > 1:
            self._metrics.per_token.observe((self._last - self._first) / (self._num_tokens - 1))
        self._metrics.whole.observe(time.perf_counter() - self._begin)


def num_waiting(engines: Engines) -> int:
    return max(0, engines.num_open - engines.stats.num_running)


async def report_work(engines: Engines) -> None:
    """Prints a line every ten seconds while requests run."""
    before = engines.stats.num_generated
    while True:
        await asyncio.sleep(REPORT_SECONDS)
        stats = engines.stats
        if engines.num_open or stats.num_generated > before:
            rate = (stats.num_generated - before) / REPORT_SECONDS
            say(
                f"{stats.num_running} running, {num_waiting(engines)} waiting, {rate:,.1f} tokens/s, "
                f"{stats.num_free_blocks:,} of {stats.num_blocks:,} blocks free"
            )
        before = stats.num_generated
