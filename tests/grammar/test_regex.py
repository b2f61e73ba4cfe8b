"""Regexes: the texts that match, and the syntax that is refused."""

import random
import re

import pytest

from jaxpaged._grammar.characters import ANY, complement, intersection, union, utf8_sequences
from jaxpaged._grammar.nodes import lengths
from jaxpaged._grammar.regex import parse_full
from jaxpaged.grammar import compile_choice, compile_json_schema, compile_regex
from tests.grammar.samples import VOCABULARY, random_answer, random_regex


def matches(grammar, text):
    return bool(grammar.is_end[grammar.walk(text.encode())])


def texts_near(grammar, rng):
    """An answer, and texts with a character more, less or changed."""
    answer = random_answer(grammar, rng, 20).decode()
    i = rng.randrange(len(answer) + 1)
    yield from (answer, answer[:i] + answer[i + 1 :], answer[:i] + rng.choice("abé\n😀") + answer[i:], answer + "a")


def test_texts_match_as_in_python():
    num_matches, num_texts = 0, 0
    for seed in range(150):
        rng = random.Random(seed)
        pattern = random_regex(rng, 3)  # more nested ones keep Python busy for seconds
        grammar = compile_regex(pattern, VOCABULARY)
        for text in texts_near(grammar, rng):
            is_match = re.fullmatch(pattern, text) is not None
            assert matches(grammar, text) == is_match, (pattern, text)
            num_matches += is_match
            num_texts += 1
    assert 0.3 < num_matches / num_texts < 0.8


PIECES = [
    *"ab01()[]{}|*+?.^$\\-:,<>=!é\n",
    "(?:",
    "[^",
    "\\d",
    "\\w",
    "\\s",
    "{1,2}",
    "\\x41",
    "\\]",
    "(?",
    "P<a>",
    "a-c",
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_any_syntax_means_the_same_in_python_or_is_refused():
    num_compiled = 0
    for seed in range(3000):
        rng = random.Random(seed)
        pattern = "".join(rng.choices(PIECES, k=rng.randint(1, 9)))
        try:
            grammar = compile_regex(pattern, VOCABULARY)
        except ValueError:
            continue
        num_compiled += 1
        for _ in range(10):
            text = "".join(rng.choices("ab01é\n-^$]}c:,<>A", k=rng.randint(0, 4)))
            assert matches(grammar, text) == (re.fullmatch(pattern, text, re.ASCII) is not None), (pattern, text)
    assert num_compiled > 500


def test_schema_patterns_search_as_in_python():
    for seed in range(50):
        rng = random.Random(seed)
        pattern = random_regex(rng, 2)
        pattern = rng.choice(["{}", "^{}", "{}$", "^{}$|a"]).format(f"(?:{pattern})")
        grammar = compile_json_schema({"type": "string", "pattern": pattern}, VOCABULARY)
        for text in ("", "a", "b0", "é😀a", "xaby", "00", '"'):
            spelled = '"' + text.replace('"', '\\"') + '"'
            assert matches(grammar, spelled) == (re.search(pattern, text) is not None), (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "answers", "others"),
    [
        ("a|ab", ["a", "ab"], ["b", ""]),
        ("^a|b$", ["a", "b"], ["ab"]),
        ("", [""], ["a"]),
        ("(?P<x>a)(?<y>b)(?:c)", ["abc"], ["ab"]),
        (r"\d\w\s", ["1_\t", "0a "], ["٣a ", "1é ", "1a\u00a0"]),
        (r"\D\W\S", ["a-b", "é €"], ["1-b", "ab1"]),
        (r"[\d\-x]+", ["1-x"], ["y"]),
        (r"[a-]", ["a", "-"], ["b"]),
        (r"\u00e9\u{1F600}\x41\x{42}", ["é😀AB"], []),
        (r"\.\*\[\$\^\/\-", [".*[$^/-"], []),
        (r"a}b]", ["a}b]"], []),
        (".", ["é", "\r", "😀"], ["\n", ""]),
        ("[^a]", ["\n", "\x00", "\U0010ffff"], ["a", ""]),
        ("(a*)*", ["", "aaa"], ["b"]),
        ("(a{0}|b){2}", ["", "b", "bb"], ["a"]),
    ],
)
def test_answers_and_other_texts(pattern, answers, others):
    grammar = compile_regex(pattern, VOCABULARY)
    assert [text for text in answers if not matches(grammar, text)] == []
    assert [text for text in others if matches(grammar, text)] == []


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a(?=b)", "a lookahead at position 1"),
        ("(?!b)", "a negative lookahead"),
        ("(?<=b)", "a lookbehind"),
        ("(?<!b)", "a negative lookbehind"),
        (r"(a)\1", "a backreference at position 3"),
        ("(?P<a>b)(?P=a)", "a backreference"),
        ("(?i)a", "flags"),
        ("(?>a)", "an atomic group"),
        ("a*+", "a possessive quantifier"),
        ("(a)(?(1)b)", "a conditional"),
        (r"\bword", "a word boundary"),
        (r"a\Z", "an anchor other than"),
        (r"\p{L}", "a Unicode property"),
        (r"\q", r"the escape \\q"),
        ("a^b", "an anchor inside"),
        ("(a$)", "an anchor inside"),
        ("^*", "a quantifier with nothing"),
        ("a**", "a quantifier after a quantifier"),
        ("a{2,1}", "wrong order"),
        ("a{x}", "begins no quantifier"),
        ("{", "begins no quantifier"),
        ("a)", "an unmatched"),
        ("(a", "ends inside"),
        ("[a", "ends inside"),
        ("a\\", "ends inside"),
        ("[]a]", "an empty class"),
        ("[[:alpha:]]", r"\[ inside a class"),
        ("[a&&b]", "&& inside a class"),
        ("[z-a]", "ends in order"),
        (r"[\d-z]", "ends in order"),
        (r"\ud83d", "a surrogate"),
        (r"\u{110000}", "the code point"),
        ("(" * 101 + ")" * 101, "nested groups"),
        ("[^\\x00-\\u{10FFFF}]", "no answer at all"),
        ("a{99999}", "max_states=4096 states"),
        ("(a{999}){999}", "max_states=4096 states"),
        ("(a|b)*a(a|b){20}", "max_states=4096 states"),
    ],
)
def test_the_unsupported_is_refused_by_name(pattern, message):
    with pytest.raises(ValueError, match=message):
        compile_regex(pattern, VOCABULARY)


def test_a_choice_allows_its_options():
    grammar = compile_choice(["a.b", "é", "", "a.bc"], VOCABULARY)
    assert [text for text in ("a.b", "é", "", "a.bc", "axb", "a") if matches(grammar, text)] == ["a.b", "é", "", "a.bc"]
    with pytest.raises(ValueError, match="no answer at all"):
        compile_choice([], VOCABULARY)
    with pytest.raises(ValueError, match="sequence of strings"):
        compile_choice("yes", VOCABULARY)


@pytest.mark.parametrize(
    "ranges",
    [ANY, union([(0x7F, 0x80)]), union([(0x7FF, 0x800)]), union([(0xD000, 0xE000)]), union([(0x3B1, 0x1F600), (5, 9)])],
)
def test_utf8_sequences_are_the_encodings(ranges):
    def encodings(sequences):
        return sum((high - low + 1) * encodings([rest]) if rest else high - low + 1 for (low, high), *rest in sequences)

    sequences = utf8_sequences(ranges)
    inside = [c for low, high in intersection(ranges, ANY) for c in {*range(low, high, 997), low, high}]
    outside = [c for low, high in complement(ranges) for c in {*range(low, high, 997), low, high}]

    def is_encoded(code):
        data = chr(code).encode()
        return any(
            len(data) == len(s) and all(low <= byte <= high for byte, (low, high) in zip(data, s, strict=True))
            for s in sequences
        )

    assert all(map(is_encoded, inside))
    assert not any(map(is_encoded, outside))
    assert encodings(sequences) == sum(high - low + 1 for low, high in intersection(ranges, ANY))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a{2,3}|b*", (0, None)),
        ("(ab|c){2}", (2, 4)),
        ("", (0, 0)),
        ("(){3}", (0, 0)),
        ("a(b|cd)?", (1, 3)),
        ("a+", (1, None)),
    ],
)
def test_the_lengths_of_matches(pattern, expected):
    assert lengths(parse_full(pattern)) == expected
