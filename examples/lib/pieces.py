"""Converts outputs of an engine to pieces of an answer: text, logprobs and finish reasons."""

import dataclasses
import itertools
import math
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from jaxpaged import Completion, RequestOutput
from lib.answer_stream import AnswerStream
from lib.engine_metrics import CompletionTimes
from lib.engines import Generation
from lib.openai_forms import Ask
from lib.service import Service
from lib.text_stream import TextStream
from lib.tool_calls import ToolCall, ToolCallStream


class Score(NamedTuple):
    token: int
    logprob: float | None  # None for a prompt's first token
    likely: dict[int, float]  # logprobs of the most likely tokens here; empty if not requested
    offset: int  # where the token starts in the text


@dataclasses.dataclass
class Piece:
    """A new part of a completion.

    Attributes:
        index: index of the completion in its answer.
        text: new text, without the reasoning and the tool calls of a chat.
        calls: new tool calls.
        finish_reason: set in the last piece of a completion.
        token_ids: new tokens.
        scores: scores of an echoed prompt's tokens and of the new tokens; empty if not requested.
    """

    index: int
    reasoning: str = ""
    text: str = ""
    calls: list[ToolCall] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    token_ids: list[int] = dataclasses.field(default_factory=list)
    scores: list[Score] = dataclasses.field(default_factory=list)

    def add(self, piece: "Piece") -> None:
        self.reasoning += piece.reasoning
        self.text += piece.text
        self.calls += piece.calls
        self.finish_reason = piece.finish_reason
        self.token_ids += piece.token_ids
        self.scores += piece.scores


class Pieces:
    """The pieces of one request's completions, as they arrive.

    Attributes:
        prompts: prompt of each completion.
        usage: token counts of all completions so far.
        finish_reasons: finish reasons of the completions that have ended.
    """

    def __init__(self, service: Service, ask: Ask, generation: Generation, begin: float):
        self.service, self.ask, self._generation = service, ask, generation
        self.prompts = [prompt for prompt, params in generation.requests for _ in range(params.n)]
        self.finish_reasons = list[str]()
        num_prompt_tokens = sum(len(prompt) for prompt, _ in generation.requests)
        self.usage: dict[str, Any] = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": 0,
            "total_tokens": num_prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        self._cached = [0] * len(generation.requests)
        self._texts = [CompletionText(service, ask, prompt) for prompt in self.prompts]
        self._times = [CompletionTimes(service.metrics, begin) for _ in self.prompts]

    async def __aiter__(self) -> AsyncIterator[Piece]:
        async for i, output in self._generation.outputs():
            if self.ask.params.prompt_logprobs and not (output.finished or is_scored(output)):
                continue  # a later output includes this one
            self._cached[i] = output.num_cached_tokens
            self.usage["prompt_tokens_details"]["cached_tokens"] = sum(self._cached)
            for k, completion in enumerate(output.outputs):
                index = i * self.ask.params.n + k
                text = self._texts[index]
                if text.is_finished:
                    continue
                piece = text.extend(Piece(index), output, completion)
                self.usage["completion_tokens"] += len(piece.token_ids)
                self.usage["total_tokens"] += len(piece.token_ids)
                if piece.token_ids:
                    self._times[index].add(len(piece.token_ids))
                if piece.finish_reason is not None:
                    self._times[index].end()
                    self.finish_reasons.append(piece.finish_reason)
                    if completion.finish_reason is None:
                        self.service.engines.end(self._generation, i, k)
                if piece != Piece(index):
                    yield piece
            if len(self.finish_reasons) == len(self._texts):
                return

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(text.num_reasoning_tokens for text in self._texts)

    def describe(self) -> str:
        """Details for the log."""
        usage, ends = self.usage, ", ".join(self.finish_reasons) or "not finished"
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        prompt = f"{usage['prompt_tokens']} prompt tokens, {cached} of them cached"
        return f", {self.ask.model}, {prompt}, {usage['completion_tokens']} new tokens, {ends}"


class CompletionText:
    """The text of one completion as it grows.

    Attributes:
        is_finished: whether the last piece has been returned.
    """

    def __init__(self, service: Service, ask: Ask, prompt: list[int]):
        self.is_finished = False
        self._ask, self._prompt, self._tokenizer = ask, prompt, service.checkpoint.tokenizer
        calls, use = None, ask.tool_use
        if use is not None and use.callable_names and service.tool_format is not None:
            tool_format = service.tool_format.without_marks if use.is_forced else service.tool_format
            calls = ToolCallStream(tool_format, use.callable_names, is_parallel=use.is_parallel)
        self._stream = AnswerStream(
            self._tokenizer,
            ask.stops,
            calls=calls,
            prompt_ids=prompt,
            splits=ask.is_chat and service.splits_reasoning,
            skip_special_tokens=ask.skips_special_tokens,
            includes_stop=ask.includes_stop,
            has_offsets=ask.params.logprobs and not ask.is_chat,
        )
        self._num_tokens = self._num_characters = self._num_echoed = 0
        self._is_echo_due = ask.is_echoed

    @property
    def num_reasoning_tokens(self) -> int:
        return self._stream.num_reasoning_tokens

    def extend(self, piece: Piece, output: RequestOutput, completion: Completion) -> Piece:
        """Adds the new output of the completion to an empty piece."""
        if self._is_echo_due:
            self._is_echo_due = False
            self._echo(piece, output)
        reason = completion.finish_reason
        token_ids = completion.token_ids if self._ask.max_tokens != 0 else []  # the engine generates one
        # As in vLLM, a stop token has no text, even if it is not a special token.
        hides_last = reason == "stop" and not self._ask.includes_stop
        shown = token_ids[:-1] if hides_last else token_ids
        piece.reasoning, text, piece.calls = self._stream.extend(shown, is_last=reason is not None)
        piece.text += text
        self._num_characters += len(text)
        start, self._num_tokens = self._num_tokens, self._stream.num_tokens
        if not self._stream.is_stopped:
            self._num_tokens = len(token_ids)
        new = slice(start, self._num_tokens)
        piece.token_ids = token_ids[new]
        if completion.logprobs is not None:
            likely = completion.top_logprobs[new] if completion.top_logprobs else itertools.repeat({})
            piece.scores += map(Score, piece.token_ids, completion.logprobs[new], likely, self._offsets(new))
        piece.finish_reason = "stop" if self._stream.is_stopped else reason
        if piece.finish_reason == "stop" and self._stream.num_calls:
            piece.finish_reason = "tool_calls"
        if self._ask.max_tokens == 0 and piece.finish_reason == "stop":
            piece.finish_reason = "length"
        self.is_finished = piece.finish_reason is not None
        return piece

    def _echo(self, piece: Piece, output: RequestOutput) -> None:
        """The prompt, as its tokens are decoded."""
        stream = TextStream(self._tokenizer, has_offsets=self._ask.params.logprobs)
        # A character that the prompt leaves incomplete is part of the completion.
        piece.text = stream.extend(self._prompt, is_last=False)
        self._num_echoed = len(piece.text)
        if output.prompt_logprobs is not None:
            likely = output.prompt_top_logprobs or itertools.repeat(None)
            scores = zip(self._prompt, output.prompt_logprobs, likely, stream.offsets, strict=False)
            piece.scores = [Score(token, logprob, others or {}, offset) for token, logprob, others, offset in scores]

    def _offsets(self, new: slice) -> list[int]:
        """Where new tokens start in the text. A stop token has no text and starts at its end."""
        offsets = [self._num_echoed + offset for offset in self._stream.offsets[new]]
        num_hidden = new.stop - new.start - len(offsets)
        return offsets + [self._num_echoed + self._num_characters] * num_hidden


def is_scored(output: RequestOutput) -> bool:
    """Whether all tokens of the prompt have logprobs. The last token gets its logprob last."""
    assert output.prompt_logprobs is not None
    last = output.prompt_logprobs[-1]
    return last is None or not math.isnan(last)
