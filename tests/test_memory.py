"""A GPU without room: caches and engines are refused before XLA waits for memory, with advice."""

import time

import jax
import pytest

from jaxpaged import KVCache, _device, _memory
from jaxpaged._engine import program
from tests.toy_model import create_engine, not_compiled

SIZES = dict(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=64)  # 65,536 bytes in bfloat16
LATENT = dict(num_blocks=8, block_size=16, num_kv_heads=1, head_dim=64, value_dim=32, is_latent=True)


@pytest.fixture
def in_use(monkeypatch):
    """Sets the bytes in use of a GPU of 1 MB."""
    monkeypatch.setattr(_memory, "MOST_WAIT_SECONDS", 0.2)

    def set_bytes(num_bytes):
        monkeypatch.setattr(_device, "memory", lambda: (num_bytes, 10**6))

    return set_bytes


def test_a_cpu_has_no_limit():
    assert _device.memory() is None


def test_the_memory_of_the_chosen_device_counts(monkeypatch):
    full, free = jax.local_devices()[:2]
    stats = {full: dict(bytes_in_use=10**6, bytes_limit=10**6), free: dict(bytes_in_use=0, bytes_limit=10**6)}
    monkeypatch.setattr(type(full), "memory_stats", lambda device: stats[device])
    monkeypatch.setattr(_memory, "MOST_WAIT_SECONDS", 0.0)
    with pytest.raises(MemoryError, match="a cache of 8 blocks"):
        KVCache.create(**SIZES)
    with jax.default_device(free):
        assert KVCache.create(**SIZES).k.devices() == {free}


@pytest.mark.parametrize(
    ("sizes", "num_bytes"), [(SIZES, 65_536), (SIZES | dict(dtype="int8"), 32_768), (LATENT, 16_384)]
)
def test_a_cache_without_room_is_refused_with_the_next_move(in_use, sizes, num_bytes):
    in_use(10**6 - num_bytes)
    KVCache.create(**sizes)
    in_use(10**6 - num_bytes + 1)
    begin = time.monotonic()
    with pytest.raises(
        MemoryError, match=r"a cache of 8 blocks needs 0\.0 GB.*cache_capacity.*XLA_PYTHON_CLIENT_MEM_FRACTION"
    ):
        KVCache.create(**sizes)
    assert time.monotonic() - begin < 5
    jax.eval_shape(lambda: KVCache.create(**sizes))
    jax.jit(lambda: KVCache.create(**sizes)).lower()


def test_memory_freed_in_the_meantime_suffices(monkeypatch):
    seen = iter([10**6, 10**6, 0, 0])
    monkeypatch.setattr(_device, "memory", lambda: (next(seen), 10**6))
    KVCache.create(**SIZES)


def test_an_engine_without_room_is_refused_before_it_compiles(in_use, monkeypatch):
    with not_compiled():
        create_engine()
        in_use(10**6)
        monkeypatch.setattr("jaxpaged._cache.kv_cache.check_memory", lambda *_: None)
        with pytest.raises(MemoryError, match=r"the engine does not fit: weights need .* GB, caches .*, compiling"):
            create_engine()


class Lowered:
    """A program with this scratch memory; None: XLA has no memory to compile it."""

    def __init__(self, scratch=None):
        self.scratch = self.temp_size_in_bytes = scratch

    def compile(self):
        if self.scratch is None:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Failed to get configs.")
        return self

    def memory_analysis(self):
        return self


def test_an_engine_without_room_for_its_program_is_refused(in_use):
    in_use(999_000)
    assert program.compile_in_memory(Lowered(1_000), {}, ())
    with pytest.raises(MemoryError, match=r"scratch memory 0\.0, but 0\.0 of the 0\.0 GB"):
        program.compile_in_memory(Lowered(1_001), {}, ())
    with pytest.raises(MemoryError, match=r"compiling 0\.0 or more\. Use fewer blocks") as refused:
        program.compile_in_memory(Lowered(), {}, ())
    assert isinstance(refused.value.__cause__, jax.errors.JaxRuntimeError)
