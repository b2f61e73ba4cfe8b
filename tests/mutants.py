"""Mistakes that the tests must find: each is made in a copy of the tree, where its tests must fail.

    python -m tests.mutants            all of them
    python -m tests.mutants rollback   mutants with this word in their name or property

Run it after a change to the code or the tests of a file named here. It prints a line for each mutant. It exits with 1
if a mutant survives, if its text does not occur exactly once, or if its tests fail without it.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPIED = "jaxpaged", "pallas_kernels", "benchmarks", "examples", "tests", "pyproject.toml"


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: str  # a file, "::", and an expression for pytest -k
    guards: str  # the safety property: ids, salts, masks, counts, endings or copies


COLLISIONS = "tests/allocator/test_prefix_cache.py::collide or collision"
CACHED_BLOCKS, BEGINNINGS = "jaxpaged/_allocator/cached_blocks.py", "jaxpaged/_allocator/prefix_match.py"
PLANNING, PROGRESS = "jaxpaged/_scheduler/planning.py", "jaxpaged/_scheduler/progress.py"
WINDOWS = "tests/allocator/test_windows.py::window"
LOADS = "tests/engine/test_engine.py::depend_on_the_load"
GROUPS, FOUND = (
    "jaxpaged/_slice/prefix_groups.py",
    "tests/engine/test_prefix_groups.py::seats_form or common_prefixes or partly_filled",
)
SORTED = "tests/engine/test_prefix_groups.py::sorted or stay_together or all_seats"
OF_ENGINE = "tests/attention/test_attention_prefix.py::of_an_engine"
SUBMISSION, MIXTURE = "jaxpaged/_scheduler/submission.py", "tests/scheduler/test_scheduler_machine.py::mixture"
SEATS = "jaxpaged/_scheduler/seats.py"
SAMPLING = "jaxpaged/_slice/sampling.py"
DRAFTING, DRAFTS = "jaxpaged/_slice/drafting.py", "tests/engine/test_drafts.py"
HOST_TIER = "jaxpaged/_engine/host_tier/tier.py"
PROMPT_AUX, ROWS = "jaxpaged/_engine/prompt_aux.py", "tests/engine/test_prompt_aux.py::cached or host or replace"
SCORING = "jaxpaged/_slice/scoring.py"
PROCESSING, PENALTIES, LISTS = (f"jaxpaged/_slice/{name}.py" for name in ("process_logits", "penalties", "token_lists"))
EQUATIONS, CHANGED = (
    "tests/engine/test_process_logits.py::equations or equal_bits",
    "tests/engine/test_changed_logits.py::given or function_gives",
)
LATENT = "pallas_kernels/latent/kernel.py"
GRAMMAR_MASKS, GRAMMAR_ROOM = "jaxpaged/_grammar/masks.py", "jaxpaged/_engine/grammar_room.py"
XLA_TILES, TREE, RUNS = (f"jaxpaged/_attention/{name}.py" for name in ("xla_tiles", "tree", "runs"))
SHARED_PREFIX, PACKED_OPTIONS = (
    "jaxpaged/_attention/shared_prefix.py",
    "tests/attention/test_packed.py::test_options and plain",
)
MUTANTS = (
    Mutant(
        "lookup: any salt",
        CACHED_BLOCKS,
        "(self.tags[ids] == tags[..., None]) & (self.salts[ids] == salts[:, None, None])",
        "(self.tags[ids] == tags[..., None])",
        COLLISIONS,
        "salts",
    ),
    Mutant(
        "lookup: any parent",
        CACHED_BLOCKS,
        ".all(axis=-1) & (self.parents[ids] == before)",
        ".all(axis=-1)",
        COLLISIONS,
        "ids",
    ),
    Mutant(
        "lookup: any tokens",
        CACHED_BLOCKS,
        "cached & (self.tokens[ids] == blocks).all(axis=-1)",
        "cached",
        COLLISIONS,
        "ids",
    ),
    Mutant(
        "insert: any salt",
        CACHED_BLOCKS,
        "        served &= salts[first // wanted.shape[1]] == salts[:, None]\n",
        "",
        COLLISIONS,
        "salts",
    ),
    Mutant(
        "insert: any parent",
        CACHED_BLOCKS,
        ".all(axis=-1) & (before.ravel()[firsts] == before)",
        ".all(axis=-1)",
        COLLISIONS,
        "ids",
    ),
    Mutant(
        "insert: any tokens",
        CACHED_BLOCKS,
        "(blocks.reshape(own.size, -1)[firsts] == blocks).all(axis=-1) & (before",
        "(before",
        COLLISIONS,
        "ids",
    ),
    Mutant(
        "clear: held blocks stay cached",
        "jaxpaged/_allocator/block_pool.py",
        "cached_at=jnp.full_like(self.cached_at, -1)",
        "cached_at=self.cached_at",
        "tests/allocator/test_prefix_cache.py::clear",
        "ids",
    ),
    Mutant(
        "rollback: into a shared block",
        "jaxpaged/_allocator/sharing.py",
        "(allocator.pool.extra_holders[last_ids] > 0) | (",
        "(",
        "tests/allocator/test_sharing.py::into_a_shared",
        "copies",
    ),
    Mutant(
        "append: a window passes a token too many",
        "jaxpaged/_allocator/state.py",
        "jnp.maximum(lengths - window + 1, 0)",
        "jnp.maximum(lengths - window + 2, 0)",
        WINDOWS,
        "ids",
    ),
    Mutant(
        "prefixes: what windows lack is found",
        BEGINNINGS,
        "is_end = there[0] & (last_missing < first).all(axis=0)",
        "is_end = there[0]",
        WINDOWS,
        "ids",
    ),
    Mutant(
        "prefixes: windows keep what they have passed",
        BEGINNINGS,
        "(column[None, None] >= first) & (column[None",
        "(column[None",
        WINDOWS,
        "ids",
    ),
    Mutant(
        "rollback: behind a window",
        "jaxpaged/_allocator/sharing.py",
        "        legal &= (lengths == 0) | (num_passed <= allocator.num_passed_at(lengths)).all(axis=0)\n",
        "        legal &= lengths >= 0\n",
        WINDOWS,
        "ids",
    ),
    Mutant(
        "drafts: the logits of another row",
        SCORING,
        "(step.last - step.num_drafts)[:, None]",
        "step.last[:, None]",
        f"{DRAFTS}::without_drafts",
        "ids",
    ),
    Mutant(
        "drafts: the hidden state of the request before",
        DRAFTING,
        "is_own = drafting.owners == scheduler.seated",
        "is_own = scheduler.seated >= 0",
        f"{DRAFTS}::hidden_states",
        "ids",
    ),
    Mutant(
        "drafts: the text of any request",
        DRAFTING,
        "(self.families[None] == families) & ",
        "",
        f"{DRAFTS}::each_others_texts",
        "salts",
    ),
    Mutant("scheduler: the seated reserve nothing", PLANNING, " + owed.sum(dtype=jnp.int32)", "", MIXTURE, "counts"),
    Mutant(
        "scheduler: drafts take the blocks of others",
        PLANNING,
        "jnp.where(fits, num_drafts, ",
        "jnp.where(True, num_drafts, ",
        MIXTURE,
        "counts",
    ),
    Mutant("scheduler: accepts any draft", PROGRESS, "(tokens[:, :-1] == drafts) & ", "", MIXTURE, "counts"),
    Mutant("scheduler: goes on behind a stop", PROGRESS, " & ~is_stop[:, :-1]", "", MIXTURE, "endings"),
    Mutant(
        "scheduler: rejected drafts stay",
        PROGRESS,
        "jnp.where(is_sampled, num_known - 1, allocator.lengths)",
        "allocator.lengths",
        MIXTURE,
        "counts",
    ),
    Mutant(
        "scheduler: preempts the first in rank",
        PLANNING,
        " & (ranks != ranks.min())",
        "",
        "tests/scheduler/test_scheduler_machine.py::never_a_victim",
        "endings",
    ),
    Mutant("scheduler: stop ids do nothing", PROGRESS, "(stop_ids >= 0)", "(stop_ids > 99)", MIXTURE, "endings"),
    Mutant("scheduler: a token too many", PROGRESS, "num_known >= per_seat", "num_known > per_seat", MIXTURE, "counts"),
    Mutant(
        "scheduler: the ended keep their blocks",
        PROGRESS,
        "        allocator = allocator.free(leaves)\n",
        "        pass\n",
        MIXTURE,
        "endings",
    ),
    Mutant(
        "scheduler: the aborted keep their blocks",
        PROGRESS,
        "return aborted, allocator.free(leaves)",
        "return aborted, allocator",
        MIXTURE,
        "endings",
    ),
    Mutant(
        "scheduler: commits what was aborted",
        PROGRESS,
        "step.is_sampled & is_here",
        "step.is_sampled",
        MIXTURE,
        "endings",
    ),
    Mutant(
        "scheduler: the finished keep their places",
        PROGRESS,
        "jnp.where(is_finished, RequestStatus.FREE, scheduler.statuses)",
        "scheduler.statuses",
        MIXTURE,
        "endings",
    ),
    Mutant(
        "scheduler: takes what never fits",
        SUBMISSION,
        "most_blocks(num_blocks) > allocator.num_blocks - 1",
        "most_blocks(num_blocks) > 99",
        "tests/scheduler/test_scheduler.py::never_be_served",
        "counts",
    ),
    Mutant(
        "prefixes: forgets nothing",
        "jaxpaged/_scheduler/scheduler.py",
        "salt + len(salt), salt)",
        "salt, salt)",
        MIXTURE,
        "salts",
    ),
    Mutant(
        "adapters: prefixes are everybody's",
        "jaxpaged/_scheduler/state.py",
        "self.salt.at[adapters + 1]",
        "self.salt.at[0 * adapters]",
        MIXTURE,
        "salts",
    ),
    Mutant(
        "alternatives: those of the row before",
        "jaxpaged/_engine/requests.py",
        "leaf[start:end] for leaf in leaves",
        "leaf[start - 1 : end - 1] for leaf in leaves",
        "tests/engine/test_top_logprobs.py::models and plenty",
        "ids",
    ),
    Mutant(
        "adapters: a row takes its seat's neighbour's",
        "jaxpaged/_slice/step.py",
        "step.sampling.adapter.at[step.seats]",
        "step.sampling.adapter.at[step.seats // 2]",
        "tests/engine/test_adapters.py::batch_invariant",
        "ids",
    ),
    Mutant(
        "engine: few seats with the tables of others",
        "jaxpaged/_slice/step.py",
        "step.seats if kind.is_narrow",
        "jnp.arange(kind.width, dtype=jnp.int32) if kind.is_narrow",
        LOADS,
        "ids",
    ),
    Mutant(
        "groups: other blocks before the last",
        GROUPS,
        "(tables == tables[leaders]) |",
        "(tables == tables) |",
        FOUND,
        "ids",
    ),
    Mutant(
        "groups: rows of another seat",
        GROUPS,
        "[seats] - starts[:-1], owner)",
        "[seats] - starts[1:], owner)",
        SORTED,
        "ids",
    ),
    Mutant(
        "attention: blocks of another group",
        SHARED_PREFIX,
        "block_tables=call.block_tables[groups.first],",
        "block_tables=call.block_tables[groups.first - 1],",
        OF_ENGINE,
        "ids",
    ),
    Mutant(
        "attention: an empty group has blocks",
        SHARED_PREFIX,
        "jnp.where(groups.starts[:-1] < groups.starts[1:], num_blocks[groups.first], 0)",
        "num_blocks[groups.first]",
        OF_ENGINE,
        "masks",
    ),
    Mutant(
        "attention: sequences of no group take part",
        SHARED_PREFIX,
        "(num_blocks > 0)[:, None]",
        "(num_blocks >= 0)[:, None]",
        OF_ENGINE,
        "masks",
    ),
    Mutant(
        "engine: an abort is not sent",
        "jaxpaged/_engine/books.py",
        "self._aborts.append(row.place)",
        "pass",
        "tests/engine/test_engine.py::abort",
        "endings",
    ),
    Mutant(
        "host tier: blocks of other weights are kept",
        HOST_TIER,
        "if not keys or keys[-1] in self._places or run.salt not in self._salts:",
        "if not keys or keys[-1] in self._places:",
        "tests/engine/test_host_tier.py::another_salt",
        "salts",
    ),
    Mutant(
        "host tier: what was lost within the slice is taken to be there",
        HOST_TIER,
        "return abs(self._serials[place]) == serial",
        "return serial > 1",
        "tests/engine/test_host_tier.py::could_not_be_inserted",
        "ids",
    ),
    Mutant(
        "host tier: what comes back goes out without room for it",
        HOST_TIER,
        "self._lacks_room |= self._needed(row) > self._room_left",
        "pass",
        "tests/engine/test_host_tier.py::once_there_is_room",
        "counts",
    ),
    Mutant(
        "host tier: what was overwritten before its copy is kept",
        HOST_TIER,
        "min(begin + self._copies.in_page, num_found)",
        "begin + self._copies.in_page",
        "tests/engine/test_host_tier.py::overwritten_before",
        "ids",
    ),
    Mutant(
        "host tier: what arrived outlives the weights",
        HOST_TIER,
        "(self._coming, self._arrived)",
        "(self._coming, set[int]())",
        "tests/engine/test_host_tier.py::arrived_blocks_are_forgotten",
        "salts",
    ),
    Mutant(
        "host tier: blocks are inserted after a gap",
        "jaxpaged/_slice/host_pages.py",
        "jnp.where(num_found >= begins, ends - num_found, 0)",
        "ends - num_found",
        "tests/engine/test_host_tier.py::after_a_gap",
        "ids",
    ),
    Mutant(
        "engine: more rows than the device has places",
        "jaxpaged/_engine/books.py",
        "min(most, self._max_requests - self._num_sent)",
        "most",
        "tests/engine/test_books.py::no_more",
        "counts",
    ),
    Mutant(
        "sampling: what top_p cuts is drawn",
        SAMPLING,
        "axis=-1) >= enough[:, None]",
        "axis=-1) > jnp.inf",
        "tests/engine/test_sampling.py::token_frequencies",
        "masks",
    ),
    Mutant(
        "sampling: tokens past the vocabulary",
        SAMPLING,
        "constant_values=-jnp.inf",
        "constant_values=0",
        "tests/engine/test_sampling.py::token_frequencies",
        "masks",
    ),
    Mutant(
        "prefixes: old blocks inserted as new ones",
        SEATS,
        "insert_blocks(allocator, blocks, num_full, prefixes.salts)",
        "insert_blocks(allocator, blocks, num_full, prefixes.salts * 0 + prefixes.salt)",
        "tests/engine/test_engine.py::old_weights_began",
        "salts",
    ),
    Mutant(
        "engine: sleep forgets to forget",
        "jaxpaged/_engine/runner.py",
        "            self.books.forget()  # first",
        "            # first",
        "tests/engine/test_rollout.py::sleeps",
        "salts",
    ),
    Mutant(
        "engine: an old abort hits who got the place",
        "jaxpaged/_engine/books.py",
        "self._aborts = [place for place in self._aborts if place in self.on_device]",
        "pass",
        "tests/engine/test_engine_trouble.py::spares_the_next_request",
        "ids",
    ),
    Mutant(
        "engine: a lost one goes on",
        "jaxpaged/_engine/runner.py",
        "raise StateLostError from sent.failure or failure",
        "pass",
        "tests/engine/test_engine_trouble.py::has_ended_raises or model_fails_raises or fork_raises",
        "endings",
    ),
    Mutant(
        "engine: a slice runs behind a failed one",
        "jaxpaged/_engine/runner.py",
        "raise self._unread_failure\n        try:",
        "pass\n        try:",
        "tests/engine/test_engine_trouble.py::after_a_failed",
        "endings",
    ),
    Mutant(
        "engine: a slice that failed forgets aborts",
        "jaxpaged/_engine/books.py",
        "self._aborts = failed.aborts + self._aborts",
        "pass",
        "tests/engine/test_books.py::restored",
        "endings",
    ),
    Mutant(
        "engine: a slice may read weights after generate has returned",
        "jaxpaged/_engine/runner.py",
        "if not self.books.num_open:",
        "if False:",
        "tests/engine/test_engine_trouble.py::donated",
        "copies",
    ),
    Mutant(
        "engine: a stream that is collected is dropped in the middle of a slice",
        "jaxpaged/_engine/books.py",
        "if not self._is_undisturbed:",
        "if True:",
        "tests/engine/test_engine_trouble.py::collected",
        "endings",
    ),
    Mutant(
        "host tier: blocks without room are written",
        "jaxpaged/_slice/host_pages.py",
        "num_there = num_found + jnp.where(ok, num_missing, 0)",
        "num_there = num_found + num_missing",
        "tests/engine/test_host_tier.py::without_room",
        "copies",
    ),
    Mutant(
        "engine: a stream that is left goes on",
        "jaxpaged/_engine/engine.py",
        "            self._books.drop(request_ids)\n",
        "            pass\n",
        "tests/engine/test_engine_trouble.py::abandoned_stream_leaves",
        "endings",
    ),
    Mutant(
        "server: a client that left is not noticed",
        "examples/lib/http_server.py",
        "self.loop.call_later(PROBE_SECONDS, self._probe)",
        "pass",
        "tests/examples/test_serve_connections.py::of_a_disconnected_client",
        "endings",
    ),
    Mutant(
        "attention: a window of one more, xla",
        XLA_TILES,
        "visible &= distance < options.sliding_window",
        "visible &= distance <= options.sliding_window",
        "tests/attention/test_attention.py::TestXla and test_options and window",
        "masks",
    ),
    Mutant(
        "attention: unseen slots are read",
        XLA_TILES,
        "jnp.where(seen[..., None, None], x, jnp.zeros_like(x))",
        "x",
        "tests/attention/test_attention.py::TestXla and test_options and plain",
        "masks",
    ),
    Mutant(
        "attention: a deeper token is hidden",
        TREE,
        "jnp.maximum(distances, 0), distances",
        "distances, distances",
        "tests/attention/test_tree.py::no_tree",
        "masks",
    ),
    Mutant(
        "attention: runs end with their sequence",
        RUNS,
        "lengths = first[runs.seqs] + runs.offsets + runs.counts",
        "lengths = call.lengths[runs.seqs]",
        PACKED_OPTIONS,
        "masks",
    ),
    Mutant(
        "attention: padding before the first token",
        RUNS,
        " | (tokens < runs.starts[0])",
        "",
        PACKED_OPTIONS,
        "masks",
    ),
    Mutant(
        "prefix groups: any blocks are the same",
        "jaxpaged/_allocator/prefix_groups.py",
        "differs = (tables != tables[before]) | (",
        "differs = (",
        "tests/allocator/test_prefix_groups.py::share_nothing",
        "ids",
    ),
    Mutant(
        "attention: sinks of the shared call count",
        SHARED_PREFIX,
        "options = dataclasses.replace(call.options, sinks=None)",
        "options = call.options",
        "tests/attention/test_attention_prefix.py::test_options and sinks",
        "counts",
    ),
    Mutant(
        "prefix groups: a new token among the shared",
        "jaxpaged/_allocator/block_allocator.py",
        "jnp.maximum(self.lengths - jnp.diff(starts), 0)",
        "self.lengths",
        "tests/allocator/test_prefix_groups.py::new_token",
        "masks",
    ),
    Mutant(
        "attention: runs of a prompt see all of it",
        RUNS,
        "call.lengths[:, None] - tokens_after[None]",
        "call.lengths[:, None] - 0 * tokens_after[None]",
        "tests/attention/test_runs.py::each_run",
        "masks",
    ),
    Mutant(
        "latents: new tokens count twice",
        "jaxpaged/_flax/latent_attention.py",
        "history = allocator.lengths - counts",
        "history = allocator.lengths",
        "tests/test_latent_modules.py::with_expanded_heads",
        "counts",
    ),
    Mutant(
        "latents: padding rows of a history count as new",
        "jaxpaged/_flax/latent_attention.py",
        "is_new.sum(axis=1, dtype=jnp.int32)",
        "jnp.int32(slots.shape[1])",
        "tests/test_padding.py::LatentAttention and expanded",
        "masks",
    ),
    Mutant(
        "latents: a window is lost among new tokens",
        "jaxpaged/_flax/latent_attention.py",
        "step.tree_mask, step.prefix_groups, settings.sliding_window, num_partitions",
        "step.tree_mask, step.prefix_groups, num_partitions",
        "tests/test_latent_modules.py::a_window_holds",
        "masks",
    ),
    Mutant(
        "attention: short runs read what a window has passed",
        RUNS,
        "runs.counts if call.causal and call.options.sliding_window is not None else None",
        "None",
        "tests/attention/test_packed.py::passed_are_never",
        "ids",
    ),
    Mutant(
        "attention: padding reads what a window has passed",
        "jaxpaged/_attention/attend.py",
        "        allocator = _without_passed(allocator)\n",
        "        pass\n",
        "tests/test_padding.py::group and not Attention",
        "ids",
    ),
    Mutant(
        "latents: unseen values are not zeroed",
        LATENT,
        "pl.when(self._is_partial(i))(lambda: self._zero_unseen(i, values))",
        "",
        "tests/kernels/test_latent_many_heads.py::test_blocks",
        "masks",
    ),
    Mutant(
        "attention: packed tokens one too far",
        RUNS,
        "packed_positions(starts, call.lengths, tokens=tokens) + 1 if",
        "packed_positions(starts, call.lengths, tokens=tokens) + 2 if",
        "tests/kernels/test_latent_many_heads.py::test_packed_tokens",
        "ids",
    ),
    Mutant(
        "kernels: tiles of a plan overflow",
        "pallas_kernels/common/partition_plan.py",
        "2**30 // seqs",
        "2**30",
        "tests/kernels/test_plan.py::breaks_a_plan",
        "counts",
    ),
    Mutant(
        "kernels: a window of one more",
        "pallas_kernels/decode/logits.py",
        "visible = jnp.logical_and(visible, distance < walk.window)",
        "visible = jnp.logical_and(visible, distance <= walk.window)",
        "tests/kernels/test_paged_decode.py::test_options and window and not partitions",
        "masks",
    ),
    Mutant(
        "kernels: a query sees its siblings",
        "pallas_kernels/decode/logits.py",
        "jnp.logical_or(word_of != word, bit == 1)",
        "jnp.logical_or(word_of >= word, bit == 1)",
        "tests/kernels/test_tree_masks.py::no_tree",
        "masks",
    ),
    Mutant(
        "kernels: past the end partials count twice",
        "pallas_kernels/decode/results.py",
        "jnp.where(index < end, 0.0, LOWEST)",
        "jnp.where(index < end, 0.0, 0.0)",
        "tests/kernels/test_paged_decode.py::more_partitions_than",
        "counts",
    ),
    Mutant(
        "kernels: the slot past the end is read",
        "pallas_kernels/decode/walk.py",
        "seen = tokens < self.length",
        "seen = tokens <= self.length",
        "tests/kernels/test_paged_decode.py::test_options and plain and not partitions",
        "masks",
    ),
    Mutant(
        "grammar: states share masks too soon",
        GRAMMAR_MASKS,
        "np.concatenate([group[:, None], group[columns]], axis=1)",
        "group[columns]",
        "tests/grammar/test_grammar.py::tokens_that_lead",
        "masks",
    ),
    Mutant(
        "grammar: a token leads into a dead end",
        GRAMMAR_MASKS,
        "allows_text[origin, text] = is_live[after]",
        "allows_text[origin, text] = True",
        "tests/grammar/test_grammar.py::small_vocabulary",
        "masks",
    ),
    Mutant(
        "grammar: an end is no end",
        "jaxpaged/_grammar/minimise.py",
        "for states in (is_end, ~is_end) if states.any()",
        "for states in (is_end | ~is_end,)",
        "tests/grammar/test_regex.py::match_as_in_python",
        "endings",
    ),
    Mutant(
        "grammar: a surrogate has an encoding",
        "jaxpaged/_grammar/characters.py",
        "taken = union([*ranges, SURROGATES])",
        "taken = union(ranges)",
        "tests/grammar/test_regex.py::encodings",
        "masks",
    ),
    Mutant(
        "grammar room: a small grammar overtakes",
        GRAMMAR_ROOM,
        "if self.is_full or (place :=",
        "if (place :=",
        "tests/engine/test_grammars.py::stays_in_the_pool",
        "counts",
    ),
    Mutant(
        "grammar room: in use, and evicted",
        GRAMMAR_ROOM,
        "if other not in self._used]",
        "if other is not grammar]",
        "tests/engine/test_grammars.py::stays_in_the_pool",
        "ids",
    ),
    Mutant(
        "grammars: a stop token ends any state",
        "jaxpaged/_slice/grammars.py",
        "stop_ids, pool.is_end[states][:, None])",
        "stop_ids, True)",
        "tests/engine/test_grammars.py::stop_tokens_end",
        "endings",
    ),
    Mutant(
        "grammars: one token of a step counts",
        "jaxpaged/_slice/grammars.py",
        "range(before.num_drafts + 1)",
        "range(1)",
        "tests/engine/test_grammars.py::whatever_the_load and plenty",
        "masks",
    ),
    Mutant(
        "penalties: a draft more",
        PENALTIES,
        "places < context.lengths",
        "places <= context.lengths",
        EQUATIONS,
        "counts",
    ),
    Mutant("penalties: drafts do not count", PENALTIES, "tokens == draft", "tokens < -draft", EQUATIONS, "counts"),
    Mutant("penalties: the prompt is new", PENALTIES, "is_known & ~is_prompt", "is_known", EQUATIONS, "counts"),
    Mutant("bad words: from the prompt", LISTS, " & (places >= rows_of", " | (places < rows_of", EQUATIONS, "masks"),
    Mutant(
        "prompt aux: none of found blocks",
        PROMPT_AUX,
        "self._find(on_device[place], ids, ends[place])",
        "pass",
        ROWS,
        "copies",
    ),
    Mutant(
        "prompt aux: found blocks are read late",
        PROMPT_AUX,
        "self._write(rows, begin, begin := num_steps, ends, on_device)",
        "pass",
        ROWS,
        "copies",
    ),
    Mutant("prompt aux: stays behind", PROMPT_AUX, "        self._move(moves)\n", "", ROWS, "copies"),
    Mutant(
        "prompt aux: of replaced blocks",
        "jaxpaged/_slice/prompt_aux.py",
        " | (is_full & (old != new)).any(axis=1)",
        "",
        ROWS,
        "copies",
    ),
    Mutant(
        "logits: given tokens are processed", PROCESSING, "where((given >= 0)", "where((given >= 99)", CHANGED, "masks"
    ),
)


def passes(tree: Path, tests: str) -> bool:
    file, words = tests.split("::")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", file, "-k", words]
    environment = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{tree / 'examples'}"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):  # 2 to 5: pytest could not run, or no test was selected
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def verdict(tree: Path, mutant: Mutant) -> str:
    path = tree / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        return f"its text occurs {text.count(mutant.old)} times in {mutant.file}"
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        return "SURVIVES" if passes(tree, mutant.tests) else "killed"
    finally:
        path.write_text(text)


def main(words: list[str]) -> int:
    mutants = [mutant for mutant in MUTANTS if all(word in f"{mutant.name} {mutant.guards}" for word in words)]
    verdicts = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tree / name)
        failing = [tests for tests in dict.fromkeys(mutant.tests for mutant in mutants) if not passes(tree, tests)]
        if failing:
            print(f"without any mutant these fail: {failing}")
            return 1
        for mutant in mutants:
            start = time.perf_counter()
            verdicts.append(verdict(tree, mutant))
            print(f"{mutant.name:38} {verdicts[-1]:10} {time.perf_counter() - start:4.0f} s", flush=True)
    killed = verdicts.count("killed")
    print(f"{killed} of {len(mutants)} mutants killed")
    return int(killed < len(mutants))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
