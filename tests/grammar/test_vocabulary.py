"""The bytes of tokens: of lists, and of tokenizers of both supported kinds."""

import pickle

import numpy as np
import pytest

from jaxpaged.grammar import Vocabulary, compile_regex

tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["hello world, hello moon", "naïve café — 😀😀", "\tdef f(x):\n    return x\n", "日本語 日本語"]


def byte_level():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(["<tool>é"])
    return tokenizer


def byte_fallback(decoder):
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"helowrd,mn", "he", "▁he"]
    model = tokenizers.models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[("h", "e"), ("▁", "he")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


def replace():
    d = tokenizers.decoders
    return byte_fallback(d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)]))


def metaspace():
    d = tokenizers.decoders
    return byte_fallback(d.Sequence([d.ByteFallback(), d.Metaspace()]))


def bytes_of(vocabulary, ids):
    return b"".join(vocabulary.token_bytes[i, : vocabulary.token_lengths[i]].tobytes() for i in ids)


@pytest.mark.parametrize("make", [byte_level, replace, metaspace])
def test_the_bytes_of_tokens_are_those_of_the_text(make):
    tokenizer = make()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, [0])
    for text in TEXTS:
        assert bytes_of(vocabulary, tokenizer.encode(text).ids) == text.encode()
        assert bytes_of(vocabulary, tokenizer.encode(text).ids[1:]) != text.encode()


def test_special_tokens_have_no_bytes_and_added_words_have_theirs():
    tokenizer = byte_level()
    end = tokenizer.token_to_id("<|end|>")
    vocabulary = Vocabulary.from_tokenizer(tokenizer, [end], vocab_size=400)
    assert len(vocabulary) == 400
    assert vocabulary.token_lengths[end] == 0
    assert (vocabulary.token_lengths[tokenizer.get_vocab_size() :] == 0).all()
    assert bytes_of(vocabulary, [tokenizer.token_to_id("<tool>é")]) == "<tool>é".encode()
    grammar = compile_regex("(.|\n)*", vocabulary)
    assert set(grammar.allowed_tokens(0).tolist()) >= {end, tokenizer.token_to_id("<tool>é")}
    assert grammar.allowed_tokens(0).max() < tokenizer.get_vocab_size()
    with pytest.raises(ValueError, match="vocab_size must be at least"):
        Vocabulary.from_tokenizer(tokenizer, [end], vocab_size=10)


def test_a_token_outside_of_the_byte_alphabet_stands_for_itself():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"\u0120a": 0, "\u4e2d": 1, "b": 2}, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, [2])
    for token in (0, 1):
        assert bytes_of(vocabulary, [token]).decode() == tokenizer.decode([token])


def test_other_tokenizers_are_refused():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(ValueError, match="decoder is WordPiece"):
        Vocabulary.from_tokenizer(tokenizer, [0])
    tokenizer.decoder = None
    with pytest.raises(ValueError, match="decoder is None"):
        Vocabulary.from_tokenizer(tokenizer, [0])


def test_long_tokens_are_left_out():
    tokens = [b"a", b"a" * 40, None]
    vocabulary = Vocabulary(tokens, [2])
    assert vocabulary.token_bytes.shape == (3, 1)
    assert vocabulary.token_lengths.tolist() == [1, 0, 0]
    assert Vocabulary(tokens, [2], max_token_bytes=40).token_lengths.tolist() == [1, 40, 0]


def test_arrays_and_fingerprints():
    vocabulary = Vocabulary([b"a", b"\0", b"a\0", b"", None, b"end"], [5, 4, 5])
    assert vocabulary.end_token_ids == (4, 5)
    assert (vocabulary.token_bytes.dtype, vocabulary.token_lengths.dtype) == (np.uint8, np.uint8)
    assert vocabulary.token_lengths.tolist() == [1, 1, 2, 0, 0, 0]
    assert compile_regex("a\\x00", vocabulary).allowed_tokens(0).tolist() == [0, 2]
    others = [
        Vocabulary([b"a", b"\0", b"a\0", b"", None, None], [4]),
        Vocabulary([b"a", b"\0", b"a", b"", None, None], [4, 5]),
        Vocabulary([b"a", b"\0\0", b"a", b"", None, None], [4, 5]),
    ]
    assert len({each.fingerprint for each in [vocabulary, *others]}) == 4
    assert pickle.loads(pickle.dumps(vocabulary)).fingerprint == vocabulary.fingerprint


@pytest.mark.parametrize(
    ("tokens", "ends", "message"),
    [
        ([b"a"], [], "at least one token in end_token_ids"),
        ([b"a"], [1], "end_token_ids must be at most 0"),
        ([b"a"], [0], "No token of the 1"),
        ([None, b"a" * 33], [0], "between 1 and max_token_bytes=32"),
    ],
)
def test_wrong_arguments_are_refused(tokens, ends, message):
    with pytest.raises(ValueError, match=message):
        Vocabulary(tokens, ends)
