"""What a kernel, its configuration and its shared memory must know of a call's arrays."""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp

from pallas_kernels.common.sizes import is_8bit, round_up


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """Of one KV head."""

    q_len: int = 1  # query tokens of a sequence; the prefill kernels, whose tokens are packed, do not ask
    group: int  # query heads
    head_dim: int
    value_dim: int
    is_latent: bool = False  # whether the values are the first numbers of the keys
    block_size: int
    q_dtype: Any
    cache_dtype: Any

    @classmethod
    def of(cls, q: Any, k_cache: Any, v_cache: Any, value_dim: Any = None, *, q_len: int = 1, parts: int = 1) -> Self:
        """Of q `[..., heads, head_dim]`. `value_dim`: without v_cache. `parts`: of the query heads of a KV head."""
        _, block_size, kv_heads, head_dim = k_cache.shape
        return cls(
            q_len=q_len,
            group=q.shape[-2] // (kv_heads * parts),
            head_dim=head_dim,
            value_dim=value_dim if v_cache is None else v_cache.shape[3],
            is_latent=v_cache is None,
            block_size=block_size,
            q_dtype=q.dtype,
            cache_dtype=k_cache.dtype,
        )

    @property
    def rows(self) -> int:
        """In the decode kernel: padded to the N dimension of its products."""
        return round_up(self.q_len * self.group, 8)

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of a token that are fetched at a time: a latent at once, keys and values each by themselves."""
        return (self.head_dim,) if self.is_latent else (self.head_dim, self.value_dim)

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the cache."""
        return jnp.dtype(self.cache_dtype).itemsize

    @property
    def is_8bit(self) -> bool:
        return is_8bit(self.cache_dtype)

    @property
    def multiplied_dtype(self) -> Any:
        """Of the products: an 8-bit cache is widened to float16."""
        return jnp.float16 if self.is_8bit else self.q_dtype
