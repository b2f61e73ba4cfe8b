"""Engines whose requests follow grammars: tokens, ends, room on the device, and errors."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import SamplingParams
from jaxpaged._engine.grammar_room import GrammarRoom, first_gap, parts_of
from jaxpaged._slice.grammars import FREE, Grammars
from jaxpaged.grammar import (
    Vocabulary,
)
from tests.engine.grammar_requests import (
    CALLS,
    CONTROLS,
    END,
    GRAMMARS,
    MASKS,
    PATTERNS,
    STATES,
    TEXTS,
    TOKENS,
    VOCABULARY,
    requests_with_grammars,
    state_after,
)
from tests.logits_model import processed
from tests.toy_model import (
    BLOCKS,
    ENGINES,
    TIGHT,
    VOCAB,
    continuation,
    counting,
    create_engine,
    fewer_blocks,
    greedy,
    not_compiled,
    over_heads,
    random_weights,
    until_module_ends,
)

pytestmark = pytest.mark.usefixtures("idle_engines")


@until_module_ends
def shared_engine(**options):
    sizes = dict(num_stop_ids=3, num_grammar_states=STATES, num_grammar_masks=MASKS)
    engine = create_engine(vocabulary=VOCABULARY, **sizes | options)
    ENGINES.append(engine)
    return engine


@pytest.fixture(scope="module")
def load():
    return requests_with_grammars()


@pytest.mark.parametrize("left", [BLOCKS, TIGHT], ids=["plenty", "tight"])
@pytest.mark.parametrize("options", [{}, {"prefix_cache": True, "num_speculative_tokens": 2, "widths": (8,)}], ids=str)
def test_tokens_follow_the_grammars_whatever_the_load(load, options, left):
    """With chunked prompts, n completions, preemption, drafts and a prefix cache."""
    prompts, params, expected = load
    engine = shared_engine(**options)
    with counting(engine) as counts, fewer_blocks(engine, left):
        for order in (slice(None), slice(None, None, -1)):
            outputs = engine.generate(prompts[order], params[order])
            found = [[completion.token_ids for completion in output.outputs] for output in outputs]
            assert found == expected[order]
    assert (counts.num_preempted > 0) == (left == TIGHT)
    assert bool(options) == (counts.num_accepted > 0)


def test_the_grammars_matter(load):
    prompts, params, expected = load
    found = [
        continuation(random_weights(), prompt, one, 0, processed)[0] != tokens[0]
        for prompt, one, tokens in zip(prompts, params, expected, strict=True)
        if one.grammar is not None
    ]
    assert np.mean(found) > 0.9


def test_a_free_text_has_a_call(load):
    _, params, expected = load
    answers = [new for one, found in zip(params, expected, strict=True) if one.grammar is CALLS for new in found]
    assert any(CONTROLS[1] in new for new in answers)


def test_an_answer_that_is_not_cut_matches_its_grammar():
    engine, rng = shared_engine(), np.random.default_rng(0)
    params = [
        SamplingParams(max_tokens=30, temperature=(0.0, 1.0, 50.0)[i % 3], seed=i, grammar=GRAMMARS[1 + i % 3])
        for i in range(30)
    ]
    prompts = rng.integers(0, VOCAB, (30, 4)).tolist()
    ended = 0
    for i, output in enumerate(engine.generate(prompts, params)):
        (completion,) = output.outputs
        text = b"".join(TOKENS[token] or b"" for token in completion.token_ids).decode()
        is_match = re.fullmatch(PATTERNS[1 + i % 3], text) is not None
        assert is_match == (completion.finish_reason == "stop") or completion.token_ids[-1] != END
        ended += completion.finish_reason == "stop"
    assert ended > 20


def test_stop_tokens_end_an_answer_only_where_it_may_end():
    token = TEXTS.index("c")
    params = SamplingParams(max_tokens=20, temperature=0, grammar=GRAMMARS[2], stop_token_ids=(token,))
    found = {tuple(shared_engine().generate([[i]], params)[0].outputs[0].token_ids) for i in range(8)}
    texts = {b"".join(TOKENS[token] or b"" for token in tokens).decode() for tokens in found}
    assert all(re.fullmatch("[ab]{3,9}c?", text) for text in texts)


def test_a_grammar_counts_more_than_other_parameters():
    """A choice that `allowed_token_ids` and `min_tokens` rule out is made all the same."""
    params = SamplingParams(max_tokens=9, temperature=0, grammar=GRAMMARS[3], allowed_token_ids=(0,), min_tokens=9)
    (output,) = shared_engine().generate([[1]], params)
    text = b"".join(TOKENS[token] or b"" for token in output.outputs[0].token_ids).decode()
    assert text in ("abcd", "ab12", "true")
    assert output.outputs[0].finish_reason == "stop"


def test_requests_wait_for_room_in_their_order():
    """The pool has room for one grammar at a time. Requests without a grammar do not wait."""
    sizes = [(g.num_states, 1 + len(g.masks)) for g in GRAMMARS]
    num_states, num_masks = (max(numbers) for numbers in zip(*sizes, strict=True))
    engine = shared_engine(num_grammar_states=num_states, num_grammar_masks=num_masks)
    alone = [
        shared_engine().generate([[i]], dataclasses.replace(greedy(20), grammar=grammar))[0].outputs[0].token_ids
        for i, grammar in enumerate([*GRAMMARS, None])
    ]
    ids = [
        engine.add_request([i], dataclasses.replace(greedy(20), grammar=grammar))
        for i, grammar in enumerate([*GRAMMARS, None])
    ]
    outputs, ends, waited = {}, [], False
    while engine.has_unfinished_requests:
        for output in engine.step():
            outputs[output.request_id] = output.outputs[0].token_ids
            ends += [output.request_id] if output.finished else []
        waited |= engine.stats().waits_for_grammar_room
    assert [outputs[request_id] for request_id in ids] == alone
    assert waited
    assert sorted(ends) == ids
    assert ends.index(ids[0]) < ends.index(ids[1])  # the first one's grammar needs most of the room
    assert engine.stats().num_grammar_states == 0


def test_a_grammar_stays_in_the_pool_until_its_room_is_needed():
    first, second, third = GRAMMARS[1:]
    room = GrammarRoom(first.num_states + second.num_states - 1, 64)

    def row(grammar):
        return dataclasses.make_dataclass("Row", ["params", ("grammar_state", int, 0)])(
            dataclasses.replace(greedy(), grammar=grammar)
        )

    def send(sent, *rows):
        room.before_send(sent)
        held = [room.holds(one) for one in rows]
        return held, len(room.parts_for([one for one, is_held in zip(rows, held, strict=True) if not is_held]))

    rows = [row(grammar) for grammar in (first, second, third, first)]
    assert send([], *rows[:2]) == ([False, False], 2)
    assert [one.grammar_state for one in rows[:2]] == [1, first.num_states]
    assert send(rows[:2], rows[3]) == ([False], 1)  # copied again: no report has shown that it arrived
    room.note_arrival(rows[:2])
    assert send(rows[:2], rows[3], rows[2], rows[3]) == ([False, True, True], 0)  # the last waits behind the third
    assert room.is_full
    fits = third.num_states <= first.num_states
    assert send(rows[1:2], rows[2]) == ([not fits], int(fits))
    assert send([], rows[2]) == ([False], 1)
    assert rows[2].grammar_state > FREE


def test_gaps_are_used_from_the_first_that_fits():
    assert first_gap({}, 9, 10) == 1
    assert first_gap({}, 10, 10) is None
    assert first_gap({1: 3, 6: 2}, 2, 20) == 4
    assert first_gap({1: 3, 6: 2}, 3, 20) == 8
    assert first_gap({1: 3, 6: 2}, 13, 20) is None


def test_the_pool_walks_like_the_grammars():
    grammars = Grammars.create(VOCABULARY, num_states=STATES, num_masks=MASKS, max_requests=4)
    state, mask, starts, pool = 1, 1, [], grammars.pool
    for grammar in GRAMMARS:
        for part in parts_of(grammar, type("Place", (), dict(state=state, mask=mask)), STATES, MASKS):
            pool = pool.with_part(*part)
        starts.append(state)
        state, mask = state + grammar.num_states - 1, mask + len(grammar.masks)
    grammars = dataclasses.replace(grammars, pool=pool)
    rng = np.random.default_rng(0)
    for _ in range(50):
        i = rng.integers(len(GRAMMARS))
        at, tokens, grammar = int(starts[i]), [], GRAMMARS[i]
        for _ in range(6):
            allowed = grammar.allowed_tokens(state_after(grammar, tokens))
            token = int(rng.choice(allowed)) if rng.random() < 0.9 else int(rng.integers(VOCAB))
            tokens.append(token)
            (at,) = np.asarray(grammars.walk(jnp.array([at], jnp.int32), jnp.array([token], jnp.int32))).tolist()
            after = state_after(grammar, tokens)
            assert at == (FREE if after == grammar.dead_state else starts[i] + after)
            if at == FREE or TOKENS[token] is None:
                break


def test_an_engine_over_several_devices_follows_grammars():
    made, _ = over_heads(2, BLOCKS + 1)
    sizes = dict(num_stop_ids=3, num_grammar_states=STATES, num_grammar_masks=MASKS)
    engine = create_engine(**made, vocabulary=VOCABULARY, **sizes)
    params = [dataclasses.replace(greedy(20), grammar=grammar) for grammar in GRAMMARS]
    prompts = [[i] for i in range(len(params))]
    found, expected = (
        [output.outputs[0].token_ids for output in each.generate(prompts, params)] for each in (engine, shared_engine())
    )
    assert found == expected


@pytest.mark.parametrize(
    ("vocabulary", "options", "message"),
    [
        (None, {}, "the engine no vocabulary"),
        (Vocabulary(TOKENS, [END, END - 1]), {}, "compiled for another vocabulary"),
        (VOCABULARY, {"num_grammar_states": 9}, "needs num_grammar_states=.* and the engine has 9"),
        (VOCABULARY, {"num_grammar_masks": 3}, "needs num_grammar_masks=.* and the engine has 3"),
    ],
    ids=["none", "another", "states", "masks"],
)
def test_a_grammar_that_never_fits_is_refused(vocabulary, options, message):
    with not_compiled():
        engine = create_engine(vocabulary=vocabulary, num_stop_ids=3, **options)
    with pytest.raises(ValueError, match=message):
        engine.add_request([1], dataclasses.replace(greedy(), grammar=GRAMMARS[0]))


def test_a_vocabulary_of_another_size_is_refused():
    with pytest.raises(ValueError, match="vocabulary"):
        create_engine(vocabulary=Vocabulary(TOKENS[:-1], [0]))
