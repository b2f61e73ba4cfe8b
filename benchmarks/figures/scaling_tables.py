"""Tables of docs/scaling.md: the model of scaling.py next to the measured figures, and its predictions for an H200."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.figures import scaling
from benchmarks.figures.cells import Points, label, table, us
from benchmarks.figures.scaling import MXFP4, SHAPES, Device, Link, Shape, Step, device, link, tensor_parallel

LLAMA, LARGE = SHAPES["Llama 3 8B"], SHAPES["Llama 3 70B"]
GROWTH = 46  # tokens that a timed loop has appended to a sequence, on average: `bytes` of `decode_step.json`
FILES = {
    2: ("h200/several_gpus", "h200/several_gpus_prompts", "h200/several_gpus_steps"),
    4: ("h200/several_gpus_x4", "h200/several_gpus_steps_x4"),
}


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


def measured(points: Points, n: int) -> dict[str, Any]:
    """The points of n GPUs."""
    return {name: point for file in FILES[n] for name, point in points(file).items()}


def parse(size: str) -> tuple[int, int]:
    seqs, length = map(int, size.split("x"))
    return seqs, length


def step(gpu: Device, over: Link, size: str, n: int, shape: Shape = LLAMA) -> Step:
    seqs, length = parse(size)
    return tensor_parallel(shape, gpu, over, seqs, length + GROWTH, n)


def several_gpu_checks(points: Points, *, gpu: Device | None = None) -> Iterator[Check]:
    """The figures of two and four GPUs."""
    gpu, over = gpu or device(points), link(points)
    for n in FILES:
        for name, point in measured(points, n).items():
            part, size = name.split()
            seqs, length = parse(size)
            if part == "attention":
                share = seqs * length * 2 * LLAMA.kv_heads * LLAMA.head_dim * 2 / n
                text, model = "tensor parallel, attention", gpu.attention + share / gpu.read
            elif part == "context":
                text, model = "context parallel, attention", scaling.context_parallel(gpu, over, point["one"], n)
            elif part == "prompts":
                text = "context parallel, 512 tokens of a prompt"
                model = scaling.context_parallel(gpu, over, point["one"], n, q_len=512)
            elif part in ("step", "step70b"):
                name, shape = ("Llama 3 70B", LARGE) if part == "step70b" else ("Llama 3 8B", LLAMA)
                text, model = f"tensor parallel, a step of {name}", step(gpu, over, size, n, shape).us
            elif part == "prefill":
                text, model = "tensor parallel, prompts", tensor_parallel_prompts(points, point["one"], n)
            else:
                raise ValueError(f"the model has no part {part}")
            yield Check(f"{n} x H200", text, size, point["several"], model)


def one_gpu_checks(points: Points) -> Iterator[Check]:
    gpu, over = device(points), link(points)
    for size in ("64x2048", "1x8192"):
        found = points("h200/decode_step")[f"example {size}"]["ms"] * 1e3
        yield Check("H200", "step, in decode_step", size, found, step(gpu, over, size, 1).us)
    for size in ("64x2048", "1x8192"):
        found = measured(points, 2)[f"step {size}"]["one"]
        yield Check("H200", "step, in several_gpus", size, found, step(gpu, over, size, 1).us)
    found = points("h200/engine_steps")["steps"]
    length = int(found["single_64_kv"]) // 64
    yield Check("H200", "engine step", f"64x{length}", found["single_64_ms"] * 1e3, engine_step(points, 64, length))


def engine_step(points: Points, seqs: int, length: int) -> float:
    """A step of an engine on one GPU, with its scheduling."""
    scheduling = points("h200/engine_steps")["steps"]["scheduling_us"]
    return tensor_parallel(LLAMA, device(points), link(points), seqs, length).us + scheduling


def tensor_parallel_prompts(points: Points, one: float, n: int) -> float:
    """8 x 1024 tokens of Llama 3 8B, given their time on one GPU: its part, and two sums of 64 MiB a layer.

    A sum over four GPUs is assumed to last as long as one over two.
    """
    return one / n + 2 * LLAMA.layers * points("h200/sums")["64 MiB"]["xla us"]


def checks(points: Points) -> str:
    """Microseconds."""
    rows = [check.cells() for each in (several_gpu_checks, one_gpu_checks) for check in each(points)]
    return table(("GPUs", "figure", "sequences x length", "measured", "model", "model / measured"), rows)


@dataclasses.dataclass(frozen=True)
class Load:
    """A step of a model on H200s."""

    name: str
    shape: Shape
    chosen: bool  # only the chosen experts are read
    gpu: Device
    over: Link
    seqs: int
    length: int

    @property
    def least(self) -> int:
        return scaling.fits(self.shape, self.seqs, self.length)

    def us(self, n: int) -> float:
        return tensor_parallel(self.shape, self.gpu, self.over, self.seqs, self.length, n, chosen=self.chosen).us

    def cells(self) -> list[str]:
        return [self.name, label(f"32/8 {self.seqs}x{self.length}")]

    def milliseconds(self, n: int) -> str:
        return f"{self.us(n) / 1e3:.1f}" if n >= self.least else ""

    def rate(self, n: int) -> str:
        return f"{self.seqs / self.us(n) / n * 1e6:,.0f}"

    def pays_up_to(self) -> int:
        return pays_up_to(self.us, [n for n in COUNTS if self.least <= n <= self.shape.heads])


COUNTS = (1, 2, 4, 8, 16, 32, 64)


def loads(points: Points) -> Iterator[Load]:
    gpu, over = device(points), link(points)
    models = [(name, shape, False) for name, shape in SHAPES.items()]
    for model in (*models, ("gpt-oss-120B, MXFP4 *", MXFP4, True)):
        for size in ((64, 2048), (1, 8192), (8, 131_072)):
            yield Load(*model, gpu, over, *size)


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
    value: Callable[[Link], float]
    measured: float | None = None
    larger: bool = True


FREE = Link(0.0, 0.0, float("inf"))


def bars_of(points: Points) -> list[Bar]:
    gpu, of_two, of_four = device(points), measured(points, 2), measured(points, 4)
    one, long = of_four["step 64x2048"]["one"], of_two["context 1x1048576"]["one"]

    def speedup(n: int) -> Callable[[Link], float]:
        return lambda over: one / step(gpu, over, "64x2048", n).us

    def over_bytes(over: Link) -> float:
        found = step(gpu, over, "64x2048", 8, LARGE)
        return found.us / (found.weights + found.cache)

    def context(over: Link) -> float:
        return long / scaling.context_parallel(gpu, over, long, 8)

    return [
        Bar("8B, 64 x 2048, 4 GPUs, times one", 2.8, speedup(4), of_four["step 64x2048"]["speedup"]),
        Bar("8B, 64 x 2048, 8 GPUs, times one", 4.5, speedup(8)),
        Bar("70B, 64 x 2048, 8 GPUs, over its bytes", 1.35, over_bytes, larger=False),
        Bar("context parallel, 1 x 1048576, 8 GPUs, times one", 7.2, context),
    ]


def bars(points: Points) -> str:
    rows, links = [], (link(points), FREE)
    for bar in bars_of(points):
        sign = "at least" if bar.larger else "at most"
        values = (f"{bar.value(over):.2f}" for over in links)
        rows.append([bar.text, f"{sign} {bar.needed}", *values, f"{bar.measured:.2f}" if bar.measured else ""])
    return table(("goal", "needed", "predicted", "with free exchanges", "measured"), rows)


def limits(points: Points) -> str:
    """The most GPUs that are at least half as efficient as the fewest, out of 72."""
    gpu, over = device(points), link(points)
    rows = [[f"tensor parallel, {load.name}", load.cells()[1], str(load.pays_up_to())] for load in loads(points)]
    for name, point in measured(points, 2).items():
        if name.startswith("context"):
            call = functools.partial(scaling.context_parallel, gpu, over, point["one"])
            most = pays_up_to(call, (*COUNTS, 72))
            rows.append(["context parallel, a call", label(f"32/8 {name.split()[1]}"), str(most)])
    return table(("form", "sequences x length", "GPUs"), rows)
