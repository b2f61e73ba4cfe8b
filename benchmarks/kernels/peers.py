"""Other libraries on the same inputs, if installed: baselines for decode.py.

  fa3         FlashAttention 3 through flash-attn3-jax 0.2.3: a chain of calls in one jit, num_splits swept
  flashinfer  FlashInfer 0.7.2.post1, tensor-core decode (its host-side plan is not counted), in a CUDA graph
  mla         FlashInfer's kernel for latents, in a CUDA graph; with 0.6.13

None of them is a dependency. FlashInfer runs on torch and reads the same caches through DLPack.
"""

import dataclasses
import functools
import importlib.util
import math
import statistics
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.checks import MOST_ERROR, poisoned, worst_error
from benchmarks.harness import compile_all, slope_microseconds
from benchmarks.kernels.points import LATENT_SCALE, Inputs, Point, input_shapes


@dataclasses.dataclass(frozen=True)
class Peer:
    module: str
    takes: Callable[[Point], bool]
    compile: Callable[[Point, Any], Any]  # not timed; its second argument is decode.chain
    measure: Callable[[Point, Inputs, jax.Array, Any], dict[str, Any]]  # compares with our output, the third argument


def installed(name: str) -> bool:
    return importlib.util.find_spec(PEERS[name].module) is not None


def error(out: Any, expected: jax.Array) -> float:
    """The worst error against our checked output. Both round, so twice the error of one is allowed."""
    return worst_error("a peer", out, expected, most=2 * MOST_ERROR)


def is_plain(point: Point) -> bool:
    return point.head_dim == 128 and point.q_len == 1 and not point.window and not point.cache


def attempt(step: Callable[[], Any]) -> Any:
    """The result of `step`, or its exception as a result."""
    try:
        return step()
    except Exception as failure:  # other libraries may raise anything; our own measurement continues
        return {"failed": f"{type(failure).__name__}: {failure}"[:300]}


def compile_peer(name: str, point: Point, chain: Any) -> Any:
    return attempt(lambda: PEERS[name].compile(point, chain))


def measure_peer(name: str, point: Point, inputs: Inputs, expected: jax.Array, compiled: Any) -> dict[str, Any]:
    if isinstance(compiled, dict) and "failed" in compiled:
        return compiled
    return attempt(lambda: PEERS[name].measure(point, inputs, expected, compiled))


# FlashAttention 3


def fa3_splits(point: Point) -> tuple[int, ...]:
    """1, and the powers of two that give between half and 8 programs per SM."""
    pairs, longest = len(point.lengths) * point.kv_heads, max(point.lengths)
    return (1, *(n for n in (2, 4, 8, 16, 32, 64, 128) if 66 <= pairs * n <= 1056 and n <= max(2, longest // 128)))


def fa3_attend(
    splits: int, q: Any, k_cache: Any, v_cache: Any, block_tables: Any, lengths: Any, *, is_causal: bool = False
) -> Any:
    from flash_attn3_jax import flash_mha_with_kvcache

    return flash_mha_with_kvcache(
        *(q, k_cache, v_cache),
        cache_seqlens=lengths,
        page_table=block_tables,
        num_splits=splits,
        softmax_scale=q.shape[-1] ** -0.5,
        is_causal=is_causal,
    )


def fa3_compile(point: Point, chain: Any) -> dict[int, Any]:
    shapes = input_shapes(point)
    args = shapes.q, shapes.caches[0], shapes.block_tables, shapes.lengths

    def job(splits: int) -> Any:
        attend = functools.partial(fa3_attend, splits)
        return jax.jit(functools.partial(chain, point, attend)).lower(*args).compile()

    return compile_all({splits: functools.partial(job, splits) for splits in fa3_splits(point)})


def fa3_measure(point: Point, inputs: Inputs, expected: jax.Array, compiled: dict[int, Any]) -> dict[str, Any]:
    found: dict[int, float] = {}
    worst = 0.0

    def dispatch(i: int, program: Any) -> Any:
        return program(inputs.q, inputs.caches[i % point.num_sets], inputs.block_tables, inputs.lengths)

    for splits, program in compiled.items():
        _, out = poisoned(dispatch, 0, program)
        worst = max(worst, error(out, expected))
        found[splits] = slope_microseconds(functools.partial(dispatch, program=program), point.num_calls, seconds=0.06)
    best = min(found, key=lambda splits: found[splits])
    us = slope_microseconds(functools.partial(dispatch, program=compiled[best]), point.num_calls, seconds=0.15)
    return {"us": us, "best": str(best), "sweep": found, "error": worst}


# FlashInfer


@functools.cache
def workspace(name: str) -> Any:
    """The library's permanent workspace: 512 MiB, zeroed."""
    import torch

    return torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")


def to_torch(array: jax.Array) -> Any:
    import torch

    return torch.from_dlpack(array)


def flashinfer_run(point: Point, inputs: Inputs) -> Any:
    import flashinfer
    import torch

    tables = np.asarray(inputs.block_tables)
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(point.held)]).astype(np.int32))
    ids = torch.from_numpy(np.concatenate([row[:n] for row, n in zip(tables, point.held, strict=True)])).cuda()
    last = torch.tensor([(n - 1) % point.block_size + 1 for n in point.lengths], dtype=torch.int32)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace("flashinfer"), "NHD", use_tensor_cores=True, backend="fa2"
    )
    wrapper.plan(
        *(starts, ids, last, point.heads, point.kv_heads, point.head_dim, point.block_size),
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )

    def run(q: Any, k_cache: Any, v_cache: Any, *, out: Any) -> None:
        wrapper.run(q, (k_cache, v_cache), out=out)

    return run


def mla_run(point: Point, inputs: Inputs) -> Any:
    import torch
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    wrapper = BatchMLAPagedAttentionWrapper(workspace("flashinfer"))
    num_seqs, held = len(point.lengths), np.asarray(point.held)
    ids = np.concatenate([row[:n] for row, n in zip(np.asarray(inputs.block_tables), held, strict=True)])
    wrapper.plan(
        torch.arange(num_seqs + 1, dtype=torch.int32),
        torch.from_numpy(np.concatenate([[0], np.cumsum(held)]).astype(np.int32)),
        torch.from_numpy(ids),
        torch.tensor(point.lengths, dtype=torch.int32),
        *(point.heads, point.latent, point.head_dim - point.latent, point.block_size),
        *(False, LATENT_SCALE, torch.bfloat16, torch.bfloat16),
    )

    def run(q: Any, cache: Any, *, out: Any) -> None:
        operands = (
            x[..., part] for x in (q, cache[:, :, 0]) for part in (slice(point.latent), slice(point.latent, None))
        )
        wrapper.run(*operands, out=out)

    return run


def graph_microseconds(run: Callable[[int], None], num_calls: int, num_replays: int) -> float:
    """Microseconds per call, the median over replays of one CUDA graph of `run(0)`, `run(1)`, ..."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(3):
            run(i)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(num_calls):
            run(i)
    graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num_replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e3 / num_calls for start, end in events)


def graph_measure(make: Any, point: Point, inputs: Inputs, expected: jax.Array, _: Any) -> dict[str, Any]:
    """Times a CUDA graph of calls that rotate through all caches of the point."""
    import torch

    jax.block_until_ready((inputs.caches, expected))
    q = to_torch(inputs.q[:, 0])
    pairs = [tuple(to_torch(x) for x in pair if x is not None) for caches in inputs.caches for pair in caches]
    num_calls = max(point.num_calls, len(pairs))
    run = make(point, inputs)
    out = torch.full_like(q[..., : expected.shape[-1]], math.nan)

    def call(i: int) -> None:
        run(q, *pairs[i % len(pairs)], out=out)

    call(0)
    torch.cuda.synchronize()
    worst = error(out[:, None].float().cpu().numpy(), expected)
    num_replays = max(7, min(50, int(0.1e6 / (num_calls * (4 + point.num_bytes / 2.8e6)))))
    return {"us": graph_microseconds(call, num_calls, num_replays), "error": worst}


def is_for_mla(point: Point) -> bool:
    return point.latent > 0 and not point.cache


def is_for_flashinfer(point: Point) -> bool:
    return is_plain(point) and point.block_size == 16


def nothing(point: Point, chain: Any) -> None:
    """Nothing to compile."""


PEERS = {
    "fa3": Peer("flash_attn3_jax", is_plain, fa3_compile, fa3_measure),
    "flashinfer": Peer("flashinfer", is_for_flashinfer, nothing, functools.partial(graph_measure, flashinfer_run)),
    "mla": Peer("flashinfer", is_for_mla, nothing, functools.partial(graph_measure, mla_run)),
}
