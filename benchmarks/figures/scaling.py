"""A model of decode steps on several GPUs: bytes over measured rates, and the fixed times of kernels and exchanges.

A step of up to 64 rows reads each GPU's part of the weights and of the cache once. Every product and every attention
call lasts a fixed time longer than its bytes, small kernels do the same work on each GPU, and every exchange has a
latency. No constant is computed from the figures of two GPUs in `several_gpus.json`, except that context parallel
starts from one GPU's time there. Those figures are the check (scaling_tables.py), but inputs measured in several ways
were chosen with them known. Times are microseconds, sizes bytes.
"""

import dataclasses
import statistics

from benchmarks.figures.cells import Points

# Two H200s, jax 0.11.2, a step of Llama 3 8B's shape with and without its 64 sums (a wrong result), on one day
# before `several_gpus.json`, by the way of summing. NCCL in CUDA graphs was timed twice. One row sums 8 KB, 64 rows
# sum 512 KB.
STEPS_WITH_SUMS = {
    "graphs": {1: 4160, 64: 5940},
    "graphs, slower run": {1: 4300, 64: 6030},
    "default": {1: 4400, 64: 6420},
}
STEPS_WITHOUT_SUMS = {1: 3590, 64: 5140}
# From the same day: the small kernels of a sharded step of one row (600 launches; one GPU has 334), and an
# exchange of 8 KB outside of CUDA graphs, with one small kernel that prepares it.
SHARDED_SMALL_OF_ONE_ROW = 1200 / 32
EXCHANGE_OUTSIDE_GRAPHS = 15.5
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
    merge: float  # one small kernel of one row
    memory: float


EQUAL_LENGTHS = (
    *("1x512", "1x8192", "1x32768", "1x131072", "8x2048", "8x8192"),
    *("32x2048", "64x2048", "128x1024", "256x1024", "64x8192"),
)


def device(points: Points, gpu: str) -> Device:
    """The `h100` or the `h200`, from files of one GPU. Only the H100 has a profile of a step's kernels."""
    shape, profiled = SHAPES["Llama 3 8B"], points("h100/decode_step")
    product, small = {}, {}
    for rows, name in {64: "example 64x2048", 1: "example 1x8192"}.items():  # one row last: `others` is used below
        kernels, floor = profiled[name]["by_kernel"], shape.weight_bytes() / profiled[name]["read_bytes_per_s"] * 1e6
        products = [times for key, times in kernels.items() if key.startswith(("gemm", "nvjet"))]
        others = [times for key, times in kernels.items() if not key.startswith(("gemm", "nvjet", "paged"))]
        product[rows] = (sum(us for us, _ in products) - floor) / shape.products
        small[rows] = sum(us for us, _ in others) / shape.layers
    read = points(f"{gpu}/decode_step")["example 64x2048"]["read_bytes_per_s"] / 1e6
    if gpu == "h200":
        found = points("decisions/products_h200")
        names = "8b, products of all layers, 64 rows", "8b head, 64 rows"
        us = sum(min(found[name]["cublas us"]) for name in names)
        product[64] = (us - shape.weight_bytes() / read) / shape.products
    calls = [points(f"{gpu}/decode")[f"32/8 {size}"] for size in EQUAL_LENGTHS]
    return Device(
        read=read,
        product=product,
        attention=statistics.median(call["us"] - call["bytes"] / read for call in calls),
        small=small,
        merge=small[1] * shape.layers / sum(launches for _, launches in others),
        memory={"h100": 80e9, "h200": 141e9}[gpu],
    )


@dataclasses.dataclass(frozen=True)
class Link:
    """Exchanges inside a step: the latency between two GPUs, and bytes per microsecond."""

    latency: float
    rate: float

    def exchange(self, nbytes: float, n: int, *, ring: bool) -> float:
        """`nbytes` are the bytes that a GPU receives. Each GPU sends to all others at once, or in a ring."""
        return self.latency * (n - 1 if ring else 1) + nbytes / self.rate if n > 1 else 0.0


def link(way: str = "graphs") -> Link:
    few, many = ((STEPS_WITH_SUMS[way][rows] - STEPS_WITHOUT_SUMS[rows]) / 64 for rows in (1, 64))
    rate = 63 * 4096 * 2 / (many - few)
    return Link(few - 4096 * 2 / rate, rate)


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
    shape: Shape,
    gpu: Device,
    over: Link,
    seqs: int,
    length: int,
    n: int = 1,
    *,
    ring: bool = False,
    chosen: bool = False,
    whole_vocabulary: bool = True,
) -> Step:
    """A decode step over n GPUs.

    Args:
        ring: exchanges go in a ring.
        chosen: with kernels that read only the chosen experts, at the rate of other products; otherwise all experts are
            computed.
        whole_vocabulary: each GPU computes all logits; otherwise the embedding and the head are divided too, with a sum
            for the embedding and an exchange of the logits.
    """
    if seqs > 64:
        raise ValueError(f"the model is of steps of up to 64 rows, got seqs={seqs}")
    rows = 1 if seqs == 1 else 64
    layers = shape.layer_bytes(rows if chosen else None)
    if shape.experts and not chosen:
        dense = dataclasses.replace(shape, hidden=0).layer_bytes()
        layers = dense + (layers - dense) * EXPERTS_OVER_BYTES
    small = gpu.small[rows] if n == 1 or rows > 1 else SHARDED_SMALL_OF_ONE_ROW
    one_sum = over.exchange(rows * shape.features * 2 * 2 * (n - 1) / n, n, ring=ring)
    exchanges, head = 2 * shape.layers * one_sum, shape.vocabulary_bytes
    if not whole_vocabulary:
        exchanges += one_sum + over.exchange(rows * shape.vocab * 4 * (n - 1) / n, n, ring=ring)
        head /= n
    return Step(
        weights=(layers / n + head) / gpu.read,
        cache=shape.cache_bytes(seqs, length) / min(n, shape.kv_heads) / gpu.read,
        products=shape.products * gpu.product[rows],
        attention=shape.layers * gpu.attention,
        small=shape.layers * small,
        exchanges=exchanges,
    )


def context_parallel(gpu: Device, one: float, n: int, *, ring: bool = False) -> float:
    """A call over n GPUs for one sequence with Llama 3 8B's heads, given its time on one GPU."""
    if n == 1:
        return one
    received = (n - 2) * 32 * (128 + 1) * 4 / link().rate  # outputs and lses; the latency includes two GPUs' part
    merge = EXCHANGE_OUTSIDE_GRAPHS * (n - 1 if ring else 1) + received + gpu.merge
    return gpu.attention + (one - gpu.attention) / n + merge


def fits(shape: Shape, gpu: Device, seqs: int, length: int) -> int:
    """The fewest GPUs, a power of two, with room for weights, embedding and cache in 90% of their memory."""
    room, n = 0.9 * gpu.memory - 2 * shape.vocabulary_bytes, 1  # each GPU has the embedding and the head
    layers, cache = shape.layer_bytes(), shape.cache_bytes(seqs, length)
    if cache / shape.kv_heads >= room:
        raise ValueError(f"a KV head of {seqs} x {length} tokens exceeds a GPU: divide tokens, not heads")
    while layers / n + cache / min(n, shape.kv_heads) > room:
        n *= 2
    return n
