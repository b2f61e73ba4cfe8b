"""The names of an engine's adapters. They may change while the engine runs."""

import asyncio
import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lib.api_error import ApiError


class AdapterSlots:
    """Which of the engine's adapters has which name.

    An adapter that is unloaded loses its name at once. Its slot is free when the last request that uses it has ended.

    Args:
        names: of the first adapters.
        num_empty: slots after these.
        write: returns the engine's weights with other factors in a slot.

    Attributes:
        slots: the number of each named adapter in the engine.
        lock: held while a slot is written: each write begins with all weights of the one before.
    """

    def __init__(
        self,
        names: Sequence[str] = (),
        *,
        num_empty: int = 0,
        write: Callable[[int, Any], Any] | None = None,
    ):
        self.slots = {name: slot for slot, name in enumerate(names)}
        self.write, self.lock = write, asyncio.Lock()
        self._num_slots = len(names) + num_empty
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

    def find_free(self) -> int:
        """A slot that no request uses. Raises `ApiError`."""
        unnamed = set(range(self._num_slots)) - set(self.slots.values())
        if not unnamed:
            message = f"All {self._num_slots} adapters are loaded: unload one, or start the server with more "
            raise ApiError(400, f"{message}--runtime-adapters.", param="lora_name")
        for slot in unnamed:
            if not self._users[slot]:
                return slot
        message = "Requests still use the adapters that were unloaded; try again soon."
        raise ApiError(503, message, code="overloaded", retry_after=1)
