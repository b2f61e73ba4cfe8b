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
from jaxpaged._scheduler.records import Outbox, Requests
from jaxpaged._scheduler.scheduler import Scheduler
from jaxpaged._slice.drafting import Drafting
from jaxpaged._slice.kinds import Kind
from jaxpaged._slice.options import ResolvedOptions
from jaxpaged._slice.packing import num_words
from jaxpaged._slice.prefix_groups import SeatGroups
from jaxpaged._slice.sampling import TopLogprobs
from jaxpaged._slice.scoring import Scores, StepOutputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What stays on the device from slice to slice; donated to each."""

    scheduler: Scheduler
    allocator: BlockAllocator
    caches: Any
    outputs: jax.Array  # int32 [steps, words], a packed `StepOutputs` of each step since the last report
    spans: jax.Array  # int32 [requests, 2], where the scored tokens of each request begin and end
    num_waited: jax.Array  # int32 [], steps since prompts wait for a step with a chunk
    num_of_kind: jax.Array  # int32 [kinds], steps of each kind so far, modulo 2^32
    seat_groups: SeatGroups | None  # None: no kind reads shared blocks once
    num_saved_reads: jax.Array  # int32 [], tokens that were not read again so far, modulo 2^32
    drafting: Drafting | None  # None: no drafts

    @classmethod
    def create(cls, caches: Any, kinds: Sequence[Kind], options: ResolvedOptions) -> State:
        """An engine's without requests. It lacks the room for what its model returns: `with_outputs`."""
        num_seats, max_length, max_requests = options.max_num_seqs, options.max_model_len, options.max_requests
        num_drafts = options.num_speculative_tokens
        pool = dict(num_blocks=options.num_blocks, block_size=options.block_size)
        prefixes = None
        if options.prefix_cache and max_length >= options.block_size:  # else it could never find a block
            prefixes = PrefixCache.create(**pool, secret=secrets.randbits(128), num_groups=len(options.windows))
        scheduler = Scheduler.create(
            max_requests=max_requests,
            num_seqs=num_seats,
            max_length=max_length,
            max_steps=options.steps_per_slice,
            num_stop_ids=options.num_stop_ids,
            num_drafts=num_drafts,
            num_adapters=options.num_adapters,
            prefix_cache=prefixes,
        )
        return cls(
            scheduler=scheduler,
            allocator=BlockAllocator.create(
                **pool,
                num_seqs=num_seats,
                max_blocks_per_seq=-(-max_length // options.block_size),
                windows=options.windows,
            ),
            caches=caches,
            outputs=jnp.zeros((options.steps_per_slice, 0), jnp.int32),
            spans=jnp.zeros((max_requests, 2), jnp.int32),
            num_waited=jnp.zeros((), jnp.int32),
            num_of_kind=jnp.zeros(len(kinds), jnp.int32),
            seat_groups=SeatGroups.create(num_seats) if kinds[0].least_saved_reads is not None else None,
            num_saved_reads=jnp.zeros((), jnp.int32),
            drafting=Drafting.create(num_seats, num_drafts, max_requests) if num_drafts else None,
        )

    def with_outputs(self, kinds: Sequence[Kind], options: ResolvedOptions, *, hidden: Any, aux: Any) -> State:
        """With room for what the model returns for a token, of these types. `hidden`: None if no draft reads it."""
        words = num_words(StepOutputs.create(self.scheduler, kinds, options.max_logprobs, aux))
        drafting = None if self.drafting is None else self.drafting.with_room(hidden)
        outputs = jnp.zeros((options.steps_per_slice, words), jnp.int32)
        return dataclasses.replace(self, outputs=outputs, drafting=drafting)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inbox:
    """What the host sends in with a slice. A row without a request has a prompt length of 0."""

    requests: Requests  # prompts [rows, max_model_len], stop_ids [rows, stop_ids], and each other field [rows]
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
    submit_statuses: jax.Array  # int32 [rows]
    outbox: Outbox
    logprobs: jax.Array  # float32, like the tokens of the outbox
    top_logprobs: TopLogprobs | None
    aux: Any  # like them
    scores: Scores  # [steps, rows]
    num_running: jax.Array  # int32 []
    num_free: jax.Array  # int32 [], blocks
    num_of_kind: jax.Array  # int32 [kinds], steps so far, as the next seven
    num_saved_reads: jax.Array
    num_drafted: jax.Array
    num_accepted: jax.Array
    num_computed: jax.Array
    num_found: jax.Array
    num_recomputed: jax.Array
    num_preempted: jax.Array
    num_cached: jax.Array | None  # int32 [requests], as `Prefixes.num_found`; None: there is no prefix cache
    # For the host tier. None: there is none.
    serials: jax.Array | None = None  # int32 [blocks], of the blocks that the prefix cache lists, below zero if they
    # are free; 0: it does not list it
    salts: jax.Array | None = None  # int32 [1 + adapters], under which prompts are looked up
    room: jax.Array | None = None  # int32 [], blocks beyond what the requests may need for as many tokens as `growth`
