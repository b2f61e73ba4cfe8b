"""Texts that are free in part: masks against a reader of whole texts, control tokens, and what is refused."""

import itertools
import random

import pytest

from jaxpaged.grammar import (
    Control,
    FreeText,
    OneOf,
    Part,
    Repeat,
    Vocabulary,
    compile_choice,
    compile_json_schema,
    compile_regex,
    compile_text,
)
from tests.grammar.samples import VOCABULARY

WORDS = ["".join(letters).encode() for n in (1, 2, 3) for letters in itertools.product("abc", repeat=n)]
TOKENS = [*WORDS, "é".encode(), *(bytes([byte]) for byte in "é".encode()), b"\xff", b"ab", b"", b"", b"", b""]
THINK, CALL, OTHER, END = range(len(TOKENS) - 4, len(TOKENS))
SMALL = Vocabulary(TOKENS, [END], control_token_ids=[THINK, CALL, OTHER, END])
MARKS = [b"a", b"ab", b"aab", b"aba", b"abab", b"bbc", b"cab", (CALL,), (CALL, *b"a"), (*b"a", CALL), (THINK, CALL)]
MARKS = [tuple(mark) for mark in MARKS]
PATTERNS = ["", "b", "a*", "(ab)+", "[abc]{2}", "a|ab|c", "é?"]


def symbols(token):
    return (token,) if token in SMALL.control_token_ids else tuple(TOKENS[token])


def piece(symbol):
    return Control(symbol) if symbol in SMALL.control_token_ids else chr(symbol)


class Reader:
    """Reads symbols one by one, and knows the whole text: the plainest form of `FreeText`.

    A place is ("free", the text since it became free), ("then", a part, the state of its grammar) or ("end",).
    """

    def __init__(self, parts, may_end):
        self.parts, self.may_end = parts, may_end
        self.places = {("free", ())}

    def read(self, symbol):
        self.places = {after for place in self.places for after in self.after(place, symbol)}

    def after(self, place, symbol):
        if place[0] == "free":
            text = (*place[1], symbol)
            found = [i for i, (mark, _, _) in enumerate(self.parts) if self.is_marked(text, mark)]
            for i in found:
                yield from self.places_in(i, 0)
            if not found:
                yield "free", text
        elif place[0] == "then" and symbol not in SMALL.control_token_ids:
            grammar = self.parts[place[1]][1]
            yield from self.places_in(place[1], grammar.walk(bytes([symbol]), place[2]))

    def is_marked(self, text, mark):
        return text[-len(mark) :] == mark

    def places_in(self, part, state):
        _, grammar, is_last = self.parts[part]
        if state != grammar.dead_state:
            yield "then", part, state
        if grammar.is_end[state]:
            yield ("end",) if is_last else ("free", ())

    def allows(self, token):
        if token == END:
            return any(place == ("end",) or (place[0] == "free" and self.may_end) for place in self.places)
        before = self.places
        for symbol in symbols(token):
            self.read(symbol)
        is_allowed, self.places = bool(self.places), before
        return is_allowed and bool(symbols(token)) and 0xFF not in TOKENS[token]


class HastyReader(Reader):
    """Looks for a mark only where the last try failed, as if marks could not overlap."""

    def is_marked(self, text, mark):
        matched = 0
        for symbol in text:
            matched = matched + 1 if symbol == mark[matched] else 0
            if matched == len(mark):
                return True
        return False


def random_parts(rng):
    return [
        (mark, compile_regex(rng.choice(PATTERNS), SMALL), rng.random() < 0.3)
        for mark in rng.choices(MARKS, k=rng.randint(1, 4))
    ]


def check(parts, may_end, reader, rng):
    texts = (Part(tuple(map(piece, mark)), grammar, is_last) for mark, grammar, is_last in parts)
    grammar = compile_text(FreeText(tuple(texts), may_end), SMALL)
    state = 0
    for _ in range(25):
        allowed = grammar.allowed_tokens(state).tolist()
        assert allowed == [token for token in range(len(TOKENS)) if reader.allows(token)]
        assert bool(grammar.is_end[state]) == (END in allowed)
        if not (others := [token for token in allowed if token != END]):
            break
        token = rng.choice(others)
        state = grammar.walk(SMALL.token_bytes[token, : SMALL.token_lengths[token]].tobytes(), state)
        for symbol in symbols(token):
            reader.read(symbol)


@pytest.mark.parametrize("may_end", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_masks_are_the_tokens_after_which_a_text_can_go_on(seed, may_end):
    rng = random.Random(seed)
    parts = random_parts(rng)
    if not may_end:  # otherwise nothing may end the text
        parts.append(((OTHER,), compile_regex("b", SMALL), True))
    check(parts, may_end, Reader(parts, may_end), rng)


def test_a_reader_that_misses_overlaps_differs():
    parts = [(tuple(b"aab"), compile_regex("c", SMALL), False)]
    readers = [(HastyReader(parts, True), random.Random(seed)) for seed in range(40)]
    with pytest.raises(AssertionError):
        [check(parts, True, reader, rng) for reader, rng in readers]


def walk(grammar, *pieces):
    """The state after texts and control tokens."""
    state = 0
    for each in pieces:
        data = each.encode() if isinstance(each, str) else SMALL.token_bytes[each, :4].tobytes()
        state = grammar.walk(data, state)
    return state


def accepts(grammar, *pieces):
    return bool(grammar.is_end[walk(grammar, *pieces)])


def test_free_text_allows_all_tokens_with_bytes():
    grammar = compile_text(FreeText(), SMALL)
    expected = [token for token in range(len(TOKENS)) if TOKENS[token] not in (b"", b"\xff")]
    assert grammar.allowed_tokens(0).tolist() == [*expected, THINK, CALL, OTHER, END]
    assert (grammar.num_states, len(grammar.masks)) == (5, 3)  # a control token has three states inside


def test_other_grammars_allow_no_control_token():
    for grammar in (compile_regex("(.|\n)*", SMALL), compile_text(("a", compile_regex("[^b]*", SMALL)), SMALL)):
        for state in range(grammar.num_states):
            assert SMALL.control_token_ids.isdisjoint(grammar.allowed_tokens(state).tolist())


def test_a_control_token_is_not_its_text():
    vocabulary = Vocabulary([b"<", b"a", b">", b"<a>", None], [4], control_token_ids=[3])
    grammar = compile_text((FreeText((Part(Control(3), is_last=True),), may_end=False), "a"), vocabulary)
    assert grammar.allowed_tokens(grammar.walk(b"<a>")).tolist() == [0, 1, 2, 3]
    assert vocabulary.token_lengths.tolist() == [1, 1, 1, 4, 0]
    assert grammar.allowed_tokens(grammar.walk(vocabulary.token_bytes[3].tobytes())).tolist() == [1]


def test_a_call_is_forced_once_it_has_begun():
    schema = {"type": "object", "properties": {"day": {"enum": [1, 2]}}, "required": ["day"]}
    grammar = compile_text(
        FreeText((Part("<call>", (compile_json_schema(schema, VOCABULARY), "</call>")),)), VOCABULARY
    )
    for text in ("", "hi <call", 'hi <call>{"day": 2}</call>', '<<call>{"day":1}</call> <call>{"day":2}</call>.'):
        assert grammar.is_end[grammar.walk(text.encode())], text
    for text in ("<call>", '<call>{"day": 2}', 'a<call>{"day": 1}</call><call>{"'):
        assert not grammar.is_end[grammar.walk(text.encode())], text
    for text in ("<call> ", '<call>{"day": 3', 'a<call>{"day": 1}</call><call>a'):
        assert grammar.walk(text.encode()) == grammar.dead_state, text


def test_a_grammar_after_free_text():
    until = FreeText((Part(Control(THINK), is_last=True),), may_end=False)
    grammar = compile_text((OneOf(((), until)), compile_choice(["ab", "c"], SMALL)), SMALL)
    assert accepts(grammar, "c")
    assert accepts(grammar, "ab")
    assert accepts(grammar, "bé", THINK, "c")
    assert not accepts(grammar, "bé")
    assert not accepts(grammar, "bé", THINK)
    assert walk(grammar, "bé", THINK, "b") == grammar.dead_state


def test_a_mark_without_a_way_on_is_never_written():
    grammar = compile_text(FreeText((Part(Control(CALL), OneOf(())), Part("ab", OneOf(())))), SMALL)
    assert CALL not in grammar.allowed_tokens(0)
    assert walk(grammar, "ab") == grammar.dead_state
    assert accepts(grammar, "a", OTHER, "b")


def test_a_mark_may_be_a_grammar():
    grammar = compile_text(FreeText((Part((Control(CALL), compile_regex("[ab]*c", SMALL)), "b"),)), SMALL)
    assert accepts(grammar, CALL, "ab")
    assert not accepts(grammar, CALL, "abc")
    assert accepts(grammar, CALL, "abcb", "cc")
    assert accepts(grammar, CALL, "éabcc")


def test_a_text_may_repeat():
    grammar = compile_text(Repeat(OneOf(("a", Control(CALL))), "b", least=2), SMALL)
    assert accepts(grammar, "ab", CALL, "ba")
    assert not accepts(grammar, "a")
    assert not accepts(grammar, "ab", CALL, "b")
    assert accepts(compile_text(Repeat("ab"), SMALL), "")


def test_equal_texts_are_compiled_once():
    def compiled(mark):
        return compile_text(FreeText((Part(mark, compile_choice(["a"], SMALL)),)), SMALL)

    assert compiled("ab") is compiled("ab")
    assert compiled("ab") is not compiled("abc")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FreeText((Part("", "a"),)), "A mark of free text must not be empty"),
        (Control(END), f"The token {END} of a Control is not in the vocabulary's control_token_ids"),
        (Control(0), "The token 0 of a Control"),
        (["a"], r"A text is a str, .* got \['a'\]"),
        (OneOf(()), "The text allows no answer at all"),
        (FreeText(may_end=False), "The text allows no answer at all"),
        (Repeat("a", least=-1), "least must be at least 0"),
        ("d", "The text allows no answer that"),
    ],
)
def test_wrong_texts_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        compile_text(text, SMALL)


def test_the_most_states_count_for_texts_too():
    with pytest.raises(ValueError, match="more than max_states=20 states"):
        compile_text("a" * 30, SMALL, max_states=20)
