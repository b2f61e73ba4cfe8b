"""The bar charts of docs/, from benchmarks/results: `python -m benchmarks.figures.bars`.

Needs matplotlib: pip install "jaxpaged[plot]".
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.figures.cells import Points, label
from benchmarks.figures.drawing import begin, save
from benchmarks.figures.kernel_tables import PROMPTS, SHAPES
from benchmarks.figures.system_tables import vllm_rates
from benchmarks.harness import RESULTS, ROOT

# Colours that the colour-blind can tell apart (Okabe and Ito).
COLOURS = "#0072B2", "#D55E00", "#009E73", "#CC79A7"

Groups = dict[str, list[float]]  # the values of all bars next to a label


def draw(groups: Groups, names: tuple[str, ...], title: str, number: str, path: Path) -> None:
    """A bar per name and group. Each bar has its value, formatted as `number`; those of the first group have names."""
    width = 0.8 / len(names)
    pyplot = begin()
    pyplot.rcParams |= {"font.size": 10, "figure.titlesize": 10}
    # Two side by side on a page, one on a phone.
    figure, axis = pyplot.subplots(figsize=(3.6, 0.6 + len(groups) * (0.1 + 0.16 * len(names))))
    longest = max(max(values) for values in groups.values())
    for i, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
        values = [group[i] for group in groups.values()]
        places = [row + (i - (len(names) - 1) / 2) * width for row in range(len(groups))]
        axis.barh(places, values, 0.94 * width, color=colour)
        is_long = values[0] > 0.6 * longest  # room for the name inside the bar
        texts = [format(value, number) for value in values]
        if is_long:
            axis.text(0.02 * longest, places[0], name, color="white", va="center")
        else:
            texts[0] += f"  {name}"
        for value, place, text in zip(values, places, texts, strict=True):
            axis.text(value + 0.02 * longest, place, text, va="center")
    axis.set_yticks(range(len(groups)), groups)
    axis.set_ylim(len(groups) - 0.5, -0.5)
    axis.set_xlim(0, 1.3 * longest)
    axis.xaxis.set_visible(False)
    axis.tick_params(left=False)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.suptitle(title)
    figure.tight_layout(pad=0.4)
    save(figure, path)


def decode(gpu: str, points: Points, path: Path) -> None:
    found = {shape: points(f"{gpu.lower()}/decode")[f"32/8 {shape}"] for shape in SHAPES}
    groups = {
        label(f"32/8 {s}"): [p["us"] / p["floor"], p["peers"]["fa3"]["us"] / p["floor"]] for s, p in found.items()
    }
    draw(groups, ("jaxpaged", "FlashAttention-3"), f"Decode, {gpu}\ntime / floor: shorter is better", ".2f", path)


def prefill(points: Points, path: Path) -> None:
    found = points("h100/prefill")
    groups = {
        label(name.removesuffix(" q_len=all")): [
            found[f"{name} {method}"]["teraflops_per_second"] for method in ("mosaic_gpu", "fa3 paged", "fa3", "cudnn")
        ]
        for name in PROMPTS[:6]
    }
    names = "jaxpaged", "FA3, same cache", "FA3, contiguous", "cuDNN, contiguous"
    draw(groups, names, "Prompts, H100\nTFLOP/s: longer is better", ".0f", path)


def vllm(points: Points, path: Path) -> None:
    groups = {f"{model},\n{count:,} requests": rates for (model, count), rates in vllm_rates(points).items()}
    draw(groups, ("jaxpaged", "vLLM 0.25.1"), "Tokens a second, H100: longer is better", ",.0f", path)


FIGURES: dict[str, Callable[[Points, Path], None]] = {
    "decode_h100": partial(decode, "H100"),
    "decode_h200": partial(decode, "H200"),
    "prefill_h100": prefill,
    "vllm_h100": vllm,
}


def points(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())["points"]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, figure in FIGURES.items():
        figure(points, ROOT / "docs" / f"{name}.svg")


if __name__ == "__main__":
    main()
