"""The sampling parameters of a request, and their checks."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpaged._grammar.records import Grammar
from jaxpaged._integers import checked_size, checked_tuple

LEAST, MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)  # finite float32 numbers above 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue a request. The names are vLLM's.

    Attributes:
        max_tokens: the most new tokens.
        temperature: divides the logits; 0 is greedy decoding.
        top_k: sample from the k most likely tokens, with all tokens as likely as the k-th; 0 or -1: from all.
        top_p: sample from the most likely tokens, after `top_k`, whose probabilities sum to `top_p`; 1: from all.
            Equally likely tokens are kept or cut together.
        min_p: before `top_p`, cut tokens whose probability, after temperature, is less than `min_p` times the most
            likely token's; 0: none.
        seed: from 0 to 2^32 - 1. A request's tokens depend on its prompt, its parameters and its seed, not on other
            requests. None: the engine chooses a seed for each request.
        presence_penalty: subtracted from the logits of all tokens that occur among the new tokens; from -2 to 2.
        frequency_penalty: subtracted once for each occurrence of a token among the new tokens; from -2 to 2.
        repetition_penalty: divides the positive logits and multiplies the negative logits of all tokens that occur in
            the prompt or among the new tokens; above 0. It comes before the other two penalties.
        logit_bias: numbers added to the logits of tokens, by token id. Stored as a dict.
        allowed_token_ids: the tokens that may be drawn, at least one. None: all. Stored as a tuple.
        bad_words: sequences of token ids that never occur among the new tokens: after all but the last token of a
            sequence, the last one is not drawn. A sequence that begins in the prompt is not recognised. Stored as a
            tuple of tuples.
        min_tokens: the number of new tokens before any of `stop_token_ids` may be drawn.
        grammar: a compiled grammar (`jaxpaged.grammar`) that the new tokens follow: each token is drawn from those that
            can continue the answer. The end tokens of the grammar's vocabulary end the request. It ends where the
            grammar is complete, or after `max_tokens`, maybe inside the grammar: see `Completion.finish_reason`.
        logits_ints: ints for the engine's `process_logits`, at most `num_logits_ints`. Stored as a tuple.
        logits_floats: numbers for the engine's `process_logits`, at most `num_logits_floats`. Stored as a tuple.
        stop_token_ids: each of these ends the request, and is kept as its last token. Stored as a tuple.
        n: the number of completions. The scheduler treats each as a request. The first uses `seed`, the i-th a seed
            derived from `seed` and i.
        logprobs: whether to return the log probability of each new token. By default this is the model's, before
            penalties, temperature, `top_k`, `top_p` and `min_p`; with the engine's `processed_logprobs` it is that of
            the distribution actually sampled from. A bool: vLLM's number is `top_logprobs`.
        prompt_logprobs: whether to return the log probabilities of the prompt's tokens too. The whole prompt is then
            computed, without the prefix cache; with `n` completions, only for the first.
        top_logprobs: the number of most likely tokens to return for each new token and, with `prompt_logprobs`, for
            each prompt token; at most the engine's `max_logprobs`. Their log probabilities are always the model's.
        adapter: index of the adapter that the request uses, below the engine's `num_adapters`; None: no adapter.
        head_start: on the device the request is ranked as if it had arrived this many requests earlier, right after
            the request that did; if negative, later.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] = ()
    min_tokens: int = 0
    grammar: Grammar | None = None
    logits_ints: Sequence[int] = ()
    logits_floats: Sequence[float] = ()
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    n: int = 1
    logprobs: bool = False
    prompt_logprobs: bool = False
    top_logprobs: int = 0
    adapter: int | None = None
    head_start: int = 0

    def __post_init__(self) -> None:
        least_of = {"max_tokens": 1, "min_tokens": 0, "top_k": -1, "n": 1, "top_logprobs": 0, "head_start": -(2**31)}
        for name, least in least_of.items():
            checked_size(name, getattr(self, name), least, 2**31 - 1)
        if self.min_tokens > self.max_tokens:
            received = f"min_tokens={self.min_tokens}, max_tokens={self.max_tokens}"
            raise ValueError(f"min_tokens must be at most max_tokens; got {received}.")
        if self.seed is not None:
            checked_size("seed", self.seed, 0, 2**32 - 1)
        if self.adapter is not None:
            checked_size("adapter", self.adapter, 0, 2**31 - 1)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise ValueError(f"grammar must be a jaxpaged.grammar.Grammar; got {self.grammar!r}.")
        for name, value in self._checked_sequences().items():
            object.__setattr__(self, name, value)
        for name in ("logprobs", "prompt_logprobs"):
            if not isinstance(value := getattr(self, name), bool | np.bool_):
                raise ValueError(
                    f"{name} must be True or False; got {name}={value!r}. They return the logprobs of the "
                    "request's own tokens; top_logprobs is the number of other likely tokens."
                )
        wrong = {
            "temperature must be a number of at least 0": not _is_within(self.temperature, 0, MOST),
            "top_p must be a number above 0 and at most 1": not _is_within(self.top_p, LEAST, 1),
            "min_p must be a number from 0 to 1": not _is_within(self.min_p, 0, 1),
            "presence_penalty must be a number from -2 to 2": not _is_within(self.presence_penalty, -2, 2),
            "frequency_penalty must be a number from -2 to 2": not _is_within(self.frequency_penalty, -2, 2),
            "repetition_penalty must be a number above 0": not _is_within(self.repetition_penalty, LEAST, MOST),
        }
        for message in (message for message, is_wrong in wrong.items() if is_wrong):
            name = message.split()[0]
            raise ValueError(f"{message}; got {name}={getattr(self, name)!r}.")

    def _checked_sequences(self) -> dict[str, Any]:
        """The fields that are sequences, as tuples, and `logit_bias` as a dict."""
        allowed_token_ids = self.allowed_token_ids
        if allowed_token_ids is not None:
            allowed_token_ids = _checked_ids("allowed_token_ids", allowed_token_ids)
        bad_words = tuple(_checked_ids("bad_words", word) for word in checked_tuple("bad_words", self.bad_words))
        if allowed_token_ids == () or () in bad_words:
            name = "allowed_token_ids" if allowed_token_ids == () else "each of bad_words"
            raise ValueError(f"{name} must have at least one token id; got none.")
        logits_floats = checked_tuple("logits_floats", self.logits_floats)
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must be a dict from token ids to numbers; got {self.logit_bias!r}.")
        for name, values in (("logits_floats", logits_floats), ("logit_bias", self.logit_bias.values())):
            if wrong := [value for value in values if not _is_within(value, -MOST, MOST)]:
                raise ValueError(f"{name} must have finite numbers; got {wrong[0]!r}.")
        return dict(
            stop_token_ids=_checked_ids("stop_token_ids", self.stop_token_ids),
            logit_bias=dict(zip(_checked_ids("logit_bias", self.logit_bias), self.logit_bias.values(), strict=True)),
            allowed_token_ids=allowed_token_ids,
            bad_words=bad_words,
            logits_ints=_checked_ids("logits_ints", self.logits_ints, -(2**31)),
            logits_floats=logits_floats,
        )


def _checked_ids(name: str, tokens: Any, least: int = 0) -> tuple[int, ...]:
    if isinstance(tokens, str) or not isinstance(tokens, Iterable):
        raise ValueError(f"{name} must be a sequence of token ids; got {name}={tokens!r}.")
    return tuple(checked_size(name, token, least, 2**31 - 1) for token in tokens)


def _is_within(value: Any, least: float, most: float) -> bool:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and least <= value <= most
