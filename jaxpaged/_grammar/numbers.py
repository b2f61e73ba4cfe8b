"""JSON numbers within bounds, spelled without an exponent."""

import dataclasses
from decimal import Decimal

from jaxpaged._grammar.nodes import EMPTY, Node, Repeat, any_of, choice, optional, sequence

DIGIT = any_of("0123456789")
DIGITS = Repeat(DIGIT, 0, None)
FRACTION = optional(sequence(".", Repeat(DIGIT, 1, None)))


@dataclasses.dataclass(frozen=True)
class Bound:
    """One end of a range of numbers."""

    value: Decimal
    is_inclusive: bool

    def negated(self) -> "Bound":
        return Bound(-self.value, self.is_inclusive)


ZERO = Decimal(0)


def integers(low: int | None, high: int | None) -> Node:
    """Integers from `low` to `high`, both included; None: without bound."""
    options = []
    if high is None or high >= 0:
        options.append(_naturals(max(low or 0, 0), high))
    if low is None or low < 0:
        options.append(
            sequence("-", _naturals(max(1, -high) if high is not None else 1, None if low is None else -low))
        )
    return choice(options)


def decimals(low: Bound | None, high: Bound | None) -> Node:
    """Decimal numbers from `low` to `high`; None: without bound. Zero has no sign."""
    options = []
    if high is None or high.value > 0 or (high.value == 0 and high.is_inclusive):
        options.append(_magnitudes(low if low is not None and low.value >= 0 else Bound(ZERO, True), high))
    if low is None or low.value < 0:
        least = high.negated() if high is not None and high.value < 0 else Bound(ZERO, False)
        options.append(sequence("-", _magnitudes(least, None if low is None else low.negated())))
    return choice(options)


def _naturals(low: int, high: int | None) -> Node:
    options: list[Node] = []
    if high is None:
        longer = sequence(any_of("123456789"), Repeat(DIGIT, len(str(low)), None))
        options, high = [longer], 10 ** len(str(low)) - 1
    for length in range(len(str(low)), len(str(high)) + 1):
        least, most = max(low, 10 ** (length - 1) if length > 1 else 0), min(high, 10**length - 1)
        if least <= most:
            options.append(_of_one_length(str(least), str(most)))
    return choice(options)


def _of_one_length(low: str, high: str) -> Node:
    """The numbers from `low` to `high`, which have equal lengths; the others may begin with zeros."""
    rest = len(low) - 1
    if rest < 0:
        return EMPTY
    first, last = int(low[0]), int(high[0])
    if first == last:
        return sequence(low[0], _of_one_length(low[1:], high[1:]))
    options = []
    if low[1:] != "0" * rest:
        options.append(sequence(low[0], _of_one_length(low[1:], "9" * rest)))
        first += 1
    if high[1:] != "9" * rest:
        options.append(sequence(high[0], _of_one_length("0" * rest, high[1:])))
        last -= 1
    if first <= last:
        options.append(sequence(_one_of(range(first, last + 1)), Repeat(DIGIT, rest, rest)))
    return choice(options)


def _one_of(digits: range) -> Node:
    return any_of("".join(map(str, digits)))


def _magnitudes(low: Bound, high: Bound | None) -> Node:
    """Numbers without a sign from `low`, which is not negative, to `high`."""
    least, least_digits = _parts(low.value)
    if high is None:
        above = sequence(_naturals(least + 1, None), FRACTION)
        return choice([sequence(str(least), _fractions(least_digits, low.is_inclusive, None, True)), above])
    most, most_digits = _parts(high.value)
    if least == most:
        part = _fractions(least_digits, low.is_inclusive, most_digits, high.is_inclusive)
        return sequence(str(least), part)
    options = []
    if least < most:
        options.append(sequence(str(least), _fractions(least_digits, low.is_inclusive, None, True)))
        options.append(sequence(str(most), _fractions("", True, most_digits, high.is_inclusive)))
    if least + 1 < most:
        options.append(sequence(_naturals(least + 1, most - 1), FRACTION))
    return choice(options)


def _parts(value: Decimal) -> tuple[int, str]:
    """The integer part and the digits after the point, without zeros at the end."""
    whole, _, digits = f"{value:f}".partition(".")
    return int(whole), digits.rstrip("0")


def _fractions(low: str, includes_low: bool, high: str | None, includes_high: bool) -> Node:
    """Nothing, or a point and digits, from 0.`low` to 0.`high`; `high` None: below 1."""
    options = [sequence(".", _first_digit(low, includes_low, high, includes_high))]
    if _allows_zero(low, includes_low, high, includes_high):
        options.append(EMPTY)
    return choice(options)


def _allows_zero(low: str, includes_low: bool, high: str | None, includes_high: bool) -> bool:
    return not low and includes_low and (high != "" or includes_high)


def _first_digit(low: str, includes_low: bool, high: str | None, includes_high: bool) -> Node:
    """At least one digit after the point."""
    options = []
    for digit in range(10):
        if digit < int(low[:1] or 0) or (high is not None and digit > int(high[:1] or 0)):
            continue
        after_low = (low[1:], includes_low) if digit == int(low[:1] or 0) else ("", True)
        after_high = (high[1:], includes_high) if high is not None and digit == int(high[:1] or 0) else (None, True)
        options.append(sequence(str(digit), _more_digits(*after_low, *after_high)))
    return choice(options)


def _more_digits(low: str, includes_low: bool, high: str | None, includes_high: bool) -> Node:
    """Digits, or none, from `low` to `high`, which are the rests of the bounds."""
    if not low and high is None:
        return DIGITS if includes_low else sequence(DIGITS, any_of("123456789"), DIGITS)
    if high == "":  # only zeros are left
        return Repeat(any_of("0"), 0, None) if not low and includes_low and includes_high else choice([])
    rest = _first_digit(low, includes_low, high, includes_high)
    return optional(rest) if _allows_zero(low, includes_low, high, includes_high) else rest
