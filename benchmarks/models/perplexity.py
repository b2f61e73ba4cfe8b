"""What each cache dtype does to SmolLM2-135M: perplexity, greedy tokens, memory.

    python -m benchmarks.models.perplexity

The perplexity is of the first two chapters of Alice's Adventures in Wonderland (Lewis Carroll, 1865, public domain;
`benchmarks/data/alice.txt`), one sequence in a paged cache, 256 tokens at a time: every token attends to the stored
keys and values, its own chunk's included. The third chapter, through a float32 cache, calibrates the scales of a tensor
and of a head. Up to 48 greedy tokens of each short prompt in `tests/examples/data/smollm2_greedy.jsonl` are compared
with the ones in that file, which Hugging Face transformers gives in float32: quantisation may tip a near tie, and what
follows is then another text.

Weights and everything but the cache are float32.
"""

import argparse
import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.harness import ROOT, add_output, open_store
from jaxpaged import BlockAllocator, KVCache, gather_kv, kv_scale
from lib.checkpoint import default_path, load_model, read_checkpoint
from lib.generation import run_generation
from lib.llama import Llama
from lib.llama_config import LlamaConfig
from lib.sampling import Sampling
from lib.start import start
from lib.tokenizer import Tokenizer

CHUNK, BLOCK_SIZE, NEW_TOKENS = 256, 16, 48
CACHES = (
    *("float32", "bfloat16", "float8_e4m3fn/token_head", "float8_e4m3fn/head", "float8_e4m3fn/tensor"),
    *("float8_e5m2/token_head", "float8_e5m2/head", "float8_e5m2/tensor"),
    *("int8/token_head", "int8/head", "int8/tensor"),
)

Caches = tuple[KVCache, ...]


@dataclasses.dataclass(frozen=True)
class Text:
    """Token ids of what is measured and of what calibrates."""

    measured: list[int]
    calibration: list[int]


def read_text(tokenizer: Tokenizer) -> Text:
    text = (ROOT / "benchmarks" / "data" / "alice.txt").read_text(encoding="utf-8")
    measured, calibration = text.split("CHAPTER III\n")
    return Text(tokenizer.encode(measured), tokenizer.encode(calibration))


def run(model: Llama, caches: Caches, tokens: list[int]) -> tuple[Caches, BlockAllocator, np.ndarray]:
    """The caches after all tokens, and the log probability of each token but the first, given those before it."""
    graph, weights = nnx.split(model)
    num_blocks = caches[0].k.shape[0]
    allocator = BlockAllocator.create(
        num_blocks=num_blocks, block_size=BLOCK_SIZE, num_seqs=1, max_blocks_per_seq=num_blocks - 1
    )

    @jax.jit
    def one_chunk(  # type: ignore[no-untyped-def]
        weights: nnx.State, caches: Caches, allocator: BlockAllocator, chunk: jax.Array, targets: jax.Array
    ):
        model = nnx.merge(graph, weights)
        allocator, slots, _ = allocator.append(jnp.asarray([CHUNK], jnp.int32), q_len=CHUNK)
        caches, logits = model(chunk[None], caches, allocator, slots, num_logits=CHUNK)
        return caches, allocator, jnp.take_along_axis(jax.nn.log_softmax(logits[0]), targets[:, None], 1)[:, 0]

    padded = np.zeros(-(-len(tokens) // CHUNK) * CHUNK + 1, np.int32)  # what stands behind a token does not reach it
    padded[: len(tokens)] = tokens
    found = []
    for begin in range(0, len(tokens), CHUNK):
        chunk, targets = padded[begin : begin + CHUNK], padded[begin + 1 : begin + CHUNK + 1]
        caches, allocator, log_probabilities = one_chunk(
            weights, caches, allocator, jnp.asarray(chunk), jnp.asarray(targets)
        )
        found.append(np.asarray(log_probabilities, np.float64))
    return caches, allocator, np.concatenate(found)[: len(tokens) - 1]


def create(config: LlamaConfig, num_blocks: int, dtype: str, scale: Any, scales: list[dict] | None) -> Caches:
    kind = dict(num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=dtype, scale_per=scale)
    layers = scales or [{}] * config.num_layers
    return tuple(KVCache.create(num_blocks=num_blocks, block_size=BLOCK_SIZE, **kind, **layer) for layer in layers)


def calibration_caches(model: Llama, config: LlamaConfig, tokens: list[int]) -> Caches:
    """The keys and values of each layer after `tokens`, contiguous, in float32."""
    num_blocks = 1 + -(-len(tokens) // CHUNK) * CHUNK // BLOCK_SIZE
    caches, allocator, _ = run(model, create(config, num_blocks, "float32", None, None), tokens)
    lengths = jnp.asarray([len(tokens)], jnp.int32)  # without the last chunk's padding
    return tuple(gather_kv(cache, allocator.block_tables, lengths) for cache in caches)


def calibrate(seen: Caches, dtype: str, scale: Any) -> list[dict]:
    """k_scale and v_scale of each layer."""
    return [{"k_scale": kv_scale(c.k, dtype, scale), "v_scale": kv_scale(c.v, dtype, scale)} for c in seen]


def greedy_tokens(model: Llama, config: LlamaConfig, prompts: list[list[int]], create_caches: Any) -> list[list[int]]:
    state = start(
        config, prompts, max_new_tokens=NEW_TOKENS, block_size=BLOCK_SIZE, num_blocks=None, dtype="float32", seed=0
    )
    state = dataclasses.replace(state, caches=create_caches(state.caches[0].k.shape[0]))
    state, _ = run_generation(model, state, prompts, (), Sampling(), steps_at_once=NEW_TOKENS)
    return np.asarray(state.tokens).tolist()


def short_prompts() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and their greedy tokens by another implementation, in float32."""
    lines = (ROOT / "tests" / "examples" / "data" / "smollm2_greedy.jsonl").read_text(encoding="utf-8").splitlines()
    cases = [case for case in map(json.loads, lines) if len(case["prompt_tokens"]) <= 100]
    return [case["prompt_tokens"] for case in cases], [case["tokens"][:NEW_TOKENS] for case in cases]


def agreement(tokens: list[list[int]], expected: list[list[int]]) -> tuple[int, float]:
    """In how many rows all tokens agree, and which share of all tokens stands before their row's first difference."""
    before = [
        next((i for i, (a, b) in enumerate(zip(row, other, strict=False)) if a != b), len(other))
        for row, other in zip(tokens, expected, strict=True)
    ]
    same = sum(count == len(other) for count, other in zip(before, expected, strict=True))
    return same, sum(before) / sum(map(len, expected))


def measure(dtype: str, scale: Any, model: Llama, config: LlamaConfig, text: Text, seen: Caches) -> dict[str, Any]:
    scales = calibrate(seen, dtype, scale) if scale in ("head", "tensor") else None

    def create_caches(num_blocks: int) -> Caches:
        return create(config, num_blocks, dtype, scale, scales)

    _, _, log_probabilities = run(
        model, create_caches(1 + -(-len(text.measured) // CHUNK) * CHUNK // BLOCK_SIZE), text.measured
    )
    perplexity = math.exp(-log_probabilities.mean())
    if not math.isfinite(perplexity):
        raise AssertionError(f"{dtype} {scale}: the perplexity is no number")
    prompts, expected = short_prompts()
    same, before = agreement(greedy_tokens(model, config, prompts, create_caches), expected)
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(create_caches(2)) if leaf.ndim >= 3)
    return {
        "dtype": dtype,
        "scale": scale,
        "bytes_per_token": stored // (2 * BLOCK_SIZE),
        "perplexity": perplexity,
        "prompts": len(prompts),
        "prompts_with_equal_tokens": same,
        "share_of_tokens_before_a_difference": before,
    }


def parse(name: str) -> tuple[str, str | None]:
    dtype, _, scale = name.partition("/")
    return dtype, scale or None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caches", nargs="+", default=list(CACHES), help="dtype, or dtype/scale")
    add_output(parser)
    args = parser.parse_args()
    checkpoint = read_checkpoint(default_path())
    config, model = checkpoint.config, load_model(checkpoint, "float32")
    text = read_text(checkpoint.tokenizer)
    seen = calibration_caches(model, config, text.calibration)
    store = open_store(
        "perplexity",
        args,
        model="SmolLM2-135M-Instruct",
        tokens=len(text.measured),
        calibration_tokens=len(text.calibration),
        tokens_a_prompt=NEW_TOKENS,
    )
    print(f"{len(text.measured)} tokens measured, {len(text.calibration)} calibrate")
    print(f"{'cache':>24} {'B/token':>8} {'perplexity':>10} {'same':>6} {'before':>7}", flush=True)
    for name in args.caches:
        row = measure(*parse(name), model, config, text, seen)
        store.add(name, row)
        print(
            f"{name:>24} {row['bytes_per_token']:8} {row['perplexity']:10.4f} "
            f"{row['prompts_with_equal_tokens']:3}/{row['prompts']} "
            f"{100 * row['share_of_tokens_before_a_difference']:6.1f}%",
            flush=True,
        )


if __name__ == "__main__":
    main()
