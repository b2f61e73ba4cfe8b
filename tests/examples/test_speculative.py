"""examples/speculative.py: the tokens of plain greedy decoding, however many drafts are accepted."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import speculative
from lib.generation import generated
from tests.examples.compiled_examples import read_compiled
from tests.examples.tiny_checkpoint import greedy

pytestmark = pytest.mark.slow

PROMPTS = ["Hello there, paged world", "a", "one two one two one two", "The quick brown fox jumps over it"]
SIZES = dict(max_new_tokens=40, block_size=8)


@pytest.fixture(scope="module")
def prompts(tiny):
    return [tiny.tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def plain(tiny, prompts):
    return [greedy(tiny.tensors, prompt, 40, None) for prompt in prompts]


def cut(tokens, eos):
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


@pytest.mark.parametrize("num_branches", [1, 3])
def test_tokens_equal_plain_decoding(tiny, prompts, plain, monkeypatch, num_branches):
    checked = read_compiled(monkeypatch, speculative, "speculate")
    eos = plain[0][17]  # a generated token ends the sequences
    state, tally = speculative.decode_speculatively(
        tiny.model, tiny.config, prompts, **SIZES, ngram=1, num_draft=7, num_branches=num_branches, eos_ids=(eos,)
    )
    tokens = generated(state)
    assert tokens == [cut(row, eos) for row in plain]
    assert state.allocator.broken_invariants() == ()
    assert int(state.allocator.num_held) == 0
    assert not np.asarray(state.starved).any()
    accepted, steps = np.asarray(tally.accepted), np.asarray(tally.steps)
    assert [len(row) - 1 for row in tokens] == (accepted + steps).tolist()
    assert (accepted <= np.asarray(tally.drafted)).all()
    assert accepted.sum() > 0
    assert checked == [True]


def test_each_sequence_accepts_its_correct_drafts(tiny, prompts, plain, monkeypatch):
    """Drafts of the four rows are wrong never, always, at every third token and at every fifth token.

    The right branch is the second, then the third, the first, ... Others share its first token and are wrong after it.
    """
    wrong_at = np.array([[step % period == 0 for step in range(40)] for period in (99, 1, 3, 5)])
    told = jnp.asarray(np.where(wrong_at, (np.array(plain) + 1) % 300, plain), jnp.int32)

    def draft(text, begins, ends, *, ngram, num_draft, num_branches):
        generated = ends - (text.shape[1] - 40)
        place = generated[:, None] + jnp.arange(num_draft)[None]
        right = jnp.take_along_axis(told, jnp.minimum(place, 39), axis=1)
        wrong = right.at[:, 1:].set(7)
        is_right = jnp.arange(num_branches)[None] == generated[:, None] % num_branches
        branches = jnp.where(is_right[..., None], right[:, None], wrong[:, None])
        return branches, jnp.full((len(ends), num_branches), num_draft)

    monkeypatch.setattr(speculative, "draft", draft)
    speculative.speculate.clear_cache()
    state, tally = speculative.decode_speculatively(
        tiny.model, tiny.config, prompts, **SIZES, num_draft=5, num_branches=3
    )
    speculative.speculate.clear_cache()
    assert generated(state) == plain
    assert state.allocator.broken_invariants() == ()
    # 39 tokens after the first: 6, 1, 3 (up to the next wrong draft and the model's own token) and 5 per step.
    assert tally.steps.tolist() == [7, 39, 13, 8]
    assert (tally.steps + tally.accepted).tolist() == [39] * 4


@pytest.mark.parametrize(
    ("text", "begin", "end", "ngram", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], 0, 7, 2, [3, 4, 5]),
        ([1, 2, 3, 1, 2, 4, 8, 9, 1, 2], 0, 10, 2, [4, 8, 9]),  # the later of two matches
        ([1, 2, 3, 8, 8, 1, 2, 1, 2], 0, 9, 2, [3, 8, 8]),  # the match with enough tokens after it
        ([1, 1, 1], 0, 3, 1, [1, 1]),  # no match has enough tokens: all there are
        ([1, 2, 3, 4, 1, 2, 0, 0], 0, 6, 2, [3, 4, 1]),
        ([1, 2, 3, 4, 1, 2], 1, 6, 2, []),  # padding comes before the beginning
        ([1, 2, 3, 4, 1, 2], 0, 6, 3, []),
        ([0, 0, 5], 2, 3, 2, []),
    ],
)
def test_drafts(text, begin, end, ngram, expected):
    rows = jnp.asarray([text])
    how = dict(ngram=ngram, num_draft=3, num_branches=1)
    tokens, counts = speculative.draft(rows, jnp.array([begin]), jnp.array([end]), **how)
    assert tokens[0, 0, : int(counts[0, 0])].tolist() == expected


def test_branches_begin_with_different_tokens():
    rows = jnp.asarray([[1, 5, 6, 1, 7, 8, 1, 5, 9, 9, 1]])
    tokens, counts = speculative.draft(rows, jnp.array([0]), jnp.array([11]), ngram=1, num_draft=3, num_branches=3)
    assert tokens[0, :2].tolist() == [[5, 9, 9], [7, 8, 1]]
    assert counts.tolist() == [[3, 3, 0]]


def test_printed_output(tiny, printed):
    state = SimpleNamespace(tokens=np.array([tiny.tokenizer.encode("cdefgh")]), num_tokens=np.array([6]))
    result = state, speculative.Tally(np.array([2]), np.array([8]), np.array([3]))
    options = ["--ngram=3", "--num-draft=5", "--prompt=ab"]
    lines, prompts, named = printed(speculative, "decode_speculatively", result, *options)
    assert prompts == ["ab"]
    assert named.items() >= dict(ngram=3, num_draft=5, num_branches=2).items()
    assert lines == [
        *("[0] ab", "--> cdefgh"),
        *("    5 tokens in 2 steps: 3 of 8 drafted tokens accepted, 1.50 a step", ""),
    ]
