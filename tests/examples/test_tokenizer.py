"""examples/lib/tokenizer.py: tokens are those of transformers, and texts those of the tokenizer's own decoder."""

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lib.chat_template import ChatTemplate, ChatTemplateError
from lib.tokenizer import Tokenizer
from tests.examples.tiny_tokenizers import CONTROL, KINDS, TEXT, THOUGHTS

TEMPLATE = (
    "<s>{% for m in messages %}<|{{ m.role }}|>\n{% if '</think>' in m.content %}{{ m.content.split('</think>')[1] }}"
    "{% else %}{{ m.content }}{% endif %}</s>{{ m.note }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


@pytest.fixture(scope="module")
def chats():
    """One process for the tokenizers of all kinds."""
    return ChatTemplate(TEMPLATE, {"bos_token": "<s>"}, dict.fromkeys(CONTROL, True) | dict.fromkeys(THOUGHTS, False))


@pytest.fixture(scope="module", params=KINDS)
def pair(request, chats):
    """Ours, and transformers' own, of each kind."""
    tokenizer = KINDS[request.param]()
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, bos_token="<s>")
    ours = Tokenizer(tokenizer, (), TEMPLATE, theirs.special_tokens_map)
    vars(ours)["_renderer"] = chats
    return ours, theirs


def conversations(seed, spelled=()):
    rng = np.random.default_rng(seed)
    words = [*TEXT.split(" ")[:60], "\n", "  ", "\u20ac", *spelled * 12]

    def text():
        return "".join(str(word) + rng.choice(["", " "]) for word in rng.choice(words, rng.integers(0, 9)))

    roles = ("user", "assistant")
    return [
        [{"role": roles[i % 2], "content": text(), "note": text()} for i in range(rng.integers(1, 5))]
        for _ in range(20)
    ]


@pytest.mark.parametrize("continues", [False, True])
def test_conversations_have_the_tokens_of_transformers(pair, continues):
    ours, theirs = pair
    chats = conversations(0)
    for chat in chats:
        chat[-1]["content"] += "end"
    expected = theirs.apply_chat_template(
        chats, add_generation_prompt=not continues, continue_final_message=continues, return_dict=False
    )
    assert ours.encode_conversations(chats, continue_final_message=continues) == expected
    allowed = conversations(1, CONTROL)
    expected = theirs.apply_chat_template(allowed, add_generation_prompt=True, return_dict=False)
    assert ours.encode_conversations(allowed, allow_control_tokens=True) == expected


def test_spelled_control_tokens_are_plain_text_as_in_transformers(pair):
    ours, theirs = pair
    chats = conversations(2, (*CONTROL, *THOUGHTS))
    expected = theirs.apply_chat_template(
        chats, add_generation_prompt=True, return_dict=False, sanitize_control_tokens=True
    )
    encoded = ours.encode_conversations(chats)
    assert encoded == expected
    control = ours.special_ids
    for chat, ids in zip(chats, encoded, strict=True):
        assert sum(i in control for i in ids if i != ours.tokenizer.token_to_id("[UNK]")) == 2 + 2 * len(chat)


def test_a_spelled_control_token_changes_no_other_text(pair):
    ours, _ = pair
    control = [ours.tokenizer.token_to_id(token) for token in CONTROL]

    def sections(chat):
        (ids,) = ours.encode_conversations([chat])
        parts = [[]]
        for i in ids:
            parts[-1].append(i)
            if i in control:
                parts.append([])
        return parts

    for chat in conversations(3):
        chat[0]["content"] = "plain"
        plain = sections(chat)
        for spelled in CONTROL:
            chat[0]["content"] = f"{spelled} a {spelled}b"
            changed = sections(chat)
            assert [p == q for p, q in zip(plain, changed, strict=True)] == [i != 2 for i in range(len(plain))]


def test_control_tokens_in_a_prompt_are_text(tiny):
    eos = tiny.tokenizer.eos_ids[0]  # the template is <eos>{{ content }}:
    prompts = ["a<eos>b", "<eo<eos>s>", "plain"]
    escaped = tiny.tokenizer.encode_chat(prompts)
    for prompt, ids in zip(prompts, escaped, strict=True):
        assert ids[0] == eos
        assert eos not in ids[1:]
        assert tiny.tokenizer.decode(ids) == prompt + ":"
    assert escaped[2] == [eos, *tiny.tokenizer.encode("plain:")]
    allowed = tiny.tokenizer.encode_chat(prompts, allow_control_tokens=True)
    assert [ids.count(eos) for ids in allowed] == [2, 2, 1]


def test_a_tokenizer_that_cannot_spell_a_control_token_refuses_the_chat():
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"hi": 0, "<eos>": 1}, unk_token="hi"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<eos>"])
    ours = Tokenizer(tokenizer, (), "<eos>{{ messages[0].content }}", {})
    assert ours.encode_chat(["hi"]) == [[1, 0]]
    with pytest.raises(ChatTemplateError, match="spells '<eos>', which this tokenizer cannot encode as plain text"):
        ours.encode_chat(["a<eos>"])
