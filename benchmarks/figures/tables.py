"""Writes the tables of README.md and docs/ from benchmarks/results: `python -m benchmarks.figures.tables`.

A table is between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a key of `TABLES`. Below the table are its source
files, with the machine and the commit of each. Other text does not change.
"""

import argparse
import json
import re
from collections.abc import Callable
from typing import Any

from benchmarks.figures import kernel_tables, scaling_tables, slice_tables, system_tables
from benchmarks.figures.cells import Points, machine
from benchmarks.harness import RESULTS, ROOT

NAMES = (
    *("performance", "cache", "memory_design", "engine_design", "several_gpus", "kernel", "gpus"),
    *("grammars", "sampling", "scaling", "your_model"),
)

PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in NAMES)]

TABLES: dict[str, Callable[[Points], str]] = {
    "decode": kernel_tables.decode,
    "peers": kernel_tables.peers,
    "variants": kernel_tables.variants,
    "plans": kernel_tables.plans,
    "outliers": kernel_tables.outliers,
    "prefill": kernel_tables.prefill,
    "packed": kernel_tables.packed,
    "portable prefill": kernel_tables.portable_prefill,
    "summary": kernel_tables.summary,
    "beside vllm": system_tables.beside_vllm,
    "orders": system_tables.orders,
    "small models": system_tables.small_models,
    "small arrivals": system_tables.small_arrivals,
    "changed logits": system_tables.changed_logits,
    "starts": system_tables.starts,
    "times vllm": system_tables.times_vllm,
    "times vllm small": system_tables.times_vllm_small,
    "arrivals": system_tables.arrivals,
    "slices": slice_tables.slices,
    "engine profile": slice_tables.engine_profile,
    "latent profile": slice_tables.latent_profile,
    "host memory": system_tables.host_memory,
    "engine loops": system_tables.engine_loops,
    "engine prefixes": system_tables.engine_prefixes,
    "quantised": kernel_tables.quantised,
    "8-bit prefill": kernel_tables.prefill_8bit,
    "shared": kernel_tables.shared,
    "portable": kernel_tables.portable,
    "kernel steps": kernel_tables.kernel_steps,
    "cache choices": system_tables.cache_choices,
    "decode step": system_tables.decode_step,
    "cache operations": system_tables.cache_operations,
    "groups": system_tables.groups,
    "allocator": system_tables.allocator,
    "allocator in a step": system_tables.allocator_in_a_step,
    "perplexity": system_tables.perplexity,
    "latent forms": system_tables.latent_forms,
    "several gpus": system_tables.several_gpus,
    "sharded engine": system_tables.sharded_engine,
    "sums": system_tables.sums,
    "drafts": system_tables.drafts,
    "text drafts": system_tables.text_drafts,
    "trainer logprobs": system_tables.trainer_logprobs,
    "grammars": system_tables.grammars,
    "experts": kernel_tables.experts,
    "scaling checks": scaling_tables.checks,
    "scaling steps": scaling_tables.steps,
    "scaling goals": scaling_tables.bars,
    "scaling limits": scaling_tables.limits,
}


def content(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def points(name: str) -> dict[str, Any]:
    return content(name)["points"]


def with_sources(table: Callable[[Points], str]) -> str:
    """The table, and below it its files with their machines and commits."""
    read: dict[str, dict[str, Any]] = {}

    def points(name: str) -> dict[str, Any]:
        read[name] = content(name)
        return read[name]["points"]

    text = table(points)
    files: dict[str, list[str]] = {}
    for name, file in read.items():
        files.setdefault(source(file), []).append(f"`{name}.json`")
    return f"{text}\n\n{'; '.join(f'{of} ({", ".join(names)})' for of, names in files.items())}."


def source(content: dict[str, Any]) -> str:
    commit = f"commit {content['commit']}" if content["commit"] else "commit not recorded"
    return f"{machine(content)}, {commit}, {content['date']}"


def filled(text: str) -> str:
    """`text` with every table made from the result files."""
    return re.sub(
        r"(<!-- table: (.*?) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{with_sources(TABLES[found[2]])}\n{found[3]}",
        text,
        flags=re.DOTALL,
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
