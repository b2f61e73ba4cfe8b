"""More than 32 rows, query tokens times heads of a KV head: they are the M dimension of the products."""

import jax.numpy as jnp
import pytest

from tests.cases import OPTIONS, make_case, within_budget
from tests.kernels.interpret import FAULTS, attend, check

pytestmark = pytest.mark.slow

BF16 = jnp.bfloat16
MANY = dict(q_len=13, heads=6, kv_heads=2, dtype=BF16)  # 39 rows, of 64
SMALL = dict(lengths=(0, 9, 13, 200), max_blocks=13, **MANY)  # compiled once an option


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    check(make_case(**SMALL, options=OPTIONS[name]))


@pytest.mark.parametrize(("num_partitions", "name"), [(2, "plain"), (3, "all")])
def test_partitions(name, num_partitions):
    case = make_case(lengths=(0, 9, 400), max_blocks=26, options=OPTIONS[name], **MANY)
    check(case, num_partitions=num_partitions)


@pytest.mark.parametrize(("heads", "q_len"), [(33, 1), (64, 1), (4, 16)])
def test_groups(heads, q_len):
    check(make_case(lengths=(1, 70, 130), max_blocks=9, heads=heads, kv_heads=1, q_len=q_len, dtype=BF16))


@pytest.mark.parametrize(
    ("head_dim", "num_partitions", "block_size"),
    [(32, 1, 8), (80, 1, 64), (120, 1, 256), (120, 2, 16), (128, 2, 64), (256, 2, 8)],
)
def test_heads_and_blocks(head_dim, num_partitions, block_size):
    sizes = dict(head_dim=head_dim, block_size=block_size, max_blocks=-(-150 // block_size) + 1)
    case = make_case(lengths=(3, 150), options=OPTIONS["window"], **sizes, **MANY)
    check(case, num_partitions=num_partitions, zero_fill=True)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("tile", [64, 128])
def test_the_ring_goes_round(num_stages, tile):
    case = make_case(lengths=(128 * 4, 5, 128 * 4 + 1), max_blocks=33, options=dict(sliding_window=300), **MANY)
    check(case, num_stages=num_stages, tile=tile)


def test_float16():
    check(make_case(lengths=(0, 1, 150), max_blocks=10, options=OPTIONS["all"], **(MANY | dict(dtype=jnp.float16))))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_result_is_noticed(fault):
    case = make_case(**SMALL, options=OPTIONS["scale"])
    assert not within_budget(case, attend(FAULTS[fault](case))[0]).all()
