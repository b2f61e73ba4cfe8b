"""Shared style and saving of all figures, and the command line of a figure made from one result file."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def begin() -> Any:
    """matplotlib.pyplot, for figures that go into a file."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    matplotlib.rcParams["svg.hashsalt"] = "jaxpaged"  # fixed ids: the same figure gives the same file
    # Legible where a page shows 10 inches in 700 pixels.
    matplotlib.rcParams |= dict.fromkeys(("font.size", "axes.titlesize", "figure.titlesize", "legend.fontsize"), 11)
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    # No date, for the same reason.
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    begin().close(figure)


def draw_result_file(draw: Callable[[dict[str, Any], Path], None], description: str, made_by: str) -> None:
    """The command line: calls `draw` with the contents of the result file and the figure's path."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help=f"the JSON file of {made_by}")
    parser.add_argument("figure", type=Path, help="an .svg or .png file")
    options = parser.parse_args()
    draw(json.loads(options.results.read_text()), options.figure)
