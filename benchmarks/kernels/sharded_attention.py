"""Attention over several GPUs against one: over KV heads, and over the blocks of a sequence."""

import functools
import math
from collections import Counter
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.checks import poisoned, worst_error
from benchmarks.harness import slope_microseconds
from benchmarks.kernels.points import Inputs, Point, make_inputs, parse
from jaxpaged import paged_attention
from jaxpaged.ops import context_parallel_attention
from lib.tensor_parallel import AXIS, CACHE
from tests.compiled import COLLECTIVES, instructions


def collectives(compiled: Any, part: tuple[int, ...]) -> dict[str, int]:
    """The number of each collective in a program. Raises `AssertionError` if one, or a copy, has the size of one or
    more devices' parts of a cache. The null block gives a pool an odd size that no other array has."""
    counts: Counter[str] = Counter()
    for operation, size, line in instructions(compiled.as_text() or ""):
        name = operation.removesuffix("-start")
        counts[name] += name in COLLECTIVES
        is_copy = name == "copy" and f"[{','.join(map(str, part))}]" in line
        if is_copy or (name in COLLECTIVES and size > 0 and size % math.prod(part) == 0):
            raise AssertionError(f"moves a cache: {line}")
    return dict(+counts)


def part_shape(array: jax.Array) -> tuple[int, ...]:
    return array.sharding.shard_shape(array.shape)


def put(mesh: Mesh, tree: Any, spec: P) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec)), tree)


def time_chain(point: Point, attend: Any, inputs: Inputs, toy: bool) -> tuple[float, jax.Array, Any]:
    """Microseconds per call, the first output, and the program."""
    num_calls = 2 if toy else point.num_calls

    @jax.jit
    def chain(q: jax.Array, caches: Any, tables: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        outs = [q]
        for i in range(num_calls):
            outs.append(attend(outs[-1], *caches[i % len(caches)], tables, lengths))
        return outs[-1], outs[1]

    def call(i: int) -> tuple[jax.Array, jax.Array]:
        return compiled(inputs.q, inputs.caches[i % point.num_sets], inputs.block_tables, inputs.lengths)

    compiled = chain.lower(inputs.q, inputs.caches[0], inputs.block_tables, inputs.lengths).compile()
    return slope_microseconds(call, num_calls), poisoned(call, 0)[1], compiled


def attention(shape: str, mesh: Mesh, toy: bool) -> dict[str, Any]:
    heads, kv_heads = (4, 2) if toy else (32, 8)
    point = parse(f"{heads}/{kv_heads} {shape}")
    part = parse(f"{heads // mesh.size}/{kv_heads // mesh.size} {shape}")
    inputs = make_inputs(point)
    one, expected, _ = time_chain(point, paged_attention, inputs, toy)
    share, *_ = time_chain(part, paged_attention, make_inputs(part), toy)
    tables, lengths = put(mesh, (inputs.block_tables, inputs.lengths), P())
    q, caches = put(mesh, inputs.q, CACHE), put(mesh, inputs.caches, CACHE)
    several, first, compiled = time_chain(point, paged_attention, Inputs(q, caches, tables, lengths), toy)
    return {
        "error": worst_error(shape, first, expected),
        "collectives": collectives(compiled, part_shape(caches[0][0][0])),
        "one": one,
        "share": share,
        "several": several,
        "speedup": one / several,
        "efficiency": share / several,
    }


def context(shape: str, mesh: Mesh, toy: bool, *, q_len: int = 1) -> dict[str, Any]:
    point = parse(f"{'4/2' if toy else '32/8'} {shape} block_size={16 * mesh.size} q_len={q_len}")
    inputs = make_inputs(point)
    one, expected, _ = time_chain(point, paged_attention, inputs, toy)
    q, tables, lengths = put(mesh, (inputs.q, inputs.block_tables, inputs.lengths), P())
    caches = put(mesh, inputs.caches, P(None, AXIS))

    @functools.partial(jax.shard_map, mesh=mesh, out_specs=P(), check_vma=False)
    def attend(*arrays: jax.Array) -> jax.Array:
        return context_parallel_attention(*arrays, axis_name=AXIS)[0]

    several, first, compiled = time_chain(point, attend, Inputs(q, caches, tables, lengths), toy)
    return {
        "error": worst_error(shape, first, expected),
        "collectives": collectives(compiled, part_shape(caches[0][0][0])),
        "one": one,
        "several": several,
        "speedup": one / several,
    }


def prompts(shape: str, mesh: Mesh, toy: bool) -> dict[str, Any]:
    """`context` for the last tokens of a prompt."""
    return context(shape, mesh, toy, q_len=39 if toy else 512)
