"""Signals while the host writes the books of an engine, or waits for its thread: nothing is left half done."""

import contextlib
import signal
import threading
from collections.abc import Iterable, Iterator

# Handlers of these may raise: Ctrl-C, the end of a job, its preemption, a time limit. Windows lacks some.
NAMES = "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGTERM", "SIGALRM", "SIGINT"
SIGNALS = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Inside, the handlers in Python of these signals wait. At the end each runs once if its signal came.

    Never wait for the device inside. Other threads than the main one get no interrupts, and change no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: dict[int, None] = {}  # in the order in which they came
    with contextlib.ExitStack() as stack:
        stack.callback(raise_each, held)
        for number in SIGNALS:
            if callable(handler := signal.getsignal(number)):
                stack.callback(signal.signal, number, handler)
                signal.signal(number, lambda number, frame: held.setdefault(number))
        yield


def raise_each(numbers: Iterable[int]) -> None:
    """Gives each signal to its handler, even if the handler of another raises."""
    with contextlib.ExitStack() as stack:
        for number in reversed([*numbers]):  # the stack calls the last one first
            stack.callback(signal.raise_signal, number)


class Latch:
    """A flag that one thread sets and another waits for.

    An interrupted `wait` changes nothing. In `threading.Event` and `concurrent.futures.wait` it may release a lock that
    the other thread has, which ends that thread.
    """

    def __init__(self) -> None:
        self.is_set, self._lock = False, threading.Lock()
        self._lock.acquire()

    def set(self, _: object = None) -> None:
        self.is_set = True
        self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Whether it is set within this time."""
        return self.is_set or self._lock.acquire(timeout=seconds)
