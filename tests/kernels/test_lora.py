"""The kernels of `jaxpaged.lora`: in Pallas's interpreter, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged
from jaxpaged import _lora
from pallas_kernels.lora.kernel import Config, launch, place_blocks

FEATURES, RANK, ADAPTERS = 512, 16, 4


def make(tokens, *, parts, features=FEATURES, rank=RANK, adapters=ADAPTERS, dtype=jnp.bfloat16, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (tokens, features), (adapters, len(parts) * rank, features), (adapters, rank, sum(parts))
    x, a, b = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    # -1 and what is beyond: none. Every other token takes adapter 0, which needs several blocks; nobody takes number 2.
    ids = rng.integers(-1, adapters + 1, tokens)
    ids[::2], ids[ids == 2] = 0, 1
    return x / 8, a / 8, b.at[2].set(jnp.nan), jnp.asarray(ids, jnp.int32)


def expected(x, a, b, ids, parts):
    x, a, b = (np.asarray(array, np.float64) for array in (x, a, b))
    out, ends = np.zeros((len(x), b.shape[2])), np.cumsum(parts)
    for t, i in enumerate(np.asarray(ids)):
        if 0 <= i < len(a):
            rows = (a[i] @ x[t]).reshape(len(parts), -1)
            own = np.split(b[i], ends[:-1], axis=1)
            out[t] = np.concatenate([row @ of_part for row, of_part in zip(rows, own, strict=True)])
    return out


def check(out, *arrays, parts):
    wanted = expected(*arrays, parts)
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted, atol=0.01 * np.abs(wanted).max())
    outside = ~((np.asarray(arrays[3]) >= 0) & (np.asarray(arrays[3]) < len(arrays[1])))
    assert outside.any()
    assert not np.asarray(out)[outside].any()


def config_of(x, a, b, parts):
    return Config.choose([x.dtype, a.dtype, b.dtype], rank=b.shape[1], features=x.shape[1], parts=parts)


@pytest.mark.parametrize(
    ("tokens", "parts", "shape"),
    [
        (70, (128, 64, 64), {}),
        (7, (64,), dict(dtype=jnp.float16)),
        (33, (64, 192), dict(features=384, rank=32)),
    ],
)
def test_each_row_by_its_own_adapter(tokens, parts, shape):
    arrays = make(tokens, parts=parts, **shape)
    config = config_of(*arrays[:3], parts)
    assert config.splits == (1 if arrays[0].shape[1] == 384 else 4 if len(parts) == 1 else 2)
    check(launch(config, *arrays, interpret=True), *arrays, parts=parts)
    wrong = launch(config, *arrays[:3], jnp.roll(arrays[3], 1), interpret=True)
    with pytest.raises(AssertionError):
        check(wrong, *arrays, parts=parts)


@pytest.mark.parametrize("tokens", [1, 5, 100])
def test_each_row_is_in_one_block_of_its_own_adapter(tokens):
    ids = make(tokens, parts=(64,))[3]
    rows, adapters = (np.asarray(x) for x in place_blocks(ids, ADAPTERS))
    is_row = rows < tokens
    assert sorted(rows[is_row].tolist()) == [*range(tokens)]
    own = np.where((ids >= 0) & (ids < ADAPTERS), ids, ADAPTERS)
    assert (own[rows[is_row]] == np.broadcast_to(adapters[:, None], rows.shape)[is_row]).all()


def test_what_the_kernels_do_not_take():
    good = dict(rank=16, features=4096, parts=(4096, 1024, 1024))
    assert Config.choose([jnp.bfloat16] * 3, **good).columns == 1024
    for wrong in (dict(rank=8), dict(rank=48), dict(features=4000), dict(parts=(4096, 32))):
        assert Config.choose([jnp.bfloat16] * 3, **(good | wrong)) is None
    assert Config.choose([jnp.float32] * 3, **good) is None
    assert Config.choose([jnp.bfloat16, jnp.float16, jnp.float16], **good) is None


def test_lowered_for_a_cpu_and_differentiated_it_is_xla():
    parts = (64, 64)
    x, a, b, ids = make(9, parts=parts)
    arrays = x, a, jnp.nan_to_num(b)
    config = config_of(*arrays, parts)

    def loss(function, *arrays):
        return jnp.sin(function(*arrays, ids).astype(jnp.float32)).sum()

    by_kernel, by_xla = functools.partial(_lora._by_kernel, config), functools.partial(_lora._by_xla, parts)
    got, wanted = (jax.grad(functools.partial(loss, f), argnums=(0, 1, 2))(*arrays) for f in (by_kernel, by_xla))
    for ours, theirs in zip(got, wanted, strict=True):
        assert np.abs(np.asarray(theirs, np.float32)).max() > 0.1
        np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), atol=0.02)
    mapped = jax.vmap(lambda x: by_kernel(x, *arrays[1:], ids))(jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(*(np.asarray(out, np.float32) for out in (mapped[0], by_xla(*arrays, ids))), atol=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [65, 256, 768])
@pytest.mark.parametrize("parts", [(4096, 1024, 1024), (4096,)])
def test_on_a_gpu(tokens, parts):
    arrays = make(tokens, parts=parts, features=4096, adapters=64)
    function = jax.jit(functools.partial(jaxpaged.lora, parts=parts))
    assert "by_kernel" in str(jax.make_jaxpr(function)(*arrays))
    out = function(*arrays)
    check(out, *arrays, parts=parts)
    assert (out == function(*arrays)).all()
    alone = function(arrays[0], arrays[1], arrays[2], jnp.where(jnp.arange(tokens) == 5, arrays[3], -1))
    assert (alone[5] == out[5]).all()  # whatever the neighbours take


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_ranks_on_a_gpu(rank, dtype):
    parts = (64, 128)
    arrays = make(40, parts=parts, rank=rank, dtype=dtype)
    check(jax.jit(functools.partial(jaxpaged.lora, parts=parts))(*arrays), *arrays, parts=parts)
