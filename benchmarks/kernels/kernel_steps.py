"""Paged decode attention in the steps of docs/kernel.md, from a gather to a kernel.

The steps accept bfloat16, blocks of 16, 32 or 64 tokens, a head_dim that is a multiple of 64, and a group of up to 8.
They have no options and no checks.

    python -m benchmarks.kernels.kernel_steps --points "32/8 64x2048"
"""

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.harness import add_output, compile_all, open_store
from benchmarks.kernels.decode import Programs, compile_chain, compile_judges, measure
from benchmarks.kernels.points import Point, make_inputs, parse
from jaxpaged import paged_attention
from pallas_kernels.common.rows import store

TILE = 64  # tokens
POINTS = ("32/8 64x2048", "32/8 1x8192")
LOG2E, LOWEST = 1.4426950408889634, -1e30


def gather(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, tables: jax.Array, lengths: jax.Array) -> jax.Array:
    """Step 1. q [seqs, heads, head_dim], caches [blocks, block_size, kv_heads, head_dim] -> [seqs, heads, head_dim]."""
    k, v = (cache[tables].reshape(len(q), -1, *cache.shape[2:]) for cache in (k_cache, v_cache))
    seen = jnp.arange(k.shape[1])[None] < lengths[:, None]
    v = jnp.where(seen[..., None, None], v, 0)  # zero times NaN is NaN, so slots without a token must be zero
    scores = jnp.einsum("shgd,sthd->shgt", _grouped(q, k.shape[2]), k, preferred_element_type=jnp.float32)
    p = jnp.exp2(scores - scores.max(-1, keepdims=True, where=seen[:, None, None], initial=LOWEST))
    p = jnp.where(seen[:, None, None], p, 0)
    out = jnp.einsum("shgt,sthd->shgd", p.astype(q.dtype), v, preferred_element_type=jnp.float32)
    return (out / p.sum(-1, keepdims=True)).reshape(q.shape).astype(q.dtype)


def scan(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, tables: jax.Array, lengths: jax.Array) -> jax.Array:
    """Step 2."""
    block_size, kv_heads = k_cache.shape[1:3]
    grouped = _grouped(q, kv_heads)

    def step(state: Any, i: jax.Array) -> tuple[Any, None]:
        acc, m, l = state
        ids = tables[:, i]
        scores = jnp.einsum("shgd,sthd->shgt", grouped, k_cache[ids], preferred_element_type=jnp.float32)
        seen = (i * block_size + jnp.arange(block_size))[None] < lengths[:, None]
        values = jnp.where(seen[..., None, None], v_cache[ids], 0)
        scores = jnp.where(seen[:, None, None], scores, LOWEST)
        new_m = jnp.maximum(m, scores.max(-1))
        alpha, p = jnp.exp2(m - new_m), jnp.exp2(scores - new_m[..., None])
        new = jnp.einsum("shgt,sthd->shgd", p.astype(q.dtype), values, preferred_element_type=jnp.float32)
        return (acc * alpha[..., None] + new, new_m, l * alpha + p.sum(-1)), None

    zeros = jnp.zeros(grouped.shape, jnp.float32)
    state = zeros, jnp.full(grouped.shape[:3], LOWEST), zeros[..., 0]
    (acc, _, l), _ = lax.scan(step, state, jnp.arange(tables.shape[1]))
    return (acc / l[..., None]).reshape(q.shape).astype(q.dtype)


def _grouped(q: jax.Array, kv_heads: int) -> jax.Array:
    """[seqs, kv_heads, group, head_dim], with the scale, in units of log2."""
    seqs, heads, head_dim = q.shape
    return (q * (head_dim**-0.5 * LOG2E)).astype(q.dtype).reshape(seqs, kv_heads, heads // kv_heads, head_dim)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Steps 3 to 6."""

    stages: int = 1  # tiles of K, and of V, in SMEM at a time
    mask_all: bool = True  # mask every tile, or only tiles with a token that the query does not see
    partitions: int = 1  # programs for each sequence and KV head
    interpret: Any = None

    def __call__(
        self, q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, tables: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        block_size, kv_heads = k_cache.shape[1:3]
        rows = _grouped(q, kv_heads)
        seqs, _, group, head_dim = rows.shape
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, 8 - group), (0, 0)))  # a product needs at least 8 rows
        swizzled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)  # type: ignore[abstract]
        ring = plgpu.SMEM((self.stages, TILE, head_dim), q.dtype, transforms=swizzled)
        full = plgpu.Barrier(num_arrivals=TILE // block_size, num_barriers=self.stages)
        out, lse = plgpu.kernel(
            self._program,
            out_type=(
                jax.ShapeDtypeStruct((self.partitions, seqs, kv_heads, head_dim, 8), jnp.float32),
                jax.ShapeDtypeStruct((self.partitions, seqs, kv_heads, 8), jnp.float32),
            ),
            grid=(seqs, self.partitions, kv_heads),
            grid_names=("seq", "partition", "kv_head"),
            scratch_types=dict(
                k_smem=ring, v_smem=ring, p_smem=plgpu.SMEM((TILE, 8), q.dtype), k_full=full, v_full=full
            ),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=self.interpret,
        )(rows, k_cache, v_cache, tables, lengths)
        weights = jax.nn.softmax(lse * (1 / LOG2E), axis=0)[..., None, :]
        out = (out * weights).sum(axis=0)[..., :group]  # [seqs, kv_heads, head_dim, group]
        return out.swapaxes(2, 3).reshape(q.shape).astype(q.dtype)

    def _program(
        self, q: Any, k_cache: Any, v_cache: Any, tables: Any, lengths: Any, out: Any, lse: Any, **smem: Any
    ) -> None:
        seq, partition, kv_head = (lax.axis_index(name) for name in ("seq", "partition", "kv_head"))
        block_size, head_dim = k_cache.shape[1], q.shape[-1]
        ids_of_tile = TILE // block_size
        layouts = plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC
        left, right, acc_layout = (layout(q.dtype, m_warps=4) for layout in layouts)

        # Our tiles.
        length = lengths[seq]
        tiles = pl.cdiv(length, TILE)
        share = pl.cdiv(tiles, self.partitions)
        first = partition * share
        end = jnp.minimum(first + share, tiles)
        whole = first if self.mask_all else jnp.clip(length // TILE, first, end)  # tiles before it need no mask

        def fetch(tile: jax.Array) -> None:
            @pl.when(tile < end)
            def _start() -> None:
                stage = lax.rem(tile - first, self.stages)
                for j in range(ids_of_tile):
                    entry = jnp.minimum(tile * ids_of_tile + j, tables.shape[1] - 1)
                    rows = pl.ds(j * block_size, block_size)
                    for name, cache in (("k", k_cache), ("v", v_cache)):
                        plgpu.copy_gmem_to_smem(
                            cache.at[tables[seq, entry], :, kv_head],
                            smem[f"{name}_smem"].at[stage, rows],
                            smem[f"{name}_full"].at[stage],
                        )

        for i in range(self.stages):
            fetch(first + i)
        queries = plgpu.load(q.at[seq, kv_head].T, layout=right, optimized=False)  # [head_dim, 8]

        def step(tile: jax.Array, state: Any, *, masked: bool) -> Any:
            acc, m, l = state
            stage = lax.rem(tile - first, self.stages)

            def seen(shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
                token = tile * TILE + plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)
                return token < length

            # S^T = K Q^T
            plgpu.barrier_wait(smem["k_full"].at[stage])
            keys = plgpu.load(smem["k_smem"].at[stage], layout=left)
            scores = self._product(_zeros((TILE, 8), acc_layout), keys, queries)
            if masked:
                scores = jnp.where(seen(scores.shape, 0, acc_layout), scores, jnp.full_like(scores, LOWEST))

            # Online softmax, in units of log2.
            new_m = jnp.maximum(m, scores.max(axis=0))
            alpha, p = jnp.exp2(m - new_m), jnp.exp2(scores - lax.broadcast_in_dim(new_m, scores.shape, [1]))
            smem["p_smem"][...] = p.astype(q.dtype)  # a warp has the weights of 16 tokens and needs all weights

            # O^T += V^T P^T
            plgpu.barrier_wait(smem["v_full"].at[stage])
            values = plgpu.load(smem["v_smem"].at[stage].T, layout=left)
            if masked:
                values = jnp.where(seen(values.shape, 1, left), values, jnp.zeros_like(values))
            weights = plgpu.load(smem["p_smem"], layout=right, optimized=False)
            acc = self._product(acc * lax.broadcast_in_dim(alpha, acc.shape, [1]), values, weights)

            plgpu.commit_smem()  # all warps have read the stage
            fetch(tile + self.stages)
            return acc, new_m, l * alpha + p.sum(axis=0)

        row = acc_layout.reduce(0)
        state = (
            _zeros((head_dim, 8), acc_layout),
            plgpu.layout_cast(jnp.full((8,), LOWEST, jnp.float32), row),
            _zeros((8,), row),
        )
        state = lax.fori_loop(first, whole, functools.partial(step, masked=False), state)
        acc, m, l = lax.fori_loop(whole, end, functools.partial(step, masked=True), state)
        safe = jnp.maximum(l, jnp.full_like(l, 1e-30))
        store(out.at[partition, seq, kv_head], acc / lax.broadcast_in_dim(safe, acc.shape, [1]))
        store(lse.at[partition, seq, kv_head], m + jnp.log2(safe))

    def _product(self, acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        if self.interpret:
            return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)
        return plgpu.mma(acc, a, b)


def _zeros(shape: tuple[int, ...], layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def make_steps(point: Point) -> dict[str, Any]:
    """Every step by its name; the last is the library's kernel."""
    partitions = max(1, 2 * int(jax.devices()[0].core_count) // (len(point.lengths) * point.kv_heads))
    return {
        "1 gather": gather,
        "2 scan": scan,
        "3 a tile at a time": Kernel(),
        "4 tiles under way": Kernel(stages=4),
        "5 masks at the end": Kernel(stages=4, mask_all=False),
        "6 partitions": Kernel(stages=4, mask_all=False, partitions=partitions),
        "8 the decode kernel": functools.partial(paged_attention, implementation="mosaic_gpu"),
    }


@dataclasses.dataclass(frozen=True)
class FewCalls(Point):
    """For the steps without a kernel: with many calls XLA needs a minute to tune and compile them."""

    @property
    def num_calls(self) -> int:
        return 4


def compile_step(point: Point, step: Any) -> Any:
    jitted = jax.jit(step)  # lowered once for all calls

    def call(q: jax.Array, *arrays: jax.Array) -> jax.Array:
        return jitted(q[:, 0], *arrays)[:, None]

    return compile_chain(point, call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="+", default=POINTS, help="names of points, see benchmarks/kernels/points.py")
    add_output(parser)
    options = parser.parse_args()
    store = open_store("kernel_steps", options)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    for point in map(parse, options.points):
        few = FewCalls(**dataclasses.asdict(point))
        points = {name: few if step in (gather, scan) else point for name, step in make_steps(point).items()}
        jobs: dict[Any, Any] = {}
        for each in {few, point}:
            jobs |= compile_judges(each)
        jobs |= {name: functools.partial(compile_step, points[name], step) for name, step in make_steps(point).items()}
        compiled = compile_all(jobs)
        for name, each in points.items():
            programs = Programs(compiled[name], compiled[each, "floor"], compiled[each, "reference"])
            result = measure(each, programs, make_inputs(each))
            print(f"{point.name:<20} {name:<20} {result['us']:8.1f} us, floor {result['floor']:8.1f}", flush=True)
            store.add(f"{point.name}, {name}", result)


if __name__ == "__main__":
    main()
