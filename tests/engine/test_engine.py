"""The engine: tokens equal to one-by-one generation under any load, aborts, streams, and its compiled program."""

import contextlib
import dataclasses
import functools
import re
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.soak.engine import soak
from jaxpaged import AttentionStep, BlockAllocator, SamplingParams, _device
from jaxpaged._engine import program, runner
from jaxpaged._engine.books import Sent
from jaxpaged._slice.model import Setup, apply_head
from tests import toy_model
from tests.compiled import instructions
from tests.logits_model import processed, with_changes
from tests.toy_model import (
    BLOCK_SIZE,
    BLOCKS,
    MAX_TOKENS,
    SEATS,
    STEPS,
    TIGHT,
    VOCAB,
    assert_invariants,
    continuation,
    counting,
    create_cache,
    create_engine,
    create_once,
    expected_tokens,
    fewer_blocks,
    finish,
    greedy,
    not_compiled,
    operations_on,
    random_weights,
    requests,
    shared_engine,
    tokens_of,
    until_module_ends,
)

pytestmark = pytest.mark.usefixtures("idle_engines")
with_and_without_prefix_cache = pytest.mark.parametrize("prefix_cache", [False, True], ids=["plain", "prefix cache"])


@pytest.fixture(scope="module")
def load():
    """Requests, and the expected tokens and logprobs of each completion."""
    prompts, params = requests(40)
    expected = [
        [continuation(random_weights(), prompt, of_one, i) for i in range(of_one.n)]
        for prompt, of_one in zip(prompts, params, strict=True)
    ]
    return prompts, params, expected


@with_and_without_prefix_cache
@pytest.mark.parametrize("left", [BLOCKS, TIGHT], ids=["plenty", "tight"])
def test_tokens_do_not_depend_on_the_load(load, left, prefix_cache):
    prompts, params, expected = load
    engine = shared_engine(prefix_cache=prefix_cache)
    with counting(engine) as counts, fewer_blocks(engine, left) as hidden:
        for order in (np.arange(40), np.arange(40)[::-1], np.random.default_rng(1).permutation(40)):
            outputs = engine.generate([prompts[i] for i in order], [params[i] for i in order])
            assert_invariants(engine, hidden)
            for i, output in zip(order, outputs, strict=True):
                for (tokens, logprobs), completion in zip(expected[i], output.outputs, strict=True):
                    assert completion.token_ids == tokens
                    stopped = tokens[-1] in params[i].stop_token_ids
                    assert completion.finish_reason == ("stop" if stopped else "length")
                    assert (completion.logprobs is not None) == params[i].logprobs
                    if params[i].logprobs:
                        np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-4)
    assert (counts.num_preempted > 0) == (left == TIGHT)
    assert (counts.num_found > 0) == prefix_cache  # in the second and third order
    if left == TIGHT:  # few seats are occupied, so that all kinds of steps occur
        sharing, others = np.split(np.asarray(engine._runner.state.num_of_kind), [2 * prefix_cache])
        assert (others > 0).all()
        assert (sharing.sum() > 0) == prefix_cache


def test_a_batch_invariant_engine_gives_equal_bits_under_any_load():
    prompts, params = requests(20)
    params = [dataclasses.replace(of_one, logprobs=True, n=1) for of_one in params]

    def num_different(engine, left):
        with fewer_blocks(engine, left):
            together = engine.generate(prompts[::-1], params[::-1])[::-1]
        return sum(one.outputs != other.outputs for one, other in zip(alone, together, strict=True))

    exact = shared_engine(prefix_cache=True, batch_invariant=True)
    alone = [exact.generate([prompt], of_one)[0] for prompt, of_one in zip(prompts, params, strict=True)]
    with counting(exact) as counts:
        assert [num_different(exact, left) for left in (BLOCKS, TIGHT)] == [0, 0]
    assert counts.num_preempted > 0
    assert counts.num_found > 0
    assert num_different(shared_engine(), BLOCKS)


def test_a_layer_uses_the_partitions_of_the_step_by_default(monkeypatch):
    given = []
    attend = "jaxpaged._attention.attention_step.attend"
    monkeypatch.setattr(attend, lambda q, *_, num_partitions, **options: given.append(num_partitions) or q)
    allocator = BlockAllocator.create(num_blocks=3, block_size=BLOCK_SIZE, num_seqs=1, max_blocks_per_seq=2)
    step, x = AttentionStep.create(allocator, jnp.int32([4]), num_partitions=1), jnp.zeros((1, 4, 8))
    for options in (dict(), dict(num_partitions=None), dict(num_partitions=2)):
        step.attend(x, x, x, create_cache(3), **options)
    assert given == [1, 1, 2]


def test_the_engine_does_not_share_the_callers_container_of_weights():
    engine, weights = shared_engine(), random_weights(1)
    engine.update_weights(weights)
    weights["head"] *= 2
    assert tokens_of(engine.generate([[1, 2]], greedy())) == [expected_tokens([1, 2], greedy(), 1)]


def test_requests_without_a_seed_get_different_ones():
    one, other = tokens_of(shared_engine().generate([[1, 2]] * 2, SamplingParams(max_tokens=10)))
    assert one != other


def count_tokens(engine, *request):
    """(tokens computed, tokens found) for requests, and their outputs."""
    with counting(engine) as counts:
        outputs = engine.generate(*request)
    return (counts.num_computed, counts.num_found), outputs


def test_a_prefix_is_found_until_the_weights_change():
    engine, prompt = shared_engine(prefix_cache=True), [*range(21), 5]  # five full blocks, and two tokens

    def serve_with_seed(seed):
        counts, outputs = count_tokens(engine, [prompt], greedy())
        assert tokens_of(outputs) == [expected_tokens(prompt, greedy(), seed)]
        return counts

    assert [serve_with_seed(0), serve_with_seed(0)] == [(29, 0), (9, 20)]
    # A request that starts with old weights and ends with new ones: none of its blocks match.
    request = engine.add_request(prompt, greedy(MAX_TOKENS - len(prompt)))
    engine.step()
    engine.update_weights(random_weights(1))
    assert set(finish(engine)) == {request}
    assert [serve_with_seed(1), serve_with_seed(1)] == [(29, 0), (9, 20)]
    engine.update_weights(random_weights())
    assert serve_with_seed(0) == (29, 0)


def test_blocks_that_old_weights_began_do_not_match_with_new_ones():
    """The first block is full but not yet cached when the weights change."""
    engine, prompt = shared_engine(prefix_cache=True), [9, 8, 7]
    engine.add_request(prompt, greedy(20))
    engine.step()
    engine.update_weights(random_weights(1))
    served = prompt + tokens_of(finish(engine).values())[0]
    counts, outputs = count_tokens(engine, [served], greedy(20))
    assert counts == (len(served) + 19, 0)
    assert tokens_of(outputs) == [expected_tokens(served, greedy(20), 1)]


def test_equal_prompts_are_computed_once():
    prompt, params = [*range(22)], SamplingParams(max_tokens=6, seed=7, n=4)
    apart, expected = count_tokens(shared_engine(), [prompt], params)
    engine = shared_engine(prefix_cache=True)
    together, outputs = count_tokens(engine, [prompt], params)
    assert tokens_of(outputs) == tokens_of(expected)
    new = 4 * 5  # the last token of each is not computed
    assert apart == (4 * 22 + new, 0)
    # The others compute the end of the prompt, which does not fill a block.
    assert together == (22 + 3 * 2 + new, 3 * 20)
    # Prompts with only a common prefix wait for the first one, too.
    others, _ = count_tokens(engine, [[*range(40, 20, -1), i] for i in range(6)], SamplingParams(max_tokens=1))
    assert others == (21 + 5 * 1, 5 * 20)


def test_an_output_says_how_much_of_its_prompt_was_cached():
    engine, prompt = shared_engine(prefix_cache=True), [*range(30, 8, -1)]
    for expected in (0, 20):
        (output,) = engine.generate([prompt], dataclasses.replace(greedy(), n=2))
        assert output.num_cached_tokens == expected
    # Blocks that a preempted request finds on its return do not count: they are its own.
    prompts = [[i, *range(11)] for i in range(40, 46)]
    with counting(engine) as counts, fewer_blocks(engine, TIGHT):
        outputs = engine.generate(prompts, greedy(MAX_TOKENS - 12))
    assert counts.num_preempted > 0
    assert counts.num_found > 0
    assert [output.num_cached_tokens for output in outputs] == [0] * len(prompts)


@with_and_without_prefix_cache
def test_the_compiled_slice_copies_no_cache_and_never_calls_the_host(prefix_cache):
    engine = shared_engine(prefix_cache=prefix_cache)
    compiled, cache = engine._runner.program.run, engine._runner.state.caches
    text = compiled.as_text()
    on_cache = operations_on(text, f"f32[{','.join(map(str, cache.k.shape))}]")
    assert {"scatter", "fusion", "while"} & set(on_cache)  # the search finds the cache
    on_tokens = operations_on(text, f"s32[{toy_model.MAX_REQUESTS},{MAX_TOKENS}]")
    assert [name for name in on_cache + on_tokens if name.startswith("copy")] == []
    assert not {name for name, *_ in instructions(text)} & {"infeed", "outfeed", "send", "recv"}
    assert "callback" not in text
    assert len(jax.tree.leaves(compiled.out_info[1])) == 1  # the host reads a single array, because each costs time
    assert compiled.memory_analysis().alias_size_in_bytes >= cache.k.nbytes + cache.v.nbytes


def test_an_abort_frees_the_blocks_within_one_slice():
    engine = shared_engine()
    params = dataclasses.replace(greedy(MAX_TOKENS - 4), n=2)
    first, second = (engine.add_request([1, 2, 3, 4], params) for _ in range(2))
    engine.step()
    engine.step()
    assert engine.stats().num_running == 4
    engine.abort(first)
    engine.abort(first)  # a second abort is allowed
    engine.step()  # sends the abort, and reads the previous slice
    lengths = np.asarray(engine._runner.state.allocator.lengths)
    assert (lengths > 0).sum() == 2
    assert int(engine._runner.state.allocator.num_free) == BLOCKS - (-(-lengths // BLOCK_SIZE)).sum()
    outputs = {output.request_id: output for output in engine.step()}
    assert engine.stats().num_running == 2
    assert outputs[first].finished
    assert [completion.finish_reason for completion in outputs[first].outputs] == ["abort", "abort"]
    outputs = finish(engine)
    assert set(outputs) == {second}
    assert [len(tokens) for tokens in tokens_of(outputs.values())] == [MAX_TOKENS - 4] * 2


@with_and_without_prefix_cache
def test_an_abort_of_one_completion_spares_the_others(prefix_cache):
    engine, prompt = shared_engine(prefix_cache=prefix_cache), [1, 2, 3, 4, 5]
    params = SamplingParams(max_tokens=MAX_TOKENS - len(prompt), seed=1, n=3)
    expected = tokens_of(engine.generate([prompt], params))
    request = engine.add_request(prompt, params)
    engine.step()
    engine.step()
    engine.abort(request, 1)
    (output,) = finish(engine).values()
    assert [completion.finish_reason for completion in output.outputs] == ["length", "abort", "length"]
    for tokens, whole in zip(tokens_of([output]), expected, strict=True):
        assert tokens == whole[: len(tokens)]


def test_a_request_starts_with_the_slice_after_the_current_one():
    engine = shared_engine()
    engine.add_request([1, 2, 3, 4], greedy(MAX_TOKENS - 4))
    engine.step()
    engine.add_request([5] * 20, greedy(STEPS * 2))  # while a slice runs
    with counting(engine) as counts:
        engine.step()  # sends the next slice, and reads the one that ran
    assert counts.num_slices == 1
    assert (np.asarray(engine._runner.state.allocator.lengths) > 20).sum() == 1  # its prompt is computed
    finish(engine)


@with_and_without_prefix_cache
def test_no_request_gets_a_seat_before_all_that_were_added_have_arrived(prefix_cache):
    """More requests than fit into one slice: the first slices have no steps, and the last request ranks first."""
    engine, params = shared_engine(prefix_cache=prefix_cache), greedy(MAX_TOKENS - 4)
    with mock.patch.object(runner, "MOST_ARRIVALS", 4):
        others = [engine.add_request([1, 2], params) for _ in range(SEATS + 2)]
        urgent = engine.add_request([1, 2], dataclasses.replace(params, max_tokens=1, head_start=1000))
        ended = [output.request_id for output in engine.step() + engine.step() if output.finished]
        assert ended[:1] == [urgent]
        assert finish(engine).keys() == {*others}


def test_generate_starts_the_longest_requests_first_and_stream_the_first():
    engine, prompts = shared_engine(), [[i + 1, 2] for i in range(SEATS + 1)]
    params = [SamplingParams(max_tokens=STEPS) for _ in range(SEATS)] + [SamplingParams(max_tokens=4 * STEPS)]
    params = [dataclasses.replace(of_one, seed=i) for i, of_one in enumerate(params)]
    with counting(engine) as generated:
        outputs = engine.generate(prompts, params)
    with counting(engine) as streamed:
        ends = {output.request_id: output for output in engine.stream(prompts, params)}
    assert tokens_of(outputs) == tokens_of([ends[i] for i in sorted(ends)])
    # The last prompt runs beside the others, not after one of them.
    assert generated.num_steps <= streamed.num_steps - STEPS // 2


def test_a_request_streams_as_it_grows():
    seen = tokens_of(shared_engine().stream([[1, 2, 3]], greedy(30)))
    assert [len(tokens) for tokens in seen] == [*range(STEPS, 30, STEPS), 30]
    assert all(tokens == seen[-1][: len(tokens)] for tokens in seen)


def test_a_stream_loses_no_token_while_other_calls_run():
    engine, params, prompts = shared_engine(), greedy(3 * STEPS), [[1, 2, 3], [4, 5]]
    stream = engine.stream(prompts, params)
    outputs = [next(stream)]
    other = engine.add_request([6, 7], params)
    assert set(finish(engine)) == {other}
    engine.generate([[8]], params)  # long enough for the stream's requests to end
    with pytest.raises(RuntimeError, match="close every stream"):
        engine.sleep()
    assert not engine.has_unfinished_requests
    ends = sorted((output for output in [*outputs, *stream] if output.finished), key=lambda output: output.request_id)
    assert tokens_of(ends) == [expected_tokens(prompt, params) for prompt in prompts]


def test_a_long_call_shows_its_progress(capsys, monkeypatch):
    engine, params = shared_engine(), SamplingParams(max_tokens=6)
    engine.generate([[1]], params)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("jaxpaged._engine.progress_bar.INTERVAL", 0)
    engine.generate([[1, 2]] * 20, params, progress=True)
    _, *shown, last = capsys.readouterr().err.split("\r")
    assert re.fullmatch(r"\[#{30}\] 20 of 20 requests, [1-9]\d* tokens a second \n", last)
    for line in shown:
        bar, num_done = re.fullmatch(r"\[(#*)\.*\] (\d+) of 20 requests, \d+ tokens a second ", line).groups()
        assert len(bar) == 30 * int(num_done) // 20


def test_seconds_to_spare_are_a_fraction_of_the_running_slice(monkeypatch):
    engine = shared_engine()
    assert engine.seconds_to_spare == 0  # no slice runs

    def spare(now, *, began=5.0, ended=None, end_before=4.0, step_seconds=(2.0, 1.0)):
        sent = Sent([], [], np.zeros(1, bool), 0, num_steps=2, began=began)
        sent.ended = ended
        with monkeypatch.context() as patch:
            patch.setattr(runner, "time", SimpleNamespace(perf_counter=lambda: now))
            patch.setattr(engine._runner, "_ended", end_before)
            patch.setattr(engine._runner, "_step_seconds", deque(step_seconds))
            patch.setattr(engine._books, "under_way", deque([sent]))
            return engine.seconds_to_spare

    assert spare(5.0, step_seconds=()) == 0  # no step was timed
    assert spare(5.0) == 0.75 * 2 * 1.0  # by the fastest step
    assert spare(6.0) == 0.5
    assert spare(6.0, end_before=5.5) == 1.0  # the slice started after the previous one
    assert spare(6.0, end_before=5.5, began=None) == 1.5  # not yet
    assert spare(9.0) == spare(5.5, ended=5.25) == 0


def test_the_end_of_each_slice_is_announced_and_steps_are_timed_without_waits():
    engine, over = shared_engine(), threading.Event()
    engine.on_slice_end = over.set
    for _ in range(3):
        over.clear()
        engine.add_request([1, 2], SamplingParams(max_tokens=1))
        engine.step()
        assert over.wait(60)
        time.sleep(0.3)  # a late caller
        finish(engine)
    assert max(engine._runner._step_seconds) < 0.3
    engine.on_slice_end = lambda: None


def test_stats_count_seconds_only_while_there_are_requests():
    engine = shared_engine()
    before, begin = engine.stats(), time.perf_counter()
    time.sleep(0.2)
    engine.generate([[1, 2]], SamplingParams(max_tokens=6))
    stats, seconds = engine.stats(), time.perf_counter() - begin
    assert 0 < stats.seconds - before.seconds < seconds - 0.15
    assert stats.tokens_per_second == stats.num_generated / stats.seconds
    assert (stats.num_blocks, stats.num_free_blocks, stats.num_queued, stats.num_running) == (BLOCKS, BLOCKS, 0, 0)


@pytest.mark.parametrize("is_tight", [True, False])
def test_large_logits_of_every_token_give_a_warning(is_tight, monkeypatch):
    def with_logits(*args):
        caches, hidden = toy_model.apply(*args)
        return caches, toy_model.head(args[0], hidden)

    num_bytes = (SEATS + 16) * VOCAB * 4
    monkeypatch.setattr(_device, "memory", lambda: (0, (19 if is_tight else 21) * num_bytes))
    monkeypatch.setattr(program, "check_memory", lambda *_: None)
    warned = pytest.warns(UserWarning, match="apply makes logits for each token")
    with not_compiled(), warned if is_tight else contextlib.nullcontext():  # another warning is an error
        create_engine(model=with_logits, head=None)


@dataclasses.dataclass
class ScaledHead:
    """A head without a hash."""

    scale: float

    def __call__(self, weights, hidden):
        return self.scale * weights["scale"] * toy_model.head(weights["model"], hidden)


def apply_to_two_caches(weights, tokens, positions, caches, step):
    both = [toy_model.apply(weights["model"], tokens, positions, cache, step) for cache in caches]
    return [cache for cache, _ in both], both[0][1]


@until_module_ends
def scaled_engine():
    """An engine whose caches are a tuple that `apply` returns as a list, with a number as a weight, and a prefix cache
    whose blocks are longer than any request."""
    return create_engine(
        model=apply_to_two_caches,
        head=ScaledHead(2.0),
        weights={"model": random_weights(), "scale": 1.0},
        cache=tuple(create_cache(4, block_size=16) for _ in range(2)),
        max_model_len=12,
        prefix_cache=True,
        batch_invariant=True,
    )


@pytest.mark.parametrize(("seed", "scale"), [(0, 1.0), (1, 2.0)])
def test_caches_may_be_lists_weights_numbers_and_the_head_any_callable(seed, scale):
    engine = scaled_engine()
    engine.update_weights({"model": random_weights(seed), "scale": scale})
    assert tokens_of(engine.generate([[1, 2, 3]], greedy())) == [expected_tokens([1, 2, 3], greedy(), seed)]
    assert isinstance(engine._runner.state.caches, tuple)


def test_a_single_row_of_logits_is_computed_twice_on_a_gpu():
    num_rows = []

    def head(weights, hidden):
        num_rows.append(len(hidden))
        return toy_model.head(weights, hidden)

    weights, hidden = random_weights(), jax.random.normal(jax.random.key(0), (3, toy_model.FEATURES))
    for is_gpu in (False, True):
        options = dataclasses.replace(shared_engine()._runner.options, is_gpu=is_gpu)
        logits = apply_head(Setup(toy_model.apply, head, (), options), weights, hidden, jnp.array([1]))
        np.testing.assert_allclose(logits, hidden[1:2] @ weights["head"], rtol=1e-5, atol=1e-5)
    assert num_rows == [1, 2]


def test_a_prefix_cache_with_too_large_blocks_is_harmless():
    one, other = (tokens_of(scaled_engine().generate([[1, 2, 3]], greedy())) for _ in range(2))
    assert one == other
    assert scaled_engine().stats().num_found == 0


def test_sampling_parameters_have_vllms_names():
    params = SamplingParams(stop_token_ids=[2, np.int64(3)])
    assert params == SamplingParams(stop_token_ids=(2, 3))
    assert len({params, SamplingParams(stop_token_ids=(2, 3))}) == 1
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(5)
    params = [SamplingParams(max_tokens=20, temperature=2.0, seed=3, top_k=top_k) for top_k in (0, -1, 1)]
    none, minus_one, one = tokens_of(shared_engine().generate([[1, 2]] * 3, params))
    assert none == minus_one != one


@pytest.mark.filterwarnings("ignore:XLA computes this call")
@pytest.mark.parametrize(("max_model_len", "has_plan"), [(25_600, True), (512, False)])
def test_the_layers_of_a_step_follow_one_plan(max_model_len, has_plan, monkeypatch):
    plans = []

    def apply(weights, tokens, positions, cache, step):
        plans.append(step.plan)
        return toy_model.apply(weights, tokens, positions, cache, step)

    monkeypatch.setattr(_device, "gpu", lambda: _device.named("H100"))
    cache = create_cache(101, block_size=256)
    with not_compiled():
        create_engine(model=apply, weights=random_weights(), cache=cache, max_model_len=max_model_len)
    assert any(plan is not None for plan in plans) == has_plan  # a step with chunks has no plan


@with_and_without_prefix_cache
def test_a_soak_in_a_third_of_the_blocks_that_seats_need(prefix_cache):
    engine = shared_engine(prefix_cache=prefix_cache)
    with fewer_blocks(engine, TIGHT) as hidden:
        assert_invariants(engine, hidden)
        result = soak(engine, 600, num_kinds=30, check=functools.partial(assert_invariants, hidden=hidden))
    assert min(result[name] for name in ("abort", "refused", "preempted")) > 0
    assert (result["found"] > 0) == prefix_cache


def test_an_engine_on_four_devices_gives_the_tokens_of_one(load):
    """Each device has one head of every sequence. The pool is tight, and prefixes match."""
    prompts, params, expected = load
    expected = [tokens for completions in expected for tokens, _ in completions]
    model, mesh = toy_model.over_heads(4, num_blocks=TIGHT + 1)
    engine = create_engine(**model, prefix_cache=True, host_cache_bytes=10**6)
    assert tokens_of(engine.generate(prompts, params)) == expected
    assert engine.stats().num_preempted > 0
    engine.update_weights(toy_model.weights_over_heads(mesh, 1))
    assert tokens_of(engine.generate(prompts, params)) != expected
    engine.update_weights(jax.device_get(model["weights"]))  # placed like the previous weights
    for _ in range(2):
        assert tokens_of(engine.generate(prompts, params)) == expected
    assert engine.stats().num_found > engine.stats().num_brought > 0  # each device has its part of the host's blocks
    changed = with_changes(params, 0, VOCAB)[:6]
    expected = [
        continuation(random_weights(), prompt, one, i, processed)[0]
        for prompt, one in zip(prompts, changed, strict=False)
        for i in range(one.n)
    ]
    assert tokens_of(engine.generate(prompts[:6], changed)) == expected
    for leaf in jax.tree.leaves(engine._runner.state.allocator):
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        assert len(others) == 3
        assert all((other == first).all() for other in others)
    text = engine._runner.program.run.as_text()
    gathers = [line for name, _, line in instructions(text) if name == "all-gather"]
    assert gathers
    assert not any(f"f32[{TIGHT + 1},{BLOCK_SIZE}," in line for line in gathers)


def test_engines_on_two_devices_divide_the_prompts():
    other = jax.devices()[1]
    engines = shared_engine(), create_once(device=other, batch_invariant=True)
    prompts, params = [[3, 1, 4], [1, 5], [9, 2, 6], [5, 3], [5, 8]], SamplingParams(max_tokens=6, seed=7)
    expected = tokens_of(engines[0].generate(prompts, params))
    with ThreadPoolExecutor() as threads:
        parts = threads.map(lambda engine, part: engine.generate(part, params), engines, (prompts[::2], prompts[1::2]))
    assert [tokens_of(outputs) for outputs in parts] == [expected[::2], expected[1::2]]
    assert all(leaf.devices() == {other} for leaf in jax.tree.leaves(engines[1]._runner.state))
