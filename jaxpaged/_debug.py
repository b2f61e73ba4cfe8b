"""Checks of values that exist only at run time: slots, block ids, lengths, counts and attention keys.

Outside `debug_checks` the checks add nothing to a traced program. Inside, functions that write, attend or allocate
count invalid values on the device and send the counts to the host with `jax.debug.callback`. A callback needs no change
to the user's function and works in loops and on meshes; JAX's `checkify` would wrap the function and add an output.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LIBRARIES = str(Path(__file__).parent), str(Path(jax.__file__).parent)


@dataclasses.dataclass
class _Checks:
    """The findings, and the last write to a cache."""

    found: dict[str, str] = dataclasses.field(default_factory=dict)  # the first finding of each line and kind
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    written: jax.Array | None = None  # the cache's keys after the last write
    slots: jax.Array | None = None  # the slots of the last write

    def record(self, kind: str, shape: tuple[int, ...], count: Any, index: Any, value: Any) -> None:
        """Runs on the host. Keeps the number of wrong values, and the index and value of the first."""
        if count > 0:
            at = [int(i) for i in np.unravel_index(int(index), shape)]
            with self.lock:
                self.found.setdefault(kind, f"{kind}: {int(count)}, the first at {at}: {value}")


_checks = contextvars.ContextVar[_Checks | None]("checks", default=None)


@contextlib.contextmanager
def debug_checks() -> Iterator[None]:
    """Checks the values that jaxpaged reads and writes inside a `with` block. Use it when tokens look wrong.

    It reports

    - slots outside the pool that are not padding (padding is negative, or equal to the number of slots);
    - slots in the null block;
    - lengths below 0 or above the capacity of a table row;
    - block ids outside the pool, or the null block, in table entries whose tokens a query may see;
    - NaN and infinity in the cached keys, values and scales of these tokens;
    - newly written slots that belong to no sequence that attends to the cache;
    - counts, lengths and parents outside the range that `append`, `rollback`, `fork` and `match_prefix` accept.

    The checks are slow. They work inside `jit`, `scan`, `while_loop`, `vmap`, `grad`, and `shard_map` inside `jit`.
    `debug_checks` clears JAX's caches at its start and end, so that compiled functions are traced again with the
    checks, and afterwards without them.

    Limits:

    - Programs compiled ahead of time outside the block are not checked: `jax.jit(f).lower(...).compile()`, and an
      `Engine`. Create the engine inside the block.
    - `context_parallel_attention` is not checked.
    - Newly written slots are checked only if the same trace attends to the array that `write_kv` returned: not across
      calls of jitted functions, and not on an explicit mesh.
    - If several attention calls share one write, each for some of the sequences, a correct write is reported.

    Raises:
        ValueError: at the end of the block, with all findings. A finding has the line that called jaxpaged, the number
            of wrong values in the first such call, and the index and value of the first. If the block itself raises,
            the findings become notes of that exception.

    Example:
        >>> import jax.numpy as jnp, jaxpaged
        >>> cache = jaxpaged.KVCache.create(num_blocks=4, block_size=2, num_kv_heads=1, head_dim=8)
        >>> k = v = jnp.ones((2, 1, 8))
        >>> with jaxpaged.debug.debug_checks():  # doctest: +ELLIPSIS
        ...     cache = jaxpaged.ops.write_kv(cache, k, v, jnp.array([3, 1]))
        Traceback (most recent call last):
        ...
        ValueError: debug_checks found:
        ... slots in the null block: 1, the first at [1]: 1
    """
    checks = _Checks()
    token = _checks.set(checks)
    jax.clear_caches()
    try:
        yield
    except BaseException as error:
        for finding in _findings(checks):
            error.add_note(finding)
        raise
    else:
        if findings := _findings(checks):
            raise ValueError("\n".join(["debug_checks found:", *findings]))
    finally:
        _checks.reset(token)
        jax.clear_caches()


def _findings(checks: _Checks) -> list[str]:
    jax.effects_barrier()
    return list(checks.found.values())


def unchecked[F: Callable[..., Any]](function: F) -> F:
    """Decorates a function that handles parts of sequences: calls inside it are not checked."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        token = _checks.set(None)
        try:
            return function(*args, **kwargs)
        finally:
            _checks.reset(token)

    return call  # type: ignore[return-value]


def check_write(k_cache: jax.Array, slots: jax.Array) -> None:
    """Checks the slots [...] written in one layer, and stores the written keys for later checks.

    `k_cache` is [..., blocks, block_size, kv_heads, head_dim].
    """
    if (checks := _checks.get()) is None:
        return
    num_blocks, block_size = k_cache.shape[-4:-2]
    num_slots = num_blocks * block_size
    _report(checks, f"slots past the pool's {num_slots}, and not {num_slots} as padding is", slots > num_slots, slots)
    _report(checks, "slots in the null block", (slots >= 0) & (slots < block_size), slots)
    checks.written, checks.slots = k_cache, slots


def check_range(name: str, values: jax.Array, least: int, most: jax.Array | int, *, limit: str = "") -> None:
    """Checks an int32 [seqs] argument of an allocator operation, which ignores rows with values out of range."""
    if (checks := _checks.get()) is None:
        return
    _report(checks, f"{name} outside {least} to {limit or most}", (values < least) | (values > most), values)


def check_tables(
    k_cache: jax.Array,  # one layer or a stack
    block_tables: jax.Array,  # int32 [seqs, max_blocks], one layer
    lengths: jax.Array,  # int32 [seqs]
    num_new: jax.Array | int,  # number of query tokens of each sequence
    window: jax.Array | None,
) -> jax.Array | None:
    """Checks lengths and block ids. Returns which tokens a query may see, bool [seqs, max_blocks, block_size]."""
    if (checks := _checks.get()) is None:
        return None
    num_blocks, block_size = k_cache.shape[-4:-2]
    seqs, max_blocks = block_tables.shape
    capacity = max_blocks * block_size
    _report(checks, f"lengths outside 0 to {capacity}", (lengths < 0) | (lengths > capacity), lengths)

    positions = jnp.arange(capacity, dtype=jnp.int32).reshape(1, max_blocks, block_size)
    exists = positions < lengths[:, None, None]
    first = jnp.zeros_like(lengths) if window is None else lengths - num_new - window + 1
    seen = exists & (positions >= first[:, None, None])
    is_read, ids = seen.any(axis=2), block_tables
    _report(checks, f"block ids outside the pool of {num_blocks}", is_read & ((ids < 0) | (ids >= num_blocks)), ids)
    # Blocks that a window has passed may be the null block, even where padding queries see them: see `attend`.
    in_window = exists if window is None else exists & (positions >= (lengths - window)[:, None, None])
    _report(checks, "the null block with tokens", in_window.any(axis=2) & (ids == 0), ids)

    if checks.written is k_cache and checks.slots is not None:
        slots, num_slots = checks.slots, num_blocks * block_size
        token_slots = jnp.where(exists, ids[..., None] * block_size + positions % block_size, -1)
        owned = jnp.zeros(num_slots, bool).at[jnp.where(token_slots < 0, num_slots, token_slots)].set(True, mode="drop")
        is_lost = (slots >= 0) & (slots < num_slots) & ~owned.at[slots].get(mode="clip")
        _report(checks, "slots just written that are no token of an attending sequence", is_lost, slots)
    return seen


def check_attention(call: Any, lengths: jax.Array) -> None:
    """Checks the inputs of an attention call. `lengths` are the caller's, before clipping."""
    if (checks := _checks.get()) is None:
        return
    options = call.options
    seen = check_tables(call.k_cache, call.block_tables, lengths, call.num_new(), options.sliding_window)
    assert seen is not None
    ids = jnp.clip(call.block_tables, 0, call.k_cache.shape[0] - 1)
    arrays = dict(keys=call.k_cache, values=call.v_cache, k_scale=options.k_scale, v_scale=options.v_scale)
    for name, array in arrays.items():
        if array is None or array.ndim < 3 or not jnp.issubdtype(array.dtype, jnp.floating):
            continue
        is_finite = jnp.isfinite(array).all(axis=tuple(range(2, array.ndim)))  # [blocks, block_size]
        is_bad = seen & ~is_finite[ids]
        blocks = jnp.broadcast_to(call.block_tables[..., None], is_bad.shape)
        _report(checks, f"{name} that are not finite, by [sequence, entry, offset], with the block", is_bad, blocks)


def _report(checks: _Checks, kind: str, is_wrong: jax.Array, values: jax.Array) -> None:
    index = jnp.argmax(is_wrong.ravel())
    record = functools.partial(checks.record, f"{_caller()}: {kind}", is_wrong.shape)
    jax.debug.callback(record, is_wrong.sum(dtype=jnp.int32), index, values.ravel()[index])


def _caller() -> str:
    """File and line of the innermost stack frame that is neither in jaxpaged nor in JAX."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
