"""The ladder: the kinds of steps that an engine compiles, and the choice of the next step's kind."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._scheduler.arrays import per_seat
from jaxpaged._scheduler.planning import have_rows
from jaxpaged._scheduler.scheduler import Scheduler

# Prompts wait until they fill the widest step, so that few steps have chunks. They are computed sooner if fewer than
# BUSY_EIGHTHS of the seats have a token to decode, or after LONGEST_WAIT steps.
BUSY_EIGHTHS, LONGEST_WAIT = 7, 16
SHARING_ROWS = 16  # rows of a wide step that cost about the same time as reading shared blocks once
# Two calls of attention cost extra time for each token that is still read. In the same time, a single call reads this
# number of shared tokens again, from the L2 cache. [h100/shared.json]
SHARING_TOKENS = 2
FEW_PARTS = 3  # the widest step has at least this many times the rows of a narrow step with chunks
PACKED = 1.06  # time of a step with drafts, over a step of single tokens with the same rows [h100/engine_drafts.json]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of step, by its static shape.

    Attributes:
        width: rows, one for each token.
        num_seats: seats of the scheduler.
        is_mixed: a seat may get several tokens: chunks of prompts next to single tokens.
        num_partitions: default for each call of attention.
        least_saved_reads: read shared blocks once if the step then reads this many fewer tokens, and SHARING_TOKENS
            more for each token that is still read. The rows of requests that share blocks are adjacent. None: each
            request reads its own blocks.
        draws_all: a token is drawn at each row, so that seats may have drafts.
        cost: time of a step, in units of a row's time.
    """

    width: int
    num_seats: int
    is_mixed: bool = False
    num_partitions: int | None = None
    least_saved_reads: int | None = None
    draws_all: bool = False
    cost: float = 1.0

    @property
    def plan_options(self) -> dict[str, Any]:
        """For `Scheduler.plan`."""
        chunk_tokens = max(self.width - self.num_seats, 1) if self.is_mixed else 0
        return dict(chunk_tokens=chunk_tokens, width=self.width if self.width < self.num_seats + chunk_tokens else None)

    @property
    def name(self) -> str:
        """For `EngineStats.steps_by_kind`."""
        return f"{'mixed' if self.is_mixed else 'single'}_{self.width}"

    @property
    def is_narrow(self) -> bool:
        """Single tokens, with fewer rows than seats."""
        return not self.is_mixed and self.width < self.num_seats

    @property
    def is_by_row(self) -> bool:
        """Whether each row of the step is a single token, and row i may belong to another seat than i."""
        return self.is_narrow or self.draws_all or (self.least_saved_reads is not None and not self.is_mixed)


def make_kinds(
    num_seats: int,
    chunk_tokens: int,
    widths: Sequence[int] = (),
    *,
    batch_invariant: bool = False,
    least_saved_reads: int | None = None,
    cost: Callable[[int], float] | None = None,
) -> tuple[Kind, ...]:
    """The kinds, from few rows to many. The two that read shared blocks once come first.

    Args:
        num_seats: rows of one kind.
        chunk_tokens: rows of the widest kind, beyond `num_seats`.
        widths: rows of further kinds, in ascending order. The largest that is narrow enough accepts chunks; with drafts
            all do. A width equal to `num_seats` that accepts chunks is compiled as two kinds.
        batch_invariant: the widest kind alone.
        least_saved_reads: as in `Kind`.
        cost: time of a step with this number of rows. None: no drafts.
    """
    widest = num_seats + chunk_tokens
    if batch_invariant:
        return (Kind(widest, num_seats, is_mixed=True, num_partitions=1, draws_all=cost is not None),)
    with_chunks = last_few(widths, widest) if cost is None else widths
    single = [width for width in widths if width < num_seats and width not in with_chunks]
    kinds = [Kind(width, num_seats) for width in (*single, num_seats)]
    kinds += [Kind(width, num_seats, is_mixed=True, draws_all=cost is not None) for width in with_chunks]
    if cost is not None:
        kinds = [dataclasses.replace(kind, cost=cost(kind.width) * (PACKED if kind.is_mixed else 1)) for kind in kinds]
    kinds.append(Kind(widest, num_seats, is_mixed=True))
    kinds.sort(key=lambda kind: (kind.width, kind.is_mixed))
    if least_saved_reads is None:
        return tuple(kinds)
    sharing = Kind(num_seats, num_seats), kinds[-1]
    return *(dataclasses.replace(kind, least_saved_reads=least_saved_reads) for kind in sharing), *kinds


def last_few(widths: Sequence[int], widest: int) -> list[int]:
    """The largest width that is narrow enough for chunks; empty if none is."""
    return [width for width in widths if is_few(width, widest)][-1:]


def is_few(width: int, widest: int) -> bool:
    """Whether chunks in steps of this width are worth it, next to the widest step."""
    return FEW_PARTS * width <= widest


def next_kind(
    scheduler: Scheduler,
    allocator: BlockAllocator,
    num_waited: jax.Array,
    kinds: tuple[Kind, ...],
    num_saved_reads: ArrayLike = 0,
    gains: jax.Array | None = None,
) -> jax.Array:
    """The index of the next step's kind, int32 `[]`.

    Args:
        scheduler, allocator: the state before the step.
        num_waited: int32 `[]`, the number of steps that prompts have waited for a chunk.
        kinds: all kinds.
        num_saved_reads: int32 `[]`, tokens that need not be read again if shared blocks are read once.
        gains: float32 `[seats, drafts]`, the expected number of tokens from each draft. None: no drafts.
    """
    if len(kinds) == 1:
        return jnp.int32(0)
    num_sharing = sum(kind.least_saved_reads is not None for kind in kinds)
    last, widest = len(kinds) - 1, kinds[-1].width
    narrow = max((i for i, kind in enumerate(kinds) if kind.is_mixed and is_few(kind.width, widest)), default=last)
    few = kinds[narrow].width
    needed = per_seat(scheduler, scheduler.num_known) - allocator.lengths
    num_needing, num_decoding = (needed >= 1).sum(dtype=jnp.int32), (needed == 1).sum(dtype=jnp.int32)
    num_pending = scheduler.num_pending(allocator)

    # 1. If prompts wait on: the narrowest step with a row for each seat that needs a token.
    if gains is None:
        without = num_sharing + sum((num_needing > kind.width).astype(jnp.int32) for kind in kinds[num_sharing:])
    else:
        without = num_sharing + quickest(kinds[num_sharing:-1], num_needing, num_pending, gains)

    # 2. Else the widest step, if prompts fill it or if narrow steps for all of them have more rows in total.
    is_full = num_needing + num_pending >= widest
    is_idle = 8 * num_decoding < BUSY_EIGHTHS * scheduler.num_seqs
    wants_chunk = is_full | ((num_pending > 0) & (is_idle | (num_waited >= LONGEST_WAIT)))
    room = few - num_needing
    is_wide = is_full | (room <= 0) | (-(-num_pending // jnp.maximum(room, 1)) * few > widest)
    kind = jnp.where(wants_chunk, jnp.where(is_wide, last, narrow), without)

    # 3. Shared blocks are read once if that saves time, even in a step with more rows.
    if (least := kinds[0].least_saved_reads) is not None:
        widths = jnp.asarray([kind.width for kind in kinds], jnp.int32)
        sharing = jnp.where(wants_chunk, 1, 0)
        num_read = allocator.lengths.sum(dtype=jnp.int32) - num_saved_reads
        more = SHARING_TOKENS * num_read + (widths[sharing] - widths[kind]) * (least // SHARING_ROWS)
        kind = jnp.where(num_saved_reads >= least + more, sharing, kind)
    return kind


def quickest(kinds: Sequence[Kind], num_needing: jax.Array, num_pending: jax.Array, gains: jax.Array) -> jax.Array:
    """The kind with the most tokens per time, among those with a row for each seat that needs one."""
    widths = jnp.asarray([kind.width for kind in kinds], jnp.int32)
    is_computed = jax.vmap(functools.partial(have_rows, gains > 0))(widths - num_needing - num_pending)
    num_accepted = jnp.where(is_computed, gains[None], 0.0).sum(axis=(1, 2))
    num_accepted = jnp.where(jnp.asarray([kind.draws_all for kind in kinds]), num_accepted, 0.0)
    pace = (num_needing.astype(jnp.float32) + num_accepted) / jnp.asarray([kind.cost for kind in kinds], jnp.float32)
    return jnp.argmax(jnp.where(widths >= num_needing, pace, -1.0)).astype(jnp.int32)


def count_wait(num_waited: jax.Array, num_pending: jax.Array, had_chunk: ArrayLike) -> jax.Array:
    """Updates `num_waited` after a step.

    `num_pending`: prompt tokens not yet computed. `had_chunk`: whether a seat computed several known tokens.
    """
    return jnp.where((num_pending == 0) | had_chunk, 0, num_waited + 1)
