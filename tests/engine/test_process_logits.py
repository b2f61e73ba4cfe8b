"""Changes of logits by a request's parameters, against plain equations in float64, row by row."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import LogitsContext, SamplingParams
from jaxpaged._engine.logit_params import changes_logits, logit_params_in_rows
from jaxpaged._scheduler.arrays import rows_of
from jaxpaged._slice import process_logits
from jaxpaged._slice.process_logits import process
from tests.logits_model import CHANGES, NEUTRAL, forbid_repeats, processed, random_changes, repeats_forbidden

VOCAB, LENGTH, SEQS, DRAFTS, NUM_STOP_IDS, BATCHES = 19, 24, 6, 2, 3, 28
OPTIONS = SimpleNamespace(num_listed_tokens=48, num_logits_ints=1, num_logits_floats=1)


@dataclasses.dataclass
class Scenario:
    """A sequence with drafts, and a row of logits after its known tokens and after each draft."""

    prompt: list[int]
    new: list[int]
    drafts: list[int]
    params: SamplingParams
    logits: np.ndarray  # float32 [1 + drafts, vocab]

    def expected(self, model=processed):
        seen = [[*self.new, *self.drafts[:i]] for i in range(len(self.logits))]
        return np.stack([model(row, self.prompt, new, self.params) for row, new in zip(self.logits, seen, strict=True)])


def random_scenario(rng, *, num_drafts, vocab=VOCAB):
    length = int(rng.integers(1, LENGTH - DRAFTS))
    num_prompt = int(rng.integers(1, length + 1))
    tokens = rng.integers(0, min(vocab, 5 if rng.random() < 0.5 else vocab), LENGTH).tolist()  # half of them repeat
    stop_token_ids = rng.choice(vocab, rng.integers(0, NUM_STOP_IDS + 1), replace=False).tolist()
    changes = random_changes(rng, vocab, 16)
    if "bad_words" in changes:  # some that apply
        known = [*tokens[num_prompt:length], int(rng.integers(vocab))]
        changes["bad_words"] = [*changes["bad_words"], *(known[-size:] for size in range(1, min(len(known), 4) + 1))]
    function = dict(logits_ints=[int(rng.integers(vocab))], logits_floats=[float(rng.normal())])
    return Scenario(
        tokens[:num_prompt],
        tokens[num_prompt:length],
        tokens[length : length + int(rng.integers(0, num_drafts + 1))],
        SamplingParams(max_tokens=LENGTH, stop_token_ids=stop_token_ids, **changes, **function),
        (rng.normal(size=(1 + num_drafts, vocab)) * 4).astype(np.float32),
    )


@functools.cache
def scenarios(num_drafts):
    rng = np.random.default_rng(num_drafts)
    found = [random_scenario(rng, num_drafts=num_drafts) for _ in range(SEQS * BATCHES)]
    for one in found:
        one.logits = one.logits[: 1 + len(one.drafts)]
    return found


@functools.partial(jax.jit, static_argnames="function")
def changed(params, logits, context, function=None):
    result = process(rows_of(params, context.seqs), logits, context)
    return result if function is None else function(result, context)


def results_of(some, num_drafts, function=None, num_rows=SEQS * (1 + DRAFTS), options=OPTIONS):
    """The product's logits of each scenario, computed together. Unused rows are padding."""
    params = logit_params_in_rows([one.params for one in some], options, len(some))
    tokens = np.full((len(some), LENGTH), VOCAB - 1, np.int32)  # arbitrary after the last token
    stop_ids = np.full((len(some), NUM_STOP_IDS), -1, np.int32)
    seqs, lengths, logits = np.zeros(num_rows, np.int32), np.ones(num_rows, np.int32), np.zeros((num_rows, VOCAB))
    ends = np.cumsum([len(one.logits) for one in some])
    for i, (one, end) in enumerate(zip(some, ends, strict=True)):
        text = [*one.prompt, *one.new, *one.drafts]
        tokens[i, : len(text)] = text
        stop_ids[i, : len(one.params.stop_token_ids)] = one.params.stop_token_ids
        rows = slice(end - len(one.logits), end)
        seqs[rows], logits[rows] = i, one.logits
        lengths[rows] = len(one.prompt) + len(one.new) + np.arange(len(one.logits))
    context = LogitsContext(
        tokens=tokens,
        num_known=np.int32([len(one.prompt) + len(one.new) for one in some]),
        prompt_lengths=np.int32([len(one.prompt) for one in some]),
        stop_ids=stop_ids,
        adapters=np.full(len(some), -1, np.int32),
        ints=params.ints,
        floats=params.floats,
        seqs=seqs,
        lengths=lengths,
        num_drafts=num_drafts,
    )
    arguments = jax.tree.map(jnp.asarray, (params, logits.astype(np.float32), context))
    found = np.asarray(changed(*arguments, function))
    return np.split(found[: ends[-1]], ends[:-1])


def in_batches(every):
    return [every[i : i + SEQS] for i in range(0, len(every), SEQS)]


@functools.cache
def results(num_drafts, function=None):
    batches = in_batches(scenarios(num_drafts))
    return [result for batch in batches for result in results_of(batch, num_drafts, function)]


def num_wrong(num_drafts, model=processed, function=None, change=lambda scenario: scenario):
    """The number of rows that differ from the rows of a model."""
    both = zip(results(num_drafts, function), scenarios(num_drafts), strict=True)
    return sum(
        not np.allclose(*rows, rtol=1e-5, atol=1e-5)
        for found, one in both
        for rows in zip(found, change(one).expected(model), strict=True)
    )


@pytest.mark.parametrize("num_drafts", [0, DRAFTS])
def test_logits_match_the_equations(num_drafts):
    rows = sum(len(one.logits) for one in scenarios(num_drafts))
    assert rows == SEQS * BATCHES if num_drafts == 0 else rows > 1.5 * SEQS * BATCHES
    assert num_wrong(num_drafts) == 0


@pytest.mark.parametrize("num_drafts", [0, DRAFTS])
@pytest.mark.parametrize("name", CHANGES)
def test_a_model_without_a_parameter_is_wrong(name, num_drafts):
    def without(one):
        return dataclasses.replace(one, params=dataclasses.replace(one.params, **{name: NEUTRAL[name]}))

    assert num_wrong(num_drafts, change=without) > 10


def test_a_model_of_the_wrong_tokens_is_wrong():
    def without_drafts(one):
        return dataclasses.replace(one, drafts=[])

    def all_new(one):
        return dataclasses.replace(one, prompt=one.prompt[:1], new=[*one.prompt[1:], *one.new])

    def all_prompt(one):
        return dataclasses.replace(one, prompt=[*one.prompt, *one.new], new=[])

    for change in (without_drafts, all_new, all_prompt):
        assert num_wrong(DRAFTS, change=change) > 10


def test_penalties_come_after_the_bias():
    def in_another_order(logits, prompt, new, params):
        bias = np.zeros(len(logits))
        bias[list(params.logit_bias)] = list(params.logit_bias.values())
        return processed(logits, prompt, new, dataclasses.replace(params, logit_bias={})) + bias

    assert num_wrong(0, model=in_another_order) > 10


def test_a_function_runs_after_the_parameters():
    assert num_wrong(DRAFTS, repeats_forbidden, forbid_repeats) == 0
    assert num_wrong(DRAFTS, processed, forbid_repeats) > 10


@pytest.mark.parametrize("function", [None, forbid_repeats], ids=["parameters", "function"])
def test_a_row_has_equal_bits_alone_and_among_others(function):
    for one, among_others in list(zip(scenarios(DRAFTS), results(DRAFTS, function), strict=True))[:60]:
        (alone,) = results_of([one], DRAFTS, function, num_rows=1 + DRAFTS)
        assert (alone == among_others).all()
        assert not np.isnan(alone).any()


def test_a_row_that_reads_its_neighbours_differs_among_others():
    def centred(logits, context):
        return logits - logits.mean(axis=0, keepdims=True)

    few = scenarios(0)[:SEQS]
    alone = [results_of([one], 0, centred, num_rows=1)[0] for one in few]
    assert all((one != other).any() for one, other in zip(alone, results_of(few, 0, centred), strict=True))


def test_neutral_parameters_change_no_bit():
    rng = np.random.default_rng(0)
    some = [random_scenario(rng, num_drafts=0) for _ in range(SEQS)]
    neutral = {name: NEUTRAL[name] for name in CHANGES}
    some[1:] = [dataclasses.replace(one, params=dataclasses.replace(one.params, **neutral)) for one in some[1:]]
    some[0].params = dataclasses.replace(some[0].params, **random_changes(rng, VOCAB, 16, all_used=True))
    assert [changes_logits(one.params) for one in some] == [True] + [False] * (SEQS - 1)
    found = results_of(some, 0)
    assert (found[0] != some[0].logits).any()
    for one, row in zip(some[1:], found[1:], strict=True):
        assert (row == one.logits).all()


def test_penalties_need_no_room_for_lists():
    one = scenarios(0)[0]
    one = dataclasses.replace(one, params=SamplingParams(presence_penalty=1.5, repetition_penalty=1.2))
    (found,) = results_of([one], 0, num_rows=1, options=SimpleNamespace(**vars(OPTIONS) | {"num_listed_tokens": 0}))
    np.testing.assert_allclose(found, one.expected(), rtol=1e-5)


def test_penalties_run_only_where_a_request_needs_them(monkeypatch):
    """With NaN in place of the penalties, exactly the requests with one get NaN."""
    one = random_scenario(np.random.default_rng(0), num_drafts=0)
    one = dataclasses.replace(one, new=[], logits=one.logits[:1])
    every = random_changes(np.random.default_rng(1), VOCAB, 16, all_used=True)
    monkeypatch.setattr(process_logits, "penalise", lambda params, logits, context: logits * jnp.nan)
    for name in CHANGES:
        params = SamplingParams(max_tokens=LENGTH, stop_token_ids=(1,), **{name: every[name]})
        with jax.disable_jit():
            (found,) = results_of([dataclasses.replace(one, params=params)], 0, num_rows=1)
        assert np.isnan(found).any() == name.endswith("penalty"), name
