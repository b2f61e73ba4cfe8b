"""Two computed figures, not measured: the memory of a served chat log, and the blocks of a small pool.

    python -m benchmarks.figures.memory      # writes docs/memory.svg and docs/pool.svg

Needs matplotlib: pip install "jaxpaged[plot]".
"""

import argparse
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.engine.workload import BLOCK_SIZE, workload
from benchmarks.figures.drawing import begin, save
from benchmarks.harness import ROOT
from jaxpaged import BlockAllocator, cache_capacity
from jaxpaged.debug import plot_blocks

DOCS = ROOT / "docs"
REQUESTS, SEATS, LONGEST = 1024, 256, 1024


def seat_lengths(requests: Sequence[tuple[int, int]], num_seats: int) -> np.ndarray:
    """[steps, seats], the tokens in each seat. The next request (its prompt, its new tokens) enters a free seat with
    its whole prompt. Each step adds one token until the request is complete."""
    waiting = deque(requests)
    lengths, left = np.zeros(num_seats, int), np.zeros(num_seats, int)
    steps = []
    while waiting or left.any():
        for seat in np.flatnonzero(left == 0):
            lengths[seat], left[seat] = waiting.popleft() if waiting else (0, 0)
        lengths += left > 0
        left -= left > 0
        steps.append(lengths.copy())
    return np.stack(steps)


def token_bytes(dtype: str) -> int:
    """Bytes of one token's keys and values in Llama-3-8B's shape."""
    return cache_capacity(10**9, [1], num_layers=32, num_kv_heads=8, head_dim=128, dtype=dtype).bytes_per_token


def draw_memory(path: Path) -> None:
    """Gigabytes of the cache in each step: contiguous for the longest request, in blocks, and tokens alone."""
    pyplot = begin()
    lengths = seat_lengths([(len(prompt), new) for prompt, new in workload(REQUESTS, LONGEST)], SEATS)
    slots = (-(-lengths // BLOCK_SIZE) * BLOCK_SIZE).sum(axis=1)
    wide, narrow = token_bytes("bfloat16"), token_bytes("int8")
    figure, axis = pyplot.subplots(figsize=(5, 4.4))  # legible where a phone shows it in 360 pixels
    for label, tokens, size, colour, line in (
        (f"contiguous, {2 * LONGEST} tokens a seat", np.full(len(slots), SEATS * 2 * LONGEST), wide, "#D55E00", "-"),
        (f"blocks of {BLOCK_SIZE}", slots, wide, "#0072B2", "-"),
        (f"blocks of {BLOCK_SIZE}, int8 and its scales", slots, narrow, "#009E73", "-"),
        ("the tokens themselves", lengths.sum(axis=1), wide, "black", ":"),
    ):
        held = tokens * size / 1e9
        axis.plot(held, color=colour, linestyle=line, label=f"{label}: at most {held.max():.1f} GB")
    axis.set_ylim(bottom=0)
    axis.set_xlim(0, len(slots))
    axis.set_xlabel("step")
    axis.set_ylabel("GB of keys and values")
    axis.grid(linewidth=0.4, alpha=0.6)
    axis.set_title(f"{REQUESTS} requests of a chat log in {SEATS} seats,\nthe shape of Llama-3-8B, bfloat16")
    figure.legend(loc="lower left", frameon=False)
    figure.tight_layout(rect=(0, 0.24, 1, 1))
    save(figure, path)


def frames() -> Iterator[tuple[str, BlockAllocator]]:
    """Each operation, and the pool after it."""
    allocator = BlockAllocator.create(num_blocks=50, block_size=4, num_seqs=5, max_blocks_per_seq=16)

    def append(done: str, num_steps: int, *num_tokens: int) -> Iterator[tuple[str, BlockAllocator]]:
        nonlocal allocator
        for _ in range(num_steps):
            allocator, _, _ = allocator.append(jnp.array(num_tokens), q_len=max(num_tokens))
            yield done, allocator

    yield from append("append: three prompts", 1, 22, 13, 9, 0, 0)
    yield from append("append: 3 tokens each", 4, 3, 3, 3, 0, 0)
    allocator, _, _ = allocator.fork(jnp.array([-1, -1, -1, 0, 0]))
    yield "fork: two copies of the first", allocator
    yield from append("append: 2 tokens each", 4, 2, 2, 2, 2, 2)
    allocator = allocator.free(jnp.array([True, True, False, False, False]))
    yield "free: the first and the second", allocator
    yield from append("append: another prompt", 1, 30, 0, 0, 0, 0)


def draw_pool(path: Path) -> None:
    """An animation of the pool while sequences grow, are forked and are freed."""
    shown = list(frames())
    figure = begin().figure(figsize=(5, 3.1))
    for i, (done, allocator) in enumerate(shown):
        axis = plot_blocks(allocator, axes=figure.add_axes((0.03, 0.03, 0.94, 0.78), label=str(i)))
        axis.set_gid(f"picture{i}")
        axis.set_title(f"{done}\n{int(allocator.num_held)} blocks held")
        axis.lines[0].set_markersize(5)
        cells: Any = axis.images[0].get_array()
        rows, columns = cells.shape[:2]
        axis.vlines(np.arange(columns) - 0.5, -0.5, rows - 0.5, color="lightgrey", linewidth=0.5)
        axis.hlines(np.arange(rows) - 0.5, -0.5, columns - 0.5, color="lightgrey", linewidth=0.5)
    save(figure, path)
    path.write_text(path.read_text().replace("</svg>", f"{style(len(shown))}</svg>"))


def style(num_pictures: int) -> str:
    """Shows each of the groups `picture0`, `picture1`, ... for a second; only the last one under reduced motion."""
    rules = [
        "@keyframes turn { 0% { visibility: visible } " + f"{100 / num_pictures:.4f}% {{ visibility: hidden }} }}",
        f"g[id^=picture] {{ visibility: hidden; animation: turn {num_pictures}s step-end infinite }}",
        *(f"#picture{i} {{ animation-delay: {i - num_pictures}s }}" for i in range(num_pictures)),
        "@media (prefers-reduced-motion) { g[id^=picture] { animation: none } "
        f"#picture{num_pictures - 1} {{ visibility: visible }} }}",
    ]
    return "<style>\n" + "\n".join(rules) + "\n</style>\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    draw_memory(DOCS / "memory.svg")
    draw_pool(DOCS / "pool.svg")


if __name__ == "__main__":
    main()
