"""What a learner takes from an engine: tokens and logprobs as arrays that never leave the device."""

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
    """Completions as arrays `[completions, most]`: the `n` of the first prompt, then those of the second, and so on.

    `most` is the largest `max_tokens`.

    Attributes:
        tokens: int32; 0 behind the end of a completion.
        logprobs: float32, of each token; 0 behind the end.
        mask: bool, whether there is a token.
        weight_versions: int32, how often `update_weights` had been called when each token was made; 0 behind the end.
        aux: what `apply` returned as `aux` for the token that each was drawn from, `[completions, most, ...]`; 0 behind
            the end. None: it returns none.
    """

    tokens: jax.Array
    logprobs: jax.Array
    mask: jax.Array
    weight_versions: jax.Array
    aux: Any = None


class Collector:
    """Puts the tokens of rows into a `Rollout`, slice by slice. The host only says where.

    Args:
        rows: those whose tokens are wanted.
        types: shapes and dtypes of a report.
    """

    def __init__(self, rows: Sequence[CompletionState], types: Report):
        leaves, tree = jax.tree.flatten(types)
        self._types, self._aux = (tree, tuple(leaves)), types.aux  # hashable, and those of `aux`
        self._index = {id(row): i for i, row in enumerate(rows)}
        self._shape = len(rows), max(row.params.max_tokens for row in rows)
        self._rollout: Rollout | None = None

    def take(self, words: jax.Array, report: Report, on_device: Mapping[int, CompletionState], version: int) -> None:
        """The tokens of one slice: of its report, packed on the device and in NumPy's arrays."""
        request_ids = report.outbox.request_ids
        begins = np.full(request_ids.max(initial=0) + 1, -1)  # of each place, where its next token goes
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
        assert self._rollout is not None  # each request has a token at least, or was aborted in a slice
        return jax.tree.map(lambda x: x.reshape(*self._shape, *x.shape[1:]), self._rollout)


def _empty(shape: tuple[int, int], words: jax.Array, aux: Any) -> Rollout:
    """`aux`: its types in a report, `[steps, draws, ...]`."""

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
