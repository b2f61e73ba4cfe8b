"""Writes the tables of docs/ from the files of benchmarks/results: `python -m benchmarks.figures.tables`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a key of `TABLES`. All other text stays.
"""

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterable
from typing import Any, Literal

from benchmarks.harness import RESULTS, ROOT
from jaxpaged import cache_capacity

NAMES = "performance", "allocator", "cache", "engine", "several_gpus", "kernel"
PAGES = [ROOT / "docs" / f"{name}.md" for name in NAMES]
LENGTHS = {  # by the word in place of a length, of sequences and tokens
    "": "{} x {}",
    "ragged": "{} x 1..{}, uniform",
    "outlier": "{}, one of {}, the others of 1024",
    "zipf": "{} x {} / 1, / 2, / 3, ...",
}
OPTIONS = {
    "contiguous": "blocks in order",
    "block_size": "blocks of {}",
    "head_dim": "head_dim {}",
    "window": "window of {}",
    "q_len": "{} query tokens",
    "cache": "{}",
    "scale": "a scale a {}",
}
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
PREFIXES = {
    "apart": "512, nothing in common",
    "completions": "64, 8 completions of each",
    "system prompt": "512, behind 512 equal tokens",
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
KERNELS = {"tma": "7 portable kernel", "mosaic_gpu": "8 Hopper kernel"}
QUANTISED = ("H100", "32/8 64x8192"), ("H100", "32/8 8x4096"), ("H200", "32/8 64x8192")
CACHES = tuple(
    f" cache={dtype} scale={scale}" for dtype in ("float8_e4m3fn", "int8") for scale in ("head", "token_head")
)
CHOICES: tuple[tuple[str, Literal["token_head", "head"] | None], ...] = (
    ("bfloat16", None),
    ("int8", "token_head"),
    ("int8", "head"),
    ("float8_e4m3fn", "token_head"),
    ("float8_e4m3fn", "head"),
    ("float8_e5m2", "head"),
)
CACHE_OPERATIONS = {
    "write_kv | 8192 tokens": "`write_kv`, bfloat16",
    "write_kv float8_e4m3fn, head | 8192 tokens": "`write_kv`, float8_e4m3fn, `head`",
    "write_kv float8_e4m3fn, token_head | 8192 tokens": "`write_kv`, float8_e4m3fn, `token_head`",
    "copy_blocks, a stack of 32 | 512 blocks": "`copy_blocks`, a stack",
    "by XLA, a stack of 32 | 512 blocks": "the same by XLA",
    "gather_kv | 64 x 1024 tokens": "`gather_kv`",
    "swap_out | 256 blocks": "`blocks_to_host`",
    "swap_in | 256 blocks": "`blocks_from_host`",
}
ALLOCATOR_OPERATIONS = {
    "append": "`append`, with its slots",
    "append, free": "`append`, and `free` of one sequence in 64",
    "free": "`free` of one sequence",
    "fork, replace": "`fork` with `replace`, beams of 4",
    "rollback": "`rollback` by a token",
    "match_prefix, free": "`match_prefix` of 256 tokens, and `free` of all",
}
SEVERAL_GPUS = {
    "attention": "tensor parallel, attention",
    "step": "tensor parallel, a step of Llama-3-8B",
    "prefill": "tensor parallel, prompts of Llama-3-8B",
    "context": "context parallel, attention",
}


def points(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())["points"]


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(heads), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def label(name: str) -> str:
    """What the page calls a point of benchmarks/kernels/points.py; 32/8 heads are not named."""
    heads, shape, *options = name.split()
    seqs, kind, length = re.fullmatch(r"(\d+)x([a-z]*)(\d+)", shape).groups()  # type: ignore[union-attr]
    text = LENGTHS[kind].format(seqs, length)
    for key, value in (option.split("=") for option in options):
        text += ", " + OPTIONS[key].format(value)
    return text if heads == "32/8" else f"{text}, {heads} heads"


def us(value: float) -> str:
    return f"{value:.1f}"


def decode() -> str:
    gpus = [points("h100/decode"), points("h200/decode")]
    heads = ["sequences x length", *("H100", "floor", "over it", "FA3"), *("H200", "floor", "over it", "FA3")]
    rows = []
    for name in (f"32/8 {shape}" for shape in DECODE):
        row = [label(name)]
        for p in (gpu[name] for gpu in gpus):
            row += [us(p["us"]), us(p["floor"]), f"{p['over_floor']:.2f}", us(p["peers"]["fa3"]["us"])]
        rows.append(row)
    return table(heads, rows)


def peers() -> str:
    rows = []
    names = [f"{heads} {shape}" for heads in ("32/8", "64/8", "32/32") for shape in SHAPES]
    for gpu, file in (("H100", "h100/decode_peers"), ("H200", "h200/decode")):
        found = [points(file)[name] for name in names]
        row = [gpu, f"`{file}.json`", f"{statistics.geometric_mean(p['over_floor'] for p in found):.3f}"]
        for peer in ("fa3", "flashinfer", "xqa"):
            ratios = [p["us"] / p["peers"][peer]["us"] for p in found if peer in p["peers"]]
            row.append(f"{statistics.geometric_mean(ratios):.2f}, at most {max(ratios):.2f}" if ratios else "")
        rows.append(row)
    return table(("GPU", "file", "over the floor", "over FA3", "over FlashInfer", "over XQA"), rows)


def variants() -> str:
    rows = []
    for gpu, file, name, key in VARIANTS:
        p = points(file)[key.format(name)]
        rows.append([gpu, label(name), us(p["us"]), us(p["floor"]), f"{p['us'] / p['floor']:.2f}"])
    return table(("GPU", "sequences x length", "us", "floor", "over it"), rows)


def beside_even(calls: Iterable[tuple[str, float, float, float]]) -> str:
    """Calls with their times with as many partitions each, and by default, and their floors."""
    rows = [[text, us(even), us(default), us(floor), f"{default / floor:.2f}"] for text, even, default, floor in calls]
    return table(("sequences", "as many partitions each", "by default", "floor", "over it"), rows)


def plans() -> str:
    found, calls = points("h100/plans"), []
    for name, text in PLANS.items():
        default, even = (found[f"32/8 {name} {way}"] for way in ("mosaic_gpu", "hopper"))
        calls.append((text, even["us"], default["us"], default["floor"]))
    return beside_even(calls)


def uneven() -> str:
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


def outliers() -> str:
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
    return table(("times as long", "batches", "as many partitions each", "by default"), rows)


def prefill() -> str:
    found, rows = points("h100/prefill"), []
    for name in PROMPTS:
        ours = found[f"{name} mosaic_gpu"]
        row = [label(name.replace(" q_len=all", "")), us(ours["us"]), f"{ours['teraflops_per_second']:.0f}"]
        peers = (found.get(f"{name} {method}") for method in ("fa3 paged", "fa3", "cudnn"))
        rows.append(row + [us(p["us"]) if p else "" for p in peers])
    head = "sequences x length", "jaxpaged, us", "TFLOP/s", "FA3, same cache", "FA3, contiguous", "cuDNN, contiguous"
    return table(head, rows)


def packed() -> str:
    found, rows = points("h100/prefill"), []
    for name, text in PACKED.items():
        p = found[f"{name} mosaic_gpu"]
        rows.append([text, us(p["us"]), f"{p['teraflops_per_second']:.0f}"])
    return table(("batch", "us", "TFLOP/s"), rows)


def engine() -> str:
    rows = []
    for requests in (512, 1024):
        p = points("h100/engine")[f"engine {requests}"]
        shares = (f"{p[share]:.0%}" for share in ("of_steps", "of_floor"))
        rows.append([str(requests), f"{p['tokens']:,}", f"{p['seconds']:.1f}", f"{p['tokens_per_s']:,.0f}", *shares])
    head = "requests", "new tokens", "seconds", "tokens a second", "of its steps", "of the floor"
    return table(head, rows)


def shared() -> str:
    found, rows = points("h100/shared"), []
    for name, text in SHARED.items():
        together, alone = (found[f"32/8 {name}{flag}"]["us"] for flag in ("", " alone=1"))
        rows.append([text, us(alone), us(together), f"{together / alone:.2f}"])
    return table(("sequences x (shared + own)", "each by itself", "`shared_prefix`", "over it"), rows)


def portable() -> str:
    found, rows = points("h100/portable"), []
    for name in PORTABLE:
        ways = [found[f"32/8 {name} {way}"] for way in ("mosaic_gpu", "tma", "cp_async", "xla")]
        rows.append([label(f"32/8 {name}"), *(us(way["us"]) for way in ways), us(ways[0]["floor"])])
    head = "sequences x length", "Hopper kernel", "portable, TMA", "portable, cp.async", "XLA", "floor"
    return table(head, rows)


def kernel_steps() -> str:
    steps, kernels = points("h100/kernel_steps"), points("h100/portable")
    found = {text: steps[f"32/8 64x2048, {text}"] for text in KERNEL_STEPS}
    found |= {text: kernels[f"32/8 64x2048 {way}"] for way, text in KERNELS.items()}
    rows = ([text, us(p["us"]), us(p["floor"]), f"{p['us'] / p['floor']:.2f}"] for text, p in found.items())
    return table(("step", "us", "floor", "over it"), rows)


def engine_loops() -> str:
    found, rows = points("h100/engine_loops"), []
    for name, text in {"135m": "135 million", "1b": "1 billion"}.items():
        ways = [found[f"{name} {way}"]["tokens_per_s"] for way in ("engine", "host loop async", "host loop sync")]
        rows.append([text, *(f"{way:,.0f}" for way in ways), f"{ways[0] / ways[1]:.2f}"])
    head = "parameters", "engine", "host loop, a step ahead", "host loop, each step read", "times the faster loop"
    return table(head, rows)


def engine_prefixes() -> str:
    found, rows = points("h100/engine_prefixes"), []
    for name, text in PREFIXES.items():
        off, on = (found[f"{name}, {cache}"] for cache in ("off", "on"))
        rows.append([text, f"{off['tokens_per_s']:,.0f}", f"{on['tokens_per_s']:,.0f}", f"{on['num_found']:,}"])
    return table(("prompts", "without", "with", "tokens found"), rows)


def quantised() -> str:
    rows = []
    for gpu, name in QUANTISED:
        found = points(f"{gpu.lower()}/quantised")
        times = [found.get(f"{name}{cache}", {}).get("us") for cache in ("", *CACHES)]
        rows.append([gpu, label(name), *(us(time) if time else "" for time in times)])
    columns = (cache.replace(" cache=", "").replace(" scale=", ", ") for cache in CACHES)
    return table(("GPU", "sequences x length", "bfloat16", *columns), rows)


def narrow_prefill() -> str:
    found, rows = points("h100/prefill"), []
    for name in ("32/8 8x2304 q_len=256", "32/8 1x8192 q_len=all"):
        times = [found[f"{name}{cache} mosaic_gpu"]["us"] for cache in ("", *CACHES[:2])]
        rows.append([label(name), *map(us, times)])
    columns = (cache.replace(" cache=", "").replace(" scale=", ", ") for cache in CACHES[:2])
    return table(("sequences x length", "bfloat16", *columns), rows)


def cache_choices() -> str:
    """By the exact bytes, a call on an H100, and the perplexity of a small model; over those of bfloat16."""
    times, perplexities = points("h100/quantised"), points("cpu/perplexity")
    rows = []
    for dtype, scale in CHOICES:
        sizes = dict(num_layers=1, num_kv_heads=8, head_dim=128)
        bytes_per_token = cache_capacity(10**9, [1], dtype=dtype, scale_per=scale, **sizes).bytes_per_token
        time = times["32/8 64x8192" + (f" cache={dtype} scale={scale}" if scale else "")]["us"]
        perplexity = perplexities[f"{dtype}/{scale}" if scale else dtype]["perplexity"]
        rows.append((dtype, scale or "", bytes_per_token, time, perplexity))
    _, _, most_bytes, most_time, least_perplexity = rows[0]
    texts = (
        [*names, f"{size / most_bytes:.2f}", f"{time / most_time:.2f}", f"{perplexity / least_perplexity:.3f}"]
        for *names, size, time, perplexity in rows
    )
    return table(("dtype", "scale", "memory", "time", "perplexity"), texts)


def decode_step() -> str:
    rows = []
    for gpu in ("h100", "h200"):
        for shape in ("64x2048", "1x8192"):
            p = points(f"{gpu}/decode_step")[f"example {shape}"]
            rows.append([gpu.upper(), "Llama-3-8B", label(f"32/8 {shape}"), p["ms"], p["floor_ms"]])
    for seqs in (1, 16):
        p = points("cpu/generate")[f"batch {seqs}"]
        ms = 1000 / p["steps_per_s"]
        rows.append(["2 cores of a CPU", "SmolLM2-135M", f"{seqs}, 64 new tokens", ms, ms * p["of_floor"]])
    texts = ([*names, f"{ms:.2f}", f"{floor:.2f}", f"{ms / floor:.2f}"] for *names, ms, floor in rows)
    return table(("on", "model", "sequences x length", "ms a step", "floor", "over it"), texts)


def cache_operations() -> str:
    found, rows = points("h100/cache_ops"), []
    for name, text in CACHE_OPERATIONS.items():
        p = found[name]
        of = f"{p['of_link']:.0%} of the link" if "of_link" in p else f"{p['of_copy']:.0%}"
        rows.append([text, p["size"], f"{p['microseconds']:.{1 if p['microseconds'] < 100 else 0}f}", of])
    return table(("operation", "size", "us", "of a plain copy"), rows)


def allocator() -> str:
    found = points("h100/allocator")
    rows = (
        [text, us(found[f"{name} | 256 seqs, 65536 blocks, 2048 tokens in 256"]["us"])]
        for name, text in ALLOCATOR_OPERATIONS.items()
    )
    return table(("operation", "us"), rows)


def allocator_in_a_step() -> str:
    rows = []
    for shape in ("64x2048", "256x512"):
        p = points("h100/allocator")[f"model {shape}"]
        times = (f"{p['ms'][method]:.2f}" for method in ("jaxpaged", "filled", "host"))
        rows.append([label(f"32/8 {shape}"), *times, f"{p['append_share']:.2%}"])
    heads = ("sequences x length", "with the allocator", "tables filled beforehand", "an allocator on the host")
    return table((*heads, "`append` alone"), rows)


def perplexity() -> str:
    found = points("cpu/perplexity")
    exact, half = found["float32"]["perplexity"], found["bfloat16"]["bytes_per_token"]
    rows = (
        [
            p["dtype"],
            p["scale"] or "",
            str(p["bytes_per_token"]),
            f"{1 - p['bytes_per_token'] / half:.0%}" if p["bytes_per_token"] < half else "",
            f"{p['perplexity']:.2f}",
            f"{p['perplexity'] / exact - 1:+.2%}".replace("-0.00%", "+0.00%"),
            f"{p['prompts_with_equal_tokens']} of {p['prompts']}",
            f"{p['share_of_tokens_before_a_difference']:.0%}",
        ]
        for p in found.values()
    )
    heads = ("dtype", "scale", "bytes a token", "less than bfloat16", "perplexity", "change")
    return table((*heads, "prompts equal", "tokens before"), rows)


def several_gpus() -> str:
    rows = []
    for name, p in points("h200/several_gpus").items():
        part, shape = name.split()
        share = us(p["share"]) if "share" in p else ""
        times = us(p["one"]), share, us(p["several"]), f"{p['speedup']:.2f}"
        rows.append([SEVERAL_GPUS[part], label(f"32/8 {shape}"), *times])
    return table(("what", "sequences x length", "one GPU", "its share", "two GPUs", "times as fast"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "decode": decode,
    "peers": peers,
    "variants": variants,
    "plans": plans,
    "uneven": uneven,
    "outliers": outliers,
    "prefill": prefill,
    "packed": packed,
    "engine": engine,
    "engine loops": engine_loops,
    "engine prefixes": engine_prefixes,
    "quantised": quantised,
    "narrow prefill": narrow_prefill,
    "shared": shared,
    "portable": portable,
    "kernel steps": kernel_steps,
    "cache choices": cache_choices,
    "decode step": decode_step,
    "cache operations": cache_operations,
    "allocator": allocator,
    "allocator in a step": allocator_in_a_step,
    "perplexity": perplexity,
    "several gpus": several_gpus,
}


def filled(text: str) -> str:
    """`text` with every table as the result files have it."""
    return re.sub(
        r"(<!-- table: (.*?) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}",
        text,
        flags=re.DOTALL,
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
