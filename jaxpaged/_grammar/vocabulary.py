"""The bytes of each token of a tokenizer."""

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from jaxpaged._grammar.recent import RecentGrammars
from jaxpaged._grammar.trie import Trie
from jaxpaged._integers import checked_size

CONTROL_BYTE = 0xFF  # UTF-8 does not have it


class Vocabulary:
    """The bytes of each token of a tokenizer, and the grammars compiled for it.

    Attributes:
        token_bytes: uint8 `[vocab, width]`: the bytes of each token, then zeros. The width is the length of the
            longest token that a grammar may allow.
        token_lengths: uint8 `[vocab]`: the number of bytes; 0 for tokens that no grammar allows: end tokens, ids
            without a token, tokens of more than `max_token_bytes` bytes, and tokens with the byte 0xFF.
        end_token_ids: the tokens that end an answer, sorted; a grammar allows them where the answer may end.
        control_token_ids: tokens that are no text. Their bytes are 0xFF and three of the id, so that only `Control` and
            `FreeText` allow them.
        fingerprint: a digest of the above: equal for vocabularies that share grammars.
        trie: the bytes as a trie, for the compiler.
        recent: the most recent grammars, which are not compiled again.
    """

    def __init__(
        self,
        tokens: Sequence[bytes | None],
        end_token_ids: Sequence[int],
        *,
        control_token_ids: Sequence[int] = (),
        max_token_bytes: int = 32,
        cache_bytes: int = 2**28,
    ):
        """Makes a vocabulary from the bytes of its tokens.

        Args:
            tokens: the bytes of each token id; None or empty: a grammar never allows it, unless it is an end token.
                The model's logits and `tokens` have equal lengths.
            end_token_ids: at least one token that ends an answer. The bytes in `tokens` are ignored.
            control_token_ids: tokens that are no text, such as `<|channel|>`. End tokens and the bytes in `tokens` are
                ignored.
            max_token_bytes: longer tokens are never allowed: shorter ones spell the same text. At most 255.
            cache_bytes: how many bytes of recent grammars to keep; 0: none.

        Raises:
            ValueError: an argument is out of range, or no token has bytes.
        """
        checked_size("max_token_bytes", max_token_bytes, 1, 255)
        checked_size("cache_bytes", cache_bytes, 0, 2**62)
        ends = sorted({checked_size("end_token_ids", token, 0, len(tokens) - 1) for token in end_token_ids})
        if not ends:
            raise ValueError("A vocabulary needs at least one token in end_token_ids; got none.")
        controls = {checked_size("control_token_ids", token, 0, len(tokens) - 1) for token in control_token_ids}
        kept = [b"" if token is None or len(token) > max_token_bytes else bytes(token) for token in tokens]
        for token, data in enumerate(kept):
            if token in controls or token in ends or CONTROL_BYTE in data:
                kept[token] = b""
        if not any(kept):
            raise ValueError(
                f"No token of the {len(tokens)} has between 1 and max_token_bytes={max_token_bytes} bytes."
            )
        self.end_token_ids = tuple(ends)
        self.control_token_ids = frozenset(controls.difference(ends))
        for token in self.control_token_ids:
            kept[token] = control_bytes(token)
        width = max(map(len, kept))
        self.token_lengths = np.array([len(token) for token in kept], np.uint8)
        packed = b"".join(token.ljust(width, b"\0") for token in kept)
        self.token_bytes = np.frombuffer(packed, np.uint8).reshape(len(kept), width)
        digest = hashlib.sha256(f"{len(kept)} {width} {ends}".encode() + self.token_lengths.tobytes() + packed)
        self.fingerprint = digest.hexdigest()
        self.trie = Trie.create(self.token_bytes, self.token_lengths)
        self.recent = RecentGrammars(cache_bytes)

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: Any,
        end_token_ids: Sequence[int],
        *,
        vocab_size: int | None = None,
        control_token_ids: Sequence[int] = (),
        **options: Any,
    ) -> Self:
        """The vocabulary of a Hugging Face tokenizer.

        A token has the bytes that it adds inside a text, with its leading space. Tokenizers of two kinds are
        supported: byte-level ones, and those with the space as `▁` and bytes as `<0x0A>`.

        Args:
            tokenizer: a `tokenizers.Tokenizer`.
            end_token_ids: at least one token that ends an answer.
            vocab_size: the size of the model's logits, if it is larger than the tokenizer's; no grammar allows the
                ids in between.
            control_token_ids: tokens that are no text, in addition to the tokenizer's special tokens.
            options: `max_token_bytes` and `cache_bytes`.

        Raises:
            ValueError: the tokenizer is of another kind, or has more than `vocab_size` tokens.
        """
        tokens = bytes_of_tokens(tokenizer)
        if vocab_size is not None:
            checked_size("vocab_size", vocab_size, len(tokens), 2**31 - 1)
            tokens += [None] * (vocab_size - len(tokens))
        special = [token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special]
        return cls(tokens, end_token_ids, control_token_ids=[*special, *control_token_ids], **options)

    def __len__(self) -> int:
        return len(self.token_lengths)

    def __repr__(self) -> str:
        return f"Vocabulary({len(self)} tokens, end_token_ids={self.end_token_ids})"


def control_bytes(token: int) -> bytes:
    """The bytes of a control token."""
    return bytes([CONTROL_BYTE, *token.to_bytes(3, "big")])


def bytes_of_tokens(tokenizer: Any) -> list[bytes | None]:
    """The bytes of each token of a `tokenizers.Tokenizer`; None for special tokens and unused ids."""
    state = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else b'{"type": "None"}'
    decoder = json.loads(state)
    decoders = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [each["type"] for each in decoders]
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens: list[bytes | None] = [None] * (max([*vocabulary.values(), *added]) + 1)
    if kinds == ["ByteLevel"]:
        alphabet = byte_alphabet()
        for text, token in vocabulary.items():
            if token not in added:
                is_encoded = alphabet.keys() >= set(text)  # others stand for themselves, also for the decoder
                tokens[token] = bytes(map(alphabet.__getitem__, text)) if is_encoded else text.encode()
    elif set(kinds) <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"} and {"Metaspace", "Replace"} & set(
        kinds
    ):
        for text, token in vocabulary.items():
            if token not in added:
                tokens[token] = _piece_bytes(text, decoders)
    else:
        raise ValueError(
            f"The tokenizer's decoder is {' + '.join(kinds)}; grammars support ByteLevel, and Metaspace or Replace "
            "with ByteFallback. Pass the bytes of each token to Vocabulary(tokens, ...) instead."
        )
    for token, added_token in added.items():
        tokens[token] = None if added_token.special else added_token.content.encode()
    return tokens


def _piece_bytes(text: str, decoders: list[dict[str, Any]]) -> bytes:
    if any(each["type"] == "ByteFallback" for each in decoders) and (byte := re.fullmatch("<0x([0-9A-F]{2})>", text)):
        return bytes.fromhex(byte[1])
    for each in decoders:
        if each["type"] == "Metaspace":
            text = text.replace(each["replacement"], " ")
        elif each["type"] == "Replace":
            if "String" not in each["pattern"]:
                raise ValueError(f"The tokenizer's decoder replaces {each['pattern']}; grammars support strings only.")
            text = text.replace(each["pattern"]["String"], each["content"])
    return text.encode()


def byte_alphabet() -> dict[str, int]:
    """The byte of each character in byte-level tokens: visible characters of Latin-1 are their own bytes.

    The others have the characters from U+0100 on, in order.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}
