"""Finds the end of a JSON object or array that arrives in pieces, and where it stops being JSON."""

import re

MOST_DEPTH = 64  # deeper values are refused, because json.loads recurses
SPACE = " \t\n\r"
PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # characters of a string that need no further look
SCALAR = re.compile(r"[-+.0-9a-zA-Z]*")
LEGAL_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
CLOSING = {"{": "}", "[": "]"}
# The marks that may come next, and what each of them is: the beginning of a value, a key, or a mark.
VALUE, FIRST_VALUE, KEY, FIRST_KEY, COLON, NEXT = "value", "value or ]", "key", "key or }", ":", ", or end"


class NotJsonError(ValueError):
    """The text is not JSON. `position` is the first character that cannot continue it."""

    def __init__(self, position: int):
        super().__init__(f"not JSON at {position}")
        self.position = position


class JsonScanner:
    """Reads one JSON object or array, as RFC 8259 defines them. Every character is read once.

    Attributes:
        position: position of the next character to read; after the last character of a complete value.
        is_complete: whether the value has ended.
    """

    def __init__(self, position: int):
        self.position, self.is_complete = position, False
        self._stack: list[str] = []  # the closing marks of the open objects and arrays
        self._expected = VALUE
        self._is_key = self._is_in_string = False
        self._escape = 0  # characters of an escape that are still to come; -1: the one after the backslash
        self._scalar = ""

    def read(self, text: str) -> None:
        """Reads on in the text, which has grown since. Raises `NotJsonError`."""
        while not self.is_complete and self.position < len(text):
            if self._is_in_string:
                self._read_string(text)
            else:
                self._read_mark(text)

    def _read_string(self, text: str) -> None:
        if self._escape:
            self._read_escape(text[self.position])
            self.position += 1
            return
        match = PLAIN.match(text, self.position)
        assert match is not None
        self.position = match.end()
        if self.position == len(text):
            return
        if text[self.position] == "\\":
            self._escape = -1
        elif text[self.position] == '"':
            self._is_in_string = False
            self._expected = COLON if self._is_key else NEXT
        else:
            raise NotJsonError(self.position)
        self.position += 1

    def _read_escape(self, character: str) -> None:
        is_legal = character in '"\\/bfnrtu' if self._escape < 0 else character in "0123456789abcdefABCDEF"
        if not is_legal:
            raise NotJsonError(self.position)
        if self._escape > 0:
            self._escape -= 1
        else:
            self._escape = 4 if character == "u" else 0

    def _read_mark(self, text: str) -> None:
        run = SCALAR.match(text, self.position) if self._expected in (VALUE, FIRST_VALUE) and self._stack else None
        if run is not None and run[0]:
            self._scalar += run[0]
            self.position = run.end()
            return
        if self._scalar:
            self._end_scalar()
        if text[self.position] not in SPACE:
            self._take(text[self.position])
        self.position += 1

    def _end_scalar(self) -> None:
        if LEGAL_SCALAR.fullmatch(self._scalar) is None:
            raise NotJsonError(self.position)
        self._scalar, self._expected = "", NEXT

    def _take(self, mark: str) -> None:
        expected = self._expected
        if mark in CLOSING and expected in (VALUE, FIRST_VALUE) and len(self._stack) < MOST_DEPTH:
            self._stack.append(CLOSING[mark])
            self._expected = FIRST_KEY if mark == "{" else FIRST_VALUE
        elif mark == '"' and expected in (VALUE, FIRST_VALUE, KEY, FIRST_KEY) and self._stack:
            self._is_in_string, self._is_key = True, expected in (KEY, FIRST_KEY)
        elif mark == ":" and expected == COLON:
            self._expected = VALUE
        elif mark == "," and expected == NEXT:
            self._expected = KEY if self._stack[-1] == "}" else VALUE
        elif self._stack and mark == self._stack[-1] and self._may_close():
            self._stack.pop()
            self._expected, self.is_complete = NEXT, not self._stack
        else:
            raise NotJsonError(self.position)

    def _may_close(self) -> bool:
        return self._expected in (NEXT, FIRST_KEY, FIRST_VALUE)
