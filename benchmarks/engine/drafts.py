"""What drafts of `jaxpaged.Engine` bring if most of them are right, and cost if none is.

    python -m benchmarks.engine.drafts                 # Llama-3-8B's shape
    python -m benchmarks.engine.drafts --model toy     # on a CPU, to try the script out

Random bfloat16 weights, greedy. A rule raises the logit of one token, so that a draft can be right or wrong on purpose,
and the tokens of each run can be checked. For each number of seats, all taken:

- none: an engine without drafts;
- 70% right: a function drafts DRAFTS tokens, each right in 7 of 10 cases;
- useless: it is always wrong;
- own tokens: what followed the newest tokens before is drafted, and seldom right.
"""

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.engine.model import CONFIGS, packed_model, random_weights
from benchmarks.engine.steps import name_kind
from benchmarks.engine.workload import BLOCK_SIZE, create_caches
from benchmarks.harness import add_output, open_store
from jaxpaged import Engine, SamplingParams, StepAttention
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


def serve(engine: Engine, prompts: Sequence[list[int]], new: int) -> dict[str, Any]:
    """The second of two runs: tokens a second, steps and drafts."""
    for _ in range(2):
        before, kinds = engine.stats(), np.asarray(engine._state.num_of_kind)
        begin = time.perf_counter()
        outputs = engine.generate(prompts, SamplingParams(max_tokens=new, temperature=0))
        seconds = time.perf_counter() - begin
    for prompt, output in zip(prompts, outputs, strict=True):
        text = list(prompt)
        for position in range(len(prompt) - 1, len(prompt) - 1 + new):
            text.append(rule(text[-1], position))
        if output.outputs[0].token_ids != text[len(prompt) :]:
            raise AssertionError("tokens that the rule does not give")
    after = engine.stats()
    names = "num_steps", "num_drafted", "num_accepted"
    counts = {name: getattr(after, name) - getattr(before, name) for name in names}
    used = (np.asarray(engine._state.num_of_kind) - kinds).tolist()
    return dict(
        tokens_per_s=len(prompts) * new / seconds,
        **counts,
        kinds=dict(zip(map(name_kind, engine._kinds), used, strict=True)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=tuple(CONFIGS))
    parser.add_argument("--seats", type=int, nargs="+", default=list(NEW), choices=tuple(NEW))
    add_output(parser)
    options = parser.parse_args()
    options.toy = options.model == "toy"
    config = CONFIGS[options.model]
    store = open_store(f"engine_drafts_{options.model}", options)
    weights = {"model": random_weights(config), "errors": jnp.uint32(0)}
    for seats in options.seats:
        new, widths = (24, (2 * seats,)) if options.toy else (NEW[seats], WIDTHS[seats])
        length = PROMPT + new
        rng = np.random.default_rng(seats)
        prompts = rng.integers(10, 10 + LETTERS, (seats, PROMPT)).tolist()
        create: Callable[..., Engine] = functools.partial(
            Engine, functools.partial(ruled, packed_model(config)), weights, num_seats=seats, max_length=length
        )
        ways: dict[str, dict[str, Any]] = {
            "none": dict(widths=()),
            "draft": dict(widths=widths, drafts=DRAFTS, draft=draft),
        }
        ways["own tokens"] = dict(widths=widths, drafts=DRAFTS)
        for way, arguments in ways.items():
            caches = create_caches(config, 1 + seats * -(-length // BLOCK_SIZE))
            engine = create(caches, chunk_tokens=CHUNK_TOKENS[seats], steps_per_slice=32, **arguments)
            for name, errors in {"70% right": 30, "useless": 100}.items() if way == "draft" else [(way, 0)]:
                engine.update_weights(weights | {"errors": jnp.uint32(errors)})
                point = serve(engine, prompts, new)
                store.add(f"{seats} seats, {name}", point)
                print(f"{seats} seats, {name}: {point}", flush=True)
            del engine  # and its caches, before there are others


if __name__ == "__main__":
    main()
