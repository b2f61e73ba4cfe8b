"""A kernel of a folder of its own, here of this test, is chosen and computes calls without an edit elsewhere."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import _device, paged_attention, paged_attention_reference
from jaxpaged._attention import run
from jaxpaged._by_kernel import NO_HINTS
from jaxpaged.debug import explain
from pallas_kernels.common.interface import Kernel
from tests.cases import assert_lse, assert_within_budget, make_case
from tests.kernels.interpret import make_call

LAUNCHED = []


@dataclasses.dataclass(frozen=True)
class Config:
    run: int = 4
    partitions: int = 1
    at_once: ClassVar[None] = None


def limits(call, gpu, hints):
    if gpu.compute_capability != 9.0:
        yield "another kernel needs Hopper."
    if call.head_dim != 64:
        yield f"another kernel takes head_dim 64; got {call.head_dim=}."


def launch(call, config):
    """By the definition, on runs of query tokens."""
    LAUNCHED.append(call.q.shape)

    @jax.jit
    def body_of_another(*arrays):
        return paged_attention_reference(*arrays, scale=call.options.scale, return_lse=True)

    out, lse = body_of_another(call.q, call.k_cache, call.v_cache, call.block_tables, call.lengths)
    return out.astype(call.q.dtype), lse


ANOTHER = Kernel("another", "another kernel", limits, lambda call, gpu, hints: Config(), launch)


@pytest.fixture(autouse=True)
def table(monkeypatch):
    monkeypatch.setattr(run, "KERNELS", (ANOTHER, *run.KERNELS))
    monkeypatch.setattr(_device, "gpu", lambda: _device.GPUS["H100"])
    LAUNCHED.clear()


def case_of(**shape):
    return make_case(**dict(lengths=(0, 5, 70), q_len=7, dtype=jnp.bfloat16) | shape)


def test_it_is_chosen_unless_it_has_limits():
    def kernel(gpu="H100", **shape):
        return explain(*case_of(**shape).arrays, gpu=gpu).kernel

    assert kernel() == "another"
    assert kernel(head_dim=72) == kernel(gpu="B200", q_len=1) == "paged_decode"
    assert "mosaic_gpu: another kernel\n" in str(explain(*case_of().arrays, gpu="H100"))


def test_it_is_lowered_for_a_gpu_and_xla_for_a_cpu():
    traced = jax.jit(lambda *arrays: paged_attention(*arrays)).trace(*case_of().arrays)
    texts = [traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "cuda")]
    assert ["body_of_another" in text for text in texts] == [False, True]
    assert LAUNCHED == [(6, 4, 6, 64)], "it is traced once"


def test_it_computes_also_under_vmap_and_grad():
    case = case_of()
    call = make_call(case)
    choice = dataclasses.replace(run.decide(call, NO_HINTS), interpret=True)
    out, lse = run.run(choice, call)
    assert LAUNCHED == [(6, 4, 6, 64)]  # runs of 4 tokens of 3 sequences
    assert_within_budget(case, out)
    assert_lse(case, lse)
    mapped = jax.vmap(lambda q: run.run(choice, dataclasses.replace(call, q=q))[0])(jnp.stack([call.q, call.q]))
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (mapped, jnp.stack([out, out]))), atol=0.01)

    def loss(q):
        return run.run(choice, dataclasses.replace(call, q=q))[0].astype(jnp.float32).sum()

    assert np.abs(np.asarray(jax.grad(loss)(call.q), np.float32)).max() > 0.1
