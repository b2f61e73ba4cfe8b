"""The options of an engine: as a caller passes them, and with every size chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxpaged._allocator.state import checked_windows
from jaxpaged._integers import checked_size, checked_tuple
from jaxpaged._scheduler.records import MOST_ADAPTERS

LEAST = {  # lower bounds of the int fields
    **dict.fromkeys(
        ("vocab_size", "max_num_seqs", "max_model_len", "chunk_tokens", "max_requests", "steps_per_slice"), 1
    ),
    **dict.fromkeys(("num_grammar_states", "num_grammar_masks"), 2),
    **dict.fromkeys(("num_stop_ids", "num_listed_tokens", "num_logits_ints", "num_logits_floats"), 0),
    **dict.fromkeys(("num_adapters", "num_speculative_tokens", "max_logprobs", "seed"), 0),
}
MAY_BE_NONE = {name for name, least in LEAST.items() if least}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The sizes and features of an `Engine`. For sizes left at None, `Engine.stats()` returns the ones that the engine
    chose.

    Attributes:
        vocab_size: the width of the logits, and the upper bound of token ids. None: neither is checked.
        max_num_seqs: the most requests that run at once. None: chosen, like the next three (`docs/engine_design.md`).
        max_model_len: the most tokens of a request, prompt and new ones together.
        chunk_tokens: the most prompt tokens that a step computes, in addition to one token of each running request. A
            larger number makes long prompts faster, and steps with prompts slower.
        widths: the row counts of additional, narrower steps, used when few requests need a token. Each width is
            compiled separately. (): no narrower steps.
        max_requests: the most requests on the device, running or waiting; the others wait on the host. None: four times
            `max_num_seqs`.
        steps_per_slice: the steps between two reports to the host. New requests and aborts wait for the end of a slice.
            None: enough steps to read 12 GB of weights (0.8 GB on a CPU), at most 16. On one GPU each layer counts
            0.105 GB more.
        num_stop_ids: the most stop tokens of a request.
        num_listed_tokens: the most tokens that a request lists in `logit_bias`, `allowed_token_ids` and `bad_words`
            together. Each needs 8 bytes for each of `max_requests` on the device.
        num_grammar_states: room for the states of all grammars in use, with one for requests without a grammar. Each
            needs 1 kB on the device. Read only if the engine has a `vocabulary`, like the next one.
        num_grammar_masks: room for the masks of all grammars in use, with one for requests without a grammar. Each
            needs a bit for each token of the vocabulary on the device.
        num_logits_ints: the most `logits_ints` of a request, numbers for `process_logits`.
        num_logits_floats: the most `logits_floats` of a request.
        num_adapters: the number of adapters of the model. Requests select one by its index. `apply` finds the adapter
            of each token in `step.adapters` (`docs/engine.md`).
        windows: the window of each group of layers, or None, as in `BlockAllocator.create`. With several groups, the
            engine has one cache for each layer of a group. The corresponding layers of the other groups share it, and
            each layer attends with `step.group(i)` of its group (`layer_groups`).
        prefix_cache: share the blocks of requests that begin with the same tokens, instead of computing them again.
        host_cache_bytes: host memory for blocks of the prefix cache, from which blocks that the pool has lost are
            restored. Needs `prefix_cache`, and one group of layers without a window. None: no host memory.
        num_speculative_tokens: the most drafts of a request, guesses of its next tokens, that a step computes with its
            newest token; 0: none. The generated tokens do not change. The head is applied to each row of a step.
        batch_invariant: make the logprobs of a request bitwise independent of the other requests in its steps. Every
            step then has `max_num_seqs + chunk_tokens` rows, and attention one partition (`docs/engine.md` has the
            cost).
        processed_logprobs: return the logprobs of new tokens under the distribution that they are drawn from, after
            penalties and other changes of the logits, temperature, `top_k` and `top_p`; vLLM's
            `logprobs_mode="processed_logprobs"`. Those of greedy tokens are taken before temperature, `top_k` and
            `top_p`. Logprobs of prompts and of `score` are always the model's.
        max_logprobs: the most `top_logprobs` of a request. If it is not 0, a step in which a request wants logprobs
            finds the `max_logprobs` most likely tokens of each row.
        prompt_aux: return the `aux` of prompt tokens, too (`Completion.prompt_aux`). A slice then reports `aux` for all
            rows of its steps. With a prefix cache, it needs host memory for the `aux` of each slot of the caches, and
            `windows` must contain None.
        seed: seeds the requests that have no seed.
        compiler_options: passed to `jax.jit`. None: on a GPU, options that make cuBLAS compute matrix products.

    Raises:
        ValueError: an option of the wrong type, or a size that is too small.
    """

    vocab_size: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    chunk_tokens: int | None = None
    widths: Sequence[int] | None = None
    max_requests: int | None = None
    steps_per_slice: int | None = None
    num_stop_ids: int = 4
    num_listed_tokens: int = 300
    num_grammar_states: int = 8192
    num_grammar_masks: int = 2048
    num_logits_ints: int = 0
    num_logits_floats: int = 0
    num_adapters: int = 0
    windows: Sequence[int | None] = (None,)
    prefix_cache: bool = False
    host_cache_bytes: int | None = None
    num_speculative_tokens: int = 0
    batch_invariant: bool = False
    processed_logprobs: bool = False
    max_logprobs: int = 0
    prompt_aux: bool = False
    seed: int = 0
    compiler_options: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {"windows": checked_windows(self.windows)}
        for name, least in LEAST.items():
            if (value := getattr(self, name)) is not None or name not in MAY_BE_NONE:
                checked[name] = checked_size(name, value, least, MOST_ADAPTERS if name == "num_adapters" else None)
        if self.widths is not None:
            widths = {checked_size("widths", width) for width in checked_tuple("widths", self.widths)}
            checked["widths"] = tuple(sorted(widths))
        for name in ("prefix_cache", "batch_invariant", "processed_logprobs", "prompt_aux"):
            if not isinstance(value := getattr(self, name), bool | np.bool_):
                raise ValueError(f"{name} must be True or False; got {name}={value!r}.")
            checked[name] = bool(value)
        for name, value in checked.items():
            object.__setattr__(self, name, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedOptions(EngineOptions):
    """The options of an existing engine, where no size is None."""

    max_num_seqs: int
    max_model_len: int
    chunk_tokens: int
    widths: tuple[int, ...]
    max_requests: int
    steps_per_slice: int
    windows: tuple[int | None, ...]
    compiler_options: dict[str, Any] = dataclasses.field(hash=False)
    num_blocks: int  # in the caches, with the null block
    block_size: int  # in the caches
    is_gpu: bool

    @property
    def growth(self) -> int:
        """Tokens by which each request may grow in the room that the host tier leaves free: the most in this slice and
        the next, and at least a block."""
        return max(2 * self.steps_per_slice * (self.num_speculative_tokens + 1), self.block_size)
