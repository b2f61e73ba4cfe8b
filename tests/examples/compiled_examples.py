"""Runs an example and checks its compiled loop on the way: no copy of a cache, no host."""

from types import ModuleType

import pytest

import lib.start
from tests.compiled import instructions

NUM_BLOCKS = 4096  # a cache is larger than everything else in the tiny model


def read_compiled(monkeypatch: pytest.MonkeyPatch, example: ModuleType, name: str) -> list[bool]:
    """Gives the example a large pool and checks its jitted function `name` at each call; yields one True per check."""
    function = getattr(example, name)
    checked = []

    def start(*arguments, **options):
        return lib.start.start(*arguments, **options | {"num_blocks": NUM_BLOCKS})

    def check(*arguments):
        module = function.lower(*arguments).compile()
        caches = next(argument.caches for argument in arguments if hasattr(argument, "caches"))
        text, found = module.as_text(), instructions(module.as_text())
        size = caches[0].k.size
        assert [line for operation, elements, line in found if operation[:4] == "copy" and elements >= size] == []
        assert module.memory_analysis().alias_size_in_bytes >= len(caches) * 2 * 4 * size
        assert not {operation for operation, _, _ in found} & {"outfeed", "infeed", "send", "recv"}
        assert "callback" not in text
        checked.append(True)
        return function(*arguments)

    monkeypatch.setattr(example, "start", start)
    monkeypatch.setattr(example, name, check)
    return checked
