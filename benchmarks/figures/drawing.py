"""How every figure is drawn and saved, and the command of a figure that one result file makes."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def begin() -> Any:
    """matplotlib.pyplot, for figures that go into a file."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    matplotlib.rcParams["svg.hashsalt"] = "jaxpaged"  # the same ids, so that an unchanged figure is an unchanged file
    # Legible where a page shows 10 inches in 700 pixels.
    matplotlib.rcParams |= dict.fromkeys(("font.size", "axes.titlesize", "figure.titlesize", "legend.fontsize"), 11)
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    # No date: drawing the same figures again gives the same file.
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    begin().close(figure)


def draw_a_file(draw: Callable[[dict[str, Any], Path], None], description: str, made_by: str) -> None:
    """The command: `draw` gets what the result file holds, and the figure's path."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help=f"the JSON file of {made_by}")
    parser.add_argument("figure", type=Path, help="an .svg or .png file")
    options = parser.parse_args()
    draw(json.loads(options.results.read_text()), options.figure)
