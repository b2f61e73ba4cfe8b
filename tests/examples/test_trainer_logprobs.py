"""benchmarks/models/trainer_logprobs.py: packed sequences have the model's logprobs, and others are noticed."""

import numpy as np
import pytest

from benchmarks.models.trainer_logprobs import Packed, scored, summary, trained
from tests.examples.tiny_checkpoint import next_logits


def test_packed_sequences_have_the_models_logprobs(tiny):
    prompts, completions = [[1, 2, 3], [4, 5]], [[6, 7], [8]]
    packed = Packed.of(prompts, completions)
    assert packed.is_new.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True]
    expected = []
    for prompt, more in zip(prompts, completions, strict=True):
        for i, token in enumerate(more):
            logits = next_logits(tiny.tensors, prompt + more[:i])
            expected.append(logits[token] - np.logaddexp.reduce(logits))
    for found in (
        way(tiny.model, packed, is_paged=is_paged) for way in (scored, trained) for is_paged in (False, True)
    ):
        assert summary(found, np.array(expected))["most_nats"] < 1e-3
        with pytest.raises(AssertionError, match="no logprobs of the same tokens"):
            summary(found, np.array(expected) - 3)
