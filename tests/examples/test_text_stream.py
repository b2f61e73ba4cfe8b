"""examples/lib/text_stream.py: pieces join to the text, end at stop strings, and have the offsets of tokens."""

import numpy as np
import pytest

from lib.text_stream import TextStream


@pytest.mark.parametrize(
    ("tokens", "stops", "expected", "offsets"),
    [
        (["he", "llo wor", "ld"], ["o w"], "hell", [0, 2]),  # inside a token
        (["ab", "c", "d"], ["abcd", "bc"], "a", [0, 2]),  # the stop string that completes first, in any order
        (["abcd"], ["abcd", "bc"], "a", [0]),
        (["a", "b", "x"], ["abc"], "abx", [0, 1, 2]),  # only the start of a stop string
        (["a", "b"], ["abc"], "ab", [0, 1]),
        (["x", "a", "bc"], ["ab"], "x", [0, 1, 2]),  # a stop string in two tokens
        ([b"\xe2", b"\x82", b"\xac", b"\xe2"], [], "\u20ac\ufffd", [0, 0, 0, 1]),
        ([b"\xe2\x82", b"\xacy"], ["\u20ac"], "", [0, 0]),
        ([b"\xff", b"\xff", "a"], [], "\ufffd\ufffda", [0, 1, 2]),
        ([b"\xe2", b"\x82", "a", b"\xe2\x82", b"\xacb", "c"], [], "\ufffda\u20acbc", [0, 0, 1, 2, 2, 4]),
        ([b"a\xff\xe2", b"\x82", b"\xac", "b"], [], "a\ufffd\u20acb", [0, 2, 2, 3]),
    ],
)
@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("at_once", [1, 2, 9])
def test_pieces_join_to_the_text_before_the_stop(tokens, stops, expected, offsets, at_once, has_offsets):
    data = [token if isinstance(token, bytes) else token.encode() for token in tokens]
    stream = TextStream(Bytes(data), stops, has_offsets=has_offsets)
    ids, shown = list(range(len(data))), ""
    for end in [*range(at_once, len(ids), at_once), len(ids)]:
        shown += stream.extend(ids[:end], is_last=end == len(ids))
        assert expected.startswith(shown)
    assert shown == expected
    assert stream.num_tokens == len(offsets)
    assert stream.is_stopped == (stops != [] and expected not in ("abx", "ab"))
    assert stream.offsets == (offsets if has_offsets else [])


class Bytes:
    """A tokenizer of these tokens that counts how many it decodes."""

    def __init__(self, data: list[bytes], special: tuple[int, ...] = ()):
        self.data, self.special_ids, self.num_asked = data, frozenset(special), 0

    def bytes_of(self, token_id):
        self.num_asked += 1
        return self.data[token_id], self.data[token_id].removeprefix(b" ")


@pytest.mark.parametrize("has_offsets", [False, True])
def test_a_long_text_is_decoded_once_in_all(has_offsets):
    rng = np.random.default_rng(0)
    # Like SentencePiece's decoders, without the leading space; 0 is a control token.
    pieces = ["<s>", *(rng.choice([" ", ""]) + chr(0x20AC + i) for i in range(40))]
    tokenizer = Bytes([piece.encode() for piece in pieces], special=(0,))

    def decode(ids):
        return "".join(pieces[i] for i in ids if i).removeprefix(" ")

    ids, shown = rng.integers(0, len(pieces), 2000).tolist(), ""
    stream = TextStream(tokenizer, has_offsets=has_offsets)
    for end in range(8, 2001, 8):
        shown += stream.extend(ids[:end], is_last=end == 2000)
    assert tokenizer.num_asked == len([i for i in ids if i])
    assert shown == decode(ids)
    assert not has_offsets or stream.offsets[-8:] == [len(decode(ids[:i])) for i in range(1992, 2000)]


def test_slices_that_all_end_within_a_character_are_decoded_once():
    data = "a\u00e9".encode() + "\U0001f319".encode() * 100
    tokenizer = Bytes([bytes([byte]) for byte in data])
    stream, ids = TextStream(tokenizer), list(range(len(data)))
    pieces = [stream.extend(ids[:end], is_last=end >= len(ids)) for end in range(8, len(ids) + 8, 8)]
    assert "".join(pieces).encode() == data
    assert tokenizer.num_asked == len(ids)
