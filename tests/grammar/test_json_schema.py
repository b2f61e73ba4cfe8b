"""Answers of JSON schemas are valid; each keyword is enforced or refused."""

import json
import random

import pytest

from jaxpaged.grammar import compile_json_object, compile_json_schema
from tests.grammar.samples import VOCABULARY, random_answer, random_schema

NUM_SCHEMAS = 200


def is_answer(schema, text, **options):
    grammar = compile_json_schema(schema, VOCABULARY, **options)
    return bool(grammar.is_end[grammar.walk(text.encode())])


def draw_answers(schema, rng):
    """Answers of few and of many tokens."""
    grammar = compile_json_schema(schema, VOCABULARY, max_depth=2, max_states=32767)
    return [random_answer(grammar, rng, num_free).decode() for num_free in (0, 20, 120)]


def test_answers_of_random_schemas_are_valid():
    jsonschema = pytest.importorskip("jsonschema")
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for seed in range(NUM_SCHEMAS):
        rng = random.Random(seed)
        schema = random_schema(rng)
        validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
        for answer in draw_answers(schema, rng):
            validator.validate(json.loads(answer))


@pytest.mark.parametrize("keyword", ["maximum", "minLength", "required", "pattern", "minItems", "const"])
def test_a_keyword_that_is_left_out_is_missed(keyword):
    """The twin of the above: without the keyword in the grammar, some answers are invalid."""
    jsonschema = pytest.importorskip("jsonschema")

    def without(part):
        if isinstance(part, list):
            return [without(each) for each in part]
        if not isinstance(part, dict):
            return part
        return {key: without(value) for key, value in part.items() if key != keyword}

    for seed in range(10 * NUM_SCHEMAS):
        rng = random.Random(seed)
        schema = random_schema(rng)
        if f'"{keyword}"' not in json.dumps(schema) or '"oneOf"' in json.dumps(schema):
            continue
        validator = jsonschema.Draft202012Validator(schema)
        if not all(validator.is_valid(json.loads(answer)) for answer in draw_answers(without(schema), rng)):
            return
    pytest.fail("every answer was valid")


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "nick": {"type": "string"}},
    "required": ["age"],
}
TREE = {
    "$defs": {"node": {"type": "object", "properties": {"left": {"$ref": "#/$defs/node"}}}},
    "$ref": "#/$defs/node",
}
TAGGED = {
    "oneOf": [
        {"type": "object", "properties": {"k": {"const": "a"}, "x": {"type": "integer"}}, "required": ["k"]},
        {"$ref": "#/$defs/b"},
    ],
    "$defs": {"b": {"type": "object", "properties": {"k": {"enum": ["b"]}}, "required": ["k"]}},
}


@pytest.mark.parametrize(
    ("schema", "answers", "others"),
    [
        (PERSON, ['{"age":1}', '{ "name": "é", "age": -1, "nick": "" }'], ['{"age":1,"name":"a"}', "{}"]),
        (PERSON, ['{"age": 0}'], ['{"age":  0}', '{"age" :0}', ' {"age":0}', '{"age":0,}', '{"age":0.0}']),
        (TREE, ["{}", '{"left":{"left":{}}}'], ['{"left":{"left":{"left":{}}}}', '{"left":1}']),
        (TAGGED, ['{"k":"a","x":3}', '{"k":"b"}'], ['{"k":"b","x":3}', '{"x":3}']),
        ({"type": "string"}, ['"\\n\\"/é\\\\"'], ['"\n"', '"\\/"', '"\\u00e9"', '"\\q"', '"a']),
        ({"type": "string", "pattern": "^.$"}, ['"\\""', '"é"'], ['"""', '"\\n"', '"ab"', '""']),
        ({"type": "string", "pattern": "b|^c$"}, ['"abc"', '"c"'], ['"cc"', '"a"']),
        ({"type": "string", "minLength": 1, "maxLength": 2}, ['"😀"', '"\\"\\""'], ['""', '"abc"']),
        ({"type": "string", "minLength": 1, "maxLength": 2, "pattern": "^a.?$"}, ['"a"', '"ab"'], ['"b"']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"', '"2000-02-29"'], ['"2023-02-29"', '"1900-02-29"']),
        ({"type": "number"}, ["-0", "1.50", "2e-9", "0.1E+12"], ["01", "1.", ".5", "1e400", "+1"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}, ["0.01", "1.50"], ["0", "0.00", "1.51", "1e0"]),
        ({"type": "integer", "minimum": -1.5, "exclusiveMaximum": 3}, ["-1", "0", "2"], ["-2", "3", "-0"]),
        ({"type": ["integer", "null"]}, ["5", "null"], ["5.5", "true"]),
        ({"minimum": 3}, ["3.5"], ["2", '"a"']),
        ({"enum": ["a", 1, {"k": [None]}]}, ['"a"', "1", '{"k": [null]}'], ["null", "{}", "2"]),
        ({"type": "string", "enum": ["a", 1]}, ['"a"'], ["1"]),
        ({"type": "array", "items": {"type": "boolean"}, "maxItems": 1}, ["[]", "[true]"], ["[true,true]", "[1]"]),
        ({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}]}, ["[]", "[1]", "[1, 2]"], ["[2]", "[1,2,3]"]),
        ({"type": "array", "items": {"type": "null"}, "uniqueItems": True, "maxItems": 1}, ["[null]"], ["[null,null]"]),
        ({"type": "object", "additionalProperties": {"const": 1}}, ["{}", '{"a":1,"b":1}'], ['{"a":2}']),
        ({"type": "object", "additionalProperties": False}, ["{}"], ['{"a":2}']),
        ({"allOf": [{"const": 1}], "title": "one", "x-note": "any"}, ["1"], ["2"]),
        ({"anyOf": [{"const": 1}, False]}, ["1"], ["2"]),
        (True, ["1", '{"a":[1]}'], ['{"a":[[[1]]]}', "{"]),
        ('{"const": true}', ["true"], ["1"]),
    ],
)
def test_answers_and_other_texts(schema, answers, others):
    assert [text for text in answers if not is_answer(schema, text)] == []
    assert [text for text in others if is_answer(schema, text)] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "string", "not": {"const": "a"}}, "'not' at '#'"),
        ({"type": "object", "properties": {"a": {"if": {}, "then": {}}}}, "'if' at '#/properties/a'"),
        ({"type": "object", "patternProperties": {"a": {}}}, "'patternProperties' at '#'"),
        ({"type": "object", "propertyNames": {"pattern": "a"}}, "'propertyNames'"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
        ({"type": "object", "unevaluatedProperties": False}, "'unevaluatedProperties'"),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": {}}, "'additionalProperties'"),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, "'minProperties'"),
        ({"type": "object", "minProperties": 2}, "keys may repeat"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "'b' is not among the properties"),
        ({"type": "array", "contains": {"const": 1}}, "'contains'"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "array", "items": [{}]}, "prefixItems"),
        ({"type": "integer", "multipleOf": 3}, "'multipleOf'"),
        ({"type": "number", "multipleOf": 0.01}, "'multipleOf'"),
        ({"type": "number", "minimum": "3"}, "finite number"),
        ({"type": "string", "format": "hostname"}, "'hostname'; supported are date"),
        ({"type": "string", "format": "date", "maxLength": 3}, "next to maxLength"),
        ({"type": "string", "pattern": "a+", "maxLength": 3}, "other lengths"),
        ({"type": "string", "pattern": "(?=a)"}, "a lookahead"),
        ({"type": "string", "maxLen": 3}, "'maxLen'"),
        ({"type": "string", "minLength": -1}, "at least 0"),
        ({"type": "float"}, "types are string"),
        ({"anyOf": [{"const": 1}], "minimum": 3}, "'minimum' at '#', which is not supported next to anyOf"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "maxLength": 3}, r"next to \$ref"),
        ({"$ref": "other.json"}, "begins with #/"),
        ({"$ref": "#/$defs/a"}, "does not define"),
        ({"allOf": [{}, {}]}, "merge them"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "options 0 and 1 may share a value; use anyOf"),
        ({"oneOf": [{"const": 1}, {"enum": [1.0]}]}, "may share a value"),
        ({"oneOf": [{"type": "object"}, {"type": "object"}]}, "may share a value"),
        (False, "allows no answer: '#'"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "'#/properties/a' allows no value"),
        ({"$ref": "#"}, "no answer in max_depth=2 levels"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "allows no answer"),
        ({"type": "object", "properties": {"a": {"type": "string", "maxLength": 10**6}}}, "part is '#/properties/a'"),
        ({"const": float("nan")}, "not JSON compliant"),
        ([], "an object or a bool"),
    ],
)
def test_the_unsupported_is_refused_by_name(schema, message):
    with pytest.raises(ValueError, match=message):
        compile_json_schema(schema, VOCABULARY, max_depth=2)


JUNK = [None, True, -1, 3.5, "x", [], {}, [None], [[]], {"a": 1}, "#/$defs/tree", [{"type": "string"}]]


def places(part):
    """Each dict and list within a schema, with its keys."""
    if isinstance(part, dict | list):
        keys = list(part) if isinstance(part, dict) else range(len(part))
        yield from ((part, key) for key in keys)
        for key in keys:
            yield from places(part[key])


def test_malformed_schemas_raise_value_errors():
    num_refused = 0
    for seed in range(300):
        rng = random.Random(seed)
        schema = random_schema(rng, 2)
        if rng.random() < 0.5:
            schema[rng.choice(["oneOf", "anyOf", "enum", "required", "items", "pattern", "type", "$ref"])] = None
        part, key = rng.choice(list(places(schema)))
        part[key] = rng.choice(JUNK)
        try:
            compile_json_schema(schema, VOCABULARY, max_depth=1)
        except ValueError:
            num_refused += 1
    assert 100 < num_refused < 300


def test_wide_recursion_is_refused_in_bounded_time():
    names = [f"p{i}" for i in range(8)]
    node = {"type": "object", "properties": {name: {"$ref": "#/$defs/n"} for name in names}}
    with pytest.raises(ValueError, match=r"more than 20000 parts .* Lower max_depth"):
        compile_json_schema({"$defs": {"n": node}, "$ref": "#/$defs/n"}, VOCABULARY, max_depth=16)


def test_whitespace_is_the_callers_choice():
    schema = {"type": "array", "items": {"const": 1}}
    assert is_answer(schema, "[\n  1,\n  1\n]", whitespace_pattern="\\n *")
    assert not is_answer(schema, "[1,1]", whitespace_pattern="\\n *")
    with pytest.raises(ValueError, match="whitespace_pattern"):
        compile_json_schema(schema, VOCABULARY, whitespace_pattern="[ a]?")


def test_json_objects_have_a_bounded_depth():
    grammar = compile_json_object(VOCABULARY, max_depth=2)
    texts = ["{}", '{"a":[1,"b",null,-1.5e3],"c":{"d":true}}', '{"a":[[]]}', "[]", '{"a":1']
    assert [bool(grammar.is_end[grammar.walk(text.encode())]) for text in texts] == [True, True, False, False, False]
