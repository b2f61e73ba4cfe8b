"""Runs `EngineLoop`s in processes of their own, which share no lock of Python and no GPU.

A process loads its model itself and creates its engine, from a `Recipe`. Requests reach it through a pipe, pickled, and
outputs return through it. The event loop reads the pipe; a thread writes it, so that the event loop never waits for it.
A process ends when its pipe does: no engine outlives the server.
"""

import asyncio
import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Hashable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any, Protocol

import jax

from jaxpaged import Engine, EngineStats
from lib.command_line import RequestError
from lib.engine_loop import Request
from lib.engine_pipe import OutputUnpacker, PackedRequest, RequestPacker
from lib.engine_runner import EngineRunner
from lib.tensor_parallel import DevicesError

START = "import sys; from lib.engine_child import main; main(int(sys.argv[1]))"


class Recipe(Protocol):
    """How another process makes an engine; it pickles."""

    def load(self) -> Any:
        """The model, which is also the argument of the functions of `EngineRunner.call`."""

    def create(self, model: Any) -> Engine: ...


class EngineProcesses:
    """Processes for engines, each with its own GPUs. They start at once, and import JAX while the caller goes on.

    Within a `with` block, an error ends them.

    Args:
        count: number of processes.
        num_devices: number of GPUs of each. Process i has the i-th group of the visible ones.
    """

    def __init__(self, count: int, *, num_devices: int = 1):
        self._count, self._num_devices = count, num_devices
        self._children = [Child(visible_gpus(i * num_devices, num_devices)) for i in range(count)]

    def __enter__(self) -> "EngineProcesses":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None:
            for child in self._children:
                child.close()

    def backend(self) -> str:
        """JAX's backend in all processes. Raises `DevicesError` if there are too few devices."""
        backends, counts = zip(*self._replies(self._children), strict=True)
        if "gpu" in backends:  # a process without a GPU has fallen back to its CPU
            found = sum(count for backend, count in zip(backends, counts, strict=True) if backend == "gpu")
            wanted = self._count * self._num_devices
        else:  # each process has CPU devices of its own
            found, wanted = min(counts), self._num_devices
        if found < wanted:
            raise DevicesError(f"JAX sees {found} devices; {wanted} were asked for.")
        return backends[0]

    def create(self, recipes: Sequence[Recipe]) -> list["EngineProcess"]:
        """Makes an engine in each process. `backend` must be called before.

        The models are loaded at once. The first engine is compiled alone: the others then find its program in JAX's
        persistent cache, and equal requests get equal tokens on each engine.

        Raises:
            RequestError: an engine cannot be made.
        """
        for child, recipe in zip(self._children, recipes, strict=True):
            child.send("make", recipe)
        self._replies(self._children)
        stats = []
        for children in (self._children[:1], self._children[1:]):
            for child in children:
                child.send("make")
            stats += self._replies(children)
        return [EngineProcess(child, first) for child, first in zip(self._children, stats, strict=True)]

    def _replies(self, children: Sequence["Child"]) -> list[Any]:
        """The next report of each child. An error of any is raised at once. Raises `RequestError`."""
        waiting, replies = {child.pipe: child for child in children}, {}
        while waiting:
            for pipe in wait(list(waiting)):
                child = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    name, reply = child.pipe.recv()
                except (EOFError, OSError):
                    name, reply = "failed", f"its process {child.wait()}"
                if name == "refused":
                    raise RequestError(reply)
                if name == "failed":
                    raise RequestError(f"Engine {self._children.index(child)} does not start: {reply}.")
                replies[child] = reply
        return [replies[child] for child in children]


def visible_gpus(start: int, count: int) -> str:
    """`CUDA_VISIBLE_DEVICES` of a process with some of the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(start + count)) if visible is None else visible.split(",")
    return ",".join(list(names)[start : start + count])


class Child:
    """Another process that runs `engine_child.main`, and the pipe to it."""

    def __init__(self, gpus: str):
        self.pipe, other = Pipe()
        settings = {
            "CUDA_VISIBLE_DEVICES": gpus,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir or "",
        }
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, str(other.fileno())],
                env=os.environ | settings,
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process, which then drains
            )

    def send(self, *message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `recv` then fails too
            self.pipe.send(message)

    def wait(self) -> str:
        """Waits for the end of the process, and describes it."""
        code = self.process.wait()
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def close(self) -> None:
        self.pipe.close()
        self.process.wait()


class EngineProcess[Key: Hashable](EngineRunner[Key]):
    """An engine in another process, made by `EngineProcesses`. The process ends with `running()`.

    Functions for `call`, and their results, must pickle.
    """

    loop_share = 0.8  # the event loop needs no lock of the engine

    def __init__(self, child: Child, stats: EngineStats):
        super().__init__(stats)
        self.child = child
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._requests, self._outputs = RequestPacker(self._send), OutputUnpacker()
        self._is_stopped = False

    def _start(self) -> None:
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        self._loop.add_reader(self.child.pipe.fileno(), self._read)

    def _pack(self, request: Request) -> PackedRequest:
        return self._requests.pack(request)

    def stop(self) -> None:
        self._is_stopped = True
        super().stop()

    def _send(self, name: str, *arguments: Any) -> None:
        self._outbox.put(pickle.dumps((name, *arguments)))

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the process has ended, and `_read` fails too
            while (message := self._outbox.get()) is not None:
                self.child.pipe.send_bytes(message)

    def _read(self) -> None:
        try:
            name, *arguments = self.child.pipe.recv()
        except (EOFError, OSError):
            self._finish(None)
            return
        if name in ("failed", "refused"):
            self._finish(RuntimeError(*arguments))
            return
        if name == "outputs":
            arguments[0] = self._outputs.unpack(arguments[0])
        self._receive(name, *arguments)

    def _finish(self, failure: BaseException | None) -> None:
        self._loop.remove_reader(self.child.pipe.fileno())
        if failure is not None:
            self._end(failure)
        self._finishing = asyncio.ensure_future(self._reap())

    async def _reap(self) -> None:
        """Waits for the end of the process."""
        self._outbox.put(None)
        await asyncio.to_thread(self._writer.join)
        end = await asyncio.to_thread(self.child.wait)
        self.child.pipe.close()
        if self.failure is None:
            was_asked = self._is_stopped and self.child.process.returncode == 0
            self._end(None if was_asked else RuntimeError(f"its process {end}"))
        self._ended.set()
