"""Repeated requests in the style of several clients, and a check that they do not get slower.

The requests have the form that lm-eval 0.4, guidellm 0.8, langchain-openai 1.7 and ai-sdk/openai-compatible 2.0 send.
"""

import contextlib
import dataclasses
import http.client
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.checks import require

LEAST_REQUESTS = 16  # four in a quarter of the time
# Ratio of the last to the first quarter of the time. It was 5 for one client when two programs used both of two cores
# from half-time on. A wait that grows by 1.5 every four requests gives 40 in two minutes.
MOST_RATIO, MOST_MORE_SECONDS = 8.0, 0.1


@dataclasses.dataclass(frozen=True)
class Pattern:
    """One client's requests.

    Attributes:
        path: path of all requests.
        body: makes the body of the next request.
        num_tokens: tokens of each answer; None if the model decides.
    """

    name: str
    path: str
    body: Callable[[random.Random], dict[str, Any]]
    num_tokens: int | None = None


def text(rng: random.Random) -> str:
    return " ".join(rng.choice(("sea", "moon", "rain", "page", "tree")) for _ in range(4))


def chat(rng: random.Random, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text(rng)}]} | fields


PATTERNS = [
    Pattern(
        "classification",
        "/v1/completions",
        lambda rng: dict(prompt=text(rng), max_tokens=1, temperature=0),
        num_tokens=1,
    ),
    Pattern(
        "lm-eval loglikelihood",
        "/v1/completions",
        lambda rng: dict(
            prompt=[[rng.randrange(30, 90) for _ in range(24)] for _ in range(4)],
            temperature=0,
            max_tokens=1,
            logprobs=1,
            seed=1234,
            echo=True,
        ),
        num_tokens=4,
    ),
    Pattern(
        "lm-eval humaneval",
        "/v1/completions",
        lambda rng: dict(
            prompt=[f"def f(a):  # {text(rng)}\n"],
            max_tokens=32,
            temperature=0,
            stop=["\nclass", "\ndef", "\n#", "\nif", "\nprint"],
            seed=1234,
        ),
    ),
    Pattern("chat", "/v1/chat/completions", lambda rng: chat(rng, stream=False, max_completion_tokens=16)),
    Pattern(
        "stream",
        "/v1/chat/completions",
        lambda rng: chat(rng, stream=True, max_tokens=16, stream_options={"include_usage": True}),
    ),
    Pattern(
        "guidellm",
        "/v1/completions",
        lambda rng: dict(
            prompt=text(rng),
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            max_tokens=24,
            stop=None,
            ignore_eos=True,
        ),
        num_tokens=24,
    ),
]


def run_pattern(
    pattern: Pattern, *, host: str, port: int, num_clients: int, seconds: float, key: str = "none"
) -> list[tuple[float, float]]:
    """Start time and duration in seconds of each request. Each client sends one request after another."""
    begin, timed, failures = time.perf_counter(), list[tuple[float, float]](), list[BaseException]()

    def ask_many(seed: int) -> None:
        rng = random.Random(seed)
        try:
            with contextlib.closing(http.client.HTTPConnection(host, port, timeout=600)) as connection:  # kept alive
                while (since := time.perf_counter() - begin) < seconds and not failures:
                    ask(connection, pattern, pattern.body(rng), key)
                    timed.append((since, time.perf_counter() - begin - since))
        except (OSError, http.client.HTTPException, ValueError, AssertionError) as failure:
            failures.append(failure)

    clients = [threading.Thread(target=ask_many, args=(seed,)) for seed in range(num_clients)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    if failures:
        raise failures[0]
    return sorted(timed)


def ask(connection: http.client.HTTPConnection, pattern: Pattern, body: dict[str, Any], key: str) -> None:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", pattern.path, json.dumps(body), headers)
    with connection.getresponse() as response:
        content = response.read().decode()
    require(response.status == 200, f"{pattern.name}: {response.status} {content}")
    if body.get("stream"):
        *chunks, end = content.strip().split("\n\n")
        require(end == "data: [DONE]", f"{pattern.name}: a stream ended with {end}")
        content = chunks[-1].removeprefix("data: ")
    num_tokens = json.loads(content)["usage"]["completion_tokens"]
    wanted = pattern.num_tokens
    require(wanted in (None, num_tokens), f"{pattern.name}: {num_tokens} tokens instead of {wanted}")


def drift(timed: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The median duration of requests in the first and in the last quarter of the time."""
    end = timed[-1][0]
    first = [seconds for since, seconds in timed if since <= end / 4]
    last = [seconds for since, seconds in timed if since >= 3 * end / 4]
    return statistics.median(first), statistics.median(last)


def check_drift(name: str, timed: Sequence[tuple[float, float]]) -> None:
    """Raises `AssertionError` if requests have got slower."""
    require(len(timed) >= LEAST_REQUESTS, f"{name}: only {len(timed)} requests were answered")
    first, last = drift(timed)
    require(
        last <= MOST_RATIO * first + MOST_MORE_SECONDS,
        f"{name}: a request took {first:.3f} s in the first quarter of the time and {last:.3f} s in the last",
    )
