"""Benchmarks run at toy sizes, and what they check before they time can fail."""

import argparse
import dataclasses
import functools
import importlib
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks import checks, harness
from benchmarks.allocator import loops, operations
from benchmarks.engine import profile_slice
from benchmarks.figures.memory import seat_lengths
from benchmarks.harness import by_kernel
from benchmarks.kernels import cache_ops, decode, points, prefill
from benchmarks.kernels.points import make_tables, parse, point_tables
from jaxpaged import paged_attention, paged_attention_reference
from jaxpaged.ops import copy_blocks

PROGRAMS = [
    ".".join(path.relative_to(harness.ROOT).with_suffix("").parts)
    for path in sorted((harness.ROOT / "benchmarks").glob("*/*.py"))
    if "__main__" in path.read_text()
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_says_what_it_does(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(name).main()
    assert not end.value.code
    assert "--help" in capsys.readouterr().out


def test_the_readme_says_which_program_answers_what():
    text = (harness.ROOT / "benchmarks" / "README.md").read_text()
    named = {f"benchmarks.{name}" for name in re.findall(r"`((?:kernels|allocator|engine|soak|figures)\.\w+)`", text)}
    assert named == {name for name in PROGRAMS if name.count(".") == 2}


@pytest.fixture
def short_loops(monkeypatch):
    """An iteration of the allocator's loops takes 2 steps, not 8: less to compile."""
    run = functools.partial(loops.run.__wrapped__, unroll=2)
    monkeypatch.setattr(loops, "run", jax.jit(run, static_argnames=("body", "num_steps", "unroll")))


def test_the_allocators_benchmark_runs_and_keeps_its_results(short_loops, tmp_path, capsys):
    output = tmp_path / "allocator.json"
    command = ["--toy", "--operations", "append", "match_prefix, free", "--output", str(output)]
    operations.main(command)
    results = json.loads(output.read_text())["points"]
    assert {result.get("operation") for result in results.values()} == {"append", "match_prefix, free"}
    assert len(results) == 2 * 2
    assert "append | 8 seqs, 512 blocks" in capsys.readouterr().out
    operations.main(command)
    assert "append" not in capsys.readouterr().out  # it is there


def test_the_checks_see_a_loop_that_did_nothing():
    state = loops.start(operations.TOY_POINT)
    with pytest.raises(AssertionError, match="append"):
        loops.check("append", state, state, 3)
    refused = dataclasses.replace(state, ok=jnp.zeros_like(state.ok))
    with pytest.raises(AssertionError, match="append, free"):
        loops.check("append, free", state, refused, 3)


def test_a_free_seat_takes_the_next_request():
    assert seat_lengths([(3, 3), (1, 1), (5, 1)], num_seats=2).tolist() == [[4, 2], [5, 6], [6, 0]]


def test_the_time_of_a_slice_is_split_by_what_the_gpu_does():
    events = [
        (0.0, 10.0, "gemm"),
        (8.0, 12.0, "small"),  # two of its four us run beside the first
        (15.0, 16.0, "MemcpyD2H"),
        (30.0, 50.0, "gemm"),
        (1050.0, 1060.0, "gemm"),
    ]
    found = profile_slice.split(events)
    assert found == pytest.approx(
        {"busy": 0.043, "small": 0.003, "events": 5, "gaps": 0.003, "condition": 0.014, "conditions": 1, "between": 1.0}
        | {"device": 1.06}
    )


def test_kernels_of_one_name_are_added_up():
    times = [("loop_add_fusion_7", 3.0), ("copy", 4.0), ("loop_add_fusion", 5.0)]
    assert by_kernel(times, 2) == {"loop_add_fusion": [4.0, 1.0], "copy": [2.0, 0.5]}


def test_options_of_xla_are_a_dict():
    parser = argparse.ArgumentParser()
    harness.add_xla(parser)
    assert parser.parse_args([]).xla is None
    assert parser.parse_args(["--xla", "a=1", "b=c=d"]).xla == {"a": "1", "b": "c=d"}


def test_a_point_of_sequences_that_share_blocks():
    point = parse("6/2 4x48 shared=32 groups=2")
    tables = point_tables(point)
    assert tables.shape == (4, 3)
    assert (tables[0, :2] == tables[1, :2]).all()
    assert (tables[2, :2] == tables[3, :2]).all()
    assert sorted({*tables.flat}) == [*range(1, 2 * 2 + 4 + 1)]
    assert point.cache_shape[0] == 2 * 2 + 4 + 1
    assert point.slots == 2 * 32 + 4 * 16
    assert (point_tables(parse("6/2 4x48")) == make_tables((3,) * 4, 3)).all()


def test_prompts_by_every_method_that_a_cpu_has(tmp_path):
    output = tmp_path / "prefill.json"
    command = ["--toy", "--peers", "cudnn", "--output", str(output)]
    prefill.main(command)
    results = json.loads(output.read_text())["points"]
    fresh, *others = prefill.TOY_POINTS
    by_xla = {f"{point} xla" for point in others}
    assert set(results) == {f"{fresh} {name}" for name in ("xla", "cudnn", "gather, cudnn")} | by_xla
    kept = output.stat().st_mtime_ns
    prefill.main(command)  # all is there
    assert output.stat().st_mtime_ns == kept


def test_a_decode_call_on_latents_of_8_and_16_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(points, "COLD_BYTES", 10**5)
    monkeypatch.setattr(points, "L2_BYTES", 10**5)
    monkeypatch.setattr(points, "MAX_CALLS", 2)
    monkeypatch.setattr(decode, "read_bandwidth", lambda: 1e12)
    wide = "2/1 2x64 head_dim=576 latent=512 block_size=16"
    narrow = f"{wide} cache=float8_e4m3fn scale=token_head"
    output = tmp_path / "latents.json"
    decode.main(["--implementation", "xla", "--output", str(output), "--points", wide, narrow])
    results = json.loads(output.read_text())["points"]
    assert [results[name]["bytes"] for name in (wide, narrow)] == [2 * 64 * 576 * 2, 2 * 64 * (576 + 4)]
    assert results[wide]["floor"] == 2 * 64 * 576 * 2 / 1e6


def test_the_flops_of_what_is_visible():
    def pairs(name):
        point = prefill.prompt(name)
        return point.flops // (4 * 6 * point.head_dim)

    assert pairs("6/2 1x4 q_len=4") == 1 + 2 + 3 + 4
    assert pairs("6/2 2x5 q_len=2") == 2 * (4 + 5)
    assert pairs("6/2 1x5 q_len=3 window=4") == 3 + 4 + 4
    assert pairs("6/2 2x7 + 1x3 q_len=all") == 7 + 7 + (1 + 2 + 3)


@pytest.mark.parametrize("wrong", ["history", "order"])
def test_the_check_sees_a_prompt_that_was_not_attended(wrong, monkeypatch):
    def attention(q, k, v, tables, lengths, **options):
        if wrong == "history":
            lengths = jnp.minimum(lengths, q.shape[1])
        else:
            q = q[:, ::-1]
        return paged_attention(q, k, v, tables, lengths, **options)

    monkeypatch.setattr(prefill, "paged_attention", attention)
    with pytest.raises(AssertionError, match="wrong result at"):
        prefill.main(["--points", prefill.TOY_POINTS[1], "--methods", "xla"])


def test_a_slope_that_is_not_above_zero_is_measured_again(monkeypatch):
    dispatched, result = 0, jnp.zeros(())

    def dispatch(i):
        nonlocal dispatched
        dispatched += 1
        return result

    # A clock that stands still for the first five slopes, and then goes a second a dispatch.
    monkeypatch.setattr(harness.time, "perf_counter", lambda: float(max(0, dispatched - (7 + 5 * 2000))))
    assert harness.slope_microseconds(dispatch, 1) == 1e6


def test_the_cache_operations(tmp_path):
    output = tmp_path / "cache_ops.json"
    cache_ops.main(["--toy", "--output", str(output)])
    results = json.loads(output.read_text())["points"]
    assert results.pop("plain copy")["bytes_per_microsecond"]["kernel"] > 0
    assert {name.split(",")[0].split(" |")[0] for name in results} >= {"copy_blocks", "by XLA", "gather_kv", "write_kv"}
    assert all(result["bytes"] > 0 and result["of_copy"] > 0 for result in results.values())


def test_the_check_sees_a_copy_that_was_not_made():
    stack = cache_ops.create_stack(cache_ops.TOY)
    pairs = jnp.asarray([1, 2]), jnp.asarray([3, 4])
    cache_ops.check_copy(copy_blocks, stack, *pairs)
    with pytest.raises(AssertionError, match="copied something else"):
        cache_ops.check_copy(lambda cache, sources, destinations: cache, stack, *pairs)


class Memory:
    """Stands for a GPU's memory: what a way leaves unwritten of its output is what the memory held."""

    def __init__(self):
        self.places = {}

    def poison(self, device):
        for place in self.places.values():
            place[...] = np.frombuffer(bytes([checks.POISON]) * place.itemsize, place.dtype)[0]

    def way(self, call, share):
        """`call`, writing only so large a share of its output."""

        def write(answer):
            found, tree = jax.tree.flatten(answer)
            places = []
            for i, leaf in enumerate(map(np.asarray, found)):
                place = self.places.setdefault((i, leaf.shape, leaf.dtype), np.zeros_like(leaf))
                count = int(share * leaf.size)
                place.reshape(-1)[:count] = leaf.reshape(-1)[:count]
                places.append(place.copy())
            return tree.unflatten(places)

        def run(*args):
            answer = call(*args)
            return jax.pure_callback(write, jax.eval_shape(lambda: answer), answer)

        return run


def by_xla(*arrays):
    return paged_attention(*arrays, implementation="xla")


def run_first(way):
    def program(q, caches, tables, lengths):
        out = way(q, *caches[0], tables, lengths)
        return out, out

    return program


class FewSets(points.Point):
    num_calls, num_caches, num_sets = 1, 1, 1


def check_decode(wrapped):
    point = FewSets(**vars(parse("6/2 2x48 head_dim=32")))
    inputs = points.make_inputs(point)
    programs = decode.Programs(run_first(wrapped(by_xla)), lambda token, _: token, jax.jit(paged_attention_reference))
    decode.measure(point, programs, inputs)


def check_prefill(wrapped):
    point = prefill.prompt(prefill.TOY_POINTS[1])
    inputs = points.make_inputs(point)
    expected = list(prefill.expected_tokens(point, inputs))
    prefill.measure(point, "xla", {"": run_first(wrapped(by_xla))}, inputs, expected)


def check_copies(wrapped):
    pairs = jnp.asarray([1, 2]), jnp.asarray([3, 4])
    cache_ops.check_copy(wrapped(copy_blocks), cache_ops.create_stack(cache_ops.TOY), *pairs)


def check_allocator(wrapped):
    state = loops.start(operations.TOY_POINT)
    append = functools.partial(loops.run, body=loops.append)
    operations.measure("append", operations.TOY_POINT, wrapped(append), state, 0.002)


@pytest.mark.parametrize("check", [check_decode, check_prefill, check_copies, check_allocator])
def test_no_check_takes_what_another_way_left_in_memory(check, monkeypatch):
    memory = Memory()
    check(lambda call: memory.way(call, 1.0))
    part = functools.partial(memory.way, share=0.1)
    check(part)  # the memory still holds the right answer
    monkeypatch.setattr(checks, "poison_free_memory", memory.poison)
    with pytest.raises(AssertionError):
        check(part)
    check(lambda call: memory.way(call, 1.0))


def test_whoever_compares_poisons():
    """A benchmark that compares results also calls on poisoned memory, and compares by no rule of its own."""
    texts = [path.read_text() for path in (harness.ROOT / "benchmarks").rglob("*.py") if path.name != "checks.py"]
    assert sum("worst_error(" in text for text in texts) > 3
    for text in texts:
        assert "worst_error(" not in text or "poisoned(" in text
        assert not re.search(r"AssertionError\(f?\"wrong", text)


def test_wrong_rows_are_compared_by_their_own_largest_number():
    expected = np.asarray([[100.0, 1.0], [0.1, 0.2]])
    assert checks.worst_error("here", expected + np.asarray([[1.0, 0.0], [0.0, 0.001]]), expected) == pytest.approx(
        0.01
    )
    with pytest.raises(AssertionError, match=r"wrong result at here: 0\.5"):
        checks.worst_error("here", expected + np.asarray([[0.0, 0.0], [0.1, 0.0]]), expected)
    for wrong in (expected * np.nan, expected * 0 + np.inf):
        with pytest.raises(AssertionError, match="wrong result"):
            checks.worst_error("here", wrong, expected)


def test_memory_that_nobody_can_fill_is_an_error():
    class Device:
        platform = "gpu"

        def memory_stats(self):
            return None

    with pytest.raises(RuntimeError, match="XLA_PYTHON_CLIENT_ALLOCATOR"):
        checks.poison_free_memory(Device())


@pytest.mark.gpu
@pytest.mark.parametrize("num_numbers", [64, 2**16, 2**24])
def test_a_gpus_free_memory_is_filled(num_numbers):
    """A program that writes a tenth of its output, and one that writes a tenth of a temporary array."""
    tenth = num_numbers // 10

    @jax.jit
    def part(x):
        return lax.empty(x.shape, x.dtype).at[:tenth].set(x[:tenth])

    @jax.jit
    def reversed_part(x):
        return lax.optimization_barrier(part(x))[::-1]

    x = jax.block_until_ready(jnp.arange(1.0, num_numbers + 1))
    right = jax.block_until_ready(jax.jit(lambda x: x * 1)(x))
    del right  # its memory is free, and still holds the answer
    assert (part(x) == x).all()
    for program, order in ((part, 1), (reversed_part, -1)):
        out = checks.poisoned(program, x)
        assert (out[::order] == x).sum() == tenth
