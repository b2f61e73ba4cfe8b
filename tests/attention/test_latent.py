"""Latent caches, whose values are the first numbers of their keys, and keys and values of different width."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpaged
from jaxpaged import BlockAllocator, CacheLayer, KVCache, paged_attention
from tests.attention.conformance import EIGHT_BITS, Conformance
from tests.cases import (
    OPTIONS,
    assert_within_budget,
    find_groups,
    jitted_attention,
    jitted_reference,
    make_case,
    within_budget,
)

LATENT = dict(kv_heads=1, head_dim=48, value_dim=32, is_latent=True)


class Latent(Conformance):
    case = staticmethod(functools.partial(make_case, **LATENT))
    long_case = staticmethod(functools.partial(make_case, lengths=(0, 1, 300, 77), max_blocks=20, **LATENT))
    options_of_partitions = ("all",)
    options_of_8_bits = head_dims = block_sizes = groups = ()
    dtypes = (jnp.bfloat16,)
    scaled_caches = tuple(
        (dtype, scale) for dtype, scale in zip(EIGHT_BITS, ("tensor", "head", "token_head"), strict=True)
    )
    faults = "table rolled", "scale left out", "eight tokens fewer"

    def attend(self, case, num_partitions=1):
        if not case.options:  # the fault: another scale, and the same latent
            case = case.replace(options=dict(value_dim=32, scale=48**-0.5))
        return jitted_attention(*case.arrays, **case.options, num_partitions=num_partitions, return_lse=True)


class TestXla(Latent):
    pass


class TestReference(Latent):
    options_of_partitions = ()
    dtypes = (jnp.float32,)

    def attend(self, case, num_partitions=1):
        if not case.options:
            case = case.replace(options=dict(value_dim=32, scale=48**-0.5))
        return jitted_reference(*case.arrays, **case.options, return_lse=True)


class TestWidths(Conformance):
    """Keys wider than values, and the other way round."""

    case = staticmethod(functools.partial(make_case, head_dim=48, value_dim=32))
    options = ("plain", "all")
    options_of_partitions = options_of_8_bits = head_dims = block_sizes = groups = scaled_caches = q_lens = ()
    dtypes = (jnp.bfloat16,)
    faults = ("table rolled",)

    def attend(self, case, num_partitions=1):
        return jitted_attention(*case.arrays, **case.options, return_lse=True)

    def test_values_wider_than_keys(self):
        self.check(make_case(head_dim=32, value_dim=80, options=OPTIONS["sinks"]))


def test_wrong_latent_values_are_noticed():
    case = make_case(lengths=(27, 60), **LATENT)
    rolled = case.replace(v_cache=jnp.roll(case.v_cache, 1, axis=-1))
    assert not within_budget(rolled, jitted_attention(*case.arrays, **case.options)).any()


def test_packed_tokens_and_a_shared_prefix():
    case = make_case(lengths=(50, 40), q_len=3, options={"scale": 0.2}, **LATENT)
    tables = case.block_tables.at[:, 0].set(case.block_tables[0, 0])
    case = case.replace(block_tables=tables)
    packed = case.q.reshape(-1, *case.q.shape[2:])
    starts = jnp.asarray([0, 3, 6], jnp.int32)
    out = paged_attention(packed, *case.arrays[1:], query_starts=starts, **case.options)
    assert_within_budget(case, out.reshape(2, 3, 6, 32))
    groups = find_groups(case)
    assert groups.num_blocks.tolist() == [1, 1]
    assert_within_budget(case, paged_attention(*case.arrays, prefix_groups=groups, **case.options))


def test_gradients_go_through_both_uses_of_the_latent():
    case = make_case(lengths=(20, 7), **LATENT)
    clean = jnp.nan_to_num(case.k_cache)

    def loss(attend, cache):
        return attend(case.q, cache, *case.arrays[2:], **case.options).sum()

    expected = jax.grad(functools.partial(loss, jaxpaged.paged_attention_reference))(clean)
    np.testing.assert_allclose(jax.grad(functools.partial(loss, paged_attention))(clean), expected, atol=1e-5)


@pytest.mark.parametrize("num_layers", [None, 2])
def test_a_cache_and_an_allocator(num_layers):
    sizes = dict(num_kv_heads=1, head_dim=48, value_dim=32, is_latent=True, dtype="float32")
    cache = KVCache.create(num_blocks=8, block_size=4, num_layers=num_layers, **sizes)
    if num_layers is not None:
        cache = CacheLayer(cache, 1)
    allocator = BlockAllocator.create(num_blocks=8, block_size=4, num_seqs=1, max_blocks_per_seq=4)
    allocator, slots, _ = allocator.append(jnp.asarray([6]), q_len=6)
    k = jax.random.normal(jax.random.key(0), (1, 6, 1, 48))
    q = jax.random.normal(jax.random.key(1), (1, 6, 3, 48))
    cache, out = jaxpaged.AttentionStep.create(allocator, slots).attend(q, k, None, cache, scale=0.3)
    expected = jax.nn.dot_product_attention(
        q, jnp.tile(k, (1, 1, 3, 1)), jnp.tile(k, (1, 1, 3, 1)), scale=0.3, is_causal=True
    )
    np.testing.assert_allclose(out, expected[..., :32], atol=1e-5)


def test_heads_on_two_devices_read_one_latent():
    mesh = jax.make_mesh((2,), ("heads",))
    case = make_case(lengths=(20, 37), **LATENT)
    q = jax.device_put(case.q, NamedSharding(mesh, P(None, "heads")))
    k_cache = jax.device_put(case.k_cache, NamedSharding(mesh, P()))
    out = paged_attention(
        q, k_cache, None, *(jax.device_put(x, NamedSharding(mesh, P())) for x in case.arrays[3:]), **case.options
    )
    assert tuple(jax.typeof(out).sharding.spec) == (None, "heads", None)
    assert_within_budget(case, np.asarray(out))


def test_blocks_spread_over_two_devices():
    mesh = jax.make_mesh((2,), ("blocks",))
    case = make_case(lengths=(20, 37), **LATENT)
    k_cache = jax.device_put(case.k_cache, NamedSharding(mesh, P(None, "blocks")))

    def attend(q, k, tables, lengths):
        options = dict(axis_name="blocks", **case.options)
        return jaxpaged.ops.context_parallel_attention(q, k, None, tables, lengths, **options)[0]

    specs = P(), P(None, "blocks"), P(), P()
    attend = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    assert_within_budget(case, np.asarray(attend(case.q, k_cache, *case.arrays[3:])))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(scale=None), "a latent cache needs scale"),
        (dict(value_dim=None), "v_cache=None and value_dim go together"),
        (dict(value_dim=49), "must be at most head_dim; got value_dim=49, head_dim=48"),
        (dict(v_scale=1.0), "leave v_scale out"),
    ],
)
def test_errors(changes, message):
    case = make_case(lengths=(3,), **LATENT)
    with pytest.raises(ValueError, match=message):
        paged_attention(*case.arrays, **case.options | changes)
