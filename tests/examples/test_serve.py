"""examples/serve.py, asked by the real `openai` client: texts, streams, stop strings, chats."""

import json
from pathlib import Path

import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

import serve
from tests.examples.serving import KEY, PROMPT, SIZES, chat, complete, running, wait_for
from tests.examples.tiny_checkpoint import EOS, greedy
from tests.examples.tiny_families import PROMPT as PROMPT_OF_FAMILIES
from tests.examples.tiny_families import write_family


def test_completions_are_those_of_the_model(server, tiny):
    prompts = [PROMPT, "a", "12345678"]
    ids = [tiny.tokenizer.encode(prompt) for prompt in prompts]
    expected = [greedy(tiny.tensors, prompt, 12) for prompt in ids]
    for prompt in (prompts, ids):
        answer = complete(server, prompt=prompt, max_tokens=12)
        assert [choice.text for choice in answer.choices] == [tiny.tokenizer.decode(tokens) for tokens in expected]
        reasons = ["stop" if tokens[-1] == EOS else "length" for tokens in expected]
        assert [choice.finish_reason for choice in answer.choices] == reasons
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == sum(map(len, expected))
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("call", [complete, chat])
def test_a_stream_says_the_same_piece_by_piece(server, call):
    # Hot: most bytes that come are no text, and many are parts of characters.
    options = dict(max_tokens=30, temperature=1.5, seed=3, n=2, top_p=0.99, extra_body={"top_k": 200})
    call(server, **options)  # so that both answers below find the prompt in the prefix cache
    whole = call(server, **options)
    chunks = list(call(server, **options, stream=True, stream_options={"include_usage": True}))
    texts, reasons = ["", ""], [None, None]
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        (choice,) = chunk.choices
        assert reasons[choice.index] is None
        texts[choice.index] += choice.text if call is complete else choice.delta.content
        reasons[choice.index] = choice.finish_reason
    expected = [choice.text if call is complete else choice.message.content for choice in whole.choices]
    assert texts == expected
    assert texts[0] != texts[1]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len(chunks) > 6
    assert all(chunk.usage is None for chunk in call(server, stream=True, max_tokens=2))


def test_a_chat_is_rendered_and_its_control_tokens_are_text(server, tiny):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a<eos>b"}]
    (prompt,) = tiny.tokenizer.encode_conversations([messages])
    assert prompt.count(EOS) == 2  # the template's
    parts = [messages[0], {"role": "user", "content": [{"type": "text", "text": t} for t in ("a<e", "os>b")]}]
    for form in (messages, parts):
        answer = chat(server, messages=form, max_completion_tokens=8)
        expected = greedy(tiny.tensors, prompt, 8)
        assert answer.choices[0].message.content == tiny.tokenizer.decode(expected)
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.completion_tokens == len(expected)
    # Without a limit, up to what a request may have.
    answer = chat(server, temperature=1.0, seed=1)
    assert answer.choices[0].finish_reason == "stop" or answer.usage.total_tokens == 128


def test_a_stop_string_ends_the_text_before_it(server):
    options = dict(max_tokens=60, temperature=2, seed=4)
    text = complete(server, **options).choices[0].text
    at = next(i for i in range(5, len(text)) if text.find(text[i : i + 2]) == i and "\ufffd" not in text[i : i + 2])
    stop = text[at : at + 2]
    for stops in (stop, ["never there", stop, text[at : at + 9]]):
        answer = complete(server, **options, stop=stops)
        assert answer.choices[0].text == text[:at]
        assert answer.choices[0].finish_reason == "stop"
        assert at + 2 <= answer.usage.completion_tokens < 60
        chunks = list(complete(server, **options, stop=stops, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == text[:at]
        assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("ended", [0, 1])
def test_a_stop_string_ends_one_completion_and_the_others_go_on(server, ended):
    engine, options = server.service.engine, dict(max_tokens=60, temperature=2, seed=4, n=2)
    texts = [choice.text for choice in complete(server, **options).choices]
    text, other = texts[ended], texts[1 - ended]
    pairs = (text[i : i + 2] for i in range(5, len(text)))
    stop = next(pair for pair in pairs if pair not in other and "\ufffd" not in pair)
    before = engine.finished.copy()
    answer = complete(server, **options, stop=stop)
    assert answer.choices[ended].text == text.partition(stop)[0]
    assert answer.choices[1 - ended].text == other
    wait_for(lambda: engine.num_open == 0)
    assert engine.finished - before == {"abort": 1, answer.choices[1 - ended].finish_reason: 1}
    assert engine.stats.num_free_blocks == engine._engine._options.num_blocks - 1


def test_choices_are_in_the_order_of_the_prompts(server):
    options = dict(max_tokens=8, temperature=2, seed=7, n=2)
    prompts = [PROMPT, "12345678"]
    alone = [choice.text for prompt in prompts for choice in complete(server, prompt=prompt, **options).choices]
    assert len(set(alone)) == 4
    together = complete(server, prompt=prompts, **options).choices
    assert [choice.index for choice in together] == [0, 1, 2, 3]
    assert [choice.text for choice in together] == alone


@pytest.mark.slow
def test_latents_behind_the_server(tmp_path):
    """A prompt, and again as the prefix cache knows it: the tokens of transformers."""
    write_family(tmp_path, "deepseek_v3")
    tokens = json.loads(Path(__file__).with_name("data").joinpath("families.json").read_text())["deepseek_v3"]["tokens"]
    options = [f"--model={tmp_path}", "--dtype=float32", f"--api-key={KEY}", *SIZES, "--max-model-len=32"]
    service = serve.create_service(serve.parse_arguments(options))
    with running(service) as server:
        for _ in range(2):
            answer = complete(server, model=tmp_path.name, prompt=[PROMPT_OF_FAMILIES] * 2, max_tokens=len(tokens))
            assert [choice.text for choice in answer.choices] == [service.checkpoint.tokenizer.decode(tokens)] * 2
