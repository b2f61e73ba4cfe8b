"""The counts of an engine in Prometheus' text format.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from lib.engine_thread import EngineThread


def metrics_text(engine: EngineThread) -> str:
    stats = engine.stats
    families: list[tuple[str, str, str, int]] = [
        ("running_requests", "gauge", "Completions that have a seat.", stats.num_running),
        ("waiting_requests", "gauge", "Completions that wait for a seat.", max(0, engine.num_open - stats.num_running)),
        ("most_requests", "gauge", "Completions that may run or wait.", engine.most_completions),
        ("free_blocks", "gauge", "Blocks of the cache that are free.", stats.num_free_blocks),
        ("blocks", "gauge", "Blocks of the cache, without the null block.", stats.num_blocks),
        ("generated_tokens_total", "counter", "New tokens.", stats.num_generated),
        ("drafted_tokens_total", "counter", "Tokens guessed.", stats.num_drafted),
        ("accepted_tokens_total", "counter", "Guesses that became tokens.", stats.num_accepted),
        ("computed_tokens_total", "counter", "Tokens computed, prompts included.", stats.num_computed),
        ("found_tokens_total", "counter", "Tokens found in the prefix cache.", stats.num_found),
        ("recomputed_tokens_total", "counter", "Tokens given up by preemption.", stats.num_recomputed),
        ("preemptions_total", "counter", "Preemptions.", stats.num_preempted),
        ("steps_total", "counter", "Steps of the model.", stats.num_steps),
        ("refused_requests_total", "counter", "Requests refused because too many were under way.", engine.num_refused),
    ]
    lines = []
    for name, kind, meaning, value in families:
        lines += [f"# HELP jaxpaged_{name} {meaning}", f"# TYPE jaxpaged_{name} {kind}", f"jaxpaged_{name} {value}"]
    name = "jaxpaged_finished_requests_total"
    meaning = "Completions that ended; a stop string counts as abort."
    lines += [f"# HELP {name} {meaning}", f"# TYPE {name} counter"]
    lines += [f'{name}{{reason="{reason}"}} {engine.finished[reason]}' for reason in ("stop", "length", "abort")]
    return "\n".join(lines) + "\n"
