"""What drafts from its own text bring SmolLM2-135M on a CPU: texts that repeat much, and the prompts of `make demo`.

    python -m benchmarks.models.text_drafts

`repetition.txt` asks for code edits, JSON in another shape, and quotations. The chat model answers greedily, in
float32. Tokens must be those without drafts. Rates are tokens a second of the process's CPU time, which what else runs
on the machine hardly changes: XLA computes most of a step on one core. The second of two runs counts.

`after` says how often the token that followed equal ones before was right, by how many were equal. `branches` counts
the steps of one seat if each step drafts a chain, or a tree of branches that differ in their first token.
"""

import argparse
import collections
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.engine.steps import name_kind
from benchmarks.harness import ROOT, add_output, open_store
from jaxpaged import Engine, EngineOptions, SamplingParams
from jaxpaged._engine.drafting import LEAST_SUFFIX, MOST_SUFFIX, repeated
from lib.checkpoint import default_path, load_model, read_checkpoint
from lib.engine_llama import create_engine

SEATS, DRAFTS, MAX_TOKENS, MAX_LENGTH, CHUNK_TOKENS = (1, 8), 8, 160, 512, 120
SEPARATOR = "====\n"


def read_texts() -> dict[str, list[str]]:
    repetition = (ROOT / "benchmarks" / "models" / "repetition.txt").read_text(encoding="utf-8")
    demo = (ROOT / "examples" / "prompts.txt").read_text(encoding="utf-8")
    return {"repetition": [text.strip() for text in repetition.split(SEPARATOR)], "demo": demo.splitlines()}


def serve(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> tuple[list[list[int]], dict]:
    """The tokens, and what they took in the second of two runs."""
    for _ in range(2):
        before, kinds = engine.stats(), np.asarray(engine._runner.state.num_of_kind)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        outputs = engine.generate(prompts, params)
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    tokens, after = [output.outputs[0].token_ids for output in outputs], engine.stats()
    count = sum(map(len, tokens))
    point: dict[str, Any] = dict(tokens=count, tokens_per_s=count / cpu_seconds, wall_tokens_per_s=count / seconds)
    for name in ("num_steps", "num_drafted", "num_accepted"):
        point[name] = getattr(after, name) - getattr(before, name)
    used = (np.asarray(engine._runner.state.num_of_kind) - kinds).tolist()
    return tokens, point | {"kinds": dict(zip(map(name_kind, engine._runner.kinds), used, strict=True))}


def right_after(prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> dict[str, list[float]]:
    """By the number of equal tokens: how often what followed them before came again, and of how many cases."""
    counts: dict[int, list[int]] = collections.defaultdict(lambda: [0, 0])
    find = jax.jit(repeated, static_argnums=4)
    for prompt, answer in zip(prompts, answers, strict=True):
        text = np.zeros(MAX_LENGTH, np.int32)
        text[: len(prompt) + len(answer)] = [*prompt, *answer]
        lengths = jnp.arange(len(prompt), len(prompt) + len(answer), dtype=jnp.int32)
        texts = jnp.broadcast_to(jnp.asarray(text)[None], (len(answer), MAX_LENGTH))
        drafts, num_equal = find(texts, lengths, texts, lengths, 1)
        for draft, equal, token in zip(drafts[:, 0].tolist(), num_equal.tolist(), answer, strict=True):
            if equal:
                counts[equal][0] += draft == token
                counts[equal][1] += 1
    return {str(equal): [right / tried, tried] for equal, (right, tried) in sorted(counts.items())}


def steps_with(branches: int, num_drafts: int, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> int:
    """Steps until all answers are there, one after the other, with so many branches of drafts each."""
    steps = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        text, done = [*prompt, *answer], len(prompt)
        while done < len(text):
            best = 0
            for branch in found(text[:done], branches, num_drafts):
                rest = text[done : len(text) - 1]
                pairs = list(zip(branch, rest, strict=False))
                best = max(best, next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs)))
            steps, done = steps + 1, done + best + 1
    return steps


def found(text: list[int], branches: int, num_drafts: int) -> list[list[int]]:
    """What followed the newest tokens before: first where most tokens were equal, then where it was last."""
    places = []
    for i in range(len(text) - 1):
        pairs = zip(reversed(text[: i + 1]), reversed(text[-MOST_SUFFIX:]), strict=False)
        num_equal = next((n for n, (a, b) in enumerate(pairs) if a != b), min(i + 1, MOST_SUFFIX))
        if num_equal >= LEAST_SUFFIX:
            places.append((num_equal, i))
    result: dict[int, list[int]] = {}
    for _, i in sorted(places, reverse=True):
        follows = text[i + 1 :]
        result.setdefault(follows[0], [follows[n % len(follows)] for n in range(num_drafts)])
    return list(result.values())[:branches]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_output(parser)
    store = open_store("text_drafts", parser.parse_args())
    checkpoint = read_checkpoint(default_path())
    model, tokenizer = load_model(checkpoint, "float32"), checkpoint.tokenizer
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, stop_token_ids=tokenizer.eos_ids)
    prompts = {name: tokenizer.encode_chat(texts) for name, texts in read_texts().items()}
    sizes = EngineOptions(max_model_len=MAX_LENGTH, chunk_tokens=CHUNK_TOKENS)
    for seats in SEATS:
        expected: dict[str, tuple[list[list[int]], float]] = {}
        for drafts in (0, DRAFTS):
            options = dataclasses.replace(sizes, max_num_seqs=seats, num_speculative_tokens=drafts)
            engine = create_engine(model, checkpoint.config, options, block_size=16, dtype="float32")
            for name, of_text in prompts.items():
                tokens, point = serve(engine, of_text, params)
                same, rate = expected.setdefault(name, (tokens, point["tokens_per_s"]))
                if tokens != same:
                    raise AssertionError("other tokens than without drafts")
                point |= {"over_none": point["tokens_per_s"] / rate} if drafts else {}
                store.add(f"{name}, {seats} seats, {drafts} drafts", point)
                print(f"{name}, {seats} seats, {drafts} drafts: {point}", flush=True)
    for name, of_text in prompts.items():
        after = right_after(of_text, expected[name][0])
        counts = {
            f"{n} of {k}": steps_with(n, k, of_text, expected[name][0]) for n, k in ((1, 4), (2, 4), (1, 8), (2, 8))
        }
        for what, point in (("after", after), ("branches", counts)):
            store.add(f"{name}, {what}", point)
            print(f"{name}, {what}: {point}", flush=True)


if __name__ == "__main__":
    main()
