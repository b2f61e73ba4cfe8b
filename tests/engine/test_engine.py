"""The engine: tokens against one-by-one generation, whatever the load; aborts; refusals; its compiled program."""

import collections
import contextlib
import dataclasses
import functools
import logging
import re
import threading
import time
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.soak.engine import soak
from jaxpaged import (
    AttentionSettings,
    AttentionStep,
    BlockAllocator,
    CacheLayer,
    Engine,
    KVCache,
    SamplingParams,
    _device,
    generate,
)
from jaxpaged._engine import program, runner
from jaxpaged._engine.books import Sent
from jaxpaged._engine.defaults import chosen_steps
from jaxpaged._engine.requests import checked_request, completion_seed
from jaxpaged._slice.kinds import Kind
from jaxpaged._slice.step import make_attention_step
from jaxpaged.nnx import PagedAttention
from jaxpaged.ops import rotate_and_write_kv
from pallas_kernels.common import partition_plan
from tests import toy_model
from tests.compiled import instructions
from tests.toy_model import (
    BLOCK_SIZE,
    BLOCKS,
    ENGINES,
    MAX_TOKENS,
    STEPS,
    TIGHT,
    VOCAB,
    continuation,
    create_engine,
    fewer_blocks,
    finish,
    random_weights,
    requests,
    shared_engine,
    with_blocks_back,
)


@pytest.fixture(autouse=True)
def idle_engines():
    """After each test nothing is left of its requests: engines are idle, and all blocks are free."""
    yield
    for engine in ENGINES.values():
        assert engine._books.is_settled
        assert_whole(engine)
        assert int(engine._runner.state.allocator.num_free) == BLOCKS


def assert_whole(engine, hidden=None):
    """All invariants hold. `hidden`: the blocks that `fewer_blocks` took."""
    state = engine._runner.state
    allocator = state.allocator if hidden is None else with_blocks_back(state.allocator, hidden)
    scheduler, allocator = jax.tree.map(np.asarray, (state.scheduler, allocator))
    assert scheduler.broken_invariants(allocator) == ()
    assert allocator.broken_invariants() == ()


@pytest.fixture(scope="module")
def load():
    """Requests, and of each completion the tokens and their logprobs."""
    prompts, params = requests(40)
    expected = [
        [
            continuation(random_weights(), prompt, dataclasses.replace(of_one, seed=completion_seed(of_one.seed, i)))
            for i in range(of_one.n)
        ]
        for prompt, of_one in zip(prompts, params, strict=True)
    ]
    return prompts, params, expected


# Each compiles an engine.
@pytest.mark.parametrize(
    ("chunk_tokens", "prefix_cache"),
    [(16, False), (16, True)],
)
@pytest.mark.parametrize("left", [BLOCKS, TIGHT], ids=["plenty", "tight"])
def test_tokens_do_not_depend_on_the_load(load, left, chunk_tokens, prefix_cache):
    prompts, params, expected = load
    engine = shared_engine(chunk_tokens, prefix_cache=prefix_cache)
    preempted_before, found_before = engine.stats().num_preempted, engine.stats().num_found
    with fewer_blocks(engine, left) as hidden:
        for order in (np.arange(40), np.arange(40)[::-1], np.random.default_rng(1).permutation(40)):
            outputs = engine.generate([prompts[i] for i in order], [params[i] for i in order])
            assert_whole(engine, hidden)
            for i, output in zip(order, outputs, strict=True):
                for (tokens, logprobs), completion in zip(expected[i], output.outputs, strict=True):
                    assert completion.token_ids == tokens
                    stopped = tokens[-1] in params[i].stop_token_ids
                    assert completion.finish_reason == ("stop" if stopped else "length")
                    if params[i].logprobs:
                        np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-4)
                    else:
                        assert completion.logprobs is None
    assert (engine.stats().num_preempted > preempted_before) == (left == TIGHT)
    assert (engine.stats().num_found > found_before) == prefix_cache  # in the second and third order
    if left == TIGHT:  # few seats are taken, so that steps are of every kind
        sharing, others = np.split(np.asarray(engine._runner.state.num_of_kind), [2 * prefix_cache])
        assert (others > 0).all()
        assert (sharing.sum() > 0) == prefix_cache


def test_a_batch_invariant_engine_gives_equal_bits_whatever_the_load():
    prompts, params = requests(20)
    params = [dataclasses.replace(of_one, logprobs=True, n=1) for of_one in params]

    def differing(engine, left):
        with fewer_blocks(engine, left):
            together = engine.generate(prompts[::-1], params[::-1])[::-1]
        return sum(one.outputs != other.outputs for one, other in zip(alone, together, strict=True))

    exact = shared_engine(16, prefix_cache=True, batch_invariant=True)
    alone = [exact.generate([prompt], of_one)[0] for prompt, of_one in zip(prompts, params, strict=True)]
    before = exact.stats()
    assert [differing(exact, left) for left in (BLOCKS, TIGHT)] == [0, 0]
    assert exact.stats().num_preempted > before.num_preempted
    assert exact.stats().num_found > before.num_found
    assert differing(shared_engine(16), BLOCKS)


def test_a_model_that_leaves_partitions_open_gets_those_of_a_batch_invariant_engine(monkeypatch):
    given = []
    monkeypatch.setattr(
        "jaxpaged._attention.attention_step.attend", lambda q, *_, **options: given.append(options) or q
    )
    cache, x = (
        KVCache.create(num_blocks=3, block_size=4, num_kv_heads=1, head_dim=8),
        jnp.zeros((1, 1, 8), jnp.bfloat16),
    )
    zero = jnp.zeros(1, jnp.int32)
    allocator = BlockAllocator.create(num_blocks=3, block_size=4, num_seqs=1, max_blocks_per_seq=2)
    step = AttentionStep.create(allocator, zero + 4, num_partitions=1)
    step.attend(x, x, x, cache)
    step.attend(x, x, x, cache, num_partitions=None)
    step.attend(x, x, x, cache, num_partitions=2)
    sizes = dict(num_heads=1, num_kv_heads=1, head_dim=8, rotary_frequencies=None, dtype="bfloat16")
    for num_partitions in (None, 2):
        settings = AttentionSettings(**sizes, num_partitions=num_partitions)
        PagedAttention(8, settings, rngs=nnx.Rngs(0))(x[:, 0], cache, step)
    assert [options["num_partitions"] for options in given] == [1, 1, 2, 1, 2]


def test_other_weights_give_other_tokens_and_old_ones_the_old(load):
    prompts, params, expected = load
    engine, greedy = shared_engine(16), SamplingParams(temperature=0, max_tokens=8)

    def tokens():
        return [output.outputs[0].token_ids for output in engine.generate(prompts[:4], greedy)]

    before = tokens()
    engine.update_weights(random_weights(1))
    after = tokens()
    assert after == [continuation(random_weights(1), prompt, greedy)[0] for prompt in prompts[:4]]
    assert after != before
    engine.update_weights(random_weights())
    assert tokens() == before
    weights = random_weights()
    engine.update_weights(weights)
    weights["head"] *= 2  # a learner's container, not the engine's
    assert tokens() == before
    wrong = {
        r"\['head'\] was float32\[32, 48\] and is float32\[3\]": random_weights() | {"head": jnp.ones(3)},
        "was float32.* and is bfloat16": jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_weights()),
        r"\['bias'\] was not there and is float32\[3\]": random_weights() | {"bias": jnp.ones(3)},
        "it was a dict and is a OrderedDict": collections.OrderedDict(random_weights()),
    }
    for message, weights in wrong.items():
        with pytest.raises(
            ValueError, match=f"weights must have the structure, shapes and dtypes of the old ones; .*{message}"
        ):
            engine.update_weights(weights)


def test_weights_of_flax_say_what_to_pass_instead_of_the_module():
    class Weights(nnx.Module):
        def __init__(self):
            for name, value in random_weights().items():
                setattr(self, name, nnx.Param(value))

    module = Weights()
    with toy_model.not_compiled():
        engine = toy_model.create_engine(weights=nnx.state(module))
    with pytest.raises(ValueError, match=r"it was a State and is a Weights: pass nnx\.state\(model\)"):
        engine.update_weights(module)
    engine.update_weights(nnx.state(module))


def test_a_slice_that_fails_loses_nothing(load):
    prompts, params, expected = load
    engine = shared_engine(16)
    first, aborted = (engine.add_request(prompts[i], params[i]) for i in (0, 1))
    donated = random_weights()
    engine.update_weights(donated)
    donated["head"].delete()  # as a learner's jit does that donates them
    with pytest.raises(RuntimeError, match="deleted"):
        finish(engine)
    second = engine.add_request(prompts[2], params[2])
    engine.abort(aborted)
    engine.update_weights(random_weights())
    outputs = {}
    while engine.has_unfinished_requests:
        with contextlib.suppress(RuntimeError):  # of a slice sent before
            outputs |= {output.request_id: output for output in engine.step()}
    for request, i in ((first, 0), (second, 2)):
        assert [one.token_ids for one in outputs[request].outputs] == [tokens for tokens, _ in expected[i]]
    assert {one.finish_reason for one in outputs[aborted].outputs} == {"abort"}


def test_several_completions_each_have_a_seed_of_their_own(load):
    prompts, *_ = load
    engine = shared_engine(16)
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=7, n=4)
    (output, other) = engine.generate(prompts[:2], params)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4
    (alone,) = engine.generate(prompts[:1], dataclasses.replace(params, n=1))
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids
    again = engine.generate(prompts[1::-1], params)
    assert [completion.token_ids for completion in again[1].outputs] == [c.token_ids for c in output.outputs]
    # Without a seed each request takes one of the engine's own.
    drawn = engine.generate([prompts[0]] * 2, dataclasses.replace(params, seed=None, n=1))
    assert drawn[0].outputs[0].token_ids != drawn[1].outputs[0].token_ids


def count_tokens(engine, *requests):
    """(tokens computed, tokens found) while the requests are served; and what came of them."""
    before = engine.stats()
    outputs = engine.generate(*requests)
    after = engine.stats()
    return (after.num_computed - before.num_computed, after.num_found - before.num_found), outputs


def test_a_prefix_is_found_until_the_weights_change():
    engine = shared_engine(16, prefix_cache=True)
    prompt, greedy = [*range(21), 5], SamplingParams(temperature=0, max_tokens=8)  # five full blocks, and two tokens

    def served_with(seed):
        counts, (output,) = count_tokens(engine, [prompt], greedy)
        assert output.outputs[0].token_ids == continuation(random_weights(seed), prompt, greedy)[0]
        return counts

    engine.update_weights(random_weights())  # whatever was served before
    assert [served_with(0), served_with(0)] == [(29, 0), (9, 20)]
    # A request that began with old weights, some of whose blocks are made by the new ones: nobody finds any of them.
    request = engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=MAX_TOKENS - len(prompt)))
    engine.step()
    engine.update_weights(random_weights(1))
    assert set(finish(engine)) == {request}
    assert [served_with(1), served_with(1)] == [(29, 0), (9, 20)]
    engine.update_weights(random_weights())
    assert served_with(0) == (29, 0)


def test_blocks_that_old_weights_began_are_not_found_with_new_ones():
    """The first block is full, but not yet listed, when the weights change."""
    engine, prompt, greedy = (
        shared_engine(16, prefix_cache=True),
        [9, 8, 7],
        SamplingParams(temperature=0, max_tokens=20),
    )
    engine.update_weights(random_weights())
    request = engine.add_request(prompt, greedy)
    engine.step()
    engine.update_weights(random_weights(1))
    served = prompt + finish(engine)[request].outputs[0].token_ids
    counts, (output,) = count_tokens(engine, [served], greedy)
    assert counts == (len(served) + 19, 0)
    assert output.outputs[0].token_ids == continuation(random_weights(1), served, greedy)[0]


def test_equal_prompts_are_computed_once():
    prompt, params = [*range(22)], SamplingParams(max_tokens=6, temperature=1.0, seed=7, n=4)
    apart, (expected,) = count_tokens(shared_engine(16), [prompt], params)
    engine = shared_engine(16, prefix_cache=True)
    engine.update_weights(random_weights())
    together, (output,) = count_tokens(engine, [prompt], params)
    assert output.outputs == expected.outputs
    new = 4 * 5  # the last token of each is not computed
    assert apart == (4 * 22 + new, 0)
    # The others compute the end of the prompt, which fills no block.
    assert together == (22 + 3 * 2 + new, 3 * 20)
    # So it is for prompts that only begin alike: those who come later wait for the first.
    others, _ = count_tokens(engine, [[*range(40, 20, -1), i] for i in range(6)], SamplingParams(max_tokens=1))
    assert others == (21 + 5 * 1, 5 * 20)


def test_an_output_says_how_much_of_its_prompt_was_cached():
    engine, greedy = shared_engine(16, prefix_cache=True), SamplingParams(temperature=0, max_tokens=8, n=2)
    engine.update_weights(random_weights())
    prompt = [*range(30, 8, -1)]
    for expected in (0, 20):
        (output,) = engine.generate([prompt], greedy)
        assert output.num_cached_tokens == expected
    # Preempted requests find their own blocks when they come back: these do not count.
    prompts, before = [[i, *range(11)] for i in range(40, 46)], engine.stats()
    with fewer_blocks(engine, TIGHT):
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS - 12))
    assert engine.stats().num_preempted > before.num_preempted
    assert engine.stats().num_found > before.num_found
    assert [output.num_cached_tokens for output in outputs] == [0] * len(prompts)
    (output,) = shared_engine(16).generate([prompt], greedy)
    assert output.num_cached_tokens == 0


def test_completions_hold_the_blocks_of_their_prompt_together():
    engine = shared_engine(16, prefix_cache=True)
    request = engine.add_request([*range(7, 29)], SamplingParams(max_tokens=STEPS * 3, temperature=1.0, n=4))
    engine.step()
    engine.step()
    tables = np.asarray(engine._runner.state.allocator.block_tables)
    assert len({tuple(row) for row in tables[:, :5] if row[0]}) == 1
    assert (tables[:, 5] > 0).sum() == 4
    engine.abort(request)  # all of them
    (output,) = finish(engine).values()
    assert [completion.finish_reason for completion in output.outputs] == ["abort"] * 4


def test_nothing_is_compiled_after_the_engine_is_made(load, caplog):
    engine = shared_engine(16)
    engine.generate(load[0][:1], SamplingParams())
    prompts, params = requests(100, seed=5)

    def compilations():
        return [record.getMessage() for record in caplog.records if record.getMessage().startswith("Compiling")]

    jax.config.update("jax_log_compiles", True)  # not for this thread only
    try:
        with caplog.at_level(logging.DEBUG, logger="jax"):
            engine.generate(prompts, params)
            assert compilations() == []
            engine._runner.thread.submit(lambda: jnp.ones((3, 1, 4, 1, 5)).sum()).result()
            assert compilations()  # one would be seen
    finally:
        jax.config.update("jax_log_compiles", False)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_the_compiled_slice_copies_no_cache_and_never_calls_the_host(prefix_cache):
    engine = shared_engine(16, prefix_cache=prefix_cache)
    program, cache = engine._runner.program.run, engine._runner.state.caches
    found = instructions(program.as_text())
    shape = f"f32[{','.join(map(str, cache.k.shape))}]"
    of_cache = [name for name, _, line in found if shape in line.split(name + "(")[0]]
    assert "scatter" in of_cache or "fusion" in of_cache or "while" in of_cache  # the search sees the cache
    assert [name for name in of_cache if name.startswith("copy")] == []
    of_tokens = f"s32[{toy_model.MAX_REQUESTS},{MAX_TOKENS}]"
    assert [name for name, _, line in found if of_tokens in line.split(name + "(")[0] and name.startswith("copy")] == []
    assert not {name for name, *_ in found} & {"infeed", "outfeed", "send", "recv"}
    assert "callback" not in program.as_text()
    assert len(jax.tree.leaves(program.out_info[1])) == 1  # what the host reads costs by the array
    assert program.memory_analysis().alias_size_in_bytes >= cache.k.nbytes + cache.v.nbytes


def test_an_abort_frees_the_blocks_within_one_slice():
    engine = shared_engine(16)
    params = SamplingParams(max_tokens=MAX_TOKENS - 4, temperature=0, n=2)
    first, second = (engine.add_request([1, 2, 3, 4], params) for _ in range(2))
    engine.step()
    engine.step()
    assert engine.stats().num_running == 4
    engine.abort(first)
    engine.abort(first)  # twice is no mistake
    engine.abort(99_999)
    engine.step()  # sends it, and reads the slice before
    lengths = np.asarray(engine._runner.state.allocator.lengths)
    assert (lengths > 0).sum() == 2
    assert int(engine._runner.state.allocator.num_free) == BLOCKS - (-(-lengths // BLOCK_SIZE)).sum()
    outputs = {output.request_id: output for output in engine.step()}
    assert engine.stats().num_running == 2
    assert outputs[first].finished
    assert [completion.finish_reason for completion in outputs[first].outputs] == ["abort", "abort"]
    outputs = finish(engine)
    assert set(outputs) == {second}
    assert [len(completion.token_ids) for completion in outputs[second].outputs] == [MAX_TOKENS - 4] * 2
    # Before the device has seen it, and while the host does not yet know where it is.
    queued, sent = engine.add_request([5], params), engine.add_request([6], params)
    engine.abort(queued)
    (output,) = engine.step()
    assert output.request_id == queued
    assert output.finished
    engine.abort(sent)
    assert set(finish(engine)) == {sent}


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_an_abort_of_one_completion_spares_the_others(prefix_cache):
    engine, prompt = shared_engine(16, prefix_cache=prefix_cache), [1, 2, 3, 4, 5]
    params = SamplingParams(max_tokens=MAX_TOKENS - len(prompt), seed=1, n=3)
    (expected,) = engine.generate([prompt], params)
    request = engine.add_request(prompt, params)
    engine.step()
    engine.step()
    engine.abort(request, 1)
    (output,) = finish(engine).values()
    assert [completion.finish_reason for completion in output.outputs] == ["length", "abort", "length"]
    for completion, whole in zip(output.outputs, expected.outputs, strict=True):
        assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]


def test_a_request_begins_with_the_slice_after_the_one_under_way():
    engine = shared_engine(16)
    engine.add_request([1, 2, 3, 4], SamplingParams(max_tokens=MAX_TOKENS - 4, temperature=0))
    engine.step()
    engine.add_request([5] * 20, SamplingParams(max_tokens=STEPS * 2, temperature=0))  # while a slice is under way
    num_slices = engine.stats().num_slices
    engine.step()  # sends the next slice, and reads the one under way
    assert engine.stats().num_slices == num_slices + 1
    assert (np.asarray(engine._runner.state.allocator.lengths) > 20).sum() == 1  # by now its prompt is computed
    finish(engine)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_nobody_gets_a_seat_before_all_that_were_added_are_there(prefix_cache):
    """More than a slice takes: the first slices have no steps, and the one who comes last is the first in rank."""
    engine = shared_engine(16, prefix_cache=prefix_cache)
    with mock.patch.object(runner, "MOST_ARRIVALS", 4):
        params = SamplingParams(max_tokens=MAX_TOKENS - 4, temperature=0)
        others = [engine.add_request([1, 2], params) for _ in range(toy_model.SEATS + 2)]
        urgent = engine.add_request([1, 2], dataclasses.replace(params, max_tokens=1, head_start=1000))
        ended = [output.request_id for output in engine.step() + engine.step() if output.finished]
        assert ended[:1] == [urgent]
        assert finish(engine).keys() == {*others}


def test_a_slice_of_a_small_model_has_more_steps():
    gigabyte = 10**9
    assert [chosen_steps(n * gigabyte, is_gpu=True) for n in (0, 1, 3, 8, 16, 70)] == [16, 12, 4, 2, 1, 1]
    assert [chosen_steps(n * gigabyte, is_gpu=False) for n in (0.5, 1)] == [2, 1]
    assert shared_engine(16).stats().steps_per_slice == STEPS
    assert len(list(shared_engine(16).stream([[1, 2]], SamplingParams(max_tokens=2 * STEPS, temperature=0)))) == 2


def test_an_abort_spares_who_got_the_place():
    """The request ends in the slice that the host has not read when it is aborted and the next one is sent."""
    engine = shared_engine(16)
    first = engine.add_request([1, 2, 3, 4], SamplingParams(max_tokens=2, temperature=0))
    engine.step()
    engine.abort(first)
    second = engine.add_request([5, 6, 7, 8], SamplingParams(max_tokens=MAX_TOKENS - 4, temperature=0))
    assert finish(engine)[second].outputs[0].finish_reason == "length"


def test_a_request_streams_as_it_grows():
    engine = shared_engine(16)
    params = SamplingParams(max_tokens=30, temperature=0)
    seen = [output.outputs[0].token_ids for output in engine.stream([[1, 2, 3]], params)]
    assert [len(tokens) for tokens in seen] == [*range(STEPS, 30, STEPS), 30][: len(seen)]
    assert all(tokens == seen[-1][: len(tokens)] for tokens in seen)


def test_a_stream_loses_nothing_while_others_are_served():
    engine, params = shared_engine(16), SamplingParams(max_tokens=3 * STEPS, temperature=0)
    stream = engine.stream([[1, 2, 3], [4, 5]], params)
    outputs = [next(stream)]
    other = engine.add_request([6, 7], params)
    assert set(finish(engine)) == {other}
    engine.generate([[8]], params)  # long enough for the stream's requests to end
    with pytest.raises(RuntimeError, match="close every stream"):
        engine.sleep()
    assert not engine.has_unfinished_requests
    outputs += stream
    ends = [output for output in outputs if output.finished]
    assert [output.outputs[0].token_ids for output in sorted(ends, key=lambda output: output.request_id)] == [
        continuation(random_weights(), prompt, params)[0] for prompt in ([1, 2, 3], [4, 5])
    ]


def test_a_long_call_shows_how_far_it_is(capsys, monkeypatch):
    engine, params = shared_engine(16), SamplingParams(max_tokens=6)
    engine.generate([[1]], params)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("jaxpaged._engine.progress_bar.INTERVAL", 0)
    engine.generate([[1, 2]] * 20, params, progress=True)
    nothing, *shown, last = capsys.readouterr().err.split("\r")
    assert nothing == ""
    assert shown
    assert re.fullmatch(r"\[#{30}\] 20 of 20 requests, [1-9]\d* tokens a second \n", last)
    for line in shown:
        bar, num_done = re.fullmatch(r"\[(#*)\.*\] (\d+) of 20 requests, \d+ tokens a second ", line).groups()
        assert len(bar) == 30 * int(num_done) // 20


def test_the_seconds_to_spare_are_a_part_of_the_slice_that_runs(monkeypatch):
    runner, sent = shared_engine(16)._runner, Sent([], [], np.zeros(1, bool), 0, num_steps=2, began=5.0)
    now = 5.0
    monkeypatch.setattr("jaxpaged._engine.runner.time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(runner, "_ended", 4.0)
    monkeypatch.setattr(runner, "_step_seconds", deque())
    assert runner.seconds_to_spare == 0.0  # nothing runs
    with monkeypatch.context() as patch:
        patch.setattr(runner.books, "under_way", deque([sent]))
        assert runner.seconds_to_spare == 0.0  # nothing is known of a step
        runner._step_seconds.extend((2.0, 1.0))
        assert runner.seconds_to_spare == 0.75 * 2 * 1.0  # as of the quickest
        now = 6.0
        assert runner.seconds_to_spare == 0.5
        runner._ended = 5.5  # the slice began once the one before it had ended
        assert runner.seconds_to_spare == 1.0
        sent.began = None  # not yet
        assert runner.seconds_to_spare == 1.5
        now = 9.0
        sent.began = 5.0
        assert runner.seconds_to_spare == 0.0
        now, sent.ended = 5.5, 5.25
        assert runner.seconds_to_spare == 0.0


def test_the_end_of_each_slice_is_announced_and_its_steps_are_timed_without_waits():
    engine, over = shared_engine(16), threading.Event()
    engine.on_slice_end = over.set
    for _ in range(3):
        over.clear()
        engine.add_request([1, 2], SamplingParams(max_tokens=1))
        engine.step()
        assert over.wait(60)
        time.sleep(0.3)  # a caller that comes late
        toy_model.finish(engine)
    assert max(engine._runner._step_seconds) < 0.3
    engine.on_slice_end = lambda: None


def test_stats_count_seconds_only_while_there_are_requests():
    engine = shared_engine(16)
    before, begin = engine.stats(), time.perf_counter()
    time.sleep(0.2)
    engine.generate([[1, 2]], SamplingParams(max_tokens=6))
    stats, seconds = engine.stats(), time.perf_counter() - begin
    assert 0 < stats.seconds - before.seconds < seconds - 0.15
    assert stats.tokens_per_second == stats.num_generated / stats.seconds
    assert (stats.num_blocks, stats.num_free_blocks, stats.num_queued, stats.num_running) == (BLOCKS, BLOCKS, 0, 0)


def test_what_can_never_be_served_is_refused_with_its_reason():
    engine, sizes = shared_engine(16), dict(head=None, num_layers=1, num_kv_heads=1, head_dim=8)
    calls = {
        r"a prompt must be a list of at least one token id; got \[\]": lambda: engine.generate([[]], SamplingParams()),
        r"token ids must be from 0 to 2\*\*31 - 1; got 3 to 4294967299": lambda: engine.add_request(
            [3, 2**32 + 3], SamplingParams()
        ),
        r"token ids must be .*; got -1 to 3": lambda: engine.add_request([-1, 3], SamplingParams()),
        "a prompt of 40 tokens and 9 new ones exceed the engine's max_model_len=48": lambda: engine.add_request(
            [1] * 40, SamplingParams(max_tokens=9)
        ),
        r"pass params for each prompt or for all; got len\(prompts\)=2, len\(each\)=3": lambda: engine.generate(
            [[1], [2]], [SamplingParams()] * 3
        ),
        "params must be SamplingParams; got None": lambda: engine.generate([[1]], None),
        r"params must be SamplingParams; got {'max_tokens': 3}": lambda: engine.add_request([1], dict(max_tokens=3)),
        "params must be SamplingParams; got 5": lambda: generate(None, None, [[1]], [5], **sizes),
        "a prompt must be a list of at least one token id; got 3": lambda: generate(
            None, None, [3, 1], SamplingParams(), **sizes
        ),
        "pass at least one prompt": lambda: generate(None, None, [], SamplingParams(), **sizes),
        "a tuple of token ids; got stop_token_ids=5": lambda: SamplingParams(stop_token_ids=5),
        "at most num_stop_ids=2 stop tokens": lambda: engine.add_request([1], SamplingParams(stop_token_ids=(1, 2, 3))),
        "max_tokens must be at least 1; got max_tokens=0": lambda: SamplingParams(max_tokens=0),
        "max_tokens must be an int; got max_tokens=1.5": lambda: SamplingParams(max_tokens=1.5),
        "top_k must be at most 2147483647; got top_k=4294967296": lambda: SamplingParams(top_k=2**32),
        "head_start must be at least -2147483648": lambda: SamplingParams(head_start=-(2**40)),
        "stop_token_ids must be at least 0; got stop_token_ids=-1": lambda: SamplingParams(stop_token_ids=(-1,)),
        "seed must be at most 4294967295": lambda: SamplingParams(seed=2**32),
        "top_p must be a number above 0 and at most 1; got top_p=1.5": lambda: SamplingParams(top_p=1.5),
        "temperature must be a number of at least 0; got temperature=nan": lambda: SamplingParams(
            temperature=float("nan")
        ),
        "temperature must be a number of at least 0; got temperature='1'": lambda: SamplingParams(temperature="1"),
        "temperature must be .*; got temperature=1e[+]39": lambda: SamplingParams(temperature=1e39),
        "top_p must be a number .*; got top_p=None": lambda: SamplingParams(top_p=None),
        "min_p must be a number from 0 to 1; got min_p=-0.1": lambda: SamplingParams(min_p=-0.1),
        "max_tokens must be an int; got max_tokens=True": lambda: SamplingParams(max_tokens=True),
        "top_k must be at least -1; got top_k=-2": lambda: SamplingParams(top_k=-2),
        r"logprobs must be True or False; got logprobs=5\. They return": lambda: SamplingParams(logprobs=5),
        "got stop_token_ids='ab'": lambda: SamplingParams(stop_token_ids="ab"),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()
    assert not engine.has_unfinished_requests


def test_a_request_beyond_the_pool_is_refused():
    options = dataclasses.replace(shared_engine(16)._options, num_blocks=6)
    assert checked_request([1] * 10, SamplingParams(max_tokens=11), options)  # 20 tokens are computed, in 5 blocks
    message = "22 tokens need 6 blocks of 4, and the caches have 5 besides the null block: 21 tokens fit"
    with pytest.raises(ValueError, match=message):
        checked_request([1] * 10, SamplingParams(max_tokens=12), options)
    options = dataclasses.replace(options, windows=(None, 8))
    assert checked_request([1], SamplingParams(max_tokens=8), options)
    with pytest.raises(ValueError, match=r"10 tokens need 6 blocks of 4, .*: 9 tokens fit"):
        checked_request([1], SamplingParams(max_tokens=9), options)


@pytest.mark.parametrize("is_tight", [True, False])
def test_logits_of_every_token_that_need_much_memory_are_warned_of(is_tight, monkeypatch):
    def with_logits(*args):
        caches, hidden = toy_model.apply(*args)
        return caches, toy_model.head(args[0], hidden)

    num_bytes = (toy_model.SEATS + 16) * VOCAB * 4
    monkeypatch.setattr(_device, "memory", lambda: (0, 19 * num_bytes if is_tight else 21 * num_bytes))
    monkeypatch.setattr(program, "check_memory", lambda *_: None)
    expected = pytest.warns(UserWarning, match="apply makes logits for each token") if is_tight else not_warned()
    with toy_model.not_compiled(), expected:
        create_engine(model=with_logits, head=None)


@contextlib.contextmanager
def not_warned():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@dataclasses.dataclass
class Scaled:
    """A head without a hash."""

    scale: float

    def __call__(self, weights, hidden):
        return self.scale * toy_model.head(weights, hidden)


def test_a_head_may_be_any_callable():
    params = SamplingParams(max_tokens=4, temperature=0)
    (output,) = create_engine(head=Scaled(2.0), batch_invariant=True).generate([[1, 2]], params)
    assert output.outputs[0].token_ids == continuation(random_weights(), [1, 2], params)[0]


def test_token_ids_outside_the_vocabulary_are_refused():
    engine = create_engine(vocab_size=VOCAB, batch_invariant=True)
    for call in (
        lambda: engine.add_request([VOCAB], SamplingParams()),
        lambda: engine.generate([[1], [2, VOCAB]], SamplingParams()),
        lambda: engine.score([[1, VOCAB]], [[2]]),
        lambda: engine.score([[1]], [[2, VOCAB]]),
    ):
        with pytest.raises(ValueError, match=f"token ids must be below the engine's vocab_size={VOCAB}; got {VOCAB}"):
            call()
    assert not engine.has_unfinished_requests
    engine.score([[VOCAB - 1]], [[VOCAB - 1]])


def test_a_model_that_cannot_be_served_is_refused():
    def few_rows(weights, tokens, positions, cache, step):
        cache, hidden = toy_model.apply(weights, tokens, positions, cache, step)
        return cache, hidden[:2]

    def with_aux(aux):
        return lambda *args: (*toy_model.apply(*args), aux)

    donated = KVCache.create(num_blocks=4, block_size=4, num_kv_heads=1, head_dim=8, dtype="float32")
    donated.k.delete()

    def no_caches(*args):
        return (), toy_model.apply(*args)[1]

    with pytest.raises(ValueError, match=r"hidden \[22, \.\.\.\], one row for each token; got \[2, 32\] at its root"):
        toy_model.create_engine(model=few_rows)
    for aux, message in (
        (jnp.zeros(3), r"aux \[22, \.\.\.\], one row for each token; got \[3\]"),
        ({"experts": 1}, r"aux \[22, \.\.\.\].*; got int at \['experts'\]"),
        (jnp.zeros(22, jnp.bfloat16), "aux must be of 32 bits or bool; got bfloat16 at its root"),
    ):
        with pytest.raises(ValueError, match=message):
            toy_model.create_engine(model=with_aux(aux))

    def old_caches(weights, tokens, positions, cache, step):
        return cache, toy_model.apply(weights, tokens, positions, cache, step)[1]

    def written_twice(weights, tokens, positions, cache, step):
        cache, _ = toy_model.apply(weights, tokens, positions, cache, step)
        return toy_model.apply(weights, tokens, positions, cache, step)

    def without_its_result(weights, tokens, positions, cache, step):
        toy_model.apply(weights, tokens, positions, cache, step)
        return toy_model.apply(weights, tokens, positions, cache, step)

    def of_two(weights, tokens, positions, caches, step):
        caches = iter([caches])
        return toy_model.apply(weights, tokens, positions, next(caches) and next(caches), step)

    def under(transform, *, returns_cache):
        def model(weights, tokens, positions, cache, step):
            kept = []

            def layer(tokens):
                new_cache, x = toy_model.apply(weights, tokens, positions, cache, step)
                kept.append((new_cache, x))
                return x

            x = transform(layer)(tokens)
            return (kept[0][0], x) if returns_cache else (cache, kept[0][1])

        return model

    def scan(layer):
        return lambda tokens: jax.lax.map(layer, tokens[None])[0]

    for transform in (jax.remat, jax.jit, scan, nnx.remat):
        for returns_cache in (True, False):
            name = r"caches\.k" if returns_cache else "hidden"
            with pytest.raises(ValueError, match=f"apply returned {name} from inside a function that it gave to remat"):
                toy_model.create_engine(model=under(transform, returns_cache=returns_cache))

    for wrong in (written_twice, without_its_result):
        with pytest.raises(ValueError, match=r"two layers write .* in one step"):
            toy_model.create_engine(model=wrong)
    with pytest.raises(ValueError, match="apply asked for more caches than the engine's 1"):
        toy_model.create_engine(model=of_two)

    with pytest.raises(ValueError, match=r"caches like those it was given; .* was float32\[.*\] and is not there"):
        toy_model.create_engine(model=no_caches)
    with pytest.raises(ValueError, match=r"no layer wrote caches\. Call `cache, out = step.attend"):
        toy_model.create_engine(model=old_caches)
    with pytest.raises(ValueError, match=r"apply must return hidden \[22, \.\.\.\], one row for each token"):
        toy_model.create_engine(model=lambda *args: toy_model.apply(*args)[::-1])
    for wrong, num_returned in ((lambda *args: toy_model.apply(*args)[1], 1), (lambda *args: (1, 2, 3, 4), 4)):
        with pytest.raises(ValueError, match=rf"\(caches, hidden\) or \(caches, hidden, aux\); got {num_returned}"):
            toy_model.create_engine(model=wrong)
    for options, message in (
        (dict(head=lambda weights, hidden: hidden[:1]), r"head must return logits \[6, vocab\]; got \[1, 32\]"),
        (dict(head=lambda weights, hidden: None), r"head must return logits \[6, vocab\]; got NoneType"),
        (dict(vocab_size=VOCAB + 1), rf"head must return logits \[6, {VOCAB + 1}\]; got \[6, {VOCAB}\]"),
        (dict(head=None, vocab_size=VOCAB), rf"head=None must return logits \[6, {VOCAB}\]; got \[6, 32\]"),
    ):
        with pytest.raises(ValueError, match=message):
            toy_model.create_engine(**options)
    with pytest.raises(ValueError, match="these caches were donated, perhaps to another engine"):
        create_engine(cache=donated, weights=random_weights())
    with pytest.raises(ValueError, match="caches must be a pytree of KVCaches"):
        Engine(toy_model.apply, random_weights(), [jnp.ones(3)], head=None)


def test_what_an_engine_is_made_from_is_checked():
    weights, cache = (
        random_weights(),
        KVCache.create(num_blocks=4, block_size=4, num_kv_heads=4, head_dim=8, dtype="float32"),
    )
    module = {"layers": [weights, abs], "scale": 0.5}
    calls = {
        r"caches\[0\].k and caches\[2\].k are one array. Make a cache for each layer": dict(
            cache=[cache, dataclasses.replace(cache, k=cache.k + 1, v=cache.v + 1), cache]
        ),
        r"caches.k and caches.v are one array": dict(cache=dataclasses.replace(cache, v=cache.k)),
        "seed must be at least 0; got seed=-1": dict(seed=-1),
        r"a pytree of arrays; got <built-in .* at \['layers'\]\[1\].*eqx.partition\(module, eqx.is_array\)": dict(
            weights=module
        ),
        "got 'bfloat16' at its root": dict(weights="bfloat16"),
        "windows must be a sequence; got windows=8": dict(windows=8),
        "widths must be a sequence; got widths=8": dict(widths=8),
        "num_adapters must be at most 65536": dict(num_adapters=2**31),
    }
    for message, options in calls.items():
        with pytest.raises(ValueError, match=message):
            create_engine(**dict(cache=cache, weights=weights) | options)
    with pytest.raises(ValueError, match=r"a pytree of arrays; got <built-in function abs>"):
        shared_engine(16).update_weights(module)


def test_parameters_are_vllms():
    params = SamplingParams(stop_token_ids=[2, np.int64(3)])
    assert params == SamplingParams(stop_token_ids=(2, 3))
    assert len({params, SamplingParams(stop_token_ids=(2, 3))}) == 1
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(5)
    engine, sampled = shared_engine(16), SamplingParams(max_tokens=20, temperature=2.0, seed=3)
    tokens = [
        engine.generate([[1, 2]], dataclasses.replace(sampled, top_k=top_k))[0].outputs[0].token_ids
        for top_k in (0, -1, 1)
    ]
    assert tokens[0] == tokens[1] != tokens[2]


@functools.cache
def scaled_engine():
    """Of caches in a tuple that `apply` returns in a list, of weights with a number among them, and of a prefix cache
    whose blocks are longer than any request."""

    def apply(weights, tokens, positions, caches, step):
        both = [toy_model.apply(weights["model"], tokens, positions, cache, step) for cache in caches]
        return [cache for cache, _ in both], both[0][1]

    def head(weights, hidden):
        return toy_model.head(weights["model"], hidden) * weights["scale"]

    sizes = dict(num_blocks=4, block_size=16, num_kv_heads=4, head_dim=8, dtype="float32")
    return create_engine(
        model=apply,
        head=head,
        weights={"model": random_weights(), "scale": 1.0},
        cache=tuple(KVCache.create(**sizes) for _ in range(2)),
        max_model_len=12,
        prefix_cache=True,
        batch_invariant=True,
    )


@pytest.mark.parametrize(("seed", "scale"), [(0, 1.0), (1, 2.0)])
def test_apply_may_return_caches_in_lists_and_weights_may_be_numbers(seed, scale):
    engine, greedy = scaled_engine(), SamplingParams(max_tokens=8, temperature=0)
    engine.update_weights({"model": random_weights(seed), "scale": scale})
    (output,) = engine.generate([[1, 2, 3]], greedy)
    assert output.outputs[0].token_ids == continuation(random_weights(seed), [1, 2, 3], greedy)[0]
    assert isinstance(engine._runner.state.caches, tuple)


def test_a_prefix_cache_that_can_find_nothing_is_harmless():
    engine, greedy = scaled_engine(), SamplingParams(max_tokens=8, temperature=0)
    assert engine.generate([[1, 2, 3]], greedy)[0].outputs == engine.generate([[1, 2, 3]], greedy)[0].outputs
    assert engine.stats().num_found == 0


def test_attend_turns_neighbours():
    allocator = BlockAllocator.create(num_blocks=4, block_size=BLOCK_SIZE, num_seqs=2, max_blocks_per_seq=2)
    allocator, slots, _ = allocator.append(jnp.full(2, 3, jnp.int32), q_len=3)
    cache = KVCache.create(
        num_blocks=4, block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=toy_model.HEAD_DIM, dtype="float32"
    )
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 1, toy_model.HEAD_DIM))
    positions, slots = allocator.positions(1)[:, 0], slots[:, -1]
    step = AttentionStep.create(allocator, slots)
    found, _ = step.attend(q, k, v, cache, rotary_frequencies=toy_model.FREQUENCIES, interleaved=True)
    expected, _ = rotate_and_write_kv(cache, q, k, v, slots, positions, toy_model.FREQUENCIES, interleaved=True)
    assert (found.k == expected.k).all()
    halves, _ = step.attend(q, k, v, cache, rotary_frequencies=toy_model.FREQUENCIES)
    assert (halves.k != expected.k).any()
    with pytest.raises(
        ValueError, match=r"rotates nothing without rotary_frequencies; got rotary_frequencies=None. Pass"
    ):
        step.attend(q, k, v, cache, interleaved=True)
    with pytest.raises(ValueError, match=r"takes the cache last, a KVCache or CacheLayer; got Array"):
        step.attend(cache, q, k, v)


@pytest.mark.parametrize(
    ("max_blocks", "options", "before", "inside"),
    [
        (100, dict(), 1, 0),  # 16 pairs of a sequence and a KV head may read 25,600 tokens each
        (100, dict(sliding_window=25_400), 1, 1),  # has its own
        (100, dict(num_partitions=2), 1, 0),
        (2, dict(), 0, 0),
    ],
)
@pytest.mark.parametrize("by_module", [False, True])
def test_the_layers_of_a_step_follow_one_plan(max_blocks, options, before, inside, by_module, monkeypatch):
    """It is made before the scan over layers. A jit of its own, for this test, gives it a name in the jaxpr."""
    monkeypatch.setattr(_device, "gpu", lambda: _device.named("H100"))
    make = partition_plan.default

    @functools.partial(jax.jit, static_argnames=("q_len", "at_once"))
    def named_plan(lengths, window, *, q_len, at_once):
        return make(lengths, window, q_len=q_len, at_once=at_once)

    monkeypatch.setattr(partition_plan, "default", named_plan)
    sizes, indices = dict(num_blocks=40, block_size=256), jnp.arange(8, dtype=jnp.int32)
    stack = KVCache.create(**sizes, num_kv_heads=2, head_dim=64, num_layers=3)
    allocator = BlockAllocator.create(**sizes, num_seqs=8, max_blocks_per_seq=max_blocks)
    step = SimpleNamespace(positions=indices, slots=indices, seats=indices, last=indices, query_starts=None)
    step.sampling = SimpleNamespace(adapter=jnp.full(8, -1, jnp.int32))
    settings = AttentionSettings(
        num_heads=2, num_kv_heads=2, head_dim=64, rotary_frequencies=None, dtype="bfloat16", **options
    )
    module = PagedAttention(128, settings, rngs=nnx.Rngs(0))

    def run(stack):
        attention_step = make_attention_step(allocator, step, Kind(8, 8), stack)

        def layer(carry, index):
            stack, x = carry
            cache = CacheLayer(stack, index)
            if by_module:
                cache, x = module(x, cache, attention_step)
            else:
                heads = x.reshape(8, 2, 64)
                cache, x = attention_step.attend(heads, heads, heads, cache, **options)
            return (cache.stack, x.reshape(8, 128)), None

        return jax.lax.scan(layer, (stack, jnp.ones((8, 128), jnp.bfloat16)), jnp.arange(3))

    equations = jax.make_jaxpr(run)(stack).eqns
    scan = "".join(str(equation) for equation in equations if equation.primitive.name == "scan")
    assert scan.count("name=named_plan") == inside
    assert "".join(map(str, equations)).count("name=named_plan") == before + inside


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_soak_in_a_pool_of_a_third_of_what_the_seats_may_need(prefix_cache):
    engine = shared_engine(16, prefix_cache=prefix_cache)
    with fewer_blocks(engine, TIGHT) as hidden:
        assert_whole(engine, hidden)
        result = soak(engine, 600, num_kinds=30, check=functools.partial(assert_whole, hidden=hidden))
    assert result["abort"] > 0
    assert result["refused"] > 0
    assert result["preempted"] > 0
    assert (result["found"] > 0) == prefix_cache


def test_an_engine_on_four_devices_gives_the_tokens_of_one(load):
    """Each device has one of the heads of every sequence; the pool is tight, and prefixes are found."""
    prompts, params, expected = load
    model, mesh = toy_model.over_heads(4, num_blocks=TIGHT + 1)
    engine = create_engine(**model, prefix_cache=True, host_cache_bytes=10**6)

    def tokens():
        outputs = engine.generate(prompts, params)
        return [[completion.token_ids for completion in output.outputs] for output in outputs]

    assert tokens() == [[tokens for tokens, _ in completions] for completions in expected]
    assert engine.stats().num_preempted > 0
    engine.update_weights(toy_model.weights_over_heads(mesh, 1))
    assert tokens() != [[tokens for tokens, _ in completions] for completions in expected]
    engine.update_weights(jax.device_get(model["weights"]))  # each goes where the one before it lies
    tokens()
    assert tokens() == [[tokens for tokens, _ in completions] for completions in expected]
    assert engine.stats().num_found > engine.stats().num_brought > 0  # each device has its part of what is on the host
    for leaf in jax.tree.leaves(engine._runner.state.allocator):
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        assert len(others) == 3
        assert all((other == first).all() for other in others)
    shape = f"f32[{TIGHT + 1},{BLOCK_SIZE},"
    gathers = [line for name, _, line in instructions(engine._runner.program.run.as_text()) if name == "all-gather"]
    assert gathers
    assert not any(shape in line for line in gathers)


def test_engines_on_two_devices_share_the_prompts_out():
    other = jax.devices()[1]
    engines = shared_engine(16), create_engine(device=other, batch_invariant=True)
    prompts, params = [[3, 1, 4], [1, 5], [9, 2, 6], [5, 3], [5, 8]], SamplingParams(max_tokens=6, seed=7)
    expected = engines[0].generate(prompts, params)
    with ThreadPoolExecutor() as threads:
        shares = threads.map(
            lambda engine, share: engine.generate(share, params), engines, (prompts[::2], prompts[1::2])
        )
    for outputs, alone in zip(shares, (expected[::2], expected[1::2]), strict=True):
        assert [x.outputs[0].token_ids for x in outputs] == [x.outputs[0].token_ids for x in alone]
    assert all(leaf.devices() == {other} for leaf in jax.tree.leaves(engines[1]._runner.state))
