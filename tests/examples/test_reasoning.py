"""examples/lib/reasoning.py: control tokens separate reasoning from content, however the tokens arrive."""

import re

import pytest

from lib.reasoning import ReasoningStream
from lib.tokenizer import Tokenizer
from tests.examples.tiny_tokenizers import byte_level

HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>")


@pytest.fixture(scope="module")
def qwen():
    return Tokenizer(byte_level(), (), None, {})  # has <think>


@pytest.fixture(scope="module")
def gpt_oss():
    tokenizer = byte_level()
    tokenizer.add_special_tokens(list(HARMONY))
    return Tokenizer(tokenizer, (), None, {})


def split(tokenizer, prompt, answer, stops=(), **options):
    """Reasoning and content, checked for many cuts of the text, and the number of tokens read."""
    prompt_ids, ids = (tokenizer.encode(text) for text in (prompt, answer))
    results = []
    for at_once in (len(ids), 1, 2, 5):
        stream = ReasoningStream(tokenizer, stops, prompt_ids=prompt_ids, **options)
        parts = ["", ""]
        for end in [*range(at_once, len(ids), at_once), len(ids)]:
            pieces = stream.extend(ids[:end], is_last=end == len(ids))
            parts = [part + piece for part, piece in zip(parts, pieces, strict=True)]
        results.append((*parts, stream.num_tokens, stream.is_stopped))
    assert results == [results[0]] * 4
    return results[0]


@pytest.mark.parametrize(
    ("prompt", "answer", "reasoning", "content"),
    [
        ("Hi", "<think>\nWell\u2026</think>\n\nYes", "\nWell\u2026", "\n\nYes"),
        ("Hi<think>\n", "Well</think>Yes", "Well", "Yes"),  # the end of DeepSeek R1's templates
        ("Hi<think>\n\n</think>\n\n", "Yes", "", "Yes"),  # Qwen3 without enable_thinking
        ("<think>a</think>b<think>", "Well", "Well", ""),  # the limit is reached before the end
        ("Hi", "Yes", "", "Yes"),
        ("Hi", "<think>a</think>b<think>c</think>d", "ac", "bd"),
        ("Hi", "<think>Well \u20ac</think>\u20ac", "Well \u20ac", "\u20ac"),
    ],
)
def test_thoughts_are_reasoning(qwen, prompt, answer, reasoning, content):
    assert split(qwen, prompt, answer)[:2] == (reasoning, content)


def test_a_half_of_a_character_ends_with_the_reasoning(qwen):
    half = qwen.encode("\u20ac")[:1]
    before, after = qwen.encode("<think>Well "), qwen.encode("</think>")
    stream = ReasoningStream(qwen)
    assert stream.extend(before + half, is_last=False) == ("Well ", "")
    assert stream.extend(before + half + after, is_last=False) == ("\ufffd", "")


ANALYSIS = "<|channel|>analysis<|message|>2+2 is four.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>four"
CALL = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|end|>"


@pytest.mark.parametrize(
    ("prompt", "answer", "reasoning", "content"),
    [
        ("<|start|>assistant", ANALYSIS + FINAL, "2+2 is four.", "four"),
        ("<|start|>assistant", "<|channel|>analysis<|message|>2+2", "2+2", ""),
        ("<|start|>assistant", ANALYSIS + "<|start|>assist", "2+2 is four.", ""),
        ("<|start|>assistant<|channel|>final<|message|>", "four", "", "four"),  # a message that is continued
        ("<|start|>assistant<|channel|>ana", "lysis<|message|>Well", "Well", ""),
        ("<|start|>assistant", ANALYSIS + CALL + FINAL, "2+2 is four.{}", "four"),
        ("<|start|>assistant to=functions.f", "<|channel|>commentary<|message|>{}", "{}", ""),
        ("<|start|>assistant", "<|channel|>commentary<|message|>Let me see. <|end|>" + FINAL, "", "Let me see. four"),
        ("<|start|>assistant", "<|message|>four", "", "four"),
        ("The capital", " is Paris", "", " is Paris"),
    ],
)
def test_channels_are_reasoning_and_content(gpt_oss, prompt, answer, reasoning, content):
    assert split(gpt_oss, prompt, answer)[:2] == (reasoning, content)


@pytest.mark.parametrize(
    ("prompt", "answer", "content"),
    [
        ("<|start|>assistant", ANALYSIS + CALL + FINAL, "to=functions.f<|message|>{}<|call|>four"),
        ("<|start|>assistant to=functions.f", "<|channel|>commentary<|message|>{}", "to=functions.f<|message|>{}"),
        ("<|start|>assistant", CALL + CALL, "to=functions.f<|message|>{}<|call|>" * 2),
        ("<|start|>assistant", CALL.replace("functions.f", "python") + FINAL, "four"),  # a tool of the model's own
    ],
)
def test_calls_in_channels_can_be_content(gpt_oss, prompt, answer, content):
    answer = answer.removeprefix("<|start|>assistant")
    assert split(gpt_oss, prompt, answer, shows_calls=True)[1] == content


def test_a_stop_string_ends_the_content_and_not_the_reasoning(qwen, gpt_oss):
    answer = "<think>Is it true?</think>It is true! Is it?"
    _, _, num_tokens, is_stopped = split(qwen, "Hi", "<think>Is it true?</think>It is true")
    assert not is_stopped
    stopped = split(qwen, "Hi", answer, [" true"])
    assert stopped == ("Is it true?", "It is", num_tokens, True)
    assert split(qwen, "Hi", answer, [" true"], includes_stop=True)[1] == "It is true"
    answer = ANALYSIS + FINAL + ". It is four.<|end|>" + ANALYSIS
    assert split(gpt_oss, "<|start|>assistant", answer, ["four."])[:2] == ("2+2 is four.", "")


def test_a_model_without_marks_has_only_content():
    tokenizer = byte_level()
    plain = Tokenizer(type(tokenizer).from_str(re.sub("</?think>", "<x>", tokenizer.to_str())), (), None, {})
    assert split(plain, "Hi", "<think>a</think>b")[:2] == ("", "<think>a</think>b")


def test_other_control_tokens_are_shown_only_on_request(qwen):
    assert split(qwen, "Hi", "<think>a</s></think>b</s>")[:2] == ("a", "b")
    shown = split(qwen, "Hi", "<think>a</s></think>b</s>", skip_special_tokens=False)
    assert shown[:2] == ("a</s>", "b</s>")
