"""Decodes a completion's text as its tokens arrive, and cuts it at stop strings."""

import codecs
import itertools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lib.tokenizer import Tokenizer

HALF = "\ufffd"  # replaces invalid bytes
MOST_PENDING = 3  # maximum bytes of an incomplete character


class TextStream:
    """Returns the text of a growing list of tokens, piece by piece.

    Joined, the pieces are the text of all tokens, or the text before the first stop string, however the tokens arrive.
    The text is the tokens' bytes, decoded as UTF-8. Incomplete characters, and characters that may begin a stop string,
    are held back. A character that starts in the prompt and ends in these tokens is part of the text.

    Args:
        tokenizer: tokenizer that gives the bytes of each token.
        stops: the stop strings.
        prompt_ids: tokens before the text. Without them, some tokenizers drop a leading space.
        skip_special_tokens: whether to leave out the text of control tokens.
        shown_ids: control tokens that are not left out.
        includes_stop: whether the text includes the stop string.
        has_offsets: whether to record where tokens start.

    Attributes:
        num_tokens: number of tokens read so far. The last may contain a stop string and more.
        is_stopped: whether a stop string was found.
        offsets: where each of these tokens starts in the text; empty unless `has_offsets` is True. A token that
            completes a character starts where the character does.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        stops: Sequence[str] = (),
        *,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown_ids: Collection[int] = (),
        includes_stop: bool = False,
        has_offsets: bool = False,
    ):
        self.num_tokens, self.is_stopped = 0, False
        self.offsets: list[int] = []
        self._tokenizer, self._stops, self._has_offsets = tokenizer, stops, has_offsets
        self._skipped = tokenizer.special_ids.difference(shown_ids) if skip_special_tokens else frozenset[int]()
        self._includes_stop = includes_stop
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._kept_back, self._num_characters = "", 0
        self._is_first = True
        self._read_prompt(prompt_ids)

    def extend(self, token_ids: Sequence[int], *, is_last: bool) -> str:
        """The next piece of text.

        Args:
            token_ids: all tokens so far.
            is_last: whether these are all tokens, so that nothing is held back.
        """
        is_one_by_one = self._has_offsets or self._stops
        while self.num_tokens < len(token_ids) and not self.is_stopped:
            end = self.num_tokens + 1 if is_one_by_one else len(token_ids)
            data = b"".join(map(self._next_bytes, token_ids[self.num_tokens : end]))
            self.num_tokens = end
            if self._has_offsets:
                self.offsets.append(self._num_characters + self._ends_a_half(data))
            self._add(self._utf8.decode(data))
        if is_last and not self.is_stopped:
            self._add(self._utf8.decode(b"", final=True))
        num_kept = 0 if is_last or self.is_stopped else num_kept_back(self._kept_back, self._stops)
        end = len(self._kept_back) - num_kept
        piece, self._kept_back = self._kept_back[:end], self._kept_back[end:]
        return piece

    def _read_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Puts the bytes of the prompt's incomplete last character into the decoder."""
        last_first = (token_id for token_id in reversed(prompt_ids) if token_id not in self._skipped)
        ending = list(itertools.islice(last_first, MOST_PENDING))[::-1]
        self._utf8.decode(b"".join(map(self._next_bytes, ending)))

    def _next_bytes(self, token_id: int) -> bytes:
        if token_id in self._skipped:
            return b""
        within, at_start = self._tokenizer.bytes_of(token_id)
        data = at_start if self._is_first else within
        self._is_first = False
        return data

    def _ends_a_half(self, data: bytes) -> bool:
        """Whether an incomplete character stays incomplete because these bytes do not continue it."""
        pending, _ = self._utf8.getstate()
        if not pending or not data:
            return False
        return (pending + data).decode(errors="replace") == HALF + data.decode(errors="replace")

    def _add(self, text: str) -> None:
        self._num_characters += len(text)
        self._kept_back += text
        cut = first_stop(self._kept_back, self._stops, includes_stop=self._includes_stop) if text else None
        if cut is not None:
            self.is_stopped, self._kept_back = True, self._kept_back[:cut]


def first_stop(text: str, stops: Sequence[str], *, includes_stop: bool = False) -> int | None:
    """Position of the stop string that is completed first: its start, or its end if `includes_stop` is set. None: no
    stop string."""
    found = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    return min(found)[0 if includes_stop else 1] if found else None


def num_kept_back(text: str, stops: Sequence[str]) -> int:
    """Number of characters at the end of the text that may begin a stop string."""
    lengths = (n for stop in stops for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n]))
    return max(lengths, default=0)
