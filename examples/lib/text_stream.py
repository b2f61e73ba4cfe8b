"""The text of a completion as its tokens arrive, cut at stop strings."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lib.tokenizer import Tokenizer

HALF = "\ufffd"  # what the bytes of half a character are decoded to


class TextStream:
    """Gives the text of growing tokens piece by piece. Joined, the pieces are the text of all tokens, or the text
    before the first stop string.

    Half a character, and what may be the beginning of a stop string, are kept back. New tokens are decoded together
    with the few before them, so the work grows linearly with the text. They are decoded all at once, or one by one if
    there are stop strings or `has_offsets` is True.

    Args:
        tokenizer: decodes the tokens.
        stops: the stop strings.
        prompt_ids: tokens before the text. Some decoders drop the space that a text begins with.
        skip_special_tokens: whether control tokens have no text.
        has_offsets: whether to note where tokens begin.

    Attributes:
        num_tokens: tokens taken so far. The last may hold a stop string and more.
        is_stopped: whether a stop string was found.
        offsets: where each of these tokens begins in the text; empty unless `has_offsets` is True.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        stops: Sequence[str] = (),
        *,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        has_offsets: bool = False,
    ):
        self.num_tokens, self.is_stopped = 0, False
        self.offsets: list[int] = []
        self._tokenizer, self._stops, self._has_offsets = tokenizer, stops, has_offsets
        self._skips_special = skip_special_tokens
        self._kept_back, self._half = "", ""  # whole characters, and the HALF characters behind them
        self._num_characters = 0  # whole ones
        # New tokens are decoded behind those from `_begin` on, since a decoder may treat the first one otherwise.
        # The text of those before `_end` ends with a whole character, and `_num_known` characters of it were taken.
        self._begin = self._end = self._num_known = 0

    def extend(self, token_ids: list[int], *, is_last: bool) -> str:
        """The next piece of text.

        Args:
            token_ids: all tokens so far.
            is_last: no more come, so nothing is kept back.
        """
        is_one_by_one = self._has_offsets or self._stops
        while self.num_tokens < len(token_ids) and not self.is_stopped:
            self._take(token_ids, self.num_tokens + 1 if is_one_by_one else len(token_ids))
            self._cut()
        if is_last and not self.is_stopped:
            self._kept_back += self._half
            self._cut()
        num_kept = 0 if is_last or self.is_stopped else num_kept_back(self._kept_back, self._stops)
        end = len(self._kept_back) - num_kept
        piece, self._kept_back = self._kept_back[:end], self._kept_back[end:]
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special)

    def _take(self, token_ids: list[int], end: int) -> None:
        """Decodes the tokens up to `end`; if `has_offsets` is True, only one."""
        text = self._decode(token_ids[self._begin : end])
        if text.endswith(HALF) and end > self.num_tokens + 1:
            for next_end in range(self.num_tokens + 1, end + 1):  # finds the last one that ends a character
                self._take(token_ids, next_end)
            return
        self.num_tokens = end
        if self._has_offsets:
            self.offsets.append(self._num_characters + self._num_halves_before(text[self._num_known :]))
        whole = text.rstrip(HALF)
        new, self._half = whole[self._num_known :], text[len(whole) :]
        self._kept_back += new
        self._num_characters += len(new)
        self._num_known += len(new)
        known = "" if self._half else self._decode(token_ids[self._end : end])
        if known:
            self._begin, self._end, self._num_known = self._end, end, len(known)

    def _num_halves_before(self, text: str) -> int:
        """How many of the pending `HALF` characters stay, so that the last token begins behind them.

        `text` follows the whole characters known so far. If the token completes the last half, or adds to it, it begins
        there instead.
        """
        if text == self._half:
            return max(len(text) - 1, 0)
        return min(len(self._half), len(text) - len(text.lstrip(HALF)))

    def _cut(self) -> None:
        start = first_stop(self._kept_back, self._stops)
        if start is not None:
            self.is_stopped, self._kept_back = True, self._kept_back[:start]


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string that is complete first begins. It does not depend on how the text is cut into pieces."""
    found = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def num_kept_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of the text may be the beginning of a stop string."""
    lengths = (n for stop in stops for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n]))
    return max(lengths, default=0)
