"""Finds tool calls in the text of a model as it grows."""

import dataclasses
import json
import secrets
import string
from collections.abc import Collection
from typing import Any

import regex

from lib.json_scanner import JsonScanner, NotJsonError
from lib.tool_formats import ToolFormat

ID_CHARACTERS = string.ascii_letters + string.digits


@dataclasses.dataclass
class ToolCall:
    """A complete call. `arguments` is the JSON text of an object, as in OpenAI's API."""

    id: str
    name: str
    arguments: str


class ToolCallStream:
    """Separates the tool calls in a growing text from its content.

    A call is returned once it is complete: it names one of the tools, and its arguments are a JSON object. All other
    text is content, malformed and unfinished calls included. So joined content and calls do not depend on how the text
    arrives. Text that may become a call is kept back until that is known.

    Args:
        tool_format: how the model writes calls.
        names: names of the tools.
        is_parallel: whether several calls are wanted. If not, the first one ends the text.

    Attributes:
        marks: control tokens that the text must show.
        is_parallel: as given.
        is_stopped: whether the rest of the text is ignored, because a call has ended it.
        num_calls: number of calls so far.
    """

    def __init__(self, tool_format: ToolFormat, names: Collection[str], *, is_parallel: bool = True):
        self.is_stopped, self.num_calls = False, 0
        self.marks, self.is_parallel = tool_format.marks, is_parallel
        self._format, self._names = tool_format, names
        self._begins, self._ends, self._between = map(
            regex.compile, (tool_format.begin, tool_format.end, tool_format.after)
        )
        self._text = ""  # not returned yet
        self._begin: Any = None  # the match before the JSON that is being read
        self._scanner: JsonScanner | None = None
        self._space, self._skips_space, self._is_after_call = "", False, False

    def extend(self, text: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
        """The next piece of content and the next calls.

        Args:
            text: what the text has grown by.
            is_last: whether nothing follows, so that nothing is kept back.
        """
        content, calls = "", list[ToolCall]()
        self._text += text
        while not self.is_stopped:
            if self._scanner is None:
                content += self._read_content(is_last)
                if self._scanner is None:
                    break
            found = self._read_call(is_last)
            if found is None:
                break
            if found:
                calls += found
                self.num_calls += len(found)
                self.is_stopped = not self.is_parallel
            else:  # not a call: at least one character becomes content, and the search goes on after it
                end = max(self._begin.end(), self._begin.start() + 1)
                content += self._release(end)
        if is_last and not self._skips_space:
            content, self._space = content + self._space, ""
        return content, calls

    def _read_content(self, is_last: bool) -> str:
        """The content before the next call or before what may become one."""
        if self._is_after_call:
            self._text = self._text.lstrip()
            after = self._between.match(self._text, partial=True)
            if after is not None and after.partial and not is_last:
                return ""
            self._text, self._is_after_call = self._text[after.end() if after is not None else 0 :], False
        match = self._begins.search(self._text, partial=not is_last)
        if match is None:
            return self._release(len(self._text))
        content = self._release(match.start())
        if not match.partial:
            self._begin = self._begins.match(self._text)
            self._scanner = JsonScanner(self._begin.end())
        return content

    def _read_call(self, is_last: bool) -> list[ToolCall] | None:
        """The calls that the JSON describes; empty if it describes none. None: more text is needed."""
        assert self._scanner is not None
        try:
            self._scanner.read(self._text)
        except NotJsonError:
            return []
        if not self._scanner.is_complete:
            return [] if is_last else None
        end = self._ends.match(self._text, self._scanner.position, partial=True)
        if end is not None and end.partial and not is_last:
            return None
        calls = self._parse(self._text[self._begin.end() : self._scanner.position])
        if calls:
            self._text = self._text[self._scanner.position if end is None else end.end() :]
            self._scanner = None
            self._space, self._skips_space, self._is_after_call = "", True, True
        return calls

    def _parse(self, text: str) -> list[ToolCall]:
        name, key = self._begin.groupdict().get("name"), self._format.arguments
        try:
            value = json.loads(text)
            if name is not None:
                calls = [self._call(name, value)]
            else:
                each = value if isinstance(value, list) else [value]
                calls = [self._call(one["name"], one[key]) for one in each]
        except (KeyError, TypeError, ValueError):
            return []
        return calls if self.is_parallel else calls[:1]

    def _call(self, name: Any, arguments: Any) -> ToolCall:
        """Raises `ValueError` and `TypeError` unless this calls one of the tools."""
        if name not in self._names or not isinstance(arguments, dict):
            raise ValueError("not a call of one of the tools")
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()  # raises for half of a surrogate pair
        return ToolCall(new_id(self._format), name, text)

    def _release(self, end: int) -> str:
        """Content up to `end`. White space at its end is kept back, because a call may follow."""
        text, self._text, self._scanner = self._text[:end], self._text[end:], None
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        text = self._space + text
        content = text.rstrip()
        self._space = text[len(content) :]
        return content


def new_id(tool_format: ToolFormat | None) -> str:
    if tool_format is None or tool_format.id_characters is None:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(ID_CHARACTERS) for _ in range(tool_format.id_characters))
