"""The user's model, and the part of an engine that all of its slices have in common."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged._attention.attention_step import AttentionStep
from jaxpaged._attention.writes import check_same_trace, check_written, watch_writes
from jaxpaged._cache.kv_cache import caches_in
from jaxpaged._grammar.vocabulary import Vocabulary
from jaxpaged._slice.drafting import Draft
from jaxpaged._slice.kinds import Kind
from jaxpaged._slice.options import ResolvedOptions
from jaxpaged._slice.process_logits import ProcessLogits
from jaxpaged._slice.pytrees import difference, in_same_containers

# Weights, tokens, positions, caches and the step: the new caches, hidden states, and optionally `aux`.
Apply = Callable[[Any, jax.Array, jax.Array, Any, AttentionStep], tuple[Any, ...]]
ApplyHead = Callable[[Any, Any], jax.Array]  # weights and hidden states of some rows: logits [rows, vocab]


@dataclasses.dataclass(frozen=True)
class Functions:
    """The caller's functions and vocabulary, as the arguments of `Engine` describe them."""

    apply: Apply
    head: ApplyHead | None
    draft: Draft | None = None
    process_logits: ProcessLogits | None = None
    vocabulary: Vocabulary | None = None


@dataclasses.dataclass(frozen=True)
class Setup:
    """The part of an engine that all of its slices have in common, except weights and shapes."""

    model: Callable[..., tuple[Any, Any, Any]]  # jitted `apply_model`, so that each kind of step is traced once
    head: ApplyHead | None
    kinds: tuple[Kind, ...]
    options: ResolvedOptions
    draft: Draft | None = None
    process_logits: ProcessLogits | None = None
    row_cost: float = 0.0  # time of a step without rows, as in `Kind.cost`
    aux: Any = None  # shapes and dtypes of a token's `aux`


def apply_model(
    apply: Apply, weights: Any, tokens: jax.Array, positions: jax.Array, caches: Any, step: AttentionStep
) -> tuple[Any, Any, Any]:
    """Runs the model on a step's tokens: the new caches, hidden states and `aux`, whose leaves are `[tokens, ...]`."""
    try:
        with watch_writes(caches):
            returned = apply(weights, tokens, positions, caches, step)
    except StopIteration as failure:
        raise ValueError(
            f"apply asked for more caches than the engine's {len(caches_in(caches))}: one for each layer."
        ) from failure
    outputs = returned if isinstance(returned, tuple | list) else (returned,)
    if len(outputs) not in (2, 3):
        raise ValueError(f"apply must return (caches, hidden) or (caches, hidden, aux); got {len(outputs)} values.")
    new_caches, hidden, aux = (*outputs, None)[:3]
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
    if (num_returned := len(caches_in(new_caches))) != (num_given := len(caches_in(caches))):
        raise ValueError(f"apply must return caches like those it was given; got {num_returned} of {num_given}.")
    new_caches = in_same_containers(caches, new_caches)
    if changed := difference(caches, new_caches):
        raise ValueError(f"apply must return caches like those it was given; {changed}.")
    check_written(caches, new_caches)
    return new_caches, hidden, aux


def apply_head(setup: Setup, weights: Any, hidden: Any, rows: jax.Array | None) -> jax.Array:
    """The logits of some rows of a step, `[rows, vocab]`. `rows`: int32; None: all rows."""
    if rows is not None:
        hidden = jax.tree.map(lambda x: x[rows], hidden)
    is_single = len(jax.tree.leaves(hidden)[0]) == 1
    if is_single and setup.head is not None and setup.options.is_gpu:
        # The row is computed twice: for float32 logits of a single row, XLA converts the weights to float32 in each
        # step. [one_row_h200]
        hidden = jax.tree.map(lambda x: jnp.concatenate([x, x]), hidden)
    logits = hidden if setup.head is None else setup.head(weights, hidden)
    num_rows, vocab_size = len(jax.tree.leaves(hidden)[0]), setup.options.vocab_size
    shape = logits.shape if isinstance(logits, jax.Array) else ()
    if len(shape) != 2 or shape != (num_rows, vocab_size or shape[1]):
        received = list(shape) or type(logits).__name__
        source = "apply of an engine with head=None" if setup.head is None else "head"
        raise ValueError(f"{source} must return logits [{num_rows}, {vocab_size or 'vocab'}]; got {received}.")
    return logits[:1] if is_single else logits
