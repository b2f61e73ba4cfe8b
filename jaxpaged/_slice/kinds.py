"""The ladder: the kinds of steps that an engine compiles, and which of them the next step is."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._scheduler.arrays import per_seat
from jaxpaged._scheduler.planning import have_rows
from jaxpaged._scheduler.scheduler import Scheduler

# Prompts wait until they fill the widest step, so that steps with chunks are few. They are computed sooner if fewer
# than BUSY_EIGHTHS of the seats have a token to decode, or after LONGEST_WAIT steps.
BUSY_EIGHTHS, LONGEST_WAIT = 7, 16
SHARING_ROWS = 16  # to read shared blocks once takes about as long as this many rows of a wide step
# Two calls of attention take longer for each token that is still read: as long as one call takes to read so many shared
# tokens again, which come from the L2 cache. [h100/shared.json]
SHARING_TOKENS = 2
FEW_PARTS = 3  # a narrow step with chunks has at most this part of the rows of the widest
PACKED = 1.06  # a step with drafts takes this times one of single tokens with as many rows [h100/engine_drafts.json]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of step, by its static shape.

    Attributes:
        width: its rows, each for a token.
        num_seats: of the scheduler.
        is_mixed: whether a seat may get several tokens: chunks of prompts beside single tokens.
        num_partitions: the default of each call of attention.
        least_saved_reads: shared blocks are read once if that saves the step reading at least so many tokens, and
            SHARING_TOKENS more for each token that is still read. The rows of requests that share are then next to
            each other. None: each request reads its own blocks.
        draws_all: whether a token is drawn at each row, so that seats may have drafts.
        cost: how long a step takes, if a row takes 1.
    """

    width: int
    num_seats: int
    is_mixed: bool = False
    num_partitions: int | None = None
    least_saved_reads: int | None = None
    draws_all: bool = False
    cost: float = 1.0

    @property
    def chunk_tokens(self) -> int:
        """For `Scheduler.plan`."""
        return max(self.width - self.num_seats, 1) if self.is_mixed else 0

    @property
    def fewer_rows(self) -> int | None:
        """The `width` for `Scheduler.plan`."""
        return self.width if self.width < self.num_seats + self.chunk_tokens else None

    @property
    def name(self) -> str:
        """For `EngineStats.num_steps_by_kind`."""
        return f"{'mixed' if self.is_mixed else 'single'}_{self.width}"

    @property
    def is_narrow(self) -> bool:
        """Single tokens, without a row for each seat."""
        return not self.is_mixed and self.width < self.num_seats

    @property
    def is_by_row(self) -> bool:
        """Single tokens whose rows are not the seats in their order."""
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
    """The kinds, from few rows to many. The two that read shared blocks once come before the others.

    `widths` are the rows of those beside `num_seats` and the widest, in ascending order. One of them takes chunks too,
    with drafts all of them. Each is compiled once; such a one twice if it is `num_seats`. A batch-invariant engine has
    only the widest kind. `cost`: of so many rows, if there are drafts.
    """
    widest = num_seats + chunk_tokens
    if batch_invariant:
        return (Kind(widest, num_seats, is_mixed=True, num_partitions=1, draws_all=cost is not None),)
    few = last_few(widths, widest) if cost is None else widths
    single = [*(width for width in widths if width < num_seats and width not in few), num_seats]
    kinds = [Kind(width, num_seats) for width in single]
    kinds += [Kind(width, num_seats, is_mixed=True, draws_all=cost is not None) for width in few]
    if cost is not None:
        kinds = [dataclasses.replace(kind, cost=cost(kind.width) * (PACKED if kind.is_mixed else 1)) for kind in kinds]
    kinds.append(Kind(widest, num_seats, is_mixed=True))
    kinds = sorted(kinds, key=lambda kind: (kind.width, kind.is_mixed))
    if least_saved_reads is None:
        return tuple(kinds)
    sharing = Kind(num_seats, num_seats), kinds[-1]
    return *(dataclasses.replace(kind, least_saved_reads=least_saved_reads) for kind in sharing), *kinds


def last_few(widths: Sequence[int], widest: int) -> list[int]:
    """The width of narrow steps with chunks, if there is one."""
    return [width for width in widths if is_few(width, widest)][-1:]


def is_few(width: int, widest: int) -> bool:
    """Whether a step of this width is narrow enough to take chunks beside the widest."""
    return FEW_PARTS * width <= widest


def next_kind(
    scheduler: Scheduler,
    allocator: BlockAllocator,
    num_waited: jax.Array,
    kinds: tuple[Kind, ...],
    num_saved_reads: ArrayLike = 0,
    gains: jax.Array | None = None,
) -> jax.Array:
    """Which of the kinds the next step is, int32 `[]`.

    `num_waited`: steps since prompts wait for a chunk. `num_saved_reads`: tokens that need not be read again, if shared
    blocks are read once. `gains`: tokens that each draft is expected to bring, float32 `[seats, drafts]`.
    """
    if len(kinds) == 1:
        return jnp.zeros((), jnp.int32)
    num_sharing = sum(kind.least_saved_reads is not None for kind in kinds)
    widest = kinds[-1].width
    with_chunks = (i for i, kind in enumerate(kinds) if kind.is_mixed and is_few(kind.width, widest))
    narrow = max(with_chunks, default=len(kinds) - 1)
    few = kinds[narrow].width
    needed = per_seat(scheduler, scheduler.num_known) - allocator.lengths
    num_needing, num_decoding = ((needed >= 1).sum(dtype=jnp.int32), (needed == 1).sum(dtype=jnp.int32))
    num_pending = scheduler.num_pending(allocator)

    # 1. If prompts wait on: the fewest rows for a token of each seat that needs any.
    widths = jnp.asarray([kind.width for kind in kinds], jnp.int32)
    without = num_sharing + sum((num_needing > kind.width).astype(jnp.int32) for kind in kinds[num_sharing:])
    if gains is not None:
        without = num_sharing + quickest(kinds[num_sharing:-1], num_needing, num_pending, gains)

    # 2. Else the widest step if they fill it, or if narrow steps for all of them had more rows together.
    is_full = num_needing + num_pending >= widest
    is_idle = 8 * num_decoding < BUSY_EIGHTHS * scheduler.num_seqs
    wants_chunk = is_full | ((num_pending > 0) & (is_idle | (num_waited >= LONGEST_WAIT)))
    room = few - num_needing
    is_wide = is_full | (room <= 0) | (-(-num_pending // jnp.maximum(room, 1)) * few > widest)
    kind = jnp.where(wants_chunk, jnp.where(is_wide, len(kinds) - 1, narrow), without)

    # 3. Shared blocks are read once if that pays, in a step with more rows perhaps.
    if (least := kinds[0].least_saved_reads) is not None:
        sharing = jnp.where(wants_chunk, 1, 0)
        num_read = allocator.lengths.sum(dtype=jnp.int32) - num_saved_reads
        more = SHARING_TOKENS * num_read + (widths[sharing] - widths[kind]) * (least // SHARING_ROWS)
        pays = num_saved_reads >= least + more
        kind = jnp.where(pays, sharing, kind)
    return kind


def quickest(kinds: Sequence[Kind], num_needing: jax.Array, num_pending: jax.Array, gains: jax.Array) -> jax.Array:
    """The kind that brings most tokens in its time, of those with a row for each seat that needs one."""
    widths = jnp.asarray([kind.width for kind in kinds], jnp.int32)
    num_left = widths - num_needing - num_pending
    is_counted = jax.vmap(functools.partial(have_rows, gains > 0))(num_left)
    of_drafts = jnp.where(is_counted, gains[None], 0.0).sum(axis=(1, 2))
    of_drafts = jnp.where(jnp.asarray([kind.draws_all for kind in kinds]), of_drafts, 0.0)
    pace = (num_needing.astype(jnp.float32) + of_drafts) / jnp.asarray([kind.cost for kind in kinds], jnp.float32)
    return jnp.argmax(jnp.where(widths >= num_needing, pace, -1.0)).astype(jnp.int32)


def count_wait(num_waited: jax.Array, num_pending: jax.Array, num_known: jax.Array) -> jax.Array:
    """`num_waited` after a step with so many known tokens of each seat, if `num_pending` tokens still wait."""
    took_chunk = (num_known > 1).any()
    return jnp.where((num_pending > 0) & ~took_chunk, num_waited + 1, 0)
