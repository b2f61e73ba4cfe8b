"""What the steps of a run cost by themselves, and the floor of their bytes and products."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks.engine.steps import name_kind
from benchmarks.engine.workload import Request, kv_tokens
from benchmarks.harness import random, slope_microseconds
from benchmarks.models.llama_step import LlamaConfig
from jaxpaged import Engine
from jaxpaged._engine.inputs import keys_and_values
from jaxpaged._engine.kinds import Kind


def product_rate(compiler_options: dict[str, Any], seconds: float = 0.5) -> float:
    """Floating point operations a second of a large product in bfloat16, measured for so long."""
    width = 8192 if jax.default_backend() == "gpu" else 512
    x, w = (random(i, shape=(width, width), dtype="bfloat16") for i in range(2))
    chain = jax.jit(lambda x: x @ w @ w @ w @ w, compiler_options=compiler_options)
    return 2 * width**3 / slope_microseconds(lambda _: chain(x), 4, seconds) * 1e6


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a run's steps cost by themselves, and by their bytes and products, in seconds."""

    times: dict[str, float]
    kinds: tuple[Kind, ...]
    weight_bytes: int
    kv_bytes: int  # a token
    layer_params: int
    head_params: int
    bandwidth: float
    products: float

    @classmethod
    def of(cls, config: LlamaConfig, weights: Any, engine: Engine, times: dict[str, float], **rates: float) -> "Costs":
        """`times` of the steps; `rates`: bandwidth and products."""
        layer_params = sum(leaf.size for leaf in jax.tree.leaves(weights["layers"]))
        head_params = config.vocab_size * config.features
        return cls(
            times=times,
            kinds=engine._runner.kinds,
            weight_bytes=2 * (layer_params + head_params),
            kv_bytes=sum(
                pool.nbytes // (pool.shape[0] * pool.shape[1]) for pool in keys_and_values(engine._runner.state.caches)
            ),
            layer_params=layer_params,
            head_params=head_params,
            **rates,
        )

    def of_steps(self, num_of_kind: Sequence[int], work: Sequence[Request]) -> float:
        times = self.times
        a_token = (times["many_ms"] - times["few_ms"]) / (times["many_kv"] - times["few_kv"])
        each = [times[f"{name}_ms"] - a_token * times[f"{name}_kv"] for name in map(name_kind, self.kinds)]
        steps = sum(number * ms for number, ms in zip(num_of_kind, each, strict=True))
        return (steps + kv_tokens(work) * a_token) / 1e3

    def floor(self, num_of_kind: Sequence[int], work: Sequence[Request]) -> float:
        seconds = kv_tokens(work) * self.kv_bytes / self.bandwidth
        for number, kind in zip(num_of_kind, self.kinds, strict=True):
            logits = kind.num_seats if kind.is_mixed else kind.width
            products = 2 * (self.layer_params * kind.width + self.head_params * logits) / self.products
            seconds += number * max(self.weight_bytes / self.bandwidth, products)
        return seconds
