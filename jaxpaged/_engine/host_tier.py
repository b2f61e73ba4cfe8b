"""The host tier's books: which cached blocks are in host memory, and which of them are on their way to the device."""

import dataclasses
import hashlib
import itertools
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpaged._engine.host_copies import (
    MOST_PROMPTS,
    HostCopies,
    Page,
    Piece,
    Taken,
    Wanted,
    in_pages,
    page_size,
)
from jaxpaged._engine.interrupts import without_interrupts
from jaxpaged._engine.requests import Row
from jaxpaged._engine.state import Report, State
from jaxpaged._integers import checked_size

Keys = list[bytes]  # of a prompt's full blocks: each names the block's tokens and all before them


@dataclasses.dataclass
class Moves:
    """What is moved before a slice, first out and then in, and what came of it.

    Attributes:
        wanted: blocks that go out.
        batches: pieces that come in, each batch by one program.
        taken: pages of what was wanted.
        put: batches that are in, and int32 `[2, pages, blocks]`: where each block of their pages is now, and its serial
            there; 0: nowhere.
    """

    wanted: Wanted | None = None
    batches: list[list[Piece]] = dataclasses.field(default_factory=list)
    taken: list[Taken] = dataclasses.field(default_factory=list)
    put: list[tuple[list[Piece], Any]] = dataclasses.field(default_factory=list)


class NoHostTier:
    """What the engine asks of a host tier, if there is none."""

    host_bytes = num_brought = 0
    needs_looks = False  # whether slices are to be short: a request waits, or much is to be copied

    def wait(self, queue: Sequence[Row]) -> None:
        """Until what the first request waits for is on the device: nothing else can run."""

    def look_again(self) -> None:
        """Before requests are asked for, in their order: who waited for room may have it now."""

    def holds(self, row: Row, sent: Sequence[Row]) -> bool:
        """Whether a request stays on the host for now. `sent`: those on the device, or on their way."""
        return False

    def next_moves(self) -> Moves:
        """What is moved before the next slice."""
        return Moves()

    def lose(self, moves: Moves) -> None:
        """No slice has come of it."""

    def move(self, state: State, moves: Moves) -> Iterator[State]:
        """Moves it, on the engine's own thread. Each state is the next one's, to which it is donated."""
        yield state

    def take(self, report: Report, moves: Moves) -> None:
        """Notes what was moved before a slice, and what the slice has listed."""

    def clear(self) -> None:
        """Forgets what is in host memory. JAX keeps the memory for other pages."""


@dataclasses.dataclass(eq=False)
class Fetch:
    """The blocks of a prompt that come back: those from `next` to `end` have not left host memory yet."""

    row: Row
    tokens: np.ndarray  # int32 [columns, block_size]
    salt: int
    keys: Keys
    next: int
    end: int
    pieces: deque[Piece] = dataclasses.field(default_factory=deque)
    has_room: bool = False

    @property
    def is_over(self) -> bool:
        return not self.pieces and self.next == self.end

    def brings(self, column: int, key: bytes) -> bool:
        """Whether this block of a prompt is still to come."""
        begin = self.pieces[0].first if self.pieces else self.next
        return begin <= column < self.end and self.keys[column] == key


@dataclasses.dataclass(eq=False)
class Kept:
    """A page in host memory."""

    keys: Keys  # of its blocks
    before: bytes  # the key of the block before them
    salt: int
    page: Page


class HostTier(NoHostTier):
    """A block that the prefix cache lists is copied to host memory behind the slice after the one that listed it: once
    the host has read of it, and without a wait of the device. So nothing has to be moved when the prefix cache loses
    it. It comes back before a request whose prompt begins with it goes out.

    What comes back is free in the pool until its request takes it, as is what the pool still has of a prompt. So a
    request with such blocks goes out once the pool has room for it beside those before it, and those behind it wait
    meanwhile.

    The host knows what is on the device from the slices that it has read. What it takes to be there may be gone: then
    `HostCopies.put` lists nothing, and the request computes its prompt.

    Args:
        copies: move the pages.
        num_blocks: of the pool.
        block_size: tokens in a block.
        capacity: the most pages in host memory.
        least_tokens: fewer are computed again instead of copied.
        growth: the tokens that a request may have beyond those that the host has read.
        num_adapters: of the engine.
    """

    def __init__(
        self,
        copies: HostCopies,
        *,
        num_blocks: int,
        block_size: int,
        capacity: int,
        least_tokens: int,
        growth: int,
        num_adapters: int = 0,
    ):
        self._copies, self._num_blocks, self._block_size, self._capacity = copies, num_blocks, block_size, capacity
        self._least, self._growth = -(-least_tokens // block_size), growth
        self._salts = list(range(1 + num_adapters))  # as `Prefixes.salt`
        self._serials = np.zeros(num_blocks, np.int32)  # of each block of the pool, as of the slice that was read
        self._key_of: dict[int, bytes] = {}  # by serial
        self._listed: dict[bytes, int] = {}  # serials of what is on the device; 0: it was sent there
        self._pages: OrderedDict[Kept, None] = OrderedDict()  # the oldest first
        self._places: dict[bytes, tuple[Kept, int]] = {}  # the page of each block, and its index there
        self._fetches: list[Fetch] = []
        self._going: list[Piece] = []
        self._known = np.zeros(num_blocks, np.int32)  # serials of blocks that are in host memory, or wanted there
        self._wanted: Wanted | None = None
        self._is_behind = False  # more was listed than may be on its way
        # Of the requests that were asked for since `look_again`:
        self._lacks_room = False  # one has to wait for room
        self._needed: tuple[set[bytes], int] | None = None  # the full blocks of those on the device, and other blocks
        self.num_brought = 0  # tokens, so far

    @classmethod
    def create(
        cls,
        host_cache_bytes: int,
        state: State,
        mesh: Mesh | None,
        *,
        least_tokens: int,
        growth: int,
        compiler_options: dict[str, Any],
    ) -> "HostTier":
        """For an engine with this state."""
        scheduler, allocator = state.scheduler, state.allocator
        if scheduler.tokens.shape[1] < allocator.block_size:
            raise ValueError(
                f"host memory keeps full blocks, of {allocator.block_size} tokens, and no request fills one; got "
                f"max_length={scheduler.tokens.shape[1]}. Leave host_cache_bytes out."
            )
        if scheduler.prefixes is None:
            raise ValueError(
                "host memory keeps blocks of the prefix cache: pass prefix_cache=True with host_cache_bytes."
            )
        if allocator.windows != (None,):
            raise ValueError(
                f"host_cache_bytes takes one group of layers, without a window; got windows={allocator.windows}. Leave "
                "one of them out."
            )
        _, size = page_size(state.caches)
        if (capacity := checked_size("host_cache_bytes", host_cache_bytes) // size) < 1:
            raise ValueError(
                f"host_cache_bytes must hold the {size} bytes that are moved at once; got {host_cache_bytes=}."
            )
        copies = HostCopies(state, mesh, compiler_options=compiler_options)
        copies.reserve(capacity)
        return cls(
            copies,
            num_blocks=allocator.num_blocks,
            block_size=allocator.block_size,
            capacity=capacity,
            least_tokens=least_tokens,
            growth=growth,
            num_adapters=len(scheduler.prefixes.salt) - 1,
        )

    @property
    def host_bytes(self) -> int:  # type: ignore[override]
        return len(self._pages) * self._copies.page_bytes

    @property
    def needs_looks(self) -> bool:  # type: ignore[override]
        return self._lacks_room or self._is_behind or bool(self._fetches)

    @property
    def _num_staged(self) -> int:
        """Pages on the device that no slice has been given."""
        pieces = itertools.chain(self._going, *(fetch.pieces for fetch in self._fetches))
        return sum(len(piece.pages) for piece in pieces)

    def wait(self, queue: Sequence[Row]) -> None:
        with without_interrupts():
            self.look_again()
            if queue:
                self.holds(queue[0], [])
        jax.block_until_ready([piece.pages for fetch in self._fetches[:1] for piece in fetch.pieces])

    def look_again(self) -> None:
        self._lacks_room, self._needed = False, None
        self._fetches = [
            fetch
            for fetch in self._fetches
            if not fetch.row.is_aborted and fetch.salt == self._salt_of(fetch.row) and not fetch.is_over
        ]

    def holds(self, row: Row, sent: Sequence[Row]) -> bool:
        fetch = next((fetch for fetch in self._fetches if fetch.row is row), None)
        if fetch is None:
            keys = self._keys_of(row)
            num_there = _num_leading(keys, self._listed)
            if num_there < len(keys) and any(each.brings(num_there, keys[num_there]) for each in self._fetches):
                return True
            end = num_there + _num_leading(keys[num_there:], self._places)
            self._touch(reversed(keys[:end]))
            if end - num_there < self._least:
                if end >= self._least:
                    self._lacks_room = self._lacks_room or not self._has_room(row, sent)
                elif not self._lacks_room and self._needed is not None:
                    self._needed = self._with(row, *self._needed)
                return self._lacks_room
            # The pool is losing this prompt: what no request on the device holds may be lost by then, too.
            first = min(num_there, _num_leading(keys, self._others(sent)[0]))
            if not all(key in self._places for key in keys[first:end]):
                first = num_there
            tokens = row.prompt[: end * self._block_size].reshape(end, self._block_size)
            fetch = Fetch(row, tokens, self._salt_of(row), keys, first, end)
            self._fetches.append(fetch)
        if not fetch.has_room:
            fetch.has_room = not self._lacks_room and self._has_room(row, sent)
            self._lacks_room |= not fetch.has_room
        self._start()
        while fetch.has_room and fetch.pieces and fetch.pieces[0].is_there:
            piece = fetch.pieces.popleft()
            for key in piece.keys:
                self._listed.setdefault(key, 0)
            self._going.append(piece)
        if not fetch.is_over:
            return True
        self._fetches.remove(fetch)
        return not fetch.has_room

    def next_moves(self) -> Moves:
        batches: list[list[Piece]] = []
        for piece in self._going:
            last = batches[-1] if batches else []
            num_pages = sum(len(other.pages) for other in last) + len(piece.pages)
            if 0 < len(last) < MOST_PROMPTS and num_pages <= self._copies.num_pages:
                last.append(piece)  # of another prompt: only the last piece of one leaves room
            else:
                batches.append([piece])
        moves = Moves(self._wanted, batches)
        self._wanted, self._going = None, []
        return moves

    def lose(self, moves: Moves) -> None:
        if moves.wanted is not None:
            self._known[moves.wanted.ids] = 0
        for piece in itertools.chain.from_iterable(moves.batches):
            self._settle(piece, np.zeros((2, *piece.columns.shape), np.int32))

    def move(self, state: State, moves: Moves) -> Iterator[State]:
        if moves.wanted is not None:
            moves.taken = self._copies.take(state, moves.wanted)
        for batch in moves.batches:
            state, put = self._copies.put(state, batch)
            moves.put.append(put)
            yield state

    def take(self, report: Report, moves: Moves) -> None:
        assert report.serials is not None
        serials, salts = np.asarray(report.serials), np.asarray(report.salts).tolist()
        gone = self._serials[(self._serials > 0) & (self._serials != serials)]
        for serial in gone.tolist():
            if (key := self._key_of.pop(serial, None)) is not None and self._listed.get(key) == serial:
                del self._listed[key]
        self._serials = serials
        self._known[self._known != serials] = 0
        if salts != self._salts:
            self._salts = salts
            for kept in [kept for kept in self._pages if kept.salt not in salts]:
                self._drop(kept)
        for batch, where in moves.put:
            end = 0
            for piece in batch:
                begin, end = end, end + len(piece.columns)
                self._settle(piece, np.asarray(where)[:, begin:end])
        for taken in moves.taken:
            self._keep(taken)
        while len(self._pages) > self._capacity:
            self._drop(next(iter(self._pages)))
        self._want(np.asarray(report.parents))

    def clear(self) -> None:
        self._pages.clear()
        self._places.clear()
        self._fetches, self._wanted = [], None

    def _settle(self, piece: Piece, where: np.ndarray) -> None:
        """Where the blocks of a piece are now, int32 `[2, pages, blocks]`."""
        for column, place, serial in zip(*(x.ravel().tolist() for x in (piece.columns, *where)), strict=True):
            if column < 0:
                continue
            key = piece.keys[column - piece.first]
            if serial > 0 and self._serials[place] == serial:
                self.num_brought += self._block_size * (not self._listed.get(key))
                self._key_of[serial] = key
                self._listed[key] = serial
                self._known[place] = serial
            elif self._listed.get(key) == 0:
                del self._listed[key]

    def _want(self, parents: np.ndarray) -> None:
        """Asks for what was listed and is not in host memory, but for no more than may be on its way: the rest, the
        newest, is asked for again if it is there still."""
        ids = np.flatnonzero(self._serials != self._known)
        pages = in_pages(ids, self._serials, parents, self._copies.in_page)
        self._is_behind = len(pages) > self._copies.most_leaving
        pages = pages[: self._copies.most_leaving]
        if len(pages):
            self._wanted = Wanted(pages, self._serials[pages], parents[pages[:, 0]])
            self._known[pages] = self._serials[pages]

    def _keep(self, taken: Taken) -> None:
        """Pages are in host memory, as far as their blocks were not overwritten before."""
        words, wanted, ends = np.asarray(taken.words)[: len(taken.pages)], taken.wanted, []
        is_there = (words[..., -1] == wanted.serials) & (wanted.serials > 0)
        counts = np.logical_and.accumulate(is_there, axis=1).sum(axis=1)
        key_of = dict[int, bytes]()  # by serial, of these pages
        for i, count in enumerate(counts.tolist()):
            salt, parent = int(words[i, 0, -2]), int(wanted.parents[i])
            before = key_of.get(parent, self._key_of.get(parent)) if parent else _root(salt)
            if count == 0 or before is None or salt not in self._salts:
                continue
            _, *keys = itertools.accumulate(words[i, :count, :-2], _next_key, initial=before)
            for key, place, serial in zip(keys, wanted.ids[i].tolist(), wanted.serials[i].tolist(), strict=False):
                key_of[serial] = key
                if self._serials[place] == serial:
                    self._key_of[serial] = key
                    self._listed[key] = serial
            ends.append(keys[-1])
            if all(key in self._places for key in keys):
                continue
            kept = Kept(keys, before, salt, taken.pages[i])
            self._pages[kept] = None
            for index, key in enumerate(keys):
                self._places.setdefault(key, (kept, index))
        self._touch(reversed(ends))

    def _touch(self, keys: Iterable[bytes]) -> None:
        """The pages of these blocks, and of all before them, are the newest; the tail leaves before the head."""
        touched = set[Kept]()
        for key in keys:
            while (place := self._places.get(key)) is not None and place[0] not in touched:
                kept, _ = place
                touched.add(kept)
                self._pages.move_to_end(kept)
                key = kept.before

    def _drop(self, kept: Kept) -> None:
        del self._pages[kept]
        for key in kept.keys:
            if key in self._places and self._places[key][0] is kept:
                del self._places[key]

    def _start(self) -> None:
        """Begins to copy what is still to come, as far as there is room for what is on its way."""
        for fetch in self._fetches:
            # What waits for room leaves place for a piece of those that have it, which they may wait for.
            most = self._copies.most_staged - (0 if fetch.has_room else self._copies.num_pages)
            while fetch.next < fetch.end:
                columns, pages = self._pages_of(fetch)
                if self._num_staged + len(pages) > most:
                    break
                if not pages:  # they left meanwhile
                    fetch.end = fetch.next
                    break
                brought = self._copies.bring(pages)  # first: it may fail, and is asked for again then
                first, fetch.next = fetch.next, int(columns.max()) + 1
                keys = fetch.keys[first : fetch.next]
                fetch.pieces.append(Piece(fetch.tokens, fetch.salt, first, keys, columns, brought))

    def _pages_of(self, fetch: Fetch) -> tuple[np.ndarray, list[Page]]:
        """The next piece: the columns of its blocks, and their pages in host memory."""
        columns: list[list[int]] = []
        pages: list[Page] = []
        at: tuple[Kept, int] | None = None
        for column in range(fetch.next, fetch.end):
            place = self._places.get(fetch.keys[column])
            if place is None:
                break
            if at is None or place != (at[0], at[1] + 1):
                if len(pages) == self._copies.num_pages:
                    break
                columns.append([-1] * self._copies.in_page)
                pages.append(place[0].page)
            columns[-1][place[1]] = column
            at = place
        return np.array(columns, np.int32), pages

    def _has_room(self, row: Row, sent: Sequence[Row]) -> bool:
        """Whether the pool has room for a request beside the others; then it is one of them."""
        keys, num_others = self._others(sent)
        num_new = sum(key not in keys for key in self._keys_of(row)) + self._with(row, set(), 0)[1]
        has_room = num_others == 0 or len(keys) + num_others + num_new < self._num_blocks
        if has_room:
            self._needed = self._with(row, keys, num_others)
        return has_room

    def _others(self, sent: Sequence[Row]) -> tuple[set[bytes], int]:
        """What the requests need that are on the device or go there: full blocks of prompts, and how many others."""
        if self._needed is None:
            self._needed = set(), 0
            for other in (*sent, *(fetch.row for fetch in self._fetches if fetch.has_room)):
                self._needed = self._with(other, *self._needed)
        return self._needed

    def _with(self, row: Row, keys: set[bytes], num_others: int) -> tuple[set[bytes], int]:
        """The same with those of another request: one more than it fills by the end of the slices that the host has not
        read."""
        of_row = self._keys_of(row)
        keys.update(of_row)
        num_known = len(row.prompt) + min(len(row.token_ids) + self._growth, row.params.max_tokens)
        return keys, num_others + num_known // self._block_size - len(of_row) + 2

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
