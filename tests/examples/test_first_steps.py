"""The notebook's cells run, and print the outputs that it stores."""

import contextlib
import io
import json
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_steps.ipynb"


def test_the_cells_of_the_notebook_print_what_it_stores():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict = {}
    for cell in cells:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec("".join(cell["source"]), names)
        assert printed.getvalue() == "".join(text for output in cell["outputs"] for text in output["text"])
    assert sum(bool(cell["outputs"]) for cell in cells) >= 3
