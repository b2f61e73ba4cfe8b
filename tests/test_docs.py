"""The examples of the README and the docs run, and their links lead somewhere."""

import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent


def test_the_readme_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    with jax.numpy_dtype_promotion("strict"):
        names: dict = {}
        exec(code, names)
    assert names["out"].shape == (4, 8, 64)
    assert names["ok"].all()
    assert len(code.strip().splitlines()) <= 12


@pytest.mark.parametrize("page", [page.name for page in ROOT.glob("docs/*.md") if "```python" in page.read_text()])
def test_the_examples_of_the_docs_run(page):
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL):
        with jax.numpy_dtype_promotion("strict"):
            exec(code, {})


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))])
def test_links_and_named_files_exist(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target
    for target in re.findall(r"`((?:examples|tests|benchmarks|docs|jaxpaged|tools)/[\w./-]+)`", text):
        assert (ROOT / target).exists(), target
