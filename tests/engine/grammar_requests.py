"""Requests that follow grammars, and their tokens by equations."""

import dataclasses
import functools

import numpy as np

from jaxpaged.grammar import (
    Control,
    FreeText,
    OneOf,
    Part,
    Vocabulary,
    compile_choice,
    compile_json_schema,
    compile_regex,
    compile_text,
)
from tests.logits_model import processed, with_changes
from tests.toy_model import MAX_TOKENS, VOCAB, continuation, random_weights, requests

TEXTS = [*map(chr, range(ord("a"), ord("h"))), *'0123456789{}[]",: -', "ab", "cd", '":', '", "', '{"', "12", "true"]
TOKENS = [text.encode() for text in TEXTS] + [None] * (VOCAB - len(TEXTS))
END = VOCAB - 1
CONTROLS = (END - 1, END - 2)
VOCABULARY = Vocabulary(TOKENS, [END], control_token_ids=CONTROLS)
TOKENS = [row[:n].tobytes() or None for row, n in zip(VOCABULARY.token_bytes, VOCABULARY.token_lengths, strict=True)]
PROPERTIES = {"a": {"type": "integer"}, "b": {"enum": [True, 12, "cd"]}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["b"]}
GRAMMARS = (
    compile_json_schema(SCHEMA, VOCABULARY),
    compile_regex("(ab|c[d-g])+(12)?", VOCABULARY),
    compile_regex("[a-c]{3,9}", VOCABULARY),
    compile_choice(["abcd", "ab12", "true"], VOCABULARY),
)
CALL = Part(
    OneOf((Control(CONTROLS[0]), "b", "d1")), (compile_choice(["abcd", "true"], VOCABULARY), Control(CONTROLS[1]))
)
CALLS = compile_text(FreeText((CALL,)), VOCABULARY)
PATTERNS = (None, "(ab|c[d-g])+(12)?", "[a-c]{3,9}", "abcd|ab12|true")
STATES = 1 + sum(grammar.num_states - 1 for grammar in (*GRAMMARS, CALLS))
MASKS = 1 + sum(len(grammar.masks) for grammar in (*GRAMMARS, CALLS))


def state_after(grammar, new):
    return functools.reduce(lambda state, token: grammar.walk(TOKENS[token] or b"", state), new, 0)


def restricted(logits, prompt, new, params):
    """The logits to draw from, by the grammar's own automaton."""
    x, grammar = processed(logits, prompt, new, params), params.grammar
    if grammar is None:
        return x
    state = state_after(grammar, new)
    is_allowed = np.zeros(len(x), bool)
    is_allowed[grammar.allowed_tokens(state)] = True
    is_allowed[list(params.stop_token_ids)] = grammar.is_end[state]
    y = np.where(is_allowed, x, -np.inf)
    return y if (y > -np.inf).any() else np.where(is_allowed, logits, -np.inf)


@functools.cache
def requests_with_grammars():
    """Requests of which most have grammars, some in addition to other changes, and their expected tokens."""
    prompts, params = requests(20, seed=3)
    params = [
        dataclasses.replace(one, grammar=(*GRAMMARS, CALLS, None)[i % 6], max_tokens=max(one.max_tokens, 12))
        for i, one in enumerate(with_changes(params, 4, VOCAB))
    ]
    prompts = [prompt[: MAX_TOKENS - one.max_tokens] for prompt, one in zip(prompts, params, strict=True)]
    ended = [
        one if one.grammar is None else dataclasses.replace(one, stop_token_ids=(*one.stop_token_ids, END))
        for one in params
    ]
    expected = [
        [continuation(random_weights(), prompt, one, i, restricted)[0] for i in range(one.n)]
        for prompt, one in zip(prompts, ended, strict=True)
    ]
    return prompts, params, expected
