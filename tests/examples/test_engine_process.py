"""lib/engine_process.py with engines that only sleep: outputs, calls, failures, and the ends of both processes."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from jaxpaged import SamplingParams
from lib import engine_process
from lib.command_line import RequestError
from lib.engine_process import EngineProcesses, visible_gpus
from lib.engine_runner import EngineFailedError
from lib.engines import Engines
from lib.router import Router
from lib.tensor_parallel import DevicesError
from tests.examples.engine_recipes import TimedRecipe, describe_process, refuse


def start(*recipes):
    with EngineProcesses(len(recipes)) as processes:
        assert processes.backend() == "cpu"
        return processes.create(recipes)


def make_engines(*recipes):
    return Engines(start(*recipes), most_completions=4, router=Router(4))


def request(prompt, num_tokens):
    return prompt, SamplingParams(max_tokens=num_tokens)


async def last_output(engines, prompt, num_tokens):
    generation = engines.open(1)
    engines.start(generation, [request(prompt, num_tokens)])
    async for _, output in generation.outputs():
        last = output
    return last.outputs[0]


def test_requests_and_calls():
    engines = make_engines(TimedRecipe(slice_seconds=0.01))
    (runner,) = engines.runners

    async def use():
        async with engines.running():
            output = await last_output(engines, [1], 9)
            assert (output.token_ids, output.finish_reason) == (list(range(9)), "length")
            generation = engines.open(1)
            engines.start(generation, [request([1], 10**6)])
            engines.close(generation)
            (output,) = [output.outputs[0] async for _, output in generation.outputs() if output.finished]
            assert output.finish_reason == "abort"
            assert (await runner.call(describe_process))[0] == runner.child.process.pid != os.getpid()
            with pytest.raises(RuntimeError, match="not known"):
                await runner.call(refuse)
            assert (await last_output(engines, [1], 2)).token_ids == [0, 1]

    asyncio.run(use())
    assert runner.failure is None
    assert runner.child.process.returncode == 0


def test_failed_and_killed_engines():
    engines, ended = make_engines(TimedRecipe(), TimedRecipe(slice_seconds=0.01)), []
    engines.on_failure = lambda: ended.append(True)
    failing, killed = engines.runners

    async def use():
        async with engines.running():
            with pytest.raises(EngineFailedError):
                await last_output(engines, [-1], 3)
            assert (str(failing.failure), engines.working, ended) == ("broken", [1], [])
            assert len((await last_output(engines, [1], 3)).token_ids) == 3
            with pytest.raises(EngineFailedError):
                await failing.call(describe_process)
            waiting = asyncio.ensure_future(last_output(engines, [1], 10**6))
            await asyncio.sleep(0.1)
            os.kill(killed.child.process.pid, signal.SIGKILL)
            with pytest.raises(EngineFailedError):
                await waiting
            assert (str(killed.failure), ended) == ("its process was ended by SIGKILL", [True])

    asyncio.run(use())


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ("load", r"^Engine 1 does not start: there is no room\.$"),
        ("kill", r"^Engine 1 does not start: its process was ended by SIGKILL\.$"),
    ],
)
def test_an_engine_that_does_not_start_ends_the_others(fails, message, monkeypatch):
    children, create = [], engine_process.Child
    monkeypatch.setattr(engine_process, "Child", lambda gpus: children.append(create(gpus)) or children[-1])
    with pytest.raises(RequestError, match=message):
        start(TimedRecipe(), TimedRecipe(fails=fails))
    assert [child.process.poll() is not None for child in children] == [True, True]


def test_an_engine_ends_with_its_server():
    script = """if True:
        import os, signal
        from tests.examples.engine_recipes import TimedRecipe
        from tests.examples.test_engine_process import start

        runners = start(TimedRecipe())
        os.kill(os.getpid(), signal.SIGKILL)
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    # The engine has the same stdout: `run` returns when both have ended.
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    ("visible", "groups"),
    [(None, ["0,1", "2,3"]), ("5,3,2,7", ["5,3", "2,7"]), ("4,1,0", ["4,1", "0"]), ("", ["", ""])],
)
def test_each_process_sees_its_own_gpus(monkeypatch, visible, groups):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [visible_gpus(2 * i, 2) for i in range(2)] == groups


@pytest.mark.parametrize(
    ("replies", "backend", "message"),
    [
        ([("gpu", 2), ("gpu", 2)], "gpu", None),
        ([("gpu", 2), ("gpu", 1)], None, "JAX sees 3 devices; 4 were asked for."),
        ([("gpu", 2), ("cpu", 8)], None, "JAX sees 2 devices; 4 were asked for."),
        ([("cpu", 2), ("cpu", 2)], "cpu", None),
        ([("cpu", 1), ("cpu", 1)], None, "JAX sees 1 devices; 2 were asked for."),
    ],
)
def test_too_few_devices_are_refused(monkeypatch, replies, backend, message):
    monkeypatch.setattr(engine_process, "Child", lambda gpus: None)
    monkeypatch.setattr(EngineProcesses, "_replies", lambda *_: replies)
    processes = EngineProcesses(2, num_devices=2)
    if message is None:
        assert processes.backend() == backend
    else:
        with pytest.raises(DevicesError, match=message):
            processes.backend()
