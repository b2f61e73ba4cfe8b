"""Result files have one form, are named where they are used, and docs/ says what they hold."""

import json
import re

import pytest

from benchmarks.figures import tables
from benchmarks.harness import Store

ROOT, RESULTS = tables.ROOT, tables.RESULTS
FILES = [str(path.relative_to(RESULTS)) for path in sorted(RESULTS.rglob("*.json"))]
KEYS = ["device", "driver", "jax", "commit", "date", "command", "points"]
FOLDERS = ("jaxpaged", "pallas_kernels", "benchmarks", "docs", "examples")
TEXTS = {
    path.relative_to(ROOT): path.read_text()
    for path in [
        *ROOT.glob("*.md"),
        *(p for folder in FOLDERS for end in ("py", "md") for p in (ROOT / folder).rglob(f"*.{end}")),
    ]
}


def named(text: str) -> set[str]:
    """The result files that a text names: `h100/decode.json`, or in a comment of a rule [plans_h100, seats_h100]."""
    text = re.sub(r"\n *# *", " ", text)  # a comment of several lines as one
    brackets = re.findall(r"\[((?:\w+_h\d00[,\s]*)+)(?: of benchmarks/results/decisions/)?\]", text)
    decisions = {f"decisions/{name}.json" for found in brackets for name in re.findall(r"\w+_h\d00", found)}
    return decisions | set(re.findall(r"\b((?:h100|h200|cpu|decisions)/\w+\.json)", text))


@pytest.mark.parametrize("file", FILES)
def test_a_result_file_has_the_one_form(file):
    content = json.loads((RESULTS / file).read_text())
    assert [key for key in content if key not in ("settings", "note")] == KEYS
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", content["date"])
    assert content["points"]
    assert all(isinstance(point, dict) and point for point in content["points"].values())
    assert file.split("/")[0] in ("decisions", "cpu") or file.split("/")[0].upper() in content["device"]


def test_every_result_file_is_named_and_every_named_one_exists():
    assert set().union(*map(named, TEXTS.values())) == set(FILES)


INDEX = RESULTS / "decisions" / "README.md"
DECISIONS = re.findall(r"^\| `(\w+)` \| (.*) \| `(\w+)` \|$", INDEX.read_text(), re.MULTILINE)  # rule, texts, file


def test_the_index_of_decisions_has_every_file_and_the_rules_that_there_are():
    code = {path: text for path, text in TEXTS.items() if path.parts[0] in ("jaxpaged", "pallas_kernels")}
    indexed = {f"decisions/{file}.json" for *_, file in DECISIONS}
    assert indexed == {file for file in FILES if file.startswith("decisions/")}
    defined = {name for text in code.values() for name in re.findall(r"^ *(?:def|class) (\w+)|^(\w+) = ", text, re.M)}
    missing = {rule for rule, *_ in DECISIONS} - {name for pair in defined for name in pair}
    assert not missing, f"{INDEX} names rules that the code has no more: rename them there, or remove them"
    beside = {file for file in set().union(*map(named, code.values())) if file.startswith("decisions/")}
    assert beside == indexed, f"the comments beside rules, and {INDEX}, name other files"


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.stem)
def test_a_page_says_what_the_files_hold(page):
    text = page.read_text()
    assert tables.filled(text) == text, "run `python -m benchmarks.figures.tables`"
    before, mark, tables_and_more = text.partition("<!-- table")
    wrong = before + mark + re.sub(r"\| \d+\.\d+ \|", "| 0.0 |", tables_and_more, count=1)
    assert wrong != text
    assert tables.filled(wrong) == text


def test_every_table_stands_on_a_page():
    found = [name for page in tables.PAGES for name in re.findall(r"<!-- table: (.*?) -->", page.read_text())]
    assert set(found) == set(tables.TABLES)


def test_a_store_goes_on_with_its_own_file_and_refuses_another_machines(tmp_path):
    path = tmp_path / "h100" / "toy.json"
    Store(path, seed=1).add("first", {"us": 1.0})
    again = Store(path, seed=1)
    again.add("second", {"us": 2.0})
    content = json.loads(path.read_text())
    assert list(content["points"]) == ["first", "second"]
    assert [key for key in content if key != "settings"] == KEYS
    with pytest.raises(SystemExit, match="other settings"):
        Store(path, seed=2)
    path.write_text(json.dumps(content | {"device": "another"}))
    with pytest.raises(SystemExit, match="another machine"):
        Store(path, seed=1)
