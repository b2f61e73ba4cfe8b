"""Grammars of the messages of gpt-oss."""

from jaxpaged.grammar import Control, FreeText, OneOf, Part, Repeat, Vocabulary
from lib.grammar_texts import NOTHING, Text
from lib.reasoning import Channels
from lib.tokenizer import Tokenizer

MARKS = ("start", "channel", "message", "end", "constrain", "call")


class Harmony:
    """Messages of gpt-oss: <|start|>assistant<|channel|>analysis<|message|>the text<|end|>

    https://developers.openai.com/cookbook/articles/openai-harmony
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, channels: Channels):
        ids = {mark: tokenizer.tokenizer.token_to_id(f"<|{mark}|>") for mark in MARKS}
        start, channel, message, end, constrain, call = (
            Control(token) if token in vocabulary.control_token_ids else NOTHING for token in ids.values()
        )
        marks = sorted(channels.marks & vocabulary.control_token_ids)
        self._text = FreeText(tuple(Part(Control(mark), NOTHING) for mark in marks))  # all that a message says
        self._channel, self._message = channel, message
        self._next: tuple[Text, ...] = (end, start, "assistant")
        self._kind = OneOf(((), " json", (OneOf((" ", ())), constrain, "json")))
        self._call_end = OneOf(((), call))
        self._channels = channels

    def final(self, content: Text) -> Text:
        """Messages of reasoning, and the final message with this content."""
        channels = self._channels
        if not channels.is_in_header and channels.is_content:
            return content
        analysis = (self._channel, "analysis", self._message, self._text, *self._next)
        return self._begun((Repeat(analysis), self._channel, "final", self._kind, self._message, content))

    def calls(self, arguments: dict[str, Text], *, is_parallel: bool) -> Text:
        """Messages of any kind. `arguments`: what the functions may be called with."""
        channel = OneOf(("analysis", "commentary"))
        any_channel = OneOf(("analysis", "commentary", "final"))
        kinds: list[Text] = [(self._channel, any_channel, self._kind, self._message, self._text)]
        for name, text in arguments.items():
            recipient = f" to=functions.{name}"
            headers = OneOf(((recipient, self._channel, channel), (self._channel, channel, recipient)))
            kinds.append((headers, self._kind, self._message, text))
        if is_parallel:
            messages: Text = Repeat(OneOf(tuple(kinds)), self._next, least=1)
        else:  # the first call is the last message
            messages = (Repeat((kinds[0], self._next)), OneOf(tuple(kinds)))
        return self._begun(messages, may_end=True), self._call_end

    @property
    def any_arguments(self) -> Text:
        return self._text

    def _begun(self, messages: Text, *, may_end: bool = False) -> Text:
        """The messages after the begin of one that the prompt has. Raises `ValueError`."""
        if not self._channels.is_in_header:
            more: Text = (self._next, messages)
            return self._text, OneOf(((), more)) if may_end else more
        if self._channels.header != "assistant":
            raise ValueError("The prompt ends inside the header of a message, where no grammar can begin")
        return messages
