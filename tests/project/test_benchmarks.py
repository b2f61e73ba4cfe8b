"""Each program of benchmarks/ runs at toy size, and the checks before a measurement can fail."""

import functools
import importlib
import json
import re
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks import checks, harness
from benchmarks.allocator import loops, operations
from benchmarks.engine import model, online, throughput, vllm_peer
from benchmarks.kernels import cache_ops, decode, experts, points, prefill
from jaxpaged import paged_attention, paged_attention_reference
from jaxpaged.ops import copy_blocks
from lib.families import read_config
from lib.fields import Fields

LATENT = "2/1 2x64 head_dim=576 latent=512 cache=float8_e4m3fn scale=token_head"
TOYS = {
    "allocator.operations": "--toy --operations append 'match_prefix, free'",
    "engine.changed_logits": "--model toy --seqs 2 --prompt 4 --few 2 --many 6 --repeats 1",
    "engine.grammars": "--toy",
    "engine.online": "--model toy --rates 50 100 --seconds 0.2",
    "engine.profile_slice": "--model toy --requests 9 --warm 1 --slices 2",
    "engine.rollout": "--model toy --prompts 3",
    "engine.sampling": "--toy --seconds 0.01",
    "engine.server": "--model toy --clients 3 --requests 7 --data-parallel 2",
    "engine.several_gpus": "--toy",
    "engine.start": "--model toy",
    "engine.throughput": "--model toy --requests 9 3",
    "kernels.cache_ops": "--toy",
    "kernels.experts": "--toy --seconds 0.01",
    "kernels.decode": f"--implementation xla --points '2/1 2x64' '{LATENT}'",
    "kernels.prefill": "--toy --peers cudnn",
    "soak.random_cases": "--implementation xla --cases 42 --families 'group of 3'",
}
MIXTURE = "--model toy_gpt_oss --requests 9 3"
FIGURES = {"figures.allocator": "h100/allocator.json"}
# They need a GPU, vLLM or minutes, write into docs/, or have their own test.
OTHERS = (
    "engine.medians",
    "engine.vllm_peer",
    "figures.bars",
    "figures.memory",
    "figures.tables",
    "kernels.kernel_steps",
    "soak.engine",
    "soak.memcheck",
    "soak.server",
)


@pytest.fixture
def run(monkeypatch):
    def run(program, *arguments):
        monkeypatch.setattr("sys.argv", [program, *map(str, arguments)])
        importlib.import_module(f"benchmarks.{program}").main()

    return run


@pytest.mark.slow
@pytest.mark.usefixtures("one_kind")
@pytest.mark.parametrize(("program", "arguments"), [*TOYS.items(), ("engine.throughput", MIXTURE)])
def test_a_program_runs(program, arguments, run, tmp_path, monkeypatch):
    monkeypatch.setattr(points, "COLD_BYTES", 10**5)
    monkeypatch.setattr(points, "L2_BYTES", 10**5)
    monkeypatch.setattr(points, "MAX_CALLS", 2)
    body_of_two = functools.partial(loops.run.__wrapped__, unroll=2)  # less to compile
    monkeypatch.setattr(loops, "run", jax.jit(body_of_two, static_argnames=("body", "num_steps", "unroll")))
    output = tmp_path / "points.json"
    run(program, *shlex.split(arguments), "--output", output)
    assert json.loads(output.read_text())["points"]


def test_the_median_run_stays(run, tmp_path):
    rates, files = (3.0, 9.0, 5.0), [tmp_path / f"{i}.json" for i in range(3)]
    for rate, path in zip(rates, files, strict=True):
        points = {"engine 2": {"tokens_per_s": rate, "seconds": 1 / rate}, "steps": {"seats": 8}}
        path.write_text(json.dumps({"device": "H100", "commit": "abc", "points": points}))
    run("engine.medians", *files, "--output", tmp_path / "median.json")
    points = json.loads((tmp_path / "median.json").read_text())["points"]
    assert points == {"engine 2": {"tokens_per_s": 5.0, "seconds": 1 / 5.0, "runs": list(rates)}, "steps": {"seats": 8}}

    files[1].write_text(json.dumps({"device": "H200", "commit": "abc", "points": points}))
    with pytest.raises(SystemExit, match="in device"):
        run("engine.medians", *files, "--output", tmp_path / "median.json")


@pytest.mark.slow
def test_the_calls_of_memcheck_are_right(run, monkeypatch):
    for name in ("XLA_FLAGS", "XLA_PYTHON_CLIENT_ALLOCATOR"):  # the program sets them
        monkeypatch.setenv(name, "")
    run("soak.memcheck", "--implementation", "xla")


@pytest.mark.parametrize("program", FIGURES)
def test_a_figure_is_drawn(program, run, tmp_path):
    run(program, harness.RESULTS / FIGURES[program], tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").stat().st_size > 0


@pytest.mark.parametrize("program", OTHERS)
def test_a_program_has_a_help_text(program, run, capsys):
    with pytest.raises(SystemExit):
        run(program, "--help")
    assert "--help" in capsys.readouterr().out


def test_the_readme_lists_every_program():
    files = (harness.ROOT / "benchmarks").glob("*/*.py")
    programs = {f"{file.parent.name}.{file.stem}" for file in files if "__main__" in file.read_text()}
    assert programs == {*TOYS, *FIGURES, *OTHERS}
    text = (harness.ROOT / "benchmarks" / "README.md").read_text()
    assert set(re.findall(r"`((?:kernels|allocator|engine|soak|figures)\.\w+)`", text)) == programs


class Memory:
    """Simulates a GPU's memory: unwritten parts of an output have the old contents."""

    def __init__(self):
        self.places = {}

    def poison(self, device):
        for place in self.places.values():
            place[...] = np.frombuffer(bytes([checks.POISON]) * place.itemsize, place.dtype)[0]

    def way(self, call, share):
        """`call`, writing only this share of its output."""

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
    point = FewSets(**vars(points.parse("6/2 2x48 head_dim=32")))
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


def experts_arguments(layer):
    return experts.random(4, shape=(8, layer.features)), experts.make_routes(layer, 8), experts.make_weights(layer)


def check_experts(wrapped):
    layer = experts.TOY_LAYERS["toy"]
    arguments = experts_arguments(layer)
    compute = functools.partial(experts.all_experts, activate=layer.activate)
    program = experts.compile_or_refuse(compute, arguments)
    expected = np.asarray(program(*arguments)[0])
    point = experts.measure("experts", wrapped(program), arguments, expected, 0.001)
    checks.require("product" in point, point)


@pytest.mark.parametrize("check", [check_decode, check_prefill, check_copies, check_allocator, check_experts])
def test_no_check_accepts_results_left_in_memory(check, monkeypatch):
    memory = Memory()
    check(lambda call: memory.way(call, 1.0))
    part = functools.partial(memory.way, share=0.1)
    check(part)  # the memory still holds the right answer
    monkeypatch.setattr(checks, "poison_free_memory", memory.poison)
    with pytest.raises(AssertionError):
        check(part)
    check(lambda call: memory.way(call, 1.0))


def test_a_way_of_experts_that_is_refused_or_wrong_has_no_time(tmp_path, monkeypatch):
    ways = {
        "all experts": experts.all_experts,
        "refused": functools.partial(experts.grouped_experts, tiles=experts.TILES[0]),
        "wrong": lambda x, chosen, *others, **how: experts.all_experts(x, chosen[::-1], *others, **how),
        "right": functools.partial(experts.grouped_experts, tiles=None),
    }
    monkeypatch.setattr(experts, "list_ways", lambda _: ways)
    output = tmp_path / "points.json"
    experts.main(["--toy", "--layers", "toy", "--tokens", "8", "--seconds", "0.001", "--output", str(output)])
    found = json.loads(output.read_text())["points"]
    timed = {name.split(", ")[-1]: "product" in point for name, point in found.items()}
    assert timed == {"all experts": True, "refused": False, "wrong": False, "right": True}
    assert "wrong result" in found["toy, 8 tokens, wrong"]["error"]


def test_the_floor_of_experts():
    layer = experts.Layer(4, 2, 64, 32)
    of_expert = 3 * 64 * 32
    floor = functools.partial(experts.floor_microseconds, layer, bandwidth=1e9, rate=1e12)
    routes = experts.make_routes(layer, 16)
    assert floor(routes) == pytest.approx(2 * (4 * of_expert + 2 * 16 * 64) / 1e9 * 1e6)
    one_expert = [(chosen * 0, shares) for chosen, shares in routes]
    assert floor(one_expert) == pytest.approx(2 * (of_expert + 2 * 16 * 64) / 1e9 * 1e6)
    slow = functools.partial(experts.floor_microseconds, layer, bandwidth=1e15, rate=1e9)
    assert slow(routes) == pytest.approx(2 * 16 * 2 * of_expert / 1e9 * 1e6)


def test_the_error_of_a_row_is_relative_to_its_own_largest_number():
    expected = np.asarray([[100.0, 1.0], [0.1, 0.2]])
    assert checks.worst_error("here", expected + np.asarray([[1.0, 0.0], [0.0, 0.001]]), expected) == pytest.approx(
        0.01
    )
    with pytest.raises(AssertionError, match=r"wrong result at here: 0\.5"):
        checks.worst_error("here", expected + np.asarray([[0.0, 0.0], [0.1, 0.0]]), expected)
    for wrong in (expected * np.nan, expected * 0 + np.inf):
        with pytest.raises(AssertionError, match="wrong result"):
            checks.worst_error("here", wrong, expected)


def test_memory_that_cannot_be_filled_is_an_error():
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


def test_waits_are_counted_from_the_arrival():
    work, arrivals = [([1], 5), ([1], 1)], [1.0, 2.0]
    pieces = [[(1.5, 3), (2.5, 5)], [(4.0, 1)]]
    point = online.summary(work, arrivals, pieces)
    assert point["to_first_ms"]["p50"] == pytest.approx(1250)  # median of 500 and 2000
    assert point["between_tokens_ms"]["p99"] == pytest.approx(250)
    assert point["between_pieces_ms"]["p50"] == pytest.approx(1000)
    assert point["to_last_ms"]["p50"] == pytest.approx(1750)
    assert point["tokens_per_s"] == pytest.approx(6 / 4)
    for lost in ([[(1.5, 3)], pieces[1]], [pieces[0], []]):
        with pytest.raises(AssertionError, match="not as many tokens"):
            online.summary(work, arrivals, lost)


def test_the_peer_gets_the_shape_of_the_mixture():
    config = model.CONFIGS["gpt_oss_20b"]
    assert read_config(Fields(vllm_peer.hugging_face_config(config))) == config


def test_the_floor_of_a_mixture():
    """Bytes of all experts, products of the chosen ones, and at most a window's keys and values."""
    config = model.CONFIGS["toy_gpt_oss"]
    shapes = jax.eval_shape(lambda: model.random_weights(config))
    of_expert, of_head = 3 * config.features * config.hidden_features, config.vocab_size * config.features
    layers = sum(leaf.size for leaf in jax.tree.leaves(shapes["layers"]))
    used = layers - config.num_layers * (config.num_experts - config.experts_per_token) * of_expert

    def seconds(new=1, **rates):
        rates = dict(bandwidth=1e30, products=1e30) | rates
        return throughput.Floor.of(config, shapes, 8, **rates).seconds({"single_8": 3}, [([1] * 30, new)])

    assert seconds(bandwidth=1) == 3 * 2 * (layers + of_head)
    assert seconds(products=1) == 3 * 2 * 8 * (used + of_head)
    of_token = 2 * 2 * config.num_kv_heads * config.head_dim  # bytes in a layer
    assert seconds(3, bandwidth=1) - seconds(bandwidth=1) == of_token * ((31 + 32) + (16 + 16))


def test_random_weights_are_ones_for_norms_alone():
    (layer, *_) = model.random_weights(model.CONFIGS["toy_gpt_oss"])["layers"].values()
    assert (layer["input_layernorm"]["scale"][...] == 1).all()
    for bias in (layer["mlp"]["router"]["bias"][...], layer["self_attn"]["sinks"][...]):
        assert 0 < jnp.abs(bias).max() < 0.1
