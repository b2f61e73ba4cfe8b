"""Decoding SmolLM2-135M on the CPU, against the floor of reading the weights once a step.

    python -m benchmarks.models.cpu_throughput

floor = bytes of the weights / copy bandwidth, where a copy counts the bytes it reads and those it writes.
"""

import argparse
import os
import platform
import resource
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from flax import nnx

from benchmarks.harness import add_output, open_store
from lib.checkpoint import default_path, load_model, read_checkpoint
from lib.generation import run_generation
from lib.llama import Llama
from lib.llama_config import LlamaConfig
from lib.sampling import Sampling
from lib.start import start
from lib.tokenizer import Tokenizer

PROMPT = "The page table of a process maps each page of its address space to a frame of memory, so that"
STEPS = 64
REPEATS = 5


def copy_bandwidth() -> float:
    """Bytes read and written a second by a copy of 512 MB, the best of one thread and one a core."""
    source = np.random.default_rng(0).random(1 << 26)
    target = np.empty_like(source)
    best = 0.0
    for num_threads in {1, os.cpu_count() or 1}:
        parts = [np.array_split(array, num_threads) for array in (target, source)]
        with ThreadPoolExecutor(num_threads) as pool:
            for _ in range(5):
                begin = time.perf_counter()
                list(pool.map(np.copyto, *parts))
                best = max(best, 2 * source.nbytes / (time.perf_counter() - begin))
    return best


def decode_rate(model: Llama, config: LlamaConfig, tokenizer: Tokenizer, batch: int) -> dict:
    """Tokens a second over STEPS decode steps, the median of REPEATS runs."""
    prompts = [tokenizer.encode(PROMPT)] * batch
    rates, tokens, cache_bytes = [], [], 0
    for _ in range(REPEATS):
        state = start(
            config, prompts, max_new_tokens=STEPS + 1, block_size=16, num_blocks=None, dtype="float32", seed=0
        )
        cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.caches))
        state, timing = run_generation(model, state, prompts, (), Sampling(), steps_at_once=STEPS)
        tokens.append(np.asarray(state.tokens).tolist())
        rates.append(batch * STEPS / timing.decode)
    assert all(rows == tokens[0] for rows in tokens), "two runs gave different tokens"
    assert all(row == tokens[0][0] for row in tokens[0]), "one prompt gave different tokens in different rows"
    return {"batch": batch, "tokens_per_s": statistics.median(rates), "runs": rates, "cache_bytes": cache_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_output(parser)
    args = parser.parse_args()
    store = open_store("generate", args)
    checkpoint = read_checkpoint(default_path())
    model = load_model(checkpoint, "float32")
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    rows, peak = [], 0
    for batch in (1, 2, 4, 8, 16):
        rows.append(decode_rate(model, checkpoint.config, checkpoint.tokenizer, batch))
        # Only of the first batch: what was compiled for one stays while the next ones run.
        peak = peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    bandwidth = copy_bandwidth()  # last: its arrays would count as memory of the run
    floor = bandwidth / weight_bytes  # steps a second
    print(f"{platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}, copy {bandwidth / 1e9:.1f} GB/s")
    print(f"weights {weight_bytes / 1e6:.0f} MB: at most {floor:.1f} steps/s by the copy bandwidth")
    for row in rows:
        steps = row["tokens_per_s"] / row["batch"]
        row |= {
            "steps_per_s": steps,
            "of_floor": steps / floor,
            "over_batch_1": row["tokens_per_s"] / rows[0]["tokens_per_s"],
        }
        print(
            f"batch {row['batch']:2}: {row['tokens_per_s']:6.1f} tokens/s, {row['over_batch_1']:.2f} times batch 1, "
            f"{steps:5.1f} steps/s, {100 * row['of_floor']:3.0f}% of the floor's"
        )
    print(f"peak memory of batch 1 {peak / 1e6:.0f} MB, {(peak - weight_bytes) / 1e6:.0f} MB beside the weights")
    store.add("floor", {"copy_bytes_per_s": bandwidth, "weight_bytes": weight_bytes, "peak_bytes_of_batch_1": peak})
    for row in rows:
        store.add(f"batch {row['batch']}", row)


if __name__ == "__main__":
    main()
