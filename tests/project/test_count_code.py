"""Counts of `tools/count_code.py`."""

import runpy
from pathlib import Path

TOOL = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "count_code.py"))
SOURCE = '''
"""Two words."""
import dataclasses
from pathlib import (
    Path,
)


def f(x):  # one more word
    """A docstring
    of five words."""
    return x + 1


class C:
    text = """no docstring"""

    def longer(self):
        y = 1
        return y
'''


def test_code_and_words():
    tokens, words = TOOL["count"](SOURCE)
    code = "def f ( x ) : return x + 1", "class C : text = '' def longer ( self ) : y = 1 return y"
    assert tokens == len(" ".join(code).split())
    assert words == 2 + 3 + 5


def test_branches_and_the_largest_function():
    source = "if a:\n    b\nelif c:\n    d\nelse:\n    e = f if g else [h for h in i if h or j]"
    assert TOOL["count_branches"](source) == 3
    assert TOOL["largest_function"](SOURCE) == (3, "longer")
