"""The examples of the README and the docs run, and their links lead somewhere."""

import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent
PAGES = [str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("docs/**/*.md"))]


def test_the_readme_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    with jax.numpy_dtype_promotion("strict"):
        names: dict = {}
        exec(code, names)
    assert names["out"].shape == (4, 8, 64)
    assert names["ok"].all()
    assert len(code.strip().splitlines()) <= 12


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in (ROOT / page).read_text()])
def test_the_examples_of_the_docs_run(page):
    for code in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        with jax.numpy_dtype_promotion("strict"):
            exec(code, {})


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *PAGES])
def test_links_and_named_files_exist(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target
    for target in re.findall(r"`((?:examples|tests|benchmarks|docs|jaxpaged|tools)/[\w./-]+)`", text):
        assert (ROOT / target).exists(), target
