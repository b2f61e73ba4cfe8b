"""The public records of an engine: sampling parameters, outputs, scores and stats."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
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


@dataclasses.dataclass(frozen=True)
class Completion:
    """One continuation of a prompt.

    Attributes:
        token_ids: the new tokens so far.
        logprobs: the log probability of each token; None without `SamplingParams.logprobs`.
        finish_reason: "stop" after a stop token, "length" after `max_tokens`, "abort"; None: not finished.
        weight_versions: for each token, the number of `Engine.update_weights` calls before it was computed.
        top_logprobs: for each token, the log probabilities of the most likely tokens by token id, the most likely
            first; None without `SamplingParams.top_logprobs`.
        aux: for each token, the `aux` that `apply` returned for the token before it; each leaf is a NumPy array
            `[tokens, ...]`. None if `apply` returns none, or there are no tokens.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: str | None
    # Equal tokens are equal completions.
    weight_versions: list[int] = dataclasses.field(default_factory=list, compare=False)
    top_logprobs: list[dict[int, float]] | None = None
    aux: Any = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """The output of a request so far.

    Attributes:
        request_id: the id from `Engine.add_request`.
        outputs: its `n` completions.
        finished: whether all completions are finished.
        prompt_logprobs: the log probability of each prompt token given those before it: None for the first, NaN until
            it is computed. None without `SamplingParams.prompt_logprobs`.
        prompt_top_logprobs: for each prompt token, the most likely tokens, as in `Completion`: None for the first,
            empty until they are computed.
        num_cached_tokens: prompt tokens that the first completion found in the prefix cache when it started; 0 until
            then.
    """

    request_id: int
    outputs: list[Completion]
    finished: bool
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[dict[int, float] | None] | None = None
    num_cached_tokens: int = dataclasses.field(default=0, compare=False)  # it depends on earlier requests


@dataclasses.dataclass(frozen=True)
class Score:
    """The log probabilities of given tokens under a model.

    Attributes:
        logprobs: the log probability of each token, given the prompt and the tokens before it.
        is_greedy: whether each token is the most likely one, which greedy decoding would choose.
        top_logprobs: for each token, the most likely tokens, as in `Completion`; None without `top_logprobs`.
    """

    logprobs: list[float]
    is_greedy: list[bool]
    top_logprobs: list[dict[int, float]] | None = None


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Sizes, and counts since the engine was made, unless an attribute says "now"; as of the last slice that was read.

    Attributes:
        max_num_seqs: the most requests that run at once.
        max_model_len: the most tokens of a request.
        chunk_tokens: the most prompt tokens that a step computes, with one token of each running request.
        widths: the rows of narrower steps. A batch-invariant engine uses none.
        steps_per_slice: the most steps of the model between two reports to the host.
        num_queued: requests waiting on the host now.
        num_waiting: requests waiting on the device now.
        num_running: requests running now.
        num_blocks: blocks of each cache, without the null block.
        num_free_blocks: free blocks now, with cached prefixes that no request uses.
        seconds: the time with unfinished requests.
        num_slices: slices whose results the host has read.
        num_steps: steps of the model.
        num_narrow_steps: decode steps with fewer than `max_num_seqs` rows.
        num_mixed_steps: steps with room for chunks of prompts.
        steps_by_kind: steps by their rows, such as `{"single_64": 10, "mixed_1024": 3}`: ten decode steps of up to
            64 tokens, and three steps of up to 1024 tokens with chunks of prompts.
        num_generated: new tokens.
        num_drafted: drafted tokens that were verified.
        num_accepted: drafted tokens that were accepted.
        num_scored: tokens scored, by `score` or as `prompt_logprobs`; tokens scored again after a preemption count
            again.
        num_computed: tokens computed, including prompts and recomputed tokens.
        num_saved_reads: reads of a token's keys and values that shared blocks saved, summed over the steps.
        num_found: tokens found in the prefix cache instead of computed.
        num_brought: tokens whose keys and values were copied back from host memory.
        host_bytes: bytes of cached blocks in host memory now.
        num_recomputed: computed tokens that preemptions discarded.
        num_preempted: preemptions.
    """

    max_num_seqs: int = 0
    max_model_len: int = 0
    chunk_tokens: int = 0
    widths: tuple[int, ...] = ()
    steps_per_slice: int = 0
    num_queued: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    seconds: float = 0.0
    num_slices: int = 0
    num_steps: int = 0
    num_narrow_steps: int = 0
    num_mixed_steps: int = 0
    steps_by_kind: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)
    num_generated: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_scored: int = 0
    num_computed: int = 0
    num_saved_reads: int = 0
    num_found: int = 0
    num_brought: int = 0
    host_bytes: int = 0
    num_recomputed: int = 0
    num_preempted: int = 0

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, over the time with unfinished requests."""
        return self.num_generated / self.seconds if self.seconds else 0.0
