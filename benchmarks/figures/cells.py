"""What the tables of docs/ are made of: points of result files, names of points, cells."""

import re
from collections.abc import Callable, Iterable
from typing import Any

Points = Callable[[str], dict[str, Any]]  # of a result file by its name, such as h100/decode

LENGTHS = {  # by the word in place of a length, of sequences and tokens
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
    """What the page calls a point of benchmarks/kernels/points.py; 32/8 heads are not named."""
    heads, shape, *options = name.split()
    seqs, kind, length = re.fullmatch(r"(\d+)x([a-z]*)(\d+)", shape).groups()  # type: ignore[union-attr]
    text = LENGTHS[kind].format(seqs, length)
    for key, value in (option.split("=") for option in options):
        text += ", " + OPTIONS[key].format(value)
    return text if heads == "32/8" else f"{text}, {heads} heads"


def us(value: float) -> str:
    return f"{value:.1f}"


def machine(content: dict[str, Any]) -> str:
    """Of a result file, in a word or two."""
    device = content["device"].removeprefix("NVIDIA ").removesuffix(" 80GB HBM3")
    return "a CPU" if device == "cpu" else device.replace("x86_64, 2 cores", "2 cores of a CPU")
