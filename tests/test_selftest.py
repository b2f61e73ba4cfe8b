"""`python -m jaxpaged.selftest`, as far as that goes without a GPU: through XLA."""

import jax.numpy as jnp
import pytest

from jaxpaged import _device, selftest

A100, L4 = _device.Gpu(108, 8.0, name="an A100"), _device.Gpu(58, 8.9, name="an L4")


def test_without_a_gpu(capsys):
    assert selftest.main() == 2
    assert "nothing to test: the Mosaic GPU kernels need an NVIDIA GPU" in capsys.readouterr().out


def test_on_a_gpu_that_is_too_old(monkeypatch, capsys):
    monkeypatch.setattr(_device, "gpu", lambda: _device.Gpu(68, 7.5, name="a T4"))
    assert selftest.main() == 2
    assert "a T4 has 7.5" in capsys.readouterr().out


def test_cases():
    assert "float8_e4m3fn" not in selftest.cases_of(A100)
    assert list(selftest.cases_of(L4)) == list(selftest.CASES)


def test_report(monkeypatch, capsys):
    few = {name: selftest.CASES[name] for name in ("window, soft cap, ALiBi, sinks", "float8_e4m3fn")}
    monkeypatch.setattr(selftest, "CASES", few)
    monkeypatch.setattr(selftest, "LENGTHS", (0, 1, 40))
    assert selftest.report(L4, "xla", {"1 x 32": (1, 32)})
    text = capsys.readouterr().out
    assert "an L4, 8.9: 2 of 2 cases right; 1 x 32" in text
    assert "WRONG" not in text


@pytest.mark.parametrize("fault", ["wrong", "fails"])
def test_what_is_wrong_is_said(monkeypatch, capsys, fault):
    def attention(q, *_, **__):
        if fault == "fails":
            raise RuntimeError("no such kernel")
        return q * 0, jnp.zeros(q.shape[:3])

    monkeypatch.setattr(selftest, "paged_attention", attention)
    monkeypatch.setattr(selftest, "CASES", {"bfloat16": {}})
    assert not selftest.report(A100, "mosaic_gpu")
    text = capsys.readouterr().out
    assert "WRONG" in text
    assert ("RuntimeError: no such kernel" in text) == (fault == "fails")
    assert "an A100, 8.0: 0 of 1 cases right" in text
