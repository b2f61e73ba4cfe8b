"""The NNX and the Linen module equal each other and dense attention."""

import dataclasses
import functools
from unittest import mock

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
from tests.cases import Case, oracle

FEATURES, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 48, 6, 2, 16, 4
SIZES = dict(
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    rotary_frequencies=jaxpaged.rotary_frequencies(HEAD_DIM, 500.0),
)


def shrunk(x, positions):
    """In place of a model's own rotation."""
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
ATTENTION_OPTIONS = "scale", "sliding_window", "logits_soft_cap", "alibi_slopes"
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


def new_cache(dtype="float32", **options):
    sizes = dict(num_blocks=16, block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    return KVCache.create(**sizes | options, dtype=dtype)


def new_allocator():
    return BlockAllocator.create(num_blocks=16, block_size=BLOCK_SIZE, num_seqs=len(LENGTHS), max_blocks_per_seq=4)


def tokens():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(length, FEATURES)).astype(np.float32) for length in LENGTHS]


def prompt_batch(sequences, q_len):
    return jnp.asarray(np.stack([np.pad(x, ((q_len - len(x), 0), (0, 0))) for x in sequences]))


def prompts():
    """All tokens as one call: x and its step."""
    allocator, slots, _ = new_allocator().append(jnp.asarray(LENGTHS, jnp.int32), q_len=max(LENGTHS))
    return prompt_batch(tokens(), max(LENGTHS)), AttentionStep.create(allocator, slots)


def dense(module, x, options):
    """The same attention over one whole sequence [tokens, features], in NumPy: its cache is one block."""
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
    known = {name: options[name] for name in ATTENTION_OPTIONS if name in options}
    if "use_sinks" in options:
        known["sinks"] = np.asarray(module.sinks)
    whole = Case(q[None], k[None], v[None], np.zeros((1, 1), np.int32), np.asarray([length]), known)
    out = oracle(whole)[0].reshape(length, -1)
    if options.get("use_gate"):
        out = out / (1 + np.exp(-project("gate_proj", x)))
    return project("o_proj", out)


@pytest.mark.parametrize("options", OPTIONS, ids=", ".join)
def test_prefill_and_decode_equal_dense_attention_in_both(options):
    modules, sequences, q_len = make(options), tokens(), max(LENGTHS) - 1
    expected = [dense(modules[0], x, options) for x in sequences]
    # All tokens but the last at once, ragged; then the last one as a row of each sequence, and as a token.
    allocator, slots, ok = new_allocator().append(jnp.asarray([n - 1 for n in LENGTHS], jnp.int32), q_len=q_len)
    prompt = prompt_batch([x[:-1] for x in sequences], q_len), AttentionStep.create(allocator, slots)
    assert ok.all()
    allocator, slots, _ = allocator.append(jnp.ones(len(LENGTHS), jnp.int32))
    last = prompt_batch([x[-1:] for x in sequences], 1)
    results = []
    for call in modules:
        cache, out = call(prompt[0], new_cache(), prompt[1])
        _, rows = call(last, cache, AttentionStep.create(allocator, slots[:, None]))
        _, single = call(last[:, 0], cache, AttentionStep.create(allocator, slots))
        for i, wanted in enumerate(expected):
            np.testing.assert_allclose(out[i, q_len - len(wanted) + 1 :], wanted[:-1], atol=2e-5)
            np.testing.assert_allclose(rows[i, 0], wanted[-1], atol=2e-5)
            np.testing.assert_allclose(single[i], wanted[-1], atol=2e-5)
        results.append((cache, out, single))
    for left, right in zip(*map(jax.tree.leaves, results), strict=True):
        assert (left == right).all()


@pytest.mark.parametrize("options", [OPTIONS[2], OPTIONS[3]], ids=", ".join)
def test_packed_tokens_with_padding_at_both_ends(options):
    modules, sequences = make(options), tokens()
    expected = np.concatenate([dense(modules[0], x, options) for x in sequences])
    allocator = prompts()[1].allocator
    owners = np.repeat([-1, 0, 1, 2, -1], [1, *LENGTHS, 1]).astype(np.int32)
    positions = np.concatenate([[0], *map(np.arange, LENGTHS), [0]]).astype(np.int32)
    x, slots = jnp.pad(jnp.concatenate(sequences), ((1, 1), (0, 0))), allocator.slots(owners, positions)

    def packed(call, query_starts):
        step = AttentionStep.create(allocator, slots, query_starts=jnp.asarray(query_starts))
        return call(x, new_cache(), step)[1][1:-1]

    starts = np.cumsum([1, *LENGTHS])
    for call in modules:
        np.testing.assert_allclose(packed(call, starts), expected, atol=2e-5)
    # The twin with a mistake: the last token of the first sequence goes to the second.
    assert not np.allclose(packed(modules[0], starts - [0, 1, 0, 0]), expected, atol=2e-5)


def test_a_layer_of_a_stack_serves_as_a_cache():
    module, apply = make({})
    x, step = prompts()
    alone, expected = module(x, new_cache("int8"), step)
    for call in (module, apply):
        layer, out = call(x, CacheLayer(new_cache("int8", num_layers=3), 1), step)
        assert np.array_equal(out, expected)
        for array, wanted in zip(jax.tree.leaves(layer.stack), jax.tree.leaves(alone), strict=True):
            assert np.array_equal(array[1], wanted)
            assert not np.asarray(array)[[0, 2]].any()


def test_attend_passes_tables_scales_and_options():
    cache, (_, step) = new_cache("int8"), prompts()
    q, k, v = (jax.random.normal(jax.random.key(i), (3, 11, KV_HEADS, HEAD_DIM)) for i in range(3))
    written = write_kv(cache, k, v, step.slots)
    scales = dict(k_scale=written.k_scale, v_scale=written.v_scale)
    arrays = (q, written.k, written.v, step.allocator.block_tables, step.allocator.lengths)
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
    for wrong in (dict(num_partitions=0), dict(implementation="cuda")):
        with pytest.raises(ValueError, match=f"got {next(iter(wrong))}="):
            step.attend(q, k, v, cache, **wrong)


def test_the_modules_hold_no_hidden_state():
    module, _ = make({})
    assert {path[-1] for path, _ in nnx.to_flat_state(nnx.state(module))} == {"kernel"}
    x, step = prompts()
    linen = jaxpaged.linen.PagedAttention(AttentionSettings(**SIZES))
    assert set(linen.init(jax.random.key(0), x, new_cache(), step)) == {"params"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_heads=5), r"num_heads must be a multiple of num_kv_heads; got num_heads=5, num_kv_heads=2"),
        (dict(head_dim=8), r"rotary_frequencies must hold 1 to 4 numbers, .* the 8 dimensions; got 8. Make them"),
        (dict(rotary=lambda x, positions: x), r"rotary replaces rotary_frequencies; .* Pass rotary_frequencies=None"),
        (
            dict(rotary_frequencies=None, interleaved=True),
            r"without rotary_frequencies; got rotary_frequencies=None. Pass",
        ),
        (dict(heads_axis="devices"), r"heads_axis needs separate q, k and v projections.* Pass fused=False with it"),
    ],
)
def test_size_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        AttentionSettings(**SIZES | changes)


def test_settings_store_lists_and_arrays_as_tuples():
    changes = dict(rotary_frequencies=(1.0, 0.5), alibi_slopes=(0.5,) * HEADS)
    settings = AttentionSettings(**SIZES | changes)
    for convert in (list, np.asarray):
        other = AttentionSettings(**SIZES | {name: convert(numbers) for name, numbers in changes.items()})
        assert len({settings, other}) == 1


def test_call_errors():
    allocator, cache, x = new_allocator(), new_cache(), jnp.zeros((3, 1, FEATURES))
    step = AttentionStep.create(allocator, jnp.zeros((3, 1), jnp.int32))
    packed = AttentionStep.create(allocator, jnp.zeros(5, jnp.int32), query_starts=jnp.arange(4))
    wrong = [
        ((x[:, 0], cache, step), r"x must be \[3, 1, 'features'\], the tokens of the step; got .*\(3, 48\)"),
        ((x, cache, packed), r"x must be \[5, 'features'\], the tokens .*; got x.shape=\(3, 1, 48\)"),
        ((x, cache, allocator), r"call a module with \(x, cache, step\), an AttentionStep last; got BlockAllocator"),
        ((x, CacheLayer((cache, cache), 0), step), r"a cache must be a KVCache, .*; got a tuple"),
        ((x, new_cache(num_kv_heads=1), step), r"must be \[blocks, block_size, 2, 16\].*got k.shape=\(16, 4, 1, 16\)"),
    ]
    for call in make({}):
        for arguments, message in wrong:
            with pytest.raises(ValueError, match=message):
                call(*arguments)
    for call in make(dict(num_partitions=0)):
        with pytest.raises(ValueError, match=r"num_partitions must be .*; got num_partitions=0"):
            call(x, cache, step)


@pytest.mark.parametrize("num_layers", [None, 2])
@pytest.mark.parametrize("changes", [dict(num_blocks=8), dict(num_blocks=32, block_size=8)], ids=str)
def test_attend_refuses_a_cache_with_other_blocks_than_the_allocator(changes, num_layers):
    cache = new_cache(**changes, num_layers=num_layers)
    step = AttentionStep.create(new_allocator(), jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match=r"got a cache with .*, and allocator.num_blocks=16, allocator.block_size=4"):
        step.attend(jnp.zeros((3, HEADS, HEAD_DIM)), None, None, CacheLayer(cache, 0) if num_layers else cache)


def test_a_plan_reaches_the_attention():
    """Not if the module has a window or a number of partitions, which a step's plan does not cover."""
    allocator, slots, _ = new_allocator().append(jnp.ones(len(LENGTHS), jnp.int32), q_len=1)
    step = AttentionStep.create(allocator, slots)
    step = dataclasses.replace(step, plan=make_plan(allocator.lengths, num_kv_heads=KV_HEADS))
    for options, follows in (({}, True), (dict(sliding_window=3), False), (dict(num_partitions=2), False)):
        for call in make(options):
            with mock.patch.object(attend, "planned_attention", wraps=attend.planned_attention) as attention:
                call(jnp.zeros((len(LENGTHS), 1, FEATURES)), new_cache(), step)
            assert (attention.call_args.kwargs["plan"] is step.plan) == follows


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
    with pytest.raises(KeyError), replace(flax.linen.Conv):  # the block's own error
        raise KeyError
    apply = replace(flax.linen.Dense)(jax.jit(dense.apply))
    for _ in range(2):  # the second time no module is called
        assert (apply(variables, jnp.ones(2)) == 1).all()
