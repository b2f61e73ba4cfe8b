"""A one-layer float32 model with tiny dimensions for tests of the engine, and its twin without a cache."""

import contextlib
import dataclasses
import functools
import gc
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32
from jax.sharding import NamedSharding, PartitionSpec

from jaxpaged import Engine, EngineOptions, KVCache, SamplingParams, rotary_frequencies
from jaxpaged._engine import program
from jaxpaged._engine.host_tier import copies
from jaxpaged._engine.requests import completion_seed
from jaxpaged._slice import kinds
from jaxpaged._slice.sampling import DRAWS
from jaxpaged.ops import rotate_and_write_kv
from tests.compiled import instructions

VOCAB, FEATURES, HEADS, HEAD_DIM = 48, 32, 4, 8
BLOCK_SIZE, SEATS, MAX_TOKENS, MAX_REQUESTS, STEPS = 4, 6, 48, 16, 8
WIDTHS = (2, 3)  # compiled in addition to the two widths of every engine; the second has rows for chunks
BLOCKS = SEATS * MAX_TOKENS // BLOCK_SIZE  # enough for all seats
TIGHT = 2 * MAX_TOKENS // BLOCK_SIZE  # blocks: two requests at their limit
FREQUENCIES = rotary_frequencies(HEAD_DIM)


def random_weights(seed=0):
    shapes = {"embedding": (VOCAB, FEATURES), "qkv": (FEATURES, 3 * HEADS * HEAD_DIM), "head": (FEATURES, VOCAB)}
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {name: jax.random.normal(key, shape) * 0.5 for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def create_cache(num_blocks=BLOCKS + 1, **changes):
    sizes = dict(block_size=BLOCK_SIZE, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype="float32")
    return KVCache.create(num_blocks=num_blocks, **sizes | changes)


def project(weights, tokens):
    x = weights["embedding"][tokens]
    return x, *jnp.split((x @ weights["qkv"]).reshape(len(tokens), 3 * HEADS, HEAD_DIM), 3, axis=1)


def apply(weights, tokens, positions, cache, step):
    x, q, k, v = project(weights, tokens)
    cache, out = step.attend(q, k, v, cache, rotary_frequencies=FREQUENCIES)
    return cache, x + out.reshape(x.shape)


def head(weights, hidden):
    return hidden @ weights["head"]


def apply_to_heads(weights, tokens, positions, cache, step):
    """`apply` on one of several devices: qkv [features, 3, heads, head_dim] and the cache hold only its heads."""
    x = weights["embedding"][tokens]
    q, k, v = jnp.einsum("tf,fihd->ithd", x, weights["qkv"])
    cache, out = step.attend(q, k, v, cache, rotary_frequencies=FREQUENCIES)
    out = jax.lax.all_gather(out, "heads", axis=1, tiled=True)
    return cache, x + out.reshape(x.shape)


def weights_over_heads(mesh, seed=0):
    weights = random_weights(seed)
    qkv = weights["qkv"].reshape(FEATURES, 3, HEADS, HEAD_DIM)
    return weights | {"qkv": jax.device_put(qkv, NamedSharding(mesh, PartitionSpec(None, None, "heads")))}


def over_heads(num_devices, num_blocks):
    """Options of `create_engine` for an engine whose devices have some of the heads each, and their mesh."""
    mesh = jax.make_mesh((num_devices,), ("heads",), devices=jax.devices()[:num_devices])
    sharding = NamedSharding(mesh, PartitionSpec(None, None, "heads"))
    cache = jax.jit(functools.partial(create_cache, num_blocks), out_shardings=sharding)()
    return dict(model=apply_to_heads, weights=weights_over_heads(mesh), cache=cache), mesh


@jax.jit
def logits_after(weights, tokens, length):
    """The same for one sequence, with plain attention: logits [vocab] after its first `length` tokens."""
    x, q, k, v = project(weights, tokens)
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    scratch = create_cache(1, block_size=len(tokens))
    scratch, q = rotate_and_write_kv(scratch, q, k, v, positions, positions, FREQUENCIES)
    scores = jnp.einsum("qhd,khd->hqk", q, scratch.k[0]) / HEAD_DIM**0.5
    scores = jnp.where(positions[None, None] <= positions[None, :, None], scores, -jnp.inf)
    out = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1), v)
    return (x + out.reshape(x.shape))[length - 1] @ weights["head"]


@jax.jit
def noise_of(seed, position, draw):
    """Gumbel noise for the tokens of the only chunk, after the chunk's own."""
    index = jnp.arange(1, 1 + VOCAB, dtype=jnp.uint32)
    counter = jnp.concatenate([jnp.full_like(index, draw.astype(jnp.uint32)), index])
    words = threefry_2x32((seed, position.astype(jnp.uint32)), counter)[:VOCAB]
    uniform = (words >> 9).astype(jnp.float32) / 2**23
    return -jnp.log(-jnp.log(jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)))


def kept(weights, top_k, top_p, min_p):
    """The tokens that may be drawn, by sorting."""
    weights = np.where(weights >= min_p * weights.max(), weights, 0)
    order = np.argsort(-weights, kind="stable")
    ordered = weights[order]
    if 0 < top_k < len(ordered):
        ordered = np.where(ordered >= ordered[top_k - 1], ordered, 0)
    before = (np.cumsum(ordered) - ordered)[np.searchsorted(-ordered, -ordered)]  # equal logits have equal sums
    is_kept = np.zeros(len(order), bool)
    is_kept[order[(before < top_p * ordered.sum()) & (ordered > 0)]] = True
    return is_kept


def drawn(scores, params, position):
    """The first kept token of the draws without top_p, or a draw from the kept tokens if top_p cuts all."""
    weights = np.exp(scores - scores.max())
    is_before_top_p, is_kept = (kept(weights, params.top_k, top_p, params.min_p) for top_p in (1, params.top_p))
    draws = map(np.int32, range(DRAWS + 1))
    *noise, last = (noise_of(np.uint32(params.seed), np.int32(position), draw) for draw in draws)
    tokens = np.where(is_before_top_p, scores + np.stack(noise), -np.inf).argmax(axis=1)
    if is_kept[tokens].any():
        return tokens[is_kept[tokens].argmax()]
    return np.where(is_kept, scores + last, -np.inf).argmax()


def next_logits(weights, tokens):
    """The logits after one sequence's last token, in float64."""
    padded = np.zeros(MAX_TOKENS, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(logits_after(weights, padded, np.int32(len(tokens))), np.float64)


def log_softmax(logits):
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def continuation_of(logits_of, prompt, params, index=0, process=None):
    """One completion of a request: tokens and logprobs.

    `logits_of(tokens)` are the logits after the last token, `process(logits, prompt, new, params)` those to draw from.
    """
    tokens, logprobs = list(prompt), []
    params = dataclasses.replace(params, seed=completion_seed(params.seed, index)) if index else params
    while len(logprobs) < params.max_tokens and not (logprobs and tokens[-1] in params.stop_token_ids):
        logits = np.asarray(logits_of(tokens), np.float64)
        temperature = params.temperature
        changed = logits if process is None else process(logits, prompt, tokens[len(prompt) :], params)
        tokens.append(int(drawn(changed / temperature, params, len(tokens)) if temperature else changed.argmax()))
        logprobs.append(log_softmax(logits)[tokens[-1]])
    return tokens[len(prompt) :], logprobs


def continuation(weights, prompt, params, index=0, process=None):
    return continuation_of(functools.partial(next_logits, weights), prompt, params, index, process)


def greedy(max_tokens=8):
    return SamplingParams(max_tokens=max_tokens, temperature=0)


def expected_tokens(prompt, params, seed=0):
    return continuation(random_weights(seed), prompt, params)[0]


def tokens_of(outputs):
    """The tokens of each completion, in order."""
    return [completion.token_ids for output in outputs for completion in output.outputs]


def create_engine(
    *,
    model=apply,
    head=head,
    weights=None,
    cache=None,
    num_blocks=BLOCKS + 1,
    device=None,
    draft=None,
    process_logits=None,
    vocabulary=None,
    shares=False,
    parts=(1,),
    **options,
):
    """`shares`: with a prefix cache, shared blocks are always read once, like large ones on a GPU. This needs two more
    kinds of steps. `parts`: as `copies.PARTS`, with two programs for each."""
    sizes = dict(max_num_seqs=SEATS, max_model_len=MAX_TOKENS, max_requests=MAX_REQUESTS, steps_per_slice=STEPS)
    # Compilation costs more than the run, so LLVM does not optimise. `batch_invariant` has one kind of steps.
    sizes |= dict(num_stop_ids=2, chunk_tokens=16, compiler_options={"xla_backend_optimization_level": 0})
    if cache is None:
        weights, cache = jax.device_put((weights or random_weights(), create_cache(num_blocks)), device)
    least = mock.patch.object(program, "chosen_least_saved_reads", return_value=1 if shares else None)
    with least, mock.patch.object(kinds, "SHARING_TOKENS", 0), mock.patch.object(copies, "PARTS", parts):
        functions = dict(head=head, draft=draft, process_logits=process_logits, vocabulary=vocabulary)
        return Engine(model, weights, cache, **functions, options=EngineOptions(**sizes | options))


def not_compiled():
    """Engines created in this context cannot run a slice, but need a tenth of the time."""
    return mock.patch.object(jax.stages.Lowered, "compile")


@contextlib.contextmanager
def one_kind_of_steps():
    """Engines have only the widest kind of steps, which compiles faster."""

    def make_kinds(num_seats, chunk_tokens, widths=(), *, cost=None, **_):
        (kind,) = kinds.make_kinds(num_seats, chunk_tokens, batch_invariant=True, cost=cost)
        return (dataclasses.replace(kind, num_partitions=None),)

    with mock.patch.object(program, "make_kinds", make_kinds):
        yield


ENGINES: list[Engine] = []  # shared by tests; they have no requests after each test
CACHED: list[tuple] = []  # functions of `until_module_ends`, and what they returned


def until_module_ends(create):
    """A cache of engines up to the last test of a module, because each engine keeps thousands of memory maps."""

    @functools.cache
    def cached(*args, **options):
        created = create(*args, **options)
        CACHED.append((cached, created))
        return created

    return cached


def drop_cached():
    for cached, created in CACHED:
        cached.cache_clear()
        ENGINES[:] = [engine for engine in ENGINES if engine is not created]
    CACHED.clear()
    gc.collect()


@functools.cache
def create_once(**options):
    ENGINES.append(create_engine(**options))
    return ENGINES[-1]


def shared_engine(*, prefix_cache=False, batch_invariant=False):
    """An engine with `random_weights()` and no cached prefix."""
    # Without a prefix cache it has the narrowest kind of steps.
    options = dict(prefix_cache=prefix_cache, shares=prefix_cache, widths=WIDTHS[prefix_cache:])
    engine = create_once(**options, batch_invariant=batch_invariant)
    engine.update_weights(random_weights())
    return engine


def assert_invariants(engine, hidden=None):
    """Asserts all invariants. `hidden`: the blocks from `fewer_blocks`."""
    state = engine._runner.state
    allocator = state.allocator if hidden is None else with_blocks_back(state.allocator, hidden)
    scheduler, allocator = jax.tree.map(np.asarray, (state.scheduler, allocator))
    assert scheduler.broken_invariants(allocator) == allocator.broken_invariants() == ()


def assert_idle(engine):
    """Asserts that no request is left and all blocks are free."""
    assert_invariants(engine)
    stats = engine.stats()
    assert not engine._books.num_unsettled
    assert int(engine._runner.state.allocator.num_free) == stats.num_blocks


@contextlib.contextmanager
def counting(engine):
    """The increase of each count of `EngineStats` in this context."""
    before, counts = engine.stats(), SimpleNamespace()
    yield counts
    for name, value in vars(engine.stats()).items():
        if name.startswith("num_"):
            setattr(counts, name, value - getattr(before, name))


def operations_on(text, shape):
    """Operations of a compiled program whose result has this shape."""
    return [name for name, _, line in instructions(text) if shape in line.split(name + "(")[0]]


def finish(engine):
    """The last output of each request, once all are finished."""
    outputs = {}
    while engine.has_unfinished_requests:
        outputs |= {output.request_id: output for output in engine.step()}
    assert all(output.finished for output in outputs.values())
    return outputs


@functools.partial(jax.jit, static_argnums=1)
def without_blocks(allocator, count):
    """An allocator whose pool has lost `count` free blocks, and their ids."""
    ids = allocator.pool.peek(jnp.arange(count, dtype=jnp.int32)[None])
    return dataclasses.replace(allocator, pool=allocator.pool.take(jnp.int32(count))), ids


@jax.jit
def with_blocks_back(allocator, ids):
    return dataclasses.replace(allocator, pool=allocator.pool.let_go(ids, jnp.ones_like(ids, jnp.bool_)))


@contextlib.contextmanager
def fewer_blocks(engine, left):
    """In this context the engine's pool has `left` blocks, so the same program serves a tight pool."""
    if left == BLOCKS:
        yield None
        return
    allocator, hidden = without_blocks(engine._runner.state.allocator, BLOCKS - left)
    engine._runner.state_of_slice = dataclasses.replace(engine._runner.state, allocator=allocator)
    assert int(allocator.num_free) == left
    yield hidden
    allocator = with_blocks_back(engine._runner.state.allocator, hidden)
    engine._runner.state_of_slice = dataclasses.replace(engine._runner.state, allocator=allocator)


def requests(count, seed=0):
    """Prompts and parameters: greedy, sampled with every option, and a few with four completions."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 30)).tolist() for _ in range(count)]
    params = [
        SamplingParams(
            max_tokens=int(rng.integers(1, MAX_TOKENS - len(prompt) + 1)),
            temperature=(0.0, 0.7, 1.3)[i % 3],
            top_k=(0, 5)[i // 3 % 2],
            top_p=(1.0, 0.8)[i // 6 % 2],
            seed=int(rng.integers(0, 2**32)),
            stop_token_ids=((), (3, 17))[i % 2],
            n=4 if i % 10 == 7 else 1,
            logprobs=i % 5 == 0,
        )
        for i, prompt in enumerate(prompts)
    ]
    return prompts, params
