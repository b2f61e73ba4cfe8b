"""Sets of Unicode characters as sorted ranges of code points, and their UTF-8 encodings as ranges of bytes."""

import functools
import itertools
from collections.abc import Iterable, Iterator

Ranges = tuple[tuple[int, int], ...]
"""Disjoint, sorted ranges of code points, both ends included. Surrogates are no characters."""

SURROGATES = 0xD800, 0xDFFF
LAST = 0x10FFFF


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sorts ranges and joins those that touch."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(joined[-1][1], high)
        else:
            joined.append((low, high))
    return tuple(joined)


def complement(ranges: Ranges) -> Ranges:
    """All characters outside of a set."""
    taken = union([*ranges, SURROGATES])
    starts = [0, *(high + 1 for _, high in taken)]
    ends = [*(low - 1 for low, _ in taken), LAST]
    return tuple((low, high) for low, high in zip(starts, ends, strict=True) if low <= high)


def intersection(one: Ranges, other: Ranges) -> Ranges:
    return complement(union([*complement(one), *complement(other)]))


def single(characters: str) -> Ranges:
    return union((ord(character),) * 2 for character in characters)


ANY = complement(())
DIGITS = union([(0x30, 0x39)])
WORD = union([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
SPACE = single(" \t\n\r\f\v")

ByteRange = tuple[int, int]


@functools.lru_cache(maxsize=1024)
def utf8_sequences(ranges: Ranges) -> tuple[tuple[ByteRange, ...], ...]:
    """The encodings of a set, as sequences of byte ranges.

    Every combination of bytes from the ranges of one sequence encodes a character of the set, and no two sequences
    share an encoding.
    """
    limits = (0x80, 0x800, *SURROGATES, 0x10000)  # the length of the encoding changes; surrogates have none
    sequences: list[tuple[ByteRange, ...]] = []
    for low, high in intersection(ranges, ANY):
        cuts = [low, *(limit for limit in limits if low < limit <= high), high + 1]
        for first, end in itertools.pairwise(cuts):
            sequences += _split(chr(first).encode(), chr(end - 1).encode())
    return tuple(sequences)


def _split(low: bytes, high: bytes) -> Iterator[tuple[ByteRange, ...]]:
    """Byte ranges of the encodings from `low` to `high`, which have equal lengths."""
    first, last, rest = low[0], high[0], len(low) - 1
    least, most = b"\x80" * rest, b"\xbf" * rest
    if first == last:
        yield from (((first, first), *tail) for tail in (_split(low[1:], high[1:]) if rest else [()]))
        return
    if low[1:] != least:
        yield from (((first, first), *tail) for tail in _split(low[1:], most))
        first += 1
    whole = last if high[1:] == most else last - 1
    if first <= whole:
        yield ((first, whole), *(((0x80, 0xBF),) * rest))
    if whole != last:
        yield from (((last, last), *tail) for tail in _split(least, high[1:]))
