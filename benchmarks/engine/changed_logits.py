"""What a step costs if its requests change logits or follow grammars: `python -m benchmarks.engine.changed_logits`.

    python -m benchmarks.engine.changed_logits --model 8b     # about 4 minutes on an H200
    python -m benchmarks.engine.changed_logits --model toy    # on a CPU, to try the script out

All sequences run at once, each with a prompt of --prompt tokens. The time of a step is the difference of two runs that
differ in the number of new tokens, over the difference in steps; the median of --repeats such pairs. The vocabulary has
random words of 2 to 8 letters. Each sequence follows a grammar of its own, of 100 states with a mask each. Answers are
checked first: those with grammars are walked through them, and every other change must change tokens.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.checks import require
from benchmarks.engine.model import CONFIGS, random_weights
from benchmarks.engine.workload import create_engine
from benchmarks.harness import add_output, open_store
from jaxpaged import Engine, SamplingParams
from jaxpaged.grammar import Grammar, Vocabulary, compile_regex

NUM_STATES = 100
LETTERS = 26
A = ord("a")
PENALTIES = dict(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2)
WITHOUT = "without a vocabulary"
CASES: dict[str, dict[str, Any]] = {
    "no changes": {},
    "three penalties": PENALTIES,
    "logit_bias of 20 tokens": dict(logit_bias=dict.fromkeys(range(300, 320), 50.0)),
    "bad_words, 20 of 3 tokens": dict(bad_words=[(token, token + 1, token + 2) for token in range(300, 320)]),
    "allowed_token_ids, 200": dict(allowed_token_ids=range(300, 500)),
    "sampled": dict(temperature=1.0),
    "sampled, three penalties": dict(temperature=1.0, **PENALTIES),
    "a grammar each": {},
}


def random_vocabulary(size: int) -> tuple[Vocabulary, list[bytes]]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 9, size - 257)
    words = [(A + rng.integers(0, LETTERS, length)).astype(np.uint8).tobytes() for length in lengths]
    tokens = [*(bytes([byte]) for byte in range(256)), *words]
    return Vocabulary([*tokens, None], [size - 1]), tokens


def random_grammar(vocabulary: Vocabulary, seed: int) -> Grammar:
    """Text of any length, with half of the letters at each of its places."""
    rng = np.random.default_rng(seed)
    places = [rng.choice(LETTERS, LETTERS // 2, replace=False) for _ in range(NUM_STATES - 1)]
    return compile_regex("(" + "".join(f"[{bytes(A + place).decode()}]" for place in places) + ")*", vocabulary)


class Steps:
    """Steps of an engine whose sequences run together."""

    def __init__(self, engine: Engine, sizes: argparse.Namespace) -> None:
        self.engine, self.sizes = engine, sizes
        self.prompts = np.random.default_rng(0).integers(10, 250, (sizes.seqs, sizes.prompt)).tolist()

    def run(self, params: Sequence[SamplingParams]) -> tuple[float, int, list[list[int]]]:
        """Seconds, steps and new tokens."""
        before, begin = self.engine.stats(), time.perf_counter()
        outputs = self.engine.generate(self.prompts, params)
        seconds = time.perf_counter() - begin
        steps = sum(self.engine.stats().steps_by_kind.values()) - sum(before.steps_by_kind.values())
        return seconds, steps, [output.outputs[0].token_ids for output in outputs]

    def params(self, num_tokens: int, grammars: Sequence[Grammar], changes: dict[str, Any]) -> list[SamplingParams]:
        each: Sequence[Grammar | None] = grammars or [None] * self.sizes.seqs
        common = dict(max_tokens=num_tokens, temperature=0.0) | changes
        return [SamplingParams(**common, seed=i, grammar=grammar) for i, grammar in enumerate(each)]

    def microseconds(self, grammars: Sequence[Grammar], changes: dict[str, Any]) -> tuple[float, list[list[int]]]:
        """Of a step, and the new tokens of the longer run."""
        few, many = (self.params(number, grammars, changes) for number in (self.sizes.few, self.sizes.many))
        self.run(few)  # copies the grammars
        times = []
        for _ in range(self.sizes.repeats):
            (short, fewer, _), (long, more, tokens) = self.run(few), self.run(many)
            times.append((long - short) / (more - fewer) * 1e6)
        return statistics.median(times), tokens


def check(
    name: str, tokens: list[list[int]], plain: list[list[int]], grammars: Sequence[Grammar], texts: list[bytes]
) -> None:
    """Raises if an answer breaks its grammar, or if changes leave all tokens as they were."""
    require(tokens != plain or name in ("no changes", "bad_words, 20 of 3 tokens"), f"{name}: nothing changed")
    for grammar, answer in zip(grammars, tokens, strict=False):
        end = grammar.walk(b"".join(texts[token] for token in answer))
        require(end != grammar.dead_state, "an answer breaks its grammar")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=tuple(CONFIGS))
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--few", type=int, default=64, help="new tokens of the shorter run")
    parser.add_argument("--many", type=int, default=192, help="new tokens of the longer run")
    parser.add_argument("--repeats", type=int, default=3)
    add_output(parser)
    options = parser.parse_args(arguments)
    options.toy = options.model == "toy"
    config = CONFIGS[options.model]
    vocabulary, texts = random_vocabulary(config.vocab_size)
    store = open_store(f"changed_logits_{options.model}", options, seqs=options.seqs, prompt=options.prompt)
    weights = random_weights(config)
    create = functools.partial(create_engine, options.model, weights, max_num_seqs=options.seqs)
    with ThreadPoolExecutor() as threads:
        jobs = [threads.submit(random_grammar, vocabulary, seed) for seed in range(options.seqs)]
        without = Steps(create(), options)
        plain_us, plain = without.microseconds([], {})
        del without
        sizes = dict(num_grammar_states=1 + NUM_STATES * options.seqs, num_grammar_masks=1 + NUM_STATES * options.seqs)
        steps = Steps(create(vocabulary=vocabulary, **sizes), options)
        grammars = [job.result() for job in jobs]
    store.add(WITHOUT, {"us": plain_us})
    print(f"{WITHOUT:<28} {plain_us:8.0f} us a step", flush=True)
    for name, changes in CASES.items():
        followed = grammars if name == "a grammar each" else []
        us, tokens = steps.microseconds(followed, changes)
        check(name, tokens, plain, followed, texts)
        store.add(name, {"us": us})
        print(f"{name:<28} {us:8.0f} us a step", flush=True)


if __name__ == "__main__":
    main()
