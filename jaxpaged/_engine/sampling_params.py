"""The sampling parameters of a request, and their checks."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpaged._integers import checked_size

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
        stop_token_ids: each of these ends the request, and is kept as its last token. Stored as a tuple.
        n: the number of completions. The scheduler treats each as a request. The first uses `seed`, the i-th a seed
            derived from `seed` and i.
        logprobs: whether to return the log probability of each new token. By default this is the model's, before
            temperature, `top_k`, `top_p` and `min_p`; with the engine's `processed_logprobs` it is that of the
            distribution actually sampled from. A bool: vLLM's number is `top_logprobs`.
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
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    n: int = 1
    logprobs: bool = False
    prompt_logprobs: bool = False
    top_logprobs: int = 0
    adapter: int | None = None
    head_start: int = 0

    def __post_init__(self) -> None:
        for name, least in {"max_tokens": 1, "top_k": -1, "n": 1, "top_logprobs": 0, "head_start": -(2**31)}.items():
            checked_size(name, getattr(self, name), least, 2**31 - 1)
        if self.seed is not None:
            checked_size("seed", self.seed, 0, 2**32 - 1)
        if self.adapter is not None:
            checked_size("adapter", self.adapter, 0, 2**31 - 1)
        if np.ndim(self.stop_token_ids) != 1:
            raise ValueError(
                f"stop_token_ids must be a sequence of token ids; got stop_token_ids={self.stop_token_ids!r}."
            )
        stop_token_ids = tuple(checked_size("stop_token_ids", token, 0, 2**31 - 1) for token in self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
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
        }
        for message in (message for message, is_wrong in wrong.items() if is_wrong):
            name = message.split()[0]
            raise ValueError(f"{message}; got {name}={getattr(self, name)!r}.")


def _is_within(value: Any, least: float, most: float) -> bool:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and least <= value <= most
