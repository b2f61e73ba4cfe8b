"""`python -m jaxpaged.selftest` without a GPU, through XLA."""

import jax
import jax.numpy as jnp
import jaxlib
import pytest

import jaxpaged
from jaxpaged import _device, selftest
from jaxpaged._selftest import cases, kept, report


@pytest.fixture
def few(monkeypatch):
    """Some of the cases, with short sequences."""
    names = (
        "window, soft cap, ALiBi, sinks",
        "int8, a scale a token and head",
        "float8_e4m3fn",
        "a tree of 8 query tokens",
        "prompts: window, soft cap, ALiBi, sinks",
    )
    monkeypatch.setattr(cases, "CASES", {name: cases.CASES[name] for name in names})
    monkeypatch.setattr(cases, "LENGTHS", (0, 1, 40))


def test_without_a_gpu_xla_is_checked(few, capsys):
    assert selftest.main([]) == 0
    text = capsys.readouterr().out
    assert "XLA is checked, not the kernels: the Mosaic GPU kernels need an NVIDIA GPU" in text
    assert (
        f"Please report this line: jaxpaged {jaxpaged.__version__}, jax {jax.__version__}, jaxlib {jaxlib.__version__}"
        in text
    )
    assert "cpu, xla: 5 of 5 cases right\n" in text


def test_on_an_old_gpu_xla_is_checked(few, monkeypatch, capsys):
    monkeypatch.setattr(_device, "gpu", lambda: _device.Gpu(68, 7.5, name="a T4"))
    assert selftest.main([]) == 0
    assert "8.0 or higher; a T4 has 7.5" in capsys.readouterr().out


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU compiles kernels")
def test_calls_without_an_implementation_follow_its_result(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept, "_kept", {})
    monkeypatch.setattr(_device, "gpu", lambda: _device.GPUS["A100"])
    monkeypatch.setattr(cases, "CASES", {"bfloat16": {}})
    assert kept.read_fault(_device.gpu()) is None
    assert selftest.main([]) == 1
    assert "A100 8.0, driver" in capsys.readouterr().out
    assert kept.read_fault(_device.gpu()) == "not every case is right"


def test_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        selftest.main(["--help"])
    assert "usage: python -m jaxpaged.selftest" in capsys.readouterr().out


def test_cases():
    assert "float8_e4m3fn" not in report.case_names(8.0)
    assert report.case_names(8.9) == list(cases.CASES)


def test_report(few, capsys, monkeypatch):
    monkeypatch.setattr(report, "SIDE", 64)
    points = {"one token": (1, 32, 1), "a prompt": (1, 32, 32)}
    assert report.report("an L4 8.9", "xla", cases.CASES, points)
    text = capsys.readouterr().out
    assert "an L4 8.9, xla: 5 of 5 cases right; one token" in text
    assert "| a prompt | limit: a matrix product |" in text
    assert "WRONG" not in text


@pytest.mark.parametrize("fault", ["wrong", "fails"])
def test_failures_are_named(monkeypatch, capsys, fault):
    def attention(q, *_, **__):
        if fault == "fails":
            raise RuntimeError("no such kernel")
        return q * 0, jnp.zeros(q.shape[:3])

    monkeypatch.setattr(report, "planned_attention", attention)
    monkeypatch.setattr(cases, "CASES", {"bfloat16": {}})
    assert not report.report("an A100 8.0", "mosaic_gpu", ["bfloat16"])
    text = capsys.readouterr().out
    assert "WRONG" in text
    assert ("RuntimeError: no such kernel" in text) == (fault == "fails")
    assert "an A100 8.0, mosaic_gpu: 0 of 1 cases right" in text
