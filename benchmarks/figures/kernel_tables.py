"""Tables of docs/ about the kernels, from the files of benchmarks/results."""

import re
import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.figures.cells import Points, label, table, us
from benchmarks.kernels.prefill import FORMS

SHAPES = (  # of the peers' table
    *("1x512", "1x8192", "1x32768", "1x131072", "8x2048", "8x8192", "32x2048", "64x2048"),
    *("128x1024", "256x1024", "64xragged8192", "64x8192"),
)
DECODE = "1x512", "1x8192", "1x131072", "8x2048", "256x1024", "64xragged8192", "64x8192"
PROMPTS = (
    *(f"32/8 {shape} q_len=all" for shape in ("1x512", "1x2048", "1x8192", "1x32768", "8x1024", "64x128")),
    *("32/8 8x2304 q_len=256", "32/8 1x8448 q_len=256", "32/8 1x34816 q_len=2048", "32/8 64x2064 q_len=16"),
    *("64/8 8x1024 q_len=all", "32/32 8x1024 q_len=all"),
    *(f"32/8 {shape} q_len=all head_dim={n}" for n in (64, 256) for shape in ("8x1024", "1x8192")),
)
PACKED = {
    "32/8 60x4096": "60 single tokens after 4095",
    "32/8 4x4608 q_len=512": "4 chunks of 512 after 4096",
    "32/8 60x4096 + 4x4608 q_len=512": "both in one call",
    "32/8 64xragged1024 q_len=all": "64 prompts of 1..1024, uniform",
}
VARIANTS = (  # GPU, file, shape, what the file calls it
    ("H100", "h100/variants", "32/8 8x2048 block_size=64", "{}"),
    *(("H100", "h100/variants", f"32/8 64x8192 {option}", "{}") for option in ("head_dim=64", "head_dim=256")),
    *(("H100", "h100/variants", f"32/8 64x8192 {option}", "{}") for option in ("window=1024", "q_len=4")),
    *(("H200", "decisions/rows_h200", f"32/8 {seqs}x8192 q_len=16", "run 5 | {} | default") for seqs in (1, 64)),
)
PLANS = {
    "8xoutlier131072": "8, one of 131072, the others of 1024",
    "64xoutlier32768": "64, one of 32768, the others of 1024",
    "64xzipf8192": "64, of 8192, 8192 / 2, 8192 / 3, ...",
    "64x128 room=8192": "64 x 128 in tables for 8192",
    "64xragged512 room=2048": "64 of 1 to 512 in tables for 2048",
}
SHARED = {
    "64x8448 shared=8192": "64 x (8192 + 256)",
    "64x2304 shared=2048": "64 x (2048 + 256)",
    "64x768 shared=512": "64 x (512 + 256)",
    "8x8448 shared=8192": "8 x (8192 + 256)",
    "8x2304 shared=2048": "8 x (2048 + 256)",
    "256x2304 shared=2048 groups=32": "32 x 8 x (2048 + 256)",
    "256x768 shared=512 groups=32": "32 x 8 x (512 + 256)",
}
PORTABLE = (
    *("64x8192", "64x2048", "8x8192", "1x8192", "64x2048 head_dim=64", "64x2048 q_len=16"),
    *("64x8192 cache=float8_e4m3fn scale=head", "64x8192 cache=int8 scale=head"),
)
KERNEL_STEPS = "1 gather", "2 scan", "3 a tile at a time", "4 tiles under way", "5 masks at the end"
KERNELS = {"tma": "8 the decode kernel", "mosaic_gpu": "the former Hopper kernel"}
QUANTISED = ("H100", "32/8 64x8192"), ("H100", "32/8 8x4096"), ("H200", "32/8 64x8192")
CACHES = tuple(
    f" cache={dtype} scale={scale}" for dtype in ("float8_e4m3fn", "int8") for scale in ("head", "token_head")
)


def summary(points: Points) -> str:
    """The geometric mean of our times over FlashAttention-3's, with its best number of splits."""
    rows = []

    def add(kernel: str, gpu: str, keys: str, ratios: list[float]) -> None:
        rows.append([f"{kernel}, {len(ratios)} shapes", gpu, keys, f"{statistics.geometric_mean(ratios):.2f}"])

    for gpu in ("h100", "h200"):
        ratios = [p["us"] / p["peers"]["fa3"]["us"] for p in points(f"{gpu}/decode").values()]
        add("decode", gpu.upper(), "on the same paged cache", ratios)
    prompts = points("h100/prefill")
    for peer, keys in {"fa3 paged": "on the same paged cache", "fa3": "on contiguous keys"}.items():
        pairs = [(p, prompts.get(name.replace("mosaic_gpu", peer))) for name, p in prompts.items() if "mosaic" in name]
        add("prompts", "H100", keys, [ours["us"] / theirs["us"] for ours, theirs in pairs if theirs])
    return table(("kernel", "GPU", "FlashAttention-3", "time / FlashAttention-3's"), rows)


def decode(points: Points) -> str:
    gpus = [points("h100/decode"), points("h200/decode")]
    heads = ["sequences x length", *("H100", "floor", "ratio", "FA3"), *("H200", "floor", "ratio", "FA3")]
    rows = []
    for name in (f"32/8 {shape}" for shape in DECODE):
        row = [label(name)]
        for p in (gpu[name] for gpu in gpus):
            row += [us(p["us"]), us(p["floor"]), f"{p['over_floor']:.2f}", us(p["peers"]["fa3"]["us"])]
        rows.append(row)
    return table(heads, rows)


def peers(points: Points) -> str:
    rows = []
    names = [f"{heads} {shape}" for heads in ("32/8", "64/8", "32/32") for shape in SHAPES]
    for gpu, file in (("H100", "h100/decode"), ("H200", "h200/decode"), ("H100, former kernel", "h100/decode_peers")):
        found = [points(file)[name] for name in names]
        row = [gpu, f"{statistics.geometric_mean(p['over_floor'] for p in found):.3f}"]
        for peer in ("fa3", "flashinfer", "xqa"):
            ratios = [p["us"] / p["peers"][peer]["us"] for p in found if peer in p["peers"]]
            row.append(f"{statistics.geometric_mean(ratios):.2f}, at most {max(ratios):.2f}" if ratios else "")
        rows.append(row)
    return table(("GPU", "time / floor", "time / FA3's", "time / FlashInfer's", "time / XQA's"), rows)


def variants(points: Points) -> str:
    rows = []
    for gpu, file, name, key in VARIANTS:
        p = points(file)[key.format(name)]
        rows.append([gpu, label(name), us(p["us"]), us(p["floor"]), f"{p['us'] / p['floor']:.2f}"])
    return table(("GPU", "sequences x length", "us", "floor", "us / floor"), rows)


def beside_even(calls: Iterable[tuple[str, float, float, float]]) -> str:
    """Calls, each with its times in equal partitions and by default, and its floor."""
    rows = [[text, us(even), us(default), us(floor), f"{default / floor:.2f}"] for text, even, default, floor in calls]
    return table(("sequences", "equal partitions", "by default", "floor", "time / floor"), rows)


def plans(points: Points) -> str:
    found, calls = points("h100/plans"), []
    for name, text in PLANS.items():
        default, even = (found[f"32/8 {name} {way}"] for way in ("mosaic_gpu", "hopper"))
        calls.append((text, even["us"], default["us"], default["floor"]))
    return beside_even(calls)


def uneven(points: Points) -> str:
    found, calls = points("decisions/plan_kernels_h100"), []
    of_kind = {
        "float8_e4m3fn": ("cache=float8_e4m3fn scale=head", "a plan for 2 a SM, tile 64, 2 a SM"),
        "16 query tokens": ("q_len=16", "a plan for 1 a SM"),
    }
    for kind, (options, default) in of_kind.items():
        for batch in ("8 x 1024, one of 131072", "24 x 1024, one of 32768", "8 x 8192"):
            point = found[f"run 3 | 32/8 {batch} {options}"]
            calls.append((f"{batch}, {kind}", point["even"], point[default], point["floor"]))
    return beside_even(calls)


def outliers(points: Points) -> str:
    """By how much longer the one sequence is than the others."""
    found: dict[int, list[Any]] = {}
    for name, point in points("h100/outliers").items():
        _, length, longest = map(int, re.findall(r"\d+", name))
        found.setdefault(longest // length, []).append(point)
    rows = []
    for factor, its in sorted(found.items()):
        row = [str(factor), str(len(its))]
        for way in ("even", "default"):
            ratios = [point[way] / point["floor"] for point in its]
            row.append(f"{statistics.geometric_mean(ratios):.2f}, at most {max(ratios):.2f}")
        rows.append(row)
    return table(("times as long", "batches", "equal partitions", "by default"), rows)


def shared(points: Points) -> str:
    found, rows = points("h100/shared"), []
    for name, text in SHARED.items():
        together, alone = (found[f"32/8 {name}{flag}"]["us"] for flag in ("", " alone=1"))
        rows.append([text, us(alone), us(together), f"{together / alone:.2f}"])
    return table(("sequences x (shared + own)", "each by itself", "read once", "ratio"), rows)


def portable(points: Points) -> str:
    found, rows = points("h100/portable"), []
    for name in PORTABLE:
        ways = [found[f"32/8 {name} {way}"] for way in ("mosaic_gpu", "tma", "cp_async", "xla")]
        rows.append([label(f"32/8 {name}"), *(us(way["us"]) for way in ways), us(ways[0]["floor"])])
    head = "sequences x length", "former Hopper kernel", "TMA", "cp.async", "XLA", "floor"
    return table(head, rows)


def kernel_steps(points: Points) -> str:
    steps, kernels = points("h100/kernel_steps"), points("h100/portable")
    found = {text: steps[f"32/8 64x2048, {text}"] for text in KERNEL_STEPS}
    found |= {text: kernels[f"32/8 64x2048 {way}"] for way, text in KERNELS.items()}
    rows = ([text, us(p["us"]), us(p["floor"]), f"{p['us'] / p['floor']:.2f}"] for text, p in found.items())
    return table(("step", "us", "floor", "us / floor"), rows)


def prefill(points: Points) -> str:
    found, rows = points("h100/prefill"), []
    for name in PROMPTS:
        ours = found[f"{name} mosaic_gpu"]
        row = [label(name.replace(" q_len=all", "")), us(ours["us"]), f"{ours['teraflops_per_second']:.0f}"]
        peers = (found.get(f"{name} {method}") for method in ("fa3 paged", "fa3", "cudnn"))
        rows.append(row + [us(p["us"]) if p else "" for p in peers])
    head = "sequences x length", "jaxpaged, us", "TFLOP/s", "FA3, same cache", "FA3, contiguous", "cuDNN, contiguous"
    return table(head, rows)


def packed(points: Points) -> str:
    found, rows = points("h100/prefill"), []
    for name, text in PACKED.items():
        p = found[f"{name} mosaic_gpu"]
        rows.append([text, us(p["us"]), f"{p['teraflops_per_second']:.0f}"])
    return table(("batch", "us", "TFLOP/s"), rows)


def portable_prefill(points: Points) -> str:
    found, rows = points("h100/portable_prefill"), []
    for name in FORMS:
        p, hopper = found[f"{name} portable"], found.get(f"{name} mosaic_gpu")
        text = PACKED.get(name) or label(name.replace(" q_len=all", ""))
        row = [text, us(p["us"]), f"{p['teraflops_per_second']:.0f}", us(p["kernels"])]
        rows.append([*row, us(hopper["kernels"]) if hopper else ""])
    return table(("sequences x length", "us", "TFLOP/s", "its kernels, us", "kernels of Hopper's form, us"), rows)


def quantised(points: Points) -> str:
    rows = []
    for gpu, name in QUANTISED:
        found = points(f"{gpu.lower()}/quantised")
        times = [found.get(f"{name}{cache}", {}).get("us") for cache in ("", *CACHES)]
        rows.append([gpu, label(name), *(us(time) if time else "" for time in times)])
    columns = (cache.replace(" cache=", "").replace(" scale=", ", ") for cache in CACHES)
    return table(("GPU", "sequences x length", "bfloat16", *columns), rows)


def prefill_8bit(points: Points) -> str:
    found, rows = points("h100/prefill"), []
    for name in ("32/8 8x2304 q_len=256", "32/8 1x8192 q_len=all"):
        times = [found[f"{name}{cache} mosaic_gpu"]["us"] for cache in ("", *CACHES[:2])]
        rows.append([label(name), *map(us, times)])
    columns = (cache.replace(" cache=", "").replace(" scale=", ", ") for cache in CACHES[:2])
    return table(("sequences x length", "bfloat16", *columns), rows)
