"""An item inside the kernel: query tokens of a sequence, query heads of a KV head, and the tiles that they see."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.rows import ROWS
from pallas_kernels.common.sizes import ceil_div, div, rem
from pallas_kernels.prefill.config import Cut
from pallas_kernels.prefill.refs import Arrays
from pallas_kernels.prefill.work_list import FIELDS, item_index


@dataclasses.dataclass(frozen=True)
class Item:
    """The scalars of an item, int32 []."""

    seq: jax.Array
    q_row: jax.Array  # row in q of its first token
    out_row: jax.Array  # row in out, which holds the parts one after the other, of its first token
    position: jax.Array  # position of its first token, or of all tokens if not `causal`; negative for padding
    num_tokens: jax.Array
    length: jax.Array  # tokens of the sequence
    kv_head: jax.Array
    head: jax.Array  # first of its query heads
    begin: jax.Array  # first tile of its part that some token sees
    end: jax.Array  # one past the last of these tiles; begin < end
    whole_begin: jax.Array  # first of the tiles that need no mask, because all tokens see all of them
    whole_end: jax.Array  # one past the last of the tiles without a mask
    first_visible: jax.Array  # first position that some token sees
    window: jax.Array | None
    tile_tokens: int
    block_size: int
    causal: bool

    def seen(self, tile: jax.Array, shape: tuple[int, ...], layout: Any = ROWS) -> jax.Array:
        """bool `shape`: whether some query of the sequence may see a token of the tile; tokens are on axis 0."""
        tokens = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + tile * self.tile_tokens
        return jnp.logical_and(tokens < self.length, tokens >= self.first_visible)

    def entries_to_follow(self) -> tuple[jax.Array, jax.Array]:
        """The range of table entries with a token that some query sees: the first, and one past the last."""
        return div(self.first_visible, self.block_size), ceil_div(self.length, self.block_size)


@dataclasses.dataclass(frozen=True)
class Items:
    """The items of a program."""

    entries: Any  # GMEM, int32 [max_entries, fields]
    num_entries: Any  # GMEM, int32 [1]
    program: jax.Array
    config: Cut
    tokens: int  # rows of q
    block_size: int
    kv_heads: int
    group: int
    window: jax.Array | None

    @classmethod
    def of(cls, refs: Arrays, config: Cut) -> "Items":
        tokens, heads, _ = refs.q.shape
        _, block_size, kv_heads, _ = refs.k_cache.shape
        return cls(
            refs.entries,
            refs.num_entries,
            lax.axis_index("program"),
            config,
            tokens=tokens,
            block_size=block_size,
            kv_heads=kv_heads,
            group=heads // kv_heads,
            window=refs.options.window,
        )

    def count(self) -> jax.Array:
        total, n = self.num_entries[0] * self._per_entry, self.config.num_programs
        rounds = div(total, n)
        return rounds + (item_index(rounds, self.program, n) < total).astype(jnp.int32)

    def read(self, i: jax.Array) -> tuple[jax.Array, ...]:
        """The numbers that define the i-th item. They are read long before they are needed."""
        index = item_index(i, self.program, self.config.num_programs)
        entry, share = div(index, self._per_entry), rem(index, self._per_entry)
        return (share, *(self.entries[entry, field] for field in range(len(FIELDS))))

    def item(self, numbers: tuple[jax.Array, ...]) -> Item:
        share, seq, q_row, position, num_tokens, length = numbers
        num_parts, tile_tokens, window = self.config.num_parts, self.config.tile_tokens, self.window
        heads_of, part = div(share, num_parts), rem(share, num_parts)
        begin = first_visible = jnp.int32(0)
        seen = position + (num_tokens if self.config.causal else 1)  # one past the last visible position
        end = jnp.maximum(ceil_div(jnp.maximum(seen, 0), tile_tokens), 1)
        whole_begin, whole_end = begin, jnp.minimum(div(jnp.maximum(position + 1, 0), tile_tokens), end)
        if window is not None:
            first_visible = jnp.maximum(position + 1 - window, 0)
            begin = jnp.minimum(div(first_visible, tile_tokens), end - 1)
            first_of_last = jnp.maximum(seen - window, 0)
            whole_begin = jnp.clip(ceil_div(first_of_last, tile_tokens), begin, end)
            whole_end = jnp.maximum(whole_end, whole_begin)
        if num_parts > 1:
            first, count = begin, end - begin
            begin = first + div(count * part, num_parts)
            end = first + div(count * (part + 1), num_parts)
            # A part without tiles computes one and masks all of it.
            position = jnp.where(begin < end, position, -self.config.item_tokens)
            whole_end = jnp.where(begin < end, whole_end, 0)
            begin = jnp.minimum(begin, first + count - 1)
            end = jnp.maximum(end, begin + 1)
            whole_begin = jnp.clip(whole_begin, begin, end)
            whole_end = jnp.clip(whole_end, whole_begin, end)
        return Item(
            seq=seq,
            q_row=q_row,
            out_row=q_row + part * self.tokens,
            position=position,
            num_tokens=num_tokens,
            length=length,
            kv_head=div(heads_of, self.group // self.config.heads),
            head=heads_of * self.config.heads,
            begin=begin,
            end=end,
            whole_begin=whole_begin,
            whole_end=whole_end,
            first_visible=first_visible,
            window=window,
            tile_tokens=tile_tokens,
            block_size=self.block_size,
            causal=self.config.causal,
        )

    @property
    def _per_entry(self) -> int:
        return self.kv_heads * (self.group // self.config.heads) * self.config.num_parts


def row_tokens(shape: tuple[int, ...], first_row: jax.Array | int, item_tokens: int, layout: Any = ROWS) -> jax.Array:
    """The index in the item of each row's token, int32 `shape`; rows are on axis 0."""
    rows = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + first_row
    if item_tokens & (item_tokens - 1):
        return lax.rem(rows, jnp.full(shape, item_tokens, jnp.int32))
    return lax.bitwise_and(rows, jnp.full(shape, item_tokens - 1, jnp.int32))
