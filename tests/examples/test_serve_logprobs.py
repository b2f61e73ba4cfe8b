"""Logprobs of examples/serve.py: of tokens, of the most likely ones, of an echoed prompt."""

import numpy as np
import pytest

from tests.examples.serving import PROMPT, chat, complete, text_of, texts
from tests.examples.tiny_checkpoint import VOCAB, greedy, next_logits


def logprobs_after(tiny, tokens):
    logits = next_logits(tiny.tensors, tokens)
    return logits - np.logaddexp.reduce(logits)


def entries_of(chunks):
    """The entries of a chat's stream."""
    return [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]


def test_logprobs_match_the_tokens(server, tiny):
    found = complete(server, max_tokens=6, logprobs=0).choices[0].logprobs
    prompt = tiny.tokenizer.encode(PROMPT)
    tokens = greedy(tiny.tensors, prompt, 6)
    for i, (token, logprob) in enumerate(zip(tokens, found.token_logprobs, strict=True)):
        assert logprob == pytest.approx(logprobs_after(tiny, prompt + tokens[:i])[token], abs=1e-3)
    assert found.tokens == [tiny.tokenizer.token_text(token) for token in tokens]
    assert (found.text_offset[0], found.top_logprobs) == (0, None)


def test_the_bytes_of_all_tokens_are_the_text(server):
    """Includes tokens that are parts of characters and have no text."""
    options = dict(max_tokens=40, temperature=1.5, seed=3, logprobs=True, top_logprobs=2)
    choice = chat(server, **options).choices[0]
    content = choice.logprobs.content
    assert any(entry.token.startswith("bytes:") for entry in content)
    assert bytes(byte for entry in content for byte in entry.bytes).decode(errors="replace") == choice.message.content
    assert all(other.bytes is not None for entry in content for other in entry.top_logprobs)
    streamed = entries_of(chat(server, stream=True, **options))
    assert [(entry.token, entry.bytes) for entry in streamed] == [(entry.token, entry.bytes) for entry in content]


def likely(tiny, tokens, count):
    """By their text, the logprobs of the `count` most likely tokens after these, and of one more token."""
    logprobs = logprobs_after(tiny, tokens[:-1])
    order = [*np.argsort(-logprobs)[:count].tolist(), tokens[-1]]
    return {tiny.tokenizer.token_text(token): pytest.approx(logprobs[token], abs=1e-3) for token in reversed(order)}


def joined(pieces):
    """Each logprobs field of a completion's stream, joined into one list."""
    parts = [chunk.choices[0].logprobs.model_dump() for chunk in pieces]
    return {name: [entry for part in parts for entry in part[name]] for name in parts[0]}


@pytest.mark.parametrize("count", [1, 3])
def test_top_logprobs_equal_the_model(server, tiny, count):
    tokens = tiny.tokenizer.encode(PROMPT)
    options = dict(temperature=1.5, seed=4, max_tokens=6, logprobs=count)  # so that less likely tokens are drawn
    found = complete(server, **options).choices[0].logprobs
    for text, logprob, entries in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        with_text = [token for token in range(VOCAB) if tiny.tokenizer.token_text(token) == text]
        logprobs = logprobs_after(tiny, tokens)
        tokens.append(min(with_text, key=lambda token: abs(logprobs[token] - logprob)))
        assert entries == likely(tiny, tokens, count)
    assert any(len(entries) > count for entries in found.top_logprobs)
    assert joined(complete(server, stream=True, **options)) == found.model_dump()
    options = dict(max_tokens=6, logprobs=True, top_logprobs=count)
    chat(server, **options)  # caches the prompt for both compared calls, so that their bits are equal
    content = chat(server, **options).choices[0].logprobs.content
    for entry in content:
        assert entry.top_logprobs[0].model_dump() == entry.model_dump(exclude={"top_logprobs"})
        assert len(entry.top_logprobs) == count
        assert sorted(entry.top_logprobs, key=lambda other: -other.logprob) == entry.top_logprobs
    assert entries_of(chat(server, stream=True, **options)) == content


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("is_text", [True, False])
def test_an_echo_has_the_logprobs_of_the_prompt(server, tiny, max_tokens, is_text):
    """Like lm-eval's local-completions, with several prompts at once, which are cached in the second round."""
    prompts = [PROMPT, "a", "The quick brown"]
    ids = [tiny.tokenizer.encode(prompt) for prompt in prompts]
    options = dict(prompt=prompts if is_text else ids, max_tokens=max_tokens, echo=True)
    for _ in range(2):
        answer = complete(server, logprobs=1, **options)
        assert answer.usage.completion_tokens == sum(max_tokens for _ in prompts)
        for prompt, choice in zip(ids, answer.choices, strict=True):
            tokens, found = prompt + greedy(tiny.tensors, prompt, max_tokens), choice.logprobs
            assert choice.text == tiny.tokenizer.decode(tokens)
            assert choice.finish_reason == "length"
            assert found.tokens == [tiny.tokenizer.token_text(token) for token in tokens]
            assert found.token_logprobs[0] is found.top_logprobs[0] is None
            for i in range(1, len(tokens)):
                assert found.top_logprobs[i] == likely(tiny, tokens[: i + 1], 1)
                assert found.token_logprobs[i] == found.top_logprobs[i][found.tokens[i]]
            for begin, token in zip(found.text_offset, found.tokens, strict=True):
                assert choice.text[begin:].startswith(token) or token.startswith("bytes:")
    assert texts(complete(server, **options)) == texts(answer)


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_an_echo_and_its_completion_share_a_character(server, tiny, max_tokens):
    prompt = tiny.tokenizer.encode("caf\u00e9")[:-1]
    choice = complete(server, prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=1).choices[0]
    assert choice.text == tiny.tokenizer.decode(prompt + greedy(tiny.tensors, prompt, max_tokens))
    assert choice.logprobs.text_offset[: len(prompt)] == [0, 1, 2, 3]


def test_a_streamed_echo_equals_a_whole_one(server):
    options = dict(max_tokens=5, echo=True, n=2, temperature=1.0, seed=5)
    whole = complete(server, logprobs=2, **options).choices
    chunks = list(complete(server, logprobs=2, stream=True, **options))
    for choice in whole:
        own = [chunk for chunk in chunks if chunk.choices[0].index == choice.index]
        assert text_of(own) == choice.text
        assert choice.text.startswith(PROMPT)
        assert joined(own) == choice.logprobs.model_dump()
    stopped = complete(server, max_tokens=30, echo=True, stop=[PROMPT[:3], whole[0].text[len(PROMPT) :][2:4]])
    assert stopped.choices[0].text.startswith(PROMPT)  # a stop string in the prompt stops nothing
