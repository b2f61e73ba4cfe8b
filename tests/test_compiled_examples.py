"""What the loops of the examples that share and roll back compile to: one module, no copy of a cache, no host."""

import beam_search
import generation
import parallel_sampling
import pytest
import speculative
from sampling import Sampling

from tests.test_compiled import instructions

NUM_BLOCKS, BLOCK_SIZE = 4096, 8  # a cache is larger than all else that the tiny model has
LOOPS = {
    "parallel_sampling": (
        parallel_sampling,
        "complete",
        lambda *model, **sizes: parallel_sampling.sample_in_parallel(
            *model, num_completions=3, sampling=Sampling(0.8), **sizes
        ),
    ),
    "beam_search": (
        beam_search,
        "search",
        lambda *model, **sizes: beam_search.beam_search(*model, width=3, **sizes),
    ),
    "speculative": (speculative, "speculate", speculative.decode_speculatively),
}


class CompiledError(Exception):
    """Carries the compiled module out of the example."""


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_copies_no_cache_and_never_calls_the_host(tiny, monkeypatch, name):
    example, jitted, run = LOOPS[name]
    function = getattr(example, jitted)

    def large(*arguments, **options):
        return generation.start(*arguments, **options | {"num_blocks": NUM_BLOCKS})

    def compile_alone(*arguments):
        raise CompiledError(function.lower(*arguments).compile())

    monkeypatch.setattr(example, "start", large)
    monkeypatch.setattr(example, jitted, compile_alone)
    with pytest.raises(CompiledError) as compiled:
        run(tiny.model, tiny.config, [[1, 2, 3], [4, 5]], max_new_tokens=4, block_size=BLOCK_SIZE)
    (module,) = compiled.value.args
    text = module.as_text()

    num_elements = NUM_BLOCKS * BLOCK_SIZE * tiny.config.num_kv_heads * tiny.config.head_dim
    found = instructions(text)
    assert [line for operation, size, line in found if operation.startswith("copy") and size >= num_elements] == []
    assert module.memory_analysis().alias_size_in_bytes >= tiny.config.num_layers * 2 * 4 * num_elements
    assert not {operation for operation, _, _ in found} & {"outfeed", "infeed", "send", "recv"}
    assert "callback" not in text
