"""Cases of the kernel for adapters, and what is right, in float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lora.config import Config

ADAPTERS = 4
Arrays = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # x, a, b, ids


@dataclasses.dataclass(frozen=True)
class Case:
    tokens: int
    parts: tuple[int, ...]
    features: int = 512
    rank: int = 16
    adapters: int = ADAPTERS
    dtype: Any = jnp.bfloat16

    @property
    def config(self) -> Config:
        return Config(self.parts, num_stages=4, num_warpgroups=2)

    def arrays(self) -> Arrays:
        """Half of the rows take adapter 0, which so has several tiles; none takes number 2, which is not finite. Ids
        of -1 and past the end are no adapter."""
        rng, ranks = np.random.default_rng(0), self.rank * len(self.parts)
        shapes = (
            (self.tokens, self.features),
            (self.adapters, ranks, self.features),
            (self.adapters, self.rank, sum(self.parts)),
        )
        x, a, b = (rng.normal(size=shape) for shape in shapes)
        b[2] = np.nan
        ids = rng.integers(-1, self.adapters + 1, self.tokens)
        ids[::2], ids[ids == 2] = 0, 1
        matrices = (jnp.asarray(matrix, self.dtype) for matrix in (x / 8, a / 8, b))
        return *matrices, jnp.asarray(ids, jnp.int32)


def expected(case: Case, x: Any, a: Any, b: Any, ids: Any) -> np.ndarray:
    x, a, b = (np.asarray(matrix, np.float64) for matrix in (x, a, b))
    out, ends = np.zeros((len(x), b.shape[2])), np.cumsum(case.parts)[:-1]
    for t, i in enumerate(np.asarray(ids)):
        if 0 <= i < len(a):
            h = (a[i] @ x[t]).reshape(len(case.parts), -1)
            of_parts = zip(h, np.split(b[i], ends, axis=1), strict=True)
            out[t] = np.concatenate([its @ columns for its, columns in of_parts])
    return out


def assert_right(case: Case, out: Any, *arrays: Any) -> None:
    """Each row within the roundings of h and of out, 2^-9 of bfloat16 each; zeros in rows without an adapter."""
    wanted, out = expected(case, *arrays), np.asarray(out, np.float64)
    highest = np.abs(wanted).max(axis=1)
    assert (np.abs(out - wanted).max(axis=1) <= 0.01 * highest).all()
    assert (highest > 0).any()


def assert_wrong(case: Case, out: Any, *arrays: Any) -> None:
    with pytest.raises(AssertionError):
        assert_right(case, out, *arrays)
