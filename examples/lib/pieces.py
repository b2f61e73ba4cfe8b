"""From the outputs of an engine to the pieces of an answer: text, logprobs and finish reasons."""

import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

from jaxpaged import Completion, RequestOutput
from lib.engine_metrics import CompletionTimes
from lib.engine_thread import Generation
from lib.openai_answers import Piece
from lib.openai_forms import Ask
from lib.reasoning import ReasoningStream
from lib.service import Service
from lib.text_stream import TextStream


class Pieces:
    """The pieces of one request's completions, as they arrive.

    Attributes:
        usage: of all completions so far.
        finish_reasons: of the completions that have ended.
    """

    def __init__(self, service: Service, ask: Ask, generation: Generation, usage: dict[str, Any], begin: float):
        self.usage, self.finish_reasons = usage, list[str]()
        self._engine, self._ask, self._generation = service.engine, ask, generation
        prompts = [prompt for prompt, params in generation.requests for _ in range(params.n)]
        self._texts = [CompletionText(service, ask, prompt) for prompt in prompts]
        self._times = [CompletionTimes(service.metrics, begin) for _ in prompts]
        self._cached = [0] * len(generation.requests)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        async for i, output in self._generation.outputs():
            if self._ask.params.prompt_logprobs and not (output.finished or is_scored(output)):
                continue  # another output follows, which has what this one has
            self._cached[i] = output.num_cached_tokens
            self.usage["prompt_tokens_details"]["cached_tokens"] = sum(self._cached)
            for k, completion in enumerate(output.outputs):
                index = i * self._ask.params.n + k
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
                        self._engine.end(self._generation, i, k)
                if piece.has_output:
                    yield piece
            if len(self.finish_reasons) == len(self._texts):
                return


class CompletionText:
    """The text of one completion, and which of its tokens were read.

    Attributes:
        is_finished: whether the last piece was made.
    """

    def __init__(self, service: Service, ask: Ask, prompt: list[int]):
        self.is_finished = False
        self._ask, self._prompt, self._tokenizer = ask, prompt, service.checkpoint.tokenizer
        options: dict[str, Any] = dict(prompt_ids=prompt, skip_special_tokens=ask.skips_special_tokens)
        options |= dict(includes_stop=ask.includes_stop)
        self._stream: TextStream | ReasoningStream
        if ask.is_chat and service.splits_reasoning:
            self._stream = ReasoningStream(self._tokenizer, ask.stops, **options)
        else:
            has_offsets = ask.params.logprobs and not ask.is_chat
            self._stream = TextStream(self._tokenizer, ask.stops, has_offsets=has_offsets, **options)
        self._num_tokens = self._num_characters = self._num_echoed = 0
        self._is_echo_due = ask.is_echoed

    def extend(self, piece: Piece, output: RequestOutput, completion: Completion) -> Piece:
        """Adds the new output of the completion to an empty piece."""
        if self._is_echo_due:
            self._is_echo_due = False
            self._echo(piece, output)
        reason = completion.finish_reason
        token_ids = completion.token_ids if self._ask.max_tokens != 0 else []  # the engine makes one
        # As in vLLM, a stop token has no text, even if it is no special token.
        hides_last = reason == "stop" and not self._ask.includes_stop
        self._read(piece, token_ids[:-1] if hides_last else token_ids, is_last=reason is not None)
        start, self._num_tokens = self._num_tokens, self._stream.num_tokens
        if not self._stream.is_stopped:
            self._num_tokens = len(token_ids)
        new = slice(start, self._num_tokens)
        piece.token_ids = token_ids[new]
        if completion.logprobs is not None:
            self._add_scores(piece, piece.token_ids, completion.logprobs[new], (completion.top_logprobs or [])[new])
            piece.offsets += self._offsets(new)
        piece.finish_reason = "stop" if self._stream.is_stopped else reason
        if self._ask.max_tokens == 0 and piece.finish_reason == "stop":
            piece.finish_reason = "length"
        self.is_finished = piece.finish_reason is not None
        return piece

    def _read(self, piece: Piece, token_ids: list[int], *, is_last: bool) -> None:
        if isinstance(self._stream, ReasoningStream):
            reasoning, text = self._stream.extend(token_ids, is_last=is_last)
            piece.reasoning += reasoning
        else:
            text = self._stream.extend(token_ids, is_last=is_last)
        piece.text += text
        self._num_characters += len(text)

    def _echo(self, piece: Piece, output: RequestOutput) -> None:
        """The prompt, as its tokens are decoded."""
        stream = TextStream(self._tokenizer, has_offsets=self._ask.params.logprobs)
        # A character that the prompt does not complete comes with the completion.
        piece.text = stream.extend(self._prompt, is_last=False)
        self._num_echoed = len(piece.text)
        if output.prompt_logprobs is not None:
            top_logprobs = [likely or {} for likely in output.prompt_top_logprobs or []]
            self._add_scores(piece, self._prompt, output.prompt_logprobs, top_logprobs)
            piece.offsets += stream.offsets

    def _add_scores(
        self,
        piece: Piece,
        token_ids: list[int],
        logprobs: Sequence[float | None],
        top_logprobs: list[dict[int, float]],
    ) -> None:
        piece.scored_ids += token_ids
        piece.logprobs += logprobs
        piece.top_logprobs += top_logprobs

    def _offsets(self, new: slice) -> list[int]:
        """Where new tokens begin; a stop token without a text at the end."""
        if isinstance(self._stream, ReasoningStream):
            return []
        offsets = [self._num_echoed + offset for offset in self._stream.offsets[new]]
        num_hidden = new.stop - new.start - len(offsets)
        return offsets + [self._num_echoed + self._num_characters] * num_hidden


def is_scored(output: RequestOutput) -> bool:
    """Whether all of the prompt's tokens have logprobs: the last token gets its own last."""
    assert output.prompt_logprobs is not None
    last = output.prompt_logprobs[-1]
    return last is None or not math.isnan(last)
