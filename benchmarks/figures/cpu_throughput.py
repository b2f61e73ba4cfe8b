"""Tokens a second over the batch, from what benchmarks/models/cpu_throughput.py wrote.

    python -m benchmarks.figures.cpu_throughput benchmarks/results/cpu/generate.json docs/throughput_cpu.svg

Needs matplotlib: pip install "jaxpaged[plot]".
"""

from pathlib import Path
from typing import Any

from benchmarks.figures.drawing import begin, draw_a_file, save


def draw(kept: dict[str, Any], path: Path) -> None:
    """`kept`: what benchmarks/models/cpu_throughput.py wrote."""
    points = [point for point in kept["points"].values() if "batch" in point]
    batches = [point["batch"] for point in points]
    floor = kept["points"]["floor"]
    steps_per_s = floor["copy_bytes_per_s"] / floor["weight_bytes"]
    figure, axis = begin().subplots(figsize=(6, 4))
    axis.plot(batches, [point["tokens_per_s"] for point in points], color="#0072B2", marker="o", label="measured")
    axis.plot(
        *(batches, [batch * steps_per_s for batch in batches]),
        color="black",
        linestyle=":",
        label="each step as long as its weights take to read",
    )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(batches, list(map(str, batches)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("sequences in the batch")
    axis.set_ylabel("tokens a second")
    axis.grid(linewidth=0.4, alpha=0.6)
    axis.legend()
    axis.set_title(f"SmolLM2-135M, float32, {kept['device']}, jax {kept['jax']}")
    figure.tight_layout()
    save(figure, path)


def main() -> None:
    draw_a_file(draw, __doc__, "models/cpu_throughput.py")


if __name__ == "__main__":
    main()
