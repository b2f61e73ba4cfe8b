"""Requests whose answers follow a grammar, over HTTP."""

import dataclasses
import json
import re
from types import SimpleNamespace

import openai
import pydantic
import pytest

from jaxpaged import EngineOptions
from serve import read_vocabulary
from tests.examples.scripted_engine import scripted_service
from tests.examples.serving import ask, body, chat, chat_body, complete, read, running, texts
from tests.examples.tiny_tokenizers import byte_level, word_piece
from tests.examples.tool_tokenizers import make_tokenizer

COLOURS = ["red", "green", "blue"]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": COLOURS}, "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "required": ["colour", "tags"],
    "additionalProperties": False,
}
DATE = r"\d{4}-\d\d"


def named(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def is_valid(text):
    answer = json.loads(text)
    assert answer["colour"] in COLOURS
    assert all(isinstance(tag, bool) for tag in answer["tags"])
    assert len(answer["tags"]) <= 3
    return set(answer) == {"colour", "tags"}


FIELDS = {
    "response_format": (dict(response_format=named(SCHEMA)), is_valid),
    "response_format, a schema that is not strict": (
        dict(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}),
        is_valid,
    ),
    "structured_outputs, json": (dict(structured_outputs={"json": SCHEMA}), is_valid),
    "structured_outputs, json as a text": (dict(structured_outputs={"json": json.dumps(SCHEMA)}), is_valid),
    "structured_outputs, regex": (dict(structured_outputs={"regex": DATE}), re.compile(DATE).fullmatch),
    "structured_outputs, choice": (dict(structured_outputs={"choice": COLOURS}), COLOURS.__contains__),
    "guided_json": (dict(guided_json=SCHEMA), is_valid),
    "guided_regex": (dict(guided_regex=DATE), re.compile(DATE).fullmatch),
    "guided_choice": (dict(guided_choice=COLOURS), COLOURS.__contains__),
}


@pytest.mark.parametrize("name", FIELDS)
def test_an_answer_follows_its_grammar(server, name):
    """Whole and streamed, greedy and sampled, of chats and completions; without the grammar none is right."""
    fields, is_right = FIELDS[name]
    options = dict(max_tokens=80, n=3, extra_body=fields)
    for temperature in (0, 1.5):
        answers = complete(server, temperature=temperature, seed=1, **options)
        chats = chat(server, temperature=temperature, seed=1, **options)
        assert {choice.finish_reason for choice in [*answers.choices, *chats.choices]} == {"stop"}
        found = texts(answers) + [choice.message.content for choice in chats.choices]
        assert all(map(is_right, found)), found
    chunks = chat(server, temperature=1.5, seed=1, stream=True, **options)
    streamed = ["", "", ""]
    for chunk in chunks:
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == found[3:]
    with pytest.raises((ValueError, AssertionError)):
        assert is_right(texts(complete(server, max_tokens=20))[0])


@pytest.mark.parametrize(
    "fields", [dict(response_format={"type": "json_object"}), dict(structured_outputs={"json_object": True})]
)
def test_an_answer_is_any_json_object(server, fields):
    """A random model rarely ends a string: other answers are cut, and begin an object all the same."""
    ended = 0
    for seed in range(3):
        answer = complete(
            server, temperature=2, seed=seed, n=4, max_tokens=100, logit_bias={"34": 5, "125": 9}, extra_body=fields
        )
        for choice in answer.choices:
            assert choice.text.startswith("{")
            if choice.finish_reason == "stop":
                assert isinstance(json.loads(choice.text), dict)
                ended += 1
    assert ended > 0


def test_answers_of_random_schemas_are_valid(server):
    jsonschema = pytest.importorskip("jsonschema")
    schemas = [
        {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 120}, "minItems": 1, "maxItems": 4},
        {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
        {"$defs": {"a": {"enum": [1, "b"]}}, "type": "array", "items": {"$ref": "#/$defs/a"}, "maxItems": 3},
        SCHEMA,
    ]
    for schema in schemas:
        answer = complete(server, temperature=1.5, seed=3, n=4, max_tokens=100, extra_body={"guided_json": schema})
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.text), schema)


def test_an_answer_that_is_cut_says_so(server):
    (choice,) = chat(server, max_tokens=5, response_format=named(SCHEMA)).choices
    assert choice.finish_reason == "length"
    assert '{"colour": "'.startswith(choice.message.content[:3])


def test_a_grammar_is_compiled_once(server):
    recent = server.service.vocabulary.recent
    complete(server, extra_body={"guided_regex": "[ab]{3}"})
    size = len(recent)
    complete(server, extra_body={"structured_outputs": {"regex": "[ab]{3}"}})
    assert len(recent) == size


def test_the_openai_client_parses_answers(server):
    class Answer(pydantic.BaseModel):
        colour: str = pydantic.Field(pattern="^(red|green)$")
        is_warm: bool

    messages = [{"role": "user", "content": "a"}]
    options = dict(model="model", temperature=0)
    answer = server.client.chat.completions.parse(messages=messages, response_format=Answer, **options)
    assert isinstance(answer.choices[0].message.parsed, Answer)
    response = server.client.responses.parse(input="a", text_format=Answer, **options)
    assert isinstance(response.output_parsed, Answer)
    assert response.text.format.type == "json_schema"


UNIQUE = {"type": "array", "uniqueItems": True}
REFUSED = {
    "a keyword": (
        dict(response_format=named({"properties": {"a": UNIQUE}, "type": "object"})),
        "The JSON schema has 'uniqueItems' at '#/properties/a', which a regular language cannot express.",
        "response_format.json_schema.schema",
    ),
    "a keyword, vLLM": (dict(guided_json=UNIQUE), "The JSON schema has 'uniqueItems' at '#'", "guided_json"),
    "a regex": (
        dict(structured_outputs={"regex": "a(?=b)"}),
        "The regex 'a(?=b)' has a lookahead at position 1, which grammars do not support.",
        "structured_outputs.regex",
    ),
    "too large": (dict(guided_regex=".{4000}"), "The grammar needs more than max_states=4096 states.", "guided_regex"),
    "a format": (
        dict(response_format={"type": "grammar"}),
        "type must be text, json_object or json_schema; got 'grammar'.",
        "response_format.type",
    ),
    "no schema": (
        dict(response_format={"type": "json_schema", "json_schema": {"name": "a"}}),
        "The field 'schema' is missing.",
        "response_format.json_schema.schema",
    ),
    "a schema that is no JSON": (
        dict(structured_outputs={"json": "{"}),
        "json must be a JSON schema, as an object or its text; got '{'.",
        "structured_outputs.json",
    ),
    "a choice of nothing": (
        dict(structured_outputs={"choice": []}),
        "choice must be a list of at least one text.",
        "structured_outputs.choice",
    ),
    "a context-free grammar": (
        dict(structured_outputs={"grammar": "a"}),
        "grammar is not supported here; leave it out.",
        "structured_outputs.grammar",
    ),
    "two grammars": (
        dict(guided_regex="a", response_format={"type": "json_object"}),
        "guided_regex does not go with response_format: an answer has one grammar.",
        "guided_regex",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_grammar_gets_one_sentence(server, name):
    fields, message, param = REFUSED[name]
    for path, content in (("/v1/completions", body(**fields)), ("/v1/chat/completions", chat_body(**fields))):
        status, _, answer = ask(server, path, content)
        error = json.loads(answer)["error"]
        assert (status, error["param"], error["message"].startswith(message)) == (400, param, True), error
        assert error["message"].count(". ") == 0
    assert complete(server, max_tokens=2).choices


def test_a_grammar_that_never_fits_into_the_engine_is_refused(server, monkeypatch):
    monkeypatch.setattr(EngineOptions, "num_grammar_masks", 5)
    with pytest.raises(openai.BadRequestError, match="has 5 different sets of allowed tokens; it may have 4 here"):
        complete(server, extra_body={"guided_choice": ["abc"]})
    assert complete(server, extra_body={"guided_choice": ["ab"]}).choices[0].text == "ab"


def test_responses_name_their_own_fields(server):
    form = {"type": "json_schema", "name": "a", "schema": UNIQUE}
    with pytest.raises(openai.BadRequestError, match="'uniqueItems'") as raised:
        server.client.responses.create(model="model", input="a", text={"format": form})
    assert raised.value.param == "text.format.schema"


def test_a_tokenizer_without_bytes_refuses_grammars(capsys):
    tokenizer = dataclasses.replace(make_tokenizer(False), tokenizer=word_piece(), eos_ids=(1,))
    checkpoint = SimpleNamespace(tokenizer=tokenizer, config=SimpleNamespace(vocab_size=400))
    assert read_vocabulary(checkpoint) is None
    assert "Requests with a grammar are refused: The tokenizer's decoder is WordPiece" in capsys.readouterr().err
    with running(scripted_service("hermes")) as server:
        with pytest.raises(openai.BadRequestError, match="response_format needs a grammar, which") as raised:
            chat(server, response_format=named(SCHEMA))
        assert raised.value.param == "response_format"


def test_a_vocabulary_is_as_wide_as_the_logits():
    tokenizer = dataclasses.replace(make_tokenizer(False), tokenizer=byte_level())
    checkpoint = SimpleNamespace(tokenizer=tokenizer, config=SimpleNamespace(vocab_size=1000))
    vocabulary = read_vocabulary(checkpoint)
    assert (len(vocabulary), vocabulary.end_token_ids) == (1000, tokenizer.eos_ids)


def test_tools_and_a_grammar_exclude_each_other(server):
    tool = {"type": "function", "function": {"name": "a"}}
    service = dataclasses.replace(server.service, tool_format=scripted_service("hermes").tool_format)
    fields = dict(tools=[tool], response_format={"type": "json_object"})
    with pytest.raises(ValueError, match='response_format goes with tools only if tool_choice is "none"'):
        read(chat_body(**fields), service, is_chat=True)
    assert read(chat_body(**fields, tool_choice="none"), service, is_chat=True).grammar is not None
