"""The program of an engine: a slice, compiled once for the sizes of the engine, and the state with which it begins."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpaged._engine.defaults import chosen_least_spared, step_cost
from jaxpaged._engine.drafting import Draft
from jaxpaged._engine.inputs import bytes_on_a_device, caches_in
from jaxpaged._engine.kinds import Kind, make_kinds
from jaxpaged._engine.on_mesh import on_each_device, whole_beside
from jaxpaged._engine.options import ResolvedOptions
from jaxpaged._engine.packing import num_words, pack
from jaxpaged._engine.requests import make_inbox
from jaxpaged._engine.room import keep_room
from jaxpaged._engine.slices import Apply, Setup, run_packed, tell
from jaxpaged._engine.state import Inbox, Report, State
from jaxpaged._memory import MORE_MEMORY, check_memory

COPIES = 1.5  # memory to compile, over the largest array of the weights: 1.6 GB for 1.05 on an H100
MOST_CROSSING = 4  # inboxes on the device at once, and reports: of slices that run, wait or are read


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled slice, and what crosses to it and back.

    Attributes:
        run: `state, report = run(weights, state, report, words)`: from the last report and a packed inbox to a packed
            report. The state and the last report are donated.
        copy: `copy(report)`, which the host may read while the report is donated.
        no_report: what is the last report for the first slice.
        inbox_of: `make_inbox` of the engine.
        report_types: shapes and dtypes of a report.
        kept: arrays between which there is room for the reports and inboxes under way.
    """

    run: jax.stages.Compiled
    copy: jax.stages.Compiled
    no_report: jax.Array
    inbox_of: Callable[..., Inbox]
    report_types: Report
    kept: list[jax.Array]


def first_state(caches: Any, options: ResolvedOptions) -> tuple[tuple[Kind, ...], State]:
    """The kinds of steps, and a state without requests."""
    shares = options.prefix_cache and not options.batch_invariant and options.windows == (None,)
    kinds = make_kinds(
        options.max_num_seqs,
        options.chunk_tokens,
        options.widths,
        batch_invariant=options.batch_invariant,
        least_spared=chosen_least_spared(caches) if shares else None,
        cost=functools.partial(step_cost, is_gpu=options.is_gpu) if options.num_speculative_tokens else None,
    )
    return kinds, State.create(caches, kinds, options)


def compile_in_memory(lowered: Any, weights: Any, caches: Any) -> Any:
    """Compiles a slice. Raises `MemoryError` if the GPU has no room for that, or for the slice's scratch memory."""
    needs = f"weights need {bytes_on_a_device(weights) / 1e9:.1f} GB, caches {bytes_on_a_device(caches) / 1e9:.1f}"
    # To choose how a product is computed, XLA runs it on copies of its operands.
    most = int(COPIES * max(map(bytes_on_a_device, jax.tree.leaves(weights)), default=0))
    purpose = f"the engine does not fit: {needs}, compiling {most / 1e9:.1f} or more"
    check_memory(most, purpose)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as failure:
        if "RESOURCE_EXHAUSTED" in str(failure):
            raise MemoryError(f"{purpose}. {MORE_MEMORY} XLA's failure is this error's cause.") from failure
        raise
    memory = compiled.memory_analysis()
    scratch = int(memory.temp_size_in_bytes) if memory else 0
    check_memory(scratch, f"the engine does not fit: {needs}, scratch memory {scratch / 1e9:.1f}")
    return compiled


def compile_program(
    apply: Apply,
    draft: Draft | None,
    weights: Any,
    state: State,
    kinds: tuple[Kind, ...],
    mesh: Mesh | None,
    options: ResolvedOptions,
) -> Program:
    """For weights and a state that lie as these do."""
    inbox_of = functools.partial(make_inbox, options)
    forgets = np.zeros(1 + options.num_adapters, np.bool_)
    no_news = inbox_of([], [], wants_logprobs=False, num_steps=0, forgets=forgets)
    setup = Setup(
        apply,
        kinds,
        options,
        draft,
        # A batch-invariant engine has the rows anyway.
        row_cost=math.inf if options.batch_invariant else step_cost(0, is_gpu=options.is_gpu),
    )
    function: Any = functools.partial(run_packed, setup, no_news)
    if mesh is not None:
        function = on_each_device(mesh, function, weights, state)
    rows = no_news.requests.prompt_lengths
    _, report_types = jax.eval_shape(functools.partial(tell, setup), state, rows, rows)
    # Bound to a device only if the caches are: else it would bind all that the slice returns.
    device = whole_beside(state.caches, mesh) if caches_in(state.caches)[0].k.committed else None
    no_report = jnp.zeros(num_words(report_types), jnp.int32, device=device)
    # The last report, and what is never read of the state, are there so that all that is new has the buffer of what is
    # old: XLA changes a CUDA graph if a buffer in it has moved. [slices_h100]
    jitted = jax.jit(function, donate_argnums=(1, 2), keep_unused=True, compiler_options=options.compiler_options)
    # Compiled, and not jitted: another shape or dtype would be an error, and never a second program.
    run = compile_in_memory(jitted.lower(weights, state, no_report, words := pack(no_news)), weights, state.caches)
    copy = jax.jit(jnp.copy).lower(no_report).compile()
    inbox = jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=no_report.sharding)
    kept = keep_room((no_report, inbox), MOST_CROSSING, no_report.sharding) if options.is_gpu else []
    return Program(run, copy, no_report, inbox_of, report_types, kept)
