"""The model of several GPUs: it agrees with two and four, its bytes are the measured ones, and more GPUs read less."""

import dataclasses
import itertools
import json

import pytest

from benchmarks.figures import scaling_tables
from benchmarks.figures.scaling import MXFP4, SHAPES, Link, context_parallel, device, fits, link, tensor_parallel
from benchmarks.harness import RESULTS

LLAMA, LARGE, EXPERTS = SHAPES.values()
FREE = Link(0.0, 0.0, float("inf"))


def points(name):
    return json.loads((RESULTS / f"{name}.json").read_text())["points"]


GPU, OVER = device(points), link(points)


# docs/scaling.md names them.
NOT_REPRODUCED = {
    ("2 x H200", "tensor parallel, attention", "1x32768"),
    ("2 x H200", "tensor parallel, a step of Llama 3 8B", "1x8192"),
}


def reproduced(checks):
    return [check for check in checks if (check.gpu, check.part, check.size) not in NOT_REPRODUCED]


def test_the_figures_of_two_and_four_gpus_are_reproduced():
    checks = list(scaling_tables.several_gpu_checks(points))
    assert len(checks) == sum(len(points(file)) for files in scaling_tables.FILES.values() for file in files)
    assert all(check.ratio == pytest.approx(1, abs=0.05) for check in reproduced(checks)), checks


@pytest.mark.parametrize("field", ["read", "attention", "slot"])
def test_a_wrong_constant_is_found(field):
    wrong = dataclasses.replace(GPU, **{field: 2 * getattr(GPU, field)})
    checks = scaling_tables.several_gpu_checks(points, gpu=wrong)
    assert any(abs(check.ratio - 1) > 0.05 for check in reproduced(checks))


def test_steps_of_one_gpu():
    checks = list(scaling_tables.one_gpu_checks(points))
    assert all(check.ratio == pytest.approx(1, abs=0.05) for check in checks), checks


@pytest.mark.parametrize("size", ["64x2048", "1x8192"])
def test_bytes_are_those_of_the_measured_steps(size):
    seqs, length = scaling_tables.parse(size)
    nbytes = LLAMA.weight_bytes() + LLAMA.cache_bytes(seqs, length + scaling_tables.GROWTH)
    assert nbytes == pytest.approx(points("h200/decode_step")[f"example {size}"]["bytes"], rel=1e-3)


def test_parameters_are_those_of_the_models():
    billions = {"Llama 3 8B": 8.03, "Llama 3 70B": 70.6, "gpt-oss-120B": 116.8}
    for name, shape in SHAPES.items():
        embedding = 2 * shape.features * shape.vocab
        assert (shape.weight_bytes() + embedding) / 2 == pytest.approx(billions[name] * 1e9, rel=5e-3)


def test_windows_and_chosen_experts_read_less():
    every = dataclasses.replace(EXPERTS, windows=0)
    assert EXPERTS.cache_bytes(1, 100) == every.cache_bytes(1, 100)
    assert EXPERTS.cache_bytes(1, 10**6) == pytest.approx(every.cache_bytes(1, 10**6) / 2, rel=1e-3)
    without = dataclasses.replace(MXFP4, hidden=0).weight_bytes()
    chosen = [MXFP4.weight_bytes(rows) - without for rows in (1, 64, 10_000)]
    assert chosen[0] == pytest.approx((MXFP4.weight_bytes() - without) * 4 / 128)
    assert chosen[0] < chosen[1] < chosen[2] == pytest.approx(MXFP4.weight_bytes() - without)
    assert LLAMA.weight_bytes(1) == LLAMA.weight_bytes()


@pytest.mark.parametrize("shape", [*SHAPES.values(), MXFP4])
@pytest.mark.parametrize("seqs", [1, 64])
def test_more_gpus_read_less_and_exchange_more(shape, seqs):
    found = [tensor_parallel(shape, GPU, OVER, seqs, 4096, n) for n in (1, 2, 4, 8, 16)]
    head = shape.vocabulary_bytes / GPU.read
    for few, many in itertools.pairwise(found):
        assert many.weights - head == pytest.approx((few.weights - head) / 2)
        assert many.exchanges > few.exchanges
        assert (many.products, many.attention) == (few.products, few.attention)
        assert sum(dataclasses.astuple(many)) == pytest.approx(many.us)
    caches = [step.cache for step in found]
    assert caches[:4] == pytest.approx([caches[0] / n for n in (1, 2, 4, 8)])
    assert caches[4] == caches[3], "a KV head is not divided"


def test_a_sum_lasts_longer_over_more_gpus():
    sums = [OVER.sum(4096, n) for n in (1, 2, 4, 8)]
    assert sums[0] == 0
    assert sums == sorted(sums)
    assert sums[3] - sums[2] == pytest.approx(OVER.growth, rel=0.01)


def test_longer_steps_last_longer():
    lengths = [tensor_parallel(LLAMA, GPU, OVER, 64, length, 4).us for length in (1, 2048, 8192)]
    assert lengths == sorted(lengths)
    assert tensor_parallel(LLAMA, GPU, FREE, 64, 2048, 4).exchanges == 0
    with pytest.raises(ValueError, match="seqs=65"):
        tensor_parallel(LLAMA, GPU, OVER, 65, 2048)


def test_context_parallel_is_worth_more_for_longer_sequences():
    gains = [one / context_parallel(GPU, OVER, one, 8) for one in (30.0, 300.0, 3000.0)]
    assert gains == sorted(gains)
    assert gains[-1] < 8
    assert context_parallel(GPU, OVER, 300.0, 1) == 300.0


def test_the_fewest_gpus_that_hold_a_model():
    assert [fits(shape, 1, 8192) for shape in (LLAMA, LARGE, EXPERTS, MXFP4)] == [1, 2, 2, 1]
    assert fits(LLAMA, 64, 16_384) == 2
    with pytest.raises(ValueError, match="divide tokens"):
        fits(LLAMA, 1, 10**8)


def test_where_a_form_stops_paying():
    assert scaling_tables.pays_up_to(lambda n: 100 / n, (1, 2, 4, 8)) == 8
    assert scaling_tables.pays_up_to(lambda n: 100, (1, 2, 4, 8)) == 2
    assert scaling_tables.pays_up_to(lambda n: 100 / n + 20, (1, 2, 4, 8)) == 4


def test_goals_compare_in_their_own_direction():
    for bar in scaling_tables.bars_of(points):
        predicted, free = bar.value(OVER), bar.value(FREE)
        assert free > predicted if bar.larger else free < predicted, bar.text
