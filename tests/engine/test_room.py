"""Room for transfers between host and GPU, so that the slice's scratch memory stays where it is."""

import jax
import jax.numpy as jnp
import pytest

from jaxpaged import _device
from jaxpaged._engine.room import GUARD_BYTES, keep_room
from tests.toy_model import create_engine, not_compiled


def shapes_alive():
    return sorted((x.shape, str(x.dtype)) for x in jax.live_arrays())


def test_room_is_kept_between_guards():
    arrays = jnp.zeros(7), jnp.zeros((2, 3), jnp.int32)
    before = shapes_alive()
    kept = keep_room(arrays, 3, arrays[0].sharding)
    assert [x.nbytes for x in kept] == [GUARD_BYTES] * 6
    assert shapes_alive() == sorted([*before, *[(kept[0].shape, "uint8")] * 6])


@pytest.mark.filterwarnings("ignore:XLA computes this call")
def test_an_engine_keeps_room_only_on_a_gpu(monkeypatch):
    with not_compiled():
        assert create_engine()._runner.program.kept == []
        monkeypatch.setattr(_device, "is_gpu", lambda: True)
        monkeypatch.setattr(_device, "gpu", lambda: _device.GPUS["H100"])
        assert create_engine()._runner.program.kept
