"""Joins result files of one benchmark into the file of their medians.

    python -m benchmarks.engine.medians one.json two.json three.json --output median.json

XLA chooses among matrix products by short timings, so each compilation may choose others: run an engine's benchmark
three times, each in a new process without a compilation cache. Of each point the run with the median number of tokens
per second stays, and `runs` has the numbers of all.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import SAME_RUN

RATE = "tokens_per_s"


def median_of(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The point with the median rate (the lower one of two), and all rates. Points without a rate: the first."""
    if RATE not in points[0]:
        return points[0]
    rates = [point[RATE] for point in points]
    return points[rates.index(statistics.median_low(rates))] | {"runs": rates}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    first, *others = files = [json.loads(path.read_text()) for path in options.files]
    for path, other in zip(options.files[1:], others, strict=True):
        if different := [key for key in SAME_RUN if other.get(key) != first.get(key)]:
            raise SystemExit(f"{path} differs from {options.files[0]} in {', '.join(different)}.")
    medians = {name: median_of([file["points"][name] for file in files]) for name in first["points"]}
    options.output.write_text(json.dumps(first | {"points": medians}, indent=1) + "\n")


if __name__ == "__main__":
    main()
