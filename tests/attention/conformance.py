"""The cases that every implementation of attention must get right.

An implementation is a subclass whose name begins with Test. It computes a case, names the features it supports, and
inherits all tests. Tests of one implementation alone are in the subclass's file.
"""

import functools
import inspect
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import OPTIONS, Case, assert_lse, assert_within_budget, make_case, within_budget

# Faults: changes to a case with a scale that must change the result.
FAULTS = {
    "values are keys": lambda case: case.replace(v_cache=case.k_cache),
    "table rolled": lambda case: case.replace(block_tables=jnp.roll(case.block_tables, 1, axis=0)),
    "scale left out": lambda case: case.replace(options={}),
    "eight tokens fewer": lambda case: case.replace(lengths=case.lengths - 8),
}
EIGHT_BITS = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8


class Conformance:
    """The attributes list the features of an implementation. A test runs once for each value of the attributes that its
    arguments name. With an empty list the implementation does not have the test."""

    case = staticmethod(make_case)  # override if an implementation needs other sizes
    long_case = staticmethod(functools.partial(make_case, lengths=(0, 1, 300, 77), max_blocks=20))  # for partitions
    options = tuple(OPTIONS)
    options_of_partitions = tuple(OPTIONS)
    options_of_8_bits: tuple[str, ...] = ("all",)
    q_lens: tuple[int, ...] = (1, 5)
    dtypes = jnp.float32, jnp.bfloat16, jnp.float16
    head_dims = 32, 64, 80, 96, 112, 120, 128, 192, 256
    block_sizes = 8, 16, 32, 64, 128, 256
    groups = (1, 1), (3, 3), (9, 3), (5, 1), (14, 2), (64, 1)  # heads, KV heads
    scaled_caches = tuple((dtype, scale) for dtype in EIGHT_BITS for scale in ("tensor", "head", "token_head"))
    numbers_of_partitions: tuple[int, ...] = (3,)
    faults = tuple(FAULTS)

    def attend(self, case: Case, num_partitions: int = 1) -> tuple[Any, Any]:
        """Out and lse, in the shapes of the case."""
        raise NotImplementedError

    @classmethod
    def values(cls) -> dict[str, tuple]:
        """The values of each argument of a test."""
        return {
            "option": cls.options,
            "option_of_partitions": cls.options_of_partitions,
            "option_of_8_bits": cls.options_of_8_bits,
            "q_len": cls.q_lens,
            "dtype": cls.dtypes,
            "head_dim": cls.head_dims,
            "block_size": cls.block_sizes,
            "heads": cls.groups,
            "cache": cls.scaled_caches,
            "num_partitions": cls.numbers_of_partitions,
            "fault": cls.faults,
        }

    def __init_subclass__(cls) -> None:
        values = cls.values()
        for name, test in vars(Conformance).items():
            if name.startswith("test_") and not all(values[x] for x in [*inspect.signature(test).parameters][1:]):
                setattr(cls, name, None)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for name, values in self.values().items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=_name)

    def check(self, case: Case, num_partitions: int = 1) -> None:
        out, lse = self.attend(case, num_partitions)
        assert out.shape == (*case.q.shape[:-1], case.v_cache.shape[-1])
        assert out.dtype == case.q.dtype
        assert lse.shape == case.q.shape[:-1]
        assert_within_budget(case, out)
        assert_lse(case, lse)

    def test_options(self, option):
        self.check(self.case(options=OPTIONS[option]))

    def test_options_with_partitions(self, option_of_partitions, num_partitions):
        self.check(self.long_case(options=OPTIONS[option_of_partitions]), num_partitions)

    def test_query_tokens(self, q_len):
        self.check(self.case(q_len=q_len, options=OPTIONS["all"]))

    def test_dtypes(self, dtype):
        self.check(self.case(dtype=dtype, options=OPTIONS["all"]))

    def test_head_dims(self, head_dim):
        self.check(self.case(head_dim=head_dim))

    def test_block_sizes(self, block_size):
        lengths = (1, block_size, block_size + 1)
        self.check(self.case(block_size=block_size, max_blocks=2, lengths=lengths))

    def test_groups(self, heads):
        self.check(self.case(heads=heads[0], kv_heads=heads[1]))

    def test_caches_with_scales(self, cache):
        dtype, scale = cache
        self.check(self.case(cache_dtype=dtype, scale_shape=scale, options=OPTIONS["window"]))

    def test_options_on_8_bits(self, option_of_8_bits):
        shape = dict(cache_dtype=jnp.float8_e4m3fn, scale_shape="token_head")
        self.check(self.case(**shape, options=OPTIONS[option_of_8_bits]))

    def test_length_zero_gives_zeros_and_minus_infinity_also_with_sinks(self):
        case = self.case(lengths=(0, 5), options=OPTIONS["sinks"])
        out, lse = self.attend(case)
        assert not np.asarray(out[0], np.float32).any()
        assert (np.asarray(lse[0]) == -np.inf).all()

    def test_a_mistake_is_noticed(self, fault):
        case = self.case(lengths=(27, 60), options=OPTIONS["scale"])
        assert within_budget(case, self.attend(case)[0]).all()
        good = within_budget(case, self.attend(FAULTS[fault](case))[0])
        assert not good.reshape(2, -1).all(axis=1).any(), "every sequence must show it"

    def test_a_nan_would_show(self):
        """A read past the end would be noticed: the builder poisons those slots."""
        case = self.case(lengths=(27, 60))
        out, _ = self.attend(case.replace(lengths=case.lengths + 1))
        assert np.isnan(np.asarray(out, np.float32)).any(axis=-1).reshape(2, -1).any(axis=1).all()


class OptionsAlone(Conformance):
    """For wrappers whose result another implementation computes."""

    options_of_partitions = options_of_8_bits = q_lens = dtypes = head_dims = block_sizes = groups = scaled_caches = ()


def _name(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(map(_name, value))
    return jnp.dtype(value).name if isinstance(value, type) or hasattr(value, "dtype") else str(value)
