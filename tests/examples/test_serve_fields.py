"""Request fields of vLLM: neutral values, stop tokens, token ids, special tokens, usage in each chunk."""

import dataclasses
import math
from types import SimpleNamespace

import pytest

from lib.openai_fields import IGNORED
from lib.openai_logits import encode_bad_words
from tests.examples.serving import PROMPT, body, chat, chat_body, complete, read, running, text_of, texts
from tests.examples.tiny_checkpoint import greedy

# Clients of vLLM send these defaults.
NEUTRAL = dict(repetition_penalty=1.0, min_p=0, ignore_eos=False, min_tokens=0, skip_special_tokens=True)
NEUTRAL |= dict(stop_token_ids=[], use_beam_search=False, length_penalty=1.0, include_stop_str_in_output=False)
NEUTRAL |= dict(presence_penalty=0.0, frequency_penalty=0.0, logit_bias={}, bad_words=[], truncate_prompt_tokens=None)
NEUTRAL |= dict(spaces_between_special_tokens=True, prompt_logprobs=None, structured_outputs=None, stop=[], seed=None)
NEUTRAL |= dict(response_format={"type": "text"}, logits_processors=[], priority=0, return_token_ids=False)
OF_TEXT = dict(best_of=1, suffix="", echo=False, add_special_tokens=True)
OF_CHAT = dict(add_generation_prompt=True, continue_final_message=False, chat_template=None, chat_template_kwargs={})
OF_CHAT |= dict(documents=None, tools=[], tool_choice="none", add_special_tokens=False, echo=False)


def test_neutral_values_are_accepted():
    both = NEUTRAL | dict.fromkeys(IGNORED, "anything")
    assert vars(read(body(**both | OF_TEXT))) == vars(read(body()))
    assert vars(read(chat_body(**both | OF_CHAT), is_chat=True)) == vars(read(chat_body(), is_chat=True))


def test_a_history_keeps_the_fields_that_templates_read():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    history = [
        {"role": "user", "content": "a", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
        {"role": "tool", "content": [{"type": "text", "text": "2"}], "tool_call_id": "1"},
        {"role": "assistant", "content": "b", "annotations": [], "reasoning_content": "c", "function_call": None},
    ]
    conversation = read(chat_body(messages=history), is_chat=True).conversation
    parsed = call | {"function": {"name": "add", "arguments": {"a": 1}}}
    assert conversation["messages"] == [
        history[0],
        {"role": "assistant", "content": "", "tool_calls": [parsed]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "assistant", "content": "b", "annotations": [], "reasoning_content": "c"},
    ]


def test_the_arguments_of_the_template_reach_it():
    tool, document = {"type": "function", "function": {"name": "add"}}, {"title": "a", "text": "b"}
    options = dict(tools=[tool], tool_choice="none", documents=[document], reasoning_effort="low")
    options |= dict(chat_template_kwargs={"enable_thinking": False}, continue_final_message=True)
    conversation = read(chat_body(**options, add_generation_prompt=False), is_chat=True).conversation
    assert (conversation["tools"], conversation["documents"]) == ([tool], [document])
    assert conversation["continue_final_message"]
    assert conversation["chat_template_kwargs"] == {"reasoning_effort": "low", "enable_thinking": False}


def test_sampling_defaults_apply_to_missing_fields(server):
    service = dataclasses.replace(server.service, sampling_defaults={"temperature": 0.7, "top_p": 0.9, "top_k": 20})
    params = read(body(temperature=1.5, top_k=-1, min_p=0.1), service).params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.5, 0.9, 0, 0.1)
    expected = texts(complete(server))
    with running(server.service, sampling_defaults={"temperature": 0.0}) as greedy_server:
        assert texts(complete(greedy_server, temperature=None)) == expected


def test_fields_that_change_logits_reach_the_engine(server, tiny):
    usual = complete(server, max_tokens=12).choices[0].text
    first, *_ = tiny.tokenizer.encode(usual, add_special_tokens=False)

    def ids(**fields):
        fields = dict(extra_body={"return_token_ids": True, "ignore_eos": True} | fields)
        return complete(server, max_tokens=12, **fields).choices[0].token_ids

    assert set(ids(allowed_token_ids=[5, 7])) <= {5, 7}
    assert ids(logit_bias={"7": 100}) == [7] * 12
    assert len(set(ids(logit_bias={"7": 100}, frequency_penalty=2, presence_penalty=1, repetition_penalty=9))) > 1
    assert first not in ids(bad_words=[tiny.tokenizer.token_text(first)])
    params = read(body(presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.5, logit_bias={"3": 4})).params
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.5)
    assert params.logit_bias == {3: 4.0}


def test_min_tokens_delays_the_end(server):
    options = dict(max_tokens=100, temperature=2, n=8, seed=1, extra_body={"return_token_ids": True})
    shortest = min(complete(server, **options).choices, key=lambda choice: len(choice.token_ids))
    options["extra_body"]["min_tokens"] = len(shortest.token_ids) + 5
    longer = complete(server, **options).choices[shortest.index].token_ids
    assert shortest.finish_reason == "stop"
    assert longer[: len(shortest.token_ids) - 1] == shortest.token_ids[:-1]
    assert len(longer) >= len(shortest.token_ids) + 5


def test_bad_words_are_spelled_with_and_without_a_space():
    """As in vLLM: the spelling after a space counts if it begins with another token and has as many."""
    spellings = {"no": [1], " no": [2], "yes": [3, 4], " yes": [5, 3, 4], "so": [6], " so": [6]}
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: spellings[text])
    assert encode_bad_words(tokenizer, ["no", " yes", "so"]) == [[1], [2], [3, 4], [6]]


def test_a_stop_token_ends_the_text_before_it(server, tiny):
    prompt = tiny.tokenizer.encode(PROMPT)
    tokens = greedy(tiny.tensors, prompt, 12)
    stop = next(token for token in tokens[3:] if token not in tokens[:3])
    end = tokens.index(stop) + 1
    stops = {"stop_token_ids": [next(token for token in range(10) if token not in tokens), stop]}
    for includes in (False, True):
        options = dict(max_tokens=12, extra_body=stops | {"include_stop_str_in_output": includes})
        answer = complete(server, logprobs=1, **options)
        (choice,), shown = answer.choices, end if includes else end - 1
        assert choice.text == tiny.tokenizer.decode(tokens[:shown])
        assert (choice.finish_reason, answer.usage.completion_tokens) == ("stop", end)
        assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == end
        assert includes or choice.logprobs.text_offset[-1] == len(choice.text)
        assert text_of(complete(server, stream=True, **options)) == choice.text


def test_ignore_eos_continues_after_the_end(server):
    options = dict(max_tokens=100, temperature=2, n=8, seed=1)
    whole = complete(server, **options)
    ended = next(choice.index for choice in whole.choices if choice.finish_reason == "stop")
    answer = complete(server, **options, extra_body={"ignore_eos": True})
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 8
    assert answer.usage.completion_tokens == 8 * 100
    assert texts(answer)[ended].startswith(texts(whole)[ended])
    shown = texts(complete(server, **options, extra_body={"ignore_eos": True, "skip_special_tokens": False}))[ended]
    assert shown.startswith(texts(whole)[ended] + "<eos>")
    assert shown.replace("<eos>", "") == texts(answer)[ended]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_token_ids_are_returned(server, tiny, is_streamed):
    """As in vLLM, a completion's prompt is in each choice and a chat's prompt is in the answer."""
    options = dict(max_tokens=6, stream=is_streamed, extra_body={"return_token_ids": True})
    prompts = [tiny.tokenizer.encode(prompt) for prompt in (PROMPT, "a")]
    (conversation,) = tiny.tokenizer.encode_conversations([[{"role": "user", "content": PROMPT}]])
    expected = [greedy(tiny.tensors, prompt, 6) for prompt in (*prompts, conversation)]
    answers = complete(server, prompt=[PROMPT, "a"], **options), chat(server, **options)
    chunks, pieces = (list(answer) if is_streamed else [answer] for answer in answers)
    for index, prompt in enumerate(prompts):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert [token for choice in choices for token in choice.token_ids] == expected[index]
        assert [getattr(choice, "prompt_token_ids", None) for choice in choices] == [prompt, *[None] * len(choices[1:])]
    assert [token for piece in pieces for token in piece.choices[0].token_ids] == expected[-1]
    assert pieces[0].prompt_token_ids == conversation
    assert not hasattr(complete(server, max_tokens=1).choices[0], "token_ids")


def test_usage_reports_the_cached_part_of_a_prompt(server):
    prompt = "It was not cached before. " * 3
    cached = [complete(server, prompt=[prompt, "b"], max_tokens=1).usage.prompt_tokens_details for _ in range(2)]
    assert [details.cached_tokens for details in cached] == [0, (len(prompt) - 1) // 8 * 8]


@pytest.mark.parametrize("call", [complete, chat])
def test_each_chunk_can_have_the_usage(server, call):
    options = dict(stream_options=dict(include_usage=True, continuous_usage_stats=True))
    *chunks, last = call(server, max_tokens=9, stream=True, extra_body={"return_token_ids": True}, **options)
    seen = 0
    for chunk in chunks:
        seen += len(chunk.choices[0].token_ids)
        assert chunk.usage.completion_tokens == chunk.usage.total_tokens - chunk.usage.prompt_tokens == seen
    assert (last.choices, last.usage.completion_tokens, seen) == ([], 9, 9)


@pytest.mark.parametrize("wrong", [-math.inf, math.nan])
def test_infinite_logprobs_become_very_low_numbers(server, monkeypatch, wrong):
    engine = server.engines.runners[0].engine
    step = engine.step

    def wrong_step(**how):
        outputs = step(**how)
        for output in outputs:
            if output.prompt_logprobs is not None:
                output.prompt_logprobs[1:] = [wrong] * (len(output.prompt_logprobs) - 1)
            for completion in output.outputs:
                completion.logprobs[:] = [wrong] * len(completion.logprobs)
                completion.top_logprobs[:] = [dict.fromkeys(top, wrong) for top in completion.top_logprobs]
        return outputs

    monkeypatch.setattr(engine, "step", wrong_step)
    found = complete(server, max_tokens=3, logprobs=1, echo=True).choices[0].logprobs
    assert found.token_logprobs == [None] + [-9999.0] * (len(PROMPT) + 2)
    assert set(found.top_logprobs[-1].values()) == {-9999.0}
    chunks = chat(server, stream=True, max_tokens=3, logprobs=True, top_logprobs=1)
    content = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
    assert [(entry.logprob, entry.top_logprobs[0].logprob) for entry in content] == [(-9999.0, -9999.0)] * 3
