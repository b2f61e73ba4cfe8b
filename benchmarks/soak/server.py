"""Many `openai` clients of examples/serve.py for a while. A tenth of them disconnect in the middle of an answer.

    python -m benchmarks.soak.server --clients 64 --seconds 600 --prefix-cache

Requests have 4 to 48 tokens and 1 to 4 completions, whole or streamed, some with a stop string. Each greedy answer must
equal the answer of examples/generate.py, character by character. A repeated request with a seed must get the same
answer. At the end no request is lost, all blocks are free, and SIGTERM ends the server with 0. The pool has a
quarter of the blocks that the seats may need.

Then the requests of lm-eval, guidellm and others (`client_patterns.py`) are sent, each kind for two minutes from one
client and from fifty. They must not get slower.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import itertools
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
from openai import AsyncOpenAI

from benchmarks.checks import require
from benchmarks.harness import ROOT, add_output, open_store
from benchmarks.soak.client_patterns import PATTERNS, check_drift, drift, run_pattern
from lib.checkpoint import default_path, read_checkpoint
from lib.text_stream import HALF, first_stop
from lib.tokenizer import Tokenizer

EXAMPLES = ROOT / "examples"
SEATS, BLOCK_SIZE, MAX_TOKENS, NEW_TOKENS, MOST_COMPLETIONS = 16, 16, 160, (4, 48), 4
BLOCKS = 1 + SEATS * MAX_TOKENS // BLOCK_SIZE // 4  # a quarter of what the seats may need
TOPICS = [
    "a page table",
    "the sea",
    "three rivers",
    "a compiler",
    "the moon \U0001f319",
    "na\u00efve bread",
    "rain",
    "a proof",
]
FORMS = ["Write about {}.", "{}?", "Once upon a time there was {}, and", "def f(x):\n    # {}\n" * 4]
LEAVING, SEEDED, STOPPED = 0.1, 0.25, 0.25  # shares of the requests
SEEDS = 3


def expected_tokens(prompts: list[str], options: list[str]) -> dict[str, list[int]]:
    """The tokens that examples/generate.py gives for each prompt."""
    command = [sys.executable, str(EXAMPLES / "generate.py"), "--json", f"--max-new-tokens={NEW_TOKENS[1]}", *options]
    command += [f"--prompt={prompt}" for prompt in prompts]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return {row["prompt"]: row["tokens"] for row in map(json.loads, done.stdout.splitlines())}


def metrics(values: str) -> dict[str, int]:
    return {name: int(float(value)) for name, value in re.findall(r"^jaxpaged_(\S+) (\S+)$", values, re.MULTILINE)}


@dataclasses.dataclass(frozen=True)
class Question:
    """A client's request. If `seed` is None it is greedy and `text` is the answer; else the answer is not known."""

    prompt: str
    num_tokens: int
    num_completions: int
    seed: int | None
    stop: str | None
    text: str

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = dict(prompt=self.prompt, max_tokens=self.num_tokens, n=self.num_completions)
        options |= dict(temperature=0) if self.seed is None else dict(temperature=1, seed=self.seed)
        return options | ({} if self.stop is None else dict(stop=self.stop))


class Soak:
    def __init__(
        self, client: AsyncOpenAI, model: str, tokenizer: Tokenizer, expected: dict[str, list[int]], seed: int
    ):
        self.client, self.model, self.tokenizer, self.expected = client, model, tokenizer, expected
        self.rng = random.Random(seed)
        self.ends: collections.Counter[str] = collections.Counter()
        self.num_started = self.num_tokens = self.num_completions = self.num_repeated = 0
        self.drawn: dict[tuple[str, int | None, int], str] = {}  # the longest text seen for each request with a seed
        self.to_first: list[float] = []  # seconds to the first piece of a stream
        self.to_last: list[float] = []

    def question(self) -> Question:
        rng = self.rng
        prompt, num_tokens = rng.choice(list(self.expected)), rng.randint(*NEW_TOKENS)
        seed = rng.randrange(SEEDS) if rng.random() < SEEDED else None
        text, stop = self.tokenizer.decode(self.expected[prompt][:num_tokens]), None
        if seed is None and rng.random() < STOPPED and len(text) > 4:
            begin = rng.randrange(len(text) - 3)
            stop = text[begin : begin + rng.randint(1, 3)]
            text = text[: first_stop(text, [stop])]
        return Question(prompt, num_tokens, rng.randint(1, MOST_COMPLETIONS), seed, stop, text)

    async def one_client(self, end: float) -> None:
        while time.perf_counter() < end:
            question = self.question()
            is_leaving = self.rng.random() < LEAVING
            ask = self.stream if self.rng.random() < 0.5 else self.whole
            self.num_started += 1
            try:
                self.ends[await ask(question, is_leaving)] += 1
            except openai.APIStatusError as error:
                self.ends[f"status {error.status_code}"] += 1

    async def whole(self, question: Question, is_leaving: bool) -> str:
        begin = time.perf_counter()
        seconds = self.rng.uniform(0, 10) if is_leaving else None
        try:
            async with asyncio.timeout(seconds):
                answer = await self.client.completions.create(model=self.model, **question.options())
        except TimeoutError:
            return "left"
        return self.judge_answer(question, [choice.text for choice in answer.choices], answer.usage, begin)

    async def stream(self, question: Question, is_leaving: bool) -> str:
        begin, texts, usage = time.perf_counter(), [""] * question.num_completions, None
        usual: dict[str, Any] = dict(model=self.model, stream=True, stream_options={"include_usage": True})
        async with await self.client.completions.create(**question.options(), **usual) as chunks:
            async for chunk in chunks:
                if not any(texts):
                    self.to_first.append(time.perf_counter() - begin)
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
                usage = chunk.usage
                if is_leaving and usage is None:
                    return "left"
        return self.judge_answer(question, texts, usage, begin)

    def judge_answer(self, question: Question, texts: list[str], usage: Any, begin: float) -> str:
        self.to_last.append(time.perf_counter() - begin)
        self.num_tokens += usage.completion_tokens
        self.num_completions += len(texts)
        if question.seed is None:
            return "answered" if texts == [question.text] * question.num_completions else "another text"
        return (
            "answered" if all(self.is_repeated(question, i, text) for i, text in enumerate(texts)) else "another text"
        )

    def is_repeated(self, question: Question, index: int, text: str) -> bool:
        """Whether the shorter of two answers to a request starts the longer one. Half a character does not match."""
        key = question.prompt, question.seed, index
        self.num_repeated += key in self.drawn
        shorter, longer = sorted((text, self.drawn.get(key, "")), key=len)
        self.drawn[key] = longer
        return longer.startswith(shorter.rstrip(HALF))


async def soak(
    address: str, tokenizer: Tokenizer, expected: dict[str, list[int]], args: argparse.Namespace
) -> dict[str, Any]:
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=600) as client:
        (model,) = [model.id async for model in client.models.list()]
        soak = Soak(client, model, tokenizer, expected, args.seed)
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            for _ in range(args.clients):
                clients.create_task(soak.one_client(begin + args.seconds))
        seconds = time.perf_counter() - begin
        while True:  # the blocks of disconnected clients are freed within two slices
            seen = metrics(await client.with_options().get("../metrics", cast_to=str))
            if seen["running_requests"] + seen["waiting_requests"] == 0:
                break
            await asyncio.sleep(0.1)
    require(set(soak.ends) <= {"answered", "left"}, f"requests ended otherwise: {dict(soak.ends)}")
    require(soak.ends.total() == soak.num_started, f"{soak.num_started} began, and {soak.ends.total()} ended")
    require(seen["free_blocks"] == seen["blocks"], f"{seen['blocks'] - seen['free_blocks']} blocks did not come back")
    return {
        "requests": soak.num_started,
        "answered": soak.ends["answered"],
        "left": soak.ends["left"],
        "completions": soak.num_completions,
        "repeated_with_a_seed": soak.num_repeated,
        "aborted": seen['finished_requests_total{reason="abort"}'],
        "preempted": seen["preemptions_total"],
        "found_tokens": seen["found_tokens_total"],
        "seconds": round(seconds, 1),
        "tokens_per_s": round(soak.num_tokens / seconds, 1),
        "to_first_chunk_s": [round(second, 2) for second in quantiles(soak.to_first)],
        "to_answer_s": [round(second, 2) for second in quantiles(soak.to_last)],
    }


def quantiles(values: list[float]) -> tuple[float, float]:
    """The median and the 99th percentile."""
    return statistics.median(values), statistics.quantiles(values, n=100)[98]


def soak_patterns(address: str, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Runs each client's pattern alone, from one client and from many. Raises `AssertionError` if it gets slower."""
    host, port = address.removeprefix("http://").split(":")
    results = {}
    for pattern, num_clients in itertools.product(PATTERNS, args.pattern_clients):
        name = f"{pattern.name}, {num_clients} clients"
        timed = run_pattern(pattern, host=host, port=int(port), num_clients=num_clients, seconds=args.pattern_seconds)
        check_drift(name, timed)
        median_s = dict(zip(("first_quarter", "last_quarter"), drift(timed), strict=True))
        results[name] = dict(requests=len(timed), median_s=median_s)
        print(f"{name}: {results[name]}")
    return results


@contextlib.contextmanager
def serving(options: list[str]) -> Iterator[str]:
    """The address of a running server. At exit checks that SIGTERM ends it with 0."""
    command = [sys.executable, str(EXAMPLES / "serve.py"), "--port=0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            said = iter(server.stderr.readline, "")
            address = next(found[0] for line in said if (found := re.search(r"http://\S+", line)))
            # Keep reading the server's output: a full pipe would stop it.
            threading.Thread(target=collections.deque, args=(said, 0), daemon=True).start()
            yield address
            server.send_signal(signal.SIGTERM)
            require(server.wait(60) == 0, f"the server ended with {server.returncode}")
        finally:
            server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--pattern-clients", type=int, nargs="+", default=[1, 50], metavar="N", help="default: 1 50")
    parser.add_argument("--pattern-seconds", type=float, default=120, help="for each pattern; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="as that of examples/serve.py")
    parser.add_argument("--data-parallel", type=int, default=1, help="as that of examples/serve.py")
    parser.add_argument("--prefix-cache", action="store_true", help="as that of examples/serve.py")
    add_output(parser)
    args = parser.parse_args()
    store = open_store("serve_soak", args)
    options = ["--dtype=float32", f"--block-size={BLOCK_SIZE}", *([f"--model={args.model}"] if args.model else [])]
    prompts = [form.replace("{}", topic) for form in FORMS for topic in TOPICS]
    expected = expected_tokens(prompts, options)
    tokenizer = read_checkpoint(args.model or default_path()).tokenizer
    options += [
        f"--data-parallel={args.data_parallel}",
        f"--max-num-seqs={SEATS}",
        f"--max-model-len={MAX_TOKENS}",
        f"--num-blocks={BLOCKS}",
        # Disconnected clients keep their places until the engine drops them.
        f"--max-queue={2 * max(args.clients, *args.pattern_clients) * MOST_COMPLETIONS}",
        *(["--prefix-cache"] if args.prefix_cache else []),
    ]
    with serving(options) as address:
        result = asyncio.run(soak(address, tokenizer, expected, args))
        for name, value in result.items():
            print(f"{name:>16}  {value}")
        patterns = soak_patterns(address, args)
    store.add(f"{args.clients} clients", result)
    for name, of_pattern in patterns.items():
        store.add(name, of_pattern)


if __name__ == "__main__":
    main()
