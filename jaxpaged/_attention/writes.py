"""Checks the cache writes of a model while an engine traces it: one layer of each group must write each cache.

Without the check nothing fails: a second layer overwrites the keys of the first, and the outputs are wrong.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from jaxpaged._cache.kv_cache import KVCache, named_caches

_watched: contextvars.ContextVar["Writes | None"] = contextvars.ContextVar("writes", default=None)


@dataclasses.dataclass
class Writes:
    """The state of caches by the `id` of their arrays of keys.

    Attributes:
        newest: for the newest array of each cache, the cache's name and the groups whose layers have written it.
        kept: all arrays, kept alive so that no `id` is used again.
    """

    newest: dict[int, tuple[str, frozenset[int]]]
    kept: list[Any]


@contextlib.contextmanager
def watch_writes(caches: Any) -> Iterator[None]:
    """A context in which a second write of a cache by layers of one group raises `ValueError`."""
    found = named_caches(caches)
    newest = {id(cache.k): (name, frozenset[int]()) for name, cache in found}
    token = _watched.set(Writes(newest, [cache.k for _, cache in found]))
    try:
        yield
    finally:
        _watched.reset(token)


def note_write(before: Any, after: Any, group: int) -> None:
    """Records that a layer of `group` has written a cache. Raises `ValueError` if a layer of the group already had.

    Layers of different groups share caches. Writes inside a function that `apply` passes to `remat`, `scan` or `cond`
    go unnoticed, because arrays have other ids there.
    """
    writes = _watched.get()
    if writes is None or not isinstance(before, KVCache):
        return
    name, groups = writes.newest.get(id(before.k), ("", frozenset[int]()))
    is_stale = not name and any(before.k is k for k in writes.kept)
    if (not name and not is_stale) or _trace(before.k) is not _trace(after.k):
        return
    if is_stale or group in groups:
        raise ValueError(
            f"two layers write {name or 'the same cache'} in one step, and the second overwrites what the first wrote. "
            "Give each layer a cache of its own, and use and return the cache that step.attend returned."
        )
    del writes.newest[id(before.k)]
    writes.newest[id(after.k)] = name, groups | {group}
    writes.kept.append(after.k)


def check_written(caches: Any, new_caches: Any) -> None:
    """Raises `ValueError` if `apply` returned a cache that no layer has written."""
    for (name, before), (_, after) in zip(named_caches(caches), named_caches(new_caches), strict=True):
        if before.k is after.k:
            raise ValueError(
                f"no layer wrote {name}. Call `cache, out = step.attend(q, k, v, cache)` with it, return the cache "
                "that this returns, and make no more caches than there are layers."
            )


def check_same_trace(name: str, tree: Any, tokens: jax.Array) -> None:
    """Raises `ValueError` if `apply` returned a value of a finished trace. JAX notices only when the program runs."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        if _trace(leaf) is not None and _trace(leaf) is not _trace(tokens):
            raise ValueError(
                f"apply returned {name}{jax.tree_util.keystr(path)} from inside a function that it gave to remat, jit, "
                "scan or cond, which does not return it. Return it from that function. A cache that the function "
                "writes must also be its argument."
            )


def _trace(x: Any) -> Any:
    return getattr(x, "_trace", None)  # JAX has no public name for it
