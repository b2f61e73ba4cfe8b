"""The host tier's books: what is in host memory, what the device has of it, and what is on its way between them."""

import dataclasses
import hashlib
import itertools
import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence

import jax
import numpy as np

from jaxpaged._engine.host_tier.copies import HostCopies, Run
from jaxpaged._engine.requests import CompletionState
from jaxpaged._slice.host_pages import Page
from jaxpaged._slice.state import Report, State

Keys = list[bytes]  # of a prompt's full blocks: each names the block's tokens and all before them

NOWHERE = 0, 1  # a block and a serial that it never has
MOST_WANTED = 256  # runs that wait to leave; what is asked for beyond is lost


@dataclasses.dataclass
class Moves:
    """What is moved before a slice: first `out`, then `back`."""

    out: list[Run] = dataclasses.field(default_factory=list)
    back: list[Run] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class RequestNotes:
    """What the tier knows of one request.

    Attributes:
        salt: what `keys` are for; None: there are none yet.
        keys: of its full blocks.
        num_wanted: blocks that it was to copy to host memory so far.
        num_called_back: blocks that it called back to the device so far.
        failed_to_come: whether a copy to the device failed: the prompt is then computed.
    """

    salt: int | None = None
    keys: Keys = dataclasses.field(default_factory=list)
    num_wanted: int = 0
    num_called_back: int = 0
    failed_to_come: bool = False


@dataclasses.dataclass(eq=False)
class Kept:
    """A page in host memory."""

    keys: Keys  # of its blocks
    salt: int
    page: Page


class HostTier:
    """A request's blocks are copied to host memory once the host reads that it has filled a page of them, or that it
    has ended: before the next slice, without a wait of the device. So nothing has to be moved when the prefix cache
    loses them. They come back before a request whose prompt begins with them goes out.

    The device is asked only by tokens: both programs look for a prompt in its prefix cache, and say where its blocks
    are. From that, and from the serials in each report, the tier knows which of its blocks the device has.

    What comes back is free in the pool until its request takes it. So a request that may find something goes out once
    the report says that there is room for it beside all others, and those behind it wait meanwhile. A prompt that is
    longer than what may be on its way at once comes part by part, one slice after the other.

    Args:
        copies: move the pages.
        least_tokens: fewer are computed again instead of copied.
        growth: as in `ResolvedOptions`.
    """

    def __init__(self, copies: HostCopies, *, least_tokens: int, growth: int):
        self._copies, self._block_size = copies, copies.block_size
        self._least, self._growth = max(-(-least_tokens // copies.block_size), 1), growth
        # As of the slice that was read, as in `Report`:
        self._serials, self._salts = [0] * copies.num_blocks, copies.salts
        self._room = self._room_left = copies.num_blocks - 1  # left: for those that are asked for
        # Host memory: the pages, the oldest first; the page of each block, and where the device has had it.
        self._pages: OrderedDict[Kept, None] = OrderedDict()
        self._places: dict[bytes, Kept] = {}
        self._at: dict[bytes, tuple[int, int]] = {}  # the block of the pool, and its serial there
        # On the way out: what waits, and the blocks of these runs and of those under way.
        self._wanted: deque[Run] = deque()
        self._leaving: set[bytes] = set()
        # On the way back: the run of each block until a slice with it was read, and what the next slice is given.
        self._coming: dict[bytes, Run] = {}
        self._arrived: list[Run] = []
        self._notes = weakref.WeakKeyDictionary[CompletionState, RequestNotes]()
        # Since `before_send`: the pool lacks room for a request; a request waits for the copies of others.
        self._lacks_room = self._is_full = False
        self.num_brought = 0  # tokens, so far

    @property
    def host_bytes(self) -> int:
        return len(self._pages) * self._copies.page_bytes

    def wait(self) -> None:
        """Until what is on its way to the device is there: nothing else can run."""
        for run in set(self._coming.values()):
            try:
                jax.block_until_ready(run.pages)
            except Exception:
                self.lose(Moves(back=[run]))
                raise

    def before_send(self, sent: Sequence[CompletionState]) -> None:
        """Before requests are asked for, in their order. `sent`: those on the device, or on their way."""
        self._lacks_room = self._is_full = False
        self._room_left = self._room - sum(self._needed(row) for row in sent if row.place is None)
        self._settle({run for run in self._coming.values() if run.row.is_aborted or run.salt not in self._salts})

    def holds(self, row: CompletionState) -> bool:
        """Whether a request stays on the host for now."""
        if self._lacks_room and self._is_full:  # nothing more goes out, or comes
            return True
        keys = [] if self._notes_of(row).failed_to_come else self._findable(row)
        is_short = self._bring(row, keys)
        runs = dict.fromkeys(self._coming[key] for key in keys if key in self._coming)
        if is_short and not runs:  # those for whom the copies are go first: else each waits for the other
            return True
        # What comes part by part keeps its room meanwhile: nothing goes out unless there is room for both.
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
        """Begins to copy what the device lacks of a prompt. Whether some of it has to wait for other copies."""
        in_page, num_pages, notes = self._copies.in_page, self._copies.num_pages, self._notes_of(row)
        while True:
            num_held = _num_leading(key in self._coming or self._is_held(key) for key in keys)
            num_there = _num_leading(key in self._coming or self._is_there(key) for key in keys)
            end = num_there + _num_leading(key in self._places for key in keys[num_there:])
            if end - num_there < self._least:
                return False
            # The pool is losing this prompt: what no request holds may be gone by then, too. What came for this request
            # comes again only once it is gone.
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
            notes.failed_to_come = True  # unless this succeeds: an error is reported once, then the prompt is computed
            run.pages = self._copies.bring([self._places[key].page for key in last_keys])
            notes.failed_to_come = False
            self._coming = dict.fromkeys(run.moved, run) | self._coming

    def _is_there(self, key: bytes) -> bool:
        """On the device."""
        place, serial = self._at.get(key, NOWHERE)
        return abs(self._serials[place]) == serial

    def _is_held(self, key: bytes) -> bool:
        """By a request there."""
        place, serial = self._at.get(key, NOWHERE)
        return self._serials[place] == serial

    def _needed(self, row: CompletionState) -> int:
        """The blocks that a request may need beside those that others hold."""
        most = len(row.prompt) + min(self._growth, row.params.max_tokens - 1)
        return -(-most // self._block_size) - _num_leading(map(self._is_held, self._findable(row)))

    def next_moves(self) -> Moves:
        """What is moved before the next slice."""
        out: list[Run] = []
        num_pages = 0
        while self._wanted and (num_pages := num_pages + self._wanted[0].num_pages) <= self._copies.most_leaving:
            out.append(self._wanted.popleft())
        arrived, self._arrived = self._arrived, []
        return Moves(out, arrived)

    def lose(self, moves: Moves) -> None:
        """No slice has come of it."""
        self._wanted.extendleft(reversed(moves.out))
        for run in moves.back:
            self._notes_of(run.row).failed_to_come = True  # it is computed
        self._settle(moves.back)

    def run(self, state: State, moves: Moves) -> Iterator[State]:
        """Moves it, on the engine's own thread. Each state is the next one's, to which it is donated."""
        if moves.out:
            self._copies.take(state, moves.out)
        yield from self._copies.put(state, moves.back)

    def after_report(self, report: Report, moves: Moves, rows: Sequence[CompletionState]) -> None:
        """Notes what a slice says, and what was moved before it. `rows`: those that it had, or has still."""
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
        """Forgets what is in host memory. JAX keeps the memory for other pages."""
        of_pages, out, back = (
            (self._pages, self._places, self._at),
            (self._wanted, self._leaving),
            (self._coming, self._arrived),
        )
        for each in (*of_pages, *out, *back):
            each.clear()

    def _note(self, run: Run) -> None:
        """Where the device had the blocks of a prompt, if they are in host memory."""
        for key, place, serial in zip(run.keys, *np.asarray(run.where)[:, run.index].tolist(), strict=False):
            if serial and key in self._places:
                self._at[key] = place, serial

    def _settle(self, runs: Collection[Run]) -> None:
        """They are on their way no more."""
        if runs:
            self._coming = {key: run for key, run in self._coming.items() if run not in runs}

    def _want(self, row: CompletionState) -> None:
        """Asks for full pages of a request once its prompt is computed, and for the rest at its end."""
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
        """Its pages are in host memory, as far as their blocks were found."""
        self._leaving.difference_update(run.moved)
        num_found = int(np.count_nonzero(np.asarray(run.where)[0, run.index]))
        for begin, page in zip(range(run.begin, len(run.keys), self._copies.in_page), run.pages, strict=True):
            keys = run.keys[begin : min(begin + self._copies.in_page, num_found)]
            if not keys or keys[-1] in self._places or run.salt not in self._salts:
                continue
            for key in keys:
                if (old := self._places.get(key)) is not None and old.keys[-1] == key:
                    self._drop(old)  # all that it has is in the new one
            kept = Kept(keys, run.salt, page)
            self._pages[kept] = None
            self._places |= dict.fromkeys(keys, kept)
        self._touch(run.keys)

    def _touch(self, keys: Keys) -> None:
        """The pages of a prompt are the newest; its tail leaves before its head."""
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
        """int32 `[columns, block_size]`, those of these columns."""
        tokens = np.append(row.prompt, np.array(row.token_ids, np.int32))
        return tokens[begin * self._block_size : end * self._block_size].reshape(end - begin, self._block_size)

    def _findable(self, row: CompletionState) -> Keys:
        """What a request may find of its prompt."""
        most = row.span[0] - 1 if row.span[1] else len(row.prompt)
        return self._keys_of(row)[: max(min(len(row.prompt) - 1, most), 0) // self._block_size]

    def _notes_of(self, row: CompletionState) -> RequestNotes:
        return self._notes.setdefault(row, RequestNotes())

    def _keys_of(self, row: CompletionState) -> Keys:
        """Of all full blocks that it has so far."""
        salt, size, notes = self._salt_of(row), self._block_size, self._notes_of(row)
        if notes.salt != salt:
            notes.salt, notes.keys = salt, []
        keys = notes.keys
        num_full = (len(row.prompt) + len(row.token_ids)) // size
        if len(keys) < num_full:
            before = keys[-1] if keys else salt.to_bytes(8, "little")
            for block in self._tokens_of(row, len(keys), num_full):
                # 128 bits of a cryptographic hash: equal ones have equal tokens.
                before = hashlib.blake2b(before + block.tobytes(), digest_size=16).digest()
                keys.append(before)
        return keys

    def _salt_of(self, row: CompletionState) -> int:
        """Under which the prompt is looked up."""
        return self._salts[0 if row.params.adapter is None else 1 + row.params.adapter]


def _num_leading(flags: Iterable[bool]) -> int:
    return sum(1 for _ in itertools.takewhile(bool, flags))
