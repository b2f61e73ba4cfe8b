"""The requests of the engine's benchmarks, with the lengths of a chat log, and the sizes of each model."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.engine.model import CONFIGS, example_model, packed_head, packed_model, random_weights
from jaxpaged import Engine, EngineOptions, KVCache, SamplingParams
from jaxpaged._engine.books import Books
from jaxpaged.grammar import Vocabulary
from lib import engine_llama
from lib.llama_config import LlamaConfig

BLOCK_SIZE = 16
Request = tuple[list[int], int]  # a prompt, and how many new tokens are wanted


@dataclasses.dataclass(frozen=True)
class Sizes:
    seats: int  # 0: the engine chooses
    chunk: int
    longest: int  # tokens of a prompt; new tokens, too, are at most this many
    num_blocks: int


SIZES = {name: Sizes(0, 0, 1024, 24_576) for name in CONFIGS}  # this pool and the weights of 8B fit 80 GB
# A block holds half of the layers: the ones with a window, or the others. This pool and the weights fit 60 GB.
SIZES |= {"gpt_oss_20b": Sizes(0, 512, 1024, 32_769)}
SIZES |= {name: Sizes(8, 16, 64, 128) for name in CONFIGS if name.startswith("toy")}


def workload(count: int, longest: int) -> list[Request]:
    """Lengths as in a chat log: log-normal, cut to `longest`."""
    rng = np.random.default_rng(0)
    prompts = rng.lognormal(4.6, 1.0, count).clip(4, longest).astype(int)
    new = rng.lognormal(5.3, 0.8, count).clip(8, longest).astype(int)
    return [(rng.integers(10, 1000, length).tolist(), int(wanted)) for length, wanted in zip(prompts, new, strict=True)]


def rollout_work(count: int, longest: int, *, seed: int) -> list[Request]:
    """Prompts, and the new tokens of each of their completions: uniform lengths up to half of `longest`."""
    rng = np.random.default_rng(seed)
    prompts, new = rng.integers(longest // 8, longest // 2 + 1, (2, count)).tolist()
    return [(rng.integers(10, 1000, length).tolist(), wanted) for length, wanted in zip(prompts, new, strict=True)]


def create_caches(config: LlamaConfig, num_blocks: int) -> tuple[KVCache, ...]:
    create = functools.partial(
        KVCache.create,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        **config.cache_sizes,
        dtype=jnp.bfloat16,
    )
    return tuple(create() for _ in range(config.num_layers))


def create_engine(
    model: str,
    weights: Any = None,
    *,
    vocabulary: Vocabulary | None = None,
    **options: Any,
) -> Engine:
    """An engine, by default with random weights. It chooses each size that is in neither `SIZES` nor `options`."""
    config, sizes = CONFIGS[model], SIZES[model]
    chosen: dict[str, Any] = dict(
        max_num_seqs=sizes.seats or None, max_model_len=2 * sizes.longest, chunk_tokens=sizes.chunk or None
    )
    chosen |= {name: option for name, option in options.items() if option is not None}
    weights = random_weights(config) if weights is None else weights
    return engine_of(config, weights, EngineOptions(**chosen), num_blocks=sizes.num_blocks, vocabulary=vocabulary)


def engine_of(
    config: LlamaConfig,
    weights: Any,
    options: EngineOptions,
    *,
    num_blocks: int,
    vocabulary: Vocabulary | None = None,
    **attention_options: Any,
) -> Engine:
    """An engine for `random_weights(config)`."""
    if config.num_experts:
        model = nnx.merge(example_model(config, **attention_options)[0], weights)
        sizes: Any = dict(block_size=BLOCK_SIZE, dtype="bfloat16", num_blocks=num_blocks)
        return engine_llama.create_engine(model, config, options, vocabulary=vocabulary, **sizes)
    caches = create_caches(config, num_blocks)
    apply, head = packed_model(config, **attention_options), packed_head(config)
    return Engine(apply, weights, caches, head=head, vocabulary=vocabulary, options=options)


@dataclasses.dataclass(frozen=True)
class RandomModel:
    """How the process of an engine makes it (`lib/engine_process.py`)."""

    model: str
    steps_per_slice: int | None = None

    def load(self) -> Any:
        return random_weights(CONFIGS[self.model])

    def create(self, weights: Any) -> Engine:
        return create_engine(self.model, weights, steps_per_slice=self.steps_per_slice)


def processor_seconds(weights: Any) -> Callable[[Engine], float]:
    """For `EngineRunner.call`: the processor time of the engine's process."""
    return lambda engine: time.process_time()


def run_work(engine: Engine, work: Sequence[Request], *, longest_first: bool = False, **sampling: Any) -> int:
    """The number of tokens of all completions. `sampling`: parameters of each request; greedy by default."""
    prompts = [prompt for prompt, _ in work]
    params = [
        SamplingParams(max_tokens=new, **{"temperature": 0, "seed": i} | sampling) for i, (_, new) in enumerate(work)
    ]
    # The order alone: `stream`, which keeps the given order too, also makes an output for each request and slice.
    unsorted = mock.patch.object(Books, "put_longest_first")
    with contextlib.nullcontext() if longest_first else unsorted:
        outputs = engine.generate(prompts, params)
    return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)


def time_work(engine: Engine, work: Sequence[Request]) -> float:
    """Microseconds for all of `work`."""
    begin = time.perf_counter()
    if run_work(engine, work) != sum(new for _, new in work):
        raise AssertionError("not all tokens came")
    return (time.perf_counter() - begin) * 1e6
