"""What host memory behind the prefix cache gains, and what it costs where nothing is found in it.

    python -m benchmarks.engine.host_tier --model toy --parts conversations  # on a CPU
    python -m benchmarks.engine.host_tier --model 8b

- conversations: each turn of 64 conversations adds a few tokens, and together they are four times as long as the
  pool: the tokens found over those that an endless pool would find, and the new tokens a second over those without
  host memory.
- evicted: the time to the first token of a long prompt that the pool has lost, over that of one never seen. The same
  prompt is then asked for once more, from the pool: its logprob must have the same bits.
- nothing to find: prompts that have nothing in common, with host memory and without.
- stages: what the calls and the copies of as many blocks as may be on their way take, each alone.

An engine without host memory is the same program with the copies left out.
"""

import argparse
import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from benchmarks.checks import require
from benchmarks.engine.model import CONFIGS, packed_model, random_weights
from benchmarks.engine.workload import BLOCK_SIZE, create_caches
from benchmarks.harness import add_output, open_store
from jaxpaged import Engine, SamplingParams
from jaxpaged._engine import program
from jaxpaged._engine.host_copies import HostCopies, Run
from jaxpaged._engine.host_tier import HostTier
from jaxpaged._engine.requests import Row

CONVERSATIONS, TURNS, POOLS = 64, 4, 4
ROUNDS = 2
PARTS = "stages", "evicted", "nothing", "conversations"


@dataclasses.dataclass(frozen=True)
class Sizes:
    seats: int
    chunk: int  # that of 64 seats, if the engine chooses
    first: int  # tokens of a conversation's first turn
    added: int  # of each turn after it
    new: int  # generated in each
    long: int  # tokens of the prompt that is evicted
    requests: int  # that have nothing in common
    short: int  # tokens of the prompts of those

    @property
    def talk(self) -> int:
        """Tokens of a conversation at its end."""
        return self.first + (TURNS - 1) * self.added + TURNS * self.new

    @property
    def num_blocks(self) -> int:
        return 1 + CONVERSATIONS * self.talk // POOLS // BLOCK_SIZE


SIZES = {name: Sizes(64, 448, 1024, 128, 64, 8192, 256, 256) for name in CONFIGS} | {
    "toy": Sizes(8, 64, 128, 32, 16, 512, 32, 64)
}


def create(model: str, layers: int | None, sizes: Sizes) -> Engine:
    config = CONFIGS[model]
    config = dataclasses.replace(config, num_layers=layers or config.num_layers)
    weights = random_weights(config)
    caches = create_caches(config, sizes.num_blocks)
    total = 4 * sum(x.nbytes for x in jax.tree.leaves(caches))  # all conversations
    program.chosen_least_spared = lambda caches: None  # fewer kinds of steps to compile
    return Engine(
        packed_model(config),
        weights,
        caches,
        num_seats=sizes.seats,
        chunk_tokens=sizes.chunk,
        max_length=sizes.long + BLOCK_SIZE,
        widths=(),
        prefix_cache=True,
        host_cache_bytes=5 * total // 4,
    )


@contextlib.contextmanager
def without_tier(engine: Engine) -> Iterator[None]:
    tier = engine._runner.tier
    settle(engine)
    engine._runner.tier = None
    yield
    settle(engine)
    engine._runner.tier = tier


def settle(engine: Engine) -> None:
    """Reads the slices that are under way."""
    while engine._books.under_way:
        engine._runner.receive()


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, 1000, count).tolist()


def forget(engine: Engine) -> None:
    engine.update_weights(engine._runner.weights)
    engine.generate([[1]], SamplingParams(max_tokens=1, temperature=0))


def conversations(engine: Engine, sizes: Sizes) -> dict[str, float]:
    forget(engine)
    talks = [tokens(seed, sizes.first) for seed in range(CONVERSATIONS)]
    endless, before, begin = 0, engine.stats(), time.perf_counter()
    params = SamplingParams(max_tokens=sizes.new, temperature=0)
    for turn in range(TURNS):
        for i, output in enumerate(engine.generate(talks, params)):
            talks[i] = talks[i] + output.outputs[0].token_ids
            if turn < TURNS - 1:  # what is computed by then is found in the next turn
                endless += (len(talks[i]) - 1) // BLOCK_SIZE * BLOCK_SIZE
                talks[i] += tokens(1000 * turn + i, sizes.added)
    after, seconds = engine.stats(), time.perf_counter() - begin
    return {
        "found_of_endless": (after.num_found - before.num_found) / endless,
        "brought_of_found": (after.num_brought - before.num_brought) / max(after.num_found - before.num_found, 1),
        "computed": after.num_computed - before.num_computed,
        "preempted": after.num_preempted - before.num_preempted,
        "steps": after.num_steps - before.num_steps,
        "mixed_steps": after.num_mixed_steps - before.num_mixed_steps,
        "slices": after.num_slices - before.num_slices,
        "seconds": seconds,
        "new_tokens_per_s": CONVERSATIONS * TURNS * sizes.new / seconds,
    }


def evicted(engine: Engine, sizes: Sizes) -> dict[str, float]:
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=True)

    def ask(prompt: list[int]) -> tuple[float, int, float]:
        before, begin = engine.stats(), time.perf_counter()
        (output,) = engine.generate([prompt], params)
        seconds, (logprob,) = time.perf_counter() - begin, output.outputs[0].logprobs or [0.0]
        return 1e3 * seconds, engine.stats().num_found - before.num_found, logprob

    forget(engine)
    times: dict[str, list[float]] = {"computed_ms": [], "host_ms": [], "pool_ms": []}
    of_pool = sizes.num_blocks * BLOCK_SIZE // sizes.long + 2  # prompts that push all others out
    for turn in range(ROUNDS):
        prompt = tokens(turn, sizes.long - 1)
        computed, *_ = ask(prompt)
        for other in range(of_pool):
            ask(tokens(1000 + of_pool * turn + other, sizes.long - 1))
        from_host, num_found, logprob = ask([*prompt, 7])
        require(num_found == (sizes.long - 1) // BLOCK_SIZE * BLOCK_SIZE, f"{num_found} tokens came back")
        from_pool, _, expected = ask([*prompt, 7])
        require(logprob == expected, f"a logprob of {logprob}, from the pool {expected}")
        for name, value in zip(times, (computed, from_host, from_pool), strict=True):
            times[name].append(value)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return medians | {"host_of_computed": medians["host_ms"] / medians["computed_ms"]}


def nothing_to_find(engine: Engine, sizes: Sizes) -> float:
    """New tokens a second."""
    forget(engine)
    prompts = [tokens(10_000 + i, sizes.short) for i in range(sizes.requests)]
    params = SamplingParams(max_tokens=sizes.new, temperature=0)
    begin = time.perf_counter()
    engine.generate(prompts, params)
    return sizes.requests * sizes.new / (time.perf_counter() - begin)


def stages(engine: Engine, sizes: Sizes) -> dict[str, float]:
    """Milliseconds until the calls return, and until all is done, for as many pages as may be on their way."""
    forget(engine)
    settle(engine)
    assert isinstance(engine._runner.tier, HostTier)
    copies: HostCopies = engine._runner.tier._copies
    state, found = engine._runner.state_of_slice, {}
    assert state.scheduler.prefixes is not None
    salt = int(state.scheduler.prefixes.salt[0])
    in_run, num_columns = copies.num_pages * copies.in_page, sizes.long // BLOCK_SIZE
    num_runs = max(min(copies.most_staged * copies.in_page, num_columns) // in_run, 1)

    def timed(name: str, function: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        done = function()
        found[f"{name}_calls"] = 1e3 * (time.perf_counter() - begin)
        jax.block_until_ready(done)
        found[name] = 1e3 * (time.perf_counter() - begin)
        return done

    def run_of(prompt: np.ndarray, i: int, pages: list[Any]) -> Run:
        end = min((i + 1) * in_run, num_columns)
        keys = [bytes([i])] * end
        return Run(Row(0, prompt, SamplingParams(), 0), salt, prompt[:end], keys, i * in_run, len(pages), pages)

    def put(runs: list[Run]) -> Any:
        nonlocal state
        for run in runs:
            (state,) = copies.put(state, [run])
        return state.allocator

    def gather(runs: list[Run]) -> Any:
        size = copies.num_pages
        return [copies._take_out[size](state, copies._inputs([run], size))[1][: run.num_pages] for run in runs]

    pages = [jax.device_put([copies._nothing] * copies.num_pages, copies._on_host) for _ in range(num_runs)]
    for turn in range(ROUNDS):  # the last one counts
        prompt = np.array(tokens(30_000 + turn, sizes.long), np.int32).reshape(-1, BLOCK_SIZE)
        back = timed("to_device", lambda: [copies.bring(of_run) for of_run in pages])  # noqa: B023
        runs = [run_of(prompt, i, of_run) for i, of_run in enumerate(back)]
        timed("put", lambda: put(runs))  # noqa: B023
        taken = timed("gather", lambda: gather(runs))  # noqa: B023
        pages = timed("to_host", lambda: [jax.device_put(of_run, copies._on_host) for of_run in taken])  # noqa: B023
        engine._runner.state_of_slice = state
    return found | {"megabytes": num_runs * copies.num_pages * copies.page_bytes / 1e6}


def both(engine: Engine, function: Callable[[], Any]) -> tuple[Any, Any]:
    """With host memory and without."""
    found = function()
    with without_tier(engine):
        return found, function()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=tuple(CONFIGS))
    parser.add_argument("--layers", type=int, help="instead of the model's")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    add_output(parser)
    options = parser.parse_args()
    sizes = SIZES[options.model]
    store = open_store("host_tier", options, model=options.model, layers=options.layers, **dataclasses.asdict(sizes))
    begin = time.perf_counter()

    def say(name: str, point: dict[str, float]) -> None:
        text = ", ".join(f"{key} {value:.4g}" for key, value in point.items())
        print(f"[{time.perf_counter() - begin:5.1f} s] {name}: {text}", flush=True)
        store.add(name, point)

    engine = create(options.model, options.layers, sizes)
    print(f"[{time.perf_counter() - begin:5.1f} s] {jax.devices()[0].device_kind}, made", flush=True)
    if "stages" in options.parts:
        say("stages", stages(engine, sizes))
    if "evicted" in options.parts:
        say("evicted", evicted(engine, sizes))
    if "nothing" in options.parts:
        rates = [both(engine, functools.partial(nothing_to_find, engine, sizes)) for _ in range(ROUNDS)]
        with_tier, without = (statistics.median(column) for column in zip(*rates, strict=True))
        say("nothing to find", {"with": with_tier, "without": without, "part": with_tier / without})
    if "conversations" in options.parts:
        found, lost = both(engine, functools.partial(conversations, engine, sizes))
        say("conversations without host memory", lost)
        say("conversations", found | {"gain": found["new_tokens_per_s"] / lost["new_tokens_per_s"]})


if __name__ == "__main__":
    main()
