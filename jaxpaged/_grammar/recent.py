"""The most recent grammars of a vocabulary."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from jaxpaged._grammar.records import Grammar


class RecentGrammars:
    """Grammars by what they were compiled from, at most `max_bytes` of them: the least recently used go first.

    Threads that need the same grammar at once may compile it twice; both get the one that was stored first.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._grammars: OrderedDict[Hashable, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._grammars)

    def get(self, key: Hashable, compile_grammar: Callable[[], Grammar]) -> Grammar:
        """The grammar of a key, compiled if it is not among the recent ones."""
        with self._lock:
            if (grammar := self._grammars.get(key)) is not None:
                self._grammars.move_to_end(key)
                return grammar
        compiled = compile_grammar()  # without the lock: seconds
        with self._lock:
            grammar = self._grammars.setdefault(key, compiled)
            if grammar is compiled:
                self.nbytes += grammar.nbytes
            while self.nbytes > self.max_bytes:
                self.nbytes -= self._grammars.popitem(last=False)[1].nbytes
        return grammar

    def __reduce__(self) -> tuple[type["RecentGrammars"], tuple[int]]:
        return RecentGrammars, (self.max_bytes,)
