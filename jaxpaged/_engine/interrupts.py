"""Ctrl-C while the host's books of an engine are written: it waits until they balance."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Inside, SIGINT waits. At the end it goes to the handler that was there, which raises `KeyboardInterrupt`.

    Never wait for the device inside. Other threads than the main one get no interrupts, and change no handlers.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts = []
    signal.signal(signal.SIGINT, lambda *interrupt: interrupts.append(interrupt))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if interrupts:
            handler(*interrupts[0])
