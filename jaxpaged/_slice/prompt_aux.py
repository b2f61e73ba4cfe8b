"""The `aux` of prompt tokens, for the host: `aux` of all rows of a step, and the blocks found in the prefix cache.

`jaxpaged._engine.prompt_aux` puts them together.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._put import put
from jaxpaged._scheduler.arrays import rows_of
from jaxpaged._scheduler.records import StepPlan
from jaxpaged._scheduler.scheduler import Scheduler
from jaxpaged._slice.options import ResolvedOptions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowsAux:
    """The `aux` of all rows: `[rows]` in a step, `[steps, rows]` in a slice."""

    request_ids: jax.Array  # int32; `max_requests`: padding
    positions: jax.Array  # int32
    slots: jax.Array | None  # int32, in the caches of the first group without a window; None: no prefix cache
    aux: Any  # each leaf [rows, ...]

    @classmethod
    def create(cls, width: int, aux: Any, options: ResolvedOptions) -> RowsAux:
        """A step without tokens. `aux`: shapes and dtypes of a token's `aux`."""
        return cls(
            request_ids=jnp.full(width, options.max_requests, jnp.int32),
            positions=jnp.zeros(width, jnp.int32),
            slots=jnp.zeros(width, jnp.int32) if options.prefix_cache else None,
            aux=jax.tree.map(lambda x: jnp.zeros((width, *x.shape), x.dtype), aux),
        )

    def with_step(self, step: StepPlan, scheduler: Scheduler, windows: tuple[int | None, ...], aux: Any) -> RowsAux:
        """The `aux` of a step that may be narrower."""
        request_ids = rows_of(step.request_ids, step.seats)
        slots = step.slots if len(windows) == 1 else step.slots[windows.index(None)]
        new = RowsAux(
            request_ids=jnp.where(step.seats < scheduler.num_seqs, request_ids, scheduler.max_requests),
            positions=step.positions,
            slots=None if self.slots is None else slots,
            aux=aux,
        )
        return jax.tree.map(lambda old, new: lax.dynamic_update_slice_in_dim(old, new, 0, axis=0), self, new)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FoundBlocks:
    """The full blocks of requests that got cached ones in a slice: because they began with them, or in place of equal
    blocks of their own. If a request got some twice, the blocks after the last time."""

    ids: jax.Array  # int32 [requests, columns], in the first group without a window
    num_blocks: jax.Array  # int32 [requests]
    num_steps: jax.Array  # int32 [requests], steps of the slice before that

    @classmethod
    def create(cls, options: ResolvedOptions) -> FoundBlocks:
        num_requests = options.max_requests
        return cls(
            ids=jnp.zeros((num_requests, options.max_model_len // options.block_size), jnp.int32),
            num_blocks=jnp.zeros(num_requests, jnp.int32),
            num_steps=jnp.zeros(num_requests, jnp.int32),
        )

    def update(
        self, before: tuple[Scheduler, BlockAllocator], scheduler: Scheduler, allocator: BlockAllocator
    ) -> FoundBlocks:
        """Compares the seats before and after `change_seats`."""
        group, num_columns = allocator.windows.index(None), self.ids.shape[1]
        old, new = (x.group(group).block_tables[:, :num_columns] for x in (before[1], allocator))
        num_full = allocator.lengths // allocator.block_size
        is_full = jnp.arange(num_columns, dtype=jnp.int32)[None] < num_full[:, None]
        has_changed = (before[0].seated != scheduler.seated) | (is_full & (old != new)).any(axis=1)
        is_seated = scheduler.seated < scheduler.max_requests

        def enter(values: jax.Array, more: jax.Array) -> jax.Array:
            return put(values, scheduler.seated, has_changed & is_seated, more)

        return FoundBlocks(
            enter(self.ids, new), enter(self.num_blocks, num_full), enter(self.num_steps, scheduler.num_steps)
        )

    def cleared(self) -> FoundBlocks:
        """For the next slice."""
        return dataclasses.replace(self, num_blocks=jnp.zeros_like(self.num_blocks))
