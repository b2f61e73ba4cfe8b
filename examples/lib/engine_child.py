"""The process of an engine, the other side of `engine_process.py`."""

import gc
import os
import queue
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import jax

from lib.checkpoint import one_line
from lib.command_line import REFUSALS, refusal, start_backend
from lib.engine_loop import EngineLoop, Message
from lib.engine_pipe import OutputPacker, RequestUnpacker


def main(descriptor: int) -> None:
    """Runs an engine for the server at the other end of a pipe."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server drains, and then stops the engine
    child = EngineChild(Connection(descriptor))
    sys.excepthook = lambda kind, error, trace: child.fail(error)
    threading.excepthook = lambda hooked: child.fail(hooked.exc_value)
    child.run()


class EngineChild:
    """Makes an engine and runs it. The main thread calls the engine; another one reads the pipe."""

    def __init__(self, pipe: Connection):
        self._pipe, self._lock = pipe, threading.Lock()
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._requests, self._outputs = RequestUnpacker(), OutputPacker()

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        self._send("backend", (start_backend(), jax.local_device_count()))
        (recipe,) = self._inbox.get()
        model = recipe.load()
        self._send("loaded", None)
        self._inbox.get()  # its turn to compile
        engine = recipe.create(model)
        gc.collect()
        gc.freeze()  # as in serve.py
        self._send("created", engine.stats())
        EngineLoop(engine, self._report, model=model, inbox=self._inbox).run()

    def fail(self, error: BaseException | None) -> None:
        """Reports an error that nothing caught, and ends the process."""
        assert error is not None
        if (sentence := refusal(error)) is not None:
            self._send("refused", sentence)
        else:
            traceback.print_exception(error)
            self._send("failed", one_line(error.__cause__ or error))
        sys.stderr.flush()
        os._exit(1)

    def _read(self) -> None:
        while True:
            try:
                name, *arguments = self._pipe.recv()
            except (EOFError, OSError):
                os._exit(1)  # the server has ended
            if name == "keep_grammar":
                self._requests.keep_grammar(*arguments)
            elif name == "forget_grammar":
                self._requests.forget_grammar(*arguments)
            elif name == "make":  # the recipe, then nothing
                self._inbox.put(tuple(arguments))
            elif name == "add":
                requests = {number: self._requests.unpack(packed) for number, packed in arguments[0].items()}
                self._inbox.put(("add", requests))
            else:
                self._inbox.put((name, *arguments))

    def _report(self, name: str, *arguments: Any) -> None:
        if name == "outputs":
            outputs, *more = arguments
            arguments = self._outputs.pack(outputs), *more
        elif name == "answer":
            number, result, error = arguments
            if error is not None and not isinstance(error, REFUSALS):  # others may not pickle
                error = RuntimeError(one_line(error))
            arguments = number, result, error
        self._send(name, *arguments)

    def _send(self, *report: Any) -> None:
        with self._lock:
            try:
                self._pipe.send(report)
            except OSError:
                os._exit(1)  # the server has ended
