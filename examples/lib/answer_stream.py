"""Splits the tokens of a chat's answer into reasoning, content and tool calls as they arrive."""

from collections.abc import Sequence
from typing import Any

from lib.reasoning import ReasoningStream
from lib.tokenizer import Tokenizer
from lib.tool_calls import ToolCall, ToolCallStream


class AnswerStream:
    """A `ReasoningStream` whose content is searched for tool calls.

    `options` are options of `ReasoningStream`. Without `calls`, all that is not reasoning is content.

    Attributes:
        num_tokens: tokens read so far. The last may contain a stop string and more.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, calls: ToolCallStream | None = None, **options: Any
    ):
        self._calls = calls
        if calls is not None:
            ids = map(tokenizer.tokenizer.token_to_id, calls.marks)
            options |= {"shows_calls": True, "shown_ids": frozenset(i for i in ids if i is not None)}
        self._text = ReasoningStream(tokenizer, stops, **options)

    @property
    def num_tokens(self) -> int:
        return self._text.num_tokens

    @property
    def num_reasoning_tokens(self) -> int:
        return self._text.num_reasoning_tokens

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string or a tool call has ended the answer."""
        return self._text.is_stopped or (self._calls is not None and self._calls.is_stopped)

    @property
    def num_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_calls

    @property
    def offsets(self) -> list[int]:
        """Where each token of the content starts; empty unless `has_offsets` is set."""
        return self._text.offsets

    def extend(self, token_ids: Sequence[int], *, is_last: bool) -> tuple[str, str, list[ToolCall]]:
        """The next piece of reasoning and of content, and the next calls; all may be empty.

        Args:
            token_ids: all tokens so far.
            is_last: no more come, so nothing is kept back.
        """
        if self._calls is None:
            return (*self._text.extend(token_ids, is_last=is_last), [])
        reasoning, content, calls = "", "", list[ToolCall]()
        ends = [len(token_ids)]
        if not self._calls.is_parallel:  # one by one, so that the call ends the answer at the same token in any slice
            ends = [*range(self.num_tokens + 1, len(token_ids)), *ends]
        for end in ends:
            ends_here = is_last and end == len(token_ids)
            new_reasoning, text = self._text.extend(token_ids[:end], is_last=ends_here)
            new_content, new_calls = self._calls.extend(text, is_last=ends_here or self._text.is_stopped)
            reasoning, content, calls = reasoning + new_reasoning, content + new_content, calls + new_calls
            if self.is_stopped:
                break
        return reasoning, content, calls
