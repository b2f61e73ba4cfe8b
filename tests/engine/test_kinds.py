"""The kinds of steps of an engine, the choice of the next kind, and default sizes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxpaged import BlockAllocator, Engine, EngineOptions, KVCache, _device
from jaxpaged._engine.defaults import chosen_compiler_options, chosen_steps, counted_layers, with_sizes
from jaxpaged._slice.kinds import LONGEST_WAIT, count_wait, make_kinds, next_kind
from jaxpaged.scheduling import Scheduler
from tests import toy_model

SEATS, CHUNK, WIDTHS = 16, 32, (4, 8)
KINDS = make_kinds(SEATS, CHUNK, WIDTHS)
FOUR, EIGHT, ALL, CHUNK_FOR_ALL = range(4)  # eight rows may be a chunk too


@pytest.mark.parametrize(
    ("num_seats", "chunk_tokens", "widths", "single", "mixed"),
    [
        (SEATS, CHUNK, WIDTHS, [4, 16], [8, 48]),
        (384, 640, (64, 128, 256), [64, 128, 384], [256, 1024]),
        (256, 512, (64, 128, 256), [64, 128, 256], [256, 768]),
        (8, 64, (20,), [8], [20, 72]),
        (6, 16, (), [6], [22]),
        (6, 7, (5,), [5, 6], [13]),  # 5 is more than a third of 13
    ],
)
def test_each_width_is_a_kind_and_one_also_has_rows_for_chunks(num_seats, chunk_tokens, widths, single, mixed):
    kinds = make_kinds(num_seats, chunk_tokens, widths)
    assert [kind.width for kind in kinds] == sorted(single + mixed)
    assert [kind.width for kind in kinds if kind.is_mixed] == mixed
    first, second, *others = make_kinds(num_seats, chunk_tokens, widths, least_saved_reads=9)
    assert others == list(kinds)
    assert [(kind.width, kind.is_mixed, kind.is_by_row) for kind in (first, second)] == [
        (num_seats, False, True),
        (mixed[-1], True, False),
    ]
    (exact,) = make_kinds(num_seats, chunk_tokens, widths, batch_invariant=True)
    assert (exact.width, exact.is_mixed, exact.num_partitions) == (mixed[-1], True, 1)


@functools.partial(jax.jit, static_argnames="kinds")
def choose_next(needed, num_waited, num_saved_reads=0, num_read=0, kinds=KINDS):
    """The next kind for seats that need these numbers of tokens, one of them known; 0 is a free seat. `num_read` counts
    cached tokens whose reads are not saved."""
    is_taken = needed > 0
    lengths = is_taken.astype(jnp.int32).at[0].add(jnp.maximum(num_saved_reads + num_read - is_taken.sum(), 0))
    scheduler = Scheduler.create(max_requests=SEATS, num_seqs=SEATS, max_length=256)
    scheduler = dataclasses.replace(
        scheduler,
        seated=jnp.where(is_taken, jnp.arange(SEATS, dtype=jnp.int32), SEATS),
        num_known=jnp.where(is_taken, needed + lengths, 7),  # 7: left over from a finished request
    )
    allocator = BlockAllocator.create(num_blocks=2, block_size=4, num_seqs=SEATS, max_blocks_per_seq=1)
    allocator = dataclasses.replace(allocator, lengths=lengths)
    return next_kind(scheduler, allocator, num_waited, kinds, num_saved_reads)


@pytest.mark.parametrize(
    ("needed", "num_waited", "expected"),
    [
        ([], 0, FOUR),
        ([1] * 4, 0, FOUR),
        ([1] * 5, 0, EIGHT),
        ([1] * 8, 0, EIGHT),
        ([1] * 9, 0, ALL),
        ([1] * 16, LONGEST_WAIT, ALL),  # nothing waits
        ([1] * 14 + [3], 0, ALL),  # busy: it waits
        ([1] * 14 + [3], LONGEST_WAIT - 1, ALL),
        ([1] * 14 + [3], LONGEST_WAIT, CHUNK_FOR_ALL),  # it has more seats than a narrow step has rows
        ([1] * 14 + [33], 0, ALL),  # 47 tokens
        ([1] * 14 + [34], 0, CHUNK_FOR_ALL),  # 48 fill the widest step
        ([1] * 13 + [2], 0, CHUNK_FOR_ALL),  # idle
        ([2], 0, EIGHT),
        ([1] * 7 + [2], 0, CHUNK_FOR_ALL),  # a narrow step would have no row for it
        ([1] * 4 + [19], 0, EIGHT),  # 18 in six narrow steps of 3 need 48 rows
        ([1] * 4 + [20], 0, CHUNK_FOR_ALL),
        ([43], 0, EIGHT),  # 42 in six narrow steps of 7 need 48 rows, the widest step's number
        ([44], 0, CHUNK_FOR_ALL),
        ([1] * 6 + [2**29], 0, CHUNK_FOR_ALL),  # the rows of its narrow steps overflow
    ],
)
def test_the_next_kind(needed, num_waited, expected):
    needed = np.pad(np.int32(needed), (0, SEATS - len(needed)))
    assert int(choose_next(needed, np.int32(num_waited))) == expected


@pytest.mark.parametrize(
    ("needed", "num_saved_reads", "num_read", "expected"),
    [
        ([1] * 9, 159, 0, "all"),
        ([1] * 9, 160, 0, "sharing all"),
        ([1] * 9, 359, 100, "all"),
        ([1] * 9, 360, 100, "sharing all"),
        ([1] * 5, 239, 0, "eight"),  # eight more rows, which cost half of the minimum
        ([1] * 5, 240, 0, "sharing all"),
        ([1] * 4, 279, 0, "four"),
        ([1] * 4, 280, 0, "sharing all"),
        ([1] * 14 + [3], 160, 0, "sharing all"),  # the prompt waits
        ([1] * 13 + [2], 159, 0, "chunk for all"),
        ([1] * 13 + [2], 160, 0, "sharing chunk"),
        ([2], 559, 0, "eight"),
        ([2], 560, 0, "sharing chunk"),
    ],
)
def test_shared_blocks_are_read_once_if_that_pays(needed, num_saved_reads, num_read, expected):
    kinds = make_kinds(SEATS, CHUNK, WIDTHS, least_saved_reads=160)
    names = "sharing all", "sharing chunk", "four", "eight", "all", "chunk for all"
    needed = np.pad(np.int32(needed), (0, SEATS - len(needed)))
    kind = choose_next(needed, np.int32(0), np.int32(num_saved_reads), np.int32(num_read), kinds)
    assert names[int(kind)] == expected


@pytest.mark.parametrize(("num_pending", "had_chunk", "expected"), [(5, False, 4), (5, True, 0), (0, False, 0)])
def test_a_wait_ends_with_a_chunk(num_pending, had_chunk, expected):
    assert int(count_wait(jnp.int32(3), jnp.int32(num_pending), had_chunk)) == expected


def test_on_a_gpu_xla_gets_options_that_it_accepts(monkeypatch):
    monkeypatch.setattr(_device, "is_gpu", lambda: True)
    options = chosen_compiler_options(None)
    assert options["xla_gpu_enable_triton_gemm"] == "False"
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2
    assert chosen_compiler_options({"xla_gpu_autotune_level": 0}) == {"xla_gpu_autotune_level": 0}


# Qwen3-0.6B, Llama-3.2-1B, Qwen3-1.7B and 4B, Llama-3-8B
GIGABYTES_AND_LAYERS = (1.19, 28), (2.47, 16), (3.44, 28), (8.04, 36), (16.06, 32)


@pytest.mark.parametrize(
    ("is_gpu", "models", "expected"),
    [
        (True, GIGABYTES_AND_LAYERS, [3, 3, 2, 2, 1]),
        (True, [(0, 0), (0.27, 1), (0.27, 30), (70, 80)], [16, 16, 4, 1]),
        (False, [(0.5, 30), (1, 30)], [2, 1]),
    ],
)
def test_a_slice_of_a_small_model_has_more_steps(is_gpu, models, expected):
    assert [chosen_steps(int(n * 1e9), layers, is_gpu=is_gpu) for n, layers in models] == expected


def test_layers_of_stacks_and_of_groups_are_counted_on_one_device():
    sizes = dict(num_blocks=2, block_size=16, num_kv_heads=2, head_dim=64)
    options, create = EngineOptions(), functools.partial(KVCache.create, **sizes)
    assert counted_layers([create() for _ in range(3)], options) == 3
    assert counted_layers(create(num_layers=3), options) == 3
    assert counted_layers([create() for _ in range(3)], EngineOptions(windows=(None, 8))) == 6
    on_mesh = NamedSharding(jax.make_mesh((2,), ("devices",)), PartitionSpec(None, None, "devices"))
    assert counted_layers([jax.device_put(create(), on_mesh)], options) == 0


def sizes(num_blocks, *, is_gpu=True, **given):
    chosen = with_sizes(EngineOptions(**given), num_blocks, 16, is_gpu=is_gpu)
    return chosen.max_num_seqs, chosen.max_model_len, chosen.chunk_tokens, chosen.widths


@pytest.mark.parametrize(
    ("num_blocks", "given", "expected"),
    [
        (16_385, {}, (512, 8192, 512, (64, 128, 256))),
        (16_385, {"max_model_len": 2048}, (512, 2048, 512, (64, 128, 256))),
        (16_385, {"max_num_seqs": 256}, (256, 8192, 768, (64, 128, 256))),
        (16_385, {"max_num_seqs": 1024}, (1024, 8192, 512, (64, 128, 256))),
        (6_400, {}, (192, 8192, 832, (64, 128))),  # the pool has 512 tokens for each seat
        (2_049, {}, (64, 8192, 448, (64,))),
        (65, {}, (8, 1024, 504, ())),
        (9, {}, (8, 128, 128, ())),  # at most the pool
        (65, {"max_num_seqs": 4, "chunk_tokens": 16, "widths": [4, 2, 2]}, (4, 1024, 16, (2, 4))),
        (16_385, {"is_gpu": False}, (32, 8192, 32, ())),
    ],
)
def test_missing_sizes_are_chosen(num_blocks, given, expected):
    assert sizes(num_blocks, **given) == expected


def test_an_engine_without_any_size_serves_and_reports_its_choice():
    engine = Engine(toy_model.apply, toy_model.random_weights(), toy_model.create_cache(25), head=toy_model.head)
    params = toy_model.greedy(20)
    prompts = [[1, 2, 3], [4] * 25, [5], *[[6, i] for i in range(9)]]
    outputs = engine.generate(prompts, params)
    assert toy_model.tokens_of(outputs) == [toy_model.expected_tokens(prompt, params) for prompt in prompts]
    stats = engine.stats()
    assert (stats.max_num_seqs, stats.max_model_len, stats.chunk_tokens, stats.widths) == (8, 96, 56, ())
    assert stats.num_mixed_steps > 0
    assert sum(stats.steps_by_kind.values()) == stats.num_steps
    mixed = [count for name, count in stats.steps_by_kind.items() if name.startswith("mixed")]
    assert sum(mixed) == stats.num_mixed_steps
