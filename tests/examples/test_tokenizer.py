"""examples/lib/tokenizer.py: tokens equal transformers', texts equal the tokenizer's own decoder."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lib.chat_template import ChatTemplate, ChatTemplateError
from lib.checkpoint import CheckpointError, read_checkpoint
from lib.text_stream import TextStream
from lib.tokenizer import Tokenizer
from tests.examples.tiny_checkpoint import write_checkpoint
from tests.examples.tiny_tokenizers import CONTROL, KINDS, TEXT, THOUGHTS, sentencepiece

TEMPLATE = (
    "<s>{% for m in messages %}<|{{ m.role }}|>\n{% if '</think>' in m.content %}{{ m.content.split('</think>')[1] }}"
    "{% else %}{{ m.content }}{% endif %}</s>{{ m.note }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


@pytest.fixture(scope="module")
def chats():
    """One process for tokenizers of all kinds."""
    return ChatTemplate(TEMPLATE, {"bos_token": "<s>"}, dict.fromkeys(CONTROL, True) | dict.fromkeys(THOUGHTS, False))


@pytest.fixture(scope="module", params=KINDS)
def pair(request, chats):
    """Our tokenizer and transformers' tokenizer of each kind."""
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
def test_tokens_of_conversations_equal_transformers(pair, continues):
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


def test_decoding_equals_the_tokenizer(pair):
    ours, _ = pair
    rng, vocab_size = np.random.default_rng(0), ours.tokenizer.get_vocab_size()
    num_whole = 0
    for _ in range(300):
        ids = rng.integers(0, vocab_size, rng.integers(1, 12)).tolist()
        for skip in (False, True):
            expected = ours.tokenizer.decode(ids, skip_special_tokens=skip)
            text = ours.decode(ids, skip_special_tokens=skip)
            # Next to invalid bytes, ByteFallback of tokenizers drops whole characters.
            if "\ufffd" not in expected or "<0x00>" not in ours.tokenizer.get_vocab():
                assert text == expected
                num_whole += 1
    assert num_whole > 100


def test_pieces_join_to_the_whole_text_for_any_cuts(pair):
    ours, _ = pair
    rng, vocab_size = np.random.default_rng(1), ours.tokenizer.get_vocab_size()
    for _ in range(300):
        prompt, ids = (rng.integers(0, vocab_size, rng.integers(least, 9)).tolist() for least in (0, 1))
        options = dict(skip_special_tokens=bool(rng.integers(2)), has_offsets=bool(rng.integers(2)))
        echo = TextStream(ours, **options)
        shown = echo.extend(prompt, is_last=False)  # a character that starts in the prompt is returned with the answer
        stream, end, offset = TextStream(ours, prompt_ids=prompt, **options), 0, len(shown)
        while end < len(ids):
            end = min(len(ids), end + int(rng.integers(1, 4)))
            shown += stream.extend(ids[:end], is_last=end == len(ids))
        assert shown == ours.decode(prompt + ids, skip_special_tokens=options["skip_special_tokens"])
        assert shown[offset:] == ours.decode(ids, prompt_ids=prompt, skip_special_tokens=options["skip_special_tokens"])
        joined = TextStream(ours, **options)
        joined.extend(prompt + ids, is_last=True)
        assert echo.offsets + [offset + i for i in stream.offsets] == joined.offsets


def test_token_texts_of_logprobs_join_to_the_text(pair):
    ours, _ = pair
    ids = ours.encode(TEXT[:500])
    whole = [ours.token_text(i) for i in ids]
    assert "".join(whole[1:]) == ours.decode(ids[1:], prompt_ids=ids[:1])
    assert b"".join(map(ours.token_bytes, ids[1:])).decode() == ours.decode(ids[1:], prompt_ids=ids[:1])


def test_parts_of_characters_are_shown_as_bytes():
    for kind in ("byte_level", "sentencepiece"):
        tokenizer = Tokenizer(KINDS[kind](), (), None, {})
        ids = tokenizer.encode("\u2620", add_special_tokens=False)[-3:]
        assert b"".join(map(tokenizer.token_bytes, ids)) == "\u2620".encode()
        assert [tokenizer.token_text(i) for i in ids] == [r"bytes:\xe2", r"bytes:\x98", r"bytes:\xa0"]


@pytest.fixture
def words():
    vocab = {"\u2581is": 0, "\u2581Paris": 1, "is": 2, "\u2581": 3}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return Tokenizer(tokenizer, (), None, {})


def test_a_completion_begins_with_the_space_of_its_first_token(words):
    assert words.decode([0, 1]) == "is Paris"
    assert words.decode([1], prompt_ids=[0]) == " Paris"
    stream = TextStream(words, prompt_ids=[0], has_offsets=True)
    assert stream.extend([1, 0], is_last=True) == " Paris is"
    assert stream.offsets == [0, 6]
    assert [words.token_text(i) for i in range(4)] == [" is", " Paris", "is", " "]
    stopped = TextStream(words, [" Par"], prompt_ids=[0])
    assert stopped.extend([1, 0], is_last=False) == ""
    assert (stopped.is_stopped, stopped.num_tokens) == (True, 1)
    including = TextStream(words, [" Par"], prompt_ids=[0], includes_stop=True)
    assert including.extend([1, 0], is_last=False) == " Par"


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with a tokenizer like Llama 2's."""
    write_checkpoint(tmp_path, vocab_size=500)
    write_files(tmp_path, sentencepiece(), bos_token="<s>", eos_token="</s>")
    return tmp_path


def write_files(folder, tokenizer, **settings):
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "LlamaTokenizer", "chat_template": TEMPLATE} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_truncation_and_padding_of_a_file_are_not_applied(folder):
    expected = read_checkpoint(folder).tokenizer.encode("0123456789")
    tokenizer = sentencepiece()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    write_files(folder, tokenizer)
    read = read_checkpoint(folder).tokenizer
    assert read.encode("0123456789") == expected
    assert len(read.encode_chat(["0123456789" * 9])[0]) > 90


def test_a_folder_has_the_tokens_of_auto_tokenizer(folder):
    ours, theirs = read_checkpoint(folder).tokenizer, AutoTokenizer.from_pretrained(folder)
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    chats = conversations(4)
    expected = theirs.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    assert ours.encode_conversations(chats) == expected
    assert ours.special_tokens["eos_token"] == "</s>"


def test_templates_are_found_in_the_places_of_transformers(folder):
    def template():
        return read_checkpoint(folder).tokenizer.chat_template

    assert template() == TEMPLATE
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    write_files(folder, sentencepiece(), chat_template=named)
    assert template() == {"default": "a", "tool_use": "b"}
    (folder / "chat_template.jinja").write_text("c")
    assert template() == "c"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("d")
    assert template() == {"default": "c", "tool_use": "d"}
    (folder / "additional_chat_templates" / "tool_use.jinja").unlink()
    (folder / "chat_template.jinja").unlink()
    write_files(folder, sentencepiece(), chat_template=5)
    with pytest.raises(CheckpointError, match=r"The chat template of .* must be a text; got"):
        template()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model": {}}', "\0"])
def test_a_broken_tokenizer_is_refused_in_one_sentence(folder, content):
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"The tokenizer of .* cannot be read: ") as error:
        read_checkpoint(folder)
    assert len(str(error.value).splitlines()) == 1


def test_a_context_dependent_decoder_is_refused(folder):
    write_files(folder, sentencepiece(decoder=decoders.BPEDecoder()), tokenizer_class="PreTrainedTokenizerFast")
    with pytest.raises(CheckpointError, match="the decoder BPEDecoder, which is not known here"):
        read_checkpoint(folder)


def test_a_tokenizer_that_cannot_spell_a_control_token_refuses_the_chat():
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"hi": 0, "<eos>": 1}, unk_token="hi"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<eos>"])
    ours = Tokenizer(tokenizer, (), "<eos>{{ messages[0].content }}", {})
    assert ours.encode_chat(["hi"]) == [[1, 0]]
    with pytest.raises(ChatTemplateError, match="spells '<eos>', which this tokenizer cannot encode as plain text"):
        ours.encode_chat(["a<eos>"])
