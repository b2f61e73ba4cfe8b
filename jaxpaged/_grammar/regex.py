"""Regexes as syntax trees. Syntax that is not regular, or that dialects read differently, is refused by name."""

import dataclasses
from typing import NoReturn

from jaxpaged._grammar.characters import ANY, DIGITS, SPACE, SURROGATES, WORD, Ranges, complement, single, union
from jaxpaged._grammar.nodes import Characters, Choice, Node, Repeat, Sequence

CLASSES = {
    "d": DIGITS,
    "D": complement(DIGITS),
    "w": WORD,
    "W": complement(WORD),
    "s": SPACE,
    "S": complement(SPACE),
}
CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
MAX_NESTING = 100
REFUSED_GROUPS = {
    "(?=": "a lookahead",
    "(?!": "a negative lookahead",
    "(?<=": "a lookbehind",
    "(?<!": "a negative lookbehind",
    "(?P=": "a backreference",
    "(?>": "an atomic group",
    "(?(": "a conditional group",
    "(?#": "a comment",
}
REFUSED_ESCAPES = {
    **dict.fromkeys("bB", "a word boundary"),
    **dict.fromkeys("AZzG", "an anchor other than ^ and $"),
    **dict.fromkeys("123456789k", "a backreference"),
    **dict.fromkeys("pP", "a Unicode property"),
}


@dataclasses.dataclass(frozen=True)
class Alternative:
    """An alternative at the top of a regex.

    Attributes:
        node: the alternative without its anchors.
        starts: whether it begins with ^.
        ends: whether it ends with $.
    """

    node: Node
    starts: bool
    ends: bool


def parse_alternatives(pattern: str) -> list[Alternative]:
    """The top alternatives of a regex.

    Raises:
        ValueError: the pattern is malformed or not supported.
    """
    parser = _Parser(pattern)
    alternatives = parser.top()
    if parser.position < len(pattern):
        parser.refuse("an unmatched )", "Escape it")
    return alternatives


def parse_full(pattern: str) -> Node:
    """A regex that the whole text must match; ^ and $ at its ends change nothing."""
    return Choice(tuple(alternative.node for alternative in parse_alternatives(pattern)))


def parse_search(pattern: str) -> Node:
    """A regex that the text must contain, as JSON schemas read `pattern`; ^ and $ anchor it."""
    anything = Repeat(Characters(ANY), 0, None)
    return Choice(
        tuple(
            Sequence((*([] if each.starts else [anything]), each.node, *([] if each.ends else [anything])))
            for each in parse_alternatives(pattern)
        )
    )


class _Parser:
    """Recursive descent over a pattern; `position` is the next character."""

    def __init__(self, pattern: str):
        self.pattern = pattern
        self.position = 0
        self.nesting = 0

    def refuse(self, what: str, advice: str = "Leave it out") -> NoReturn:
        raise ValueError(
            f"The regex {self.pattern!r} has {what} at position {self.position}, which grammars do not support. "
            f"{advice}."
        )

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.position)

    def accept(self, text: str) -> bool:
        if found := self.peek(text):
            self.position += len(text)
        return found

    def take(self) -> str:
        if self.position == len(self.pattern):
            raise ValueError(f"The regex {self.pattern!r} ends inside a group, a class or an escape.")
        self.position += 1
        return self.pattern[self.position - 1]

    def top(self) -> list[Alternative]:
        alternatives = []
        while True:
            starts = self.accept("^")
            node = self.sequence()
            alternatives.append(Alternative(node, starts, self.accept("$")))
            if not self.accept("|"):
                return alternatives

    def sequence(self) -> Node:
        parts = []
        while self.position < len(self.pattern) and not self.peek("|") and not self.peek(")"):
            if self.peek("$") and not self.nesting and self.pattern[self.position + 1 :][:1] in ("", "|"):
                break
            parts.append(self.repeated(self.atom()))
        return Sequence(tuple(parts))

    def group(self) -> Node:
        """A group after its opening parenthesis."""
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            self.refuse(f"more than {MAX_NESTING} nested groups")
        options = [self.sequence()]
        while self.accept("|"):
            options.append(self.sequence())
        if not self.accept(")"):
            self.take()
        self.nesting -= 1
        return Choice(tuple(options))

    def open_group(self) -> Node:
        for text, name in REFUSED_GROUPS.items():
            if self.peek(text):
                self.refuse(name)
        if self.accept("(?P<") or self.accept("(?<"):
            name = ""
            while (character := self.take()) != ">":
                name += character
            if not name.isidentifier():
                self.refuse(f"a group with the name {name!r}")
        elif not self.accept("(?:"):
            if self.peek("(?"):
                self.refuse("flags", "Write both cases or [^] classes instead")
            self.accept("(")
        return self.group()

    def atom(self) -> Node:
        if self.peek("("):
            return self.open_group()
        if self.peek("^") or self.peek("$"):
            self.refuse("an anchor inside", "Anchor whole alternatives at the top")
        if self.peek("*") or self.peek("+") or self.peek("?"):
            self.refuse("a quantifier with nothing before it", "Escape it")
        if self.peek("{"):
            self.refuse("a { that begins no quantifier", "Escape it")
        character = self.take()
        if character == ".":
            return Characters(complement(single("\n")))
        if character == "[":
            return Characters(self.character_class())
        return Characters(self.escape() if character == "\\" else self.one(character))

    def one(self, character: str) -> Ranges:
        if SURROGATES[0] <= ord(character) <= SURROGATES[1]:
            self.refuse("a surrogate", "Write the character itself")
        return single(character)

    def repeated(self, node: Node) -> Node:
        if self.accept("*"):
            least, most = 0, None
        elif self.accept("+"):
            least, most = 1, None
        elif self.accept("?"):
            least, most = 0, 1
        elif self.peek("{"):
            least, most = self.bounds()
        else:
            return node
        if self.accept("?"):  # lazy: the same language
            pass
        elif self.peek("+"):
            self.refuse("a possessive quantifier")
        if self.peek("*") or self.peek("+") or self.peek("?") or self.peek("{"):
            self.refuse("a quantifier after a quantifier", "Put the first one into a group")
        return Repeat(node, least, most)

    def bounds(self) -> tuple[int, int | None]:
        text, brace, _ = self.pattern[self.position + 1 :].partition("}")
        low, comma, high = text.partition(",")
        numbers = [low, *([high] if high else [])]
        if not brace or len(text) > 20 or not all(number.isascii() and number.isdigit() for number in numbers):
            self.refuse("a { that begins no quantifier", "Escape it, or write {least}, {least,} or {least,most}")
        least = int(low)
        most = int(high) if high else None if comma else least
        if most is not None and most < least:
            self.refuse("a quantifier whose bounds are in the wrong order", "Exchange them")
        self.position += len(text) + 2
        return least, most

    def escape(self) -> Ranges:
        """An escape after its backslash, in a class or outside."""
        character = self.take()
        if character in CLASSES:
            return CLASSES[character]
        if character in CONTROLS:
            return single(CONTROLS[character])
        if character in "xu":
            return self.one(self.code_point(2 if character == "x" else 4))
        if character in REFUSED_ESCAPES:
            self.position -= 2
            self.refuse(REFUSED_ESCAPES[character])
        if character.isalnum():
            self.position -= 2
            self.refuse(f"the escape \\{character}", "Write the character itself, or \\xHH, \\uHHHH or \\u{H}")
        return self.one(character)

    def code_point(self, digits: int) -> str:
        if self.accept("{"):
            text = ""
            while (character := self.take()) != "}":
                text += character
        else:
            text = "".join(self.take() for _ in range(digits))
        hexadecimal = all(character in "0123456789abcdefABCDEF" for character in text)
        if not text or not hexadecimal or len(text) > 8 or int(text, 16) > 0x10FFFF:
            self.refuse(f"the code point {text!r}", "Write hexadecimal digits up to 10FFFF")
        return chr(int(text, 16))

    def character_class(self) -> Ranges:
        """A class after its opening bracket."""
        negated = self.accept("^")
        if self.peek("]"):
            self.refuse("an empty class, or one that begins with ]", "Escape it")
        ranges: list[tuple[int, int]] = []
        while not self.accept("]"):
            for text in ("[", "&&", "--", "~~", "||"):
                if self.peek(text):
                    self.refuse(f"{text} inside a class", "Escape it")
            low = self.class_item()
            if self.peek("-") and not self.peek("-]"):
                self.take()
                high = self.class_item()
                ends = [item[0][0] for item in (low, high) if len(item) == 1 and item[0][0] == item[0][1]]
                if len(ends) < 2 or ends[0] > ends[1]:
                    self.refuse("a range without ends in order", "Escape the -")
                ranges.append((ends[0], ends[1]))
            else:
                ranges += low
        return complement(union(ranges)) if negated else union(ranges)

    def class_item(self) -> Ranges:
        character = self.take()
        return self.escape() if character == "\\" else self.one(character)
