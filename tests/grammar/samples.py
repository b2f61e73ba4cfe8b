"""A vocabulary, random regexes, random schemas, and answers drawn from a grammar."""

import random

import numpy as np

from jaxpaged.grammar import Grammar, Vocabulary

JSON_TOKENS = ['{"', '":', '": ', '", "', '"}', "[]", "{}", "}}", "true", "null", "12", "-1", ".5", "e1", '\\"', "\\\\"]


def make_tokens() -> list[bytes]:
    """All bytes, random texts in four scripts, parts of characters, and two tokens with equal bytes."""
    rng = random.Random(0)
    texts = ["".join(rng.choices('abc01é—😀-\n"', k=rng.randint(2, 4))) for _ in range(400)]
    parts = ["😀".encode()[:2], "😀".encode()[2:], "—".encode()[1:] + b"a", b"ab"]
    return [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in [*texts, *JSON_TOKENS]), *parts, b"ab"]


TOKENS = make_tokens()
END = len(TOKENS)
VOCABULARY = Vocabulary([*TOKENS, None, None], end_token_ids=[END])

ATOMS = [
    "a",
    "b",
    "c",
    "0",
    "1",
    "é",
    "—",
    "😀",
    ".",
    "[a-c]",
    "[^a]",
    '[^\\n"é]',
    "[é-—]",
    "[α-😀]",
    "[ab😀]",
    "\\.",
    "\\x61",
]
QUANTIFIERS = ["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?", "+?"]


def random_regex(rng: random.Random, depth: int = 4) -> str:
    """A regex that Python, Rust and this package read alike."""
    kind = rng.random()
    if depth == 0 or kind < 0.35:
        return rng.choice(ATOMS)
    if kind < 0.6:
        return "".join(random_regex(rng, depth - 1) for _ in range(rng.randint(1, 4)))
    if kind < 0.8:
        return "(" + "|".join(random_regex(rng, depth - 1) for _ in range(rng.randint(2, 3))) + ")"
    return f"(?:{random_regex(rng, depth - 1)}){rng.choice(QUANTIFIERS)}"


def random_schema(rng: random.Random, depth: int = 3) -> dict:
    """A schema of supported keywords, with a recursive definition `#/$defs/tree`."""
    tree = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/tree"}}}
    return random_part(rng, depth) | {"$defs": {"tree": tree}}


def random_part(rng: random.Random, depth: int) -> dict:
    leaves = [random_string, random_integer, random_number, random_constant]
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(leaves)(rng)
    kinds = [random_array, random_tuple, random_object, random_object, random_map, random_union, random_tagged_union]
    if rng.random() < 0.1:
        return rng.choice([{"$ref": "#/$defs/tree"}, {}, {"type": ["null", "boolean"]}])
    return rng.choice(kinds)(rng, depth - 1)


def random_string(rng):
    least = rng.randint(0, 3)
    return rng.choice(
        [
            {"type": "string"},
            {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 4)},
            {"type": "string", "pattern": f"^{random_regex(rng, 2)}$"},
            {"type": "string", "pattern": random_regex(rng, 2)},
            {"type": "string", "format": rng.choice(["date", "time", "date-time", "uuid", "ipv4", "email"])},
        ]
    )


def random_integer(rng):
    schema = {"type": "integer"}
    low = rng.choice([-1200, -7, 0, 3, 95, 1000])
    if rng.random() < 0.6:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.6:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.choice([2, 30, 4567])
    return schema


def random_number(rng):
    schema = {"type": "number"}
    low = rng.choice([-12.5, -0.25, 0, 0.5, 9.99, 100])
    if rng.random() < 0.6:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.6:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.choice([0.125, 1, 30.75])
    return schema


def random_constant(rng):
    values = [1, -2.5, "a", 'é"\n', None, True, [1, {"b": []}], {"k": "v", "n": 0}, {}]
    return rng.choice([{"const": rng.choice(values)}, {"enum": rng.sample(values, 3)}])


def random_array(rng, depth):
    least = rng.randint(0, 2)
    bounds = rng.choice([{}, {"minItems": least}, {"minItems": least, "maxItems": least + rng.randint(0, 2)}])
    return {"type": "array", "items": random_part(rng, depth)} | bounds


def random_tuple(rng, depth):
    prefix = [random_part(rng, depth) for _ in range(rng.randint(1, 3))]
    items = rng.choice([{}, {"items": False}, {"items": random_part(rng, 0)}])
    return {"type": "array", "prefixItems": prefix, "minItems": rng.randint(0, len(prefix))} | items


def random_object(rng, depth):
    names = rng.sample(["a", "b", 'q"\\', "é~/", "", "long name"], rng.randint(1, 4))
    properties = {name: random_part(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.5]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": rng.random() < 0.5,
    }


def random_map(rng, depth):
    bounds = rng.choice([{}, {"minProperties": 1}, {"maxProperties": 2}])
    return {"type": "object", "additionalProperties": random_part(rng, depth)} | bounds


def random_union(rng, depth):
    return {"anyOf": [random_part(rng, depth) for _ in range(rng.randint(1, 3))]}


def random_tagged_union(rng, depth):
    def option(tag):
        properties = {"kind": {"const": tag}, "value": random_part(rng, depth)}
        return {"type": "object", "properties": properties, "required": ["kind"]}

    return {"oneOf": [option("x"), option("y"), {"type": "null"}]}


def distances(grammar: Grammar) -> np.ndarray:
    """The least number of bytes from each state to an end."""
    distance = np.where(grammar.is_end, 0, grammar.num_states)
    while (shorter := np.minimum(distance, distance[grammar.next_states].min(axis=1) + 1)).sum() < distance.sum():
        distance = shorter
    return distance


def random_answer(grammar: Grammar, rng: random.Random, num_free: int = 120) -> bytes:
    """An answer of uniformly drawn allowed tokens; after `num_free` bytes, of those that end it soonest."""
    distance, answer, state = distances(grammar), b"", 0
    while True:
        allowed = grammar.allowed_tokens(state).tolist()
        if len(answer) >= num_free:
            if END in allowed:
                return answer
            after = {token: distance[grammar.walk(TOKENS[token], state)] for token in allowed}
            allowed = [token for token in allowed if after[token] == min(after.values())]
        token = rng.choice(allowed)
        if token == END:
            return answer
        answer += TOKENS[token]
        state = grammar.walk(TOKENS[token], state)
