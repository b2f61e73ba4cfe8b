"""Plots time over the floor against the bytes that a call reads, from results of benchmarks/kernels/decode.py.

    python -m benchmarks.figures.decode benchmarks/results/h100/decode.json docs/decode_h100.svg
    python -m benchmarks.figures.decode benchmarks/results/h200/decode.json docs/decode_h200.svg

Several result files of one machine may be given, if a run was cut into pieces. Each pair of head counts has a panel.
Only the points of the grid are drawn. Needs matplotlib: pip install "jaxpaged[plot]".
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.figures.drawing import begin, save

# Label and style of each; the colours suit colour-blind readers (Okabe and Ito).
SERIES = {
    "jaxpaged": ("#0072B2", "o"),
    "fa3": ("#D55E00", "^"),
    "flashinfer": ("#009E73", "s"),
    "xqa": ("#CC79A7", "D"),
}
LABELS = {
    "jaxpaged": "jaxpaged",
    "fa3": "FlashAttention 3 (JAX)",
    "flashinfer": "FlashInfer, tensor cores",
    "xqa": "FlashInfer, XQA",
}

Panel = dict[str, list[tuple[float, float]]]  # method -> (bytes, time over floor), sorted


def read(paths: list[Path]) -> tuple[str, dict[str, Any]]:
    """The machine, and the results by point, of files of one machine; a file's figures replace earlier ones."""
    machine = ""
    results: dict[str, Any] = {}
    for path in paths:
        content = json.loads(path.read_text())
        this = f"{content['device']}, jax {content['jax']}"
        if machine not in ("", this):
            raise SystemExit(f"{path} is of {this}, the file before it of {machine}: draw one machine at a time.")
        machine = this
        results |= content["points"]
    return machine, results


def panels(results: dict[str, Any]) -> dict[str, Panel]:
    """The drawn points by heads, in the order of their first point, without points that have options and peers that
    failed."""
    found: dict[str, Panel] = {}
    for name, result in results.items():
        heads, *rest = name.split()
        if len(rest) != 1:
            continue
        panel = found.setdefault(heads, {})
        times = {"jaxpaged": result["us"]}
        times |= {method: peer["us"] for method, peer in result.get("peers", {}).items() if "us" in peer}
        for method, us in times.items():
            panel.setdefault(method, []).append((result["bytes"], us / result["floor"]))
    return {heads: {method: sorted(points) for method, points in panel.items()} for heads, panel in found.items()}


def draw(machine: str, drawn: dict[str, Panel], path: Path) -> None:
    pyplot = begin()
    from matplotlib import ticker

    columns = min(2, len(drawn))
    rows = -(-len(drawn) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(5 * columns, 3.4 * rows + 0.6), sharex=True, sharey=True, squeeze=False
    )
    labels: dict[str, Any] = {}
    for axis, (heads, panel) in zip(axes.flat, drawn.items(), strict=False):
        for method, points in panel.items():
            colour, marker = SERIES[method]
            sizes, ratios = zip(*points, strict=True)
            (labels[method],) = axis.plot(
                *(sizes, ratios),
                color=colour,
                marker=marker,
                markersize=6 if method == "jaxpaged" else 5,
                markerfacecolor=colour if method == "jaxpaged" else "none",
                linestyle="none",
                zorder=3 if method == "jaxpaged" else 2,
            )
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_title(f"{heads} heads")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(ticker.FixedLocator([1, 1.2, 1.5, 2, 3, 5, 10, 20]))
        axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.yaxis.set_minor_locator(ticker.NullLocator())
        axis.grid(linewidth=0.4, alpha=0.6)
    for axis in axes.flat[len(drawn) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("bytes of K and V that a call reads")
    for row in axes:
        row[0].set_ylabel("time over the read floor")
    figure.suptitle(f"Paged decode, bfloat16, head_dim 128, block 16, shuffled tables, cold L2\n{machine}")
    figure.legend(labels.values(), [LABELS[method] for method in labels], loc="lower center", ncols=len(labels))
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of benchmarks/kernels/decode.py")
    parser.add_argument("figure", type=Path, help="an .svg or .png file")
    options = parser.parse_args()
    machine, results = read(options.results)
    drawn = panels(results)
    if not drawn:
        raise SystemExit("these files have no point of the grid; benchmarks/kernels/decode.py measures it by default.")
    draw(machine, drawn, options.figure)
    print(
        f"{options.figure}: " + ", ".join(f"{heads} {len(panel['jaxpaged'])} points" for heads, panel in drawn.items())
    )


if __name__ == "__main__":
    main()
