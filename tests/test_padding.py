"""Padding before a sequence's new tokens, after older ones, does not change the result of any call.

Padding rows, free blocks and unwritten slots hold NaN.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpaged
import jaxpaged.linen
import jaxpaged.nnx
from jaxpaged import AttentionSettings, AttentionStep, BlockAllocator, CacheLayer, KVCache, LatentSettings
from jaxpaged._attention.plan import make_plan
from jaxpaged._cache.kv_cache import map_blocks
from jaxpaged.ops import write_kv

BLOCKS = dict(num_blocks=24, block_size=4)
HEADS, KV_HEADS, HEAD_DIM, FEATURES = 4, 2, 8, 64
ROOT, Q_LEN = 4, 5  # common first tokens of two sequences; rows per sequence in a padded call
HISTORY = (2, 3, 5, 0)  # tokens after the root
IS_WRITTEN = (True, True, False, True)  # whether a sequence gets new tokens
FREQUENCIES = jaxpaged.rotary_frequencies(HEAD_DIM)
PARENTS = (-1, 0, 0)  # parents in a tree of new tokens

# (x, cache, allocator, slots, *, count, query_starts) -> (cache, out). The last `count` rows of a sequence are tokens.
Call = Callable[..., tuple[KVCache, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Case:
    call: Call
    cache: dict[str, Any] = dataclasses.field(default_factory=dict)
    count: int = 3
    window: int | None = None  # window of the group of layers
    can_be_packed: bool = True


def make_step(allocator, slots, *, count, query_starts=None, plan=False, tree=False, groups=False) -> AttentionStep:
    mask = None
    if tree:
        padding = slots.shape[1] - count
        parents = jnp.asarray([*range(-1, padding - 1), *(padding + parent for parent in PARENTS)])
        mask = jnp.tile(jaxpaged.tree_mask(parents), (slots.shape[0], 1, 1))
    found = allocator.prefix_groups(slots.shape[-1], query_starts=query_starts) if groups else None
    step = AttentionStep.create(allocator, slots, query_starts=query_starts, tree_mask=mask, prefix_groups=found)
    if not plan:
        return step
    return dataclasses.replace(step, plan=make_plan(allocator.lengths, num_kv_heads=KV_HEADS, q_len=slots.shape[1]))


def split(x):
    return (part.reshape(*part.shape[:-1], -1, HEAD_DIM) for part in jnp.split(x, [32, 48], axis=-1))


def attend(*, plan=False, tree=False, groups=False, **options) -> Call:
    """`AttentionStep.attend`, on q, k and v in x."""

    def call(x, cache, allocator, slots, **tokens):
        step = make_step(allocator, slots, **tokens, plan=plan, tree=tree, groups=groups)
        return step.attend(*split(x), cache, **options)

    return call


def rotated(**rotary) -> Call:
    """Written by `rotate_and_write_kv`, before a step that only reads."""

    def call(x, cache, allocator, slots, **tokens):
        step = make_step(allocator, slots, **tokens)
        cache, q = jaxpaged.ops.rotate_and_write_kv(cache, *split(x), slots, step.positions, **rotary)
        return step.attend(q, None, None, cache)

    return call


def call_on_pool(attention: Callable[..., Any], *, groups=False) -> Call:
    """A function of tables and lengths."""

    def call(x, cache, allocator, slots, *, count, query_starts=None):
        q, k, v = split(x)
        cache = write_kv(cache, k, v, slots)
        options = dict(query_starts=query_starts) if query_starts is not None else {}
        if groups:
            options["prefix_groups"] = allocator.prefix_groups(slots.shape[-1], **options)
        return cache, attention(q, cache.k, cache.v, allocator.block_tables, allocator.lengths, **options)

    return call


def on_two_devices(*arrays, count):
    def attention(*args):
        return jaxpaged.ops.context_parallel_attention(*args, axis_name="x")[0]

    def device(x, cache, allocator, slots):
        own_slots = jaxpaged.ops.context_parallel_slots(slots, block_size=2, axis_name="x")
        return call_on_pool(attention)(x, cache, allocator, own_slots, count=count)

    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    specs = dict(in_specs=(P(), P(None, "x"), P(), P()), out_specs=(P(None, "x"), P()))
    return jax.shard_map(device, mesh=mesh, **specs, check_vma=False)(*arrays)


def in_a_stack(call: Call) -> Call:
    def in_layer(x, cache, *args, **options):
        stack = jax.tree.map(lambda array: jnp.stack([array, array]), cache)
        layer, out = call(x, CacheLayer(stack, 1), *args, **options)
        return jax.tree.map(lambda array: array[1], layer.stack), out

    return in_layer


def module(settings: AttentionSettings | LatentSettings, package: Any = jaxpaged.nnx, **kinds) -> Call:
    name = "LatentAttention" if isinstance(settings, LatentSettings) else "PagedAttention"

    def call(x, cache, allocator, slots, **tokens):
        layer = getattr(jaxpaged.nnx, name)(FEATURES, settings, rngs=nnx.Rngs(0))
        if package is jaxpaged.linen:
            variables = {"params": nnx.to_pure_dict(nnx.state(layer, nnx.Param))}
            layer = functools.partial(getattr(package, name)(settings).apply, variables)
        return layer(x, cache, make_step(allocator, slots, **tokens, **kinds))

    return call


def paged(**changes) -> AttentionSettings:
    sizes = dict(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, rotary_frequencies=FREQUENCIES)
    return AttentionSettings(**sizes | changes)


def latent(**changes) -> LatentSettings:
    sizes = dict(num_heads=3, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, q_lora_rank=None)
    return LatentSettings(**sizes, rotary_frequencies=(1.0, 0.3), **dict(expanded_from=1) | changes)


INT8, FLOAT8 = dict(dtype="int8"), dict(dtype="float8_e4m3fn")
SCALES = dict(scale_per="head", k_scale=jnp.full(2, 0.03), v_scale=jnp.full(2, 0.03))
LATENT = dict(num_kv_heads=1, head_dim=20, value_dim=16, is_latent=True)
PER_HEAD = jnp.asarray([0.1, 0.2, 0.4, 0.8])
INTERLEAVED = dict(frequencies=FREQUENCIES, interleaved=True)
MODEL = dict(rotary_frequencies=None, rotary=lambda x, at: x + at[..., None, None].astype(x.dtype))
CASES = {
    "attend": Case(attend()),
    "options": Case(attend(logits_soft_cap=2.0, sinks=PER_HEAD, alibi_slopes=PER_HEAD, num_partitions=2)),
    "window": Case(attend(sliding_window=3)),
    "group with a window": Case(attend(sliding_window=3), window=3),
    "prefix groups": Case(attend(groups=True)),
    "plan": Case(attend(plan=True), can_be_packed=False),
    "tree": Case(attend(tree=True), can_be_packed=False),
    "layer, int8": Case(in_a_stack(attend()), INT8),
    "int8, scales of heads": Case(attend(), INT8 | SCALES),
    "float8": Case(attend(), FLOAT8),
    "rotation": Case(attend(rotary_frequencies=FREQUENCIES)),
    "rotation of neighbours, int8": Case(attend(rotary_frequencies=FREQUENCIES, interleaved=True), INT8),
    "paged_attention": Case(call_on_pool(jaxpaged.paged_attention)),
    "paged_attention, prefix groups": Case(call_on_pool(jaxpaged.paged_attention, groups=True)),
    "paged_attention_reference": Case(call_on_pool(jaxpaged.paged_attention_reference)),
    "context_parallel_attention": Case(on_two_devices, can_be_packed=False),
    "rotate_and_write_kv": Case(rotated(frequencies=FREQUENCIES)),
    "rotate_and_write_kv, interleaved, int8": Case(rotated(**INTERLEAVED), INT8),
    "nnx.PagedAttention": Case(module(paged())),
    "nnx.PagedAttention, model's rotation, int8": Case(module(paged(**MODEL, norm_epsilon=1e-6)), INT8),
    "nnx.PagedAttention, group with a window": Case(module(paged(sliding_window=3)), window=3),
    "linen.PagedAttention": Case(module(paged(), jaxpaged.linen)),
    "nnx.LatentAttention, absorbed": Case(module(latent(expanded_from=99)), LATENT),
    "nnx.LatentAttention, expanded": Case(module(latent()), LATENT),
    "nnx.LatentAttention, one token": Case(module(latent()), LATENT, count=1),
    "nnx.LatentAttention, layer, rotary numbers in two": Case(
        in_a_stack(module(latent())), LATENT | INT8 | dict(head_dim=24)
    ),
    "nnx.LatentAttention, prefix groups": Case(module(latent(), groups=True), LATENT),
    "nnx.LatentAttention, group with a window": Case(module(latent(sliding_window=3)), LATENT, window=3),
}


@functools.cache
def append_all(window: int | None, count: int) -> tuple[BlockAllocator, jax.Array, BlockAllocator, jax.Array]:
    """The allocator and the slots of all tokens, first after the history, then after the new tokens."""
    windows = (None,) if window is None else (None, window)
    allocator = BlockAllocator.create(**BLOCKS, num_seqs=4, max_blocks_per_seq=4, windows=windows)
    allocator, _, _ = allocator.append(jnp.asarray([ROOT, 0, 0, 0]), q_len=ROOT)
    allocator, _, _ = allocator.fork(jnp.asarray([-1, 0, -1, -1]))
    before, _, _ = allocator.append(jnp.asarray(HISTORY), q_len=Q_LEN)
    positions = before.positions(ROOT + Q_LEN)
    old_slots = before.slots(jnp.broadcast_to(jnp.arange(4)[:, None], positions.shape), positions)
    after, slots, ok = before.append(count * jnp.asarray(IS_WRITTEN, jnp.int32), q_len=Q_LEN)
    assert ok.all()
    return before, old_slots.reshape(-1, *old_slots.shape[-2:])[-1], after, slots.reshape(-1, *slots.shape[-2:])[-1]


def poisoned(cache: KVCache, group: BlockAllocator) -> KVCache:
    """NaN in all blocks of this group of layers that no sequence holds, except for the null block."""
    ids = jnp.where(group.is_entry(group.lengths), group.block_tables, 0)
    held = jnp.zeros(group.num_blocks, bool).at[ids].set(True)

    def poison(array):
        nan = jnp.asarray(jnp.nan if jnp.issubdtype(array.dtype, jnp.floating) else 99, array.dtype)
        return jnp.where(held.reshape(-1, *[1] * (array.ndim - 1)), array, nan)

    return map_blocks(poison, cache)


def right_aligned(rows: list[jax.Array], q_len: int) -> jax.Array:
    return jnp.stack([jnp.pad(row, ((q_len - len(row), 0), (0, 0)), constant_values=jnp.nan) for row in rows])


@functools.partial(jax.jit, static_argnums=0)
def results(name: str, x: jax.Array, before: BlockAllocator, old_slots: jax.Array, after: BlockAllocator, slots: Any):
    """The outputs of the new tokens and the cache: without padding, padded, and packed."""
    case, which = CASES[name], np.flatnonzero(IS_WRITTEN)
    call, count, last = functools.partial(case.call, count=case.count), case.count, after.num_groups - 1
    old, counts = np.add([ROOT, ROOT, 0, 0], HISTORY), count * np.asarray(IS_WRITTEN)
    x = x.at[:, :ROOT].set(x[:1, :ROOT])

    sizes = dict(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="float32") | case.cache
    before, after = before.group(last), after.group(last)
    rows = right_aligned([row[:n] for row, n in zip(x, old, strict=True)], ROOT + Q_LEN)
    cache, _ = call(rows, poisoned(KVCache.create(**BLOCKS, **sizes), before), before, old_slots)
    cache = poisoned(cache, after)

    rows = right_aligned([row[n : n + new] for row, n, new in zip(x, old, counts, strict=True)], Q_LEN)
    padded, out = call(rows, cache, after, slots)

    tokens, their_slots = rows[which, -count:], slots[which, -count:]
    alone, expected = call(tokens, cache, after.of_seqs(jnp.asarray(which, jnp.int32)), their_slots)
    found = [(expected, alone), (out[which, -count:], padded)]

    if case.can_be_packed:
        tokens = jnp.pad(tokens.reshape(-1, FEATURES), ((1, 2), (0, 0)), constant_values=jnp.nan)
        their_slots = jnp.pad(their_slots.ravel(), (1, 2), constant_values=-1)
        query_starts = jnp.asarray(np.cumsum([1, *counts]), jnp.int32)
        packed, out = call(tokens, cache, after, their_slots, query_starts=query_starts)
        found.append((out[1:-2].reshape(expected.shape), packed))
    return found


@pytest.mark.parametrize("name", CASES)
def test_padding_with_a_history_changes_nothing(name):
    case = CASES[name]
    x = jax.random.normal(jax.random.key(1), (4, ROOT + max(HISTORY) + 3, FEATURES))
    (expected, alone), *others = results(name, x, *append_all(case.window, case.count))
    assert np.isfinite(expected).all()
    for out, cache in others:
        np.testing.assert_allclose(out, expected, atol=5e-5)
        for array, wanted in zip(jax.tree.leaves(cache), jax.tree.leaves(alone), strict=True):
            atol = 1 if array.dtype == jnp.int8 else 1e-5
            np.testing.assert_allclose(array.astype(jnp.float32), wanted.astype(jnp.float32), atol=atol)
