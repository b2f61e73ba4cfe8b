"""The names of an engine's adapters. They may change while the engine runs."""

import collections
import contextlib
from collections.abc import Iterator, Sequence


class AdapterSlots:
    """Which of the engine's adapters has which name.

    An adapter that is unloaded loses its name at once. Its slot is free when the last request that uses it has ended.

    Attributes:
        slots: the number of each named adapter in the engine.
    """

    def __init__(self, names: Sequence[str] = (), *, num_slots: int = 0):
        self.slots = {name: slot for slot, name in enumerate(names)}
        self._num_slots = max(num_slots, len(names))
        self._users: collections.Counter[int] = collections.Counter()

    @contextlib.contextmanager
    def using(self, slot: int | None) -> Iterator[None]:
        """Around a request with this adapter; None: without one."""
        if slot is None:
            yield
            return
        self._users[slot] += 1
        try:
            yield
        finally:
            self._users[slot] -= 1
