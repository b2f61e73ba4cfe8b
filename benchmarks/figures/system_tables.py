"""Tables of docs/ about caches, the allocator, models and the engine, from the files of benchmarks/results."""

import itertools
from collections.abc import Callable
from typing import Any, Literal

from benchmarks.figures import scaling_tables
from benchmarks.figures.cells import Points, label, table, us
from jaxpaged import cache_capacity

PREFIXES = {
    "apart": "512, nothing in common",
    "completions": "64, 8 completions of each",
    "system prompt": "512, behind 512 equal tokens",
}
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
    "step70b": "tensor parallel, a step of Llama-3-70B",
    "prefill": "tensor parallel, prompts of Llama-3-8B",
    "context": "context parallel, attention",
    "prompts": "context parallel, 512 tokens of a prompt",
}


def beside_vllm(points: Points) -> str:
    """Tokens per second of the engine and of vLLM at its defaults, for the same requests on one machine."""
    rows = [
        [model, f"{count:,}", *(f"{rate:,.0f}" for rate in rates), f"{rates[0] / rates[1]:.2f}"]
        for (model, count), rates in vllm_rates(points).items()
    ]
    return table(("shape of", "requests at once", "jaxpaged", "vLLM 0.25.1", "ratio"), rows)


def orders(points: Points) -> str:
    """Tokens per second of both for requests in the order given, and with the largest `max_tokens` first."""
    rows, counts = [], (2048, 1024, 512)
    models = {"8b": "Llama 3 8B", "06b": "Qwen3 0.6B", "gpt_oss_20b": "gpt-oss-20b"}
    orders = {"engine": "as given", "longest first": "longest first"}
    for (model, name), (order, text), count in itertools.product(models.items(), orders.items(), counts):
        files, point = (points(f"h200/{engine}_{model}") for engine in ("engine", "vllm")), f"{order} {count}"
        if rates := [found[point]["tokens_per_s"] for found in files if point in found]:
            ratio = f"{rates[0] / rates[1]:.2f}"
            rows.append([name, f"{count:,}", text, *(f"{rate:,.0f}" for rate in rates), ratio])
    return table(("shape of", "requests at once", "order", "jaxpaged", "vLLM 0.25.1", "ratio"), rows)


SMALL_MODELS = {"0.6b": "Qwen3 0.6B", "1b": "Llama 3.2 1B", "1.7b": "Qwen3 1.7B", "4b": "Qwen3 4B"}
SMALL_WORK = {
    **{f"engine {count}": f"{count:,} requests, as given" for count in (2048, 1024, 512)},
    **{f"longest first {count}": f"{count:,} requests, longest first" for count in (2048, 1024, 512)},
    "round 1": "rollouts, first round",
    "round 2": "rollouts, second round",
}


def small_models(points: Points) -> str:
    """Tokens per second of both; a row for each work and a pair of columns for each model."""
    files = [points(f"h200/{engine}_small_models") for engine in ("engine", "vllm")]
    rows = []
    for point, text in SMALL_WORK.items():
        row = [text]
        for model in SMALL_MODELS:
            rates = [found[f"{model}, {point}"]["tokens_per_s"] for found in files if f"{model}, {point}" in found]
            row.append(f"{rates[0]:,.0f} / {rates[1]:,.0f} = {rates[0] / rates[1]:.2f}" if rates else "")
        rows.append(row)
    return table(("tokens a second, jaxpaged / vLLM 0.25.1", *SMALL_MODELS.values()), rows)


def small_arrivals(points: Points) -> str:
    """Milliseconds of a request's waits, the median and the 99th percentile, in this engine and in vLLM."""
    files, rows = [points(f"h200/{engine}_small_models") for engine in ("engine", "vllm")], []
    waits = {"to_first_ms": 0, "between_pieces_ms": 1, "to_last_ms": 0}
    for (model, name), rate in itertools.product(SMALL_MODELS.items(), (10, 50)):
        row = [name, str(rate)]
        for (wait, decimals), found in itertools.product(waits.items(), files):
            quantiles = found[f"{model}, {rate} a second"][wait]
            row.append(", ".join(f"{quantiles[p]:,.{decimals}f}" for p in ("p50", "p99")))
        rows.append(row)
    heads = (f"{wait}{engine}" for wait in ("first token", "between pieces", "last token") for engine in ("", ", vLLM"))
    return table(("shape of", "requests a second", *heads), rows)


def changed_logits(points: Points) -> str:
    """Microseconds of a step of 256 sequences, by what changes its logits."""
    found = points("h200/changed_logits_8b")
    plain = found["no changes"]["us"]
    rows = [[name, f"{point['us']:,.0f}", f"{point['us'] / plain:.3f}"] for name, point in found.items()]
    return table(("requests with", "us a step", "of no changes"), rows)


def starts(points: Points) -> str:
    """Seconds of the parts of a first and a second start."""
    names = {"trace": "trace", "lower": "lower", "compile": "compile, or read", "engine": "the engine, in all"}
    found = points("h200/start_1b")
    rows = [
        [text, *(f"{found[start][f'{part}_s']:.1f}" for start in ("first", "second"))] for part, text in names.items()
    ]
    return table(("seconds", "first start", "second start"), rows)


def times_vllm(points: Points) -> str:
    """A sentence with the smallest and the largest ratio of each model."""
    ratios: dict[str, list[float]] = {}
    for (model, _), (ours, theirs) in vllm_rates(points).items():
        ratios.setdefault(model, []).append(ours / theirs)
    (small, most), (large, more) = ((model, f"{min(r):.1f} to {max(r):.1f} times") for model, r in ratios.items())
    return f"The engine generates {most} vLLM's tokens a second with the shape of {small}, and {more} with {large}'s."


def times_vllm_small(points: Points) -> str:
    """A sentence with the smallest and the largest ratio of all small models."""
    ours, theirs = (points(f"h200/{engine}_small_models") for engine in ("engine", "vllm"))

    def span(*works: str) -> str:
        rates = [
            (point["tokens_per_s"], theirs[name]["tokens_per_s"])
            for name, point in ours.items()
            if name.split(", ")[1].startswith(works)
        ]
        ratios = [one / other for one, other in rates]
        return f"{min(ratios):.1f} to {max(ratios):.1f}"

    return (
        "On H200s, with shapes of 0.6 to 4 billion parameters, the ratio is "
        f"{span('engine', 'longest')}, and {span('round')} for rollouts of reinforcement learning."
    )


def vllm_rates(points: Points) -> dict[tuple[str, int], list[float]]:
    """Tokens per second of the engine and of vLLM, by model and number of requests."""
    return {
        (name, count): [
            points(f"h100/{engine}_{model}")[f"engine {count}"]["tokens_per_s"] for engine in ("engine", "vllm")
        ]
        for model, name in {"1b": "Llama 3.2 1B", "8b": "Llama 3 8B"}.items()
        for count in (2048, 1024, 512)
    }


def arrivals(points: Points) -> str:
    """The median and the 99th percentile of a request's wait for tokens."""
    engines, rows = (points("h200/engine_online"), points("h200/vllm")), []
    for rate in (5, 10):  # the engine's run was cut off before 20
        row = [str(rate)]
        for wait, decimals in {"to_first_ms": 0, "between_tokens_ms": 1}.items():
            waits = (engine[f"{rate} a second"][wait] for engine in engines)
            row += [f"{quantiles['p50']:.{decimals}f}, {quantiles['p99']:.{decimals}f}" for quantiles in waits]
        rows.append(row)
    return table(("requests a second", "first token, engine", "vLLM", "between tokens, engine", "vLLM"), rows)


def host_memory(points: Points) -> str:
    columns = []
    for gpu in ("h100", "h200"):
        found = points(f"{gpu}/host_tier")
        ways = ("host_ms", "with", "conversations"), ("computed_ms", "without", "conversations without host memory")
        for first, among, talks in ways:
            result = found[talks]
            columns.append(
                {
                    "a lost prompt: its first token, ms": f"{found['evicted'][first]:.0f}",
                    "conversations: found, of what an endless pool finds": f"{result['found_of_endless']:.1%}",
                    "conversations: new tokens a second": f"{result['new_tokens_per_s']:,.0f}",
                    "nothing in common: new tokens a second": f"{found['nothing to find'][among]:,.0f}",
                }
            )
    heads = "", "H100, with host memory", "without", "H200, with host memory", "without"
    return table(heads, [[name, *(column[name] for column in columns)] for name in columns[0]])


def engine_loops(points: Points) -> str:
    found, rows = points("h100/engine_loops"), []
    for name, text in {"135m": "135 million", "1b": "1 billion"}.items():
        ways = [found[f"{name} {way}"]["tokens_per_s"] for way in ("engine", "host loop async", "host loop sync")]
        rows.append([text, *(f"{way:,.0f}" for way in ways), f"{ways[0] / ways[1]:.2f}"])
    head = "parameters", "engine", "host loop, a step ahead", "host loop, each step read", "times the faster loop"
    return table(head, rows)


def engine_prefixes(points: Points) -> str:
    found, rows = points("h100/engine_prefixes"), []
    for name, text in PREFIXES.items():
        off, on = (found[f"{name}, {cache}"] for cache in ("off", "on"))
        rows.append([text, f"{off['tokens_per_s']:,.0f}", f"{on['tokens_per_s']:,.0f}", f"{on['num_found']:,}"])
    return table(("prompts", "without", "with", "tokens found"), rows)


def decode_step(points: Points) -> str:
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
    return table(("on", "model", "sequences x length", "ms a step", "floor", "ms / floor"), texts)


def cache_operations(points: Points) -> str:
    found, rows = points("h100/cache_ops"), []
    for name, text in CACHE_OPERATIONS.items():
        p = found[name]
        of = f"{p['of_copy']:.0%}"
        rows.append([text, p["size"], f"{p['microseconds']:.{1 if p['microseconds'] < 100 else 0}f}", of])
    return table(("operation", "size", "us", "of a plain copy"), rows)


def cache_choices(points: Points) -> str:
    """Exact bytes, the time of a call on an H200, and a small model's perplexity, each divided by bfloat16's."""
    name = "32/8 64x8192"
    exact, times, perplexities = points("h200/decode"), points("decisions/one_kernel_h200"), points("cpu/perplexity")
    rows = []
    for dtype, scale in CHOICES:
        sizes: Any = dict(num_layers=1, num_kv_heads=8, head_dim=128)
        bytes_per_token = cache_capacity(10**9, [1], dtype=dtype, scale_per=scale, **sizes).bytes_per_token
        p = times.get(f"run 2 | {name} cache={dtype} scale={scale} tma") if scale else exact[name]
        time = f"{p['us'] / exact[name]['us']:.2f}" if p else ""
        perplexity = perplexities[f"{dtype}/{scale}" if scale else dtype]["perplexity"]
        rows.append((dtype, scale or "", bytes_per_token, time, perplexity))
    _, _, most_bytes, _, least_perplexity = rows[0]
    texts = (
        [*names, f"{size / most_bytes:.2f}", time, f"{perplexity / least_perplexity:.3f}"]
        for *names, size, time, perplexity in rows
    )
    return table(("dtype", "scale", "memory", "time", "perplexity"), texts)


def perplexity(points: Points) -> str:
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


def latent_forms(points: Points) -> str:
    found = points("cpu/latent_forms")
    outliers = [key for key in next(iter(found.values())) if key.startswith("outliers")]
    rows = (
        [name, str(p["bytes_per_token"]), *(f"{p[key]['output']:.1%}" for key in outliers), f"{p['mean_nats']:.4f}"]
        for name, p in found.items()
    )
    return table(("stored", "bytes a token", *outliers, "SmolLM2, nats a token"), rows)


def trainer_logprobs(points: Points) -> str:
    found: dict[str, dict[str, Any]] = {}
    for point in points("cpu/trainer_logprobs").values():
        found.setdefault(point["what"], {})[point["dtype"]] = point
    units = {"float32": 1e-6, "bfloat16": 1e-3}
    keys = [(dtype, key) for dtype in units for key in ("mean", "most")]
    rows = [
        [what, *(f"{of[dtype][f'{key}_nats'] / units[dtype]:.1f}" if dtype in of else "" for dtype, key in keys)]
        for what, of in found.items()
    ]
    heads = (f"{dtype}, {key}, {units[dtype]:.0e} nats".replace("e-0", "e-") for dtype, key in keys)
    return table(("compared", *heads), rows)


def text_drafts(points: Points) -> str:
    found, texts = points("cpu/text_drafts"), {"repetition": "that repeat", "demo": "of `make demo`"}
    rows = []
    for name, text in texts.items():
        over = (f"{found[f'{name}, {seats} seats, 8 drafts']['over_none']:.2f}" for seats in (1, 8))
        rows.append([text, *over])
    return table(("texts", "1 seat", "8 seats"), rows)


def drafts(points: Points) -> str:
    """Speedup over an engine without drafts."""
    found, tail = points("h100/engine_drafts"), points("h100/engine_drafts_tail")
    rows = []
    for what in ("8 seats", "64 seats", "256 seats", "512 requests", "1024 requests"):
        is_whole = f"{what}, none" in found
        source = found if is_whole else tail
        ways = (source.get(f"{what}, {way}") for way in ("70% right", "useless", "own tokens"))
        none = source[f"{what}, none"]["tokens_per_s"]
        over = (f"{way['tokens_per_s'] / none:.2f}" if way else "" for way in ways)
        rows.append([what.replace("1024", "1,024"), "32" if is_whole else "8", *over])
    return table(("", "layers", "70% right", "never right", "from the text"), rows)


def groups(points: Points) -> str:
    parts: dict[str, dict[str, str]] = {}
    for name, point in points("cpu/groups").items():
        model, tokens = name.removesuffix(" tokens").split(", ")
        parts.setdefault(model, {})[tokens] = f"{point['part']:.2f}"
    lengths = next(iter(parts.values()))
    heads = ("layers of", *(f"{length} tokens" for length in lengths))
    return table(heads, ([model, *of_model.values()] for model, of_model in parts.items()))


def allocator(points: Points) -> str:
    found = points("h100/allocator")
    rows = (
        [text, us(found[f"{name} | 256 seqs, 65536 blocks, 2048 tokens in 256"]["us"])]
        for name, text in ALLOCATOR_OPERATIONS.items()
    )
    return table(("operation", "us"), rows)


def allocator_in_a_step(points: Points) -> str:
    rows = []
    for shape in ("64x2048", "256x512"):
        p = points("h100/allocator")[f"model {shape}"]
        times = (f"{p['ms'][method]:.2f}" for method in ("jaxpaged", "filled", "host"))
        rows.append([label(f"32/8 {shape}"), *times, f"{p['append_share']:.2%}"])
    heads = ("sequences x length", "with the allocator", "tables filled beforehand", "an allocator on the host")
    return table((*heads, "`append` alone"), rows)


def several_gpus(points: Points) -> str:
    rows = []
    for count in scaling_tables.FILES:
        for name, p in scaling_tables.measured(points, count).items():
            part, shape = name.split()
            share, one = (us(p[key]) if key in p else "" for key in ("share", "one"))
            speedup = f"{p['speedup']:.2f}" if "speedup" in p else ""
            rows.append(
                [f"{count} x H200", SEVERAL_GPUS[part], label(f"32/8 {shape}"), one, share, us(p["several"]), speedup]
            )
    return table(("GPUs", "what", "sequences x length", "one GPU", "its share", "several", "times as fast"), rows)


def sharded_engine(points: Points) -> str:
    """An engine over two and four GPUs next to one on one GPU: seconds, and milliseconds that a step's kernels run."""
    two, four = points("h200/sharded_engine"), points("h200/sharded_engine_x4")
    engines, peer = ((two, "one"), (two, "several"), (four, "several")), points("h200/vllm_8b_x2")

    def row(part: Any, value: Callable[[Any], float]) -> list[str]:
        one, *several = (value(found[f"engine {part}"][name]) for found, name in engines)
        of_two, of_four = ([f"{each:.1f}", f"{one / each:.2f}"] for each in several)
        theirs = peer.get(f"engine {part}")
        return [f"{one:.1f}", *of_two, f"{theirs['seconds']:.1f}" if theirs else "", *of_four]

    rows = [["ready, s", *row("ready", lambda starts: starts[0]["ready"])]]
    rows += [[f"{count:,} requests, s", *row(count, lambda spent: spent / 1e6)] for count in (512, 2048)]
    for profile in ("prompts", "tokens"):
        (kind,) = two[f"engine {profile}"]["one"]["steps"]
        text = f"kernels of a step of {int(kind.split('_')[1]):,} rows, ms"
        rows.append([text, *row(profile, lambda p: p["busy"] / sum(p["steps"].values()))])
    return table(("", "one GPU", "two", "times as fast", "vLLM 0.25.1, two", "four", "times as fast"), rows)


def sums(points: Points) -> str:
    """Microseconds of a sum over two GPUs."""
    ways = {"xla us": "jax 0.12's default", "nccl us": "NCCL in CUDA graphs"}
    rows = []
    for point in points("h200/sums").values():
        if "bytes" in point:
            size = f"{point['bytes'] >> 20} MiB" if point["bytes"] >> 20 else f"{point['bytes'] >> 10} KiB"
            rows.append([size, *(us(point[way]) if way in point else "" for way in ways)])
    return table(("bytes", *ways.values()), rows)


def grammars(points: Points) -> str:
    found = points("cpu/grammars")
    small, large = sorted({int(name.split()[-2]) for name in found})
    rows = []
    for name in (name.removesuffix(f", {large} tokens") for name in found if name.endswith(f" {large} tokens")):
        p, q = found[f"{name}, {small} tokens"], found[f"{name}, {large} tokens"]
        times = (f"{p['seconds']:.2f}", f"{q['seconds']:.2f}")
        sizes = (f"{q['nbytes'] / 1e6:.2f}", f"{q['nbytes'] / q['states'] / 1e3:.1f}")
        rows.append([name, *times, f"{q['states']:,}", str(q["masks"]), *sizes])
    heads = "answers", f"{small:,} tokens, s", f"{large:,} tokens, s", "states", "masks", "MB", "kB a state"
    return table(heads, rows)
