"""Public names: their module, signatures, types and repr. Their doctests run once."""

import ast
import doctest
import importlib
import inspect
import pickle
import pydoc
import typing
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxpaged
import jaxpaged.linen
import jaxpaged.nnx
from jaxpaged import AttentionStep, BlockAllocator, CacheLayer, KVCache, PrefixCache, SamplingParams
from jaxpaged._attention.plan import make_plan
from jaxpaged.scheduling import Scheduler

ROOT = Path(__file__).parents[2]
MODULES = (
    jaxpaged,
    jaxpaged.scheduling,
    jaxpaged.ops,
    jaxpaged.grammar,
    jaxpaged.debug,
    jaxpaged.nnx,
    jaxpaged.linen,
)
PUBLIC = [(module.__name__, getattr(module, name)) for module in MODULES for name in module.__all__]
VALUES = [value for _, value in PUBLIC]
CLASSES = [value for value in VALUES if inspect.isclass(value)]


@pytest.mark.parametrize(("module", "value"), PUBLIC, ids=lambda value: getattr(value, "__name__", value))
def test_public_names_have_their_public_module(module, value):
    assert value.__module__ == module
    assert pickle.loads(pickle.dumps(value)) is value


def test_help_and_pickles_of_instances():
    assert "class Engine in module jaxpaged\n" in pydoc.render_doc(jaxpaged.Engine, renderer=pydoc.plaintext)
    params = SamplingParams(seed=3, stop_token_ids=(2,))
    assert pickle.loads(pickle.dumps(params)) == params


def test_types_are_found_and_signatures_name_them():
    """Signatures show `ArrayLike`, not its union of types."""
    assert typing.get_type_hints(KVCache)["k_scale"] == jax.Array | None
    for value in CLASSES:
        typing.get_type_hints(value)
    methods = [method for owner in CLASSES for _, method in inspect.getmembers(owner, inspect.isfunction)]
    for value in [*VALUES, *methods]:
        if not isinstance(value, type(jaxpaged.scheduling.SubmitStatus)):
            assert "numpy.ndarray" not in str(inspect.signature(value)), value


CACHE = KVCache.create(num_blocks=8, block_size=4, num_kv_heads=2, head_dim=16, dtype=jnp.int8)
CACHE_TEXT = "KVCache(k=int8[8,4,2,16], v=int8[8,4,2,16], k_scale=float32[8,4,2], v_scale=float32[8,4,2])"
SIZES = dict(num_blocks=8, block_size=4)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (CACHE, CACHE_TEXT),
        (CacheLayer(CACHE, 1), f"CacheLayer(stack={CACHE_TEXT}, index=1)"),
        (jax.eval_shape(lambda: CACHE), CACHE_TEXT),
        (jax.tree.map(lambda _: None, CACHE), "KVCache(k=None, v=None, k_scale=None, v_scale=None)"),
        (make_plan(jnp.array([3]), num_kv_heads=2), "PartitionPlan(partitions=int32[2,3])"),
    ],
    ids=["cache", "layer", "shapes", "none", "plan"],
)
def test_the_repr_of_state_is_a_line_of_shapes(state, text):
    assert repr(state) == text


def test_traced_state_has_the_same_repr():
    texts = []
    jax.vmap(jax.jit(lambda cache: texts.append(repr(cache))))(jax.tree.map(lambda x: x[None], CACHE))
    assert texts == [CACHE_TEXT]


def test_the_repr_of_large_state_is_a_line_of_names():
    state = [
        BlockAllocator.create(num_seqs=2, max_blocks_per_seq=3, **SIZES),
        PrefixCache.create(**SIZES),
        Scheduler.create(max_requests=4, num_seqs=2, max_length=8, prefix_cache=PrefixCache.create(**SIZES)),
    ]
    state.append(AttentionStep.create(state[0], jnp.array([4, 8])))
    for value in state:
        assert "\n" not in repr(value)
        assert len(repr(value)) < 1200
    assert "block_tables=int32[2,3]" in repr(state[0])
    assert "block_size=4" in repr(state[0])


def test_doctests_are_collected_once_from_the_files_that_define_them():
    """`__module__` of public names is not the file's: the root's conftest.py passes this on to doctest."""
    written, found = Counter(), Counter()
    for file in sorted((ROOT / "jaxpaged").rglob("*.py")):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        nodes = [
            node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef | ast.FunctionDef)
        ]
        written[name] = sum(">>>" in (ast.get_docstring(node) or "") for node in nodes)
        found[name] = sum(bool(test.examples) for test in doctest.DocTestFinder().find(importlib.import_module(name)))
    assert written.total() > 25
    assert found == written
