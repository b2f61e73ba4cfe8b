"""Grammars of whole answers: reasoning, then the content that a request restricts.

The control tokens are those at which `reasoning.ReasoningStream` separates the two.
"""

from collections.abc import Sequence

from jaxpaged.grammar import Control, FreeText, OneOf, Vocabulary
from lib.grammar_texts import Text, until
from lib.harmony import Harmony
from lib.reasoning import Channels, make_splitter, read_prompt
from lib.tokenizer import Tokenizer
from lib.tool_formats import for_tools


class AnswerStart:
    """Where the answer to a prompt begins: with its content, inside reasoning, or in the header of a message.

    Attributes:
        vocabulary: the tokens.
        harmony: the messages of gpt-oss; None for other models.
    """

    def __init__(
        self, vocabulary: Vocabulary, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, splits: bool = True
    ):
        """Reads a prompt.

        Args:
            vocabulary: the tokens.
            tokenizer: has the tokens that separate reasoning and content.
            prompt_ids: the prompt.
            splits: whether the server separates the two. If not, a grammar restricts an answer from its first token.
        """
        self.vocabulary = vocabulary
        self._tokenizer, self._prompt_ids, self._splits = tokenizer, prompt_ids, splits
        self._splitter = make_splitter(tokenizer)
        if self._splitter is not None:
            read_prompt(self._splitter, prompt_ids)
        self.harmony = None
        if isinstance(self._splitter, Channels):
            self.harmony = Harmony(tokenizer, vocabulary, self._splitter)

    def token(self, mark: str) -> Control | None:
        """The control token of a mark, if it is one."""
        token = self._tokenizer.tokenizer.token_to_id(mark)
        return Control(token) if token in self.vocabulary.control_token_ids else None

    @property
    def template(self) -> str:
        """The chat template for tools."""
        return for_tools(self._tokenizer.chat_template)

    def after_reasoning(self, content: Text) -> Text:
        """An answer whose content is restricted. Raises `ValueError` if it begins with reasoning that is content."""
        if self._splitter is None:
            return content
        if not self._splits:
            if not self._splitter.is_content and not isinstance(content, FreeText):
                raise ValueError("Answers to this prompt begin with reasoning, which this server leaves in the content")
            return content
        if self.harmony is not None:
            return self.harmony.final(content)
        begin, end = self._splitter.marks
        if not self._splitter.is_content:
            return until(Control(end)), content
        if self._has_thought(end):
            return content
        return OneOf(((), (Control(begin), until(Control(end))))), content

    def _has_thought(self, end: int) -> bool:
        """Whether the prompt ends with reasoning, which templates leave empty to turn it off."""
        marked = [i for i, token in enumerate(self._prompt_ids) if token == end]
        return bool(marked) and not self._tokenizer.decode(self._prompt_ids[marked[-1] + 1 :]).strip()


def control_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that separate reasoning and content, which are not special tokens in all tokenizers."""
    splitter = make_splitter(tokenizer)
    return () if splitter is None else tuple(splitter.marks)
