"""The parameters by which requests change their logits, as arrays."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged._slice.options import ResolvedOptions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitParams:
    """Parameters of requests: `[requests, ...]` in the state and the inbox, `[rows, ...]` for the rows of a step.

    A row of zeros changes no logits. The listed tokens of a request share one list: first those of `logit_bias`, then
    `allowed_token_ids`, then the tokens of `bad_words`, word by word.

    Attributes:
        is_used: bool, whether any of these parameters changes logits.
        presence_penalty: float32.
        frequency_penalty: float32.
        repetition_penalty: float32, read where `is_used`.
        min_tokens: int32.
        tokens: int32 `[requests, num_listed_tokens]`, the listed tokens.
        values: float32, as `tokens`: the bias of a token of `logit_bias`; the number of tokens after a token in its bad
            word.
        num_biased: int32, the number of tokens of `logit_bias`.
        num_allowed: int32, the number of `allowed_token_ids`; 0: all tokens are allowed.
        num_bad: int32, the number of tokens in all `bad_words`.
        ints: int32 `[requests, num_logits_ints]`, for the caller's function.
        floats: float32 `[requests, num_logits_floats]`, for the caller's function.
    """

    is_used: Any
    presence_penalty: Any
    frequency_penalty: Any
    repetition_penalty: Any
    min_tokens: Any
    tokens: Any
    values: Any
    num_biased: Any
    num_allowed: Any
    num_bad: Any
    ints: Any
    floats: Any

    @classmethod
    def create(cls, num_rows: int, options: ResolvedOptions, xp: ModuleType = jnp) -> LogitParams:
        """Zeros."""

        def zeros(dtype: Any, *shape: int) -> Any:
            return xp.zeros((num_rows, *shape), dtype)

        return cls(
            is_used=zeros(xp.bool_),
            presence_penalty=zeros(xp.float32),
            frequency_penalty=zeros(xp.float32),
            repetition_penalty=zeros(xp.float32),
            min_tokens=zeros(xp.int32),
            tokens=zeros(xp.int32, options.num_listed_tokens),
            values=zeros(xp.float32, options.num_listed_tokens),
            num_biased=zeros(xp.int32),
            num_allowed=zeros(xp.int32),
            num_bad=zeros(xp.int32),
            ints=zeros(xp.int32, options.num_logits_ints),
            floats=zeros(xp.float32, options.num_logits_floats),
        )
