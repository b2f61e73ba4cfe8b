"""Refusals of an engine, each with its reason: parameters, requests, weights, options and models."""

import collections
import dataclasses
import functools
import importlib.metadata
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxpaged import SamplingParams, generate
from jaxpaged._engine.on_mesh import SUMS_BY_NCCL, warn_of_old_nccl
from tests import toy_model
from tests.toy_model import (
    BLOCK_SIZE,
    MAX_TOKENS,
    VOCAB,
    WIDTHS,
    create_cache,
    create_engine,
    not_compiled,
    random_weights,
)

PARAMS = {
    "max_tokens must be at least 1; got max_tokens=0": dict(max_tokens=0),
    "max_tokens must be an int; got max_tokens=1.5": dict(max_tokens=1.5),
    "max_tokens must be an int; got max_tokens=True": dict(max_tokens=True),
    "top_k must be at most 2147483647; got top_k=4294967296": dict(top_k=2**32),
    "top_k must be at least -1; got top_k=-2": dict(top_k=-2),
    "head_start must be at least -2147483648": dict(head_start=-(2**40)),
    "a sequence of token ids; got stop_token_ids=5": dict(stop_token_ids=5),
    "got stop_token_ids='ab'": dict(stop_token_ids="ab"),
    "stop_token_ids must be at least 0; got stop_token_ids=-1": dict(stop_token_ids=(-1,)),
    "seed must be at most 4294967295": dict(seed=2**32),
    "top_p must be a number above 0 and at most 1; got top_p=1.5": dict(top_p=1.5),
    "top_p must be a number .*; got top_p=None": dict(top_p=None),
    "temperature must be a number of at least 0; got temperature=nan": dict(temperature=float("nan")),
    "temperature must be a number of at least 0; got temperature='1'": dict(temperature="1"),
    "temperature must be .*; got temperature=1e[+]39": dict(temperature=1e39),
    "min_p must be a number from 0 to 1; got min_p=-0.1": dict(min_p=-0.1),
    r"logprobs must be True or False; got logprobs=5\. They return": dict(logprobs=5),
    "prompt_logprobs must be True or False; got prompt_logprobs=5": dict(prompt_logprobs=5),
    "top_logprobs must be at least 0; got top_logprobs=-1": dict(top_logprobs=-1),
    "top_logprobs must be an int; got top_logprobs=1.5": dict(top_logprobs=1.5),
    "top_logprobs must be an int; got top_logprobs=True": dict(top_logprobs=True),
    "presence_penalty must be a number from -2 to 2; got presence_penalty=2.1": dict(presence_penalty=2.1),
    "frequency_penalty must be a number from -2 to 2; got frequency_penalty=nan": dict(frequency_penalty=float("nan")),
    "repetition_penalty must be a number above 0; got repetition_penalty=0": dict(repetition_penalty=0),
    "min_tokens must be at least 0; got min_tokens=-1": dict(min_tokens=-1),
    "min_tokens must be at most max_tokens; got min_tokens=17, max_tokens=16": dict(min_tokens=17),
    r"logit_bias must be a dict from token ids to numbers; got \[3\]": dict(logit_bias=[3]),
    "logit_bias must have finite numbers; got inf": dict(logit_bias={3: float("inf")}),
    "logit_bias must be an int; got logit_bias='3'": dict(logit_bias={"3": 1.0}),
    "allowed_token_ids must have at least one token id; got none": dict(allowed_token_ids=()),
    "allowed_token_ids must be at least 0; got allowed_token_ids=-1": dict(allowed_token_ids=[-1]),
    "each of bad_words must have at least one token id; got none": dict(bad_words=[[3], []]),
    "bad_words must be a sequence of token ids; got bad_words=3": dict(bad_words=[3]),
    "bad_words must be a sequence of token ids; got bad_words='no'": dict(bad_words=["no"]),
    "bad_words must be a sequence; got bad_words=3": dict(bad_words=3),
    "logits_ints must be at most 2147483647": dict(logits_ints=[2**31]),
    "logits_floats must have finite numbers; got '1'": dict(logits_floats=["1"]),
    "adapter must be at least 0; got adapter=-1": dict(adapter=-1),
    "adapter must be an int; got adapter=True": dict(adapter=True),
    "adapter must be an int; got adapter=1.0": dict(adapter=1.0),
}


@pytest.mark.parametrize("message", PARAMS)
def test_invalid_parameters_are_refused(message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**PARAMS[message])


@pytest.fixture(scope="module")
def engine():
    with not_compiled():
        return create_engine(
            vocab_size=VOCAB,
            num_adapters=3,
            max_logprobs=4,
            num_listed_tokens=4,
            num_logits_floats=1,
            batch_invariant=True,
        )


ANY, TOO_LONG = SamplingParams(), "exceed the engine's max_model_len=48"
BEYOND = f"token ids must be below the engine's vocab_size={VOCAB}; got {VOCAB}"
REQUESTS = (
    (r"a prompt must be a list of at least one token id; got \[\]", "generate", ([[]], ANY)),
    (r"token ids must be from 0 to 2\*\*31 - 1; got 3 to 4294967299", "add_request", ([3, 2**32 + 3], ANY)),
    ("token ids must be .*; got -1 to 3", "add_request", ([-1, 3], ANY)),
    (BEYOND, "add_request", ([VOCAB], ANY)),
    (BEYOND, "generate", ([[1], [2, VOCAB]], ANY)),
    (BEYOND, "score", ([[1, VOCAB]], [[2]])),
    (BEYOND, "score", ([[1]], [[2, VOCAB]])),
    (f"40 tokens and 9 new ones {TOO_LONG}", "add_request", ([1] * 40, SamplingParams(max_tokens=9))),
    (r"each prompt or for all; got len\(prompts\)=2, len\(each\)=3", "generate", ([[1], [2]], [ANY] * 3)),
    ("params must be SamplingParams; got None", "generate", ([[1]], None)),
    (r"params must be SamplingParams; got {'max_tokens': 3}", "add_request", ([1], dict(max_tokens=3))),
    ("at least one prompt", "rollout", ([], ANY)),
    ("at most num_stop_ids=2 stop tokens", "add_request", ([1], SamplingParams(stop_token_ids=(1, 2, 3)))),
    (r"tokens for each prompt; got len\(prompts\)=1, len\(tokens\)=2", "score", ([[1]], [[2], [3]])),
    ("tokens to score must be a list of at least one", "score", ([[1]], [[]])),
    ("a prompt must be a list of at least one", "score", ([[]], [[1]])),
    (TOO_LONG, "score", ([[1] * 40], [[2] * 9])),
    ("the engine's max_logprobs=4; got top_logprobs=5", "add_request", ([1], SamplingParams(top_logprobs=5))),
    ("below the engine's num_adapters=3; got adapter=3", "add_request", ([1], SamplingParams(adapter=3))),
    (
        "list 5 tokens together, and the engine's num_listed_tokens=4. Make the engine with a larger",
        "add_request",
        ([1], SamplingParams(logit_bias={1: 2.0}, allowed_token_ids=[1, 2], bad_words=[[1, 2]])),
    ),
    (
        f"token ids of bad_words must be below the engine's vocab_size={VOCAB}; got {VOCAB}",
        "add_request",
        ([1], SamplingParams(bad_words=[[1, VOCAB]])),
    ),
    (
        "logits_ints must have at most the engine's num_logits_ints=0 numbers; got 1",
        "add_request",
        ([1], SamplingParams(logits_ints=[1])),
    ),
    (
        "logits_floats must have at most the engine's num_logits_floats=1 numbers; got 2",
        "add_request",
        ([1], SamplingParams(logits_floats=[1, 2])),
    ),
    ("pass the request_id of the completion; got completion=1 alone", "abort", (None, 1)),
)


@pytest.mark.parametrize(("message", "method", "arguments"), REQUESTS)
def test_requests_that_can_never_be_served_are_refused(engine, message, method, arguments):
    with pytest.raises(ValueError, match=message):
        getattr(engine, method)(*arguments)
    assert not engine.has_unfinished_requests


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([3, 1], ANY, "a prompt must be a list of at least one token id; got 3"),
        ([[1]], [5], "params must be SamplingParams; got 5"),
        ([], ANY, "pass at least one prompt"),
    ],
)
def test_generate_refuses_requests_that_do_not_fit(prompts, params, message):
    with pytest.raises(ValueError, match=message):
        generate(None, None, prompts, params, head=None, num_layers=1, num_kv_heads=1, head_dim=8)


def test_more_likely_tokens_than_the_engine_finds_are_refused(engine):
    with pytest.raises(ValueError, match="the engine's max_logprobs=4; got top_logprobs=5"):
        engine.score([[1]], [[2]], top_logprobs=5)


def test_a_request_larger_than_the_pool_is_refused():
    with not_compiled():
        engine = create_engine(num_blocks=6, batch_invariant=True)
    engine.add_request([1] * 10, SamplingParams(max_tokens=11))  # 20 tokens are computed, in 5 blocks
    message = "22 tokens need 6 blocks of 4, and the caches have 5 besides the null block: 21 tokens fit"
    with pytest.raises(ValueError, match=message):
        engine.add_request([1] * 10, SamplingParams(max_tokens=12))


def deleted_weights():
    weights = random_weights()
    weights["head"].delete()
    return weights


MODULE = {"layers": [random_weights(), abs], "scale": 0.5}
WEIGHTS = {
    r"dtypes of the old ones; .*\['head'\] was float32\[32, 48\] and is float32\[3\]": {"head": jnp.ones(3)},
    "dtypes of the old ones; .*was float32.* and is bfloat16": {"head": jnp.ones((32, 48), jnp.bfloat16)},
    r"dtypes of the old ones; .*\['bias'\] was not there and is float32\[3\]": {"bias": jnp.ones(3)},
}


@pytest.mark.parametrize("message", WEIGHTS)
def test_weights_of_another_structure_are_refused(engine, message):
    with pytest.raises(ValueError, match=message):
        engine.update_weights(random_weights() | WEIGHTS[message])


def test_a_flax_module_in_place_of_its_state_is_refused_with_advice():
    class Weights(nnx.Module):
        def __init__(self):
            for name, value in random_weights().items():
                setattr(self, name, nnx.Param(value))

    module = Weights()
    with toy_model.not_compiled():
        engine = create_engine(weights=nnx.state(module))
    with pytest.raises(ValueError, match=r"it was a State and is a Weights: pass nnx\.state\(model\)"):
        engine.update_weights(module)
    engine.update_weights(nnx.state(module))


def test_invalid_weights_are_refused(engine):
    for message, weights in (
        ("it was a dict and is a OrderedDict", collections.OrderedDict(random_weights())),
        ("a pytree of arrays; got <built-in function abs>", MODULE),
        (r"the one at \['head'\] was deleted.* your learner returned", deleted_weights()),
    ):
        with pytest.raises(ValueError, match=message):
            engine.update_weights(weights)
    for message, adapters in (
        ("adapters must be below the engine's num_adapters=3; got adapters=3", [3]),
        ("adapters must be a sequence; got adapters=0", 0),
    ):
        with pytest.raises(ValueError, match=message):
            engine.update_weights(random_weights(), adapters=adapters)


TIER = "pass prefix_cache=True, a max_model_len of at least 4, and no windows; got max_model_len="
HOST = dict(num_blocks=9, host_cache_bytes=10**6)
OPTIONS = {
    "seed must be at least 0; got seed=-1": dict(seed=-1),
    "windows must be a sequence; got windows=8": dict(windows=8),
    "widths must be a sequence; got widths=8": dict(widths=8),
    "widths must be at least 1; got widths=0": dict(widths=(0,)),
    r"max_num_seqs \+ chunk_tokens = 22; got widths=\(22,\)": dict(widths=(22,)),
    r"22 rows is used; leave out \[10, 15\]": dict(widths=(7, 10, 15)),
    "num_adapters must be at most 65536": dict(num_adapters=2**31),
    "max_logprobs must be at least 0": dict(max_logprobs=-1),
    f"max_logprobs must be at most {VOCAB}, the logits of a token; got": dict(max_logprobs=VOCAB + 1),
    "at least 2; got num_blocks=1": dict(num_blocks=1),
    r"head must return logits \[6, vocab\]; got \[1, 32\]": dict(head=lambda weights, hidden: hidden[:1]),
    r"head must return logits \[6, vocab\]; got NoneType": dict(head=lambda weights, hidden: None),
    rf"head must return logits \[6, {VOCAB + 1}\]; got \[6, {VOCAB}\]": dict(vocab_size=VOCAB + 1),
    rf"head=None must return logits \[6, {VOCAB}\]; got \[6, 32\]": dict(head=None, vocab_size=VOCAB),
    "num_speculative_tokens must be at least 0": dict(num_speculative_tokens=-1),
    "num_speculative_tokens must be an int": dict(num_speculative_tokens=True),
    f"num_speculative_tokens must be at most {MAX_TOKENS}; got num_speculative_tokens=1000000": dict(
        num_speculative_tokens=10**6, widths=WIDTHS
    ),
    "drafts are verified in steps of widths.*pass widths": dict(num_speculative_tokens=2, widths=()),
    "draft must be a function, .* of at least 1; got draft=3": dict(draft=3, num_speculative_tokens=1),
    "at least 1; got draft=<function.*num_speculative_tokens=0": dict(draft=lambda *_: None),
    r"draft must return int32 \[6, 2\], .* got int32 \[6\]": dict(
        draft=lambda weights, tokens, lengths, hidden: lengths, num_speculative_tokens=2, widths=(6,)
    ),
    TIER + "48": HOST,
    TIER + "3": HOST | dict(prefix_cache=True, max_model_len=BLOCK_SIZE - 1),
    TIER + "48.*windows": HOST | dict(prefix_cache=True, windows=(None, 8)),
    "at least 8192, the bytes of a page": HOST | dict(prefix_cache=True, host_cache_bytes=1024),
}


@pytest.mark.parametrize("message", OPTIONS)
def test_invalid_options_are_refused(message):
    with pytest.raises(ValueError, match=message):
        create_engine(**OPTIONS[message])


def test_invalid_caches_and_weights_are_refused():
    first, second = create_cache(4), create_cache(4)
    donated = create_cache(4)
    donated.k.delete()
    for message, cache, weights in (
        (r"caches\[0\].k and caches\[2\].k are one array. Make a cache for each layer", [first, second, first], {}),
        ("caches.k and caches.v are one array", dataclasses.replace(first, v=first.k), {}),
        ("these caches were donated, perhaps to another engine", donated, {}),
        ("caches must be a pytree of KVCaches", [jnp.ones(3)], {}),
        (r"the one at \['head'\] was deleted.* your learner returned", first, deleted_weights()),
        (r"got <built-in .* at \['layers'\]\[1\].*eqx.partition\(module, eqx.is_array\)", first, MODULE),
        ("got 'bfloat16' at its root", first, "bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            create_engine(cache=cache, weights=weights)


AUX = r"aux \[22, \.\.\.\], one row for each token"
ROWS = r"apply must return hidden \[22, \.\.\.\], one row for each token"
RETURNED = {  # returned by `toy_model.apply`: caches and hidden states
    rf"{ROWS}; got \[2, 32\] at its root": lambda cache, hidden: (cache, hidden[:2]),
    ROWS: lambda cache, hidden: (hidden, cache),
    rf"{AUX}; got \[3\]": lambda *both: (*both, jnp.zeros(3)),
    rf"{AUX}.*; got int at \['experts'\]": lambda *both: (*both, {"experts": 1}),
    "aux must be of 8, 16 or 32 bits or bool; got int4 at its root": lambda *both: (*both, jnp.zeros(22, jnp.int4)),
    r"aux must be of .*; got complex64 at \['z'\]": lambda *both: (*both, {"z": jnp.zeros(22, jnp.complex64)}),
    "caches like those it was given; got 0 of 1": lambda cache, hidden: ((), hidden),
    r"caches like those it was given; .* was float32\[.*\] and is not there": lambda cache, hidden: (hidden, hidden),
    r"\(caches, hidden\) or \(caches, hidden, aux\); got 1": lambda cache, hidden: hidden,
    r"\(caches, hidden\) or \(caches, hidden, aux\); got 4": lambda *_: (1, 2, 3, 4),
}


@pytest.mark.parametrize("message", RETURNED)
def test_invalid_results_of_a_model_are_refused(message):
    with pytest.raises(ValueError, match=message):
        create_engine(model=lambda *args: RETURNED[message](*toy_model.apply(*args)))


def test_models_that_misuse_their_caches_are_refused():
    def write(weights, tokens, positions, caches, step, *, twice=False, keep=True):
        cache, hidden = toy_model.apply(weights, tokens, positions, caches, step)
        if twice:
            return toy_model.apply(weights, tokens, positions, cache if keep else caches, step)
        return cache if keep else caches, hidden

    def read_two(weights, tokens, positions, caches, step):
        caches = iter([caches])
        return toy_model.apply(weights, tokens, positions, next(caches) and next(caches), step)

    for message, model in (
        ("two layers write .* in one step", functools.partial(write, twice=True)),
        ("two layers write .* in one step", functools.partial(write, twice=True, keep=False)),
        ("no layer wrote caches. Call `cache, out = step.attend", functools.partial(write, keep=False)),
        ("apply asked for more caches than the engine's 1", read_two),
    ):
        with pytest.raises(ValueError, match=message):
            create_engine(model=model)


def map_once(layer):
    return lambda tokens: jax.lax.map(layer, tokens[None])[0]


@pytest.mark.parametrize("transform", [jax.remat, jax.jit, map_once, nnx.remat])
@pytest.mark.parametrize("name", ["caches.k", "hidden"])
def test_values_that_leave_a_transformation_by_a_closure_are_refused(transform, name):
    def model(weights, tokens, positions, cache, step):
        kept = []

        def layer(tokens):
            kept.append(toy_model.apply(weights, tokens, positions, cache, step))
            return kept[0][1]

        hidden = transform(layer)(tokens)
        return (kept[0][0], hidden) if name == "caches.k" else (cache, kept[0][1])

    with pytest.raises(ValueError, match=f"apply returned {name} from inside a function that it gave to remat"):
        create_engine(model=model)


@pytest.mark.parametrize(
    ("of_jax", "cuda", "of_nccl", "flags", "is_told"),
    [
        ((0, 12, 0), 13, "2.28.9", "", True),
        ((0, 12, 0), 12, "2.27.7", "--xla_dump_to=x", True),
        ((0, 12, 0), 13, "2.29.2", "", False),
        ((0, 11, 2), 13, "2.28.9", "", False),
        ((0, 12, 0), 13, "2.28.9", SUMS_BY_NCCL, False),
        ((0, 12, 0), 13, None, "", False),  # NCCL of the system
    ],
)
def test_an_nccl_too_old_for_sums_is_told(monkeypatch, of_jax, cuda, of_nccl, flags, is_told):
    versions = {f"jax-cuda{cuda}-plugin": "0.12.0", f"nvidia-nccl-cu{cuda}": of_nccl}

    def version(name):
        if (found := versions.get(name)) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(jax, "__version_info__", of_jax)
    monkeypatch.setenv("XLA_FLAGS", flags)
    with warnings.catch_warnings(action="always", record=True) as told:
        warn_of_old_nccl()
    found = [str(each.message) for each in told]
    assert len(found) == is_told
    assert all(f"NCCL {of_nccl} is too old" in text and f"nvidia-nccl-cu{cuda}" in text for text in found)
