"""Tables of docs/scaling.md: the model of scaling.py next to the measured figures, and its predictions for an H200."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

from benchmarks.figures import scaling
from benchmarks.figures.cells import Points, label, table, us
from benchmarks.figures.scaling import MXFP4, SHAPES, Device, Link, Shape, Step, device, link, tensor_parallel

LLAMA = SHAPES["Llama 3 8B"]
GROWTH = 46  # tokens that a timed loop has appended to a sequence, on average: `bytes` of `decode_step.json`
WAYS = {"graphs": "sums in CUDA graphs", "default": "sums by default"}
# Two H100s, jax 0.11.2, commit fc80bb1: in no result file, and no constant of the model is from that run.
H100_STEPS = {("graphs", "64x2048"): 8290.0, ("default", "64x2048"): 8720.0, ("graphs", "1x8192"): 4630.0}


@dataclasses.dataclass(frozen=True)
class Check:
    gpu: str
    part: str
    size: str
    measured: float
    model: float

    @property
    def ratio(self) -> float:
        return self.model / self.measured

    def cells(self) -> list[str]:
        return [self.gpu, self.part, label(f"32/8 {self.size}"), us(self.measured), us(self.model), f"{self.ratio:.3f}"]


def parse(size: str) -> tuple[int, int]:
    seqs, length = map(int, size.split("x"))
    return seqs, length


def step(gpu: Device, over: Link, size: str, n: int) -> Step:
    """As timed: on two GPUs each had a half of the vocabulary."""
    seqs, length = parse(size)
    return tensor_parallel(LLAMA, gpu, over, seqs, length + GROWTH, n, whole_vocabulary=n == 1)


def two_gpu_checks(points: Points, *, gpu: Device | None = None, way: Callable[[str], Link] = link) -> Iterator[Check]:
    """The figures of two GPUs in h200/several_gpus.json."""
    gpu = gpu or device(points, "h200")
    for name, point in points("h200/several_gpus").items():
        part, size = name.split()
        seqs, length = parse(size)
        if part == "attention":
            share = seqs * length * 2 * LLAMA.kv_heads * LLAMA.head_dim * 2 / 2
            call = gpu.attention + share / gpu.read
            yield Check("2 x H200", "tensor parallel, attention", size, point["several"], call)
        elif part == "context":
            context = scaling.context_parallel(gpu, point["one"], 2)
            yield Check("2 x H200", "context parallel, attention", size, point["several"], context)
        else:
            for key, text in WAYS.items():
                yield Check("2 x H200", f"step, {text}", size, point[key], step(gpu, way(key), size, 2).us)


def one_gpu_checks(points: Points) -> Iterator[Check]:
    gpu = device(points, "h200")
    for size in ("64x2048", "1x8192"):
        for file, found in {
            "several_gpus": points("h200/several_gpus")[f"step {size}"]["one"],
            "decode_step": points("h200/decode_step")[f"example {size}"]["ms"] * 1e3,
        }.items():
            yield Check("H200", f"step, in {file}", size, found, step(gpu, link(), size, 1).us)
    found = points("h200/engine_steps")["steps"]
    length = int(found["single_64_kv"]) // 64
    yield Check("H200", "engine step", f"64x{length}", found["single_64_ms"] * 1e3, engine_step(points, 64, length))


def h100_checks(points: Points) -> Iterator[Check]:
    gpu = device(points, "h100")
    for (way, size), measured in H100_STEPS.items():
        yield Check("2 x H100", f"step, {WAYS[way]}", size, measured, step(gpu, link(way), size, 2).us)


def engine_step(points: Points, seqs: int, length: int) -> float:
    """A step of an engine on one GPU, with its scheduling."""
    scheduling = points("h200/engine_steps")["steps"]["scheduling_us"]
    return tensor_parallel(LLAMA, device(points, "h200"), link(), seqs, length).us + scheduling


def prompts(points: Points) -> Check:
    """8 x 1024 tokens on two H100s: half of one GPU's time, and 65 sums of 64 MiB as timed on two H200s."""
    found, sums = points("h100/several_gpus")["prefill 8x1024"], points("h200/sums")
    model = found["one"] / 2 + 65 * sums["64 MiB"]["xla us"]
    return Check("2 x H100", "tensor parallel, prompts", "8x1024", found["several"], model)


def checks(points: Points) -> str:
    """Microseconds; the server's row is tokens a second."""
    rows = [check.cells() for each in (two_gpu_checks, one_gpu_checks, h100_checks) for check in each(points)]
    rows.append(prompts(points).cells())
    server = points("h200/engine_server_x2")
    found, one = (server[name]["tokens_per_s"] for name in ("server, 2 engines, 256 clients", "server"))
    rows.append(["2 x H200", "data parallel in one process, tokens/s", "", us(found), us(2 * one), "not reproduced"])
    return table(("GPUs", "figure", "sequences x length", "measured", "model", "model / measured"), rows)


def inputs(points: Points) -> str:
    """The largest error over h200/several_gpus.json with other inputs that were measured too."""
    gpu, shape = device(points, "h200"), LLAMA
    found = points("decisions/products_h200")
    names = ("8b, products of all layers, 64 rows", "8b head, 64 rows")
    by_triton = sum(min(found[name]["cublaslt and triton us"]) for name in names)
    product = (by_triton - shape.weight_bytes() / gpu.read) / shape.products
    slot = scaling.SHARDED_SMALL_OF_ONE_ROW * shape.layers / 600

    def slower(way: str) -> Link:
        return link("graphs, slower run" if way == "graphs" else way)

    rows = []
    for name, checks in {
        "as above": two_gpu_checks(points),
        "sums of the slower run": two_gpu_checks(points, way=slower),
        "products as XLA chooses by default, not cuBLAS's": two_gpu_checks(
            points, gpu=dataclasses.replace(gpu, product=gpu.product | {64: product})
        ),
        f"{slot:.1f} us for the kernel that merges, not {gpu.merge:.1f}": two_gpu_checks(
            points, gpu=dataclasses.replace(gpu, merge=slot)
        ),
    }.items():
        worst = max(checks, key=lambda check: abs(check.ratio - 1))
        rows.append([name, f"{worst.ratio:.3f}", ", ".join(worst.cells()[1:3])])
    return table(("input", "furthest from 1", "at"), rows)


@dataclasses.dataclass(frozen=True)
class Load:
    """A step of a model on H200s, with sums in CUDA graphs."""

    name: str
    shape: Shape
    chosen: bool  # only the chosen experts are read
    gpu: Device
    seqs: int
    length: int

    @property
    def least(self) -> int:
        return scaling.fits(self.shape, self.gpu, self.seqs, self.length)

    def step(self, n: int, ring: bool) -> Step:
        sizes = self.seqs, self.length, n
        return tensor_parallel(self.shape, self.gpu, link(), *sizes, ring=ring, chosen=self.chosen)

    def cells(self) -> list[str]:
        return [self.name, label(f"32/8 {self.seqs}x{self.length}")]

    def milliseconds(self, n: int) -> str:
        return both(lambda ring: self.step(n, ring).us / 1e3) if n >= self.least else ""

    def rate(self, n: int) -> str:
        return both(lambda ring: self.seqs / self.step(n, ring).us / n * 1e6, "{:,.0f}")

    def pays_up_to(self, ring: bool) -> int:
        counts = [n for n in (1, 2, 4, 8, 16, 32, 64) if self.least <= n <= self.shape.heads]
        return pays_up_to(lambda n: self.step(n, ring).us, counts)


def loads(points: Points) -> Iterator[Load]:
    gpu = device(points, "h200")
    models = [(name, shape, False) for name, shape in SHAPES.items()]
    for model in (*models, ("gpt-oss-120B, MXFP4 *", MXFP4, True)):
        for size in ((64, 2048), (1, 8192), (8, 131_072)):
            yield Load(*model, gpu, *size)


def both(of_ring: Callable[[bool], float], text: str = "{:.1f}") -> str:
    """With exchanges all at once, or in a ring."""
    low, high = (text.format(of_ring(ring)) for ring in (False, True))
    return low if low == high else f"{low} or {high}"


def pays_up_to(us_of: Callable[[int], float], counts: Sequence[int]) -> int:
    """The most GPUs of `counts` that are at least half as efficient as the first."""
    return max(n for n in counts if us_of(counts[0]) * counts[0] >= us_of(n) * n / 2)


def steps(points: Points) -> str:
    counts = (1, 2, 4, 8)
    rows = [
        [*load.cells(), str(load.least), *map(load.milliseconds, counts), load.rate(load.least), load.rate(8)]
        for load in loads(points)
    ]
    heads = "model", "sequences x length", "fewest GPUs", *(f"on {n}, ms" for n in counts)
    return table((*heads, "tokens/s a GPU, on the fewest", "on 8"), rows)


@dataclasses.dataclass(frozen=True)
class Bar:
    text: str
    needed: float
    value: Callable[[Link | None, bool], float]  # by the link (None: free) and whether exchanges go in a ring
    larger: bool = True


FREE = Link(0.0, float("inf"))


def bars_of(points: Points) -> list[Bar]:
    gpu, one = device(points, "h200"), points("h200/several_gpus")["step 64x2048"]["one"]
    long = points("h200/several_gpus")["context 1x1048576"]["one"]
    large = SHAPES["Llama 3 70B"]

    def speedup(n: int) -> Callable[[Link | None, bool], float]:
        return lambda over, ring: one / tensor_parallel(LLAMA, gpu, over or FREE, 64, 2048 + GROWTH, n, ring=ring).us

    def over_bytes(over: Link | None, ring: bool) -> float:
        found = tensor_parallel(large, gpu, over or FREE, 64, 2048, 8, ring=ring)
        return found.us / (found.weights + found.cache)

    def context(over: Link | None, ring: bool) -> float:
        if over is None:
            return long / (gpu.attention + (long - gpu.attention) / 8)
        return long / scaling.context_parallel(gpu, long, 8, ring=ring)

    return [
        Bar("8B, 64 x 2048, 4 GPUs, times one", 2.8, speedup(4)),
        Bar("8B, 64 x 2048, 8 GPUs, times one", 4.5, speedup(8)),
        Bar("70B, 64 x 2048, 8 GPUs, over its bytes", 1.35, over_bytes, larger=False),
        Bar("context parallel, 1 x 1048576, 8 GPUs, times one", 7.2, context),
    ]


def bars(points: Points) -> str:
    rows = []
    for bar in bars_of(points):
        best, ring, free = bar.value(link(), False), bar.value(link(), True), bar.value(None, False)
        met = best >= bar.needed if bar.larger else best <= bar.needed
        sign = "at least" if bar.larger else "at most"
        values = (f"{value:.2f}" for value in (best, ring, free))
        rows.append([bar.text, f"{sign} {bar.needed}", *values, "yes" if met else "no"])
    return table(("goal", "needed", "all at once", "in a ring", "exchanges free", "predicted to be met"), rows)


def limits(points: Points) -> str:
    """The most GPUs that are at least half as efficient as the fewest, out of 72."""
    gpu = device(points, "h200")
    rows = [[f"tensor parallel, {load.name}", load.cells()[1], both(load.pays_up_to, "{}")] for load in loads(points)]
    for name, point in points("h200/several_gpus").items():
        if name.startswith("context"):
            call = functools.partial(scaling.context_parallel, gpu, point["one"])
            most = both(functools.partial(most_of_context, call), "{}")
            rows.append(["context parallel, a call", label(f"32/8 {name.split()[1]}"), most])
    return table(("form", "sequences x length", "GPUs"), rows)


def most_of_context(call: Callable[..., float], ring: bool) -> int:
    return pays_up_to(functools.partial(call, ring=ring), (1, 2, 4, 8, 16, 32, 64, 72))
