"""lib/engine_pipe.py: outputs and requests arrive as they were sent, and nothing is sent twice."""

import dataclasses
import gc
import pickle

import numpy as np

from jaxpaged import Completion, RequestOutput, SamplingParams
from jaxpaged.grammar import Vocabulary, compile_regex
from lib.engine_pipe import OutputPacker, OutputUnpacker, RequestPacker, RequestUnpacker


def completion(num_tokens, *, reason=None, **options):
    logprobs = [-0.5 * i for i in range(num_tokens)]
    likely = [{i: -0.1, i + 1: -2.0} for i in range(num_tokens)]
    return Completion(list(range(num_tokens)), logprobs, reason, [i // 3 for i in range(num_tokens)], likely, **options)


def plain(num_tokens, reason=None):
    return Completion([7] * num_tokens, None, reason, [0] * num_tokens)


OUTPUTS = [  # one list per step
    [(3, RequestOutput(0, [completion(0), completion(2)], False, [None, float("nan")], [None, {}]))],
    [(4, RequestOutput(1, [plain(1)], False)), (3, RequestOutput(0, [completion(1), completion(2)], False))],
    [(3, RequestOutput(0, [completion(5), completion(4, reason="stop")], False, [None, -1.0], [None, {3: -1.0}], 16))],
    [(4, RequestOutput(1, [plain(4, "length")], True))],
    [(3, RequestOutput(0, [completion(5, reason="abort"), completion(4, reason="stop")], True))],
    [(5, RequestOutput(2, [Completion([1], None, "stop", aux=np.ones(3), prompt_aux={"a": np.zeros(2)})], True))],
]


def test_outputs_are_equal_on_the_other_side():
    packer, unpacker = OutputPacker(), OutputUnpacker()
    for outputs in OUTPUTS:
        arrived = unpacker.unpack(pickle.loads(pickle.dumps(packer.pack(outputs))))
        for (number, sent), (arrived_number, output) in zip(outputs, arrived, strict=True):
            assert arrived_number == number
            expected = dataclasses.replace(sent, request_id=number)
            assert repr(output) == repr(expected)  # NaN and arrays have no equality
    assert packer._sent == unpacker._last == {}


def test_each_token_is_sent_once():
    packer, sent = OutputPacker(), []
    for num_tokens in (1, 2, 2, 5):
        ((_, [(token_ids, *_)], *_),) = packer.pack([(0, RequestOutput(0, [plain(num_tokens)], False))])
        sent.append(len(token_ids))
    assert sent == [1, 1, 0, 3]


def test_an_output_keeps_its_tokens_when_more_arrive():
    packer, unpacker = OutputPacker(), OutputUnpacker()
    first, second = (
        unpacker.unpack(packer.pack([(0, RequestOutput(0, [completion(n)], False))]))[0][1].outputs[0] for n in (1, 3)
    )
    assert (len(first.token_ids), len(first.logprobs), len(second.token_ids)) == (1, 1, 3)


def test_a_grammar_is_sent_once_and_forgotten_with_its_last_user():
    vocabulary = Vocabulary([b"a", b"b", None], end_token_ids=[2], cache_bytes=0)
    receiver, names = RequestUnpacker(), []

    def send(name, *arguments):
        names.append(name)
        getattr(receiver, name)(*pickle.loads(pickle.dumps(arguments)))

    packer = RequestPacker(send)

    def arrive(**params):
        return receiver.unpack(pickle.loads(pickle.dumps(packer.pack(([1], SamplingParams(**params))))))

    assert arrive(seed=1) == ([1], SamplingParams(seed=1))
    grammar, other = (compile_regex(text, vocabulary) for text in ("a+b", "b"))
    first, again, different = arrive(grammar=grammar, n=2), arrive(grammar=grammar), arrive(grammar=other)
    assert first[1].n == 2
    assert first[1].grammar is again[1].grammar is not different[1].grammar
    assert first[1].grammar.allowed_tokens(0).tolist() == [0]
    assert names == ["keep_grammar"] * 2
    del grammar
    gc.collect()
    assert names[2:] == ["forget_grammar"]
    assert arrive(grammar=other)[1].grammar is different[1].grammar
    assert names[3:] == []
