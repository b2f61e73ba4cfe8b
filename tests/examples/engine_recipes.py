"""Engines for tests of other processes, and functions for `EngineRunner.call`. Processes import this module."""

import dataclasses
import gc
import itertools
import os
import signal
import time

from jaxpaged import EngineStats, SamplingParams
from tests.timed_engine import TimedEngine


@dataclasses.dataclass(frozen=True)
class TimedRecipe:
    """A `TimedEngine` that fails at a prompt of -1. `fails` names the step of the start that fails."""

    slice_seconds: float = 0.0
    fails: str = ""

    def load(self):
        if self.fails == "load":
            raise RuntimeError("there is no room")
        if self.fails == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return self

    def create(self, model):
        engine = TimedEngine(slice_seconds=model.slice_seconds)
        engine._stats = EngineStats(max_num_seqs=2, num_free_blocks=100)
        add_request = engine.add_request

        def add(prompt, params):
            if prompt == [-1]:
                raise RuntimeError("broken")
            return add_request(prompt, params)

        engine.add_request = add
        return engine


def hold(gate, model, *, after=0):
    """Lets the engine do `after` steps, and no more while there is no file `gate`. Later steps are slow: messages from
    before the gate opened arrive between them on a busy machine too."""

    def change(engine):
        step, num_steps = engine.step, itertools.count()

        def held(**how):
            if next(num_steps) >= after:
                while not gate.exists():
                    time.sleep(0.005)
                time.sleep(0.05)
            return step(**how)

        engine.step = held

    return change


def release(model):
    return lambda engine: delattr(engine, "step")  # the class has one


def describe_process(model):
    """The id of the engine's process, and its GPUs."""
    return lambda engine: (os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"])


def count_frozen(model):
    return lambda engine: gc.get_freeze_count()


def refuse(model):
    raise KeyError("not known")


def count_requests(model):
    """The engine's requests, and the blocks that they hold."""

    def count(engine):
        used = engine._options.num_blocks - 1 - int(engine._runner.state.allocator.num_free)
        return len(engine._books.requests), used

    return count


def sample(prompt, model):
    """Tokens of a request without a seed. The seed that the engine chooses depends on the request's id too."""

    def generate(engine):
        engine._books.next_id = 1000
        (output,) = engine.generate([prompt], SamplingParams(max_tokens=20))
        return output.outputs[0].token_ids

    return generate


def continue_greedily(prompt, params, model):
    return lambda engine: engine.generate([prompt], params)[0].outputs[0].token_ids
