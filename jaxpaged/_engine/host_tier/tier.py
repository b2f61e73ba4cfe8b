"""The host tier's account: which blocks are in host memory, on the device, or in transit."""

import dataclasses
import hashlib
import itertools
import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxpaged._engine.host_tier.copies import HostCopies, Run
from jaxpaged._engine.requests import CompletionState
from jaxpaged._slice.host_pages import Page
from jaxpaged._slice.pytrees import at
from jaxpaged._slice.state import Report, State

Keys = list[bytes]  # one per full block of a prompt: a hash of the block's tokens and all tokens before them

NOWHERE = 0, 1  # the null block, with a serial number that it never has
MOST_WANTED = 256  # runs waiting to be copied to host memory; more are not kept


@dataclasses.dataclass
class Moves:
    """Runs moved before a slice: first `out`, to host memory, then `back`, to the device."""

    out: list[Run] = dataclasses.field(default_factory=list)
    back: list[Run] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class RequestNotes:
    """The tier's notes on a request.

    Attributes:
        salt: the salt of `keys`; None: there are no keys yet.
        keys: the keys of its full blocks.
        num_wanted: blocks queued for host memory so far.
        num_called_back: blocks copied back to the device so far.
        failed_to_come: whether a copy to the device failed. The prompt is then computed.
    """

    salt: int | None = None
    keys: Keys = dataclasses.field(default_factory=list)
    num_wanted: int = 0
    num_called_back: int = 0
    failed_to_come: bool = False


@dataclasses.dataclass(eq=False)
class Kept:
    """A page in host memory."""

    keys: Keys  # one per block
    salt: int
    page: Page
    aux: Any = None  # as in `Run`


class HostTier:
    """Decides which blocks are copied to host memory, and which come back.

    Out: once a report shows that a request has filled a page of blocks, or has ended, its blocks are copied to host
    memory before the next slice. The device does not wait. When the prefix cache evicts them later, nothing has to be
    moved.

    Back: before a request is sent, the blocks that its prompt begins with are copied back to the device. They are free
    blocks in the pool until the request starts. A request with such blocks is therefore not sent until the report shows
    room for it on top of all other requests; until then, later requests wait behind it. A prompt longer than the
    staging memory comes back in parts, one per slice.

    The programs find the blocks of a prompt by its tokens, in the device's prefix cache, and return their ids. With
    these, and the serial numbers in each report, the tier knows which of its blocks the device still has.

    Args:
        copies: the programs that move pages.
        least_tokens: shorter prefixes are computed again instead of copied.
        growth: as in `ResolvedOptions`.
    """

    def __init__(self, copies: HostCopies, *, least_tokens: int, growth: int):
        self._copies, self._block_size = copies, copies.block_size
        self._least, self._growth = max(-(-least_tokens // copies.block_size), 1), growth
        # As of the last report:
        self._serials, self._salts = [0] * copies.num_blocks, copies.salts
        self._room = self._room_left = copies.num_blocks - 1  # left: for the requests of the next slice
        # Host memory: the pages, the oldest first; the page of each block; and where the block is on the device.
        self._pages: OrderedDict[Kept, None] = OrderedDict()
        self._places: dict[bytes, Kept] = {}
        self._at: dict[bytes, tuple[int, int]] = {}  # block id and serial number
        # To host memory: runs that wait, and the blocks of these runs and of runs in transit.
        self._wanted: deque[Run] = deque()
        self._leaving: set[bytes] = set()
        # To the device: the run of each block, until the report of its slice is read; and runs for the next slice.
        self._coming: dict[bytes, Run] = {}
        self._arrived: list[Run] = []
        self._notes = weakref.WeakKeyDictionary[CompletionState, RequestNotes]()
        # Since `before_send`: whether the pool lacks room for a request, and whether staging memory is full.
        self._lacks_room = self._is_full = False
        self.num_brought = 0  # tokens, so far

    @property
    def host_bytes(self) -> int:
        return len(self._pages) * self._copies.page_bytes

    def wait(self) -> None:
        """Waits for copies to the device, when nothing else can run."""
        for run in set(self._coming.values()):
            try:
                jax.block_until_ready(run.pages)
            except Exception:
                self.lose(Moves(back=[run]))
                raise

    def before_send(self, sent: Sequence[CompletionState]) -> None:
        """Prepares for `holds`. `sent`: rows on the device or in flight to it."""
        self._lacks_room = self._is_full = False
        self._room_left = self._room - sum(self._needed(row) for row in sent if row.place is None)
        self._settle({run for run in self._coming.values() if run.row.is_aborted or run.salt not in self._salts})

    def holds(self, row: CompletionState) -> bool:
        """Whether a request stays on the host for now. Called for the queued requests in their order."""
        if self._lacks_room and self._is_full:  # no request can be sent, and no copy started
            return True
        keys = [] if self._notes_of(row).failed_to_come else self._findable(row)
        is_short = self._bring(row, keys)
        runs = dict.fromkeys(self._coming[key] for key in keys if key in self._coming)
        if is_short and not runs:  # the requests being copied go first: otherwise each would wait for the other
            return True
        # Blocks are reserved for a prompt that is copied back in parts: another request needs room in addition to it.
        if self._is_full or runs or _num_leading(map(self._is_there, keys)) >= self._least:
            self._lacks_room |= self._needed(row) > self._room_left
        if self._lacks_room:
            return True
        self._room_left -= self._needed(row)
        for run in runs:
            if not run.is_sent:
                if not run.is_there:
                    return True
                run.is_sent = True
                self._arrived.append(run)
        self._touch(keys)
        return is_short

    def _bring(self, row: CompletionState, keys: Keys) -> bool:
        """Starts to copy the blocks of a prompt that the device lacks. Returns whether some wait for other copies."""
        in_page, num_pages, notes = self._copies.in_page, self._copies.num_pages, self._notes_of(row)
        while True:
            num_held = _num_leading(key in self._coming or self._is_held(key) for key in keys)
            num_there = _num_leading(key in self._coming or self._is_there(key) for key in keys)
            end = num_there + _num_leading(key in self._places for key in keys[num_there:])
            if end - num_there < self._least:
                return False
            # The pool is evicting this prompt: blocks that no request holds may be gone by then. A block that was
            # copied back for this request is copied again only once it is gone.
            begin = num_held if all(key in self._places for key in keys[num_held:num_there]) else num_there
            begin = max(begin, min(notes.num_called_back, num_there))
            begin -= begin % in_page
            end = min(end, begin + num_pages * in_page)
            last_keys = [keys[min(first + in_page, end) - 1] for first in range(begin, end, in_page)]
            num_staged = sum(len(run.pages) for run in set(self._coming.values()))
            if num_staged + len(last_keys) > self._copies.most_staged:
                self._is_full = True
                return True
            self._touch(keys)
            run, notes.num_called_back = self._run(row, keys[:end], begin), max(notes.num_called_back, end)
            notes.failed_to_come = True  # until it succeeds: an error is reported once, then the prompt is computed
            pages = [self._places[key] for key in last_keys]
            run.pages = self._copies.bring([kept.page for kept in pages])
            aux = jax.tree.map(lambda *parts: np.concatenate(parts), *(kept.aux for kept in pages))
            run.aux = at(slice(end - begin), aux)
            notes.failed_to_come = False
            self._coming = dict.fromkeys(run.moved, run) | self._coming

    def _is_there(self, key: bytes) -> bool:
        """Whether the device has this block."""
        place, serial = self._at.get(key, NOWHERE)
        return abs(self._serials[place]) == serial

    def _is_held(self, key: bytes) -> bool:
        """Whether a request on the device holds this block."""
        place, serial = self._at.get(key, NOWHERE)
        return self._serials[place] == serial

    def _needed(self, row: CompletionState) -> int:
        """Blocks that a request may need in addition to those that others hold."""
        most = len(row.prompt) + min(self._growth, row.params.max_tokens - 1)
        return -(-most // self._block_size) - _num_leading(map(self._is_held, self._findable(row)))

    def next_moves(self) -> Moves:
        """The moves before the next slice."""
        out: list[Run] = []
        num_pages = 0
        while self._wanted and (num_pages := num_pages + self._wanted[0].num_pages) <= self._copies.most_leaving:
            out.append(self._wanted.popleft())
        arrived, self._arrived = self._arrived, []
        return Moves(out, arrived)

    def lose(self, moves: Moves) -> None:
        """Undoes `next_moves` after a failure."""
        self._wanted.extendleft(reversed(moves.out))
        for run in moves.back:
            self._notes_of(run.row).failed_to_come = True  # the prompt is computed
        self._settle(moves.back)

    def run(self, state: State, moves: Moves) -> Iterator[State]:
        """Moves pages, on the engine's thread. Yields new states; each is donated to the next move."""
        if moves.out:
            self._copies.take(state, moves.out)
        yield from self._copies.put(state, moves.back)

    def after_report(self, report: Report, moves: Moves, rows: Sequence[CompletionState]) -> None:
        """Enters a report and the moves before its slice. `rows`: the rows that were on the device in it."""
        assert report.serials is not None
        reported = report.serials, report.salts, report.room
        self._serials, self._salts, self._room = (np.asarray(each).tolist() for each in reported)
        for kept in [kept for kept in self._pages if kept.salt not in self._salts]:
            self._drop(kept)
        for run in moves.back:
            new = [key for key in run.moved if not self._is_there(key)]
            self._note(run)
            self.num_brought += self._block_size * sum(map(self._is_there, new))
        self._settle(moves.back)
        for run in moves.out:
            self._keep(run)
            self._note(run)
        while len(self._pages) > self._copies.capacity:
            self._drop(next(iter(self._pages)))
        for row in rows:
            self._want(row)

    def clear(self) -> None:
        """Discards all pages in host memory. JAX keeps the memory for other pages."""
        of_pages, out, back = (
            (self._pages, self._places, self._at),
            (self._wanted, self._leaving),
            (self._coming, self._arrived),
        )
        for each in (*of_pages, *out, *back):
            each.clear()

    def _note(self, run: Run) -> None:
        """Notes where the device has the blocks of a run that are in host memory."""
        for key, place, serial in zip(run.keys, *np.asarray(run.where)[:, run.index].tolist(), strict=False):
            if serial and key in self._places:
                self._at[key] = place, serial

    def _settle(self, runs: Collection[Run]) -> None:
        """Ends the transit of runs to the device."""
        if runs:
            self._coming = {key: run for key, run in self._coming.items() if run not in runs}

    def _want(self, row: CompletionState) -> None:
        """Queues full pages of a request for host memory once its prompt is computed, and the rest at its end."""
        has_ended, in_page, num_pages = row.finish_reason is not None, self._copies.in_page, self._copies.num_pages
        end = (len(row.prompt) + len(row.token_ids) - 1) // self._block_size  # the last token is not computed
        if not has_ended:
            end = end // in_page * in_page if row.token_ids else 0
        notes = self._notes_of(row)
        if (end <= notes.num_wanted and not has_ended) or len(self._wanted) >= MOST_WANTED:
            return
        keys, notes.num_wanted = self._keys_of(row)[:end], end
        begin = _num_leading(key in self._places or key in self._leaving for key in keys)
        self._leaving.update(keys[begin:])
        for first in range(begin // in_page * in_page, end if begin < end else 0, num_pages * in_page):
            self._wanted.append(self._run(row, keys[: first + num_pages * in_page], first))

    def _keep(self, run: Run) -> None:
        """Enters the pages of a run that was copied to host memory, as far as the device had its blocks."""
        self._leaving.difference_update(run.moved)
        num_found = int(np.count_nonzero(np.asarray(run.where)[0, run.index]))
        for begin, page in zip(range(run.begin, len(run.keys), self._copies.in_page), run.pages, strict=True):
            keys = run.keys[begin : min(begin + self._copies.in_page, num_found)]
            if not keys or keys[-1] in self._places or run.salt not in self._salts:
                continue
            for key in keys:
                if (old := self._places.get(key)) is not None and old.keys[-1] == key:
                    self._drop(old)  # the new page has all of its blocks
            index = slice(begin - run.begin, begin - run.begin + len(keys))
            kept = Kept(keys, run.salt, page, at(index, run.aux))
            self._pages[kept] = None
            self._places |= dict.fromkeys(keys, kept)
        self._touch(run.keys)

    def _touch(self, keys: Keys) -> None:
        """Makes the pages of a prompt the newest. Its tail is evicted before its head."""
        for key in reversed(keys):
            if key in self._places:
                self._pages.move_to_end(self._places[key])

    def _drop(self, kept: Kept) -> None:
        del self._pages[kept]
        for key in kept.keys:
            if self._places.get(key) is kept:
                del self._places[key]
                self._at.pop(key, None)

    def _run(self, row: CompletionState, keys: Keys, begin: int) -> Run:
        tokens = self._tokens_of(row, 0, len(keys))
        num_pages = -(-(len(keys) - begin) // self._copies.in_page)
        return Run(row, self._salt_of(row), tokens, keys, begin, num_pages)

    def _tokens_of(self, row: CompletionState, begin: int, end: int) -> np.ndarray:
        """The tokens of these blocks, int32 `[columns, block_size]`."""
        tokens = np.append(row.prompt, np.array(row.token_ids, np.int32))
        return tokens[begin * self._block_size : end * self._block_size].reshape(end - begin, self._block_size)

    def _findable(self, row: CompletionState) -> Keys:
        """Keys of the blocks that a request may reuse."""
        most = row.span[0] - 1 if row.span[1] else len(row.prompt)
        return self._keys_of(row)[: max(min(len(row.prompt) - 1, most), 0) // self._block_size]

    def _notes_of(self, row: CompletionState) -> RequestNotes:
        return self._notes.setdefault(row, RequestNotes())

    def _keys_of(self, row: CompletionState) -> Keys:
        """Keys of the full blocks of a request so far."""
        salt, size, notes = self._salt_of(row), self._block_size, self._notes_of(row)
        if notes.salt != salt:
            notes.salt, notes.keys = salt, []
        keys = notes.keys
        num_full = (len(row.prompt) + len(row.token_ids)) // size
        if len(keys) < num_full:
            before = keys[-1] if keys else salt.to_bytes(8, "little")
            for block in self._tokens_of(row, len(keys), num_full):
                # 128 bits of a cryptographic hash: equal keys mean equal tokens.
                before = hashlib.blake2b(before + block.tobytes(), digest_size=16).digest()
                keys.append(before)
        return keys

    def _salt_of(self, row: CompletionState) -> int:
        """The salt of a request's adapter."""
        return self._salts[0 if row.params.adapter is None else 1 + row.params.adapter]


def _num_leading(flags: Iterable[bool]) -> int:
    return sum(1 for _ in itertools.takewhile(bool, flags))
