"""examples/beam_search.py against a plain beam search with no cache and no sharing; of width 1 it is greedy."""

import re

import beam_search
import numpy as np
import pytest
from generation import start

from tests.tiny_checkpoint import greedy, next_logits

PROMPTS = ["Hello there, paged world", "a", "The quick brown fox"]
STEPS = 12


@pytest.fixture(scope="module")
def prompts(tiny):
    return [tiny.tokenizer.encode(prompt) for prompt in PROMPTS]


def plain_beam_search(tensors, prompt, width, length_penalty, eos_ids):
    """[(score, tokens)], the best first."""
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
    """Two that stand inside the best continuations, to be taken for eos."""
    best = plain_beam_search(tiny.tensors, prompts[0], 2, 0.0, ())
    return best[0][1][4], best[1][1][7]


@pytest.mark.parametrize(("width", "length_penalty"), [(4, 1.0), (3, 0.0)])
def test_hypotheses_are_those_of_a_plain_search(tiny, prompts, width, length_penalty):
    eos_ids = frequent_tokens(tiny, prompts)
    found, beams = search(tiny, prompts, width, length_penalty=length_penalty, eos_ids=eos_ids)
    lengths = set()
    for prompt, hypotheses in zip(prompts, found, strict=True):
        expected = plain_beam_search(tiny.tensors, prompt, width, length_penalty, eos_ids)
        assert [one.tokens for one in hypotheses] == [tokens for _, tokens in expected]
        np.testing.assert_allclose([one.score for one in hypotheses], [score for score, _ in expected], rtol=1e-4)
        lengths |= {len(one.tokens) for one in hypotheses}
    assert len(lengths) > 1  # some did end early
    assert beams.allocator.check() == ()
    assert int(beams.allocator.num_held) == 0
    assert int(beams.peak_blocks) < int(beams.peak_unshared)


def test_one_beam_is_greedy(tiny, prompts):
    eos = greedy(tiny.tensors, prompts[0], 5)[-1]
    expected = [greedy(tiny.tensors, prompt, STEPS, eos) for prompt in prompts]
    assert min(map(len, expected)) < STEPS == max(map(len, expected))
    found, _ = search(tiny, prompts, 1, eos_ids=(eos,))
    assert [one.tokens for (one,) in found] == expected


def test_a_beam_that_finds_no_block_is_given_up_and_the_others_go_on(tiny, prompts, monkeypatch):
    def small(*arguments, num_spared, **options):
        return start(*arguments, num_spared=num_spared, **options | {"num_blocks": 26})

    monkeypatch.setattr(beam_search, "start", small)
    found, beams = search(tiny, prompts, 3)
    assert 0 < sum(map(len, found)) < 9
    assert beams.allocator.check() == ()
    assert int(beams.allocator.num_held) == 0


def test_what_a_person_sees(tiny, capsys):
    beam_search.main(["--model", str(tiny.path), "--max-new-tokens=6", "--width=2", "--block-size=4", "--prompt=hello"])
    out = capsys.readouterr().out
    assert len(re.findall(r"^\[0\] hello\n(-->  -\d\.\d{3}  .*\n){2}\n", out)) == 1
    assert re.search(
        r"blocks:  \d of 4 tokens in use at the peak where a loop that never shares takes \d: \d saved", out
    )


def test_refusals_are_one_sentence_and_exit_code_2(tiny, capsys):
    for arguments, message in (
        (["--model", "/nowhere", "--prompt=a"], "There is no checkpoint at /nowhere."),
        (["--model", str(tiny.path)], "There is no prompt; pass --prompt TEXT or a --prompt-file that has a line."),
        (["--model", str(tiny.path), "--prompt=a", "--block-size=900000000"], "A pool of 9 blocks of 900000000"),
    ):
        with pytest.raises(SystemExit, match="2"):
            beam_search.main(arguments)
        (line,) = capsys.readouterr().err.splitlines()
        assert f": {message}" in line
