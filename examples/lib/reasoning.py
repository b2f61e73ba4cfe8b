"""Splits an answer into its reasoning and its content."""

from collections.abc import Sequence

from lib.text_stream import TextStream
from lib.tokenizer import Tokenizer


class ReasoningStream:
    """Gives reasoning and content of growing tokens piece by piece, as `TextStream` does for a text.

    The model's control tokens part the two: the channels of gpt-oss, <think> of Qwen3 and DeepSeek. All is content for
    other models. Stop strings apply to the content.

    Attributes:
        num_tokens: tokens read so far. The last may hold a stop string and more.
        is_stopped: whether a stop string was found.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ):
        self._content = TextStream(tokenizer, stops, prompt_ids=prompt_ids, skip_special_tokens=skip_special_tokens)
        self.num_tokens, self.is_stopped = 0, False

    def extend(self, token_ids: list[int], *, is_last: bool) -> tuple[str, str]:
        """The next piece of reasoning and of content; both may be empty.

        Args:
            token_ids: all tokens so far.
            is_last: no more come, so nothing is kept back.
        """
        content = self._content.extend(token_ids, is_last=is_last)
        self.num_tokens, self.is_stopped = self._content.num_tokens, self._content.is_stopped
        return "", content
