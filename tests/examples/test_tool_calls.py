"""Tool calls in the text of each format, however the text arrives."""

import json

import pytest

from lib.json_scanner import MOST_DEPTH, JsonScanner, NotJsonError
from lib.tool_calls import ToolCallStream
from lib.tool_formats import FORMATS, find_format
from tests.examples.written_calls import calls_text

NAMES = ("get_weather", "get_current_temperature", "get_delivery_date", "multiply")
# Arguments that are hard to find the end of.
NESTED = {
    "location": {"city": 'a "b" \\ }]{[ </tool_call> ; ```', "at": [1, [2.5, -3e4], {}, []]},
    "": None,
    "ok": True,
}
ESCAPED = r'{"location": "\u00dcbersee \ud83d\ude00 \"<|call|>\" \\", "unit": "\u0063"}'


def parse(name, text, **options):
    """Content and calls, checked to be the same for every cut of the text in two and for single characters."""

    def read(pieces):
        stream = ToolCallStream(FORMATS[name], NAMES, **options)
        found = [stream.extend(piece, is_last=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
        calls = [call for _, each in found for call in each]
        assert len({call.id for call in calls}) == stream.num_calls == len(calls)
        return "".join(content for content, _ in found), [(call.name, json.loads(call.arguments)) for call in calls]

    whole = read([text])
    assert read(list(text) or [""]) == whole
    for cut in range(len(text) + 1):
        assert read([text[:cut], text[cut:]]) == whole, cut
    return whole


# From the models' cards and papers: the texts that their authors show for a call.
CARDS = {
    "Qwen3": (
        "hermes",
        '<tool_call>\n{"name": "get_current_temperature", "arguments": {"location": "San Francisco, CA, USA"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments": {"date": "2024-10-01"}}\n</tool_call>',
        [
            ("get_current_temperature", {"location": "San Francisco, CA, USA"}),
            ("get_weather", {"date": "2024-10-01"}),
        ],
    ),
    "Hermes 2 Pro, keys in the other order": (
        "hermes",
        '<tool_call>\n{"arguments": {"symbol": "TSLA"}, "name": "get_weather"}\n</tool_call>',
        [("get_weather", {"symbol": "TSLA"})],
    ),
    "Llama 3.2": (
        "llama3_json",
        '{"name": "get_current_temperature", "parameters": {"location": "San Francisco", "unit": "celsius"}}',
        [("get_current_temperature", {"location": "San Francisco", "unit": "celsius"})],
    ),
    "Llama 3.1, with its mark and a type": (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"location": "Menlo Park"}}',
        [("get_weather", {"location": "Menlo Park"})],
    ),
    "Mistral 7B v0.3": (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"location": "Paris"}, "id": "VvvODy9mT"}]',
        [("get_weather", {"location": "Paris"})],
    ),
    "Mistral Small 3.2": (
        "mistral",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]multiply[CALL_ID]VvvODy9mT[ARGS]{"a": 1, "b": 2}',
        [("get_weather", {"city": "Paris"}), ("multiply", {"a": 1, "b": 2})],
    ),
    "DeepSeek V3": (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"location": "Tokyo"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>multiply\n```json\n'
        '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [("get_weather", {"location": "Tokyo"}), ("multiply", {"a": 1})],
    ),
    "DeepSeek V3.1": (
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"location": "Tokyo"}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>multiply<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [("get_weather", {"location": "Tokyo"}), ("multiply", {"a": 1})],
    ),
    "gpt-oss": (
        "openai",
        'to=functions.get_current_temperature<|message|>{"location":"San Francisco"}<|call|>',
        [("get_current_temperature", {"location": "San Francisco"})],
    ),
}


@pytest.mark.parametrize("card", CARDS)
def test_the_calls_of_model_cards(card):
    name, text, calls = CARDS[card]
    assert parse(name, text) == ("", calls)
    assert parse(name, f"Let me see.\n\n{text}") == ("Let me see.", calls)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_with_hard_arguments_and_text_around_them(name):
    escaped = json.loads(ESCAPED)
    text = calls_text(name, ("get_weather", json.dumps(NESTED)), ("multiply", ESCAPED), ("multiply", " { } "))
    expected = [("get_weather", NESTED), ("multiply", escaped), ("multiply", {})]
    assert parse(name, text) == ("", expected)
    assert parse(name, f" First. {text}\n Then. ") == (" First.Then. ", expected)


@pytest.mark.parametrize("name", FORMATS)
def test_text_without_calls_is_content(name):
    for text in ("", " \n", " a b \n", 'In C: int main() { return 0; } or {"a": {"name": 1}}', "<tool <tool_cal [TOOL"):
        assert parse(name, text) == (text, [])


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_stays_text(name):
    first, second = ("get_weather", '{"location": "a}"}'), ("multiply", '{"a": [1, 2]}')
    text = calls_text(name, first)
    closing = {"openai": "}", "deepseek_v3": "}", "mistral": "]"}.get(name, "}}")
    end = text.rindex(closing) + len(closing)
    for cut in range(len(text) + 1):
        content, calls = parse(name, text[:cut])
        assert (content, len(calls)) == ((text[:cut], 0) if cut < end else ("", 1)), text[:cut]
    both = calls_text(name, first, second)
    content, calls = parse(name, both[: both.rindex("2]")])
    assert len(calls) == (0 if name == "mistral" else 1)  # a list of calls is one piece of JSON
    assert '"a": [1, ' in content


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("other", "{}"),
        ("multiply", "[]"),
        ("multiply", '{"a": }'),
        ("multiply", '{"a": 1,}'),
        ("multiply", "{'a': 1}"),
        ("multiply", '{"a": 01}'),
        ("multiply", '{"a": NaN}'),
        ("multiply", '{"a": 1e999}'),
        ("multiply", '{"a": "\ud800"}'.encode("unicode_escape").decode()),
        ("multiply", '{"a": "b\n"}'),
        ("multiply", f'{{"a": {"9" * 5000}}}'),
        ("multiply", f'{{"a": {"[" * MOST_DEPTH}{"]" * MOST_DEPTH}}}'),
    ],
)
def test_a_malformed_call_stays_text_and_the_next_one_counts(name, tool, arguments):
    text = calls_text(name, (tool, arguments))
    stream = ToolCallStream(FORMATS[name], NAMES)
    content, calls = stream.extend(text, is_last=True)
    assert (content, calls) == (text, [])
    if len(text) < 500:
        content, calls = parse(name, f"{text}\n{calls_text(name, ('get_weather', '{}'))}")
        assert (content, calls) == (text, [("get_weather", {})])


@pytest.mark.parametrize("name", FORMATS)
def test_without_parallel_calls_the_first_one_ends_the_text(name):
    text = calls_text(name, ("multiply", "{}"), ("get_weather", "{}"))
    assert parse(name, f"{text} Then.", is_parallel=False) == ("", [("multiply", {})])


def test_ids_have_the_length_that_templates_prescribe():
    def make(name):
        stream = ToolCallStream(FORMATS[name], NAMES)
        (call,) = stream.extend(calls_text(name, ("multiply", "{}")), is_last=True)[1]
        return call.id

    assert make("hermes").startswith("call_")
    assert len(make("mistral")) == 9
    assert make("mistral").isalnum()


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<|start|>assistant<|channel|>final<|message|>' }}", "openai"),
        ("{{ '<｜tool▁calls▁begin｜>' }}", "deepseek_v3"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("within <tool_call></tool_call> XML tags:\n<tool_call>", "hermes"),
        ('Respond in the format {"name": function name, "parameters": dictionary of names', "llama3_json"),
        ({"default": "a", "tool_use": "{{ '<tool_call>' }}"}, "hermes"),
        ({"default": "<tool_call>"}, "hermes"),
        ("<tool_call>\n<function=a>\n", None),  # Qwen3-Coder
        ("<tool_call>a\n<arg_key>", None),  # GLM
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_the_template_selects_the_format(template, name):
    assert find_format(template) is (name and FORMATS[name])


def scan(text, start=0):
    scanner = JsonScanner(start)
    for end in range(start, len(text) + 1):
        scanner.read(text[:end])
    return scanner.position if scanner.is_complete else None


@pytest.mark.parametrize("text", ["[]", ' {"a": [true, false, null, 0, -1.5e+3], "b": "\\u00fc\\n"} ', "[[], {}]"])
def test_the_end_of_json_is_found(text):
    assert scan(text + " x") == len(text.rstrip())
    assert scan("x" + text + "x", 1) == len(text.rstrip()) + 1
    assert all(scan(text[:end]) is None for end in range(len(text.rstrip())))


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("1", 0),
        ('"a"', 0),
        ("{1}", 1),
        ("{]", 1),
        ("[}", 1),
        ("[,", 1),
        ("[1 2", 3),
        ('{"a" 1', 5),
        ('{"a": 1 "b"', 8),
        ("[tru]", 4),
        ('["\\x', 3),
        ('["\\u00g', 6),
        ('["\t', 2),
        ('{"a": 1,}', 8),
        ("[1,]", 3),
    ],
)
def test_the_first_character_that_is_not_json_is_named(text, position):
    with pytest.raises(NotJsonError) as raised:
        scan(text + " " * 3)
    assert raised.value.position == position
