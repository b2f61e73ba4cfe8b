"""What a caller hands to an engine with a request, and what comes back."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpaged._integers import checked_size

LEAST, MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)  # numbers that the device holds


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue a request. The names are vLLM's.

    Attributes:
        max_tokens: the most new tokens.
        temperature: 0 takes the most likely token.
        top_k: draw from the k most likely tokens, and those as likely as the k-th; 0 or -1: from all.
        top_p: of these, draw from the most likely tokens that together have this part of their probability; 1: from
            all. Equally likely tokens are kept or cut together.
        min_p: before `top_p`, cut tokens whose probability, after temperature, is less than this part of the most
            likely token's; 0: none.
        seed: from 0 to 2^32 - 1. A request's tokens depend on its prompt, its parameters and its seed, not on other
            requests. None: the engine gives each request a seed.
        stop_token_ids: each of these ends the request, and stays its last token. Kept as a tuple.
        n: the number of completions. The scheduler sees each as a request. The first has `seed`, the i-th a seed made
            of `seed` and i.
        logprobs: whether to return the log probability of each new token under the model, before temperature, top_k
            and top_p unless the engine has `processed_logprobs`. A bool, where vLLM takes a number: that is
            `top_logprobs`.
        prompt_logprobs: whether to return those of the prompt's tokens too. It then takes nothing from the prefix
            cache; of `n` completions, only the first does not.
        top_logprobs: how many of the most likely tokens to return with their log probabilities, beside each new token
            and, with `prompt_logprobs`, beside each token of the prompt; at most the engine's `max_logprobs`. They are
            always the model's.
        adapter: the model's adapter that the request takes, from 0 on, below the engine's `num_adapters`; None: none.
        head_start: on the device the request ranks as if it had come this many requests earlier, right after the one
            that did; if negative, later.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
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
                f"stop_token_ids must be a tuple of token ids; got stop_token_ids={self.stop_token_ids!r}."
            )
        stop_token_ids = tuple(checked_size("stop_token_ids", token, 0, 2**31 - 1) for token in self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        for name in ("logprobs", "prompt_logprobs"):
            if not isinstance(value := getattr(self, name), bool | np.bool_):
                raise ValueError(
                    f"{name} must be True or False; got {name}={value!r}. They are of the request's own tokens; "
                    "top_logprobs says how many other likely tokens to return."
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
        logprobs: the log probability of each; None if the request did not ask for them.
        finish_reason: "stop" after a stop token, "length" after `max_tokens`, "abort"; None: not finished.
        weight_versions: how often `Engine.update_weights` had been called when each token was made.
        top_logprobs: beside each, the log probabilities of the most likely tokens by token, the most likely first;
            None if the request did not ask for them.
        aux: what `apply` returned as `aux` for the token that each was drawn from: each leaf a NumPy array `[tokens,
            ...]`. None if it returns none, or there are no tokens.
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
    """What a request has generated so far.

    Attributes:
        request_id: the id from `Engine.add_request`.
        outputs: its `n` completions.
        finished: whether all completions are finished.
        prompt_logprobs: the log probability of each token of the prompt after those before it, None for the first;
            NaN while it is not computed. None if the request did not ask for them.
        prompt_top_logprobs: beside each of these, the most likely tokens, as in `Completion`; None for the first; empty
            while they are not computed.
        num_cached_tokens: tokens of the prompt that the first completion found in the prefix cache when it began; 0
            until then.
    """

    request_id: int
    outputs: list[Completion]
    finished: bool
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[dict[int, float] | None] | None = None
    num_cached_tokens: int = dataclasses.field(default=0, compare=False)  # it depends on earlier requests


@dataclasses.dataclass(frozen=True)
class Score:
    """What a model makes of given tokens.

    Attributes:
        logprobs: the log probability of each, after the prompt and the tokens before it.
        is_greedy: whether each is the most likely token there, which a temperature of 0 would take.
        top_logprobs: beside each, the most likely tokens, as in `Completion`; None if they were not asked for.
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
        num_queued: requests on the host now.
        num_waiting: requests on the device that wait now.
        num_running: requests that run now.
        num_blocks: blocks of each cache, without the null block.
        num_free_blocks: free blocks now. They include cached prefixes that nobody holds.
        seconds: the time during which there were requests.
        num_slices: slices read.
        num_steps: steps of the model.
        num_narrow_steps: steps of single tokens with fewer than `max_num_seqs` rows.
        num_mixed_steps: steps that had rows for chunks of prompts.
        num_steps_by_kind: steps by their rows, such as `{"single_64": 10, "mixed_1024": 3}`: ten of up to 64 single
            tokens, and three of up to 1024 tokens with chunks of prompts.
        num_generated: new tokens.
        num_drafted: drafts that were computed.
        num_accepted: of these, drafts that became tokens.
        num_scored: tokens scored, by `score` or as `prompt_logprobs`; again after a preemption.
        num_computed: tokens computed, including prompts and recomputed tokens.
        num_saved_reads: tokens of shared blocks whose keys and values a step did not read again, summed over the steps.
        num_found: tokens found in the prefix cache, and so not computed.
        num_brought: tokens whose keys and values came back from host memory, to be found.
        host_bytes: bytes of cached blocks in host memory now.
        num_recomputed: computed tokens that preemptions dropped.
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
    num_steps_by_kind: Mapping[str, int] = dataclasses.field(default_factory=dict)
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
        """New tokens per second, counting only time during which there were requests."""
        return self.num_generated / self.seconds if self.seconds else 0.0
