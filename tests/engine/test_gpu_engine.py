"""Engines on a GPU with their own compiler options, where a slice is one CUDA graph: `pytest -m gpu`."""

import functools

import numpy as np
import pytest

from jaxpaged import _device
from tests.toy_model import BLOCKS, SEATS, create_engine, requests

pytestmark = pytest.mark.gpu

WITHOUT_LOOPS_IN_GRAPHS = {"xla_gpu_enable_triton_gemm": "False"}
PROMPTS, PARAMS = requests(60, seed=3)
ENGINES = {
    "plain": create_engine,
    "widths": functools.partial(create_engine, widths=(2, 3)),
    "prefix cache": functools.partial(create_engine, prefix_cache=True, num_blocks=BLOCKS // 2),
    "host memory": functools.partial(create_engine, prefix_cache=True, num_blocks=BLOCKS // 2, host_cache_bytes=2**24),
    "drafts": functools.partial(create_engine, widths=(SEATS, 2 * SEATS), drafts=3),
    "exact": functools.partial(create_engine, exact=True),
}


@functools.cache
def expected():
    return create_engine(compiler_options=WITHOUT_LOOPS_IN_GRAPHS).generate(PROMPTS, PARAMS)


@pytest.mark.parametrize("name", ENGINES)
def test_a_slice_in_one_graph_changes_no_token(name):
    assert _device.has_loops_in_graphs()
    engine = ENGINES[name](compiler_options=None)
    for _ in range(2):
        for output, plain in zip(engine.generate(PROMPTS, PARAMS), expected(), strict=True):
            for ours, theirs in zip(output.outputs, plain.outputs, strict=True):
                assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)
                if theirs.logprobs is not None:
                    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
    [alone] = engine.score(PROMPTS[:1], [[1, 2, 3]])
    assert np.isfinite(alone.logprobs).all()
