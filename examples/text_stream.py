"""The text of a completion while its tokens come, cut at stop strings."""

from collections.abc import Callable, Sequence

HALF = "\ufffd"  # what the bytes of half a character are decoded to


class TextStream:
    """Hands out the text of growing tokens piece by piece. The pieces together are the text of all tokens, or of those
    before the first stop string.

    Kept back for the time being are half a character, and what may be the beginning of a stop string.

    Attributes:
        num_tokens: those that the text is made of. The last may hold a stop string and more.
        is_stopped: whether a stop string was found.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()):
        self.num_tokens, self.is_stopped = 0, False
        self._decode, self._stops, self._num_shown = decode, stops, 0

    def extend(self, token_ids: list[int], *, is_last: bool) -> str:
        """The next piece of text.

        Args:
            token_ids: all tokens so far.
            is_last: no more come, so nothing is kept back.
        """
        if self.is_stopped:
            return ""
        text = self._decode(token_ids)
        whole = text if is_last else text.rstrip(HALF)
        place = first_stop(whole, self._stops)
        if place is not None:
            self.is_stopped = True
            counts = range(self.num_tokens + 1, len(token_ids))
            self.num_tokens = next((n for n in counts if self._has_stop(token_ids[:n])), len(token_ids))
            end = place
        else:
            self.num_tokens = len(token_ids)
            end = len(whole) if is_last else len(whole) - num_kept_back(whole, self._stops)
        piece, self._num_shown = text[self._num_shown : end], max(self._num_shown, end)
        return piece

    def _has_stop(self, token_ids: list[int]) -> bool:
        return first_stop(self._decode(token_ids).rstrip(HALF), self._stops) is not None


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string begins that is complete first: the same however the text came."""
    found = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def num_kept_back(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of the text that a stop string begins with."""
    lengths = (n for stop in stops for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n]))
    return max(lengths, default=0)
