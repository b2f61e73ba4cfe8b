"""The forms of OpenAI's API: what answers and the chunks of a stream look like.

https://platform.openai.com/docs/api-reference
"""

import dataclasses
import functools
import json
import math
import time
from collections.abc import AsyncIterator
from typing import Any

from lib.openai_forms import Ask
from lib.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # for -inf and NaN, which JSON does not have


@dataclasses.dataclass
class Piece:
    """The new part of a completion.

    Attributes:
        index: of the completion in its answer.
        text: after the reasoning, which only chats have.
        finish_reason: set in the last piece of a completion.
        token_ids: new tokens.
        scored_ids: tokens with logprobs, an echoed prompt's too; empty if they were not asked for.
        logprobs: of these tokens; None: of a prompt's first token, which follows none.
        top_logprobs: logprobs of the likeliest tokens instead of each, by token; empty if not asked for.
        offsets: where each token begins in the text.
    """

    index: int
    reasoning: str = ""
    text: str = ""
    finish_reason: str | None = None
    token_ids: list[int] = dataclasses.field(default_factory=list)
    scored_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float | None] = dataclasses.field(default_factory=list)
    top_logprobs: list[dict[int, float]] = dataclasses.field(default_factory=list)
    offsets: list[int] = dataclasses.field(default_factory=list)

    def add(self, piece: "Piece") -> None:
        self.reasoning += piece.reasoning
        self.text += piece.text
        self.finish_reason = piece.finish_reason
        self.token_ids += piece.token_ids
        self.scored_ids += piece.scored_ids
        self.logprobs += piece.logprobs
        self.top_logprobs += piece.top_logprobs
        self.offsets += piece.offsets

    @property
    def has_output(self) -> bool:
        return bool(self.reasoning or self.text or self.finish_reason or self.token_ids or self.scored_ids)


class TokenForms:
    """A token's text and bytes in logprobs. They are kept, because the same tokens come again and again."""

    def __init__(self, tokenizer: Tokenizer):
        self.text = functools.cache(tokenizer.token_text)
        self.bytes = functools.cache(lambda token: list(tokenizer.token_bytes(token)))

    def entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": _finite(logprob), "bytes": self.bytes(token)}

    def by_text(self, token: int, logprob: float | None, likely: dict[int, float]) -> dict[str, float | None] | None:
        """The most likely tokens and the chosen one. Of tokens with the same text the likeliest counts."""
        if logprob is None:
            return None
        by_text: dict[str, float | None] = {}
        for other, of_other in [*likely.items(), (token, logprob)]:
            by_text.setdefault(self.text(other), _finite(of_other))
        return by_text


class Answer:
    """Makes the answer to one request: whole, or as the chunks of a stream.

    Args:
        ask: the request.
        prompts: its tokens.
        usage: of all completions; read after the last piece, or with each chunk.
        forms: of the tokenizer.
        request_id: ends the answer's id.
    """

    def __init__(self, ask: Ask, prompts: list[list[int]], usage: dict[str, Any], forms: TokenForms, request_id: str):
        self._ask, self._prompts, self._usage, self._forms = ask, prompts, usage, forms
        self._num_completions = len(prompts) * ask.params.n
        prefix, kind = ("chatcmpl", "chat.completion") if ask.is_chat else ("cmpl", "text_completion")
        kind += ".chunk" if ask.is_chat and ask.is_streamed else ""
        self._head = {"id": f"{prefix}-{request_id}", "object": kind, "created": int(time.time()), "model": ask.model}

    async def whole(self, pieces: AsyncIterator[Piece]) -> dict[str, Any]:
        completions = [Piece(index) for index in range(self._num_completions)]
        async for piece in pieces:
            completions[piece.index].add(piece)
        choices = [self._choice(whole) | self._prompt_ids(whole.index) for whole in completions]
        return self._head | self._chat_prompt_ids() | {"choices": choices, "usage": self._usage}

    async def chunks(self, pieces: AsyncIterator[Piece]) -> AsyncIterator[dict[str, Any]]:
        has_begun = [False] * self._num_completions
        if self._ask.is_chat:
            for index in range(self._num_completions):
                role = self._choice(Piece(index), role={"role": "assistant"})
                yield self._chunk_head() | self._chat_prompt_ids() | {"choices": [role]}
        async for piece in pieces:
            ids = {} if has_begun[piece.index] else self._prompt_ids(piece.index)
            has_begun[piece.index] = True
            yield self._chunk_head() | {"choices": [self._choice(piece) | ids]}
        if self._ask.includes_usage:
            yield self._head | {"choices": [], "usage": self._usage}

    def _chunk_head(self) -> dict[str, Any]:
        if self._ask.has_usage_in_chunks:
            return self._head | {"usage": self._usage}
        return self._head | ({"usage": None} if self._ask.includes_usage else {})

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        """vLLM has them in the choices of completions, and once for a chat."""
        if self._ask.is_chat or not self._ask.returns_ids:
            return {}
        return {"prompt_token_ids": self._prompts[index // self._ask.params.n]}

    def _chat_prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompts[0]} if self._ask.is_chat and self._ask.returns_ids else {}

    def _choice(self, piece: Piece, role: dict[str, str] | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": piece.index,
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }
        if self._ask.returns_ids:
            choice["token_ids"] = piece.token_ids
        if not self._ask.is_chat:
            return choice | {"text": piece.text}
        reasoning = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        if self._ask.is_streamed:
            content = {} if reasoning and not piece.text else {"content": piece.text}
            return choice | {"delta": (role or {}) | reasoning | content}
        return choice | {"message": {"role": "assistant", "content": piece.text, "refusal": None} | reasoning}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self._ask.params.logprobs:
            return None
        likely = piece.top_logprobs or [{} for _ in piece.scored_ids]
        each = list(zip(piece.scored_ids, piece.logprobs, likely, strict=True))
        if self._ask.is_chat:
            entries = [self._forms.entry(token, logprob) for token, logprob, _ in each]
            tops = [[self._forms.entry(*other) for other in others.items()] for *_, others in each]
            content = [entry | {"top_logprobs": top} for entry, top in zip(entries, tops, strict=True)]
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._forms.text(token) for token in piece.scored_ids],
            "token_logprobs": list(map(_finite, piece.logprobs)),
            "top_logprobs": [self._forms.by_text(*one) for one in each] if self._ask.params.top_logprobs else None,
            "text_offset": piece.offsets,
        }


def _finite(logprob: float | None) -> float | None:
    return logprob if logprob is None or math.isfinite(logprob) else LEAST_LOGPROB


def make_usage(num_prompt_tokens: int) -> dict[str, Any]:
    usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": 0, "total_tokens": num_prompt_tokens}
    return usage | {"prompt_tokens_details": {"cached_tokens": 0}}


def event(value: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(value, allow_nan=False)}\n\n"
