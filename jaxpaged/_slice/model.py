"""The model of an engine, and what is the same in all of its slices."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxpaged._attention.attention_step import AttentionStep
from jaxpaged._attention.writes import check_same_trace, check_written, watch_writes
from jaxpaged._slice.drafting import Draft
from jaxpaged._slice.kinds import Kind
from jaxpaged._slice.options import ResolvedOptions
from jaxpaged._slice.pytrees import caches_in, difference, in_same_containers

# Weights, tokens, positions, caches and the step: the new caches, hidden states, and perhaps `aux`.
Apply = Callable[[Any, jax.Array, jax.Array, Any, AttentionStep], tuple[Any, ...]]
ApplyHead = Callable[[Any, Any], jax.Array]  # weights and hidden states of some rows: logits [rows, vocab]


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is the same in all slices of an engine, besides weights and shapes."""

    model: Callable[..., tuple[Any, Any, Any]]  # `apply_model` of the model, jitted: traced once for a kind of steps
    head: ApplyHead | None
    kinds: tuple[Kind, ...]
    options: ResolvedOptions
    draft: Draft | None = None
    row_cost: float = 0.0  # of a step without rows, as in `Kind.cost`
    aux: Any = None  # the types of what `apply` returns as such for a token


def apply_model(
    apply: Apply, weights: Any, tokens: jax.Array, positions: jax.Array, caches: Any, step: AttentionStep
) -> tuple[Any, Any, Any]:
    """The model over a step's tokens: the new caches, hidden states and `aux`, whose leaves are `[tokens, ...]`."""
    try:
        with watch_writes(caches):
            returned = apply(weights, tokens, positions, caches, step)
    except StopIteration as failure:
        raise ValueError(
            f"apply asked for more caches than the engine's {len(caches_in(caches))}: one for each layer."
        ) from failure
    if not isinstance(returned, tuple | list) or len(returned) not in (2, 3):
        num_returned = len(returned) if isinstance(returned, tuple | list) else 1
        raise ValueError(f"apply must return (caches, hidden) or (caches, hidden, aux); got {num_returned} values.")
    new_caches, hidden, aux = returned if len(returned) == 3 else (*returned, None)
    for name, tree in (("hidden", hidden), ("aux", aux)):
        for path, leaf in jax.tree.leaves_with_path(tree):
            if not isinstance(leaf, jax.Array) or leaf.shape[:1] != tokens.shape:
                received = list(leaf.shape) if isinstance(leaf, jax.Array) else type(leaf).__name__
                raise ValueError(
                    f"apply must return {name} [{len(tokens)}, ...], one row for each token; got {received} at "
                    f"{jax.tree_util.keystr(path) or 'its root'}. The engine picks the rows that the head needs."
                )
    if not jax.tree.leaves(hidden):
        raise ValueError(f"apply must return hidden states, or logits if the engine has no head; got {hidden!r}.")
    for name, tree in (("caches", new_caches), ("hidden", hidden), ("aux", aux)):
        check_same_trace(name, tree, tokens)
    new_caches = in_same_containers(caches, new_caches)
    if changed := difference(caches, new_caches):
        raise ValueError(f"apply must return caches like those it was given; {changed}.")
    check_written(caches, new_caches)
    return new_caches, hidden, aux


def apply_head(setup: Setup, weights: Any, hidden: Any, rows: jax.Array | None) -> jax.Array:
    """The logits of some rows of a step, `[rows, vocab]`; None: of all."""
    of_rows = hidden if rows is None else jax.tree.map(lambda x: x[rows], hidden)
    logits = of_rows if setup.head is None else setup.head(weights, of_rows)
    num_rows, vocab_size = len(jax.tree.leaves(of_rows)[0]), setup.options.vocab_size
    shape = logits.shape if isinstance(logits, jax.Array) else None
    if shape is None or len(shape) != 2 or shape[0] != num_rows or vocab_size not in (None, shape[1]):
        received = type(logits).__name__ if shape is None else list(shape)
        who = "head" if setup.head is not None else "apply of an engine with head=None"
        raise ValueError(f"{who} must return logits [{num_rows}, {vocab_size or 'vocab'}]; got {received}.")
    return logits
