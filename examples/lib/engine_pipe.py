"""Requests and outputs as they go through the pipe between a server and the process of an engine.

An output has all tokens of its request so far: only the tokens since the last one are sent. A grammar may have
megabytes: each is sent once, and later requests name it by a number.
"""

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from jaxpaged import Completion, RequestOutput, SamplingParams
from jaxpaged.grammar import Grammar
from lib.engine_loop import Request

PackedRequest = tuple[list[int], SamplingParams, int | None]  # prompt; parameters without grammar; its number
PackedOutput = tuple[int, list[tuple], bool, tuple]  # builtin types pickle faster than dataclasses
NOTHING = Completion([], [], None, top_logprobs=[])


class RequestPacker:
    """The sending side of requests.

    Args:
        send: sends the messages `keep_grammar` and `forget_grammar`. The garbage collector may call it.
    """

    def __init__(self, send: Callable[..., None]):
        self._send, self._counter = send, itertools.count()
        self._numbers: weakref.WeakKeyDictionary[Grammar, int] = weakref.WeakKeyDictionary()

    def pack(self, request: Request) -> PackedRequest:
        prompt, params = request
        if (grammar := params.grammar) is None:
            return prompt, params, None
        if grammar not in self._numbers:
            self._numbers[grammar] = number = next(self._counter)
            self._send("keep_grammar", number, grammar)
            weakref.finalize(grammar, self._send, "forget_grammar", number).atexit = False
        return prompt, dataclasses.replace(params, grammar=None), self._numbers[grammar]


class RequestUnpacker:
    """The receiving side of requests. It keeps a grammar as long as the sender does."""

    def __init__(self) -> None:
        self._grammars: dict[int, Grammar] = {}

    def keep_grammar(self, number: int, grammar: Grammar) -> None:
        self._grammars[number] = grammar

    def forget_grammar(self, number: int) -> None:
        del self._grammars[number]

    def unpack(self, packed: PackedRequest) -> Request:
        prompt, params, number = packed
        return prompt, params if number is None else dataclasses.replace(params, grammar=self._grammars[number])


class OutputPacker:
    """The sending side of outputs. It knows how many tokens of each unfinished request were sent."""

    def __init__(self) -> None:
        self._sent: dict[int, list[int]] = {}

    def pack(self, outputs: Iterable[tuple[int, RequestOutput]]) -> list[PackedOutput]:
        return [self._pack(number, output) for number, output in outputs]

    def _pack(self, number: int, output: RequestOutput) -> PackedOutput:
        sent = self._sent.pop(number, None) or [0] * len(output.outputs)
        if not output.finished:
            self._sent[number] = [len(completion.token_ids) for completion in output.outputs]
        news = [new_part(completion, start) for completion, start in zip(output.outputs, sent, strict=True)]
        prompt = output.prompt_logprobs, output.prompt_top_logprobs, output.num_cached_tokens
        return number, news, output.finished, prompt


class OutputUnpacker:
    """The receiving side of outputs. It knows the last output of each unfinished request."""

    def __init__(self) -> None:
        self._last: dict[int, list[Completion]] = {}

    def unpack(self, packed: Iterable[PackedOutput]) -> list[tuple[int, RequestOutput]]:
        return [(one[0], self._unpack(*one)) for one in packed]

    def _unpack(self, number: int, news: list[tuple], finished: bool, prompt: tuple) -> RequestOutput:
        last = self._last.pop(number, None) or [NOTHING] * len(news)
        completions = [extended(completion, *new) for completion, new in zip(last, news, strict=True)]
        if not finished:
            self._last[number] = completions
        return RequestOutput(number, completions, finished, *prompt)


def new_part(completion: Completion, start: int) -> tuple:
    """The arguments of `extended` for the tokens from `start` on."""
    return (
        completion.token_ids[start:],
        None if completion.logprobs is None else completion.logprobs[start:],
        completion.finish_reason,
        completion.weight_versions[start:],
        None if completion.top_logprobs is None else completion.top_logprobs[start:],
        completion.aux,
        completion.prompt_aux,
    )


def extended(
    last: Completion,
    token_ids: list[int],
    logprobs: list[float] | None,
    finish_reason: str | None,
    weight_versions: list[int],
    top_logprobs: list[dict[int, float]] | None,
    *aux: Any,
) -> Completion:
    """A completion with more tokens."""
    return Completion(
        last.token_ids + token_ids,
        None if logprobs is None else (last.logprobs or []) + logprobs,
        finish_reason,
        last.weight_versions + weight_versions,
        None if top_logprobs is None else (last.top_logprobs or []) + top_logprobs,
        *aux,
    )
