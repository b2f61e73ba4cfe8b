"""A checkpoint's tokenizer: texts and conversations to tokens, and tokens to text."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lib.chat_template import ChatTemplateError, Conversation, render

if TYPE_CHECKING:  # of the extra "examples": imported where it is used, so that --help works without
    import tokenizers


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    tokenizer: "tokenizers.Tokenizer"
    eos_ids: tuple[int, ...]
    chat_template: str | None
    special_tokens: dict[str, str]  # bos_token, eos_token, for the template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # Not `encode`, which holds Python's lock and would block a server.
        return self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_chat(self, texts: list[str], *, allow_control_tokens: bool = False) -> list[list[int]]:
        """The ids of a conversation for each text, its one message, up to where the answer begins."""
        conversations = [[{"role": "user", "content": text}] for text in texts]
        return self.encode_conversations(conversations, allow_control_tokens=allow_control_tokens)

    def encode_conversations(
        self,
        conversations: Sequence[Conversation],
        *,
        allow_control_tokens: bool = False,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[list[int]]:
        """The ids of each conversation, up to where the answer begins.

        A control token that a message spells, such as `<|im_end|>`, is plain text and ends no message unless allowed.

        Raises:
            ChatTemplateError: the template refuses the conversation, or fails.
            RendererBusyError: the conversation was not rendered in time; try again later.
        """
        if self.chat_template is None:
            raise ChatTemplateError("This checkpoint has no chat template; leave --chat out.")
        added = self.tokenizer.get_added_tokens_decoder().items()
        control = {token.content: i for i, token in added if token.special and token.content}
        longest_first = sorted(control, key=len, reverse=True)
        contents = [message["content"] for messages in conversations for message in messages]
        # A private character stands for each while the template puts its own control tokens around the text.
        spelled = [] if allow_control_tokens else [t for t in longest_first if any(t in text for text in contents)]
        marks = {token: chr(0x100000 + i) for i, token in enumerate(spelled)}

        def marked(text: str) -> str:
            for token, mark in marks.items():
                text = text.replace(token, mark)
            return text

        escaped = [[m | {"content": marked(m["content"])} for m in messages] for messages in conversations]
        rendered = render(self.chat_template, escaped, self.special_tokens)
        if not marks:
            return [each.ids for each in self.tokenizer.encode_batch(rendered, add_special_tokens=False)]

        unmark = {ord(mark): token for token, mark in marks.items()}
        encoded = []
        for text in rendered:
            ids: list[int] = []
            for piece in re.split(f"({'|'.join(map(re.escape, longest_first))})", text):
                if piece in control:  # the template's own
                    ids.append(control[piece])
                else:
                    ids += self._plain.encode_batch([piece.translate(unmark)], add_special_tokens=False)[0].ids
            encoded.append(ids)
        return encoded

    @functools.cached_property
    def _plain(self) -> "tokenizers.Tokenizer":
        """A tokenizer that reads control tokens as text."""
        plain = type(self.tokenizer).from_str(self.tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text: with its leading space, and also if it is a part of a character."""
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """The token as OpenAI's logprobs show it: its text, or `bytes:\\xe2\\x96` for a part of a character."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
