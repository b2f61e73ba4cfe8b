"""The program of an engine, a slice compiled once for its sizes, and its first state."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpaged import _device
from jaxpaged._cache.kv_cache import caches_in
from jaxpaged._engine.defaults import chosen_least_saved_reads, step_cost
from jaxpaged._engine.inputs import bytes_on_a_device
from jaxpaged._engine.on_mesh import on_each_device, replicate, whole_beside
from jaxpaged._engine.requests import make_inbox
from jaxpaged._engine.room import keep_room
from jaxpaged._memory import MORE_MEMORY, check_memory
from jaxpaged._slice.kinds import Kind, make_kinds
from jaxpaged._slice.model import Functions, Setup, apply_model
from jaxpaged._slice.options import ResolvedOptions
from jaxpaged._slice.packing import num_words, pack
from jaxpaged._slice.run_slice import make_report, run_packed
from jaxpaged._slice.state import Inbox, Report, State
from jaxpaged._slice.step import model_outputs

COPIES = 1.5  # memory for compiling, over the largest array of the weights: 1.6 GB for 1.05 on an H100
MOST_LOGITS = 0.05  # part of a GPU's memory; warn if the logits of an engine without a head need more
MOST_CROSSING = 4  # inboxes and reports on the device at once, for slices that run, wait or are read
AUX_DTYPES = [
    *map(jnp.dtype, ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float32"))
]


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled slice.

    Attributes:
        run: `state, report = run(weights, state, last_report, inbox)`, where reports and the inbox are packed. The
            state and the last report are donated.
        copy: copies a report, which is then donated to the next slice, for the host.
        no_report: the last report that the first slice is given.
        inbox_of: `make_inbox` with the options of the engine.
        report_types: shapes and dtypes of a report.
        aux: shapes and dtypes of a token's `aux`.
        kept: guard arrays that reserve memory for reports and inboxes: see `keep_room`.
    """

    run: jax.stages.Compiled
    copy: jax.stages.Compiled
    no_report: jax.Array
    inbox_of: Callable[..., Inbox]
    report_types: Report
    aux: Any
    kept: list[jax.Array]


def first_state(
    functions: Functions, weights: Any, caches: Any, mesh: Mesh | None, options: ResolvedOptions
) -> tuple[Setup, Any, State]:
    """The setup of all slices, the weights on the mesh of the caches, and a state without requests."""
    shares = options.prefix_cache and not options.batch_invariant and options.windows == (None,)
    kinds = make_kinds(
        options.max_num_seqs,
        options.chunk_tokens,
        options.widths,
        batch_invariant=options.batch_invariant,
        least_saved_reads=chosen_least_saved_reads(caches) if shares else None,
        cost=functools.partial(step_cost, is_gpu=options.is_gpu) if options.num_speculative_tokens else None,
    )
    head, draft = functions.head, functions.draft
    setup = Setup(
        jax.jit(functools.partial(apply_model, functions.apply), inline=True),
        # The partial is hashable even if `head` is not.
        None if head is None else jax.jit(functools.partial(head), inline=True),
        kinds,
        options,
        draft,
        functions.process_logits,
        # A batch-invariant engine always computes all rows, so that drafts are free.
        row_cost=math.inf if options.batch_invariant else step_cost(0, is_gpu=options.is_gpu),
    )
    state = State.create(setup, caches, functions.vocabulary)
    if mesh is not None:
        weights, state = replicate(mesh, (weights, state))
    hidden, aux = output_types(setup, weights, state, mesh)
    if head is None:
        warn_of_logits(kinds, hidden)
    setup = dataclasses.replace(setup, aux=aux)
    check_prompt_aux(setup)
    state = state.with_outputs(setup, None if draft is None else hidden)
    return setup, weights, state if mesh is None else replicate(mesh, state)


def output_types(setup: Setup, weights: Any, state: State, mesh: Mesh | None) -> tuple[Any, Any]:
    """Shapes and dtypes of the hidden state and `aux` that `apply` returns for one token.

    Raises:
        ValueError: a dtype of `aux` that is none of AUX_DTYPES.
    """
    function: Any = functools.partial(model_outputs, setup)
    if mesh is not None:
        of_arguments = jax.tree.map(lambda x: x.sharding.spec, (weights, state))
        function = jax.shard_map(function, mesh=mesh, in_specs=of_arguments, out_specs=P(), check_vma=False)
    outputs = jax.eval_shape(function, weights, state)
    hidden, aux = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), outputs)
    for path, leaf in jax.tree.leaves_with_path(aux):
        if leaf.dtype not in AUX_DTYPES:
            raise ValueError(
                f"aux must be of 8, 16 or 32 bits or bool; got {leaf.dtype} at "
                f"{jax.tree_util.keystr(path) or 'its root'}. Convert it in apply, for instance with "
                ".astype(jnp.float32)."
            )
    return hidden, aux


def check_prompt_aux(setup: Setup) -> None:
    """Raises `ValueError` if `prompt_aux` cannot be returned."""
    options = setup.options
    if options.prompt_aux and not jax.tree.leaves(setup.aux):
        raise ValueError("prompt_aux=True returns the aux of prompt tokens; let apply return (caches, hidden, aux).")
    if options.prompt_aux and options.prefix_cache and None not in options.windows:
        raise ValueError(
            "prompt_aux=True with a prefix cache needs a group of layers without a window: a prompt may begin after "
            f"blocks that all windows have passed; got windows={options.windows}. Leave out one of the two."
        )


def warn_of_logits(kinds: tuple[Kind, ...], logits: Any) -> None:
    """Warns if the logits of an engine without a head, one row for each token of a step, need much memory."""
    memory = _device.memory()
    most = kinds[-1].width * sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(logits))
    if memory is not None and most > MOST_LOGITS * memory[1]:
        warnings.warn(
            f"without a head, apply makes logits for each token of a step: up to {most / 1e9:.1f} GB of the "
            f"{memory[1] / 1e9:.1f} GB of this GPU. Pass head=, and return hidden states.",
            stacklevel=5,  # the line that makes the engine
        )


def compile_in_memory(lowered: Any, weights: Any, caches: Any) -> Any:
    """Compiles a slice. Raises `MemoryError` if the GPU lacks memory to compile it, or for its scratch memory."""
    needs = f"weights need {bytes_on_a_device(weights) / 1e9:.1f} GB, caches {bytes_on_a_device(caches) / 1e9:.1f}"
    # XLA's autotuner runs matrix products on copies of their operands.
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


def compile_program(setup: Setup, weights: Any, state: State, mesh: Mesh | None) -> Program:
    """Compiles a slice for the shapes and shardings of these weights and this state."""
    options = setup.options
    inbox_of = functools.partial(make_inbox, options)
    forgets = np.zeros(1 + options.num_adapters, np.bool_)
    no_input = inbox_of([], [], wants_logprobs=False, num_steps=0, forgets=forgets)
    function: Any = functools.partial(run_packed, setup, no_input)
    if mesh is not None:
        function = on_each_device(mesh, function, weights, state)
    rows = no_input.requests.prompt_lengths
    _, report_types = jax.eval_shape(functools.partial(make_report, setup), state, rows, rows)
    # Committed to a device only if the caches are: otherwise all results of the slice would be committed to it.
    device = whole_beside(state.caches, mesh) if caches_in(state.caches)[0].k.committed else None
    no_report = jnp.zeros(num_words(report_types), jnp.int32, device=device)
    # The last report and the unused parts of the state are arguments so that each result reuses the buffer of its
    # predecessor: XLA updates a CUDA graph when a buffer in it has moved. [slices_h100]
    jitted = jax.jit(function, donate_argnums=(1, 2), keep_unused=True, compiler_options=options.compiler_options)
    # Compiled ahead of time: another shape or dtype is an error instead of a second program.
    run = compile_in_memory(jitted.lower(weights, state, no_report, words := pack(no_input)), weights, state.caches)
    copy = jax.jit(jnp.copy).lower(no_report).compile()
    inbox = jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=no_report.sharding)
    kept = keep_room((no_report, inbox), MOST_CROSSING, no_report.sharding) if options.is_gpu else []
    return Program(run, copy, no_report, inbox_of, report_types, setup.aux, kept)
