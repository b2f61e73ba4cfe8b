"""A model of decode steps on several GPUs: bytes over measured rates, and the fixed times of kernels and exchanges.

A step of up to 64 rows reads each GPU's part of the weights and of the cache once. Every product and every attention
call lasts a fixed time longer than its bytes, small kernels do the same work on each GPU, and every exchange has a
latency, which grows with each doubling of the GPUs. The constants are from one GPU, from sums of two, and from context
parallel calls of two and four. Steps of two and four GPUs are the check (scaling_tables.py). Times are microseconds,
sizes bytes.
"""

import dataclasses
import math
import statistics

from benchmarks.figures.cells import Points

# One layer of gpt-oss-20b's experts on an H100, 64 tokens, all experts computed: measured time over the bytes' time.
EXPERTS_OVER_BYTES = 590 / 514


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model in bfloat16. `windows` counts the layers that see at most `window` tokens."""

    layers: int
    features: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    experts: int = 0
    experts_per_token: int = 0
    expert_bits: float = 16
    windows: int = 0
    window: int = 128

    @property
    def products(self) -> int:
        return self.layers * (5 if self.experts else 4) + 1  # qkv, out, gate and up, down; a router; the head

    @property
    def vocabulary_bytes(self) -> float:
        """The embedding, or the head."""
        return 2 * self.features * self.vocab

    def layer_bytes(self, only_chosen_by: int | None = None) -> float:
        """The weights of all layers. Optionally without the experts that no row chooses, for this number of rows that
        choose evenly."""
        attended = self.heads * self.head_dim
        attention = self.features * (2 * attended + 2 * self.kv_heads * self.head_dim)
        mlp = 3 * self.features * self.hidden * max(1, self.experts) * self.expert_bits / 8
        if only_chosen_by is not None and self.experts:
            mlp *= 1 - (1 - self.experts_per_token / self.experts) ** only_chosen_by
        router = self.features * self.experts
        return self.layers * (2 * (attention + router) + mlp)

    def weight_bytes(self, only_chosen_by: int | None = None) -> float:
        """All weights but the embedding: a step reads few of its rows."""
        return self.layer_bytes(only_chosen_by) + self.vocabulary_bytes

    def cache_bytes(self, seqs: int, length: int) -> float:
        tokens = (self.layers - self.windows) * length + self.windows * min(length, self.window)
        return seqs * tokens * 2 * self.kv_heads * self.head_dim * 2


SHAPES = {
    "Llama 3 8B": Shape(32, 4096, 32, 8, 128, 14_336, 128_256),
    "Llama 3 70B": Shape(80, 8192, 64, 8, 128, 28_672, 128_256),
    "gpt-oss-120B": Shape(36, 2880, 64, 8, 64, 2880, 201_088, experts=128, experts_per_token=4, windows=18),
}
MXFP4 = dataclasses.replace(SHAPES["gpt-oss-120B"], expert_bits=4.25)


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU. Times with a dict are for steps of one row and of 64."""

    read: float  # bytes per microsecond
    product: dict[int, float]  # the time of a product in addition to its bytes
    attention: float  # the same for an attention call
    small: dict[int, float]  # small kernels of a layer
    slot: float  # one small kernel of one row, with the time until the next


MEMORY = 141e9
PRODUCTS = "decisions/products_h200"
EQUAL_LENGTHS = (
    *("1x512", "1x8192", "1x32768", "1x131072", "8x2048", "8x8192"),
    *("32x2048", "64x2048", "128x1024", "256x1024", "64x8192"),
)


def device(points: Points) -> Device:
    """The H200, from files of one GPU. Small kernels are from the profile of a step on an H100."""
    shape, profiled, product, small = SHAPES["Llama 3 8B"], points("h100/decode_step"), {}, {}
    for rows, name in {64: "example 64x2048", 1: "example 1x8192"}.items():  # one row last: `others` is used below
        kernels, floor = profiled[name]["by_kernel"], shape.weight_bytes() / profiled[name]["read_bytes_per_s"] * 1e6
        products = [times for key, times in kernels.items() if key.startswith(("gemm", "nvjet"))]
        others = [times for key, times in kernels.items() if not key.startswith(("gemm", "nvjet", "paged"))]
        product[rows] = (sum(us for us, _ in products) - floor) / shape.products
        small[rows] = sum(us for us, _ in others) / shape.layers
    read, found = points("h200/decode_step")["example 64x2048"]["read_bytes_per_s"] / 1e6, points(PRODUCTS)
    us = sum(min(found[name]["cublas us"]) for name in ("8b, products of all layers, 64 rows", "8b head, 64 rows"))
    product[64] = (us - shape.weight_bytes() / read) / shape.products
    calls = [points("h200/decode")[f"32/8 {size}"] for size in EQUAL_LENGTHS]
    return Device(
        read=read,
        product=product,
        attention=statistics.median(call["us"] - call["bytes"] / read for call in calls),
        small=small,
        slot=small[1] * shape.layers / sum(launches for _, launches in others),
    )


@dataclasses.dataclass(frozen=True)
class Link:
    """A sum over GPUs inside a CUDA graph, by XLA's own kernel."""

    latency: float  # between two GPUs, with the time until the next kernel
    growth: float  # of the latency, with each doubling of the GPUs
    rate: float  # bytes per microsecond that a GPU receives

    def sum(self, nbytes: float, n: int) -> float:
        """`nbytes` are the bytes of the sum; each GPU receives its part of all others, and then their sums."""
        received = 2 * (n - 1) / n * nbytes
        return self.latency + self.growth * (math.log2(n) - 1) + received / self.rate if n > 1 else 0.0


def link(points: Points) -> Link:
    """From timed sums of two GPUs; the growth from context parallel calls of two and of four."""
    few, many = (points("h200/sums")[f"{rows} rows of 4096"] for rows in (1, 64))
    rate = (many["bytes"] - few["bytes"]) / (many["xla us"] - few["xla us"])
    gpu = device(points)
    two = Link(few["xla us"] - few["bytes"] / rate + gpu.slot, 0.0, rate)
    calls = [call for name, call in points("h200/several_gpus_x4").items() if name.startswith("context")]
    growths = (call["several"] - context_parallel(gpu, two, call["one"], 4) for call in calls)
    return dataclasses.replace(two, growth=statistics.median(growths))


@dataclasses.dataclass(frozen=True)
class Step:
    """The terms of a step. Only the first two are bytes."""

    weights: float
    cache: float
    products: float
    attention: float
    small: float
    exchanges: float

    @property
    def us(self) -> float:
        return sum(dataclasses.astuple(self))


def tensor_parallel(
    shape: Shape, gpu: Device, over: Link, seqs: int, length: int, n: int = 1, *, chosen: bool = False
) -> Step:
    """A decode step over n GPUs, each with the whole vocabulary.

    With `chosen`, kernels read only the chosen experts, at the rate of other products; otherwise all are computed.
    """
    if seqs > 64:
        raise ValueError(f"the model is of steps of up to 64 rows, got seqs={seqs}")
    rows = 1 if seqs == 1 else 64
    layers = shape.layer_bytes(rows if chosen else None)
    if shape.experts and not chosen:
        dense = dataclasses.replace(shape, hidden=0).layer_bytes()
        layers = dense + (layers - dense) * EXPERTS_OVER_BYTES
    return Step(
        weights=(layers / n + shape.vocabulary_bytes) / gpu.read,
        cache=shape.cache_bytes(seqs, length) / min(n, shape.kv_heads) / gpu.read,
        products=shape.products * gpu.product[rows],
        attention=shape.layers * gpu.attention,
        small=shape.layers * gpu.small[rows],
        exchanges=2 * shape.layers * over.sum(rows * shape.features * 2, n),
    )


def context_parallel(gpu: Device, over: Link, one: float, n: int, *, q_len: int = 1) -> float:
    """A call over n GPUs for one sequence with Llama 3 8B's heads, given its time on one GPU."""
    if n == 1:
        return one
    lses, outputs = n * q_len * 32 * 4, q_len * 32 * 128 * 4
    # One token: one sum of outputs and lses, with zeros. Several: a sum of the lses, then one of the weighted outputs.
    sums = (lses + n * outputs,) if q_len == 1 else (lses, outputs)
    return gpu.attention + (one - gpu.attention) / n + sum(over.sum(nbytes, n) for nbytes in sums) + 2 * gpu.slot


def fits(shape: Shape, seqs: int, length: int) -> int:
    """The fewest GPUs, a power of two, with room for weights, embedding and cache in 90% of their memory."""
    room, n = 0.9 * MEMORY - 2 * shape.vocabulary_bytes, 1  # each GPU has the embedding and the head
    layers, cache = shape.layer_bytes(), shape.cache_bytes(seqs, length)
    if cache / shape.kv_heads >= room:
        raise ValueError(f"a KV head of {seqs} x {length} tokens exceeds a GPU: divide tokens, not heads")
    while layers / n + cache / min(n, shape.kv_heads) > room:
        n *= 2
    return n
