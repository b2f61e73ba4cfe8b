"""The public records of an engine: outputs, scores and stats."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


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
        prompt_aux: the `aux` of the prompt tokens before the last, NumPy arrays `[prompt - 1, ...]`. Followed by `aux`,
            it has a row for each token except the last new one. It was computed with the keys and values that the
            completion used last: after an update of the weights, a preempted request computes its prompt with the new
            ones. None without `EngineOptions.prompt_aux`, until the completion is finished, or if it has no tokens.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: str | None
    # Equal tokens are equal completions.
    weight_versions: list[int] = dataclasses.field(default_factory=list, compare=False)
    top_logprobs: list[dict[int, float]] | None = None
    aux: Any = dataclasses.field(default=None, compare=False)
    prompt_aux: Any = dataclasses.field(default=None, compare=False)


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
        num_grammar_states: states of the grammars of running requests in the pool now.
        waits_for_grammar_room: whether requests wait now because the pool has no room for the next one's grammar.
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
    num_grammar_states: int = 0
    waits_for_grammar_room: bool = False
    num_recomputed: int = 0
    num_preempted: int = 0

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, over the time with unfinished requests."""
        return self.num_generated / self.seconds if self.seconds else 0.0
