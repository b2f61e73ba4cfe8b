"""Requests on the host: checks, the inbox made of them, and the outputs read from a report."""

import bisect
import dataclasses
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxpaged._allocator.state import most_blocks
from jaxpaged._engine.logit_params import check_logit_params, logit_params_in_rows
from jaxpaged._engine.records import Completion, RequestOutput, Score
from jaxpaged._engine.sampling_params import SamplingParams
from jaxpaged._grammar.vocabulary import Vocabulary
from jaxpaged._scheduler.records import Requests, RequestStatus, Sampling
from jaxpaged._slice.grammars import FREE
from jaxpaged._slice.options import ResolvedOptions
from jaxpaged._slice.sampling import TopLogprobs
from jaxpaged._slice.state import Inbox, Report

ZERO: Any = np.int32(0)
MOST_ARRIVALS = 64  # requests sent with a slice; more are sent with slices without steps
FINISH_REASONS = {RequestStatus.STOPPED: "stop", RequestStatus.EXHAUSTED: "length", RequestStatus.ABORTED: "abort"}


@dataclasses.dataclass(eq=False)
class CompletionState:
    """One completion of a request: a request to the scheduler.

    Attributes:
        request_id: the engine's id of its request.
        prompt: the prompt, followed by all but the last of the tokens to score.
        given: the last token to score, if any.
        span: begin and end of the tokens to score; (0, 0): none.
        place: the scheduler's index of it; None: it is not on the device, as far as the host has read.
        is_dropped: whether its output is discarded.
        num_cached: tokens found in the prefix cache when it started.
        prompt_aux: `aux` of the prompt tokens before the last, NumPy arrays `[tokens, ...]`; zero until they are
            computed. None without `EngineOptions.prompt_aux`.
        grammar_state: the first state of its grammar in the pool on the device.
    """

    request_id: int
    prompt: np.ndarray
    params: SamplingParams
    seed: int
    given: int | None = None
    span: tuple[int, int] = (0, 0)
    place: int | None = None
    is_aborted: bool = False
    is_dropped: bool = False
    num_cached: int = 0
    grammar_state: int = FREE
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top_logprobs: list[dict[int, float]] = dataclasses.field(default_factory=list)
    aux: Any = None  # NumPy arrays [tokens, ...]
    prompt_aux: Any = None
    weight_versions: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self.scores = np.full(self.span[1] - self.span[0], np.nan, np.float32)
        self.is_best = np.zeros(len(self.scores), np.bool_)
        self.top_scores: list[dict[int, float]] = [{} for _ in self.scores]
        self.wants_logprobs = self.params.logprobs or self.params.top_logprobs > 0 or len(self.scores) > 0

    def take_tokens(
        self, tokens: list[int], logprobs: list[float], top_logprobs: TopLogprobs | None, aux: Any, version: int
    ) -> None:
        self.token_ids += tokens
        self.aux = aux if self.aux is None else jax.tree.map(lambda *parts: np.concatenate(parts), self.aux, aux)
        self.weight_versions += [version] * len(tokens)
        if self.params.logprobs:
            self.logprobs += logprobs
        if top_logprobs is not None and self.params.top_logprobs:
            self.top_logprobs += by_token(top_logprobs, self.params.top_logprobs)

    def take_scores(
        self, positions: np.ndarray, logprobs: np.ndarray, is_best: np.ndarray, top_logprobs: TopLogprobs | None
    ) -> int:
        """Enters scores and returns their number. After a preemption, tokens are scored again."""
        index = positions - self.span[0]
        self.scores[index], self.is_best[index] = logprobs, is_best
        if top_logprobs is not None and self.params.top_logprobs:
            for i, of_token in zip(index.tolist(), by_token(top_logprobs, self.params.top_logprobs), strict=True):
                self.top_scores[i] = of_token
        return len(index)

    def score(self) -> Score:
        top = list(self.top_scores) if self.params.top_logprobs else None
        return Score(self.scores.tolist(), self.is_best.tolist(), top)


def by_token(top_logprobs: TopLogprobs, num: int) -> list[dict[int, float]]:
    """The first `num` tokens of each row with their logprobs."""
    tokens, logprobs = (np.asarray(x)[:, :num].tolist() for x in (top_logprobs.tokens, top_logprobs.logprobs))
    return [dict(zip(*of_row, strict=True)) for of_row in zip(tokens, logprobs, strict=True)]


def make_rows(
    request_id: int, prompt: np.ndarray, params: SamplingParams, seed: int, given: np.ndarray | None = None
) -> list[CompletionState]:
    """A row for each completion. `given`: tokens to score; all but the last of them end the prompt."""
    others = [CompletionState(request_id, prompt, params, completion_seed(seed, i)) for i in range(1, params.n)]
    if given is not None:
        span = len(prompt) + 1 - len(given), len(prompt) + 1
        return [CompletionState(request_id, prompt, params, seed, int(given[-1]), span), *others]
    span = (1, len(prompt)) if params.prompt_logprobs and len(prompt) > 1 else (0, 0)
    return [CompletionState(request_id, prompt, params, seed, span=span), *others]


def params_for_each(
    prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[SamplingParams]:
    each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
    for one in each:
        check_params(one)
    if len(each) != len(prompts):
        raise ValueError(f"pass params for each prompt or for all; got {len(prompts)=}, {len(each)=}.")
    return each


def check_params(params: SamplingParams) -> None:
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be SamplingParams; got {params!r}.")


def checked_prompt(prompt: Sequence[int], name: str = "a prompt") -> np.ndarray:
    tokens = np.asarray(prompt)
    if tokens.ndim != 1 or len(tokens) == 0 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"{name} must be a list of at least one token id; got {prompt!r}.")
    if tokens.min() < 0 or tokens.max() >= 2**31:
        raise ValueError(f"token ids must be from 0 to 2**31 - 1; got {tokens.min()} to {tokens.max()}.")
    return tokens.astype(np.int32)


def check_vocabulary(tokens: np.ndarray, options: ResolvedOptions) -> None:
    if (vocab_size := options.vocab_size) is not None and tokens.max() >= vocab_size:
        raise ValueError(f"token ids must be below the engine's {vocab_size=}; got {tokens.max()}.")


def checked_request(
    prompt: Sequence[int], params: SamplingParams, options: ResolvedOptions, vocabulary: Vocabulary | None
) -> tuple[np.ndarray, SamplingParams]:
    """The prompt as int32, and the parameters, with the stop tokens that end a grammar.

    Raises `ValueError` if the engine can never serve them.
    """
    tokens = checked_prompt(prompt)
    check_params(params)
    params = with_end_tokens(params, options, vocabulary)
    check_vocabulary(tokens, options)
    limit = len(tokens) + params.max_tokens
    if limit > (max_model_len := options.max_model_len):
        raise ValueError(
            f"a prompt of {len(tokens)} tokens and {params.max_tokens} new ones exceed the engine's {max_model_len=}. "
            "Shorten one of them, or make an engine with a larger max_model_len."
        )
    windows, num_blocks, block_size = options.windows, options.num_blocks, options.block_size
    num_needed = most_blocks(windows, -(-(limit - 1) // block_size), block_size)  # the last token is never computed
    if num_needed > num_blocks - 1:
        most = bisect.bisect_right(
            range(num_blocks), num_blocks - 1, key=lambda columns: most_blocks(windows, columns, block_size)
        )
        raise ValueError(
            f"{limit} tokens need {num_needed} blocks of {block_size}, and the caches have {num_blocks - 1} besides "
            f"the null block: {(most - 1) * block_size + 1} tokens fit, prompt and new ones together. Make the engine "
            "with caches of more blocks: an 8-bit dtype halves their bytes, `layer_groups` frees blocks that have "
            "left a window, and several GPUs hold more."
        )
    if len(params.stop_token_ids) > (num_stop_ids := options.num_stop_ids):
        raise ValueError(f"a request has at most {num_stop_ids=} stop tokens; got {params.stop_token_ids}.")
    if params.adapter is not None and params.adapter >= (num_adapters := options.num_adapters):
        raise ValueError(f"adapter must be below the engine's {num_adapters=}; got adapter={params.adapter}.")
    if params.top_logprobs > (max_logprobs := options.max_logprobs):
        raise ValueError(
            f"top_logprobs must be at most the engine's {max_logprobs=}; got top_logprobs={params.top_logprobs}. Make "
            "the engine with a larger max_logprobs."
        )
    check_logit_params(params, options)
    return tokens, params


def with_end_tokens(params: SamplingParams, options: ResolvedOptions, vocabulary: Vocabulary | None) -> SamplingParams:
    """The parameters with the end tokens of their grammar as stop tokens. Raises `ValueError` if it does not fit."""
    grammar = params.grammar
    if grammar is None:
        return params
    if vocabulary is None:
        raise ValueError("a request has a grammar, and the engine no vocabulary: make it with Engine(vocabulary=...).")
    if grammar.vocabulary != vocabulary.fingerprint:
        raise ValueError("the grammar was compiled for another vocabulary than the engine's: compile it for this one.")
    for name, size in (("num_grammar_states", grammar.num_states), ("num_grammar_masks", len(grammar.masks) + 1)):
        if size > (most := getattr(options, name)):
            raise ValueError(f"{grammar!r} needs {name}={size}, and the engine has {most}. Make it with more.")
    ends = [token for token in vocabulary.end_token_ids if token not in params.stop_token_ids]
    return dataclasses.replace(params, stop_token_ids=(*params.stop_token_ids, *ends))


def make_output(request_id: int, rows: Sequence[CompletionState]) -> RequestOutput:
    completions = [
        Completion(
            list(row.token_ids),
            list(row.logprobs) if row.params.logprobs else None,
            row.finish_reason,
            list(row.weight_versions),
            list(row.top_logprobs) if row.params.top_logprobs else None,
            None if row.aux is None else jax.tree.map(np.copy, row.aux),
            row.prompt_aux if row.finish_reason is not None and row.token_ids else None,
        )
        for row in rows
    ]
    first, prompt_logprobs, prompt_top_logprobs = rows[0], None, None
    if first.params.prompt_logprobs:
        prompt_logprobs = [None, *first.scores.tolist()]
        prompt_top_logprobs = [None, *first.top_scores] if first.params.top_logprobs else None
    finished = all(row.finish_reason is not None for row in rows)
    return RequestOutput(request_id, completions, finished, prompt_logprobs, prompt_top_logprobs, first.num_cached)


def completion_seed(seed: int, index: int) -> int:
    """The seed of the `index`-th completion of a request. The first has the request's own."""
    return seed if index == 0 else int(np.random.SeedSequence([seed, index]).generate_state(1)[0])


def make_inbox(
    options: ResolvedOptions,
    rows: Sequence[CompletionState],
    aborts: Sequence[int],
    *,
    wants_logprobs: bool,
    num_steps: int,
    forgets: np.ndarray,
) -> Inbox:
    """An inbox. Its shapes and dtypes depend on the options alone."""
    num_rows, max_length = min(MOST_ARRIVALS, options.max_requests), options.max_model_len

    def column(values: Sequence[float | None], default: Any = ZERO) -> Any:
        given = [default if value is None else value for value in values]
        return np.asarray(given + [default] * (num_rows - len(rows)), default.dtype)

    params = [vars(row.params) | {"seed": row.seed} for row in rows]
    sampling = {name: column([p[name] for p in params], default) for name, default in vars(Sampling()).items()}
    inbox = Inbox(
        requests=Requests(
            prompts=np.zeros((num_rows, max_length), np.int32),
            prompt_lengths=column([len(row.prompt) for row in rows]),
            max_new_tokens=column([row.params.max_tokens for row in rows]),
            head_starts=column([row.params.head_start for row in rows]),
            stop_ids=np.full((num_rows, options.num_stop_ids), -1, np.int32),
            sampling=Sampling(**sampling),
            findable=column([row.span[0] - 1 if row.span[1] else max_length for row in rows]),
        ),
        families=column([row.request_id % 2**31 for row in rows]),
        spans=np.zeros((num_rows, 2), np.int32),
        grammar_states=column([row.grammar_state for row in rows]),
        logit_params=logit_params_in_rows([row.params for row in rows], options, num_rows),
        aborts=np.zeros(options.max_requests, np.bool_),
        forgets=forgets,
        wants_logprobs=np.asarray(wants_logprobs),
        num_steps=np.asarray(num_steps, np.int32),
    )
    prompts, stop_ids = inbox.requests.prompts, inbox.requests.stop_ids
    for i, row in enumerate(rows):
        prompts[i, : len(row.prompt)] = row.prompt
        if row.given is not None:
            prompts[i, len(row.prompt)] = row.given
        inbox.spans[i] = row.span
        stop_ids[i, : len(row.params.stop_token_ids)] = row.params.stop_token_ids
    inbox.aborts[list(aborts)] = True
    return inbox


def new_tokens(report: Report) -> Iterator[tuple[int, list[int], list[float], TopLogprobs | None, Any]]:
    """For each request with new tokens: its place, the tokens, their logprobs, the most likely tokens, and `aux`."""
    outbox = report.outbox
    places = np.asarray(outbox.request_ids)
    is_new = places < len(outbox.finished)
    places, tokens, logprobs = places[is_new], np.asarray(outbox.tokens)[is_new], np.asarray(report.logprobs)[is_new]
    order = np.argsort(places, kind="stable")  # keeps the order of a request's tokens
    places, tokens, logprobs = places[order], tokens[order].tolist(), logprobs[order].tolist()
    leaves, tree = jax.tree.flatten((report.top_logprobs, report.aux))
    leaves = [np.asarray(leaf)[is_new][order] for leaf in leaves]
    starts = np.flatnonzero(np.diff(places, prepend=-1)).tolist()
    for start, end in itertools.pairwise([*starts, len(tokens)]):
        of_place = jax.tree.unflatten(tree, [leaf[start:end] for leaf in leaves])
        yield int(places[start]), tokens[start:end], logprobs[start:end], *of_place


def new_scores(report: Report) -> Iterator[tuple[int, tuple[np.ndarray, np.ndarray, np.ndarray, TopLogprobs | None]]]:
    """For each request with new scores: its place, and the arguments of `CompletionState.take_scores`."""
    scores = report.scores
    places = np.asarray(scores.request_ids)
    positions, logprobs, is_best = map(np.asarray, (scores.positions, scores.logprobs, scores.is_best))
    for place in np.unique(places[places < len(report.outbox.finished)]).tolist():
        of_place = places == place
        top_logprobs = jax.tree.map(operator.itemgetter(of_place), scores.top_logprobs)
        yield place, (positions[of_place], logprobs[of_place], is_best[of_place], top_logprobs)
