"""Keeps the latest responses of /v1/responses, for requests that continue one or refer to one of its items."""

import collections
import dataclasses
import json
from typing import Any

MOST_RESPONSES, MOST_BYTES = 1000, 64 * 10**6

Item = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Stored:
    """A response, and all items of its conversation, its own last.

    Attributes:
        num_bytes: size of the response and of the items before it, as JSON. Conversations share items, and each counts
            them: an item stays in memory as long as a later response has it.
    """

    response: dict[str, Any]
    conversation: list[Item]
    num_bytes: int


class ResponseStore:
    """The latest responses by id, in memory. The oldest make room for new ones."""

    def __init__(self, most_responses: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES):
        self._most_responses, self._most_bytes, self._num_bytes = most_responses, most_bytes, 0
        self._stored: collections.OrderedDict[str, Stored] = collections.OrderedDict()
        self._items: dict[str, Item] = {}  # items of the responses by id

    def add(self, response: dict[str, Any], earlier: list[Item], new: list[Item]) -> None:
        """Adds a response. `earlier` and `new` are the items before it, of stored responses and of its request."""
        output = response["output"]
        before = [*earlier, *new]
        num_bytes = len(json.dumps(response)) + len(json.dumps(before))
        self._stored[response["id"]] = Stored(response, [*before, *output], num_bytes)
        self._items |= {item["id"]: item for item in output}
        self._num_bytes += num_bytes
        while self._num_bytes > self._most_bytes or len(self._stored) > self._most_responses:
            self.remove(next(iter(self._stored)))

    def get(self, response_id: str) -> Stored | None:
        return self._stored.get(response_id)

    def find_item(self, item_id: str) -> Item | None:
        return self._items.get(item_id)

    def remove(self, response_id: str) -> bool:
        """Returns whether there was one."""
        stored = self._stored.pop(response_id, None)
        if stored is None:
            return False
        self._num_bytes -= stored.num_bytes
        for item in stored.response["output"]:
            del self._items[item["id"]]
        return True
