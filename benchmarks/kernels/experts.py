"""A mixture of experts, all experts for each token or grouped: `python -m benchmarks.kernels.experts`.

A layer is the products of `examples/lib/experts.py` with random weights and random experts for each token. The grouped
ways are checked against all experts before they are timed. Times are device time per layer, of four layers in one jit;
their weights are far larger than a GPU's L2 cache. The floor is the larger of two times: to read the weights of the
experts that have a token, the tokens and the answer once at `--bandwidth`, and to compute their products at `--rate`.

Tile sizes that the kernel refuses, and wrong results, are recorded as errors. After `--limit` seconds no other number
of tokens is begun; another run continues. `--toy` uses toy sizes, to try the program out on any machine.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.checks import poisoned, require, worst_error
from benchmarks.harness import Store, add_output, compile_all, open_store, slope_microseconds
from lib.experts import Activation, ExpertWeights, Tiles, all_experts, grouped_experts
from lib.llama_config import Clipped
from lib.mlp import clipped_gated, gated

CALLS = 4  # layers in one jit
Compute = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Layer:
    num_experts: int
    experts_per_token: int
    features: int
    hidden: int
    clipped: bool = False  # with biases, as in gpt-oss

    @property
    def activate(self) -> Activation:
        return functools.partial(clipped_gated, clipped=Clipped(alpha=1.702, limit=7.0)) if self.clipped else gated


LAYERS = {
    "gpt-oss-20b": Layer(32, 4, 2880, 2880, clipped=True),
    "Qwen3-30B-A3B": Layer(128, 8, 2048, 768),
}
TOY_LAYERS = {"toy, clipped": Layer(4, 2, 64, 64, clipped=True), "toy": Layer(8, 3, 64, 128)}
TOKENS, TOY_TOKENS = (512, 1024, 256, 4096, 2048, 128, 64), (13, 8)  # the limit may drop the last ones
TOY_TILES = None, Tiles(block_m=64, block_n=128)
TILES = (
    Tiles(block_m=64, block_n=128, max_concurrent_steps=6),
    Tiles(block_m=64, block_n=192),
    Tiles(block_m=128, block_n=128, max_concurrent_steps=5),
    Tiles(block_m=128, block_n=128, max_concurrent_steps=5, grid_block_n=1),
    Tiles(block_m=128, block_n=192),
    Tiles(block_m=128, block_n=192, grid_block_n=1),
)


def list_ways(toy: bool) -> dict[str, Compute]:
    """All ways by name, the reference of the others first."""
    ways: dict[str, Compute] = {"all experts": all_experts}
    for tiles in TOY_TILES if toy else TILES:
        ways[name_of(tiles)] = functools.partial(grouped_experts, tiles=tiles)
    return ways


def name_of(tiles: Tiles | None) -> str:
    if tiles is None:
        return "grouped by XLA"
    sizes = tiles.block_m, tiles.block_n, tiles.block_k
    return f"grouped {'x'.join(map(str, sizes))}, {tiles.max_concurrent_steps} stages, {tiles.grid_block_n} adjacent"


@functools.partial(jax.jit, static_argnames=("shape", "scale"))
def random(seed: Any, *, shape: tuple[int, ...], scale: float = 1.0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) * scale


def make_weights(layer: Layer) -> ExpertWeights:
    """Scaled so that the numbers neither grow nor vanish over a few layers."""
    experts, features, hidden = layer.num_experts, layer.features, layer.hidden
    weights = ExpertWeights(
        random(0, shape=(experts, 2 * hidden, features), scale=1.5 * features**-0.5),
        random(1, shape=(experts, hidden, features), scale=1.5 * hidden**-0.5),
    )
    if not layer.clipped:
        return weights
    biases = random(2, shape=(experts, 2 * hidden)), random(3, shape=(experts, features))
    return ExpertWeights(*weights[:2], *biases)


def make_routes(layer: Layer, tokens: int) -> list[tuple[jax.Array, jax.Array]]:
    """For each call, the chosen experts and their shares, [tokens, k]. Equal routes would be sorted only once."""
    routes = []
    for i in range(CALLS):
        scores = jax.random.uniform(jax.random.key(i), (tokens, layer.num_experts))
        largest, chosen = jax.lax.top_k(scores, layer.experts_per_token)
        routes.append((chosen, jax.nn.softmax(4 * largest).astype(jnp.bfloat16)))
    return routes


def floor_microseconds(layer: Layer, routes: list[tuple[jax.Array, jax.Array]], bandwidth: float, rate: float) -> float:
    """The mean floor of the calls."""
    tokens = len(routes[0][0])
    hit = np.mean([len(np.unique(np.asarray(chosen))) for chosen, _ in routes])
    of_expert = 3 * layer.hidden * layer.features
    moved = 2 * (hit * of_expert + 2 * tokens * layer.features)  # bytes
    products = 2 * tokens * layer.experts_per_token * of_expert
    return float(max(moved / bandwidth, products / rate) * 1e6)


def chain(x: jax.Array, routes: Any, weights: ExpertWeights, *, compute: Compute) -> tuple[jax.Array, jax.Array]:
    """The outputs of the first and the last layer."""
    outs = [x]
    for chosen, shares in routes:
        outs.append(compute(outs[-1], chosen, shares, weights))
    return outs[1], outs[-1]


def compile_or_refuse(compute: Compute, arguments: tuple) -> Any:
    """The compiled chain, or the error."""
    try:
        return jax.jit(functools.partial(chain, compute=compute)).lower(*arguments).compile()
    except Exception as error:  # a kernel may refuse its tiles in any way; the others are still measured
        return error


def measure(name: str, program: Any, arguments: tuple, expected: np.ndarray | None, seconds: float) -> dict[str, Any]:
    """The time of a layer after its check, or the error."""
    try:
        if isinstance(program, Exception):
            raise program
        first, last = jax.tree.map(np.asarray, poisoned(program, *arguments))
        require(np.isfinite(last.astype(np.float32)).all(), f"{name}: the last layer's output is not finite")
        error = worst_error(name, first, first if expected is None else expected)  # the reference: that it is finite
        return {"worst_error": error, "product": slope_microseconds(lambda _: program(*arguments), CALLS, seconds)}
    except Exception as error:  # as above, and wrong results
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def measure_point(
    point: str, layer: Layer, weights: ExpertWeights, tokens: int, options: argparse.Namespace, store: Store
) -> None:
    routes = make_routes(layer, tokens)
    floor = floor_microseconds(layer, routes, options.bandwidth * 1e12, options.rate * 1e12)
    arguments = random(4, shape=(tokens, layer.features)), routes, weights

    def compiled(compute: Compute) -> Any:
        return compile_or_refuse(functools.partial(compute, activate=layer.activate), arguments)

    jobs: dict[str, Callable[[], Any]]
    jobs = {way: functools.partial(compiled, compute) for way, compute in list_ways(options.toy).items()}
    expected = None
    for way, program in compile_all(jobs).items():
        name = f"{point}, {way}"
        found = measure(name, program, arguments, expected, options.seconds)
        if "product" in found:
            found["over_floor"] = found["product"] / floor
            print(f"{name:<72} {found['product']:9.1f} us, {found['over_floor']:5.2f} floors", flush=True)
        else:
            print(f"{name:<72} {found['error']}", flush=True)
        store.add(name, {"floor": floor} | found)
        if expected is None:
            if "error" in found:
                return  # nothing to check the grouped ways against
            expected = np.asarray(program(*arguments)[0])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", help=f"some of {', '.join(LAYERS)}")
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--bandwidth", type=float, default=4.0, help="TB/s of the floor; the default is an H200's")
    parser.add_argument("--rate", type=float, default=800.0, help="Tflop/s of the floor")
    parser.add_argument("--seconds", type=float, default=0.1, help="of a measurement")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds after which no number of tokens is begun")
    parser.add_argument("--toy", action="store_true")
    add_output(parser)
    options = parser.parse_args(arguments)
    begin, layers = time.monotonic(), TOY_LAYERS if options.toy else LAYERS
    store = open_store("experts", options, bandwidth=options.bandwidth, rate=options.rate)
    weights = {model: make_weights(layers[model]) for model in options.layers or layers}
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    for tokens in options.tokens or (TOY_TOKENS if options.toy else TOKENS):
        for model in weights:
            point = f"{model}, {tokens} tokens"
            if all(f"{point}, {way}" in store.points for way in list_ways(options.toy)):
                continue  # measured by an earlier run
            if time.monotonic() - begin > options.limit:
                raise SystemExit(f"Stopped after {options.limit:g} s, before {point}. Another run continues there.")
            measure_point(point, layers[model], weights[model], tokens, options, store)


if __name__ == "__main__":
    main()
