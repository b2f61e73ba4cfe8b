"""Rollouts for a learner: tokens and logprobs as arrays that stay on the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged._engine.requests import CompletionState
from jaxpaged._slice.packing import unpack
from jaxpaged._slice.state import Report


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollout:
    """Completions as arrays `[completions, most]`, zero past the end of each completion.

    `most` is the largest `max_tokens`. Completions are in the order of the prompts, the `n` of a prompt together.

    Attributes:
        tokens: int32.
        logprobs: float32, log probability of each token.
        mask: bool, True where there is a token.
        weight_versions: int32, for each token the number of `update_weights` calls before it was computed.
        aux: for each token, the `aux` that `apply` returned for the token before it, `[completions, most, ...]`. None
            if `apply` returns none.
        prompt_aux: `Completion.prompt_aux`, `[completions, longest prompt - 1, ...]`, zero past the end of each prompt.
            None without `EngineOptions.prompt_aux`.
    """

    tokens: jax.Array
    logprobs: jax.Array
    mask: jax.Array
    weight_versions: jax.Array
    aux: Any = None
    prompt_aux: Any = None


class Collector:
    """Writes the tokens of completions into a `Rollout` on the device, slice by slice.

    Args:
        rows: the completions.
        types: shapes and dtypes of a report.
    """

    def __init__(self, rows: Sequence[CompletionState], types: Report):
        leaves, tree = jax.tree.flatten(types)
        self._types, self._aux = (tree, tuple(leaves)), types.aux  # hashable
        self._rows = rows
        self._index = {id(row): i for i, row in enumerate(rows)}
        self._shape = len(rows), max(row.params.max_tokens for row in rows)
        self._rollout: Rollout | None = None

    def take(self, words: jax.Array, report: Report, on_device: Mapping[int, CompletionState], version: int) -> None:
        """Adds the tokens of one slice. `words`: its packed report on the device; `report`: in NumPy arrays."""
        request_ids = report.outbox.request_ids
        begins = np.full(request_ids.max(initial=0) + 1, -1)  # target of the next token at each place
        for place, row in on_device.items():
            if id(row) in self._index and place < len(begins):
                begins[place] = self._index[id(row)] * self._shape[1] + len(row.token_ids)
        places = request_ids.reshape(-1)
        order = np.argsort(places, kind="stable")  # a request's tokens stay in the order of the steps
        ordered = places[order]
        turn = np.arange(len(places)) - np.searchsorted(ordered, ordered)
        targets = np.full(len(places), self._shape[0] * self._shape[1], np.int32)
        begin = begins[ordered]
        targets[order] = np.where(begin >= 0, begin + turn, targets[0])
        if self._rollout is None:
            self._rollout = _empty(self._shape, words, self._aux)
        self._rollout = _put(self._rollout, words, targets, np.int32(version), types=self._types)

    def result(self) -> Rollout:
        assert self._rollout is not None  # every request has a token, or was aborted in a slice
        rollout: Rollout = jax.tree.map(lambda x: x.reshape(*self._shape, *x.shape[1:]), self._rollout)
        return dataclasses.replace(rollout, prompt_aux=self._prompt_aux(rollout.tokens.sharding))

    def _prompt_aux(self, sharding: jax.sharding.Sharding) -> Any:
        """The `aux` of all prompts, put on the device."""
        longest = max(len(row.prompt) for row in self._rows) - 1
        by_row = {i: row.prompt_aux for i, row in enumerate(self._rows) if row.prompt_aux is not None}

        def join(*each: np.ndarray) -> jax.Array:
            joined = np.zeros((len(self._rows), longest, *each[0].shape[1:]), each[0].dtype)
            for i, one in zip(by_row, each, strict=True):
                joined[i, : len(one)] = one
            return jax.device_put(joined, sharding)

        return jax.tree.map(join, *by_row.values()) if by_row else None


def _empty(shape: tuple[int, int], words: jax.Array, aux: Any) -> Rollout:
    """`aux`: its shapes and dtypes in a report, `[steps, draws, ...]`."""

    def zeros(dtype: Any, *of_token: int) -> jax.Array:
        return jnp.zeros((shape[0] * shape[1], *of_token), dtype, device=words.sharding)

    return Rollout(
        tokens=zeros(jnp.int32),
        logprobs=zeros(jnp.float32),
        mask=zeros(jnp.bool_),
        weight_versions=zeros(jnp.int32),
        aux=jax.tree.map(lambda x: zeros(x.dtype, *x.shape[2:]), aux),
    )


@functools.partial(jax.jit, donate_argnums=0, static_argnames="types")
def _put(rollout: Rollout, words: jax.Array, targets: jax.Array, version: jax.Array, *, types: Any) -> Rollout:
    report = unpack(words, jax.tree.unflatten(*types))
    tokens = report.outbox.tokens

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        new = jnp.broadcast_to(new, (*tokens.shape, *old.shape[1:])).reshape(-1, *old.shape[1:])
        return old.at[targets].set(new, mode="drop")

    return Rollout(
        put(rollout.tokens, tokens),
        put(rollout.logprobs, report.logprobs),
        put(rollout.mask, jnp.ones((), jnp.bool_)),
        put(rollout.weight_versions, version),
        jax.tree.map(put, rollout.aux, report.aux),
    )
