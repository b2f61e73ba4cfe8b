"""examples/beam_search.py against a plain beam search without cache or sharing. Width 1 is greedy."""

from types import SimpleNamespace

import numpy as np
import pytest

import beam_search
from lib.start import start
from tests.examples.compiled_examples import read_compiled
from tests.examples.tiny_checkpoint import EOS, greedy, next_logits

pytestmark = pytest.mark.slow

PROMPTS = ["Hello there, paged world", "a", "The quick brown fox"]
STEPS = 12


@pytest.fixture(scope="module")
def prompts(tiny):
    return [tiny.tokenizer.encode(prompt) for prompt in PROMPTS]


def plain_beam_search(tensors, prompt, width, length_penalty, eos_ids):
    """[(score, tokens)], best first."""
    running, complete = [(0.0, [])], []
    for step in range(STEPS):
        continued = []
        for total, tokens in running:
            logits = next_logits(tensors, prompt + tokens)
            log_probabilities = logits - np.logaddexp.reduce(logits)
            continued += [(total + float(value), [*tokens, i]) for i, value in enumerate(log_probabilities)]
        best = sorted(continued, key=lambda one: -one[0])[: width - len(complete)]
        ended = [one for one in best if one[1][-1] in eos_ids or step + 1 == STEPS]
        complete, running = complete + ended, [one for one in best if one not in ended]
        if not running:
            break
    scored = [(total / len(tokens) ** length_penalty, tokens) for total, tokens in complete]
    return sorted(scored, key=lambda one: -one[0])


def search(tiny, prompts, width, **options):
    return beam_search.beam_search(
        tiny.model, tiny.config, prompts, width=width, max_new_tokens=STEPS, block_size=4, **options
    )


def frequent_tokens(tiny, prompts):
    """Two tokens inside the best continuations, to use as eos."""
    best = plain_beam_search(tiny.tensors, prompts[0], 2, 0.0, ())
    return best[0][1][4], best[1][1][7]


def test_hypotheses_equal_a_plain_search(tiny, prompts, monkeypatch):
    checked = read_compiled(monkeypatch, beam_search, "search")
    eos_ids = frequent_tokens(tiny, prompts)
    lengths, orders = set(), []
    for length_penalty in (0.0, 1.0, 3.0):
        found, beams = search(tiny, prompts, 4, length_penalty=length_penalty, eos_ids=eos_ids)
        for prompt, hypotheses in zip(prompts, found, strict=True):
            expected = plain_beam_search(tiny.tensors, prompt, 4, length_penalty, eos_ids)
            assert [one.tokens for one in hypotheses] == [tokens for _, tokens in expected]
            np.testing.assert_allclose([one.score for one in hypotheses], [score for score, _ in expected], rtol=1e-4)
            lengths |= {len(one.tokens) for one in hypotheses}
        orders.append([[one.tokens for one in hypotheses] for hypotheses in found])
        assert beams.allocator.broken_invariants() == ()
        assert int(beams.allocator.num_held) == 0
        assert int(beams.peak_blocks) < int(beams.peak_unshared)
    assert len(checked) == 3
    assert len(lengths) > 1  # some ended early, and their rank depends on the penalty
    assert orders[0] != orders[2]


def test_one_beam_is_greedy(tiny, prompts):
    first, *others = (greedy(tiny.tensors, prompt, STEPS) for prompt in prompts)
    eos = next(token for token in first if not any(token in other for other in others))
    expected = [greedy(tiny.tensors, prompt, STEPS, eos) for prompt in prompts]
    assert min(map(len, expected)) < STEPS == max(map(len, expected))
    found, _ = search(tiny, prompts, 1, eos_ids=(eos,))
    assert [one.tokens for (one,) in found] == expected


def test_a_beam_without_a_block_is_dropped_and_the_others_continue(tiny, prompts, monkeypatch):
    def small(*arguments, num_saved_blocks, **options):
        return start(*arguments, num_saved_blocks=num_saved_blocks, **options | {"num_blocks": 26})

    monkeypatch.setattr(beam_search, "start", small)
    found, beams = search(tiny, prompts, 3)
    assert 0 < sum(map(len, found)) < 9
    assert beams.allocator.broken_invariants() == ()
    assert int(beams.allocator.num_held) == 0


def test_printed_output(tiny, printed):
    found = [beam_search.Hypothesis(tiny.tokenizer.encode(text), score) for text, score in (("c", -1), ("d", -2))]
    blocks = SimpleNamespace(peak_blocks=np.array(5), peak_unshared=np.array(8))
    options = ["--max-new-tokens=6", "--width=2", "--block-size=4", "--length-penalty=0.5", "--prompt=ab"]
    lines, prompts, named = printed(beam_search, "beam_search", ([found], blocks), *options)
    sizes = dict(max_new_tokens=6, block_size=4, eos_ids=(EOS,), dtype="float32")
    assert (prompts, named) == (["ab"], dict(width=2, length_penalty=0.5, **sizes))
    assert lines == [
        *("[0] ab", "-->  -1.000  c", "-->  -2.000  d", ""),
        "blocks:  5 of 4 tokens in use at the peak; without sharing 8: 3 saved",
    ]
