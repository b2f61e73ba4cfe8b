"""The stats of an engine, updated by a report."""

import dataclasses

import jax

from jaxpaged._engine.records import EngineStats
from jaxpaged._slice.kinds import Kind
from jaxpaged._slice.state import Report


def count_report(
    before: EngineStats, report: Report, kinds: tuple[Kind, ...], *, num_generated: int, num_scored: int, seconds: float
) -> EngineStats:
    """The stats after the slice of this report, which generated and scored these numbers of tokens in `seconds`."""

    def total(so_far: int, counter: jax.Array) -> int:  # the device counts modulo 2^32
        return so_far + (int(counter) - so_far) % 2**32

    is_narrow, is_mixed = ([getattr(kind, name) for kind in kinds] for name in ("is_narrow", "is_mixed"))
    by_name: dict[str, jax.Array] = {}
    for kind, counter in zip(kinds, report.num_of_kind, strict=True):
        by_name[kind.name] = counter + by_name.get(kind.name, 0)
    by_kind = {name: total(before.steps_by_kind[name], counter) for name, counter in by_name.items()}
    return dataclasses.replace(
        before,
        seconds=before.seconds + seconds,
        num_running=int(report.num_running),
        num_free_blocks=int(report.num_free),
        num_slices=before.num_slices + 1,
        num_steps=before.num_steps + int(report.outbox.num_steps),
        num_narrow_steps=total(before.num_narrow_steps, report.num_of_kind[is_narrow].sum()),
        num_mixed_steps=total(before.num_mixed_steps, report.num_of_kind[is_mixed].sum()),
        steps_by_kind=by_kind,
        num_saved_reads=total(before.num_saved_reads, report.num_saved_reads),
        num_drafted=total(before.num_drafted, report.num_drafted),
        num_accepted=total(before.num_accepted, report.num_accepted),
        num_generated=before.num_generated + num_generated,
        num_scored=before.num_scored + num_scored,
        num_computed=total(before.num_computed, report.num_computed),
        num_found=total(before.num_found, report.num_found),
        num_recomputed=total(before.num_recomputed, report.num_recomputed),
        num_preempted=total(before.num_preempted, report.num_preempted),
    )
