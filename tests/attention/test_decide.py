"""On a kind of GPU that nobody has confirmed a self-test decides whether the kernels compute."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxpaged import Engine, KVCache, _device, paged_attention
from jaxpaged._attention import decide
from jaxpaged._attention.decide import find_fault, keep_fault
from jaxpaged._device import GPUS, Gpu
from jaxpaged.debug import explain
from tests.cases import make_case

L4, UNTESTED = GPUS["L4"], "a kind of GPU on which they have not been tested"


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """An empty cache folder, and a process that knows nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(decide.VARIABLE, raising=False)
    forget(monkeypatch)
    return tmp_path


def forget(monkeypatch):
    """As a new process does."""
    monkeypatch.setattr(decide, "_kept", {})
    monkeypatch.setattr(decide, "_warned", set())


class Test:
    """A self-test that finds this, and counts."""

    __test__ = False

    def __init__(self, fault):
        self.fault, self.gpus = fault, []

    def __call__(self, gpu):
        self.gpus.append(gpu)
        return self.fault


@pytest.mark.parametrize("fault", ["", "prompts: 1.0e+00"])
def test_it_runs_once_a_machine(monkeypatch, folder, fault):
    test = Test(fault)
    for _ in range(2):
        assert find_fault(L4, in_trace=False, test=test) == fault
        assert find_fault(L4, in_trace=True, test=test) == fault
        forget(monkeypatch)
    assert test.gpus == [L4]
    assert len(list(folder.rglob("*"))) == 3  # a file in two folders


def test_it_runs_again_for_another_gpu_or_driver(monkeypatch):
    test = Test("")
    find_fault(L4, in_trace=False, test=test)
    find_fault(GPUS["A100"], in_trace=False, test=test)
    forget(monkeypatch)
    monkeypatch.setattr(_device, "driver", lambda: "999.1")
    find_fault(L4, in_trace=False, test=test)
    assert test.gpus == [L4, GPUS["A100"], L4]


def test_inside_a_trace_it_does_not_run():
    test = Test("wrong")
    with pytest.warns(UserWarning, match=rf"L4, {UNTESTED}. Run `python -m jaxpaged.selftest` once"):
        assert find_fault(L4, in_trace=True, test=test) == ""
    assert find_fault(L4, in_trace=True, test=test) == ""  # without another warning
    assert not test.gpus
    assert find_fault(L4, in_trace=False, test=test) == "wrong"


@pytest.mark.parametrize(
    "gpu",
    [GPUS["H100"], Gpu(68, 7.5, name="T4"), dataclasses.replace(L4, broken_ptxas="12.8.93")],
    ids=["confirmed", "without kernels", "without a ptxas"],
)
def test_gpus_that_need_none(gpu):
    assert find_fault(gpu, in_trace=False, test=Test("wrong")) == ""


def test_the_driver(monkeypatch):
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"
    monkeypatch.setattr(Path, "read_text", lambda _: line)
    assert _device.driver() == "580.65.06"
    monkeypatch.setattr(Path, "read_text", lambda _: Path("/none/such").read_bytes())
    assert _device.driver() == ""


def test_it_can_be_turned_off(monkeypatch):
    monkeypatch.setenv(decide.VARIABLE, "0")
    assert find_fault(L4, in_trace=False, test=Test("wrong")) == ""
    assert find_fault(L4, in_trace=True, test=Test("wrong")) == ""


def test_a_folder_that_cannot_be_written(monkeypatch, folder):
    (folder / "jaxpaged").write_text("a file")
    test = Test("wrong")
    assert [find_fault(L4, in_trace=False, test=test) for _ in range(2)] == ["wrong", "wrong"]
    assert test.gpus == [L4]


def test_a_gpu_without_memory_is_tested_again(monkeypatch):
    find_fault(L4, in_trace=False, test=Test("int8: XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory"))
    forget(monkeypatch)
    assert find_fault(L4, in_trace=False, test=Test("")) == ""


# Through the public functions, as if JAX's default device were an A100. No kernel can be compiled for it here, so that
# the self-test fails.
A100 = GPUS["A100"]
without_a_gpu = pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU compiles kernels")


@pytest.fixture
def arrays(monkeypatch):
    monkeypatch.setattr(_device, "gpu", lambda: A100)
    return make_case(lengths=(1, 20, 0), dtype=jnp.bfloat16).arrays


@without_a_gpu
def test_a_call_by_xla_where_the_kernels_fail(arrays):
    with pytest.warns(UserWarning, match="XLA computes this call: the self-test .* A100: window.*` tests again"):
        out = paged_attention(*arrays)
    assert (out == paged_attention(*arrays, implementation="xla")).all()
    assert explain(*arrays).kernel is None
    assert explain(*arrays, implementation="mosaic_gpu").kernel == "paged_decode"


def test_a_traced_call_by_the_kernels(arrays):
    def traced():
        return jax.make_jaxpr(lambda q: paged_attention(q, *arrays[1:]))(arrays[0])

    assert explain(*arrays).kernel == "paged_decode"
    with pytest.warns(UserWarning, match=UNTESTED) as warned:
        assert "by_kernel" in str(traced())
    assert [warning.filename for warning in warned] == [__file__]
    keep_fault(A100, "wrong")
    with pytest.warns(UserWarning, match="A100: wrong"):
        assert "by_kernel" not in str(traced())


@without_a_gpu
def test_an_engine_tests_when_it_is_made(monkeypatch, arrays):
    monkeypatch.setattr(_device, "is_gpu", lambda: True)
    cache = KVCache.create(num_blocks=4, block_size=16, num_kv_heads=1, head_dim=32)
    with pytest.raises(ValueError, match="apply"):  # which is looked at after the test
        Engine(lambda *_: None, {}, cache, head=None)
    assert "window" in explain(*arrays).reason
