"""How long compiling a grammar lasts, and how large it is: `python -m benchmarks.engine.grammars`.

Needs no GPU. The masks are checked before a grammar is timed: those of some states against a walk of every token. The
tokens are those of SmolLM2 (49,152), and the same with pairs of them up to 128,256. Seconds are the median CPU time of
three compilations.

`--toy` uses single bytes as tokens.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.checks import require
from benchmarks.harness import add_output, open_store
from jaxpaged.grammar import (
    FreeText,
    Grammar,
    Part,
    Vocabulary,
    compile_choice,
    compile_json_object,
    compile_json_schema,
    compile_regex,
    compile_text,
)
from lib.checkpoint import default_path, read_checkpoint

LARGE = 128_256
STRING: dict[str, Any] = {"type": "string"}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": STRING,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": STRING,
        "tags": {"type": "array", "items": STRING},
        "height": {"type": "number"},
        "kind": {"enum": ["customer", "supplier"]},
    },
    "required": ["name", "age"],
}
ORDERS = {
    "$defs": {"person": PERSON},
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "buyer": {"$ref": "#/$defs/person"},
            "seller": {"anyOf": [{"$ref": "#/$defs/person"}, {"type": "null"}]},
            "placed": {"type": "string", "format": "date-time"},
        },
        "required": ["buyer", "placed"],
    },
}
MOST_STATES = 8191


def compile_calls(vocabulary: Vocabulary, num_functions: int) -> Grammar:
    """Free text with calls of functions, each with six properties of its own."""
    calls = []
    for i in range(num_functions):
        arguments = {
            "type": "object",
            "properties": {f"{name}_{i}": each for name, each in PERSON["properties"].items()},
        }
        properties = {"name": {"const": f"function_{i}"}, "arguments": arguments}
        calls.append({"type": "object", "properties": properties, "required": [*properties]})
    call = compile_json_schema({"anyOf": calls}, vocabulary, max_states=MOST_STATES)
    return compile_text(FreeText((Part("<call>", (call, "</call>")),)), vocabulary, max_states=MOST_STATES)


CASES: dict[str, Callable[[Vocabulary], Grammar]] = {
    "a date": lambda vocabulary: compile_regex(r"\d{4}-\d\d-\d\d", vocabulary),
    "one of 50 strings": lambda vocabulary: compile_choice([f"option {i}" for i in range(50)], vocabulary),
    "an object of 6 properties": lambda vocabulary: compile_json_schema(PERSON, vocabulary),
    "an array of objects with two such objects": lambda vocabulary: compile_json_schema(ORDERS, vocabulary),
    "a string of up to 100 characters": lambda vocabulary: compile_json_schema(STRING | {"maxLength": 100}, vocabulary),
    "a string of up to 400 characters": lambda vocabulary: compile_json_schema(STRING | {"maxLength": 400}, vocabulary),
    "any JSON object, `max_depth=2`": lambda vocabulary: compile_json_object(vocabulary, max_depth=2),
    "any JSON object, `max_depth=3`": lambda vocabulary: compile_json_object(vocabulary, max_depth=3),
    "any JSON object, `max_depth=4`": lambda vocabulary: compile_json_object(vocabulary, max_depth=4),
    "free text with calls of one function": lambda vocabulary: compile_calls(vocabulary, 1),
    "free text with calls of 3 functions": lambda vocabulary: compile_calls(vocabulary, 3),
    "free text with calls of 20 functions": lambda vocabulary: compile_calls(vocabulary, 20),
}


def read_tokens() -> tuple[list[bytes | None], int]:
    """The bytes of SmolLM2's tokens, and the token that ends an answer."""
    tokenizer = read_checkpoint(default_path()).tokenizer
    vocabulary = Vocabulary.from_tokenizer(tokenizer.tokenizer, tokenizer.eos_ids)
    pairs = zip(vocabulary.token_bytes, vocabulary.token_lengths, strict=True)
    tokens = [row[:length].tobytes() or None for row, length in pairs]
    for token in vocabulary.control_token_ids:
        tokens[token] = None
    return tokens, tokenizer.eos_ids[0]


def with_pairs(tokens: list[bytes | None], size: int) -> list[bytes | None]:
    """The tokens, and random pairs of them."""
    texts = [token for token in tokens if token]
    rng = np.random.default_rng(0)
    pairs = (texts[i] + texts[j] for i, j in rng.integers(len(texts), size=(size - len(tokens), 2)))
    return [*tokens, *pairs]


def check(grammar: Grammar, tokens: list[bytes | None]) -> None:
    """Raises if the mask of a state differs from a walk of every token."""
    for state in np.random.default_rng(0).integers(grammar.num_states, size=3).tolist():
        leads = [
            i
            for i, token in enumerate(tokens)
            if token and b"\xff" not in token and grammar.walk(token[:32], state) != grammar.dead_state
        ]
        allowed = grammar.allowed_tokens(state)
        require(np.isin(allowed, leads).sum() == len(allowed) - grammar.is_end[state], "a token is allowed")
        short = [i for i in leads if len(tokens[i] or b"") <= 32]
        require(np.isin(short, allowed).all(), "a token is not allowed")


def measure(make: Callable[[Vocabulary], Grammar], vocabulary: Vocabulary) -> tuple[Grammar, float]:
    seconds = []
    for _ in range(3):
        start = time.process_time()
        grammar = make(vocabulary)
        seconds.append(time.process_time() - start)
    return grammar, statistics.median(seconds)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true")
    add_output(parser)
    options = parser.parse_args(arguments)
    store = open_store("grammars", options)
    tokens, end = ([bytes([byte]) for byte in range(256)] + [None], 256) if options.toy else read_tokens()
    sizes = [len(tokens)] if options.toy else [len(tokens), LARGE]
    for size in sizes:
        tokens = with_pairs(tokens, size)
        vocabulary = Vocabulary(tokens, [end], cache_bytes=0)
        for name, make in CASES.items():
            grammar, seconds = measure(make, vocabulary)
            check(grammar, tokens)
            print(f"{size:>7} tokens, {name:<42} {seconds:6.3f} s  {grammar}", flush=True)
            point = {
                "seconds": seconds,
                "states": grammar.num_states,
                "classes": grammar.next_states.shape[1],
                "masks": len(grammar.masks),
                "nbytes": grammar.nbytes,
            }
            store.add(f"{name}, {size} tokens", point)


if __name__ == "__main__":
    main()
