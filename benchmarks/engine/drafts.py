"""What drafts of `jaxpaged.Engine` bring if most of them are right, and cost if none is.

    python -m benchmarks.engine.drafts                         # Llama-3-8B's shape
    python -m benchmarks.engine.drafts --requests 1024 512     # the requests of engine.throughput
    python -m benchmarks.engine.drafts --model toy             # on a CPU, to try the script out

Random bfloat16 weights, greedy. A rule raises the logit of one token, so that a draft can be right or wrong on purpose,
and the tokens of each run can be checked. For each number of seats, all taken:

- none: an engine without drafts;
- 70% right: a function drafts DRAFTS tokens, each right in 7 of 10 cases;
- useless: it is always wrong;
- own tokens: what followed the newest tokens before is drafted, and seldom right.

With --requests, engines that choose their own sizes serve so many requests: without drafts, and with 70% of them right.
Then drafts pay where few requests are left.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.engine.model import CONFIGS, packed_model, random_weights
from benchmarks.engine.steps import name_kind
from benchmarks.engine.workload import BLOCK_SIZE, SIZES, Request, create_caches, workload
from benchmarks.harness import add_output, compile_all, open_store
from benchmarks.models.llama_step import LlamaConfig
from jaxpaged import Engine, EngineOptions, SamplingParams, StepAttention
from jaxpaged._engine.slices import Apply

DRAFTS, LETTERS, PROMPT = 4, 16, 32
NEW = {8: 384, 64: 256, 256: 128}  # tokens of each request, by the seats
WIDTHS = {8: (64,), 64: (128, 256), 256: (256,)}
CHUNK_TOKENS = {8: 64, 64: 256, 256: 256}


def rule(token: Any, position: Any) -> Any:
    """The token that follows this one: few different ones, so that pairs of them occur again and again."""
    return (token * 7 + position * position % 8191 // 3 + 5) % LETTERS + 10


def ruled(
    model: Apply, weights: Any, tokens: jax.Array, positions: jax.Array, caches: Any, attend: StepAttention
) -> Any:
    caches, logits = model(weights["model"], tokens, positions, caches, attend)
    following = attend.newest(rule(tokens, positions)[:, None])
    vocabulary = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
    return caches, jnp.where(vocabulary == following, jnp.asarray(3e4, logits.dtype), logits)


def draft(weights: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    seats = jnp.arange(len(lengths), dtype=jnp.uint32)
    token = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1, mode="clip")[:, 0]
    drafts = []
    for i in range(DRAFTS):
        token = rule(token, lengths - 1 + i)
        mixed = (lengths + i).astype(jnp.uint32) * jnp.uint32(2654435761) + seats * jnp.uint32(40503)
        is_wrong = ((mixed ^ (mixed >> 13)) * jnp.uint32(2246822519) >> 8) % 100 < weights["errors"]
        drafts.append(jnp.where(is_wrong, token + 1, token))
    return jnp.stack(drafts, axis=1)


def serve(engine: Engine, work: Sequence[Request], runs: int = 2) -> dict[str, Any]:
    """The last of some runs: tokens a second, steps and drafts."""
    params = [SamplingParams(max_tokens=new, temperature=0) for _, new in work]
    for _ in range(runs):
        before, kinds = engine.stats(), np.asarray(engine._runner.state.num_of_kind)
        begin = time.perf_counter()
        outputs = engine.generate([prompt for prompt, _ in work], params)
        seconds = time.perf_counter() - begin
    for (prompt, new), output in zip(work, outputs, strict=True):
        text = list(prompt)
        for position in range(len(prompt) - 1, len(prompt) - 1 + new):
            text.append(rule(text[-1], position))
        if output.outputs[0].token_ids != text[len(prompt) :]:
            raise AssertionError("tokens that the rule does not give")
    after = engine.stats()
    names = "num_steps", "num_drafted", "num_accepted"
    counts = {name: getattr(after, name) - getattr(before, name) for name in names}
    used = (np.asarray(engine._runner.state.num_of_kind) - kinds).tolist()
    return dict(
        tokens_per_s=sum(new for _, new in work) / seconds,
        **counts,
        kinds=dict(zip(map(name_kind, engine._runner.kinds), used, strict=True)),
    )


# A point of each engine: its name, the errors of 100 drafts, what is served and how often.
Reading = tuple[str, int, Sequence[Request], int]
Job = Callable[[], Engine]


def full_seats(config: LlamaConfig, weights: Any, seats: int, *, is_toy: bool) -> Iterator[tuple[Job, list[Reading]]]:
    new, widths = (24, (2 * seats,)) if is_toy else (NEW[seats], WIDTHS[seats])
    length = PROMPT + new
    prompts = np.random.default_rng(seats).integers(10, 10 + LETTERS, (seats, PROMPT)).tolist()
    work = [(prompt, new) for prompt in prompts]
    sizes = dict(max_num_seqs=seats, max_model_len=length, chunk_tokens=CHUNK_TOKENS[seats], steps_per_slice=32)
    make = functools.partial(create, config, weights, 1 + seats * -(-length // BLOCK_SIZE), **sizes)
    drafting = functools.partial(make, widths=widths, num_speculative_tokens=DRAFTS)
    yield functools.partial(make, widths=()), [(f"{seats} seats, none", 0, work, 2)]
    wrong = {"70% right": 30, "useless": 100}
    yield (
        functools.partial(drafting, draft=draft),
        [(f"{seats} seats, {name}", errors, work, 2) for name, errors in wrong.items()],
    )
    yield drafting, [(f"{seats} seats, own tokens", 0, work, 2)]


def requests(
    config: LlamaConfig, weights: Any, model: str, counts: Sequence[int]
) -> Iterator[tuple[Job, list[Reading]]]:
    sizes = SIZES[model]
    chosen = dict(max_num_seqs=sizes.seats or None, chunk_tokens=sizes.chunk or None, max_model_len=2 * sizes.longest)
    work = workload(max(counts), sizes.longest)
    make = functools.partial(create, config, weights, sizes.num_blocks, **chosen)
    ways: dict[str, dict[str, Any]] = {"none": {}, "70% right": dict(num_speculative_tokens=DRAFTS, draft=draft)}
    for name, arguments in ways.items():
        readings: list[Reading] = [(f"{count} requests, {name}", 30, work[:count], 1) for count in counts]
        yield functools.partial(make, **arguments), readings


def create(config: LlamaConfig, weights: Any, num_blocks: int, draft: Any = None, **options: Any) -> Engine:
    caches = create_caches(config, num_blocks)
    model = functools.partial(ruled, packed_model(config))
    return Engine(model, weights, caches, draft=draft, options=EngineOptions(**options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=tuple(CONFIGS))
    parser.add_argument("--layers", type=int, help="instead of the model's own: fewer compile sooner")
    parser.add_argument("--seats", type=int, nargs="*", choices=tuple(NEW), help="default: all, without --requests")
    parser.add_argument("--requests", type=int, nargs="+", default=[])
    add_output(parser)
    options = parser.parse_args()
    options.toy = options.model == "toy"
    config = CONFIGS[options.model]
    if options.layers:
        config = dataclasses.replace(config, num_layers=options.layers)
    store = open_store(f"engine_drafts_{options.model}", options)
    weights = {"model": random_weights(config), "errors": jnp.uint32(0)}
    engines = list(requests(config, weights, options.model, options.requests)) if options.requests else []
    for seats in options.seats or ([] if options.requests else list(NEW)):
        engines += full_seats(config, weights, seats, is_toy=options.toy)
    jobs = {i: job for i, (job, _) in enumerate(engines)}
    begin = time.perf_counter()
    compiled = compile_all(jobs)
    print(f"{len(jobs)} engines after {time.perf_counter() - begin:.0f} s", flush=True)
    for i, (_, readings) in enumerate(engines):
        for name, errors, work, runs in readings:
            compiled[i].update_weights(weights | {"errors": jnp.uint32(errors)})
            point = serve(compiled[i], work, runs)
            store.add(name, point)
            print(f"{name}: {point}", flush=True)


if __name__ == "__main__":
    main()
