"""Formats answers and stream chunks as in OpenAI's API.

https://platform.openai.com/docs/api-reference
"""

import dataclasses
import json
import math
import time
from collections.abc import AsyncIterator
from typing import Any

from lib.api_error import ApiError
from lib.engine_runner import EngineFailedError
from lib.pieces import Piece, Pieces, Score

LEAST_LOGPROB = -9999.0  # for -inf and NaN, which JSON does not have


class Answer:
    """Creates the answer to one request: complete, or as the chunks of a stream.

    Args:
        pieces: pieces of all completions.
        request_id: last part of the answer's id.
    """

    def __init__(self, pieces: Pieces, request_id: str):
        self._pieces, self._usage, self._ask, self._service = pieces, pieces.usage, pieces.ask, pieces.service
        prefix, kind = ("chatcmpl", "chat.completion") if self._ask.is_chat else ("cmpl", "text_completion")
        kind += ".chunk" if self._ask.is_chat and self._ask.is_streamed else ""
        self._head = {"id": f"{prefix}-{request_id}", "object": kind, "created": int(time.time())}
        self._head["model"] = self._ask.model
        self._may_call = self._ask.tool_use is not None and bool(self._ask.tool_use.callable_names)

    async def whole(self) -> dict[str, Any]:
        completions = [Piece(index) for index in range(len(self._pieces.prompts))]
        async for piece in self._pieces:
            completions[piece.index].add(piece)
        choices = [self._choice(whole) | self._prompt_ids(whole.index, of_chat=False) for whole in completions]
        return self._head | self._prompt_ids(0, of_chat=True) | {"choices": choices, "usage": self._usage}

    async def events(self) -> AsyncIterator[str]:
        """The chunks as server-sent events."""
        try:
            async for chunk in self.chunks():
                yield event(chunk)
        except EngineFailedError as error:
            yield event(ApiError(500, str(error)).body())
        else:
            yield "data: [DONE]\n\n"

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        num_completions = len(self._pieces.prompts)
        has_begun, num_calls = [False] * num_completions, [0] * num_completions
        if self._ask.is_chat:
            for index in range(num_completions):
                # A message of tool calls alone has no content, as in OpenAI's API.
                delta = {"role": "assistant", "content": None if self._may_call else ""}
                choice = self._choice(Piece(index)) | {"delta": delta}
                yield self._chunk_head() | self._prompt_ids(0, of_chat=True) | {"choices": [choice]}
        async for piece in self._pieces:
            ids = {} if has_begun[piece.index] else self._prompt_ids(piece.index, of_chat=False)
            has_begun[piece.index] = True
            for choice in self._choices(piece, num_calls[piece.index]):
                yield self._chunk_head() | {"choices": [choice | ids]}
                ids = {}
            num_calls[piece.index] += len(piece.calls)
        if self._ask.includes_usage:
            yield self._head | {"choices": [], "usage": self._usage}

    def _chunk_head(self) -> dict[str, Any]:
        if self._ask.has_usage_in_chunks:
            return self._head | {"usage": self._usage}
        return self._head | ({"usage": None} if self._ask.includes_usage else {})

    def _prompt_ids(self, index: int, *, of_chat: bool) -> dict[str, Any]:
        """Token ids of the prompts, as in vLLM: in every choice of a completion, but once in a chat response."""
        if not self._ask.returns_ids or of_chat != self._ask.is_chat:
            return {}
        return {"prompt_token_ids": self._pieces.prompts[index]}

    def _choices(self, piece: Piece, num_calls: int) -> list[dict[str, Any]]:
        """The piece as the choices of one or several chunks: first its text, then each call's name and arguments."""
        choices = [self._choice(dataclasses.replace(piece, finish_reason=None))]
        for index, call in enumerate(piece.calls, num_calls):
            begin = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
            end = {"function": {"arguments": call.arguments}}
            deltas = [{"tool_calls": [{"index": index} | part]} for part in (begin, end)]
            choices += [self._choice(Piece(piece.index)) | {"delta": delta} for delta in deltas]
        choices[-1]["finish_reason"] = piece.finish_reason
        return choices

    def _choice(self, piece: Piece) -> dict[str, Any]:
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
            content = {} if (reasoning or self._may_call) and not piece.text else {"content": piece.text}
            return choice | {"delta": reasoning | content}
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in piece.calls
        ]
        message = {"role": "assistant", "content": piece.text or (None if calls else ""), "refusal": None} | reasoning
        return choice | {"message": message | ({"tool_calls": calls} if calls else {})}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        scores = piece.scores
        if not self._ask.params.logprobs:
            return None
        if self._ask.is_chat:
            content = [
                self._entry(score.token, score.logprob)
                | {"top_logprobs": [self._entry(*likely) for likely in score.likely.items()]}
                for score in scores
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._service.token_text(score.token) for score in scores],
            "token_logprobs": [_finite(score.logprob) for score in scores],
            "top_logprobs": [self._by_text(score) for score in scores] if self._ask.params.top_logprobs else None,
            "text_offset": [score.offset for score in scores],
        }

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        data = list(self._service.token_bytes(token))
        return {"token": self._service.token_text(token), "logprob": _finite(logprob), "bytes": data}

    def _by_text(self, score: Score) -> dict[str, float | None] | None:
        """The most likely tokens and the sampled one. Of tokens with the same text, the most likely wins."""
        if score.logprob is None:
            return None
        by_text: dict[str, float | None] = {}
        for token, logprob in [*score.likely.items(), (score.token, score.logprob)]:
            by_text.setdefault(self._service.token_text(token), _finite(logprob))
        return by_text


def _finite(logprob: float | None) -> float | None:
    return logprob if logprob is None or math.isfinite(logprob) else LEAST_LOGPROB


def event(value: dict[str, Any]) -> str:
    """Formats a server-sent event."""
    return f"data: {json.dumps(value, allow_nan=False)}\n\n"
