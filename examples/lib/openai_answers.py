"""The forms of OpenAI's API: what answers and the chunks of a stream look like.

https://platform.openai.com/docs/api-reference
"""

import dataclasses
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from lib.openai_forms import Ask
from lib.text_stream import HALF


@dataclasses.dataclass
class Piece:
    """What is new of a completion.

    Attributes:
        index: of the completion in its answer.
        finish_reason: set in the last piece of a completion.
        tokens: the text of each new token, if logprobs were asked for.
        logprobs: of these tokens; None: of a prompt's first token, which follows none.
        top_logprobs: texts and logprobs of the likeliest tokens instead of each; empty if not asked for.
        offsets: where each token begins in the text.
    """

    index: int
    text: str = ""
    finish_reason: str | None = None
    tokens: list[str] = dataclasses.field(default_factory=list)
    logprobs: list[float | None] = dataclasses.field(default_factory=list)
    top_logprobs: list[list[tuple[str, float]]] = dataclasses.field(default_factory=list)
    offsets: list[int] = dataclasses.field(default_factory=list)

    def add(self, piece: "Piece") -> None:
        self.text += piece.text
        self.finish_reason = piece.finish_reason
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.top_logprobs += piece.top_logprobs
        self.offsets += piece.offsets


class Answer:
    """Makes the answer to one request: whole, or as the chunks of a stream. `usage` is read after the last piece."""

    def __init__(self, ask: Ask, num_completions: int, usage: dict[str, int]):
        self._ask, self._num_completions, self._usage = ask, num_completions, usage
        prefix, kind = ("chatcmpl", "chat.completion") if ask.is_chat else ("cmpl", "text_completion")
        kind += ".chunk" if ask.is_chat and ask.is_streamed else ""
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time())}
        self._head["model"] = ask.model

    async def whole(self, pieces: AsyncIterator[Piece]) -> dict[str, Any]:
        completions = [Piece(index) for index in range(self._num_completions)]
        async for piece in pieces:
            completions[piece.index].add(piece)
        return self._head | {"choices": [self._choice(whole) for whole in completions], "usage": self._usage}

    async def chunks(self, pieces: AsyncIterator[Piece]) -> AsyncIterator[dict[str, Any]]:
        head = self._head | ({"usage": None} if self._ask.includes_usage else {})
        if self._ask.is_chat:
            for index in range(self._num_completions):
                yield head | {"choices": [self._choice(Piece(index), role={"role": "assistant"})]}
        async for piece in pieces:
            yield head | {"choices": [self._choice(piece)]}
        if self._ask.includes_usage:
            yield head | {"choices": [], "usage": self._usage}

    def _choice(self, piece: Piece, role: dict[str, str] | None = None) -> dict[str, Any]:
        choice = {"index": piece.index, "logprobs": self._logprobs(piece), "finish_reason": piece.finish_reason}
        if not self._ask.is_chat:
            return choice | {"text": piece.text}
        if self._ask.is_streamed:
            return choice | {"delta": (role or {}) | {"content": piece.text}}
        return choice | {"message": {"role": "assistant", "content": piece.text, "refusal": None}}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self._ask.params.logprobs:
            return None
        likely = piece.top_logprobs or [[] for _ in piece.tokens]
        if not self._ask.is_chat:
            names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            top = list(map(_by_text, piece.tokens, piece.logprobs, likely)) if self._ask.params.top_logprobs else None
            return dict(zip(names, (piece.tokens, piece.logprobs, top, piece.offsets), strict=True))
        content = [
            _entry(token, logprob) | {"top_logprobs": list(itertools.starmap(_entry, others))}
            for token, logprob, others in zip(piece.tokens, piece.logprobs, likely, strict=True)
        ]
        return {"content": content, "refusal": None}


def _entry(token: str, logprob: float | None) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": None if HALF in token else list(token.encode())}


def _by_text(token: str, logprob: float | None, likely: list[tuple[str, float]]) -> dict[str, float] | None:
    """The most likely tokens and the chosen one; of tokens with the same text the likeliest."""
    if logprob is None:
        return None
    by_text: dict[str, float] = {}
    for text, of_text in [*likely, (token, logprob)]:
        by_text.setdefault(text, of_text)
    return by_text


def make_usage(num_prompt_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_prompt_tokens, "completion_tokens": 0, "total_tokens": num_prompt_tokens}


def event(value: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(value)}\n\n"
