"""Masks along random answers equal those of llguidance, on 1,000 random regexes."""

import random

import numpy as np
import pytest

from jaxpaged.grammar import compile_regex
from tests.grammar.samples import END, TOKENS, VOCABULARY, random_regex

llguidance = pytest.importorskip("llguidance")

NUM_REGEXES, NUM_TOKENS = 1000, 12


class ByteTokenizer:
    """The interface of a tokenizer that llguidance expects."""

    eos_token_id = END
    bos_token_id = None
    special_token_ids = (END, END + 1)
    tokens = (*TOKENS, b"<end>", b"<special>")

    def __call__(self, text):
        return list(text)


@pytest.fixture(scope="module")
def tokenizer():
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteTokenizer()), slices=[])


def make_matcher(tokenizer, pattern):
    # By default llguidance allows one of several ways to spell a forced text.
    grammar = '%llguidance {"no_forcing": true}\nstart: /' + pattern.replace("/", "\\/") + "/"
    return llguidance.LLMatcher(tokenizer, grammar)


def read_mask(matcher):
    return np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))


def compare(grammar, matcher, rng):
    """Compares masks along one random answer; returns whether they are equal, and the number compared."""
    state = 0
    for step in range(1, NUM_TOKENS + 1):
        allowed = grammar.allowed_tokens(state)
        if not np.array_equal(allowed, read_mask(matcher)):
            return False, step
        token = rng.choice(allowed.tolist())
        if token == END:
            break
        assert matcher.consume_token(token)
        state = grammar.walk(TOKENS[token], state)
    return True, step


def test_masks_are_equal(tokenizer):
    num_regexes, num_masks, wrong = 0, 0, []
    for seed in range(NUM_REGEXES):
        rng = random.Random(seed)
        pattern = random_regex(rng)
        matcher = make_matcher(tokenizer, pattern)
        if matcher.is_error():  # llguidance limits the size of an automaton
            continue
        is_equal, steps = compare(compile_regex(pattern, VOCABULARY), matcher, rng)
        num_regexes += 1
        num_masks += steps
        wrong += [] if is_equal else [pattern]
    assert wrong == []
    assert num_regexes > 0.99 * NUM_REGEXES
    assert num_masks > 4 * NUM_REGEXES


@pytest.mark.parametrize("change", ["{}|a", "(?:{})b?", "[a-c]?(?:{})"])
def test_masks_of_another_regex_differ(tokenizer, change):
    num_different = 0
    for seed in range(100):
        rng = random.Random(seed)
        pattern = random_regex(rng)
        grammar = compile_regex(change.format(pattern), VOCABULARY)
        num_different += not compare(grammar, make_matcher(tokenizer, pattern), rng)[0]
    assert num_different > 20
