"""The NNX and the Linen module: equal to each other, and to dense attention."""

import dataclasses
import functools

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpaged
import jaxpaged.linen
import jaxpaged.nnx
from jaxpaged import AttentionSettings, AttentionStep, BlockAllocator, CacheLayer, KVCache, paged_attention
from jaxpaged._attention import attend
from jaxpaged._attention.plan import make_plan
from jaxpaged.ops import write_kv

FEATURES, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 48, 6, 2, 16, 4
SIZES = dict(
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    rotary_frequencies=jaxpaged.rotary_frequencies(HEAD_DIM, 500.0),
)


def shrunk(x, positions):
    """Stands for a model's own rotation."""
    return x / (1 + positions[..., None, None].astype(x.dtype))


OPTIONS = [
    {},
    dict(use_bias=True, use_output_bias=True),
    dict(sliding_window=5, logits_soft_cap=2.0, scale=0.4),
    dict(rotary_frequencies=None, num_partitions=2),
    dict(interleaved=True, norm_epsilon=1e-3, fused=False, use_bias=True, use_gate=True),
    dict(rotary_frequencies=None, rotary=shrunk, use_sinks=True),
    dict(rotary_frequencies=None, alibi_slopes=tuple(2.0**-i for i in range(HEADS))),
]
LENGTHS = (11, 1, 7)


def make(options):
    """Both modules with the same weights."""
    settings = AttentionSettings(**SIZES | options)
    ours = nnx.eval_shape(lambda: jaxpaged.nnx.PagedAttention(FEATURES, settings, rngs=nnx.Rngs(1)))
    state, rng = nnx.state(ours), np.random.default_rng(1)
    for path, parameter in nnx.to_flat_state(state):
        scale, middle = (FEATURES**-0.5, 0) if path[-1] == "kernel" else (1, 1)
        parameter.set_value(jnp.asarray(middle + scale * rng.normal(size=parameter.shape), jnp.float32))
    nnx.update(ours, state)
    linen = jaxpaged.linen.PagedAttention(settings)
    return ours, functools.partial(linen.apply, {"params": nnx.to_pure_dict(state)})


def fresh():
    cache = KVCache.create(
        num_blocks=16, block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="float32"
    )
    return cache, BlockAllocator.create(
        num_blocks=16, block_size=BLOCK_SIZE, num_seqs=len(LENGTHS), max_blocks_per_seq=4
    )


def tokens():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(length, FEATURES)).astype(np.float32) for length in LENGTHS]


def prompt_batch(sequences, q_len):
    return jnp.asarray(np.stack([np.pad(x, ((q_len - len(x), 0), (0, 0))) for x in sequences]))


def dense(module, x, options):
    """The same attention over one whole sequence [tokens, features], in NumPy, with nothing paged."""
    length, options, x = len(x), SIZES | options, np.asarray(x)

    def project(name, x):
        linear = getattr(module, name)
        return x @ np.asarray(linear.kernel) + (0 if linear.bias is None else np.asarray(linear.bias))

    names = ["qkv_proj"] if options.get("fused", True) else ["q_proj", "k_proj", "v_proj"]
    qkv = np.concatenate([project(name, x) for name in names], axis=-1).reshape(length, -1, HEAD_DIM)
    q, k, v = np.split(qkv, [HEADS, HEADS + KV_HEADS], axis=1)
    if "norm_epsilon" in options:

        def normalised(x, norm):
            return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + options["norm_epsilon"]) * np.asarray(norm.scale)

        q, k = normalised(q, module.q_norm), normalised(k, module.k_norm)
    if "rotary" in options:
        q, k = (options["rotary"](x, np.arange(length)) for x in (q, k))
    elif options["rotary_frequencies"] is not None:
        angles = np.outer(np.arange(length), options["rotary_frequencies"])
        turn = np.exp(1j * angles)[:, None]  # a rotation is a product of complex numbers
        first, second = np.arange(HEAD_DIM // 2), np.arange(HEAD_DIM // 2, HEAD_DIM)
        if options.get("interleaved"):
            first, second = 2 * first, 2 * first + 1

        def rotate(x):
            turned, pairs = np.empty_like(x), (x[..., first] + 1j * x[..., second]) * turn
            turned[..., first], turned[..., second] = pairs.real, pairs.imag
            return turned

        q, k = rotate(q), rotate(k)
    k, v = (np.repeat(x, HEADS // KV_HEADS, axis=1) for x in (k, v))
    logits = np.einsum("shd,thd->hst", q, k) * options.get("scale", HEAD_DIM**-0.5)
    if "logits_soft_cap" in options:
        logits = options["logits_soft_cap"] * np.tanh(logits / options["logits_soft_cap"])
    distance = np.arange(length)[:, None] - np.arange(length)[None]
    if "alibi_slopes" in options:
        logits -= np.asarray(options["alibi_slopes"])[:, None, None] * distance
    seen = (distance >= 0) & (distance < options.get("sliding_window", length))
    weights = np.exp(np.where(seen, logits, -np.inf))
    sinks = np.exp(np.asarray(module.sinks))[:, None, None] if options.get("use_sinks") else 0
    out = np.einsum("hst,thd->shd", weights / (weights.sum(axis=-1, keepdims=True) + sinks), v).reshape(length, -1)
    if options.get("use_gate"):
        out = out / (1 + np.exp(-project("gate_proj", x)))
    return project("o_proj", out)


@pytest.mark.parametrize("options", OPTIONS, ids=", ".join)
def test_prefill_and_decode_are_dense_attention_in_both(options):
    module, apply = make(options)
    sequences = tokens()
    expected = [dense(module, x, options) for x in sequences]
    for call in (module, apply):
        cache, allocator = fresh()
        # All but the last token at once, ragged; then the last by itself.
        q_len = max(LENGTHS) - 1
        allocator, slots, ok = allocator.append(jnp.asarray([n - 1 for n in LENGTHS], jnp.int32), q_len=q_len)
        assert ok.all()
        step = AttentionStep.create(allocator, slots)
        cache, out = call(prompt_batch([x[:-1] for x in sequences], q_len), cache, step)
        for row, length, wanted in zip(np.asarray(out), LENGTHS, expected, strict=True):
            np.testing.assert_allclose(row[q_len - length + 1 :], wanted[:-1], atol=2e-5)
        allocator, slots, ok = allocator.append(jnp.ones(len(LENGTHS), jnp.int32))
        # As one row of each sequence, and as one token.
        last = prompt_batch([x[-1:] for x in sequences], 1)
        _, out = call(last, cache, AttentionStep.create(allocator, slots[:, None]))
        _, single = call(last[:, 0], cache, AttentionStep.create(allocator, slots))
        for row, token, wanted in zip(np.asarray(out), np.asarray(single), expected, strict=True):
            np.testing.assert_allclose(row[0], wanted[-1], atol=2e-5)
            np.testing.assert_allclose(token, wanted[-1], atol=2e-5)


@pytest.mark.parametrize("options", [OPTIONS[2], OPTIONS[3]], ids=", ".join)
def test_packed_tokens_give_what_padded_rows_give(options):
    """Behind a history, one token of the second sequence, and padding on both ends."""
    module, apply = make(options)
    old, new = np.asarray([2, 0, 5], np.int32), np.asarray([9, 1, 2], np.int32)
    cache, allocator = fresh()
    allocator, slots, _ = allocator.append(old, q_len=5)
    x = prompt_batch([x[:n] for x, n in zip(tokens(), old, strict=True)], 5)
    cache, _ = module(x, cache, AttentionStep.create(allocator, slots))
    after, slots, _ = allocator.append(new, q_len=9)
    newest = [x[n:] for x, n in zip(tokens(), old, strict=True)]
    expected_cache, expected = module(prompt_batch(newest, 9), cache, AttentionStep.create(after, slots))
    expected = np.concatenate([row[9 - len(x) :] for row, x in zip(np.asarray(expected), newest, strict=True)])

    query_starts = jnp.asarray([1, 10, 11, 13], jnp.int32)
    owners = jnp.asarray([-1, *[0] * 9, 1, 2, 2, -1], jnp.int32)
    positions = jnp.asarray([0, *range(2, 11), 0, 5, 6, 0], jnp.int32)
    x = jnp.asarray(np.pad(np.concatenate(newest), ((1, 1), (0, 0))))
    slots = after.slots(owners, positions)
    step = AttentionStep.create(after, slots, query_starts=query_starts)
    for call in (module, apply):
        packed_cache, out = call(x, cache, step)
        assert out.shape == x.shape
        np.testing.assert_allclose(np.asarray(out)[1:-1], expected, atol=2e-5)
        for array, wanted in zip(jax.tree.leaves(packed_cache), jax.tree.leaves(expected_cache), strict=True):
            np.testing.assert_allclose(array, wanted, atol=1e-6)
    # A twin with a mistake in it: the last token of the first sequence given to the second.
    wrong_starts = jnp.asarray([1, 9, 11, 13], jnp.int32)
    _, wrong = module(x, cache, AttentionStep.create(after, slots, query_starts=wrong_starts))
    assert not np.allclose(np.asarray(wrong)[1:-1], expected, atol=2e-5)


def test_a_tree_gives_what_its_branches_give():
    """Behind 2 tokens a root and its two children."""
    module, apply = make(OPTIONS[2])
    cache, allocator = fresh()
    x = tokens()[0]
    history, new = jnp.asarray([2, 0, 0], jnp.int32), jnp.asarray([3, 0, 0], jnp.int32)
    allocator, slots, _ = allocator.append(history, q_len=3)
    cache, _ = module(prompt_batch([x[:2]] * 3, 3), cache, AttentionStep.create(allocator, slots))
    after, slots, _ = allocator.append(new, q_len=3)
    positions = jnp.asarray([[2, 3, 3]] * 3, jnp.int32)
    mask = jnp.tile(jaxpaged.tree_mask(jnp.asarray([-1, 0, 0]))[None], (3, 1, 1))
    chain = AttentionStep.create(after, slots)
    first, second = (
        np.asarray(module(prompt_batch([x[order]] * 3, 3), cache, chain)[1]) for order in ([2, 3, 4], [2, 4, 3])
    )
    tree = AttentionStep.create(after, slots, positions=positions, tree_mask=mask)
    for call in (module, apply):
        _, out = call(prompt_batch([x[2:5]] * 3, 3), cache, tree)
        out = np.asarray(out)
        np.testing.assert_allclose(out[0, :2], first[0, :2], atol=2e-5)
        np.testing.assert_allclose(out[0, 2], second[0, 1], atol=2e-5)
        assert not np.allclose(out[0, 2], first[0, 2], atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_layer_of_a_stack_serves_as_a_cache(dtype):
    module, apply = make({})
    cache, allocator = fresh()
    cache = KVCache.create(num_blocks=16, block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype)
    stack = KVCache.create(
        num_blocks=16, block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype, num_layers=3
    )
    allocator, slots, _ = allocator.append(jnp.asarray(LENGTHS, jnp.int32), q_len=11)
    x, step = prompt_batch(tokens(), 11), AttentionStep.create(allocator, slots)
    alone, expected = module(x, cache, step)
    for call in (module, apply):
        layer, out = call(x, CacheLayer(stack, 1), step)
        assert np.array_equal(out, expected)
        for array, wanted in zip(jax.tree.leaves(layer.stack), jax.tree.leaves(alone), strict=True):
            assert np.array_equal(array[1], wanted)
            assert not np.asarray(array)[[0, 2]].any()


def test_attend_passes_tables_scales_and_options():
    cache, allocator = (
        KVCache.create(num_blocks=16, block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="int8"),
        fresh()[1],
    )
    allocator, slots, _ = allocator.append(jnp.asarray(LENGTHS, jnp.int32), q_len=11)
    step = AttentionStep.create(allocator, slots)
    q, k, v = (jax.random.normal(jax.random.key(i), (3, 11, KV_HEADS, HEAD_DIM)) for i in range(3))
    written = write_kv(cache, k, v, slots)
    scales = dict(k_scale=written.k_scale, v_scale=written.v_scale)
    arrays = (q, written.k, written.v, allocator.block_tables, allocator.lengths)
    slopes = jnp.asarray([0.1, 0.7])
    options = dict(sliding_window=3, scale=0.3, logits_soft_cap=2.0, alibi_slopes=slopes, sinks=slopes)
    expected = paged_attention(*arrays, **scales, **options, num_partitions=2, implementation="xla")
    after, out = step.attend(q, k, v, cache, **options, num_partitions=2, implementation="xla")
    assert (out == expected).all()
    for ours, theirs in zip(jax.tree.leaves(after), jax.tree.leaves(written), strict=True):
        assert (ours == theirs).all()
    for name in options:
        others = {other: value for other, value in options.items() if other != name}
        assert not np.allclose(step.attend(q, k, v, cache, **others)[1], expected, atol=1e-3), name
    with pytest.raises(ValueError, match="got num_partitions=0"):
        step.attend(q, k, v, cache, num_partitions=0)
    with pytest.raises(ValueError, match="got implementation='cuda'"):
        step.attend(q, k, v, cache, implementation="cuda")


def test_the_same_weights_give_the_same_bits_in_both():
    module, apply = make({})
    cache, allocator = fresh()
    allocator, slots, _ = allocator.append(jnp.asarray(LENGTHS, jnp.int32), q_len=11)
    x, step = prompt_batch(tokens(), 11), AttentionStep.create(allocator, slots)
    for left, right in zip(
        jax.tree.leaves(module(x, cache, step)), jax.tree.leaves(apply(x, cache, step)), strict=True
    ):
        assert (left == right).all()


def test_nothing_is_hidden_in_the_modules():
    module, _ = make({})
    _, state = nnx.split(module)
    assert {path[-1] for path, _ in nnx.to_flat_state(state)} == {"kernel"}
    linen = jaxpaged.linen.PagedAttention(AttentionSettings(**SIZES))
    cache, allocator = fresh()
    allocator, slots, _ = allocator.append(jnp.asarray(LENGTHS, jnp.int32), q_len=11)
    step = AttentionStep.create(allocator, slots)
    variables = linen.init(jax.random.key(0), prompt_batch(tokens(), 11), cache, step)
    assert set(variables) == {"params"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_heads=5), r"num_heads must be a multiple of num_kv_heads; got num_heads=5, num_kv_heads=2"),
        (dict(head_dim=8), r"rotary_frequencies must hold up to head_dim // 2 numbers; got 8 for head_dim=8"),
        (dict(rotary=lambda x, positions: x), r"pass rotary_frequencies=None with it"),
        (
            dict(rotary_frequencies=None, interleaved=True),
            r"without rotary_frequencies; got rotary_frequencies=None. Pass",
        ),
        (dict(heads_axis="devices"), r"heads_axis needs q, k and v apart.* Pass fused=False with it"),
    ],
)
def test_size_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        AttentionSettings(**SIZES | changes)


def test_call_errors():
    module, apply = make({})
    cache, allocator = fresh()
    slots = jnp.zeros((3, 1), jnp.int32)
    step = AttentionStep.create(allocator, slots)
    packed = AttentionStep.create(allocator, jnp.zeros(5, jnp.int32), query_starts=jnp.arange(4))
    other = KVCache.create(num_blocks=4, block_size=4, num_kv_heads=1, head_dim=HEAD_DIM, dtype="float32")
    x = jnp.zeros((3, 1, FEATURES))
    for call in (module, apply):
        with pytest.raises(
            ValueError, match=r"x must be \[3, 1, 'features'\], the tokens of the step; got .*\(3, 48\)"
        ):
            call(x[:, 0], cache, step)
        with pytest.raises(ValueError, match=r"x must be \[5, 'features'\], the tokens .*; got x.shape=\(3, 1, 48\)"):
            call(x, cache, packed)
        with pytest.raises(ValueError, match=r"a module takes \(x, cache, step\), .*; got BlockAllocator"):
            call(x, cache, allocator)
        with pytest.raises(ValueError, match=r"a cache must be a KVCache, .*; got a tuple"):
            call(x, CacheLayer((cache, cache), 0), step)
        with pytest.raises(ValueError, match=r"must be \[blocks, block_size, 2, 16\].*got k.shape=\(4, 4, 1, 16\)"):
            call(x, other, step)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(32, 8), (8, BLOCK_SIZE)])
@pytest.mark.parametrize("num_layers", [None, 2])
def test_attend_refuses_a_cache_with_other_blocks_than_the_allocator(num_layers, num_blocks, block_size):
    sizes = dict(num_blocks=num_blocks, block_size=block_size, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    cache, (_, allocator) = KVCache.create(**sizes, num_layers=num_layers), fresh()
    message = rf"got a cache with {num_blocks=}, {block_size=}, and allocator.num_blocks=16, allocator.block_size=4"
    step = AttentionStep.create(allocator, jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match=message):
        step.attend(jnp.zeros((3, HEADS, HEAD_DIM)), None, None, CacheLayer(cache, 0) if num_layers else cache)


def test_the_number_of_partitions_reaches_the_attention():
    module, apply = make(dict(num_partitions=0))
    cache, allocator = fresh()
    allocator, slots, _ = allocator.append(jnp.ones(len(LENGTHS), jnp.int32), q_len=1)
    for call in (module, apply):
        with pytest.raises(ValueError, match=r"num_partitions must be .*; got num_partitions=0"):
            call(jnp.zeros((len(LENGTHS), 1, FEATURES)), cache, AttentionStep.create(allocator, slots))


def test_a_plan_reaches_the_attention(monkeypatch):
    """Unless the module has a window or a number of partitions: the plan of a step is for neither."""
    plans, original = [], attend.planned_attention
    monkeypatch.setattr(
        attend,
        "planned_attention",
        lambda *args, plan, **how: (plans.append(plan), original(*args, plan=plan, **how))[1],
    )
    cache, allocator = fresh()
    allocator, slots, _ = allocator.append(jnp.ones(len(LENGTHS), jnp.int32), q_len=1)
    step = AttentionStep.create(allocator, slots)
    step = dataclasses.replace(step, plan=make_plan(allocator.lengths, num_kv_heads=KV_HEADS))
    for options, follows in (({}, True), (dict(sliding_window=3), False), (dict(num_partitions=2), False)):
        for call in make(options):
            call(jnp.zeros((len(LENGTHS), 1, FEATURES)), cache, step)
            assert (plans.pop() is step.plan) == follows


def test_rotary_frequencies_of_an_odd_head_dim():
    with pytest.raises(ValueError, match=r"an even number of dimensions, up to head_dim; got head_dim=5 and"):
        jaxpaged.rotary_frequencies(5)


class Twins(nnx.Module):
    def __init__(self):
        self.one, self.others = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0))])

    def __call__(self, x):
        return self.one(x), self.others[0](x)


def test_replaced_modules_keep_their_weights():
    model, x = Twins(), jnp.ones(2)
    expected = model(x)
    graph, weights = nnx.split(model)
    replaced = jaxpaged.nnx.replace(nnx.merge(graph, weights), nnx.Linear, lambda linear, x: linear(x) + 1)
    for ours, theirs, own in zip(replaced(x), expected, model(x), strict=True):
        assert (ours == theirs + 1).all()
        assert (own == theirs).all()
    for other, module_type in ((model, nnx.Conv), (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear)):
        with pytest.raises(ValueError, match=f"got none of {module_type.__name__} in attributes, nnx.List"):
            jaxpaged.nnx.replace(other, module_type, lambda module, x: x)


def test_a_linen_type_that_the_model_does_not_call_is_an_error():
    dense, variables = flax.linen.Dense(2), {"params": dict(kernel=jnp.ones((2, 2)), bias=jnp.zeros(2))}
    replace = functools.partial(jaxpaged.linen.replace, call=lambda module, x: x)
    with pytest.raises(ValueError, match=r"must call modules of the type; got none of Conv, only Dense. Pass the type"):
        replace(flax.linen.Conv)(dense.apply)(variables, jnp.ones(2))
    with pytest.raises(KeyError), replace(flax.linen.Conv):  # the error of the block itself
        raise KeyError
    apply = replace(flax.linen.Dense)(jax.jit(dense.apply))
    for _ in range(2):  # the second time no module is called
        assert (apply(variables, jnp.ones(2)) == 1).all()
