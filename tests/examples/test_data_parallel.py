"""examples/data_parallel.py: the texts of one engine in the order of the prompts, from two engines."""

import asyncio
import re

import pytest

import data_parallel
from jaxpaged import SamplingParams
from lib.engine_runner import EngineFailedError
from lib.engine_thread import EngineThread
from lib.engines import Engines
from lib.router import Router
from tests.timed_engine import TimedEngine
from tests.toy_model import one_kind_of_steps

PROMPTS = ["one", "two words", "three", "four and five", "six", "seven", "eight", "nine", "ten", "eleven"]


@pytest.fixture
def engines(monkeypatch):
    """The `Engines` that each run of the program makes."""
    made = []

    def make(*arguments, **options):
        made.append(Engines(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(data_parallel, "Engines", make)
    return made


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_two_engines_give_the_texts_of_one_in_order(tiny, engines, capsys, temperature):
    def texts(num_engines):
        options = [f"--model={tiny.path}", "--dtype=float32", "--max-num-seqs=2", "--max-new-tokens=9"]
        options += [f"--temperature={temperature}", "--seed=5", f"--data-parallel={num_engines}"]
        with one_kind_of_steps():
            data_parallel.main([*options, *(f"--prompt={prompt}" for prompt in PROMPTS)])
        return capsys.readouterr().out

    one, two = texts(1), texts(2)
    assert re.findall(r"^(.*)\n--> ", two, re.MULTILINE) == PROMPTS
    assert two == one
    assert len(set(one.split("\n--> "))) == 1 + len(PROMPTS)
    assert all(thread.stats.num_generated for thread in engines[1].runners)


class NamedEngine(TimedEngine):
    """A `TimedEngine` that keeps the prompts, and fails at a prompt of -1."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.prompts = []

    def add_request(self, prompt, params):
        if prompt == [-1]:
            raise RuntimeError("broken")
        self.prompts.append(prompt)
        return super().add_request(prompt, params)


def serve(prompts, num_tokens, most):
    made = [NamedEngine(), NamedEngine()]
    engines = Engines(list(map(EngineThread, made)), most_completions=most, router=Router(4, has_affinity=True))
    requests = [(p, SamplingParams(max_tokens=n)) for p, n in zip(prompts, num_tokens, strict=True)]
    outputs = asyncio.run(data_parallel.generate(engines, requests))
    assert [len(output.outputs[0].token_ids) for output in outputs] == num_tokens
    return [engine.prompts for engine in made]


def test_an_engine_with_a_long_request_gets_fewer_others():
    first, second = serve([[i] for i in range(12)], [500, *[3] * 11], most=2)
    assert first == [[0]]
    assert second == [[i] for i in range(1, 12)]


def test_a_failed_engine_is_an_error():
    with pytest.raises(EngineFailedError):
        serve([[0], [-1], [2]], [5, 5, 5], most=3)
