"""Chooses an engine for each request, if there are several.

The engine with the most free seats is chosen, among those that have blocks for the prompt. A prefix cache is only
useful on the engine that has computed the prefix. So a request goes to the engine that last got the same first blocks,
unless it is full or much fuller than another.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxpaged import EngineStats

MOST_PREFIXES = 2**15  # remembered at once, about 5 MB
SLACK = 8  # affinity ends if another engine has more free seats, by more than this part of all seats


class Room(NamedTuple):
    """Room of one engine.

    Attributes:
        num_seats: completions that run at once.
        num_free: free seats; below 0 if completions wait.
        num_blocks: free blocks.
    """

    num_seats: int
    num_free: int
    num_blocks: int

    @classmethod
    def of(cls, stats: EngineStats, num_sent: int) -> "Room":
        """`num_sent`: unfinished completions that were sent to the engine. Its own counts are a slice old."""
        return cls(stats.max_num_seqs, stats.max_num_seqs - num_sent, stats.num_free_blocks)


class Router:
    """Chooses engines, and remembers the beginnings of their prompts.

    Args:
        block_size: tokens of a block.
        has_affinity: whether equal beginnings go to the same engine. It is useful only with a prefix cache.
    """

    def __init__(self, block_size: int = 16, *, has_affinity: bool = False):
        self._block_size, self._has_affinity = block_size, has_affinity
        self._engines: collections.OrderedDict[int, int] = collections.OrderedDict()  # by prefix, oldest first
        self._num_chosen = 0
        self._last_chosen: dict[int, int] = {}  # the time of each engine's last request, in requests

    def choose(self, prompt: Sequence[int], adapter: int | None, rooms: Mapping[int, Room]) -> int:
        """Returns the engine for a request, a key of `rooms`."""
        prefixes = list(self._prefixes(prompt, adapter)) if self._has_affinity else []
        num_blocks = -(-len(prompt) // self._block_size)
        fitting = {engine: room for engine, room in rooms.items() if room.num_blocks >= num_blocks}
        # Equal engines take turns, so that all caches are used.
        engine = max(fitting or rooms, key=lambda i: (rooms[i].num_free, -self._last_chosen.get(i, -1)))
        last = next((self._engines[prefix] for prefix in reversed(prefixes) if prefix in self._engines), engine)
        if last in fitting and rooms[last].num_free > 0:
            slack = max(rooms[last].num_seats // SLACK, 1)
            if rooms[engine].num_free - rooms[last].num_free <= slack:
                engine = last
        self._last_chosen[engine], self._num_chosen = self._num_chosen, self._num_chosen + 1
        self._remember(prefixes, engine)
        return engine

    def _prefixes(self, prompt: Sequence[int], adapter: int | None) -> Iterator[int]:
        """Hashes of the first 1, 2, 4, ... full blocks. Long ones tell conversations with a common start apart."""
        prefix, start, end = hash(adapter), 0, self._block_size
        while end <= len(prompt):
            prefix = hash((prefix, *prompt[start:end]))
            yield prefix
            start, end = end, 2 * end

    def _remember(self, prefixes: list[int], engine: int) -> None:
        for prefix in prefixes:
            self._engines[prefix] = engine
            self._engines.move_to_end(prefix)
        while len(self._engines) > MOST_PREFIXES:
            self._engines.popitem(last=False)
