"""Splits an answer into its reasoning and its content."""

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from lib.text_stream import TextStream
from lib.tokenizer import Tokenizer

REASONING, CONTENT = "reasoning", "content"
RECIPIENT = re.compile(r" to=(functions\.[\w.-]+)")  # of a tool call, in a header


class Thoughts:
    """Reasoning between <think> and </think>, as in Qwen3 and DeepSeek R1. The prompt may contain the first mark."""

    def __init__(self, begin: int, end: int):
        self.marks = {begin: REASONING, end: CONTENT}
        self._part = CONTENT

    @property
    def is_content(self) -> bool:
        """Whether the next token is content, unless it is a mark."""
        return self._part == CONTENT

    def part_of(self, token_id: int) -> str | None:
        """Reads the next token. Returns None for a mark."""
        if token_id in self.marks:
            self._part = self.marks[token_id]
            return None
        return self._part


class Channels:
    """Messages of gpt-oss: <|start|>assistant<|channel|>analysis<|message|>the text<|end|>

    The channel "analysis" is reasoning. Tool calls, "commentary to=functions.get_weather", count as reasoning too,
    because they are not for the user. If `shows_calls` is set they are part of the content instead, between
    "to=functions.get_weather<|message|>" and "<|call|>", for `tool_calls.ToolCallStream`.
    https://developers.openai.com/cookbook/articles/openai-harmony
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        message: int,
        channel: int,
        *others: int,
        splits_reasoning: bool = True,
        shows_calls: bool = False,
    ):
        self.marks = {message, channel, *others}
        self._tokenizer, self._message, self._channel = tokenizer, message, channel
        self._header: list[int] | None = None  # tokens before <|message|>
        self._part = CONTENT
        self._reasoning_part = REASONING if splits_reasoning else CONTENT
        self._shows_calls, self._is_call, self._marks_text = shows_calls, False, ""

    def part_of(self, token_id: int) -> str | None:
        """Reads the next token. Returns None for a mark, and for tokens in a message's header."""
        if token_id == self._message:
            self._begin_message(self.header)
        elif token_id == self._channel:
            self._header = [*(self._header or []), token_id]
        elif token_id in self.marks:
            self._header = []
            self._marks_text += "<|call|>" if self._is_call else ""
            self._is_call = False
        elif self._header is not None:
            self._header.append(token_id)
        else:
            return self._part
        return None

    @property
    def is_content(self) -> bool:
        """Whether the next token is content, unless it is a mark."""
        return self._header is None and self._part == CONTENT

    @property
    def is_in_header(self) -> bool:
        return self._header is not None

    @property
    def header(self) -> str:
        """The header that has begun, without the mark <|start|>."""
        return self._tokenizer.decode(self._header or [], skip_special_tokens=False)

    def _begin_message(self, header: str) -> None:
        recipient = RECIPIENT.search(header)
        self._is_call = recipient is not None and self._shows_calls
        if recipient is not None and self._is_call:
            self._marks_text += f"to={recipient[1]}<|message|>"
        is_reasoning = not self._is_call and ("<|channel|>analysis" in header or " to=" in header)
        self._header, self._part = None, self._reasoning_part if is_reasoning else CONTENT

    def take_marks(self) -> str:
        """The marks of tool calls since the last time, as text that belongs before the next token's."""
        text, self._marks_text = self._marks_text, ""
        return text


def make_splitter(
    tokenizer: Tokenizer, *, splits_reasoning: bool = True, shows_calls: bool = False
) -> Thoughts | Channels | None:
    """The splitter for the marks that are single tokens of the tokenizer. None: there is nothing to split."""
    if not splits_reasoning and not shows_calls:
        return None

    def find(*marks: str) -> list[int] | None:
        ids = [i for mark in marks if (i := tokenizer.tokenizer.token_to_id(mark)) is not None]
        return ids if len(ids) == len(marks) else None

    if ids := find("<|message|>", "<|channel|>", "<|start|>", "<|end|>"):
        ids += find("<|call|>") or []
        return Channels(tokenizer, *ids, splits_reasoning=splits_reasoning, shows_calls=shows_calls)
    if splits_reasoning and (ids := find("<think>", "</think>")):
        return Thoughts(*ids)
    return None


def read_prompt(splitter: Thoughts | Channels, prompt_ids: Sequence[int]) -> None:
    marked = [i for i, token_id in enumerate(prompt_ids) if token_id in splitter.marks]
    for token_id in prompt_ids[marked[-3:][0] :] if marked else ():  # a message has three before its text
        splitter.part_of(token_id)


class ReasoningStream:
    """Returns the reasoning and the content of a growing list of tokens, piece by piece, as `TextStream` does for text.

    The model's control tokens separate the two; control tokens in the prompt count too. Everything is content if the
    model has none, or `splits` is False. Stop strings apply only to the content, because reasoning may quote them from
    the question. With `shows_calls` the content has the tool calls of gpt-oss. `options` are options of `TextStream`.

    Attributes:
        num_tokens: tokens read so far. The last may hold a stop string and more.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        prompt_ids: Sequence[int] = (),
        splits: bool = True,
        shows_calls: bool = False,
        **options: Any,
    ):
        self.num_tokens = 0
        self._splitter = make_splitter(tokenizer, splits_reasoning=splits, shows_calls=shows_calls)
        self._ids: dict[str, list[int]] = {REASONING: [], CONTENT: []}
        stops_of = {REASONING: (), CONTENT: stops}
        self._streams = {
            part: TextStream(tokenizer, own, prompt_ids=prompt_ids, **options) for part, own in stops_of.items()
        }
        if self._splitter is not None:
            read_prompt(self._splitter, prompt_ids)

    @property
    def num_reasoning_tokens(self) -> int:
        return len(self._ids[REASONING])

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._streams[CONTENT].is_stopped

    @property
    def offsets(self) -> list[int]:
        """Where each token of the content starts; empty unless `has_offsets` is set."""
        return self._streams[CONTENT].offsets

    def extend(self, token_ids: Sequence[int], *, is_last: bool) -> tuple[str, str]:
        """The next piece of reasoning and of content; both may be empty.

        Args:
            token_ids: all tokens so far.
            is_last: no more come, so nothing is kept back.
        """
        pieces: dict[str, str] = {REASONING: "", CONTENT: ""}
        new = () if self.is_stopped else token_ids[self.num_tokens :]
        runs: Iterable[tuple[str | None, Iterable[int]]] = [(CONTENT, new)]
        if self._splitter is not None:
            runs = itertools.groupby(new, self._splitter.part_of)
        for part, run in runs:
            ids = list(run)
            if part is None:
                self.num_tokens += len(ids)
                # A mark ends the reasoning, even inside a character.
                pieces[REASONING] += self._streams[REASONING].extend(self._ids[REASONING], is_last=True)
                pieces[CONTENT] += self._splitter.take_marks() if isinstance(self._splitter, Channels) else ""
                continue
            stream = self._streams[part]
            start = stream.num_tokens
            self._ids[part] += ids
            pieces[part] += stream.extend(self._ids[part], is_last=False)
            self.num_tokens += stream.num_tokens - start
            if stream.is_stopped:
                break
        if is_last:
            for part, stream in self._streams.items():
                pieces[part] += stream.extend(self._ids[part], is_last=True)
        return pieces[REASONING], pieces[CONTENT]
