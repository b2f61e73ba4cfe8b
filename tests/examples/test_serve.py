"""examples/serve.py with the real `openai` client: texts, streams, stop strings, chats."""

import collections
import json
from pathlib import Path

import pytest

from tests.examples.serving import PROMPT, chat, complete, make_service, running, stop_in, text_of, texts, wait_for
from tests.examples.tiny_checkpoint import EOS, greedy
from tests.examples.tiny_families import PROMPT as PROMPT_OF_FAMILIES
from tests.examples.tiny_families import write_family


def test_completions_equal_the_model(server, tiny):
    prompts = [PROMPT, "a", "12345678"]
    ids = [tiny.tokenizer.encode(prompt) for prompt in prompts]
    expected = [greedy(tiny.tensors, prompt, 12) for prompt in ids]
    for prompt in (prompts, ids):
        answer, usage = complete(server, prompt=prompt, max_tokens=12), [sum(map(len, ids)), sum(map(len, expected))]
        assert texts(answer) == [tiny.tokenizer.decode(tokens) for tokens in expected]
        reasons = ["stop" if tokens[-1] == EOS else "length" for tokens in expected]
        assert [choice.finish_reason for choice in answer.choices] == reasons
        assert [answer.usage.prompt_tokens, answer.usage.completion_tokens] == usage
        assert answer.usage.total_tokens == sum(usage)


@pytest.mark.parametrize("call", [complete, chat])
def test_streamed_pieces_join_to_the_answer(server, call):
    # At a high temperature most bytes are no text, and many are parts of characters.
    options = dict(max_tokens=30, temperature=1.5, seed=3, n=2, top_p=0.99, extra_body={"top_k": 200})
    call(server, **options)  # caches the prompt for both answers below
    whole = call(server, **options)
    chunks = list(call(server, **options, stream=True, stream_options={"include_usage": True}))
    pieces, reasons = ["", ""], [None, None]
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        (choice,) = chunk.choices
        assert reasons[choice.index] is None
        pieces[choice.index] += choice.text if call is complete else choice.delta.content
        reasons[choice.index] = choice.finish_reason
    expected = [choice.text if call is complete else choice.message.content for choice in whole.choices]
    assert pieces == expected
    assert pieces[0] != pieces[1]
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
    # Without a limit, up to the maximum of a request.
    answer = chat(server, temperature=1.0, seed=1)
    assert answer.choices[0].finish_reason == "stop" or answer.usage.total_tokens == 128


@pytest.mark.parametrize("includes", [False, True])
def test_a_stop_string_ends_the_text(server, includes):
    options = dict(max_tokens=60, temperature=2, seed=4)
    (text,) = texts(complete(server, **options))
    stop = stop_in(text)
    begin = text.index(stop)
    options |= dict(extra_body={"include_stop_str_in_output": includes})
    for stops in (stop, [*(f"never {i}" for i in range(30)), stop, text[begin : begin + 9]]):
        answer = complete(server, **options, stop=stops)
        assert texts(answer) == [text[: begin + 2 * includes]]
        assert answer.choices[0].finish_reason == "stop"
        assert begin + 2 <= answer.usage.completion_tokens < 60
        chunks = list(complete(server, **options, stop=stops, stream=True))
        assert text_of(chunks) == answer.choices[0].text
        assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("ended", [0, 1, 2])
def test_a_stop_string_ends_one_completion_and_the_others_continue(server, ended):
    engines = server.engines
    options = dict(prompt=[PROMPT, "12345678"], max_tokens=60, temperature=2, seed=4, n=2)
    expected = texts(complete(server, **options))
    text = expected.pop(ended)
    stop = stop_in(text, *expected)
    expected.insert(ended, text.partition(stop)[0])
    before = engines.finished.copy()
    answer = complete(server, **options, stop=stop)
    assert texts(answer) == expected
    wait_for(lambda: engines.num_open == 0)
    reasons = [choice.finish_reason for choice in answer.choices]
    reasons[ended] = "abort"
    assert engines.finished - before == collections.Counter(reasons)
    assert engines.stats.num_free_blocks == engines.stats.num_blocks


def test_choices_are_in_the_order_of_the_prompts(server):
    options = dict(max_tokens=8, temperature=2, seed=7, n=2)
    prompts = [PROMPT, "12345678"]
    alone = [text for prompt in prompts for text in texts(complete(server, prompt=prompt, **options))]
    assert len(set(alone)) == 4
    together = complete(server, prompt=prompts, **options)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert texts(together) == alone


@pytest.mark.slow
def test_a_server_with_a_latent_model(tmp_path):
    """The tokens equal transformers', for a new prompt and for a cached one."""
    write_family(tmp_path, "deepseek_v3")
    tokens = json.loads(Path(__file__).with_name("data").joinpath("families.json").read_text())["deepseek_v3"]["tokens"]
    service = make_service(tmp_path, "--max-model-len=32")
    with running(service) as server:
        for _ in range(2):
            answer = complete(server, model=tmp_path.name, prompt=[PROMPT_OF_FAMILIES] * 2, max_tokens=len(tokens))
            assert texts(answer) == [service.checkpoint.tokenizer.decode(tokens)] * 2
