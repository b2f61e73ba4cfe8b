"""A checkpoint's tokenizer: encodes texts and conversations, and decodes tokens."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lib.chat_template import MARK_END, MARK_START, ChatTemplate, ChatTemplateError, Conversation
from lib.text_stream import HALF, TextStream

if TYPE_CHECKING:  # from the extra "examples"; imported where it is used, so that --help works without it
    import tokenizers


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Encodes texts and conversations, and decodes tokens.

    Attributes:
        tokenizer: tokenizer without truncation and padding.
        eos_ids: tokens that end a text.
        chat_template: the template, or named templates: "tool_use" for conversations with tools, "default" for others.
        special_tokens: bos_token, eos_token and others, for the template.
    """

    tokenizer: "tokenizers.Tokenizer"
    eos_ids: tuple[int, ...]
    chat_template: str | dict[str, str] | None
    special_tokens: dict[str, Any]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._encode_all([text], add_special_tokens=add_special_tokens)[0]

    def encode_chat(self, texts: list[str], *, allow_control_tokens: bool = False) -> list[list[int]]:
        """Token ids of one conversation per text, with the text as its only message, up to the answer."""
        conversations = [[{"role": "user", "content": text}] for text in texts]
        return self.encode_conversations(conversations, allow_control_tokens=allow_control_tokens)

    def encode_conversations(
        self, conversations: Sequence[Conversation], *, allow_control_tokens: bool = False, **options: Any
    ) -> list[list[int]]:
        """Token ids of each conversation, up to the beginning of the answer.

        Control tokens in messages, tools, documents or template arguments, such as `<|im_end|>`, are encoded as plain
        text unless allowed.

        Args:
            conversations: lists of messages with any fields.
            options: further arguments of `ChatTemplate.render`.

        Raises:
            ChatTemplateError: the template refuses the conversation, or fails.
            RendererBusyError: the conversation was not rendered in time; try again later.
        """
        if self._renderer is None:
            raise ChatTemplateError("This checkpoint has no chat template; leave --chat out.")
        texts = self._renderer.render(conversations, allow_control_tokens=allow_control_tokens, **options)
        return [self._encode_marked(text) for text in texts]

    def decode(self, ids: Sequence[int], *, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> str:
        """The text of tokens: the pieces of a `TextStream`, joined."""
        stream = TextStream(self, prompt_ids=prompt_ids, skip_special_tokens=skip_special_tokens)
        return stream.extend(ids, is_last=True)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token adds to a text, with its leading space, even if they are part of a character."""
        return self.bytes_of(token_id)[0]

    def token_text(self, token_id: int) -> str:
        """The token as OpenAI's logprobs show it: its text, or `bytes:\\xe2\\x96` for a part of a character."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    @functools.cached_property
    def _renderer(self) -> ChatTemplate | None:
        if self.chat_template is None:
            return None
        added_tokens = {token.content: token.special for token in self._added.values() if token.content}
        return ChatTemplate(self.chat_template, self.special_tokens, added_tokens)

    @functools.cached_property
    def _added(self) -> "dict[int, tokenizers.AddedToken]":
        return self.tokenizer.get_added_tokens_decoder()

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that decoding leaves out by default."""
        return frozenset(i for i, token in self._added.items() if token.special)

    @functools.cached_property
    def bytes_of(self) -> Callable[[int], tuple[bytes, bytes]]:
        """Bytes of a token inside a text, and at its start, where some tokenizers drop a space."""
        bytes_of = byte_alphabet()

        @functools.cache
        def split(token_id: int) -> tuple[bytes, bytes]:
            once, twice = (self.tokenizer.decode([token_id] * n, skip_special_tokens=False) for n in (1, 2))
            if HALF not in once:
                return twice[len(once) :].encode(), once.encode()
            token = self.tokenizer.id_to_token(token_id) or ""
            if byte := re.fullmatch("<0x([0-9A-F]{2})>", token):
                data = bytes.fromhex(byte[1])
            elif set(token) <= set(bytes_of):
                data = bytes(bytes_of[character] for character in token)
            else:
                data = twice[len(once) :].encode()
            return data, data

        return split

    def _encode_all(self, texts: list[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        # Not `encode`, which holds Python's lock and would block the server.
        return [each.ids for each in self.tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)]

    def _encode_marked(self, text: str) -> list[int]:
        """Tokens of a rendered text, with marked control tokens as plain text."""
        begin, *rest = self._marks.split(text)  # `rest` alternates a marked token (None: a mark alone) and text
        (ids,) = self._encode_all([begin])
        for token, piece in zip(rest[::2], _encode_within(self._encode_all, rest[1::2]), strict=True):
            ids += self._spelled(token) if token else []
            ids += piece
        return ids

    @functools.cached_property
    def _marks(self) -> re.Pattern[str]:
        longest_first = sorted((token.content for token in self._added.values()), key=len, reverse=True)
        tokens = "|".join(map(re.escape, filter(None, longest_first)))
        return re.compile(f"{MARK_START}({tokens}){MARK_END}|[{MARK_START}{MARK_END}]")

    @functools.cached_property
    def _spelled(self) -> Callable[[str], list[int]]:
        """A function that encodes the spelling of a control token as plain text."""

        model = self.tokenizer.model

        def encode_plain(texts: list[str]) -> list[list[int]]:
            return [[token.id for word in words(text) for token in model.tokenize(word)] for text in texts]

        def words(text: str) -> list[str]:
            """Runs the tokenizer's parts directly, without added tokens."""
            normalizer, pre_tokenizer = self.tokenizer.normalizer, self.tokenizer.pre_tokenizer
            text = text if normalizer is None else normalizer.normalize_str(text)
            return [text] if pre_tokenizer is None else [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]

        @functools.cache
        def encode(text: str) -> list[int]:
            (ids,) = _encode_within(encode_plain, [text])
            if self.tokenizer.token_to_id(text) in ids:
                raise ChatTemplateError(f"A message spells {text!r}, which this tokenizer cannot encode as plain text.")
            return ids

        return encode


def _encode_within(encode: Callable[[list[str]], list[list[int]]], texts: list[str]) -> list[list[int]]:
    """Tokens of texts inside a prompt.

    Each text is encoded after a newline, because some tokenizers add a space at the beginning of a prompt.
    """
    newline, *encoded = encode(["\n", *("\n" + text for text in texts)])
    size = len(newline)
    return [
        ids[size:] if ids[:size] == newline else encode([text])[0] for text, ids in zip(texts, encoded, strict=True)
    ]


def byte_alphabet() -> dict[str, int]:
    """The byte of each character in byte-level tokens. A visible character is its own byte."""
    from tokenizers.pre_tokenizers import ByteLevel

    visible = {ord(character) for character in ByteLevel.alphabet() if ord(character) < 256}
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}
