"""The device state of an engine, and the data that each slice exchanges with the host."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._allocator.prefix_cache import PrefixCache
from jaxpaged._grammar.vocabulary import Vocabulary
from jaxpaged._scheduler.records import Outbox, Requests
from jaxpaged._scheduler.scheduler import Scheduler
from jaxpaged._slice.drafting import Drafting
from jaxpaged._slice.grammars import Grammars
from jaxpaged._slice.logit_params import LogitParams
from jaxpaged._slice.model import Setup
from jaxpaged._slice.packing import num_words
from jaxpaged._slice.prefix_groups import SeatGroups
from jaxpaged._slice.prompt_aux import FoundBlocks, RowsAux
from jaxpaged._slice.sampling import TopLogprobs
from jaxpaged._slice.scoring import Scores, StepOutputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Stays on the device from slice to slice. Donated to each."""

    scheduler: Scheduler
    allocator: BlockAllocator
    caches: Any
    outputs: jax.Array  # int32 [steps, words], a packed `StepOutputs` for each step since the last report
    spans: jax.Array  # int32 [requests, 2], where the scored tokens of each request begin and end
    logit_params: LogitParams  # [requests]
    grammars: Grammars | None  # None: the engine has no vocabulary
    num_waited: jax.Array  # int32 [], steps since prompts began to wait for a step with a chunk
    num_of_kind: jax.Array  # int32 [kinds], steps of each kind so far, modulo 2^32
    seat_groups: SeatGroups | None  # None: no kind reads shared blocks once
    num_saved_reads: jax.Array  # int32 [], tokens that were not read again so far, modulo 2^32
    drafting: Drafting | None  # None: no drafts
    found_blocks: FoundBlocks | None  # None: no prompt_aux, or no prefix cache

    @classmethod
    def create(cls, setup: Setup, caches: Any, vocabulary: Vocabulary | None) -> State:
        """A state without requests, and without room for the model's outputs: see `with_outputs`."""
        options = setup.options
        num_seats, max_length, max_requests = options.max_num_seqs, options.max_model_len, options.max_requests
        num_drafts = options.num_speculative_tokens
        pool = dict(num_blocks=options.num_blocks, block_size=options.block_size)
        prefixes = None
        if options.prefix_cache and max_length >= options.block_size:  # else no block could ever be found
            prefixes = PrefixCache.create(**pool, secret=secrets.randbits(128), num_groups=len(options.windows))
        grammars = None
        if vocabulary is not None:
            room = dict(num_states=options.num_grammar_states, num_masks=options.num_grammar_masks)
            grammars = Grammars.create(vocabulary, **room, max_requests=max_requests)
        return cls(
            scheduler=Scheduler.create(
                max_requests=max_requests,
                num_seqs=num_seats,
                max_length=max_length,
                max_steps=options.steps_per_slice,
                num_stop_ids=options.num_stop_ids,
                num_drafts=num_drafts,
                num_adapters=options.num_adapters,
                prefix_cache=prefixes,
            ),
            allocator=BlockAllocator.create(
                **pool,
                num_seqs=num_seats,
                max_blocks_per_seq=-(-max_length // options.block_size),
                windows=options.windows,
            ),
            caches=caches,
            outputs=jnp.zeros((options.steps_per_slice, 0), jnp.int32),
            spans=jnp.zeros((max_requests, 2), jnp.int32),
            logit_params=LogitParams.create(max_requests, options),
            grammars=grammars,
            num_waited=jnp.zeros((), jnp.int32),
            num_of_kind=jnp.zeros(len(setup.kinds), jnp.int32),
            seat_groups=SeatGroups.create(num_seats) if setup.kinds[0].least_saved_reads is not None else None,
            num_saved_reads=jnp.zeros((), jnp.int32),
            drafting=Drafting.create(num_seats, num_drafts, max_requests) if num_drafts else None,
            found_blocks=FoundBlocks.create(options) if options.prompt_aux and prefixes is not None else None,
        )

    def with_outputs(self, setup: Setup, hidden: Any) -> State:
        """Adds room for the model's outputs. `hidden`: types of a token's hidden states, for a draft function."""
        outputs = jnp.zeros((len(self.outputs), num_words(StepOutputs.create(setup, self.scheduler))), jnp.int32)
        drafting = None if self.drafting is None else self.drafting.with_room(hidden)
        return dataclasses.replace(self, outputs=outputs, drafting=drafting)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inbox:
    """The host's input to a slice. A row without a request has a prompt length of 0."""

    requests: Requests  # prompts [rows, max_model_len], stop_ids [rows, stop_ids], all other fields [rows]
    families: Any  # int32 [rows], the same number for completions of one request
    spans: Any  # int32 [rows, 2], begin and end of the tokens to score; `prompts` has them too, after the prompt
    logit_params: LogitParams  # [rows]
    grammar_states: Any  # int32 [rows], the first state of each request, see `Grammars`
    aborts: Any  # bool [requests]
    forgets: Any  # bool [1 + adapters], whether the weights, or each adapter's, changed since the previous slice
    wants_logprobs: Any  # bool []
    num_steps: Any  # int32 [], the most steps of this slice


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
    """A slice's output for the host. Packed, so that it is one array that can be read during the next slice."""

    request_ids: jax.Array  # int32 [rows], one per row of the inbox
    submit_statuses: jax.Array  # int32 [rows]
    outbox: Outbox
    logprobs: jax.Array  # float32 [steps, draws], as the tokens of the outbox
    top_logprobs: TopLogprobs | None  # [steps, draws]
    aux: Any  # each leaf [steps, draws, ...]
    scores: Scores  # [steps, rows]
    rows_aux: RowsAux | None  # [steps, rows]; None: no prompt_aux
    found_blocks: FoundBlocks | None  # None: no prompt_aux, or no prefix cache
    num_running: jax.Array  # int32 []
    num_free: jax.Array  # int32 [], free blocks
    num_of_kind: jax.Array  # int32 [kinds], steps of each kind; like the next seven, so far and modulo 2^32
    num_saved_reads: jax.Array
    num_drafted: jax.Array
    num_accepted: jax.Array
    num_computed: jax.Array
    num_found: jax.Array  # tokens found in the prefix cache
    num_recomputed: jax.Array
    num_preempted: jax.Array
    num_cached: jax.Array | None  # int32 [requests], `Prefixes.num_found`; None: no prefix cache
    # For the host tier. None: no host tier.
    serials: jax.Array | None = None  # int32 [blocks], serials in the prefix cache, negated for free blocks; 0: not
    # cached
    salts: jax.Array | None = None  # int32 [1 + adapters], with which prompts are looked up
    room: jax.Array | None = None  # int32 [], blocks beyond the needs of all requests if each grows by `growth` tokens
