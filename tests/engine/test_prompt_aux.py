"""The `aux` of prompt tokens, with a model that shows which weights computed the keys and values of each position."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import SamplingParams
from tests.toy_model import (
    BLOCK_SIZE,
    FEATURES,
    HEAD_DIM,
    HEADS,
    MAX_TOKENS,
    TIGHT,
    VOCAB,
    apply_to_heads,
    assert_idle,
    counting,
    create_engine,
    finish,
    greedy,
    one_kind_of_steps,
    over_heads,
)

MOST = HEADS * HEAD_DIM  # positions whose weights a row can show
LAYERS, CHOSEN = 3, 2
STEMS = np.random.default_rng(0).integers(0, VOCAB, (3, MOST)).tolist()  # prompts begin alike


def weights_of(version):
    embedding = jax.random.normal(jax.random.key(0), (VOCAB, FEATURES))
    return {"embedding": embedding, "version": jnp.int32(version)}


def experts_of(tokens, positions, version):
    """int8 [tokens, LAYERS, CHOSEN]."""
    mixed = tokens * 31 + positions * 7 + version
    factors = np.arange(1, 1 + LAYERS * CHOSEN, dtype=np.int32).reshape(LAYERS, CHOSEN)
    return (mixed[:, None, None] * factors[None] % 127).astype("int8")


def apply(weights, tokens, positions, cache, step, window=None):
    """Attention's logits are 0, so that `out` is the mean of the values: 1 + version at the index of each position."""
    version = weights["version"]
    is_at = positions[:, None] == jnp.arange(MOST, dtype=jnp.int32)[None]
    v = jnp.where(is_at, 1 + version, 0).astype(jnp.float32).reshape(-1, HEADS, HEAD_DIM)
    cache, out = step.attend(jnp.zeros_like(v), jnp.zeros_like(v), v, cache, sliding_window=window)
    seen = out.reshape(-1, MOST) * (positions + 1).astype(jnp.float32)[:, None]
    aux = {
        "experts": experts_of(tokens, positions, version),
        "version": jnp.full(tokens.shape, version, jnp.int16),
        "seen": jnp.round(seen).astype(jnp.uint8),
    }
    return cache, weights["embedding"][tokens], aux


def head(weights, hidden):
    return hidden @ weights["embedding"].T


def create(*, window=None, **options):
    options = dict(vocab_size=VOCAB, prompt_aux=True, windows=(window,)) | options
    return create_engine(model=functools.partial(apply, window=window), head=head, weights=weights_of(0), **options)


def check(prompt, completion):
    """The prompt's `aux` belongs to its tokens, positions, and the weights that the last row saw."""
    text, end = np.array(prompt + completion.token_ids, np.int32), len(prompt) - 1
    seen = completion.aux["seen"][-1][:end].astype(np.int32) - 1
    assert completion.prompt_aux["version"].tolist() == seen.tolist()
    experts = np.concatenate([completion.prompt_aux["experts"], completion.aux["experts"]])
    versions = np.concatenate([seen, completion.weight_versions]).astype(np.int32)
    expected = experts_of(text[:-1], np.arange(len(text) - 1, dtype=np.int32), versions)
    assert experts.dtype == np.int8
    assert experts.tolist() == expected.tolist()


def request(rng):
    stem = STEMS[rng.integers(len(STEMS))]
    prompt = stem[: rng.integers(1, MOST - 3)] + rng.integers(0, VOCAB, rng.integers(0, 3)).tolist()
    params = SamplingParams(
        max_tokens=int(rng.integers(1, MAX_TOKENS - len(prompt) + 1)),
        temperature=float(rng.integers(2)),
        seed=int(rng.integers(2**31)),
        n=int(rng.integers(1, 4)),
        head_start=int(rng.integers(4)),
        prompt_logprobs=not rng.integers(8),
    )
    return prompt, params


CASES = {
    "plain": {},
    "tight": dict(num_blocks=TIGHT + 1),
    "tight and cached": dict(num_blocks=TIGHT + 1, prefix_cache=True),
    "narrow and cached": dict(prefix_cache=True, widths=(2, 3), max_num_seqs=4),
    "read once": dict(prefix_cache=True, shares=True),
    "drafts": dict(num_blocks=TIGHT + 1, prefix_cache=True, num_speculative_tokens=3, widths=(9,)),
    "exact": dict(num_blocks=TIGHT + 1, prefix_cache=True, batch_invariant=True, steps_per_slice=3),
    "host memory": dict(num_blocks=TIGHT + 1, prefix_cache=True, host_cache_bytes=2**18, chunk_tokens=6),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_under_random_loads_rows_belong_to_the_keys_and_values_in_use(name):
    has_more = CASES[name].keys() & {"widths", "shares"}
    with contextlib.nullcontext() if has_more else one_kind_of_steps():
        engine = create(**CASES[name])
    rng = np.random.default_rng(list(CASES).index(name))
    added, done, num_checked = {}, {}, 0
    with counting(engine) as counts:
        for i in range(120):
            if i % 25 == 24:
                engine.update_weights(weights_of(1 + i // 25))
            elif (action := rng.random()) < 0.5:
                prompt, params = request(rng)
                added[engine.add_request(prompt, params)] = prompt
            elif action < 0.95:
                done |= {output.request_id: output for output in engine.step()}
            elif action < 0.97 and added:
                engine.abort(int(rng.choice(list(added))))
            else:
                engine.score([request(rng)[0]], [[1, 2, 3]])
        done |= finish(engine)
    for request_id, prompt in added.items():
        for completion in done[request_id].outputs:
            if completion.finish_reason == "length":
                check(prompt, completion)
                num_checked += 1
            elif not completion.token_ids:
                assert completion.prompt_aux is None
    assert num_checked > 50
    if engine._options.num_blocks == TIGHT + 1:
        assert counts.num_preempted > 5
    if engine._options.prefix_cache:
        assert counts.num_found > 100
    if "host" in name:
        assert counts.num_brought > 0
    assert_idle(engine)


def test_blocks_that_replace_equal_ones_bring_their_aux():
    """The second request computes most blocks with new weights, and gets the ones of the first instead."""
    with one_kind_of_steps():
        engine = create(prefix_cache=True, chunk_tokens=4, steps_per_slice=1)
    prompt = STEMS[0][:26]
    engine.add_request(prompt, greedy(2))
    finds_nothing = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=True)
    second = engine.add_request(prompt, finds_nothing)
    while not any(output.finished for output in engine.step()):
        pass
    engine.update_weights(weights_of(1))
    (completion,) = finish(engine)[second].outputs
    check(prompt, completion)
    assert completion.prompt_aux["version"].tolist() == [0] * 24 + [1]


@pytest.mark.slow
def test_copies_that_fail_lose_no_aux(monkeypatch):
    with one_kind_of_steps():
        engine = create(**CASES["host memory"])
    copies, num_failed = engine._runner.tier._copies, dict.fromkeys(("take", "put", "bring"), 0)

    def failing(name):
        def run(*args):
            if args[-1] and not num_failed[name]:
                num_failed[name] += 1
                raise MemoryError("no room for a copy")
            return original(*args)

        original = getattr(copies, name)
        return run

    for name in num_failed:
        monkeypatch.setattr(copies, name, failing(name))
    prompts, outputs = [[i, *stem[:26]] for i in range(3) for stem in STEMS], {}
    for _ in range(3):
        added = {engine.add_request(prompt, greedy(8)): prompt for prompt in prompts}
        while engine.has_unfinished_requests:
            with contextlib.suppress(MemoryError):
                outputs |= {output.request_id: output for output in engine.step()}
        for request_id, prompt in added.items():
            check(prompt, outputs[request_id].outputs[0])
    assert set(num_failed.values()) == {1}
    assert engine.stats().num_brought > 0
    assert_idle(engine)


def test_a_rollout_has_the_aux_of_the_prompts_on_the_device():
    engine, params = create(prefix_cache=True), greedy(5)
    prompts = [STEMS[0][:9], STEMS[0][:13], [7]]
    outputs = engine.generate(prompts, params)
    rollout = engine.rollout(prompts, params)
    experts = rollout.prompt_aux["experts"]
    assert isinstance(experts, jax.Array)
    assert experts.sharding == rollout.tokens.sharding
    assert (experts.shape, experts.dtype) == ((3, 12, LAYERS, CHOSEN), jnp.int8)
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        (completion,) = output.outputs
        check(prompt, completion)
        end = len(prompt) - 1
        assert len(completion.prompt_aux["experts"]) == end
        assert experts[i, :end].tolist() == completion.prompt_aux["experts"].tolist()
        assert rollout.aux["experts"][i].tolist() == completion.aux["experts"].tolist()
        assert not experts[i, end:].any()


def test_a_completion_has_it_once_it_is_finished():
    engine = create(prefix_cache=True, steps_per_slice=2)
    outputs = list(engine.stream([STEMS[1][:6]], greedy(9)))
    assert [output.outputs[0].prompt_aux is not None for output in outputs] == [output.finished for output in outputs]
    assert len(outputs) > 2


def test_several_devices():
    def model(*args):
        _, tokens, positions, *_ = args
        return *apply_to_heads(*args), experts_of(tokens, positions, 0)

    options, _ = over_heads(2, num_blocks=25)
    with one_kind_of_steps():
        engine = create_engine(**options | dict(model=model), prompt_aux=True, prefix_cache=True)
    prompts = [STEMS[2][:18], STEMS[2][:14]]
    for _ in range(2):
        for prompt, output in zip(prompts, engine.generate(prompts, greedy(4)), strict=True):
            (completion,) = output.outputs
            text = np.array(prompt + completion.token_ids[:-1], np.int32)
            found = np.concatenate([completion.prompt_aux, completion.aux])
            assert found.tolist() == experts_of(text, np.arange(len(text), dtype=np.int32), 0).tolist()
    rollout = engine.rollout(prompts, greedy(4))
    assert rollout.prompt_aux.sharding == rollout.tokens.sharding
    assert engine.stats().num_found > 0


def test_engines_that_cannot_return_it_are_refused():
    def without_aux(*args):
        return apply(*args)[:2]

    with pytest.raises(ValueError, match=r"let apply return \(caches, hidden, aux\)"):
        create_engine(model=without_aux, head=head, weights=weights_of(0), prompt_aux=True)
    with pytest.raises(ValueError, match=r"needs a group of layers without a window.*got windows=\(8,\)"):
        create(prefix_cache=True, window=8)
    with pytest.raises(ValueError, match="prompt_aux must be True or False"):
        create(prompt_aux=1)


def test_without_a_prefix_cache_windows_need_no_pool():
    engine = create(window=BLOCK_SIZE)
    (output,) = engine.generate([STEMS[0][:30]], greedy(3))
    (completion,) = output.outputs
    text = np.array(STEMS[0][:29], np.int32)
    expected = experts_of(text, np.arange(29, dtype=np.int32), 0)
    assert completion.prompt_aux["experts"].tolist() == expected.tolist()
