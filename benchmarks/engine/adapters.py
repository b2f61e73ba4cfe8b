"""What adapters cost: their products in a layer, and steps of an engine with and without.

    python -m benchmarks.engine.adapters              # 64 adapters of rank 16 on q, k, v and o, Llama-3-8B's shape
    python -m benchmarks.engine.adapters --layers 0   # only the products
    python -m benchmarks.engine.adapters --toy        # on a CPU, to try the script out

Rows are those of two steps: 256 single tokens, whose adapters are drawn, and the same beside 512 tokens of one prompt.
Before they are timed, they are compared with float32.

  us      of the adapters of a layer, with the additions to what the layer computed, in a chain of layers in one jit,
          compiled as an engine compiles its steps
  floor   the bytes of A and B of all adapters at the rate of a kernel that only reads, in the same run
  ms      of a step of an engine, by the slope between few steps and many, in slices
"""

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.checks import poisoned, worst_error
from benchmarks.engine.model import CONFIGS, packed_model, random_weights
from benchmarks.engine.steps import Steps, name_kind
from benchmarks.engine.workload import SIZES, create_caches
from benchmarks.harness import (
    add_output,
    by_kernel,
    kernel_times,
    open_store,
    random,
    read_bandwidth,
    slope_microseconds,
)
from jaxpaged import Engine, EngineOptions, StepAttention, lora
from jaxpaged._engine.defaults import chosen_compiler_options

RANK = 16
NUM_LAYERS = 8  # of the chain: their adapters are several times the L2 cache
FEW_STEPS, MANY_STEPS = 2, 8
Factors = list[tuple[jax.Array, jax.Array]]  # A and B of q, k and v
Layer = tuple[Factors, Factors]  # of q, k and v, and of o


@dataclasses.dataclass(frozen=True)
class Shape:
    features: int = 4096
    parts: tuple[int, ...] = (4096, 1024, 1024)  # outputs of q, k and v
    adapters: int = 64
    single: int = 256  # rows
    chunk: int = 512  # more rows, of one adapter

    @property
    def num_bytes(self) -> int:
        outputs = (*self.parts, self.features)
        return 2 * self.adapters * RANK * (len(outputs) * self.features + sum(outputs))

    def ids(self, rows: int) -> jax.Array:
        drawn = np.random.default_rng(0).integers(0, self.adapters, self.single)
        return jnp.asarray(np.concatenate([drawn, np.full(rows - self.single, drawn[0])]), jnp.int32)


TOY = Shape(features=256, parts=(256, 64, 64), adapters=4, single=8, chunk=16)


def make_layer(shape: Shape, seed: int) -> Layer:
    def factors(i: int, features: int, outputs: int) -> tuple[jax.Array, jax.Array]:
        a = random(10 * seed + 2 * i, shape=(shape.adapters, RANK, features), dtype="bfloat16")
        b = random(10 * seed + 2 * i + 1, shape=(shape.adapters, RANK, outputs), dtype="bfloat16")
        return a * jnp.bfloat16(features**-0.5), b * jnp.bfloat16(RANK**-0.5)

    qkv = [factors(i, shape.features, outputs) for i, outputs in enumerate(shape.parts)]
    return qkv, [factors(4, shape.parts[0], shape.features)]


def adapted(x: jax.Array, factors: Factors, ids: jax.Array) -> jax.Array:
    """The adapters' outputs of all parts, beside each other."""
    return jnp.concatenate([lora(x, a, b, ids) for a, b in factors], axis=1)


def chain(x: jax.Array, base: jax.Array, ids: jax.Array, layers: list[Layer]) -> jax.Array:
    """The adapters of all layers, each added to `base`, what the layer itself would have computed."""
    for qkv, out in layers:
        y = base + adapted(x, qkv, ids)
        features = out[0][0].shape[2]
        x = x * jnp.bfloat16(0.5) + adapted(y[:, :features], out, ids)
    return x


@jax.jit
def expected(x: jax.Array, factors: Factors, ids: jax.Array) -> jax.Array:
    """Of each part, in float32: every row's adapter is gathered."""
    x, factors = jax.tree.map(lambda matrix: matrix.astype(jnp.float32), (x, factors))
    with jax.default_matmul_precision("highest"):
        rows = [(jnp.einsum("tf,trf->tr", x, a[ids]), b[ids]) for a, b in factors]
        return jnp.concatenate([jnp.einsum("tr,tro->to", *of_part) for of_part in rows], axis=1)


def check(x: jax.Array, ids: jax.Array, factors: Factors) -> float:
    """The worst error of a row, over its largest number; raises if it is wrong."""
    return worst_error("adapters", poisoned(jax.jit(adapted), x, factors, ids), expected(x, factors, ids))


def measure_products(shape: Shape, store: Any) -> None:
    layers = [make_layer(shape, seed) for seed in range(NUM_LAYERS)]
    floor = shape.num_bytes / read_bandwidth() * 1e6
    compiled = jax.jit(chain, compiler_options=chosen_compiler_options(None))
    for rows in (shape.single, shape.single + shape.chunk):
        x, ids = random(1, shape=(rows, shape.features), dtype="bfloat16"), shape.ids(rows)
        base = random(2, shape=(rows, sum(shape.parts)), dtype="bfloat16")
        error = check(x, ids, layers[0][0])
        run = functools.partial(compiled, x, base, ids, layers)
        us = slope_microseconds(lambda _, run=run: run(), NUM_LAYERS)  # type: ignore[misc]
        result: dict[str, Any] = dict(us=us, floor=floor, over_floor=us / floor, error=error)
        if jax.default_backend() == "gpu":
            found = by_kernel(kernel_times(run), NUM_LAYERS)
            result["by_kernel"] = {name[:40]: times for name, times in list(found.items())[:6]}
        store.add(f"products, {rows} rows", result)
        print(
            f"{rows:4} rows {us:8.2f} us a layer, floor {floor:.2f}, {us / floor:.2f} of it, error {error:.1e}  "
            f"{result.get('by_kernel', '')}",
            flush=True,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A matrix of a layer that its adapters stand beside."""

    matrix: jax.Array
    factors: Factors
    ids: jax.Array | None = None  # of the rows of this step

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        return x @ self.matrix + adapted(x, self.factors, self.ids)  # type: ignore[arg-type]


def adapted_model(config: Any) -> Any:
    """`packed_model`, whose matrices may be `Adapted`."""
    plain = packed_model(config)

    def is_adapted(x: Any) -> bool:
        return isinstance(x, Adapted)

    def apply(weights: Any, tokens: jax.Array, positions: jax.Array, caches: Any, attend: StepAttention) -> Any:
        def bound(x: Any) -> Any:
            return dataclasses.replace(x, ids=attend.adapters) if is_adapted(x) else x

        return plain(jax.tree.map(bound, weights, is_leaf=is_adapted), tokens, positions, caches, attend)

    return apply


def milliseconds(is_adapted: bool, *, toy: bool, layers: int, rounds: int) -> Iterator[tuple[str, float]]:
    """Kinds of steps and their times, the widest kind's and that of single tokens."""
    name, shape = ("toy", TOY) if toy else ("8b", Shape())
    config = dataclasses.replace(CONFIGS[name], num_layers=layers, vocab_size=1024)
    sizes = dataclasses.replace(SIZES[name], **({} if toy else dict(seats=256, chunk=512)))
    weights = random_weights(config)
    if is_adapted:
        kv = config.num_kv_heads * config.head_dim
        shape = dataclasses.replace(shape, features=config.features, parts=(config.num_heads * config.head_dim, kv, kv))
        for i, layer in enumerate(weights["layers"]):
            qkv, out = make_layer(shape, i)
            weights["layers"][i] = layer | {"qkv": Adapted(layer["qkv"], qkv), "out": Adapted(layer["out"], out)}
    engine = Engine(
        adapted_model(config),
        weights,
        create_caches(config, sizes.num_blocks),
        options=EngineOptions(
            max_num_seqs=sizes.seats,
            max_model_len=2 * sizes.longest,
            chunk_tokens=sizes.chunk,
            num_adapters=shape.adapters if is_adapted else 0,
        ),
    )
    steps, kinds = Steps(engine, sizes), engine._runner.kinds
    few, many = (1, 2) if toy else (FEW_STEPS, MANY_STEPS)
    single = next(kind for kind in kinds if kind.width == sizes.seats and not kind.is_mixed)
    for kind in (single, kinds[-1]):
        for _ in range(rounds):
            steps.prepare(kind, 32 if toy else 512)
            yield name_kind(kind), steps.milliseconds(kind, few, many)


def measure_steps(store: Any, options: argparse.Namespace) -> None:
    without: dict[str, float] = {}
    for name, is_adapted in (("without", False), ("with", True)):
        times: dict[str, list[float]] = {}
        for kind, ms in milliseconds(is_adapted, toy=options.toy, layers=options.layers, rounds=options.rounds):
            times.setdefault(kind, []).append(ms)
        for kind, found in times.items():
            ms = statistics.median(found)
            without.setdefault(kind, ms)
            point = dict(ms=ms, times=found, share=ms / without[kind] - 1)
            store.add(f"step, {kind}, {options.layers} layers, {name}", point)
            print(f"{kind:<12} {name:<8} {ms:8.3f} ms a step, {point['share']:+.1%}, {found}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="of the engines")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--toy", action="store_true", help="small")
    add_output(parser)
    options = parser.parse_args(arguments)
    store = open_store("adapters", options)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    measure_products(TOY if options.toy else Shape(), store)
    if options.layers:
        measure_steps(store, options)


if __name__ == "__main__":
    main()
