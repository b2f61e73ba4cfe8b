"""Mistakes that the tests must find: each is made in a copy of the tree, and the tests named for it must fail there.

    python -m tests.mutants            all of them
    python -m tests.mutants rollback   those with the word in their name

Run it after a change to the code or the tests of a file named here. It prints a line for each and exits with 1 where a
mutant survives, where its text is not found exactly once, or where the tests fail without it.
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
    tests: str  # a file, and words for pytest -k behind "::"


COLLISIONS = "tests/allocator/test_prefix_cache.py::collide or collision"
LISTING, BEGINNINGS = "jaxpaged/_allocator/listing.py", "jaxpaged/_allocator/beginnings.py"
PLANNING, PROGRESS = "jaxpaged/_scheduler/planning.py", "jaxpaged/_scheduler/progress.py"
WINDOWS = "tests/allocator/test_windows.py::window"
KINDS, NEXT_KIND = "jaxpaged/_engine/kinds.py", "tests/engine/test_kinds.py::next"
LOADS = "tests/engine/test_engine.py::depend_on_the_load and 16"
GROUPS, FOUND = (
    "jaxpaged/_engine/prefix_groups.py",
    "tests/engine/test_prefix_groups.py::seats_form or what_is or not_full",
)
SORTED, PAYS = (
    "tests/engine/test_prefix_groups.py::sorted or stay_together or all_seats",
    "tests/engine/test_kinds.py::pays",
)
OF_ENGINE = "tests/attention/test_attention_prefix.py::of_an_engine"
SUBMISSION, MIXTURE = "jaxpaged/_scheduler/submission.py", "tests/scheduler/test_scheduler_machine.py::mixture"
SEATS = "jaxpaged/_scheduler/seats.py"
SAMPLING = "jaxpaged/_engine/sampling.py"
DRAFTING, DRAFTS = "jaxpaged/_engine/drafting.py", "tests/engine/test_drafts.py"
HOST_TIER = "jaxpaged/_engine/host_tier.py"
SCORING = "jaxpaged/_engine/scoring.py"
FORGOTTEN = "tests/engine/test_engine.py::weights_change"
LATENT = "pallas_kernels/latent/kernel.py"
XLA, XLA_TILES, TREE, RUNS = (f"jaxpaged/_attention/{name}.py" for name in ("xla", "xla_tiles", "tree", "runs"))
SHARED_PREFIX, PACKED_OPTIONS = (
    "jaxpaged/_attention/shared_prefix.py",
    "tests/attention/test_packed.py::test_options and plain",
)
MUTANTS = (
    Mutant(
        "lookup: any salt",
        LISTING,
        "(self.tags[ids] == tags[..., None]) & (self.salts[ids] == salts[:, None, None])",
        "(self.tags[ids] == tags[..., None])",
        COLLISIONS,
    ),
    Mutant(
        "lookup: any parent",
        LISTING,
        ".all(axis=-1) & (self.parents[ids] == before)",
        ".all(axis=-1)",
        COLLISIONS,
    ),
    Mutant(
        "lookup: any tokens",
        LISTING,
        "listed & (self.tokens[ids] == blocks).all(axis=-1)",
        "listed",
        COLLISIONS,
    ),
    Mutant(
        "insert: any salt",
        LISTING,
        "        served &= salts[first // wanted.shape[1]] == salts[:, None]\n",
        "",
        COLLISIONS,
    ),
    Mutant(
        "insert: any parent",
        LISTING,
        ".all(axis=-1) & (before.ravel()[firsts] == before)",
        ".all(axis=-1)",
        COLLISIONS,
    ),
    Mutant(
        "insert: any tokens",
        LISTING,
        "(blocks.reshape(own.size, -1)[firsts] == blocks).all(axis=-1) & (before",
        "(before",
        COLLISIONS,
    ),
    Mutant(
        "clear: held blocks stay cached",
        "jaxpaged/_allocator/block_pool.py",
        "cached_at=jnp.full_like(self.cached_at, -1)",
        "cached_at=self.cached_at",
        "tests/allocator/test_prefix_cache.py::clear",
    ),
    Mutant(
        "rollback: into a shared block",
        "jaxpaged/_allocator/sharing.py",
        "(allocator.pool.extra_holders[last_ids] > 0) | (",
        "(",
        "tests/allocator/test_sharing.py::into_a_shared",
    ),
    Mutant(
        "append: a window passes a token too many",
        "jaxpaged/_allocator/state.py",
        "jnp.maximum(lengths - window + 1, 0)",
        "jnp.maximum(lengths - window + 2, 0)",
        WINDOWS,
    ),
    Mutant(
        "append: a window passes at the new length",
        "jaxpaged/_allocator/block_allocator.py",
        "self = self.let_go_passed(legal",
        "self = dataclasses.replace(self, lengths=lengths).let_go_passed(legal",
        WINDOWS,
    ),
    Mutant(
        "prefixes: what windows lack is found",
        BEGINNINGS,
        "is_end = there[0] & (last_missing < first).all(axis=0)",
        "is_end = there[0]",
        WINDOWS,
    ),
    Mutant(
        "prefixes: windows keep what they have passed",
        BEGINNINGS,
        "(column[None, None] >= first) & (column[None",
        "(column[None",
        WINDOWS,
    ),
    Mutant(
        "rollback: behind a window",
        "jaxpaged/_allocator/sharing.py",
        "        legal &= (lengths == 0) | (num_passed <= allocator.num_passed_at(lengths)).all(axis=0)\n",
        "        legal &= lengths >= 0\n",
        WINDOWS,
    ),
    Mutant(
        "kinds: a token without a row", KINDS, "(num_needing > kind.width)", "(num_needing - 1 > kind.width)", NEXT_KIND
    ),
    Mutant(
        "kinds: waits though the widest step is full", KINDS, "= is_full | ((num_pending", "= ((num_pending", NEXT_KIND
    ),
    Mutant(
        "kinds: a chunk without prompts",
        KINDS,
        "((num_pending > 0) & (is_idle",
        "((num_pending >= 0) & (is_idle",
        NEXT_KIND,
    ),
    Mutant("kinds: waits though seats are idle", KINDS, "(is_idle | (num_waited", "((num_waited", NEXT_KIND),
    Mutant(
        "kinds: a chunk ends no wait", KINDS, " & ~took_chunk, num", ", num", "tests/engine/test_kinds.py::wait_ends"
    ),
    Mutant(
        "kinds: waits for nothing", KINDS, "(num_pending > 0) & ~took", "~took", "tests/engine/test_kinds.py::wait_ends"
    ),
    Mutant(
        "kinds: drafts take the rows of prompts",
        KINDS,
        "widths - num_needing - num_pending",
        "widths - num_needing",
        f"{DRAFTS}::pays",
    ),
    Mutant(
        "kinds: drafts where there is no row",
        KINDS,
        "jnp.where(widths >= num_needing, pace, -1.0)",
        "pace",
        f"{DRAFTS}::pays",
    ),
    Mutant(
        "kinds: drafts in single tokens",
        KINDS,
        "jnp.asarray([kind.draws_all for kind in kinds])",
        "True",
        f"{DRAFTS}::pays",
    ),
    Mutant(
        "drafts: the logits of another row",
        SCORING,
        "(step.last - step.num_drafts)[:, None]",
        "step.last[:, None]",
        f"{DRAFTS}::without_drafts",
    ),
    Mutant(
        "drafts: only the newest row",
        SCORING,
        "(step.last - step.num_drafts)[:, None] + jnp.arange(num_drafts + 1, dtype=jnp.int32)[None]",
        "step.last[:, None] + jnp.zeros(num_drafts + 1, jnp.int32)[None]",
        f"{DRAFTS}::right_drafts",
    ),
    Mutant(
        "drafts: what is known of others",
        "jaxpaged/_engine/slices.py",
        "state.drafting.begun(request_ids, jnp.asarray(inbox.families))",
        "state.drafting",
        f"{DRAFTS}::right_drafts",
    ),
    Mutant(
        "drafts: nothing is learnt",
        "jaxpaged/_engine/slices.py",
        "drafting.learnt(step, after - before, is_silent)",
        "drafting",
        f"{DRAFTS}::right_drafts",
    ),
    Mutant(
        "drafts: the hidden state of the last draft",
        DRAFTING,
        " - step.num_drafts + jnp.maximum(num_new - 1, 0)",
        "",
        f"{DRAFTS}::hidden_states",
    ),
    Mutant(
        "drafts: the hidden state of the request before",
        DRAFTING,
        "is_own = drafting.owners == scheduler.seated",
        "is_own = scheduler.seated >= 0",
        f"{DRAFTS}::hidden_states",
    ),
    Mutant("drafts: never again", DRAFTING, "KEPT = 0.95", "KEPT = 1.0", f"{DRAFTS}::right_again"),
    Mutant(
        "drafts: worth any row",
        DRAFTING,
        "(drafting.chances(scheduler) * (num_needing + row_cost) >= num_needing)",
        "True",
        f"{DRAFTS}::worth_their_rows",
    ),
    Mutant(
        "drafts: behind the newest token",
        DRAFTING,
        "index < num_in_text[:, None] - 1",
        "index < num_in_text[:, None]",
        f"{DRAFTS}::followed",
    ),
    Mutant(
        "drafts: the text of any request",
        DRAFTING,
        "(self.families[None] == of_seats) & ",
        "",
        f"{DRAFTS}::each_others_texts",
    ),
    Mutant("drafts: its own text twice", DRAFTING, " & (every != seated[:, None])", "", f"{DRAFTS}::each_others_texts"),
    Mutant(
        "drafts: of the text that has fewer",
        DRAFTING,
        "(more_equal > num_equal)",
        "(more_equal < num_equal)",
        f"{DRAFTS}::exact_engine",
    ),
    Mutant(
        "drafts: the first place",
        DRAFTING,
        "num_equal * text.shape[1] + index",
        "num_equal * text.shape[1]",
        f"{DRAFTS}::followed",
    ),
    Mutant(
        "drafts: of any length",
        DRAFTING,
        "LEAST_SUFFIX, MOST_SUFFIX = 2, 8",
        "LEAST_SUFFIX, MOST_SUFFIX = 3, 8",
        f"{DRAFTS}::followed",
    ),
    Mutant("kinds: waits for ever", KINDS, "(is_idle | (num_waited >= LONGEST_WAIT))", "is_idle", NEXT_KIND),
    Mutant("kinds: a narrow chunk without room", KINDS, "is_full | (room <= 0) |", "is_full |", NEXT_KIND),
    Mutant("kinds: narrow chunks that cost more", KINDS, " * few > widest)", " * few > 99 * widest)", NEXT_KIND),
    Mutant("kinds: narrow chunks of a full step", KINDS, "is_wide = is_full | (room", "is_wide = (room", NEXT_KIND),
    Mutant(
        "scheduler: one token a seat in narrow mixed steps",
        PLANNING,
        "    if not is_mixed:\n        return one\n",
        "    if not is_mixed or width < num_seats:\n        return one\n",
        MIXTURE,
    ),
    Mutant(
        "scheduler: narrow steps without the first in rank",
        PLANNING,
        "jnp.where(before(one) < width, one, 0)",
        "jnp.where(before(one) > 0, one, 0)",
        MIXTURE,
    ),
    Mutant("scheduler: admits after a refusal", PLANNING, " & ~scheduler.was_refused", "", MIXTURE),
    Mutant(
        "scheduler: admits by id",
        SUBMISSION,
        "jnp.lexsort((arrivals, keys)).astype(jnp.int32)",
        "jnp.arange(num_requests, dtype=jnp.int32)",
        MIXTURE,
    ),
    Mutant(
        "scheduler: priority does nothing",
        SUBMISSION,
        "arrival - jnp.clip(new.priorities, -MAX_PRIORITY, MAX_PRIORITY)",
        "arrival",
        MIXTURE,
    ),
    Mutant(
        "scheduler: no spare block",
        PLANNING,
        "allocator.num_blocks_for(num_known) + 1, allocator",
        "allocator.num_blocks_for(num_known), allocator",
        MIXTURE,
    ),
    Mutant(
        "scheduler: a spare block beyond the limit",
        PLANNING,
        "jnp.minimum(allocator.num_blocks_for(num_known) + 1, allocator.num_blocks_for(limits - 1))",
        "allocator.num_blocks_for(num_known) + 1",
        MIXTURE,
    ),
    Mutant("scheduler: the seated reserve nothing", PLANNING, " + owed.sum(dtype=jnp.int32)", "", MIXTURE),
    Mutant(
        "scheduler: enters with a token beyond the limit",
        PLANNING,
        "jnp.minimum(num_known + 1, limits - 1)",
        "num_known + 1",
        MIXTURE,
    ),
    Mutant(
        "scheduler: shares rows by seat",
        PLANNING,
        "ranks[None] < ranks[:, None], counts",
        "jnp.tri(len(ranks), k=-1, dtype=jnp.bool_), counts",
        MIXTURE,
    ),
    Mutant(
        "scheduler: a draft beyond the limit",
        PLANNING,
        "(turn <= room[:, None])",
        "(turn <= room[:, None] + 1)",
        MIXTURE,
    ),
    Mutant(
        "scheduler: drafts behind a gap", PLANNING, "(jnp.cumsum(drafts < 0, axis=1) == 0)", "(drafts >= 0)", MIXTURE
    ),
    Mutant(
        "scheduler: drafts without rows", PLANNING, "is_wanted) <= num_rows)", "is_wanted) <= num_rows + 1)", MIXTURE
    ),
    Mutant(
        "scheduler: drafts seat by seat",
        PLANNING,
        "jnp.cumsum(is_wanted.T.reshape(-1), dtype=jnp.int32).reshape(is_wanted.shape[::-1]).T",
        "jnp.cumsum(is_wanted.reshape(-1), dtype=jnp.int32).reshape(is_wanted.shape)",
        MIXTURE,
    ),
    Mutant(
        "scheduler: drafts take the blocks of others",
        PLANNING,
        "jnp.where(fits, num_drafts, ",
        "jnp.where(True, num_drafts, ",
        MIXTURE,
    ),
    Mutant("scheduler: accepts any draft", PROGRESS, "(tokens[:, :-1] == drafts) & ", "", MIXTURE),
    Mutant("scheduler: goes on behind a stop", PROGRESS, " & ~is_stop[:, :-1]", "", MIXTURE),
    Mutant(
        "scheduler: accepts what was not drafted",
        PROGRESS,
        "(num_known + step.num_drafts)[:, None]",
        "(num_known + tokens.shape[1])[:, None]",
        MIXTURE,
    ),
    Mutant(
        "scheduler: rejected drafts stay",
        PROGRESS,
        "jnp.where(is_sampled, num_known - 1, allocator.lengths)",
        "allocator.lengths",
        MIXTURE,
    ),
    Mutant("scheduler: grants blocks by seat", PLANNING, ", order=ranks)", ")", MIXTURE),
    Mutant(
        "scheduler: preempts the first in rank",
        PLANNING,
        " & (ranks != ranks.min())",
        "",
        "tests/scheduler/test_scheduler_machine.py::never_a_victim",
    ),
    Mutant(
        "scheduler: preempts the second in rank",
        PLANNING,
        "jnp.where(is_candidate, ranks, -1).max()",
        "jnp.where(is_candidate, ranks, 99).min()",
        MIXTURE,
    ),
    Mutant(
        "scheduler: works while the outbox is full",
        PLANNING,
        "is_seated & is_open, per_seat",
        "is_seated, per_seat",
        MIXTURE,
    ),
    Mutant(
        "scheduler: last is the first row",
        PLANNING,
        "last=jnp.clip(ends - 1, 0)",
        "last=jnp.pad(ends, (1, 0))[:-1]",
        MIXTURE,
    ),
    Mutant("scheduler: stop ids do nothing", PROGRESS, "(stop_ids >= 0)", "(stop_ids > 99)", MIXTURE),
    Mutant("scheduler: a token too many", PROGRESS, "num_known >= planning", "num_known > planning", MIXTURE),
    Mutant(
        "scheduler: the ended keep their blocks",
        PROGRESS,
        "        allocator = allocator.free(leaves)\n",
        "        pass\n",
        MIXTURE,
    ),
    Mutant(
        "scheduler: the aborted keep their blocks",
        PROGRESS,
        "return aborted, allocator.free(leaves)",
        "return aborted, allocator",
        MIXTURE,
    ),
    Mutant("scheduler: commits what was aborted", PROGRESS, "step.is_sampled & is_here", "step.is_sampled", MIXTURE),
    Mutant(
        "scheduler: the finished keep their places",
        PROGRESS,
        "jnp.where(is_finished, RequestStatus.FREE, scheduler.statuses)",
        "scheduler.statuses",
        MIXTURE,
    ),
    Mutant(
        "scheduler: takes what never fits",
        SUBMISSION,
        "most_blocks(num_blocks) > allocator.num_blocks - 1",
        "most_blocks(num_blocks) > 99",
        MIXTURE,
    ),
    Mutant(
        "prefixes: who leaves lists nothing",
        SEATS,
        "    num_full = allocator.lengths // allocator.block_size\n    cache,",
        "    num_full = jnp.where(has_left, 0, allocator.lengths // allocator.block_size)\n    cache,",
        MIXTURE,
    ),
    Mutant("prefixes: nobody waits for another", SEATS, " & ~waits", "", MIXTURE),
    Mutant("prefixes: waits for those behind", SEATS, "ranks[:, None] < ranks", "ranks[:, None] != ranks", MIXTURE),
    Mutant(
        "prefixes: waits for what is not listed before the end",
        SEATS,
        "(num_listed <= column[None]) & (column",
        "(column",
        "tests/scheduler/test_seats.py::waits_for_what",
    ),
    Mutant(
        "prefixes: found blocks need room",
        SEATS,
        "candidates, beginnings.num_blocks, num",
        "candidates, 0, num",
        MIXTURE,
    ),
    Mutant(
        "prefixes: free blocks count as held",
        SEATS,
        "beginnings.num_blocks, num_woken)",
        "beginnings.num_blocks)",
        MIXTURE,
    ),
    Mutant(
        "prefixes: each counts the free blocks it finds",
        SEATS,
        "(is_free & (first[ids] == order))",
        "is_free",
        "tests/scheduler/test_seats.py::several_find",
    ),
    Mutant(
        "prefixes: old blocks are listed as new",
        SEATS,
        "jnp.where(has_entered, salts, prefixes.salts)",
        "salts",
        MIXTURE,
    ),
    Mutant("prefixes: chunks are not listed", SEATS, " | (num_full > prefixes.num_listed).any()", "", MIXTURE),
    Mutant(
        "prefixes: the end of a refusal gives no cause",
        PLANNING,
        "with_due(scheduler, scheduler.was_refused & ~was_refused)",
        "with_due(scheduler, False)",
        MIXTURE,
    ),
    Mutant(
        "prefixes: drained while its tokens are needed",
        PROGRESS,
        'is_finished = is_finished.at[scheduler.prefixes.left].set(False, mode="drop")',
        "pass",
        MIXTURE,
    ),
    Mutant(
        "prefixes: a drain gives no cause",
        PROGRESS,
        "with_due(scheduler, has_seat & (",
        "with_due(scheduler, False & (",
        MIXTURE,
    ),
    Mutant(
        "prefixes: an abort gives no cause",
        PROGRESS,
        "        planning.with_due(scheduler, marked.any()),\n",
        "        scheduler,\n",
        MIXTURE,
    ),
    Mutant(
        "prefixes: forgets nothing",
        "jaxpaged/_scheduler/scheduler.py",
        "salt + len(salt), salt)",
        "salt, salt)",
        MIXTURE,
    ),
    Mutant(
        "logprobs: what top_p cuts counts",
        SAMPLING,
        "jnp.where(sampling.top_p < 1, enough_to_cut(sampling, weights.sum(axis=-1)), jnp.inf)",
        "jnp.full_like(best, jnp.inf)",
        "tests/engine/test_sampling.py::processed",
    ),
    Mutant(
        "logprobs: given ones are processed",
        SAMPLING,
        "is_drawn if given is None else is_drawn & (given < 0)",
        "is_drawn",
        "tests/engine/test_sampling.py::processed",
    ),
    Mutant(
        "adapters: prefixes are everybody's",
        "jaxpaged/_scheduler/state.py",
        "self.salt.at[adapters + 1]",
        "self.salt.at[0 * adapters]",
        MIXTURE,
    ),
    Mutant(
        "alternatives: those of the row before",
        "jaxpaged/_engine/requests.py",
        "slice(start, end)",
        "slice(start - 1, end - 1)",
        "tests/engine/test_top_logprobs.py::models and plenty",
    ),
    Mutant(
        "adapters: all are forgotten with one",
        "jaxpaged/_engine/books.py",
        "slice(None) if adapters is None else [1 + adapter for adapter in adapters]",
        "slice(None)",
        "tests/engine/test_books.py::forgotten",
    ),
    Mutant(
        "adapters: none is the last",
        "jaxpaged/_lora.py",
        "jnp.where(ids[:, None] >= 0, rows, 0)",
        "rows",
        "tests/engine/test_adapters.py::equal_to_merged",
    ),
    Mutant(
        "adapters: all are added",
        "jaxpaged/_lora.py",
        "jnp.where(is_own, rows, 0)",
        "rows",
        "tests/engine/test_adapters.py::equal_to_merged",
    ),
    Mutant(
        "adapters: a row takes its seat's neighbour's",
        "jaxpaged/_engine/slices.py",
        "step.sampling.adapter.at[step.seats]",
        "step.sampling.adapter.at[step.seats // 2]",
        "tests/engine/test_adapters.py::exact",
    ),
    Mutant(
        "adapters: rsLoRA has LoRA's scale",
        "examples/lib/adapters.py",
        'alpha / (rank**0.5 if config.flag("use_rslora", False) else rank)',
        "alpha / rank",
        "tests/examples/test_adapters.py::scale",
    ),
    Mutant(
        "engine: new weights are not told",
        "jaxpaged/_engine/runner.py",
        "            self.books.version += 1\n            self.books.forget(adapters)\n",
        "            self.books.version += 1\n",
        FORGOTTEN,
    ),
    Mutant(
        "sampling: without the position",
        SAMPLING,
        "positions.astype(jnp.uint32)[:, None, None]",
        "positions.astype(jnp.uint32)[:, None, None] * 0",
        LOADS,
    ),
    Mutant(
        "engine: few seats with the tables of others",
        "jaxpaged/_engine/slices.py",
        "step.seats if kind.is_narrow",
        "jnp.arange(kind.width, dtype=jnp.int32) if kind.is_narrow",
        LOADS,
    ),
    Mutant(
        "groups: blocks that are not full", GROUPS, "<= (allocator.lengths //", "<= 1 + (allocator.lengths //", FOUND
    ),
    Mutant("groups: most blocks instead of most spared", GROUPS, " * (1 - 1 / holders)", " * (holders > 1)", FOUND),
    Mutant(
        "groups: other blocks before the last", GROUPS, "(tables == tables[leaders]) |", "(tables == tables) |", FOUND
    ),
    Mutant("groups: of one", GROUPS, ".sum(axis=1) > 1", ".sum(axis=1) > 0", FOUND),
    Mutant("groups: the leader is spared too", GROUPS, "shares & (leaders == seats)", "shares & (leaders < 0)", FOUND),
    Mutant(
        "groups: seats as they come", GROUPS, "jnp.argsort(groups.leaders)", "jnp.argsort(0 * groups.leaders)", SORTED
    ),
    Mutant(
        "groups: rows of another seat", GROUPS, "[seats] - starts[:-1], owner)", "[seats] - starts[1:], owner)", SORTED
    ),
    Mutant(
        "groups: a group for each seat",
        GROUPS,
        "(every, leaders == seats, size",
        "(every, leaders < num_seats, size",
        SORTED,
    ),
    Mutant(
        "groups: who shares nothing in the last",
        GROUPS,
        "(leaders < num_seats).sum",
        "(leaders <= num_seats).sum",
        SORTED,
    ),
    Mutant(
        "groups: a seat without a row is spared", GROUPS, "jnp.where(counts > 0, num_blocks, 0)", "num_blocks", SORTED
    ),
    Mutant(
        "groups: found once and for all",
        "jaxpaged/_engine/slices.py",
        "None if groups is None else find_groups(allocator)",
        "groups",
        "tests/engine/test_prefix_groups.py::stats",
    ),
    Mutant("kinds: reads once whatever it costs", KINDS, "+ (widths[sharing] - widths[kind]) *", "+ 0 *", PAYS),
    Mutant("kinds: reads once for little", KINDS, "num_spared >= least + more", "num_spared >= more", PAYS),
    Mutant("kinds: reads once beside many others", KINDS, "SHARING_TOKENS * num_read +", "0 * num_read +", PAYS),
    Mutant("kinds: prompts wait for shared blocks", KINDS, "jnp.where(wants_chunk, 1, 0)", "jnp.int32(0)", PAYS),
    Mutant(
        "attention: blocks of another group",
        SHARED_PREFIX,
        "block_tables=call.block_tables[groups.first],",
        "block_tables=call.block_tables[groups.first - 1],",
        OF_ENGINE,
    ),
    Mutant(
        "attention: an empty group has blocks",
        SHARED_PREFIX,
        "jnp.where(groups.starts[:-1] < groups.starts[1:], groups.num_blocks[groups.first], 0)",
        "groups.num_blocks[groups.first]",
        OF_ENGINE,
    ),
    Mutant(
        "attention: one more takes part", SHARED_PREFIX, ") < groups.starts[-1]", ") <= groups.starts[-1]", OF_ENGINE
    ),
    Mutant(
        "engine: an abort is not sent",
        "jaxpaged/_engine/books.py",
        "self._aborts.append(row.place)",
        "pass",
        "tests/engine/test_engine.py::abort",
    ),
    Mutant(
        "engine: a failed slice puts its rows behind the others",
        "jaxpaged/_engine/books.py",
        "self.queue.extendleft(reversed([",
        "self.queue.extend(list([",
        "tests/engine/test_books.py::sent_again",
    ),
    Mutant(
        "engine: rows that are held lose their turn",
        "jaxpaged/_engine/books.py",
        "self.queue.extendleft(reversed(held))",
        "self.queue.extend(held)",
        "tests/engine/test_books.py::held",
    ),
    Mutant(
        "host tier: a copy that fails is tried for ever",
        HOST_TIER,
        "row.failed_to_come = True  # unless",
        "row.failed_to_come = False  # unless",
        "tests/engine/test_host_tier.py::lose_no_token",
    ),
    Mutant(
        "engine: slices are sent for rows that are held",
        "jaxpaged/_engine/books.py",
        "bool(self.queue) and not self._num_held and",
        "len(self.queue) > self._num_held and",
        "tests/engine/test_books.py::held",
    ),
    Mutant(
        "host tier: blocks of other weights are kept",
        HOST_TIER,
        "if not keys or keys[-1] in self._places or run.salt not in self._salts:",
        "if not keys or keys[-1] in self._places:",
        "tests/engine/test_host_tier.py::another_salt",
    ),
    Mutant(
        "host tier: what was lost within the slice is taken to be there",
        HOST_TIER,
        "return abs(self._serials[place]) == serial",
        "return serial > 1",
        "tests/engine/test_host_tier.py::could_not_be_listed",
    ),
    Mutant(
        "host tier: a long prompt stops after its first run",
        HOST_TIER,
        "                return True\n            self._touch(keys)",
        "                return False\n            self._touch(keys)",
        "tests/engine/test_host_tier.py::on_its_way",
    ),
    Mutant(
        "host tier: a prompt that comes part by part begins again with each part",
        HOST_TIER,
        "begin = max(begin, min(row.num_called_back, num_there))",
        "pass",
        "tests/engine/test_host_tier.py::part_by_part",
    ),
    Mutant(
        "host tier: all parts come again if the head is lost",
        HOST_TIER,
        "max(row.num_called_back, end)",
        "end",
        "tests/engine/test_host_tier.py::head_is_lost",
    ),
    Mutant(
        "host tier: others go out in the room of what comes part by part",
        HOST_TIER,
        "if self._is_full or runs or",
        "if runs or",
        "tests/engine/test_host_tier.py::in_the_room",
    ),
    Mutant(
        "host tier: two requests wait for each other",
        HOST_TIER,
        "if is_short and not runs:",
        "if is_short and not keys:",
        "tests/engine/test_host_tier.py::request_in_front",
    ),
    Mutant(
        "host tier: what cannot be put in comes again for ever",
        HOST_TIER,
        "run.row.failed_to_come = True",
        "pass",
        "tests/engine/test_host_tier.py::cannot_be_put_in",
    ),
    Mutant(
        "host tier: the head leaves before the tail",
        HOST_TIER,
        "for key in reversed(keys):",
        "for key in keys:",
        "tests/engine/test_host_tier.py::tail_leaves",
    ),
    Mutant(
        "host tier: the least tokens are too few",
        HOST_TIER,
        "if end - num_there < self._least:",
        "if end - num_there <= self._least:",
        "tests/engine/test_host_tier.py::few_tokens_are",
    ),
    Mutant(
        "host tier: what comes back goes out without room for it",
        HOST_TIER,
        "self._lacks_room |= self._needed(row) > self._room_left",
        "pass",
        "tests/engine/test_host_tier.py::once_there_is_room",
    ),
    Mutant(
        "host tier: what the pool is losing is taken to stay",
        HOST_TIER,
        "begin = num_held if all(",
        "begin = num_there if all(",
        "tests/engine/test_host_tier.py::may_be_losing",
    ),
    Mutant(
        "host tier: a shared prefix needs room for each of its requests",
        HOST_TIER,
        "- _num_leading(map(self._is_held, self._findable(row)))",
        "",
        "tests/engine/test_host_tier.py::needs_room_once",
    ),
    Mutant(
        "host tier: a request that ended keeps what it waited for",
        HOST_TIER,
        "if run.row.is_aborted or run.salt not in self._salts})",
        "if run.salt not in self._salts})",
        "tests/engine/test_host_tier.py::ended_waits",
    ),
    Mutant(
        "host tier: what was overwritten before its copy is kept",
        HOST_TIER,
        "min(begin + self._copies.in_page, num_found)",
        "begin + self._copies.in_page",
        "tests/engine/test_host_tier.py::overwritten_before",
    ),
    Mutant(
        "host tier: what a failed slice was to copy is never asked for again",
        HOST_TIER,
        "self._wanted.extendleft(reversed(moves.out))",
        "pass",
        "tests/engine/test_host_tier.py::wanted_once",
    ),
    Mutant(
        "host tier: blocks are wanted again while they leave",
        HOST_TIER,
        "key in self._places or key in self._leaving for key in keys",
        "key in self._places for key in keys",
        "tests/engine/test_host_tier.py::wanted_once",
    ),
    Mutant(
        "host tier: what arrived outlives the weights",
        HOST_TIER,
        "(self._coming, self._arrived)",
        "(self._coming, set[int]())",
        "tests/engine/test_host_tier.py::arrived_is_forgotten",
    ),
    Mutant(
        "host tier: a page stays beside the one that has all of it",
        HOST_TIER,
        "self._drop(old)",
        "pass",
        "tests/engine/test_host_tier.py::fuller_page",
    ),
    Mutant(
        "host tier: a program gets more pages than it has room for",
        "jaxpaged/_engine/host_copies.py",
        "is_full = num_pages > self.num_pages or len(batch)",
        "is_full = len(batch)",
        "tests/engine/test_host_tier.py::one_program",
    ),
    Mutant(
        "host tier: a program looks for the block that it is to list",
        "jaxpaged/_engine/host_copies.py",
        "is_full or any(before in other.moved for other in batch)",
        "is_full",
        "tests/engine/test_host_tier.py::one_program",
    ),
    Mutant(
        "host tier: blocks are listed behind a gap",
        "jaxpaged/_engine/host_copies.py",
        "jnp.where(num_found >= begins, ends - num_found, 0)",
        "ends - num_found",
        "tests/engine/test_host_tier.py::behind_a_gap",
    ),
    Mutant(
        "host tier: what waits on the device counts once",
        "jaxpaged/_engine/slices.py",
        "RequestStatus.WAITING, 2,",
        "RequestStatus.WAITING, 1,",
        "tests/engine/test_host_tier.py::in_the_place_of",
    ),
    Mutant(
        "engine: more rows than the device has places",
        "jaxpaged/_engine/books.py",
        "min(most, self._max_requests - self._num_sent)",
        "most",
        "tests/engine/test_books.py::no_more",
    ),
    Mutant(
        "engine: ends all completions for one",
        "jaxpaged/_engine/books.py",
        " if completion in (None, index)",
        "",
        "tests/engine/test_engine.py::abort_of_one and False",
    ),
    Mutant(
        "engine: exact in steps of every shape",
        KINDS,
        "    if exact:\n        return",
        "    if False:\n        return",
        "tests/engine/test_engine.py::exact_engine",
    ),
    Mutant(
        "sampling: what top_p cuts is drawn",
        SAMPLING,
        "axis=-1) >= enough[:, None]",
        "axis=-1) > jnp.inf",
        "tests/engine/test_sampling.py::tokens_come",
    ),
    Mutant(
        "sampling: top_p takes a token too many",
        SAMPLING,
        "axis=-1) >= enough[:, None]",
        "axis=-1) > enough[:, None]",
        "tests/engine/test_sampling.py::top_p_takes_no_more_than_it",
    ),
    Mutant(
        "sampling: top_p is a part of everything",
        SAMPLING,
        "enough_to_cut(sampling, mass), jnp.inf)",
        "enough_to_cut(sampling, jnp.exp(draw.scaled(chunks_of(logits))).sum(axis=(1, 2))), jnp.inf)",
        "tests/engine/test_sampling.py::part_of_what",
    ),
    Mutant(
        "sampling: the best of the draws",
        SAMPLING,
        "jnp.argmin(is_cut, axis=1)",
        "jnp.argmax(chosen, axis=1)",
        "tests/engine/test_sampling.py::tokens_come and top_p",
    ),
    Mutant(
        "sampling: decided seats draw again",
        SAMPLING,
        "jnp.where(are_cut, again[:, 0], token)",
        "again[:, 0]",
        "tests/engine/test_sampling.py::seats_own",
    ),
    Mutant(
        "sampling: the best of a later chunk",
        SAMPLING,
        "tokens = chunk[:, 0] * CHUNK + jnp.argmax(inside, axis=-1)",
        "tokens = jnp.argmax(inside, axis=-1)",
        "tests/engine/test_sampling.py::first_of_the_largest",
    ),
    Mutant(
        "sampling: cut seats draw again from all",
        SAMPLING,
        "1, least_kept(logits, best, least, sampling))",
        "1, least)",
        "tests/engine/test_sampling.py::tokens_come and top_p",
    ),
    Mutant(
        "sampling: greedy seats draw",
        SAMPLING,
        "jnp.where(is_drawn, draw_tokens(logits, best, sampling, positions), most_likely)",
        "draw_tokens(logits, best, sampling, positions)",
        "tests/engine/test_sampling.py::seats_own",
    ),
    Mutant(
        "sampling: top_k parts equal logits",
        SAMPLING,
        "inside >= least",
        "inside > least",
        "tests/engine/test_sampling.py::kept_together",
    ),
    Mutant(
        "sampling: the best of a chunk",
        SAMPLING,
        "noise[..., num_chunks:]",
        "noise[..., :1]",
        "tests/engine/test_sampling.py::tokens_come",
    ),
    Mutant(
        "sampling: chunks are equally likely",
        SAMPLING,
        "jnp.log(mass)[:, None] + noise[..., :num_chunks]",
        "jnp.sign(mass)[:, None] + noise[..., :num_chunks]",
        "tests/engine/test_sampling.py::tokens_come",
    ),
    Mutant(
        "sampling: tokens past the vocabulary",
        SAMPLING,
        "constant_values=-jnp.inf",
        "constant_values=0",
        "tests/engine/test_sampling.py::tokens_come",
    ),
    Mutant(
        "sampling: a rank too far",
        SAMPLING,
        "(of_one >= amount)",
        "(of_one > amount)",
        "tests/engine/test_sampling.py::of_a_sort",
    ),
    Mutant(
        "sampling: cut seats draw from all beside others",
        SAMPLING,
        "lax.cond(are_cut.any(), draw_again",
        "lax.cond(are_cut.all(), draw_again",
        "tests/engine/test_sampling.py::seats_own",
    ),
    Mutant(
        "sampling: every seat has a top_k",
        SAMPLING,
        "jnp.where(is_cut, kth, everything)",
        "kth",
        "tests/engine/test_sampling.py::seats_own",
    ),
    Mutant(
        "sampling: draws that are alike",
        SAMPLING,
        "start + jnp.arange(num)",
        "start * jnp.arange(num)",
        "tests/engine/test_sampling.py::tokens_come and top_p",
    ),
    Mutant(
        "sampling: logprobs after temperature",
        SAMPLING,
        "return logprobs_of(logits, own, best)",
        "cold = jnp.maximum(sampling.temperature, COLDEST)\n"
        "            return logprobs_of(logits / cold.astype(logits.dtype)[:, None], own, best / cold)",
        "tests/engine/test_sampling.py::logprobs_are",
    ),
    Mutant(
        "prefixes: old blocks listed as new ones",
        SEATS,
        "insert_blocks(allocator, blocks, num_full, prefixes.salts)",
        "insert_blocks(allocator, blocks, num_full, prefixes.salts * 0 + prefixes.salt)",
        "tests/engine/test_engine.py::old_weights_began",
    ),
    Mutant(
        "scoring: one token too few",
        SCORING,
        "is_scored = (begin <= positions)",
        "is_scored = (begin < positions)",
        "tests/engine/test_score.py::models_beside and plenty",
    ),
    Mutant(
        "scoring: groups that hold only a part go uncounted",
        SCORING,
        "jnp.arange(0, len(scored), size) < rows.is_scored",
        "jnp.arange(size - 1, len(scored), size) < rows.is_scored",
        "tests/engine/test_score.py::models_beside and plenty",
    ),
    Mutant(
        "step: a layer with a window follows the plan",
        "jaxpaged/_attention/attention_step.py",
        '("num_partitions", "sliding_window")',
        '("num_partitions",)',
        "tests/attention/test_attention_step.py::one_plan",
    ),
    Mutant(
        "step: the plan is that of shared blocks too",
        "jaxpaged/_attention/attention_step.py",
        "lengths -= prefix_groups.num_blocks * allocator.block_size",
        "pass",
        "tests/attention/test_attention_step.py::plan_of_a_step",
    ),
    Mutant(
        "seats: tokens whose logits are wanted are found",
        SEATS,
        "jnp.minimum(num_known - 1, findable)",
        "num_known - 1",
        "tests/engine/test_score.py::but_for_what or prompt_logprobs_come",
    ),
    Mutant(
        "rollouts: each slice begins anew",
        "jaxpaged/_engine/rollouts.py",
        "+ len(row.token_ids)",
        "",
        "tests/engine/test_rollout.py::as_arrays and plenty",
    ),
    Mutant(
        "engine: the version of the weights now, not of the slice",
        "jaxpaged/_engine/books.py",
        "row.take_tokens(tokens, logprobs, likely, aux, version)",
        "row.take_tokens(tokens, logprobs, likely, aux, self.version)",
        "tests/engine/test_rollout.py::which_weights",
    ),
    Mutant(
        "engine: sleep forgets to forget",
        "jaxpaged/_engine/runner.py",
        "            self.books.forget()  # first",
        "            # first",
        "tests/engine/test_rollout.py::sleeps",
    ),
    Mutant(
        "engine: Ctrl-C in the middle of the books",
        "jaxpaged/_engine/runner.py",
        "    @without_interrupts()\n    def _take(",
        "    def _take(",
        "tests/engine/test_engine_trouble.py::any_line",
    ),
    Mutant(
        "engine: only Ctrl-C waits for the books",
        "jaxpaged/_engine/interrupts.py",
        'NAMES = "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGTERM", "SIGALRM", "SIGINT"',
        'NAMES = ("SIGINT",)',
        "tests/engine/test_engine_trouble.py::any_line",
    ),
    Mutant(
        "engine: an exit while a slice is sent leaves it in the books",
        "jaxpaged/_engine/runner.py",
        "except BaseException:",
        "except Exception:",
        "tests/engine/test_engine_trouble.py::cannot_be_sent",
    ),
    Mutant(
        "engine: news are off the list before they are told",
        "jaxpaged/_engine/books.py",
        "        for request_id, rows in list(self._news.items()):",
        "        news, self._news = self._news, {}\n        for request_id, rows in list(news.items()):",
        "tests/engine/test_engine_trouble.py::step_returns",
    ),
    Mutant(
        "engine: sleep leaves slices unread",
        "jaxpaged/_engine/runner.py",
        "while self.books.under_way:  # what",
        "while False:  # what",
        "tests/engine/test_rollout.py::sleep",
    ),
    Mutant(
        "engine: an old abort hits who got the place",
        "jaxpaged/_engine/books.py",
        "self._aborts = [place for place in self._aborts if place in self.on_device]",
        "pass",
        "tests/engine/test_engine_trouble.py::spares_who",
    ),
    Mutant(
        "engine: a lost one goes on",
        "jaxpaged/_engine/runner.py",
        "raise StateLostError from sent.failure or failure",
        "pass",
        "tests/engine/test_engine_trouble.py::says_so",
    ),
    Mutant(
        "engine: a slice runs behind a failed one",
        "jaxpaged/_engine/runner.py",
        "raise self._unread_failure\n        try:",
        "pass\n        try:",
        "tests/engine/test_engine_trouble.py::behind_a_failed",
    ),
    Mutant(
        "engine: slices are taken back from the first on",
        "jaxpaged/_engine/books.py",
        "failed = self.under_way.pop()",
        "failed = self.under_way.popleft()",
        "tests/engine/test_books.py::taken_back",
    ),
    Mutant(
        "engine: a slice that failed forgets aborts",
        "jaxpaged/_engine/books.py",
        "self._aborts = failed.aborts + self._aborts",
        "pass",
        "tests/engine/test_books.py::taken_back",
    ),
    Mutant(
        "engine: a slice is lost with a rollout that finds no memory",
        "jaxpaged/_engine/runner.py",
        "            self.collector.take(sent.result(), report, self.books.on_device | places, sent.version)\n",
        "            self.books.under_way.popleft()\n"
        "            self.collector.take(sent.result(), report, self.books.on_device | places, sent.version)\n"
        "            self.books.under_way.appendleft(sent)\n",
        "tests/engine/test_rollout.py::no_memory",
    ),
    Mutant(
        "engine: a slice may read weights after generate has returned",
        "jaxpaged/_engine/runner.py",
        "if not self.books.num_open:",
        "if False:",
        "tests/engine/test_engine_trouble.py::donated",
    ),
    Mutant(
        "engine: a stream that is collected is dropped in the middle of a slice",
        "jaxpaged/_engine/books.py",
        "if not self._is_undisturbed:",
        "if True:",
        "tests/engine/test_engine_trouble.py::collected",
    ),
    Mutant(
        "engine: an end that was not told is unknown to abort",
        "jaxpaged/_engine/books.py",
        "self.requests.get(request_id) or self._news.get(request_id, [])",
        "self.requests.get(request_id, [])",
        "tests/engine/test_books.py::kept_from_being_told",
    ),
    Mutant(
        "engine: slices that failed for deleted weights fail again with new ones",
        "jaxpaged/_engine/runner.py",
        "if find_deleted(self.weights) is not None:",
        "if False:",
        "tests/engine/test_engine_trouble.py::for_deleted_weights",
    ),
    Mutant(
        "scheduler: drafts find room in one group of layers",
        PLANNING,
        "fits = allocator.num_groups * (in_all - held)",
        "fits = (in_all - held)",
        "tests/scheduler/test_scheduler_windows.py::drafts_need_room",
    ),
    Mutant(
        "sampling: a given token of id 0 is none",
        SAMPLING,
        "own = tokens if given is None else jnp.where(given >= 0, given, tokens)",
        "own = tokens if given is None else jnp.where(given > 0, given, tokens)",
        "tests/engine/test_sampling.py::id_0",
    ),
    Mutant(
        "sampling: a given token of id 0 is scored as if drawn",
        SAMPLING,
        "is_drawn & (given < 0)",
        "is_drawn & (given <= 0)",
        "tests/engine/test_sampling.py::id_0",
    ),
    Mutant(
        "sampling: the draw after all were cut has the first one's noise",
        SAMPLING,
        "draw.propose(DRAWS, 1,",
        "draw.propose(0, 1,",
        "tests/engine/test_sampling.py::noise_of_its_own",
    ),
    Mutant(
        "engine: a slice that is taken back loses later aborts",
        "jaxpaged/_engine/books.py",
        "self._aborts = failed.aborts + self._aborts",
        "self._aborts = failed.aborts",
        "tests/engine/test_books.py::later_aborts",
    ),
    Mutant(
        "engine: rows that are taken back are reversed",
        "jaxpaged/_engine/books.py",
        "self.queue.extendleft(reversed([row for row in failed.rows if not row.is_aborted]))",
        "self.queue.extendleft([row for row in failed.rows if not row.is_aborted])",
        "tests/engine/test_books.py::later_aborts",
    ),
    Mutant(
        "engine: top_logprobs of a prompt begin again in each slice",
        "jaxpaged/_engine/requests.py",
        "in zip(index.tolist(), by_token",
        "in zip(range(len(index)), by_token",
        "tests/engine/test_top_logprobs.py::several_slices",
    ),
    Mutant(
        "host tier: blocks without room are written",
        "jaxpaged/_engine/host_copies.py",
        "num_there = num_found + jnp.where(ok, num_missing, 0)",
        "num_there = num_found + num_missing",
        "tests/engine/test_host_tier.py::without_room",
    ),
    Mutant(
        "drafts: a seat keeps the hidden state of a request that has left it",
        "jaxpaged/_engine/drafting.py",
        "jnp.where(self.owners == step.request_ids, self.owners, -1)",
        "self.owners",
        "tests/engine/test_drafts.py::has_left",
    ),
    Mutant(
        "engine: step takes what is new of a stream's requests",
        "jaxpaged/_engine/books.py",
        "if request_id in self.served if request_ids is None else request_id not in request_ids:",
        "if request_ids is not None and request_id not in request_ids:",
        "tests/engine/test_engine.py::a_stream_loses_nothing",
    ),
    Mutant(
        "engine: a stream that is left goes on",
        "jaxpaged/_engine/engine.py",
        "            self._books.drop(request_ids)\n",
        "            pass\n",
        "tests/engine/test_engine_trouble.py::is_left",
    ),
    Mutant(
        "server: keeps back too little of a stop string",
        "examples/lib/text_stream.py",
        "range(len(stop) - 1, 0, -1)",
        "range(len(stop) - 2, 0, -1)",
        "tests/examples/test_text_stream.py::pieces_of_text",
    ),
    Mutant(
        "server: the offset of a token forgets an invalid byte",
        "examples/lib/text_stream.py",
        "self._num_characters + self._ends_a_half(data)",
        "self._num_characters",
        "tests/examples/test_text_stream.py::pieces_of_text",
    ),
    Mutant(
        "server: a stop string ends the first completion",
        "examples/lib/pieces.py",
        "self._engine.end(self._generation, i, k)",
        "self._engine.end(self._generation, i, 0)",
        "tests/examples/test_serve.py::ends_one_completion",
    ),
    Mutant(
        "server: choices in the order of completions",
        "examples/lib/pieces.py",
        "index = i * self._ask.params.n + k",
        "index = i + k * len(self._generation.requests)",
        "tests/examples/test_serve.py::in_the_order_of_the_prompts",
    ),
    Mutant(
        "server: a half-closed client is dropped",
        "examples/lib/http_server.py",
        "self.cycle.keep_alive = False\n        self._probe()\n        return True",
        "return None",
        "tests/examples/test_serve_connections.py::half_closed",
    ),
    Mutant(
        "server: a client that left is not noticed",
        "examples/lib/http_server.py",
        "self.loop.call_later(PROBE_SECONDS, self._probe)",
        "pass",
        "tests/examples/test_serve_connections.py::gives_its_blocks_back",
    ),
    Mutant(
        "server: a body may have two lengths",
        "examples/lib/middleware.py",
        "<= names:",
        "< set():",
        "tests/examples/test_serve_connections.py::two_lengths",
    ),
    Mutant(
        "server: clients are not dropped in the end",
        "examples/lib/http_server.py",
        "connection.transport.abort()",
        "pass",
        "tests/examples/test_serve_connections.py::never_ends",
    ),
    Mutant(
        "attention: a window of one more, xla",
        XLA_TILES,
        "visible &= distance < options.sliding_window",
        "visible &= distance <= options.sliding_window",
        "tests/attention/test_attention.py::TestXla and test_options and window",
    ),
    Mutant(
        "attention: earlier tiles keep their weights",
        XLA,
        "acc * alpha[..., None] + _weighted(p, v), m_new",
        "acc + _weighted(p, v), m_new",
        "tests/attention/test_attention.py::no_divisibility_rule and None-40",
    ),
    Mutant(
        "attention: the sum of the weights has no gradient",
        XLA,
        "values - total[..., None] * out.astype(jnp.float32)",
        "values",
        "tests/attention/test_composition.py::gradients and 3-all",
    ),
    Mutant(
        "attention: unseen slots are read",
        XLA_TILES,
        "jnp.where(seen[..., None, None], x, jnp.zeros_like(x))",
        "x",
        "tests/attention/test_attention.py::TestXla and test_options and plain",
    ),
    Mutant(
        "attention: values with the scales of keys",
        XLA_TILES,
        "load(a.v_cache, a.options.v_scale)",
        "load(a.v_cache, a.options.k_scale)",
        "tests/attention/test_attention.py::TestXla and caches_with_scales and token_head and int8",
    ),
    Mutant(
        "attention: partitions weigh the same",
        XLA,
        "(acc * weights[..., None]).sum(axis=1)",
        "acc.sum(axis=1)",
        "tests/attention/test_attention.py::TestXla and options_with_partitions and plain",
    ),
    Mutant(
        "attention: absent tokens have no depth",
        TREE,
        "mask | _bits_below(jnp.maximum(-starts, 0), words)[:, None]",
        "mask",
        "tests/attention/test_tree.py::short_sequence",
    ),
    Mutant(
        "attention: a deeper token is hidden",
        TREE,
        "jnp.maximum(distances, 0), distances",
        "distances, distances",
        "tests/attention/test_tree.py::no_tree",
    ),
    Mutant(
        "attention: merges what neither saw",
        "jaxpaged/_attention/merge.py",
        "jnp.where(is_unseen, 0.0, lse) for lse",
        "lse for lse",
        "tests/attention/test_merge.py::gradients",
    ),
    Mutant(
        "attention: runs end with their sequence",
        RUNS,
        "lengths = first[runs.seqs] + runs.offsets + runs.counts",
        "lengths = call.lengths[runs.seqs]",
        PACKED_OPTIONS,
    ),
    Mutant(
        "attention: padding before the first token",
        RUNS,
        " | (tokens < runs.starts[0])",
        "",
        PACKED_OPTIONS,
    ),
    Mutant(
        "attention: a prefix that nobody shares",
        SHARED_PREFIX,
        "jnp.where(shares.any(axis=1), num_blocks[:, 0] * block_size, 0)",
        "num_blocks[:, 0] * block_size",
        "tests/attention/test_attention_prefix.py::nobody_shares",
    ),
    Mutant(
        "attention: sinks of the shared call count",
        SHARED_PREFIX,
        "options = dataclasses.replace(call.options, sinks=None)",
        "options = call.options",
        "tests/attention/test_attention_prefix.py::test_options and sinks",
    ),
    Mutant(
        "attention: a new token among the shared",
        SHARED_PREFIX,
        "(history >= num_blocks * block_size)",
        "(history + 1 >= num_blocks * block_size)",
        "tests/attention/test_attention_prefix.py::computed_once",
    ),
    Mutant(
        "attention: runs of a prompt see all of it",
        RUNS,
        "call.lengths[:, None] - tokens_after[None]",
        "call.lengths[:, None] - 0 * tokens_after[None]",
        "tests/attention/test_runs.py::each_run",
    ),
    Mutant(
        "attention: a tree in runs",
        "jaxpaged/_attention/choose.py",
        " and run != call.tokens_per_seq,",
        " and call.v_cache is None,",
        "tests/attention/test_tree.py::which_kernel",
    ),
    Mutant(
        "attention: a tree of many rows by prefill",
        "jaxpaged/_attention/choose.py",
        "call.tree_mask is None and known",
        "known",
        "tests/attention/test_tree.py::which_kernel",
    ),
    Mutant(
        "latents: new tokens count twice",
        "jaxpaged/_latent_modules.py",
        "history = allocator.lengths - counts",
        "history = allocator.lengths",
        "tests/test_latent_modules.py::by_keys_of_each_head",
    ),
    Mutant(
        "latents: padding rows of a history count as new",
        "jaxpaged/_latent_modules.py",
        "is_new.sum(axis=1, dtype=jnp.int32)",
        "jnp.int32(slots.shape[1])",
        "tests/test_padding.py::LatentAttention and expanded",
    ),
    Mutant(
        "latents: a window is lost among new tokens",
        "jaxpaged/_latent_modules.py",
        "step.tree_mask, step.prefix_groups, settings.sliding_window, num_partitions",
        "step.tree_mask, step.prefix_groups, num_partitions",
        "tests/test_latent_modules.py::a_window_holds",
    ),
    Mutant(
        "latents: sinks go to the kernel for latents",
        "jaxpaged/_attention/choose.py",
        'if field.name != "scale")',
        'if field.name not in ("scale", "sinks"))',
        "tests/kernels/test_latent_many_heads.py::which_kernel",
    ),
    Mutant(
        "attention: short runs read what a window has passed",
        RUNS,
        "runs.counts if call.causal and call.options.sliding_window is not None else None",
        "None",
        "tests/attention/test_packed.py::passed_are_never",
    ),
    Mutant(
        "attention: padding reads what a window has passed",
        "jaxpaged/_attention/attend.py",
        "        allocator = _without_passed(allocator)\n",
        "        pass\n",
        "tests/test_padding.py::group and not Attention",
    ),
    Mutant(
        "latents: a higher logit of the other warpgroup",
        LATENT,
        "return self._add(i, acc, alpha, other), m_new, l * alpha",
        "return self._add(i, acc, alpha, other), m_new, l",
        "tests/kernels/test_latent_many_heads.py::that_grow",
    ),
    Mutant(
        "latents: unseen values are not zeroed",
        LATENT,
        "pl.when(self._is_partial(i))(lambda: self._zero_unseen(i, values))",
        "",
        "tests/kernels/test_latent_many_heads.py::test_blocks",
    ),
    Mutant(
        "latents: weights of the other warpgroup are not waited for",
        LATENT,
        "plgpu.barrier_wait(refs.weights_full.at[other])",
        "pass",
        "tests/kernels/test_latent_many_heads.py::query_tokens",
    ),
    Mutant(
        "attention: packed tokens one too far",
        RUNS,
        "packed_positions(starts, call.lengths, tokens=tokens) + 1 if",
        "packed_positions(starts, call.lengths, tokens=tokens) + 2 if",
        "tests/kernels/test_latent_many_heads.py::test_packed_tokens",
    ),
    Mutant(
        "kernels: tiles of a plan overflow",
        "pallas_kernels/decode/partition_plan.py",
        "2**30 // seqs",
        "2**30",
        "tests/kernels/test_plan.py::breaks_a_plan",
    ),
    Mutant(
        "kernels: a window of one more",
        "pallas_kernels/decode/logits.py",
        "visible = jnp.logical_and(visible, distance < walk.window)",
        "visible = jnp.logical_and(visible, distance <= walk.window)",
        "tests/kernels/test_paged_decode.py::test_options and window and not partitions",
    ),
    Mutant(
        "kernels: a query sees its siblings",
        "pallas_kernels/decode/logits.py",
        "jnp.logical_or(word_of != word, bit == 1)",
        "jnp.logical_or(word_of >= word, bit == 1)",
        "tests/kernels/test_tree_masks.py::no_tree",
    ),
    Mutant(
        "kernels: past the end partials count twice",
        "pallas_kernels/decode/merge.py",
        "jnp.where(index < end, 0.0, LOWEST)",
        "jnp.where(index < end, 0.0, 0.0)",
        "tests/kernels/test_paged_decode.py::more_partitions_than",
    ),
    Mutant(
        "kernels: all heads with the first one's scale",
        "pallas_kernels/common/scales.py",
        "scales[kv_head if scales.shape[0] > 1 else 0]",
        "scales[0]",
        "tests/kernels/test_8bit_caches.py::dtypes_and_scales and head and not token",
    ),
    Mutant(
        "kernels: the slot past the end is read",
        "pallas_kernels/decode/walk.py",
        "seen = tokens < self.length",
        "seen = tokens <= self.length",
        "tests/kernels/test_paged_decode.py::test_options and plain and not partitions",
    ),
)


def passes(tree: Path, tests: str) -> bool:
    file, words = tests.split("::")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", file, "-k", words]
    environment = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{tree / 'examples'}"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):  # 2 to 5: it could not run, or there are no such tests
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def verdict(tree: Path, mutant: Mutant) -> str:
    path = tree / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        return f"its text stands {text.count(mutant.old)} times in {mutant.file}"
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        return "SURVIVES" if passes(tree, mutant.tests) else "killed"
    finally:
        path.write_text(text)


def main(words: list[str]) -> int:
    mutants = [mutant for mutant in MUTANTS if all(word in mutant.name for word in words)]
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
