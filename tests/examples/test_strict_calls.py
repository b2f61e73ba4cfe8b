"""examples/lib/strict_calls.py: which answers a request with strict functions allows, in each format."""

import dataclasses

import pytest

from jaxpaged.grammar import Vocabulary, compile_text
from lib.answer_start import AnswerStart, control_ids
from lib.openai_tools import ToolUse
from lib.strict_calls import strict_calls
from lib.tool_formats import FORMATS
from tests.examples.tool_tokenizers import make_tokenizer
from tests.examples.written_calls import MULTIPLY, WEATHER, written

PARIS, ROME, WRONG = '{"city": "Paris"}', '{"city": "Rome"}', '{"town": "Paris"}'
PRODUCT = '{"x": [[[[1]]]]}'  # deeper than a grammar's JSON
BEGIN, SEPARATOR, END = (f"<｜tool▁{name}｜>" for name in ("call▁begin", "sep", "call▁end"))


def messages(*calls):
    """Calls in the header that the templates of gpt-oss give to earlier ones."""
    header = " to=functions.{}<|channel|>commentary json<|message|>"
    return "<|end|><|start|>assistant".join(header.format(name) + arguments for name, arguments in calls)


# By format and a text in the chat template: writes calls.
FORMS = {
    ("hermes", ""): lambda *calls: written("hermes", *calls),
    ("mistral", ""): lambda *calls: written("mistral", *calls),
    ("mistral", "[ARGS]"): lambda *calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in calls),
    ("mistral", "[CALL_ID]"): lambda *calls: "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]a1b2c3d4e[ARGS]{text}" for name, text in calls
    ),
    ("deepseek_v3", "```json"): lambda *calls: written("deepseek_v3", *calls),
    ("deepseek_v3", ""): lambda *calls: "".join(f"{BEGIN}{name}{SEPARATOR}{text}{END}" for name, text in calls),
    ("llama3_json", ""): lambda *calls: written("llama3_json", *calls),
    ("openai", ""): lambda *calls: written("openai", *calls),
    ("openai", "messages"): messages,
}


class Answers:
    """The answers that a request allows."""

    def __init__(self, form, template="", *, others=(), is_parallel=True, prompt=None):
        is_harmony = form == "openai"
        tokenizer = dataclasses.replace(make_tokenizer(is_harmony), chat_template=template)
        self.encode, self.form = tokenizer.encode, form
        self.vocabulary = Vocabulary.from_tokenizer(
            tokenizer.tokenizer, tokenizer.eos_ids, control_token_ids=control_ids(tokenizer)
        )
        use = ToolUse([WEATHER, *others], "auto", is_parallel, ("get_weather",))
        prompt = prompt or ("<|start|>user<|message|>a<|end|><|start|>assistant" if is_harmony else "a")
        start = AnswerStart(self.vocabulary, tokenizer, tokenizer.encode(prompt))
        self.grammar = compile_text(strict_calls(start, use, FORMATS[form]), self.vocabulary)

    def state(self, text):
        state = 0
        for token in self.encode(text):
            length = self.vocabulary.token_lengths[token]
            state = self.grammar.walk(self.vocabulary.token_bytes[token, :length].tobytes(), state)
        return state

    def __contains__(self, text):
        return bool(self.grammar.is_end[self.state(text)])

    def may_begin(self, text):
        return self.state(text) != self.grammar.dead_state

    def message(self, text):
        """Text for the user."""
        return f"<|channel|>final<|message|>{text}" if self.form == "openai" else text


@pytest.fixture(params=FORMS, ids=" ".join)
def form(request):
    return request.param


def test_calls_are_written_as_models_write_them(form):
    answers, write = Answers(*form), FORMS[form]
    assert write(("get_weather", PARIS)) in answers
    assert write(("get_weather", PARIS), ("get_weather", ROME)) in answers
    assert answers.message("It rains {in} <Rome>, [1].") in answers
    assert answers.message("\u4e16\u754c \U0001f600") in answers


def test_wrong_arguments_are_never_written(form):
    answers, write = Answers(*form), FORMS[form]
    assert not answers.may_begin(write(("get_weather", WRONG)))
    assert not answers.may_begin(write(("get_weather", PARIS), ("get_weather", WRONG)))
    begun = write(("get_weather", PARIS)).partition("Paris")[0]
    assert answers.may_begin(begun)
    assert begun not in answers


def test_other_functions_are_free(form):
    answers, write = Answers(*form, others=[MULTIPLY]), FORMS[form]
    assert write(("multiply", PRODUCT)) in answers
    assert write(("get_weather", PARIS)) in answers
    assert not answers.may_begin(write(("get_weather", WRONG)))
    assert not answers.may_begin(write(("get_weather", PARIS), ("get_weather", WRONG)))


@pytest.mark.parametrize("form", [each for each in FORMS if each[0] != "llama3_json"], ids=" ".join)
def test_unknown_functions_are_not_called(form):
    """In Llama's format an object with another name is text."""
    answers, write = Answers(*form), FORMS[form]
    assert not answers.may_begin(write(("multiply", "{}")))


def test_one_call_ends_the_answer_without_parallel_calls(form):
    answers, write = Answers(*form, is_parallel=False), FORMS[form]
    assert write(("get_weather", PARIS)) in answers
    two = write(("get_weather", PARIS), ("get_weather", ROME))
    assert not answers.may_begin(two)


@pytest.mark.parametrize("form", [each for each in FORMS if each[0] != "openai"], ids=" ".join)
def test_reasoning_may_quote_calls(form):
    quoted = FORMS[form](("get_weather", WRONG))
    for prompt, begin in (("a", "<think>"), ("a<think>\n", "")):
        answers = Answers(*form, prompt=prompt)
        assert f"{begin}{quoted}</think>{FORMS[form](('get_weather', PARIS))}" in answers
        assert not answers.may_begin(f"{begin}a</think>{quoted}")
    closed = Answers(*form, prompt="a<think>\n\n</think>\n\n")
    assert not closed.may_begin(quoted)


def test_messages_may_have_reasoning_and_a_preamble():
    answers = Answers("openai")
    call = written("openai", ("get_weather", PARIS), thought="to=functions.get_weather<")
    assert call in answers
    preamble = "<|channel|>commentary<|message|>First,<|end|><|start|>assistant"
    assert preamble + call in answers
    assert call + "<|call|>" in answers
    assert not answers.may_begin(f"{call}<|call|>a")
    for text in ("a", "<|message|>a", "<|channel|>other<|message|>", "<|channel|>final<|message|>a<|channel|>"):
        assert not answers.may_begin(text), text


def test_a_message_that_the_prompt_has_begun_goes_on():
    inside = Answers("openai", prompt="<|start|>assistant<|channel|>analysis<|message|>So")
    next_message = "<|end|><|start|>assistant"
    assert f" it is.{next_message}{written('openai', ('get_weather', PARIS))}" in inside
    assert not inside.may_begin(f" it is.{next_message}{written('openai', ('get_weather', WRONG))}")
    with pytest.raises(ValueError, match="ends inside the header"):
        Answers("openai", prompt="<|start|>assistant<|channel|>")
