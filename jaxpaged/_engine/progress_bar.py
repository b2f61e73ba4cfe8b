"""How far a long call is, as a line on stderr."""

import sys
import time

WIDTH = 30  # characters of the bar
INTERVAL = 0.2  # seconds between two looks of it


class ProgressBar:
    """A line that is written over itself: a bar, how many are done, and tokens a second."""

    def __init__(self, total: int):
        self._total = total
        self._begin = self._shown = time.perf_counter()

    def show(self, num_done: int, num_tokens: int) -> None:
        now = time.perf_counter()
        is_last = num_done == self._total
        if now - self._shown < INTERVAL and not is_last:
            return
        self._shown = now
        bar = ("#" * (WIDTH * num_done // self._total)).ljust(WIDTH, ".")
        rate = num_tokens / (now - self._begin)
        line = f"\r[{bar}] {num_done} of {self._total} requests, {rate:.0f} tokens a second "
        print(line, end="\n" if is_last else "", file=sys.stderr, flush=True)
