"""How many prompts get the same greedy tokens in bfloat16 alone and among others, of a real model in an engine.

    python -m benchmarks.engine.tokens               # SmolLM2-135M; about a minute on a GPU
    python -m benchmarks.engine.tokens --prompts 4   # on a CPU, to try the script out

Sums differ in their last bits between steps of different sizes, so of two nearly equal tokens the other can win.
`apart` is the largest difference between the logprobs of two such tokens.
"""

import argparse
import dataclasses
from pathlib import Path

import jax
import numpy as np

from benchmarks.harness import ROOT, add_output, open_store
from jaxpaged import Completion, Engine, EngineOptions, SamplingParams
from lib.checkpoint import default_path, load_model, read_checkpoint
from lib.engine_llama import create_engine

TEXT = ROOT / "benchmarks" / "data" / "alice.txt"
SEATS, LONGEST, NEW_TOKENS, BLOCK_SIZE = 64, 200, 48, 16


def passages(tokens: list[int], count: int) -> list[list[int]]:
    """Prompts of 1 to LONGEST tokens, from anywhere in the text."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, LONGEST + 1, count)
    starts = rng.integers(0, len(tokens) - LONGEST, count)
    return [tokens[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def completions(engine: Engine, prompts: list[list[int]]) -> list[Completion]:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, logprobs=True)
    return [output.outputs[0] for output in engine.generate(prompts, params)]


def apart(one: Completion, other: Completion) -> float:
    """How far apart the first two tokens that differ are, in nats; 0 if none do."""
    assert one.logprobs is not None
    assert other.logprobs is not None
    for i, tokens in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
        if tokens[0] != tokens[1]:
            return abs(one.logprobs[i] - other.logprobs[i])
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint; by default the one that `make setup` installs")
    parser.add_argument("--prompts", type=int, default=100)
    add_output(parser)
    options = parser.parse_args()
    options.toy = jax.default_backend() != "gpu"
    store = open_store("engine_tokens", options)
    checkpoint = read_checkpoint(options.model or default_path())
    model = load_model(checkpoint, "bfloat16")
    prompts = passages(checkpoint.tokenizer.encode(TEXT.read_text(encoding="utf-8")), options.prompts)
    for exact in (False, True):
        if exact:
            for layer in model.layers:
                layer.self_attn.settings = dataclasses.replace(layer.self_attn.settings, num_partitions=1)
        of_engine = EngineOptions(max_num_seqs=SEATS, max_model_len=LONGEST + NEW_TOKENS, batch_invariant=exact)
        engine = create_engine(model, checkpoint.config, of_engine, block_size=BLOCK_SIZE, dtype="bfloat16")
        together = completions(engine, prompts)
        alone = [completions(engine, [prompt])[0] for prompt in prompts]
        differences = [apart(*pair) for pair in zip(together, alone, strict=True)]
        equal = sum(pair[0].token_ids == pair[1].token_ids for pair in zip(together, alone, strict=True))
        point = dict(prompts=len(prompts), equal=equal, apart=max(differences), tokens=NEW_TOKENS)
        name = "an exact engine" if exact else "an engine"
        print(f"{name:>15}  {point}", flush=True)
        store.add(name, point)


if __name__ == "__main__":
    main()
