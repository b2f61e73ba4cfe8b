"""Compiled grammars: minimal automata, masks of any vocabulary, bounds of numbers, recent grammars, threads."""

import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import numpy as np
import pytest

from jaxpaged._grammar.automaton import ByteNFA, determinise
from jaxpaged._grammar.numbers import Bound, decimals, integers
from jaxpaged.grammar import Grammar, Vocabulary, compile_choice, compile_regex
from tests.grammar.samples import END, TOKENS, VOCABULARY, random_regex

PATTERNS = ["a|ab", "(a|b)*a(a|b){3}", '"[^"]{0,40}"', ".*", "", "[0-9]{4}-[0-9]{2}", "x(é|😀)+y?"]
PATTERNS += [random_regex(random.Random(seed)) for seed in range(30)]


def distinguishable(next_states, is_end):
    """The number of states that accept different texts, by refinement of all states at once."""
    group, count = is_end.astype(int), 0
    while count < (count := len(np.unique(group))):
        group = np.unique(np.column_stack([group, group[next_states]]), axis=0, return_inverse=True)[1].reshape(-1)
    return count


@pytest.mark.parametrize("pattern", PATTERNS)
def test_automata_are_minimal_and_live(pattern):
    grammar = compile_regex(pattern, VOCABULARY)
    assert distinguishable(grammar.next_states, grammar.is_end) == grammar.num_states
    assert len(np.unique(grammar.next_states, axis=1).T) == grammar.next_states.shape[1]
    assert (grammar.next_states[-1] == grammar.dead_state).all()
    reaches = grammar.is_end.copy()
    for _ in range(grammar.num_states):
        reaches |= reaches[grammar.next_states].any(axis=1)
    assert reaches[:-1].all()
    assert not reaches[-1]


def test_an_automaton_with_a_copied_state_is_not_minimal():
    grammar = compile_regex("a*b", VOCABULARY)
    copied = np.concatenate([grammar.next_states[:1], grammar.next_states])
    assert distinguishable(copied, np.append(grammar.is_end[:1], grammar.is_end)) < len(copied)


def brute_force_mask(grammar: Grammar, state: int) -> list[int]:
    allowed = [token for token, data in enumerate(TOKENS) if grammar.walk(data, state) != grammar.dead_state]
    return allowed + [END] * bool(grammar.is_end[state])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_are_the_tokens_that_lead_to_live_states(pattern):
    grammar = compile_regex(pattern, VOCABULARY)
    for state in range(grammar.num_states):
        assert grammar.allowed_tokens(state).tolist() == brute_force_mask(grammar, state)
    assert len(np.unique(grammar.masks, axis=0)) == len(grammar.masks)
    assert set(grammar.mask_of_state.tolist()) == set(range(len(grammar.masks)))


def test_long_strings_share_masks():
    grammar = compile_regex('"[^"]{0,300}"', VOCABULARY)
    assert grammar.num_states > 2000
    assert len(grammar.masks) < 200
    for state in range(0, grammar.num_states, 37):
        assert grammar.allowed_tokens(state).tolist() == brute_force_mask(grammar, state)


def test_dtypes():
    grammar = compile_regex("a+", VOCABULARY)
    arrays = [grammar.byte_classes, grammar.next_states, grammar.masks, grammar.mask_of_state, grammar.is_end]
    assert [array.dtype.name for array in arrays] == ["uint8", "int16", "uint32", "int16", "bool"]
    assert grammar.masks.shape[1] == -(-len(VOCABULARY) // 32)
    assert grammar.nbytes == sum(array.nbytes for array in arrays)
    assert grammar.vocabulary == VOCABULARY.fingerprint
    assert not any(array.flags.writeable for array in arrays)
    assert pickle.loads(pickle.dumps(grammar)).walk(b"aa") == grammar.walk(b"aa")


def test_a_vocabulary_without_all_bytes_never_gets_stuck():
    vocabulary = Vocabulary([b"ab", b"c", b"cd", b"de", None], end_token_ids=[4])
    # After "c" alone no token would continue.
    assert compile_regex("ab|cd|ce", vocabulary).allowed_tokens(0).tolist() == [0, 2]
    assert compile_regex("cde|cx", vocabulary).allowed_tokens(0).tolist() == [1]
    with pytest.raises(ValueError, match="can spell"):
        compile_regex("a|ce", vocabulary)


@pytest.mark.parametrize("seed", range(40))
def test_masks_of_a_small_vocabulary_lead_to_an_end(seed):
    rng = random.Random(seed)
    tokens = [*rng.sample([token for token in TOKENS if token.isascii()], 60), "é".encode(), "😀".encode()[:1]]
    pattern = random_regex(rng, 3)
    reference = compile_regex(pattern, VOCABULARY)
    by_token = np.array([[reference.walk(token, state) for token in tokens] for state in range(reference.num_states)])
    reaches = reference.is_end.copy()
    for _ in range(reference.num_states):
        reaches |= reaches[by_token].any(axis=1)
    vocabulary = Vocabulary([*tokens, None], [len(tokens)])
    if not reaches[0]:
        with pytest.raises(ValueError, match="can spell"):
            compile_regex(pattern, vocabulary)
        return
    grammar = compile_regex(pattern, vocabulary)
    for state in range(grammar.num_states):
        allowed = np.flatnonzero(reaches[by_token[state]]).tolist() + [len(tokens)] * bool(grammar.is_end[state])
        assert grammar.allowed_tokens(state).tolist() == allowed


def language(node, texts):
    table, is_end = determinise(ByteNFA(node, 4096), 4096)
    return [text for text in texts if _accepts(table, is_end, text)]


def _accepts(table, is_end, text):
    state = 0 if len(table) else -1
    for byte in text.encode():
        state = table[state, byte] if state >= 0 else -1
    return bool(state >= 0 and is_end[state])


@pytest.mark.parametrize(
    ("low", "high"), [(None, None), (0, 0), (-1, 1), (3, 117), (-99, None), (None, -10), (10, None), (-105, -7), (5, 4)]
)
def test_integers_are_within_bounds(low, high):
    numbers = [n for n in range(-130, 131) if (low is None or n >= low) and (high is None or n <= high)]
    texts = [str(n) for n in range(-130, 131)] + ["-0", "01", "-01", "", "-"]
    assert language(integers(low, high), texts) == list(map(str, numbers))


BOUNDS = [
    None,
    *(Bound(Decimal(value), closed) for value in ("-1.25", "-1", "0", "0.1", "2.05") for closed in (True, False)),
]


@pytest.mark.parametrize("high", BOUNDS, ids=str)
@pytest.mark.parametrize("low", BOUNDS, ids=str)
def test_decimals_are_within_bounds(low, high):
    hundredths = [f"{n / 100:.2f}" for n in range(-220, 221)]
    texts = sorted({t.rstrip(z) if z else t for t in hundredths for z in ("", "0")} | {f"{n}" for n in range(-2, 3)})
    texts = [text for text in texts if not text.endswith(".") and text.strip("-.0")] + ["0", "0.0", "0.00"]

    def is_within(value):
        is_low = low is None or value > low.value or (low.is_inclusive and value == low.value)
        return is_low and (high is None or value < high.value or (high.is_inclusive and value == high.value))

    assert language(decimals(low, high), texts) == [text for text in texts if is_within(Decimal(text))]


def test_recent_grammars_are_kept_up_to_their_bytes():
    vocabulary = Vocabulary([b"a", b"b", None], end_token_ids=[2], cache_bytes=2000)
    first = compile_regex("a+", vocabulary)
    assert compile_regex("a+", vocabulary) is first
    assert compile_choice(["a"], vocabulary) is not compile_regex("a", vocabulary)
    for i in range(40):
        compile_regex(f"b{{{i}}}", vocabulary)
        assert vocabulary.recent.nbytes <= 2000
    assert 0 < len(vocabulary.recent) < 40
    assert compile_regex("a+", vocabulary) is not first
    without = Vocabulary([b"a", b"b", None], end_token_ids=[2], cache_bytes=0)
    assert compile_regex("a", without) is not compile_regex("a", without)


def test_threads_get_one_grammar():
    vocabulary = Vocabulary([*TOKENS, None], end_token_ids=[END])
    patterns = [f"a{{{i}}}[^b]*" for i in range(1, 9)] * 4
    with ThreadPoolExecutor(8) as threads:
        grammars = list(threads.map(lambda pattern: compile_regex(pattern, vocabulary), patterns))
    assert len({id(grammar) for grammar in grammars}) == 8
    for pattern, grammar in zip(patterns[:8], grammars[:8], strict=True):
        assert np.array_equal(grammar.masks, compile_regex(pattern, Vocabulary([*TOKENS, None], [END])).masks)


def test_max_states_counts_the_dead_state():
    assert compile_regex("abc", VOCABULARY, max_states=5).num_states == 5
    with pytest.raises(ValueError, match="max_states=4 states"):
        compile_regex("abc", VOCABULARY, max_states=4)
    with pytest.raises(ValueError, match="at most 32767"):
        compile_regex("abc", VOCABULARY, max_states=32768)
