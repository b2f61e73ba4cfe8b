"""The parameters by which requests change their logits: checks against the options, and arrays for the inbox."""

import itertools
from collections.abc import Sequence

import numpy as np

from jaxpaged._engine.sampling_params import SamplingParams
from jaxpaged._slice.logit_params import LogitParams
from jaxpaged._slice.options import ResolvedOptions


def num_listed(params: SamplingParams) -> int:
    """The number of tokens in `logit_bias`, `allowed_token_ids` and `bad_words` together."""
    return len(params.logit_bias) + len(params.allowed_token_ids or ()) + sum(map(len, params.bad_words))


def check_logit_params(params: SamplingParams, options: ResolvedOptions) -> None:
    if (num_tokens := num_listed(params)) > (num_listed_tokens := options.num_listed_tokens):
        raise ValueError(
            f"logit_bias, allowed_token_ids and bad_words list {num_tokens} tokens together, and the engine's "
            f"{num_listed_tokens=}. Make the engine with a larger num_listed_tokens."
        )
    if (vocab_size := options.vocab_size) is not None:
        for name, tokens in listed_tokens(params).items():
            if (most := max(tokens, default=0)) >= vocab_size:
                raise ValueError(f"token ids of {name} must be below the engine's {vocab_size=}; got {most}.")
    for name in ("logits_ints", "logits_floats"):
        if (length := len(getattr(params, name))) > (most := getattr(options, f"num_{name}")):
            raise ValueError(
                f"{name} must have at most the engine's num_{name}={most} numbers; got {length}. Make the engine with "
                f"a larger num_{name}."
            )


def listed_tokens(params: SamplingParams) -> dict[str, list[int]]:
    """The tokens of each list, in the order of `LogitParams.tokens`."""
    return {
        "logit_bias": list(params.logit_bias),
        "allowed_token_ids": list(params.allowed_token_ids or ()),
        "bad_words": list(itertools.chain.from_iterable(params.bad_words)),
    }


def changes_logits(params: SamplingParams) -> bool:
    penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
    has_others = params.min_tokens > 0 or params.grammar is not None
    return penalties != (0, 0, 1) or has_others or num_listed(params) > 0


def logit_params_in_rows(each: Sequence[SamplingParams], options: ResolvedOptions, num_rows: int) -> LogitParams:
    """NumPy arrays with a row for each request, padded to `num_rows`."""
    arrays = LogitParams.create(num_rows, options, np)
    for i, params in enumerate(each):
        arrays.ints[i, : len(params.logits_ints)] = params.logits_ints
        arrays.floats[i, : len(params.logits_floats)] = params.logits_floats
        if not changes_logits(params):
            continue
        arrays.is_used[i] = True
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens"):
            getattr(arrays, name)[i] = getattr(params, name)
        lists = list(listed_tokens(params).values())
        arrays.num_biased[i], arrays.num_allowed[i], arrays.num_bad[i] = map(len, lists)
        tokens = list(itertools.chain.from_iterable(lists))
        num_after = [after for word in params.bad_words for after in reversed(range(len(word)))]
        arrays.tokens[i, : len(tokens)] = tokens
        arrays.values[i, : len(tokens)] = [*params.logit_bias.values(), *[0.0] * len(lists[1]), *num_after]
    return arrays
