"""Small tokenizers of common kinds, trained on one text."""

import json

import tokenizers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = (
    "Pages of a cache hold keys and values. A block table says where each page is; it grows as the text grows. "
    "Is it true that a request, once preempted, comes back?  Yes: 'twas true in 1984.\n\n\t"
    "Caf\u00e9, na\u00efve, \u4e16\u754c \U0001f600. "
) * 3
CONTROL = ("<s>", "</s>", "<|user|>", "<|assistant|>")
THOUGHTS = ("<think>", "</think>")  # not special tokens, as in Qwen3


def byte_level(**options) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    train(tokenizer, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    return with_control_tokens(tokenizer)


def sentencepiece(prepend_scheme="first", decoder=None) -> Tokenizer:
    """Like Llama 2: adds a leading space, and unknown characters become bytes."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=480, limit_alphabet=50, special_tokens=["<unk>", *bytes_], show_progress=False
    )
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    train(tokenizer, trainer)
    fields = json.loads(tokenizer.to_str())
    fields["model"] |= {"byte_fallback": True, "fuse_unk": True}
    fields["added_tokens"] = fields["added_tokens"][:1]
    tokenizer = Tokenizer.from_str(json.dumps(fields))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    tokenizer.decoder = decoder or decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return with_control_tokens(tokenizer)


def sentencepiece_by_normalizer() -> Tokenizer:
    """Like old conversions of Llama 2."""
    tokenizer = sentencepiece()
    tokenizer.pre_tokenizer = None  # type: ignore[assignment]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    train(tokenizer, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False))
    return with_control_tokens(tokenizer)


def train(tokenizer: Tokenizer, trainer) -> None:
    tokenizer.train_from_iterator([TEXT], trainer)


def with_control_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Adds tokens that strip white space: "<|user|>" before it, "<|assistant|>" after it."""
    added = {"<|user|>": {"lstrip": True}, "<|assistant|>": {"rstrip": True}}
    tokenizer.add_special_tokens([tokenizers.AddedToken(t, normalized=False, **added.get(t, {})) for t in CONTROL])
    tokenizer.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in THOUGHTS])
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "byte_level_with_a_space": lambda: byte_level(add_prefix_space=True),
    "sentencepiece": sentencepiece,
    "sentencepiece_always": lambda: sentencepiece("always"),
    "sentencepiece_by_normalizer": sentencepiece_by_normalizer,
    "metaspace": lambda: sentencepiece("always", decoders.Metaspace()),
    "word_piece": word_piece,
}
