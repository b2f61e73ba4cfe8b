"""Shared parts of the tables of docs/: points of result files, names of points, cells."""

import re
from collections.abc import Callable, Iterable
from typing import Any

Points = Callable[[str], dict[str, Any]]  # reads a result file by its name, such as h100/decode

LENGTHS = {  # by the word that replaces a length
    "": "{} x {}",
    "ragged": "{} x 1..{}, uniform",
    "outlier": "{}, one of {}, the others of 1024",
    "zipf": "{} x {} / 1, / 2, / 3, ...",
}
OPTIONS = {
    "contiguous": "blocks in order",
    "block_size": "blocks of {}",
    "head_dim": "head_dim {}",
    "window": "window of {}",
    "q_len": "{} query tokens",
    "tree": "as a tree",
    "cache": "{}",
    "scale": "a scale a {}",
}


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(heads), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def label(name: str) -> str:
    """The name on the page for a point of benchmarks/kernels/points.py. It leaves out 32/8 heads."""
    heads, shape, *options = name.split()
    seqs, kind, length = re.fullmatch(r"(\d+)x([a-z]*)(\d+)", shape).groups()  # type: ignore[union-attr]
    text = LENGTHS[kind].format(seqs, length)
    for key, value in (option.split("=") for option in options):
        text += ", " + OPTIONS[key].format(value)
    return text if heads == "32/8" else f"{text}, {heads} heads"


def us(value: float) -> str:
    return f"{value:.1f}"


def machine(content: dict[str, Any]) -> str:
    """The machine of a result file, in a word or two."""
    device = content["device"].removeprefix("NVIDIA ").removesuffix(" 80GB HBM3")
    return "a CPU" if device == "cpu" else device.replace("x86_64, 2 cores", "2 cores of a CPU")
