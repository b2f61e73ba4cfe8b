"""Assigns names to an engine's adapter slots. The assignment may change while the engine runs."""

import asyncio
import collections
import contextlib
from collections.abc import Iterator, Sequence

from lib.api_error import ApiError


class AdapterSlots:
    """The adapter slots of an engine by name.

    An unloaded adapter loses its name at once. Its slot becomes free when the last request that uses it has ended.

    Args:
        names: names of the adapters in the first slots.
        num_empty: number of empty slots after these.

    Attributes:
        slots: slot of each named adapter.
        lock: held while an adapter is loaded, because each write starts from the weights of the previous one.
    """

    def __init__(self, names: Sequence[str] = (), *, num_empty: int = 0):
        self.slots = {name: slot for slot, name in enumerate(names)}
        self.num_empty, self.lock = num_empty, asyncio.Lock()
        self._num_slots = len(names) + num_empty
        self._users: collections.Counter[int] = collections.Counter()

    @contextlib.contextmanager
    def using(self, slot: int | None) -> Iterator[None]:
        """Marks the slot as in use during a request. None: the request uses no adapter."""
        if slot is None:
            yield
            return
        self._users[slot] += 1
        try:
            yield
        finally:
            self._users[slot] -= 1

    def find_free(self) -> int:
        """Returns a slot without a name that no request uses. Raises `ApiError`."""
        unnamed = set(range(self._num_slots)) - set(self.slots.values())
        if not unnamed:
            message = f"All {self._num_slots} adapters are loaded: unload one, or start the server with more "
            raise ApiError(400, f"{message}--runtime-adapters.", param="lora_name")
        for slot in unnamed:
            if not self._users[slot]:
                return slot
        message = "Requests still use the adapters that were unloaded; try again soon."
        raise ApiError(503, message, code="overloaded", retry_after=1)
