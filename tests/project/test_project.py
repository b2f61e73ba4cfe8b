"""Project files: the workflow, the issue forms, the package's metadata, the citation."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import jaxpaged
from tests.mutants import MUTANTS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))


def test_the_workflow_runs_the_targets_of_contributing_on_every_python():
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    runs = workflow["jobs"]["make"]["strategy"]["matrix"]["include"]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {run["target"] for run in runs} == {"test", "docs", "release"} <= set(targets)
    (oldest,) = (line.partition(">=")[2].partition(",")[0] for line in PROJECT["dependencies"] if "jax>" in line)
    locked = re.search(r"^jax==(.*)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)[1]
    tested = [(run["python"], run["jax"]) for run in runs if run["target"] == "test"]
    assert tested == [*((python, locked) for python in PYTHONS), (PYTHONS[0], oldest)]
    assert [run["python"].split() for run in runs if run["target"] == "release"] == [PYTHONS]
    assert f">={PYTHONS[0]}" == PROJECT["requires-python"]
    assert workflow["jobs"]["make"]["steps"][-1] == {"run": "make ${{ matrix.target }} JAX=${{ matrix.jax }}"}


@pytest.mark.parametrize("form", sorted((ROOT / ".github/ISSUE_TEMPLATE").iterdir()), ids=lambda form: form.name)
def test_a_report_includes_the_table_of_the_self_test(form):
    form = yaml.safe_load(form.read_text())
    assert set(form) == {"name", "description", "body"}
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids)
    assert all(field["attributes"]["label"] for field in form["body"])
    required = [field["attributes"] for field in form["body"] if field["validations"]["required"]]
    assert any("python -m jaxpaged.selftest" in field["description"] for field in required)


def test_the_citation_agrees_with_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"message", "title"} <= set(citation)
    assert all(author["name"] for author in citation["authors"])
    assert (citation["cff-version"], citation["version"]) == ("1.2.0", jaxpaged.__version__)
    for field, name in {"abstract": "description", "license": "license", "keywords": "keywords"}.items():
        assert citation[field] == PROJECT[name]


def test_the_lock_and_the_extras_allow_the_same_jax():
    extras = PROJECT["optional-dependencies"]
    (ours,) = (line.removeprefix("jax") for line in PROJECT["dependencies"] if re.match(r"jax[<>=]", line))
    assert f"jaxlib{ours}" in PROJECT["dependencies"]
    for name in ("cuda12", "cuda13"):
        assert extras[name][0] == f"jax[{name}]{ours}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutants_text_occurs_once_and_its_tests_exist(mutant):
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    file, expression = mutant.tests.split("::")
    text = (ROOT / file).read_text()
    assert any(word in text for word in re.findall(r"\w+", expression) if word not in ("or", "and", "not"))
