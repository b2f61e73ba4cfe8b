"""The body of the prefill kernel, and its launch."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.fetch import Ring
from pallas_kernels.common.interface import Call
from pallas_kernels.common.rows import matrix
from pallas_kernels.common.scales import of_head, scaled
from pallas_kernels.common.sizes import COLUMNS
from pallas_kernels.prefill.config import ITEM_ROWS, WG_ROWS, Config
from pallas_kernels.prefill.fetch import Fetcher
from pallas_kernels.prefill.item import Item, Items
from pallas_kernels.prefill.launch import launch_items
from pallas_kernels.prefill.logits import Logits
from pallas_kernels.prefill.products import products_of
from pallas_kernels.prefill.refs import Refs, scratch
from pallas_kernels.prefill.rows_of_item import RowsOfItem
from pallas_kernels.prefill.scales import Scales
from pallas_kernels.prefill.steps import Steps
from pallas_kernels.prefill.widener import Widener

Numbers = tuple[jax.Array, ...]  # an item, see `Items.read`


def _kernel(
    refs: Refs,
    *,
    config: Config,
    transforms: tuple[Any, ...],  # for matrices in SMEM
) -> None:
    warpgroup = lax.axis_index("warpgroup")
    items = Items.of(refs, config)
    multiplied = fetched = (
        Ring(refs.k_cache, refs.k_smem, refs.k_full, refs.k_free),
        Ring(refs.v_cache, refs.v_smem, refs.v_full, refs.v_free),
    )
    if config.num_8bit_stages:
        fetched = (
            Ring(refs.k_cache, refs.k_8bit_smem, refs.k_8bit_full, refs.k_8bit_free),
            Ring(refs.v_cache, refs.v_8bit_smem, refs.v_8bit_full, refs.v_8bit_free),
        )
    scales = Scales(refs, config.num_scale_stages)

    @pl.when(warpgroup == 2)
    def _fetch() -> None:
        plgpu.set_max_registers(config.registers[1], action="decrease")
        Fetcher(items, *fetched, refs.block_tables, scales, config).run()

    if config.num_8bit_stages:

        @pl.when(warpgroup == 3)
        def _widen() -> None:
            plgpu.set_max_registers(config.registers[1], action="decrease")
            Widener(items, fetched, multiplied, config).run()

    @pl.when(warpgroup < 2)
    def _compute() -> None:
        plgpu.set_max_registers(config.registers[0], action="increase")
        Computer(refs, items, *multiplied, scales, warpgroup, config, transforms).run()


@dataclasses.dataclass(frozen=True)
class Computer:
    """A computing warpgroup, with 64 rows of every item of the program.

    A single token fills few rows of its item, and both warpgroups multiply them all. A branch that lets one warpgroup
    pass such items gains 3 to 9% on them and costs prompts 4%.
    [prefill_light_h200 of benchmarks/results/decisions/]
    """

    refs: Refs
    items: Items
    keys: Ring
    values: Ring
    scales: Scales
    warpgroup: jax.Array
    config: Config
    transforms: tuple[Any, ...]  # for matrices in SMEM

    def run(self) -> None:
        items, refs, options = self.items, self.refs, self.refs.options
        rows = RowsOfItem(self.config, self.warpgroup * WG_ROWS, WG_ROWS, self.transforms)
        q_smem, multiplied = (ref.at[self.warpgroup] for ref in refs.query_views)  # [64, width]
        o_smem = refs.o_smem.at[self.warpgroup] if refs.o_smem is not None else q_smem
        softmax_scale, cap = options.scale[0], options.cap
        count = items.count()

        def start_load(numbers: Numbers) -> None:
            rows.start_load(refs.q, items.item(numbers), q_smem)

        def work(i: jax.Array, carry: tuple[jax.Array, Numbers]) -> tuple[jax.Array, Numbers]:
            turn, numbers = carry
            item = items.item(numbers)
            next_numbers = items.read(jnp.minimum(i + 1, count - 1))

            # 1. Wait for Q.
            k_scale, v_scale = (of_head(scale, item.kv_head) for scale in (options.k_scale, options.v_scale))
            rows.finish_load()
            scale = rows.prepare_query(q_smem, multiplied, scaled(softmax_scale, k_scale))

            # 2. The loop over tiles.
            slopes, sinks = (rows.load_vector(by_row, item) for by_row in (options.alibi_slopes, options.sinks))
            logits = Logits(item, self.config.item_tokens, rows.first_row, scale, cap, slopes)
            acc, m, l = self._steps(item, logits, turn, multiplied).run()

            # 3. Start copying the next item's Q while O and lse of this one are stored.
            if self.config.output_columns:
                start_load(next_numbers)
            rows.store_results(refs, item, acc, m, l, sinks, v_scale, o_smem)
            if not self.config.output_columns:
                plgpu.commit_smem()  # all threads have read their part of O
                start_load(next_numbers)
            return turn + item.end - item.begin, next_numbers

        @pl.when(count > 0)
        def _work() -> None:
            numbers = items.read(jnp.int32(0))
            start_load(numbers)
            lax.fori_loop(0, count, work, (jnp.int32(0), numbers))
            rows.finish_load()

    def _steps(self, item: Item, logits: Logits, turn: jax.Array, q: Any) -> Steps:
        return Steps(
            item,
            logits,
            self.keys,
            self.values,
            turn,
            q,
            self.refs.zeroed,
            self.warpgroup,
            self.config,
            self.scales,
            products_of(self.transforms),
        )


def matrix_columns(head_dim: int, eight_bit: bool) -> int:
    """Columns of a swizzled tile of K, V and Q in SMEM: the head's columns or a divisor, as the copy engine needs."""
    return COLUMNS if eight_bit else next(n for n in (64, 32, 16) if head_dim % n == 0 or head_dim < n)


def launch(call: Call, config: Config) -> tuple[jax.Array, jax.Array]:
    """Launches a packed call, see `launch_items`."""
    shapes, options = call.shapes(), call.options
    transforms = matrix(matrix_columns(shapes.head_dim, shapes.is_8bit), 2)
    return launch_items(
        "paged_prefill",
        functools.partial(_kernel, config=config, transforms=transforms),
        Refs,
        call,
        config,
        rows=ITEM_ROWS,
        num_threads=4 if shapes.is_8bit else 3,
        thread_name="warpgroup",
        scratch_types=scratch(config, shapes, (options.k_scale, options.v_scale), transforms),
    )
