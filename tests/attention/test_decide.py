"""On a GPU model that is not confirmed, a self-test decides whether the kernels are used."""

import dataclasses
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxpaged import Engine, KVCache, _device, paged_attention
from jaxpaged._device import GPUS, Gpu
from jaxpaged._selftest import kept, verdict
from jaxpaged._selftest.kept import keep_fault
from jaxpaged.debug import explain
from tests.cases import make_case

L4, UNTESTED = GPUS["L4"], "a kind of GPU on which they have not been tested"


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """An empty cache folder, and a process without earlier results."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(verdict.VARIABLE, raising=False)
    forget(monkeypatch)
    return tmp_path


def forget(monkeypatch):
    """Forgets results in memory, as in a new process."""
    monkeypatch.setattr(kept, "_kept", {})
    monkeypatch.setattr(verdict, "_warned", {})


@pytest.fixture
def find_fault(monkeypatch):
    """The fault that is reported if the self-test would return `test` now. The attribute `gpus` lists its runs."""
    gpus = []

    def find(gpu, *, in_trace=False, test=""):
        monkeypatch.setattr(kept, "quick_test", lambda gpu: gpus.append(gpu) or test)
        found = []

        def ask(x):
            found.append(verdict.find_fault(gpu, x))
            return x

        if in_trace:
            jax.make_jaxpr(ask)(0.0)
        else:
            ask(())
        return found[0].partition(f"{gpu.name}: ")[2].partition(". `python")[0]

    find.gpus = gpus
    return find


@pytest.mark.parametrize("fault", ["", "prompts: 1.0e+00"])
def test_it_runs_once_per_machine(monkeypatch, folder, find_fault, fault):
    for _ in range(2):
        assert find_fault(L4, test=fault) == fault
        assert find_fault(L4, in_trace=True, test=fault) == fault
        forget(monkeypatch)
    assert find_fault.gpus == [L4]
    assert len(list(folder.rglob("*"))) == 3  # a file in two folders


def test_it_runs_again_for_another_gpu_or_driver(monkeypatch, find_fault):
    find_fault(L4)
    find_fault(GPUS["A100"])
    forget(monkeypatch)
    monkeypatch.setattr(_device, "driver", lambda: "999.1")
    find_fault(L4)
    assert find_fault.gpus == [L4, GPUS["A100"], L4]


def test_inside_a_trace_it_does_not_run(find_fault):
    with pytest.warns(UserWarning, match=rf"L4, {UNTESTED}. Run `python -m jaxpaged.selftest` once"):
        assert find_fault(L4, in_trace=True, test="wrong") == ""
    assert find_fault(L4, in_trace=True, test="wrong") == ""  # without another warning
    assert not find_fault.gpus
    assert find_fault(L4, test="wrong") == "wrong"


@pytest.mark.parametrize(
    "gpu",
    [GPUS["H100"], Gpu(68, 7.5, name="T4"), dataclasses.replace(L4, broken_ptxas="12.8.93")],
    ids=["confirmed", "without kernels", "without a ptxas"],
)
def test_confirmed_gpus_need_no_test(gpu, find_fault):
    assert find_fault(gpu, test="wrong") == ""


def test_a_plain_call_imports_nothing_more_of_the_self_test():
    """On a GPU that needs no test it loads no threads, files or cases."""
    script = """
        import sys, jax, jax.numpy as jnp, jaxpaged
        from jaxpaged import _device
        _device.gpu = lambda: _device.GPUS["H100"]
        cache = jaxpaged.KVCache.create(num_blocks=2, block_size=16, num_kv_heads=1, head_dim=64, dtype="bfloat16")
        arrays = jnp.ones((1, 1, 64), jnp.bfloat16), cache.k, cache.v, jnp.array([[1]]), jnp.array([3])
        assert "by_kernel" in str(jax.make_jaxpr(jaxpaged.paged_attention)(*arrays))
        print([name for name in sys.modules if name.startswith("jaxpaged._selftest.")])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, capture_output=True, text=True)
    assert done.stdout == "['jaxpaged._selftest.verdict']\n"


def test_the_driver(monkeypatch):
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"
    monkeypatch.setattr(Path, "read_text", lambda _: line)
    assert _device.driver() == "580.65.06"
    monkeypatch.setattr(Path, "read_text", lambda _: Path("/none/such").read_bytes())
    assert _device.driver() == ""


def test_it_can_be_turned_off(monkeypatch, find_fault):
    monkeypatch.setenv(verdict.VARIABLE, "0")
    assert find_fault(L4, test="wrong") == ""
    assert find_fault(L4, in_trace=True, test="wrong") == ""


def test_an_unwritable_folder(folder, find_fault):
    (folder / "jaxpaged").write_text("a file")
    assert [find_fault(L4, test="wrong") for _ in range(2)] == ["wrong", "wrong"]
    assert find_fault.gpus == [L4]


def test_a_gpu_without_memory_is_tested_again(monkeypatch, find_fault):
    find_fault(L4, test="int8: XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory")
    forget(monkeypatch)
    assert find_fault(L4) == ""


# Through the public functions, with an A100 as a fake default device. No kernel can be compiled for it here, so the
# self-test fails.
A100 = GPUS["A100"]
without_a_gpu = pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU compiles kernels")


@pytest.fixture
def arrays(monkeypatch):
    monkeypatch.setattr(_device, "gpu", lambda: A100)
    return make_case(lengths=(1, 20, 0), dtype=jnp.bfloat16).arrays


@without_a_gpu
def test_a_call_uses_xla_if_the_kernels_fail(arrays):
    with pytest.warns(UserWarning, match="XLA computes this call: the self-test .* A100: window.*` tests again"):
        out = paged_attention(*arrays)
    assert (out == paged_attention(*arrays, implementation="xla")).all()
    assert explain(*arrays).kernel is None
    assert explain(*arrays, implementation="mosaic_gpu").kernel == "paged_decode"


def test_a_traced_call_uses_the_kernels(arrays):
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
def test_an_engine_runs_the_test_at_creation(monkeypatch, arrays):
    monkeypatch.setattr(_device, "is_gpu", lambda: True)
    cache = KVCache.create(num_blocks=4, block_size=16, num_kv_heads=1, head_dim=32)
    with pytest.raises(ValueError, match="apply"):  # `apply` is checked after the self-test
        Engine(lambda *_: None, {}, cache, head=None)
    assert "window" in explain(*arrays).reason
