"""Trees of drafted tokens: which tokens of its sequence each query token sees, as bits.

Bit t % 32 of a word is for token t of the sequence. The last word of a query token has the bit of the sequence's last
token. A query token sees all before its first word and nothing behind itself.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.rows import ROWS, ROWS_FIRST
from pallas_kernels.prefill.config import ROWS as ITEM_ROWS
from pallas_kernels.prefill.config import Cut
from pallas_kernels.prefill.item import BITS, Item, row_tokens
from pallas_kernels.prefill.work_list import WorkList


def by_entry(bits: jax.Array, work: WorkList, config: Cut) -> jax.Array:
    """uint32 [tokens, words] -> int32 [max_entries, words, 128], of the rows of each entry's items."""
    tokens = work.entries[:, 1:2] + (jnp.arange(ITEM_ROWS, dtype=jnp.int32) % config.item_tokens)[None]
    words = lax.bitcast_convert_type(bits, jnp.int32)
    return words.at[tokens].get(mode="clip").swapaxes(1, 2)


@dataclasses.dataclass(frozen=True)
class Tree:
    """Of the 64 rows of a warpgroup, traced inside the kernel."""

    words: Any  # GMEM, int32 [max_entries, words, 128]
    entry: jax.Array
    item: Item
    item_tokens: int
    first_row: jax.Array | int  # of the item's 128

    def seen(self, tile: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """bool [64, tile]: which tokens of a tile each row sees."""
        columns = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=ROWS)
        word_of = lax.shift_right_logical(columns, jnp.full(shape, 5, jnp.int32))
        bits = jnp.full(shape, 0, jnp.int32)
        for i in range(shape[1] // BITS):
            word = ROWS_FIRST.over(self._word(tile * (shape[1] // BITS) + i, shape[0]), shape)
            bits = jnp.where(word_of == i, word, bits)
        return jnp.bitwise_and(lax.shift_right_logical(bits, jnp.bitwise_and(columns, BITS - 1)), 1) == 1

    def _word(self, number: jax.Array, num_rows: int) -> jax.Array:
        """int32 [64], counted from the start of the sequence."""
        stored = number - self.item.first_word
        index = jnp.clip(stored, 0, self.words.shape[1] - 1)
        rows = self.words.at[self.entry, index, pl.ds(self.first_row, num_rows)]
        bits = jnp.bitwise_or(ROWS_FIRST.load(rows), jnp.where(stored < 0, -1, 0))
        tokens = row_tokens((num_rows,), self.first_row, self.item_tokens, ROWS_FIRST.vector)
        num_before = tokens + (self.item.position + 1 - number * BITS)  # tokens of the word up to the row's own
        ones = lax.shift_right_logical(jnp.full_like(bits, -1), jnp.clip(BITS - num_before, 0, BITS - 1))
        return jnp.where(num_before > 0, jnp.bitwise_and(bits, ones), jnp.zeros_like(bits))
