"""The sweeps of allocator/operations.py as a figure: microseconds a step against batch, pool and blocks held.

    python -m benchmarks.figures.allocator benchmarks/results/h100/allocator.json docs/allocator_h100.svg

Needs matplotlib: pip install "jaxpaged[plot]".
"""

from pathlib import Path
from typing import Any

from benchmarks.allocator.operations import SWEEPS
from benchmarks.figures.drawing import begin, draw_result_file, save

AXES = {"batch": "num_seqs", "pool": "num_blocks", "held": "held"}
# Colours that the colour-blind can tell apart (Okabe and Ito).
STYLES = (
    ("#000000", "."),
    ("#0072B2", "o"),
    ("#56B4E9", "v"),
    ("#009E73", "s"),
    ("#D55E00", "^"),
    ("#CC79A7", "D"),
)


def label(title: str, point: Any) -> str:
    """The label of a panel's x axis, from the panel's title and one of its points."""
    if title == "batch":
        return f"sequences\n({point.length} tokens each, {point.num_blocks} blocks)"
    if title == "pool":
        return f"blocks in the pool\n({point.num_seqs} sequences of {point.length} tokens)"
    return f"part of the pool held\n({point.num_seqs} sequences, {point.num_blocks} blocks)"


def draw(content: dict[str, Any], path: Path) -> None:
    """`content`: the result file of benchmarks/allocator/operations.py."""
    figure, axes = begin().subplots(1, len(SWEEPS), figsize=(10, 4.4), sharey=True)
    for axis, (title, points) in zip(axes, SWEEPS.items(), strict=True):
        sizes = {(p.num_seqs, p.num_blocks, p.max_blocks, p.length) for p in points}
        lines: dict[str, list[tuple[float, float]]] = {}
        for result in content["points"].values():
            if (
                "operation" in result
                and tuple(result[n] for n in ("num_seqs", "num_blocks", "max_blocks", "length")) in sizes
            ):
                lines.setdefault(result["operation"], []).append((result[AXES[title]], result["us"]))
        for (operation, found), (colour, marker) in zip(lines.items(), STYLES, strict=False):
            axis.plot(*zip(*sorted(found), strict=True), color=colour, marker=marker, label=operation)
        if title != "held":
            axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_xlabel(label(title, points[0]))
        axis.grid(linewidth=0.4, alpha=0.6)
    axes[0].set_ylabel("microseconds a step, inside one jit")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=6)
    figure.suptitle(f"The allocator's operations, {content['device']}, jax {content['jax']}")
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    save(figure, path)


def main() -> None:
    draw_result_file(draw, __doc__, "allocator/operations.py")


if __name__ == "__main__":
    main()
