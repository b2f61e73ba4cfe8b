"""Many `openai` clients of examples/serve.py for a while, a tenth of which leave in the middle of their answer.

    python -m benchmarks.serve_soak --clients 64 --seconds 120

Each answer must be that of examples/generate.py, greedy, character by character. In the end no request is lost, all
blocks are free, and SIGTERM ends the server with 0. The pool has a quarter of the blocks that the seats may need.
"""

import argparse
import asyncio
import collections
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
from openai import AsyncOpenAI

from benchmarks.harness import add_output, open_store

EXAMPLES = Path(__file__).parent.parent / "examples"
SEATS, BLOCK_SIZE, MAX_TOKENS, NEW_TOKENS = 16, 16, 160, 24
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
LEAVING = 0.1


def check(holds: Any, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def expected_texts(prompts: list[str], options: list[str]) -> dict[str, str]:
    """What examples/generate.py says to each prompt."""
    command = [sys.executable, str(EXAMPLES / "generate.py"), "--json", f"--max-new-tokens={NEW_TOKENS}", *options]
    command += [f"--prompt={prompt}" for prompt in prompts]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return {row["prompt"]: row["text"] for row in map(json.loads, done.stdout.splitlines())}


def metrics(values: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"^jaxpaged_(\S+) (\d+)$", values, re.MULTILINE)}


class Soak:
    def __init__(self, client: AsyncOpenAI, model: str, expected: dict[str, str], seed: int):
        self.client, self.model, self.expected = client, model, expected
        self.rng = random.Random(seed)
        self.ends: collections.Counter[str] = collections.Counter()
        self.num_started = self.num_tokens = 0
        self.to_first: list[float] = []  # seconds, of streams
        self.to_last: list[float] = []

    async def one_client(self, end: float) -> None:
        while time.perf_counter() < end:
            prompt, is_streamed = self.rng.choice(list(self.expected)), self.rng.random() < 0.5
            options: dict[str, Any] = dict(model=self.model, prompt=prompt, max_tokens=NEW_TOKENS, temperature=0)
            is_leaving = self.rng.random() < LEAVING
            self.num_started += 1
            ask = self.stream if is_streamed else self.whole
            try:
                self.ends[await ask(options, is_leaving)] += 1
            except openai.APIStatusError as error:
                self.ends[f"status {error.status_code}"] += 1

    async def whole(self, options: dict[str, Any], is_leaving: bool) -> str:
        begin = time.perf_counter()
        seconds = self.rng.uniform(0, 10) if is_leaving else None
        try:
            async with asyncio.timeout(seconds):
                answer = await self.client.completions.create(**options)
        except TimeoutError:
            return "left"
        check(answer.choices[0].text == self.expected[options["prompt"]], "another text than that of generate.py")
        self.count(begin, answer.usage)
        return "answered"

    async def stream(self, options: dict[str, Any], is_leaving: bool) -> str:
        begin, text, usage = time.perf_counter(), "", None
        usual: dict[str, Any] = dict(stream=True, stream_options={"include_usage": True})
        async with await self.client.completions.create(**options, **usual) as chunks:
            async for chunk in chunks:
                if not text:
                    self.to_first.append(time.perf_counter() - begin)
                text += "".join(choice.text for choice in chunk.choices)
                usage = chunk.usage
                check(self.expected[options["prompt"]].startswith(text), "another text than that of generate.py")
                if is_leaving and usage is None:
                    return "left"
        check(text == self.expected[options["prompt"]], "the stream ended before its end")
        self.count(begin, usage)
        return "answered"

    def count(self, begin: float, usage: Any) -> None:
        self.to_last.append(time.perf_counter() - begin)
        self.num_tokens += usage.completion_tokens


async def soak(address: str, expected: dict[str, str], args: argparse.Namespace) -> dict[str, Any]:
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=600) as client:
        (model,) = [model.id async for model in client.models.list()]
        soak = Soak(client, model, expected, args.seed)
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            for _ in range(args.clients):
                clients.create_task(soak.one_client(begin + args.seconds))
        seconds = time.perf_counter() - begin
        while True:  # what those who left gave up is freed within two slices
            seen = metrics(await client.with_options().get("../metrics", cast_to=str))
            if seen["running_requests"] + seen["waiting_requests"] == 0:
                break
            await asyncio.sleep(0.1)
    check(set(soak.ends) <= {"answered", "left"}, f"requests ended otherwise: {dict(soak.ends)}")
    check(soak.ends.total() == soak.num_started, f"{soak.num_started} began, and {soak.ends.total()} ended")
    check(seen["free_blocks"] == seen["blocks"], f"{seen['blocks'] - seen['free_blocks']} blocks did not come back")
    return {
        "requests": soak.num_started,
        "answered": soak.ends["answered"],
        "left": soak.ends["left"],
        "aborted": seen['finished_requests_total{reason="abort"}'],
        "preempted": seen["preemptions_total"],
        "seconds": round(seconds, 1),
        "tokens_per_s": round(soak.num_tokens / seconds, 1),
        "to_first_chunk_s": [round(second, 2) for second in quantiles(soak.to_first)],
        "to_answer_s": [round(second, 2) for second in quantiles(soak.to_last)],
    }


def quantiles(values: list[float]) -> tuple[float, float]:
    """The median and the 99th percentile."""
    return statistics.median(values), statistics.quantiles(values, n=100)[98]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="as that of examples/serve.py")
    add_output(parser)
    args = parser.parse_args()
    store = open_store("serve_soak", args)
    options = ["--dtype=float32", f"--block-size={BLOCK_SIZE}", *([f"--model={args.model}"] if args.model else [])]
    prompts = [form.replace("{}", topic) for form in FORMS for topic in TOPICS]
    expected = expected_texts(prompts, options)
    sizes = [
        f"--num-seats={SEATS}",
        f"--max-tokens={MAX_TOKENS}",
        f"--num-blocks={BLOCKS}",
        f"--max-queue={2 * args.clients}",  # those who left keep their places until the engine knows
    ]
    command = [sys.executable, str(EXAMPLES / "serve.py"), "--port=0", *options, *sizes]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            said = iter(server.stderr.readline, "")
            address = next(found[0] for line in said if (found := re.search(r"http://\S+", line)))
            result = asyncio.run(soak(address, expected, args))
            server.send_signal(signal.SIGTERM)
            check(server.wait(60) == 0, f"the server ended with {server.returncode}")
        finally:
            server.kill()
    for name, value in result.items():
        print(f"{name:>16}  {value}")
    store.add(f"{args.clients} clients", result)


if __name__ == "__main__":
    main()
