"""What an engine is made with: its arguments, checked, and what stands in for those that its caller leaves open."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxpaged import _device
from jaxpaged._allocator.state import Window, checked_windows
from jaxpaged._engine.defaults import Sizes, chosen_compiler_options, chosen_sizes, chosen_steps
from jaxpaged._engine.drafting import Draft
from jaxpaged._engine.inputs import pool_sizes
from jaxpaged._integers import checked_size
from jaxpaged._scheduler.records import MOST_ADAPTERS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """`Engine` says what those with the names of its arguments are."""

    num_blocks: int  # of the caches, with the null block
    block_size: int  # of the caches
    is_gpu: bool
    sizes: Sizes
    steps_per_slice: int
    max_requests: int
    num_stop_ids: int
    num_adapters: int
    windows: tuple[Window, ...]
    prefix_cache: bool
    host_cache_bytes: int | None
    drafts: int
    draft: Draft | None
    vocab_size: int | None
    exact: bool
    processed_logprobs: bool
    max_logprobs: int
    seed: int
    compiler_options: dict[str, Any]

    @property
    def growth(self) -> int:
        """Tokens for which the host tier leaves room: the most of a request in the slice that runs and in the next, and
        a block."""
        return max(2 * self.steps_per_slice * (self.drafts + 1), self.block_size)


def checked_options(
    caches: Any,
    num_bytes: int,
    *,
    num_seats: int | None,
    max_length: int | None,
    chunk_tokens: int | None,
    widths: Sequence[int] | None,
    max_requests: int | None,
    steps_per_slice: int | None,
    num_stop_ids: int,
    num_adapters: int,
    windows: Sequence[int | None],
    drafts: int,
    draft: Draft | None,
    vocab_size: int | None,
    exact: bool,
    max_logprobs: int,
    seed: int,
    compiler_options: dict[str, Any] | None,
    **others: Any,
) -> Options:
    """`num_bytes`: of the weights on a device; `others`: those that are taken as they are."""
    num_blocks, block_size = pool_sizes(caches)
    windows, is_gpu = checked_windows(windows), _device.is_gpu()
    sizes = chosen_sizes(
        (num_blocks - 1) // max(len(windows), 1) + 1,
        block_size,
        num_seats=num_seats,
        max_length=max_length,
        chunk_tokens=chunk_tokens,
        widths=widths,
        is_gpu=is_gpu,
        drafts=drafts,
        exact=exact,
    )
    check_draft(draft, drafts)
    return Options(
        num_blocks=num_blocks,
        block_size=block_size,
        is_gpu=is_gpu,
        sizes=sizes,
        steps_per_slice=chosen_steps(steps_per_slice, num_bytes, is_gpu=is_gpu),
        max_requests=4 * sizes.num_seats if max_requests is None else checked_size("max_requests", max_requests),
        num_stop_ids=checked_size("num_stop_ids", num_stop_ids, 0),
        num_adapters=checked_size("num_adapters", num_adapters, 0, MOST_ADAPTERS),
        windows=windows,
        drafts=int(drafts),  # checked with the sizes
        draft=draft,
        vocab_size=None if vocab_size is None else checked_size("vocab_size", vocab_size),
        exact=exact,
        max_logprobs=checked_size("max_logprobs", max_logprobs, 0),
        seed=checked_size("seed", seed, 0),
        compiler_options=chosen_compiler_options(compiler_options),
        **others,
    )


def check_draft(draft: Draft | None, drafts: int) -> None:
    if draft is not None and not (callable(draft) and drafts):
        raise ValueError(f"draft must be a function, and goes with drafts of at least 1; got {draft=}, {drafts=}.")
