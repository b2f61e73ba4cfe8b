"""Runs the kernels of paged decode in interpret mode on a CPU, with race detection where no program reads another's."""

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental import io_callback
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged import _by_kernel
from jaxpaged._attention.call import check_call
from jaxpaged._attention.kernels import KERNELS
from jaxpaged._attention.run import run
from jaxpaged._by_kernel import NO_HINTS, Choice, Refusal, StaticHints
from jaxpaged._device import GPUS, Gpu
from pallas_kernels import decode
from pallas_kernels.common.partition_plan import PartitionPlan
from tests.cases import Case, assert_lse, assert_within_budget, within_budget
from tests.kernels.evaluate import evaluate

H100, A100 = GPUS["H100"], GPUS["A100"]
OPTION_NAMES = ("scale", "sliding_window", "logits_soft_cap", "alibi_slopes", "sinks", "k_scale", "v_scale")


_programs_of_kernel = interpret_pallas_call.interpret_pallas_call
_one_kernel = threading.Lock()  # their shared memory is one


def _call_of_kernel(*args: jax.Array, **params: Any) -> Any:
    """What is compiled where JAX would compile all that interpret mode does: one call of Python that evaluates it."""
    jaxpr = jax.make_jaxpr(functools.partial(_programs_of_kernel, **params))(*args)

    def run(*args: jax.Array) -> list[np.ndarray]:
        with _one_kernel:
            return evaluate(jaxpr.jaxpr, jaxpr.consts, *args)

    return io_callback(run, jaxpr.out_avals, *args)


interpret_pallas_call.interpret_pallas_call = _call_of_kernel
thread_map._run_jaxpr = lambda jaxpr, consts, *args: evaluate(jaxpr.jaxpr, consts, *args)


def make_call(case: Case) -> Any:
    return check_call(*case.arrays, **(dict.fromkeys(OPTION_NAMES) | case.options))


def choose(call: Any, gpu: Gpu, hints: StaticHints = NO_HINTS) -> Choice | Refusal:
    return _by_kernel.choose(call, gpu, hints, KERNELS)


def by_decode(call: Any, gpu: Gpu, hints: StaticHints = NO_HINTS) -> Choice:
    """The decode kernel, whatever its rank."""
    return Choice(decode.KERNEL, decode.KERNEL.configure(call, gpu, hints))


def changed(choice: Choice, **config: Any) -> Choice:
    """With other fields of the configuration."""
    return dataclasses.replace(choice, config=dataclasses.replace(choice.config, **config))


def partitions_per_seq(plan: Any) -> np.ndarray:
    seq_ids, indices, counts = np.asarray(plan.partitions).T
    return np.bincount(seq_ids[indices < counts])


def races_found() -> bool:
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # there is no public way to ask

    return gpu_callbacks.get_races().races_found


def run_without_races(choice: Choice, call: Any) -> tuple[jax.Array, jax.Array]:
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    out, lse = run(dataclasses.replace(choice, interpret=interpret), call)
    jax.block_until_ready(out)
    assert not races_found()
    return out, lse


def check_mistakes_of_latents(case: Case, attend: Callable[[Case], tuple[jax.Array, jax.Array]]) -> None:
    """Of two sequences: an answer is right for no other question, and what is past the end would be seen."""
    out, _ = attend(case)
    assert within_budget(case, out).all()
    for wrong in (
        case.replace(v_cache=case.k_cache[..., 64:]),  # the last columns
        case.replace(options=case.options | dict(scale=0.2)),
        case.replace(lengths=case.lengths - 8),
    ):
        assert not within_budget(wrong, out).reshape(2, -1).all(axis=1).any()
    outs = attend(case.replace(lengths=case.lengths + 1))[0]  # one slot past the end, which is poisoned
    assert np.isnan(np.asarray(outs, np.float32)).any(axis=-1).reshape(2, -1).any(axis=1).all()


def check_queries_of_a_history(case: Case, compute: Callable[[Any], tuple[jax.Array, jax.Array]]) -> None:
    """Packed, of two sequences with q_len 5: the last 3 of one and all of the other see all of their sequence."""
    packed, starts = case.q.reshape(10, *case.q.shape[2:])[2:], jnp.asarray([0, 3, 8], jnp.int32)
    call = dataclasses.replace(make_call(case), q=packed, query_starts=starts, causal=False)
    out, lse = (jnp.concatenate([x[:2], x]).reshape(2, 5, *x.shape[1:]) for x in compute(call))
    for i in range(2, 5):
        token = case.replace(q=case.q[:, i])
        assert_within_budget(token, out[:, i])
        assert_lse(token, lse[:, i])


def attend(
    case: Case,
    *,
    num_partitions: int | None = 1,
    plan: PartitionPlan | None = None,
    num_sms: int = 132,
    window: int | None = None,
    zero_fill: bool = False,
    **config: Any,
) -> tuple[jax.Array, jax.Array]:
    """By the decode kernel, on a GPU of `num_sms`, by default an H100. `window`: the sliding one, if it is known
    beforehand. `config` overrides fields of the default. `zero_fill`: what is read past the end of an array is zero, as
    the copy engine does it; otherwise reading there raises."""
    fill = dict(out_of_bounds_reads="uninitialized", uninitialized_memory="zero") if zero_fill else {}
    a = dataclasses.replace(make_call(case), plan=plan)
    hints = StaticHints(num_partitions=num_partitions, window=window)
    choice = by_decode(a, Gpu(num_sms, 9.0), hints)
    choice = changed(choice, **(dict(copies="tma") | config))  # interpret mode has no others
    # The detector does not know that programs count each other before they read what others wrote.
    config_of_all: Any = choice.config
    is_alone = plan is None and (config_of_all.num_partitions == 1 or config_of_all.merged_by == "xla")
    interpret = plgpu.InterpretGPUParams(detect_races=is_alone, **fill)
    out, lse = run(dataclasses.replace(choice, interpret=interpret), a)
    jax.block_until_ready(out)
    return (out, lse) if case.q.ndim == 4 else (out[:, 0], lse[:, 0])


def check(case: Case, **how: Any) -> np.ndarray:
    out, lse = attend(case, **how)
    assert not races_found()
    assert out.shape[:-1] == case.q.shape[:-1]
    assert out.dtype == case.q.dtype
    assert_within_budget(case, out)
    assert_lse(case, lse)
    return np.asarray(out, np.float32)
