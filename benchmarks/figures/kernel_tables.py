"""Tables of docs/ about the kernels, from the files of benchmarks/results."""

import re
import statistics
from typing import Any

from benchmarks.figures.cells import Points, label, table, us
from benchmarks.kernels.experts import LAYERS, name_of
from lib.experts import tiles_of

SHAPES = (  # rows of the peers' table
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
FORMS = (
    *("32/8 8x1024 q_len=all", "32/8 1x8192 q_len=all", "32/8 8x2304 q_len=256"),
    *("32/8 8x1024 q_len=all head_dim=64", "32/32 8x1024 q_len=all"),
    "32/8 8x2304 q_len=256 cache=float8_e4m3fn scale=head",
    *("32/8 60x4096", "32/8 4x4608 q_len=512", "32/8 60x4096 + 4x4608 q_len=512"),
)
VARIANTS = (
    *("32/8 64x2048 head_dim=64", "32/8 64x2048 head_dim=256", "32/8 64x8192 window=1024"),
    *("8/1 1x8192", "8/1 64x8192", "32/8 64x2048 q_len=8", "32/8 64x2048 q_len=8 tree=1"),
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
}
PORTABLE = (
    *("64x8192", "64x2048", "8x8192", "1x8192", "64x2048 head_dim=64", "64x2048 q_len=16"),
    *("64x8192 cache=float8_e4m3fn scale=head", "64x8192 cache=int8 scale=head"),
)
KERNEL_STEPS = "1 gather", "2 scan", "3 a tile at a time", "4 tiles under way", "5 masks at the end"
QUANTISED = "32/8 64x8192", "32/8 8x4096"
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
    for gpu in ("H100", "H200"):
        found = [points(f"{gpu.lower()}/decode")[name] for name in names]
        ratios = [p["us"] / p["peers"]["fa3"]["us"] for p in found]
        over_floor = statistics.geometric_mean(p["over_floor"] for p in found)
        of_fa3 = f"{statistics.geometric_mean(ratios):.2f}, at most {max(ratios):.2f}"
        rows.append([gpu, f"{over_floor:.3f}", of_fa3])
    return table(("GPU", "time / floor", "time / FA3's"), rows)


def over_floor(head: str, calls: dict[str, Any]) -> str:
    rows = ([text, us(p["us"]), us(p["floor"]), f"{p['us'] / p['floor']:.2f}"] for text, p in calls.items())
    return table((head, "us", "floor", "us / floor"), rows)


def variants(points: Points) -> str:
    found = points("decisions/one_kernel_h200")
    return over_floor("sequences x length", {label(name): found[f"run 3 | {name} mosaic_gpu"] for name in VARIANTS})


def plans(points: Points) -> str:
    found = points("h100/plans")
    return over_floor("sequences", {text: found[f"32/8 {name} mosaic_gpu"] for name, text in PLANS.items()})


def outliers(points: Points) -> str:
    """Rows by how much longer the one sequence is than the others."""
    found: dict[int, list[Any]] = {}
    for name, point in points("h100/outliers").items():
        _, length, longest = map(int, re.findall(r"\d+", name))
        found.setdefault(longest // length, []).append(point)
    rows = []
    for factor, group in sorted(found.items()):
        row = [str(factor), str(len(group))]
        ratios = [point["default"] / point["floor"] for point in group]
        row.append(f"{statistics.geometric_mean(ratios):.2f}, at most {max(ratios):.2f}")
        rows.append(row)
    return table(("times as long", "batches", "time / floor"), rows)


def shared(points: Points) -> str:
    found, rows = points("h100/shared"), []
    for name, text in SHARED.items():
        together, alone = (found[f"32/8 {name}{flag}"]["us"] for flag in ("", " alone=1"))
        rows.append([text, us(alone), us(together), f"{together / alone:.2f}"])
    return table(("sequences x (shared + own)", "each by itself", "read once", "ratio"), rows)


def portable(points: Points) -> str:
    found, rows = points("h100/portable"), []
    for name in PORTABLE:
        ways = [found[f"32/8 {name} {way}"] for way in ("tma", "cp_async", "xla")]
        rows.append([label(f"32/8 {name}"), *(us(way["us"]) for way in ways), us(ways[0]["floor"])])
    head = "sequences x length", "TMA", "cp.async", "XLA", "floor"
    return table(head, rows)


def kernel_steps(points: Points) -> str:
    steps, kernels = points("h100/kernel_steps"), points("h100/portable")
    found = {text: steps[f"32/8 64x2048, {text}"] for text in KERNEL_STEPS}
    return over_floor("step", found | {"8 the decode kernel": kernels["32/8 64x2048 tma"]})


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
    exact, found, rows = points("h200/decode"), points("decisions/one_kernel_h200"), []
    for name in QUANTISED:
        times = [found[f"run 2 | {name}{cache} tma"]["us"] for cache in CACHES]
        rows.append([label(name), us(exact[name]["us"]) if name in exact else "", *map(us, times)])
    columns = (cache.replace(" cache=", "").replace(" scale=", ", ") for cache in CACHES)
    return table(("sequences x length", "bfloat16", *columns), rows)


def prefill_8bit(points: Points) -> str:
    found, rows = points("h100/prefill"), []
    for name in ("32/8 8x2304 q_len=256", "32/8 1x8192 q_len=all"):
        times = [found[f"{name}{cache} mosaic_gpu"]["us"] for cache in ("", *CACHES[:2])]
        rows.append([label(name), *map(us, times)])
    columns = (cache.replace(" cache=", "").replace(" scale=", ", ") for cache in CACHES[:2])
    return table(("sequences x length", "bfloat16", *columns), rows)


def experts(points: Points) -> str:
    """Microseconds of a mixture of experts: all experts, and grouped with the tiles that the examples choose."""
    found, rows = points("h200/experts"), []
    for model, layer in LAYERS.items():
        for tokens in (256, 512, 1024, 2048, 4096):
            tiles = tiles_of(tokens * layer.experts_per_token, layer.num_experts, layer.hidden, layer.features)
            all_experts, grouped = (
                found.get(f"{model}, {tokens} tokens, {way}") for way in ("all experts", name_of(tiles))
            )
            if all_experts and grouped:
                times = us(all_experts["product"]), us(grouped["product"]), f"{grouped['over_floor']:.2f}"
                rows.append([model, f"{tokens:,}", *times])
    return table(("layer of", "tokens", "all experts, us", "grouped, us", "grouped, of the floor"), rows)
