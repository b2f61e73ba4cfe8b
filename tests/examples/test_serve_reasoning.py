"""Reasoning and content of chats, whole and as streams."""

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest

from jaxpaged import Completion, RequestOutput
from lib.engines import Generation
from lib.openai_answers import Answer
from lib.pieces import Pieces
from lib.service import Service
from tests.examples.serving import chat_body, read


@pytest.fixture(scope="module")
def thinker(tiny):
    """A service whose tokenizer has reasoning marks."""
    tokenizer = type(tiny.tokenizer.tokenizer).from_str(tiny.tokenizer.tokenizer.to_str())
    tokenizer.add_special_tokens(["<think>", "</think>"])
    checkpoint = SimpleNamespace(config=tiny.config, tokenizer=dataclasses.replace(tiny.tokenizer, tokenizer=tokenizer))
    return Service(SimpleNamespace(), checkpoint, ("model",), max_model_len=100)


def parts(service, text, prompt="", **fields):
    """The answer's messages or deltas, for a model that generates this text token by token."""
    ask = read(chat_body(**fields), service, is_chat=True)
    encode = service.checkpoint.tokenizer.encode
    tokens = encode(text)

    async def answer():
        generation = Generation([1], [(encode(f"a{prompt}"), ask.params)])
        answer = Answer(Pieces(service, ask, generation, 0.0), "1")

        async def generate():
            for end in range(1, len(tokens) + 1):
                is_last = end == len(tokens)
                completion = Completion(tokens[:end], None, "length" if is_last else None)
                generation.put(0, RequestOutput(0, [completion], is_last))
                while generation.unread:
                    await asyncio.sleep(0)

        generating = asyncio.ensure_future(generate())
        if ask.is_streamed:
            found = [chunk["choices"][0]["delta"] async for chunk in answer.chunks()]
        else:
            found = [(await answer.whole())["choices"][0]["message"]]
        await generating
        return found

    return asyncio.run(answer())


@pytest.mark.parametrize("prompt", ["", "<think>"])
def test_the_reasoning_is_not_in_the_content(thinker, prompt):
    text = f"{'' if prompt else '<think>'}first: \u00fc</think>then"
    (message,) = parts(thinker, text, prompt)
    assert message == dict(role="assistant", content="then", refusal=None, reasoning_content="first: \u00fc")
    deltas = parts(thinker, text, prompt, stream=True)
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "first: \u00fc"
    assert "".join(delta.get("content", "") for delta in deltas) == "then"
    assert not any("content" in delta for delta in deltas if delta.get("reasoning_content"))


def test_an_answer_without_reasoning_has_no_reasoning_field(thinker):
    assert "reasoning_content" not in parts(thinker, "then")[0]


def test_the_reasoning_can_stay_in_the_content(thinker):
    whole = dataclasses.replace(thinker, splits_reasoning=False)
    (message,) = parts(whole, "<think>a</think>b", skip_special_tokens=False)
    assert (message["content"], "reasoning_content" in message) == ("<think>a</think>b", False)
    assert parts(whole, "<think>a</think>b")[0]["content"] == "ab"
