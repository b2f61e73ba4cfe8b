"""What an engine keeps on the device, and what crosses between it and the host with each slice."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._allocator.prefix_cache import PrefixCache
from jaxpaged._engine.defaults import Sizes
from jaxpaged._engine.drafting import Drafting
from jaxpaged._engine.inputs import pool_sizes
from jaxpaged._engine.kinds import Kind
from jaxpaged._engine.packing import num_words
from jaxpaged._engine.prefix_groups import SeatGroups
from jaxpaged._engine.sampling import Likely
from jaxpaged._engine.scoring import Scores, Told
from jaxpaged._scheduler.records import Outbox, Sampling
from jaxpaged._scheduler.scheduler import Scheduler


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What stays on the device from slice to slice; donated to each."""

    scheduler: Scheduler
    allocator: BlockAllocator
    caches: Any
    told: jax.Array  # int32 [steps, words], a packed `Told` of each step since the last report
    spans: jax.Array  # int32 [requests, 2], where the scored tokens of each request begin and end
    num_waited: jax.Array  # int32 [], steps since prompts wait for a step with a chunk
    num_of_kind: jax.Array  # int32 [kinds], steps of each kind so far, modulo 2^32
    seat_groups: SeatGroups | None  # None: no kind reads shared blocks once
    num_spared: jax.Array  # int32 [], tokens that were not read again so far, modulo 2^32
    drafting: Drafting | None  # None: no drafts

    @classmethod
    def create(
        cls,
        caches: Any,
        kinds: Sequence[Kind],
        sizes: Sizes,
        *,
        max_requests: int,
        max_steps: int,
        num_stop_ids: int,
        num_adapters: int,
        windows: tuple[int | None, ...],
        prefix_cache: bool,
        drafts: int,
        max_logprobs: int,
        hidden: jax.ShapeDtypeStruct | None = None,
    ) -> State:
        """An engine's without requests. `max_steps`: of a slice; the others as `Engine` has them."""
        num_blocks, block_size = pool_sizes(caches)
        num_seats, max_length = sizes.num_seats, sizes.max_length
        prefixes = None
        if prefix_cache and max_length >= block_size:  # else it could never find a block
            prefixes = PrefixCache.create(
                num_blocks=num_blocks, block_size=block_size, secret=secrets.randbits(128), num_groups=len(windows)
            )
        scheduler = Scheduler.create(
            max_requests=max_requests,
            num_seats=num_seats,
            max_length=max_length,
            max_steps=max_steps,
            num_stop_ids=num_stop_ids,
            num_drafts=drafts,
            num_adapters=num_adapters,
            prefix_cache=prefixes,
        )
        return cls(
            scheduler=scheduler,
            allocator=BlockAllocator.create(
                num_blocks=num_blocks,
                block_size=block_size,
                num_seqs=num_seats,
                max_blocks_per_seq=-(-max_length // block_size),
                windows=windows,
            ),
            caches=caches,
            told=jnp.zeros((max_steps, num_words(Told.create(scheduler, kinds, max_logprobs))), jnp.int32),
            spans=jnp.zeros((max_requests, 2), jnp.int32),
            num_waited=jnp.zeros((), jnp.int32),
            num_of_kind=jnp.zeros(len(kinds), jnp.int32),
            seat_groups=SeatGroups.create(num_seats) if kinds[0].least_spared is not None else None,
            num_spared=jnp.zeros((), jnp.int32),
            drafting=Drafting.create(num_seats, drafts, max_requests, hidden) if drafts else None,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inbox:
    """What the host sends in with a slice. A row without a request has a prompt length of 0."""

    prompts: Any  # int32 [rows, max_length]
    prompt_lengths: Any  # int32 [rows]
    max_new_tokens: Any  # int32 [rows]
    priorities: Any  # int32 [rows]
    stop_ids: Any  # int32 [rows, stop_ids]
    sampling: Sampling  # of each row
    families: Any  # int32 [rows], the same for completions of one request
    spans: Any  # int32 [rows, 2], of the tokens to score; a prompt row then holds them too, behind the prompt
    aborts: Any  # bool [requests]
    forgets: Any  # bool [1 + adapters], whether the weights have changed since the slice before, or each adapter's
    wants_logprobs: Any  # bool []
    num_steps: Any  # int32 [], the most steps of this slice


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
    """What the host gets back, packed: an array that can be read during the next slice."""

    request_ids: jax.Array  # int32 [rows], of the inbox
    refusals: jax.Array  # int32 [rows]
    outbox: Outbox
    logprobs: jax.Array  # float32, like the tokens of the outbox
    likely: Likely | None
    scores: Scores  # [steps, rows]
    num_running: jax.Array  # int32 []
    num_free: jax.Array  # int32 [], blocks
    num_of_kind: jax.Array  # int32 [kinds], steps so far, as the next seven
    num_spared: jax.Array
    num_drafted: jax.Array
    num_accepted: jax.Array
    num_computed: jax.Array
    num_found: jax.Array
    num_recomputed: jax.Array
    num_preempted: jax.Array
    # For the host tier. None: there is none.
    serials: jax.Array | None = None  # int32 [blocks], of the blocks that the prefix cache lists, below zero if they
    # are free; 0: it does not list it
    salts: jax.Array | None = None  # int32 [1 + adapters], under which prompts are looked up
    room: jax.Array | None = None  # int32 [], blocks beyond what the requests may need for as many tokens as `growth`
