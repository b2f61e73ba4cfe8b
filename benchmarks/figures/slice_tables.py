"""Tables of docs/engine_design.md, where the time of the engine's slices goes, from the files of benchmarks/results."""

import re

from benchmarks.engine.model import CONFIGS
from benchmarks.figures.cells import Points, table

KERNELS = {  # kernels of an engine's step, by their names
    "matrix products": "^nvjet|splitK",
    "attention of steps of single tokens": "^paged_(decode|latent)",
    "attention of steps with chunks": "^paged_prefill",
    "gate times up": "^loop_multiply",
    "writes to the cache": "^input_scatter",
}
V2LITE = CONFIGS["v2lite"]
SLICES = {  # by their names in the file
    "1_step_us": "one step, the default for an 8B model",
    "2_steps_us": "two steps",
    "2_steps_at_once_us": "two steps, `step` called at once",
    "3_steps_us": "three steps",
    "unknown_number_us": "two steps, ended by a condition",
}
SHOWN = {"single_64": "64 rows, ms", "single_384": "384 rows, ms"}


def engine_profile(points: Points) -> str:
    """Milliseconds of a run, and of the same steps alone."""
    found = points("h100/engine_profile")
    run, steps = found["run"], found["steps"]

    def split_by_kernel(kernels: dict[str, list[float]], busy: float) -> dict[str, float]:
        parts = {
            name: sum(us for kernel, (us, _) in kernels.items() if re.search(pattern, kernel)) / 1e3
            for name, pattern in KERNELS.items()
        }
        return parts | {"other kernels": busy - sum(parts.values())}

    in_run = split_by_kernel(found["kernels of the run"], run["busy"])
    each = {kind: split_by_kernel(found[f"kernels of {kind}"], found[kind]["busy"]) for kind in steps}
    alone = {name: f"{sum(count * each[kind][name] for kind, count in steps.items()):.0f}" for name in in_run}
    idle = {"conditions of loops": "condition", "gaps between kernels": "gaps", "between slices": "between"}
    in_run |= {name: run[key] for name, key in idle.items()}
    whole = sum(in_run.values())
    rows = [[name, f"{ms:.0f}", f"{ms / whole:.1%}", alone.get(name, "")] for name, ms in in_run.items()]
    return table(("", "ms", "of the time", "the same steps by themselves, ms"), rows)


def slices(points: Points) -> str:
    """Median waits for tokens, by the number of steps in a slice."""
    found, p50 = points("decisions/slices_h100"), "arrivals, 32 layers, 10 a second, p50"
    waits = [found[f"{p50} {wait}"] for wait in ("to the first token", "between tokens")]
    rows = ([text, *(f"{of[key] / 1e3:.1f}" if key in of else "" for of in waits)] for key, text in SLICES.items())
    return table(("slices of", "first token, ms", "between tokens, ms"), rows)


def latent_profile(points: Points) -> str:
    """Times of two steps and of a run's steps, each measured alone, next to the times of their bytes and products."""
    profile, throughput = points("h100/engine_profile_v2lite"), points("h100/engine_v2lite_384")
    counts = throughput["engine 1024"]["steps"]
    times = {kind: _latent_times(profile[kind], profile[f"kernels of {kind}"]) for kind in counts}
    floors = {kind: _latent_floor(kind, profile[kind]["kv"], throughput["steps"]) for kind in counts}
    columns = [{part: us / 1e3 for part, us in of[kind].items()} for kind in SHOWN for of in (times, floors)]
    columns += [
        {part: sum(count * of[kind][part] for kind, count in counts.items()) / 1e6 for part in of["single_64"]}
        for of in (times, floors)
    ]
    rows = [[part, *(f"{of[part]:.2f}" if part in of else "" for of in columns)] for part in times["single_64"]]
    rows.append(["together", *(f"{sum(of.values()):.2f}" for of in columns)])
    heads = (text for name in (*SHOWN.values(), "1,024 requests, s") for text in (name, "floor"))
    return table(("", *heads), rows)


def _latent_times(figures: dict[str, float], kernels: dict[str, list[float]]) -> dict[str, float]:
    """Microseconds of a step. The products of its layers are distinguished by their times."""
    products = sorted(((us, launches) for name, (us, launches) in kernels.items() if "nvjet" in name), reverse=True)
    head = sum(us for us, launches in products if launches < V2LITE.num_layers)
    gate_up, down, *others = (us for us, launches in products if launches >= V2LITE.num_layers)
    if len(others) != 5:
        raise AssertionError(f"a layer has {2 + len(others)} products instead of 7: {products}")
    parts = {
        "gate and up, and the head": gate_up + head,
        "down": down + sum(us for name, (us, _) in kernels.items() if "splitKreduce" in name),
        "the five products of attention": sum(others),
        "attention": kernels["paged_decode_mosaic_gpu_kernel"][0],
    }
    idle = figures["gaps"] + figures["condition"]
    return parts | {"other kernels": 1e3 * figures["busy"] - sum(parts.values()), "conditions and gaps": 1e3 * idle}


def _latent_floor(kind: str, kv_tokens: float, measured: dict[str, float]) -> dict[str, float]:
    """Microseconds that the bytes or the products of a step need, whichever is longer, at the measured rates."""
    c, latent, rows = V2LITE, V2LITE.latent, int(kind.split("_")[1])
    assert latent is not None
    width = latent.kv_lora_rank + latent.qk_rope_head_dim
    projections = c.features * (c.num_heads * (c.head_dim + latent.qk_rope_head_dim) + width)
    head_weights = c.num_heads * latent.kv_lora_rank * (c.head_dim + latent.v_head_dim)
    out = c.num_heads * latent.v_head_dim * c.features

    def product_time(num_weights: int, rows: float) -> float:
        return 2e6 * num_weights * max(1 / measured["read_bytes_per_s"], rows / measured["flops_per_s"])

    mlp, head = c.features * c.hidden_features, c.features * c.vocab_size
    head_time = product_time(head, measured["seats"] if kind.startswith("mixed") else rows)
    return {
        "gate and up, and the head": c.num_layers * product_time(2 * mlp, rows) + head_time,
        "down": c.num_layers * product_time(mlp, rows),
        "the five products of attention": c.num_layers * product_time(projections + head_weights + out, rows),
        "attention": 1e6 * c.num_layers * kv_tokens * 2 * width / measured["read_bytes_per_s"],
    }
