"""The host tier's books: which cached blocks are in host memory, and which of them are on their way to the device."""

import dataclasses
import hashlib
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Sequence

import jax
import numpy as np

from jaxpaged._engine.host_copies import Block, Moved, Piece
from jaxpaged._engine.requests import Row

Keys = list[bytes]  # of a prompt's full blocks: each names the block's tokens and all before them


@dataclasses.dataclass
class Fetch:
    """The blocks of a prompt that come back: those from `next` to `end` have not left host memory yet."""

    tokens: np.ndarray  # int32 [columns, block_size]
    salt: int
    keys: Keys
    next: int
    end: int
    pieces: deque[Piece] = dataclasses.field(default_factory=deque)


class HostTier:
    """A block that the prefix cache lists is copied to host memory after the slice that listed it. So nothing has to be
    moved when the prefix cache loses it. It comes back before a request whose prompt begins with it goes out.

    The host knows what is on the device from the slices that it has read. What it takes to be there may be gone: then
    `put_in` lists nothing, and the request computes its prompt.

    Args:
        num_blocks: of the pool.
        block_size: tokens in a block.
        capacity: the most blocks in host memory.
        least_tokens: fewer are computed again instead of copied.
        at_once: the most blocks of a piece.
        most_staged: the most blocks on their way to the device.
        num_adapters: of the engine.
        bring: begins to copy blocks to the device.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        capacity: int,
        least_tokens: int,
        at_once: int,
        most_staged: int,
        num_adapters: int = 0,
        bring: Callable[[list[Block]], list[Block]],
    ):
        self._block_size, self._capacity, self._least = block_size, capacity, -(-least_tokens // block_size)
        self._at_once, self._most_staged, self._bring = at_once, most_staged, bring
        self._salts = list(range(1 + num_adapters))  # as `Prefixes.salt`
        self._serials = np.zeros(num_blocks, np.int32)  # of each block of the pool, as of the slice that was read
        self._key_of: dict[int, bytes] = {}  # by serial
        self._listed: dict[bytes, int] = {}  # serials of what is on the device; 0: it was sent there
        self._kept: OrderedDict[bytes, tuple[int, bytes, Block]] = OrderedDict()  # salt and parent; the oldest first
        self._fetches: list[Fetch] = []
        self._coming: set[bytes] = set()  # of the fetches
        self._num_staged = 0
        self.num_brought = 0  # tokens, so far

    @property
    def num_kept(self) -> int:
        """Blocks in host memory."""
        return len(self._kept)

    @property
    def num_fetches(self) -> int:
        """Prompts whose blocks are on their way."""
        return len(self._fetches)

    def holds(self, row: Row) -> bool:
        """Whether a request waits for blocks of its prompt, which are on their way, or are sent on it now."""
        keys = self._keys_of(row)
        num_there = _num_leading(keys, self._listed)
        if num_there < len(keys) and keys[num_there] in self._coming:
            return True
        end = num_there + _num_leading(keys[num_there:], self._kept)
        for key in reversed(keys[:end]):  # so that the tail leaves before the head
            if key in self._kept:
                self._kept.move_to_end(key)
        if end - num_there < self._least:
            return False
        tokens = row.prompt[: end * self._block_size].reshape(end, self._block_size)
        self._fetches.append(Fetch(tokens, self._salt_of(row), keys, num_there, end))
        self._coming.update(keys[num_there:end])
        self._start()
        return True

    def take_arrived(self) -> list[Piece]:
        """The pieces that are on the device, to be listed before the next slice."""
        arrived: list[Piece] = []
        for fetch in self._fetches:
            while fetch.pieces and fetch.pieces[0].is_there:
                arrived.append(fetch.pieces.popleft())
        for piece in arrived:
            self._coming.difference_update(piece.keys)
            self._listed |= {key: self._listed.get(key, 0) for key in piece.keys}
        self._start()
        self._fetches = [fetch for fetch in self._fetches if fetch.pieces or fetch.next < fetch.end]
        return arrived

    def wait(self) -> None:
        """Until the first piece is there."""
        jax.block_until_ready([fetch.pieces[0].blocks for fetch in self._fetches[:1] if fetch.pieces])

    def take(self, moved: Moved) -> None:
        """What was moved before and after a slice."""
        gone = self._serials[(self._serials > 0) & (self._serials != moved.serials)]
        for serial in gone.tolist():
            if (key := self._key_of.pop(serial, None)) is not None and self._listed.get(key) == serial:
                del self._listed[key]
        self._serials = moved.serials
        if moved.salts != self._salts:
            self._salts = moved.salts
            self._kept = OrderedDict((k, entry) for k, entry in self._kept.items() if entry[0] in self._salts)
        for piece, ids, serials in moved.put:
            self._settle(piece.keys, ids, serials)
        self._keep(moved)

    def lose(self, pieces: Iterable[Piece]) -> None:
        """Pieces that no slice has listed."""
        for piece in pieces:
            nothing = np.zeros(len(piece.keys), np.int32)
            self._settle(piece.keys, nothing, nothing)

    def clear(self) -> None:
        """Gives the host memory back."""
        self._kept.clear()
        self._num_staged -= sum(len(piece.keys) for fetch in self._fetches for piece in fetch.pieces)
        self._fetches, self._coming = [], set()

    def _settle(self, keys: Keys, ids: np.ndarray, serials: np.ndarray) -> None:
        """Where the blocks of a piece are now."""
        self._num_staged -= len(keys)
        for key, place, serial in zip(keys, ids.tolist(), serials.tolist(), strict=False):
            if serial > 0 and self._serials[place] == serial:
                self._key_of[serial] = key
                self._listed[key] = serial
                self.num_brought += self._block_size
            elif self._listed.get(key) == 0:
                del self._listed[key]

    def _keep(self, moved: Moved) -> None:
        new: list[bytes] = []
        for tokens, serial, parent, salt, block in sorted(moved.taken, key=lambda taken: taken[1]):  # parents first
            if salt not in self._salts:
                continue
            before = self._key_of.get(parent) if parent else _root(salt)
            if before is None:  # it was lost within the slice that listed it
                continue
            key = _next_key(before, tokens)
            self._key_of[serial] = key
            self._listed[key] = serial
            if key not in self._kept:
                self._kept[key] = salt, before, block
            new.append(key)
        touched: set[bytes] = set()
        for key in reversed(new):  # and then all before it, so that the tail leaves before the head
            while key in self._kept and key not in touched:
                touched.add(key)
                self._kept.move_to_end(key)
                key = self._kept[key][1]
        while len(self._kept) > self._capacity:
            self._kept.popitem(last=False)

    def _start(self) -> None:
        for fetch in self._fetches:
            while fetch.next < fetch.end and self._num_staged + self._at_once <= self._most_staged:
                keys = fetch.keys[fetch.next : min(fetch.next + self._at_once, fetch.end)]
                keys = keys[: _num_leading(keys, self._kept)]
                if not keys:  # they left meanwhile
                    self._coming.difference_update(fetch.keys[fetch.next : fetch.end])
                    fetch.end = fetch.next
                    break
                blocks = self._bring([self._kept[key][2] for key in keys])
                fetch.pieces.append(Piece(fetch.tokens, fetch.salt, fetch.next, keys, blocks))
                fetch.next += len(keys)
                self._num_staged += len(keys)

    def _keys_of(self, row: Row) -> Keys:
        salt = self._salt_of(row)
        if row.keys is None or row.keys[0] != salt:
            most = row.span[0] - 1 if row.span[1] else len(row.prompt)
            num_full = max(min(len(row.prompt) - 1, most), 0) // self._block_size
            blocks = row.prompt[: num_full * self._block_size].reshape(num_full, self._block_size)
            _, *keys = itertools.accumulate(blocks, _next_key, initial=_root(salt))
            row.keys = salt, keys
        return row.keys[1]

    def _salt_of(self, row: Row) -> int:
        """Under which the prompt is looked up."""
        return self._salts[0 if row.params.adapter is None else 1 + row.params.adapter]


def _root(salt: int) -> bytes:
    return salt.to_bytes(8, "little")


def _next_key(before: bytes, tokens: np.ndarray) -> bytes:
    """128 bits of a cryptographic hash: equal ones have equal tokens."""
    return hashlib.blake2b(before + tokens.tobytes(), digest_size=16).digest()


def _num_leading(keys: Sequence[bytes], known: Container[bytes]) -> int:
    return next((i for i, key in enumerate(keys) if key not in known), len(keys))
