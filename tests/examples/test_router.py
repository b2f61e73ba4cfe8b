"""lib/router.py: the choice of an engine by room and by the beginning of the prompt."""

import pytest

from jaxpaged import EngineStats
from lib import router
from lib.router import Room, Router

BLOCK = 4
PROMPT = [*range(10)]
FREE = Room(num_seats=16, num_free=16, num_blocks=100)


def rooms(*free, num_blocks=100):
    return {i: FREE._replace(num_free=num_free, num_blocks=num_blocks) for i, num_free in enumerate(free)}


def test_the_engine_with_the_most_free_seats_is_chosen():
    router = Router(BLOCK)
    assert router.choose(PROMPT, None, rooms(3, 5, 4)) == 1
    assert router.choose(PROMPT, None, rooms(-1, -3, -2)) == 0  # all are full


def test_equal_engines_take_turns():
    router = Router(BLOCK)
    assert [router.choose(PROMPT, None, rooms(5, 5, 5)) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_an_engine_without_blocks_for_the_prompt_is_left_out():
    router = Router(BLOCK, has_affinity=True)
    few = {0: FREE._replace(num_blocks=2), 1: FREE._replace(num_free=1, num_blocks=3)}
    assert router.choose(PROMPT, None, few) == 1
    assert router.choose(PROMPT, None, {1: FREE._replace(num_blocks=2), 0: FREE._replace(num_free=1)}) == 0
    assert router.choose(PROMPT, None, rooms(3, 2, num_blocks=0)) == 0  # no engine has them


def test_a_beginning_stays_on_its_engine_while_that_has_room():
    router = Router(BLOCK, has_affinity=True)
    assert router.choose(PROMPT, None, rooms(3, 5)) == 1
    for free, chosen in (((5, 5), 1), ((7, 5), 1), ((8, 5), 0), ((6, 8), 0), ((1, 0), 0), ((0, 1), 1)):
        assert router.choose([*PROMPT[:8], 99], None, rooms(*free)) == chosen, free


@pytest.mark.parametrize(
    ("prompt", "adapter"), [([9, *PROMPT], None), (PROMPT, 0), (PROMPT[: BLOCK - 1], None), (PROMPT[BLOCK:], None)]
)
def test_another_beginning_or_adapter_is_not_bound(prompt, adapter):
    router = Router(BLOCK, has_affinity=True)
    router.choose(PROMPT, None, rooms(3, 5))
    assert router.choose(prompt, adapter, rooms(5, 5)) == 0


def test_without_a_prefix_cache_nothing_is_remembered():
    router = Router(BLOCK)
    assert [router.choose(PROMPT, None, rooms(5, 5)) for _ in range(2)] == [0, 1]
    assert not router._engines


def test_conversations_with_one_system_prompt_stay_apart():
    router, system = Router(BLOCK, has_affinity=True), [*range(1000, 1000 + 3 * BLOCK)]
    talks = {0: [*system, *range(BLOCK)], 1: [*system, *range(50, 50 + BLOCK)]}
    assert router.choose(talks[0], None, rooms(5, 1)) == 0
    assert router.choose(talks[1], None, rooms(1, 5)) == 1
    for engine in (0, 1, 0):  # a later turn is longer
        assert router.choose([*talks[engine], 7, 7, 7, 7, 7, 7], None, rooms(5, 5)) == engine


def test_few_prefixes_are_remembered_and_the_oldest_is_forgotten(monkeypatch):
    monkeypatch.setattr(router, "MOST_PREFIXES", 3)
    few = Router(BLOCK, has_affinity=True)
    for token in range(3):
        few.choose([token] * BLOCK, None, rooms(1, 5))
    few.choose([0] * BLOCK, None, rooms(5, 5))  # in use again
    few.choose([3] * BLOCK, None, rooms(1, 5))
    assert len(few._engines) == 3
    few._last_chosen = {1: 1}  # by turns it is 0
    assert [few.choose([token] * BLOCK, None, rooms(5, 5)) for token in (0, 1)] == [1, 0]


def test_room_of_an_engine():
    assert Room.of(EngineStats(max_num_seqs=8, num_free_blocks=5), 10) == Room(8, -2, 5)
