"""Result files have one format, are named where they are used, and match the tables of docs/."""

import json
import re

import pytest

from benchmarks.figures import bars, memory, tables
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
def test_result_files_have_one_format(file):
    content = json.loads((RESULTS / file).read_text())
    assert [key for key in content if key not in ("settings", "note")] == KEYS
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", content["date"])
    assert content["points"]
    assert all(isinstance(point, dict) and point for point in content["points"].values())
    assert file.split("/")[0] in ("decisions", "cpu") or file.split("/")[0].upper() in content["device"]


def test_every_result_file_is_named_and_every_named_one_exists():
    assert set().union(*map(named, TEXTS.values())) == set(FILES)


def test_the_index_of_decisions_has_every_file_and_only_existing_rules():
    """Comments next to rules name the same files."""
    code = {path: text for path, text in TEXTS.items() if path.parts[0] in ("jaxpaged", "pallas_kernels")}
    index = (RESULTS / "decisions" / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .* \| `(\w+)` \|$", index, re.MULTILINE)
    files = {f"decisions/{file}.json" for _, file in rows}
    assert files == {file for file in FILES if file.startswith("decisions/")}
    assert files == {file for file in set().union(*map(named, code.values())) if file.startswith("decisions/")}
    defined = set(re.findall(r"^(?: *(?:def|class) )?(\w+)(?: = |[\[(:])", "\n".join(code.values()), re.MULTILINE))
    assert {rule for rule, _ in rows} <= defined, "rename these rules in the index, or remove them"


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.stem)
def test_tables_in_the_docs_match_the_files(page):
    text = page.read_text()
    assert tables.filled(text) == text, "run `python -m benchmarks.figures.tables`"
    wrong = re.sub(r"(<!-- table.*?\| )\d+\.\d+ \|", r"\g<1>0.0 |", text, count=1, flags=re.DOTALL)
    assert wrong != text
    assert tables.filled(wrong) == text


def texts(figure):  # matplotlib draws texts as shapes, after a comment
    return re.findall("<!-- (.*?) -->", figure.read_text())


@pytest.mark.parametrize("name", bars.FIGURES)
def test_bar_charts_in_the_docs_match_the_files(name, tmp_path):
    shown = texts(ROOT / "docs" / f"{name}.svg")
    bars.FIGURES[name](bars.points, tmp_path / "figure.svg")
    assert texts(tmp_path / "figure.svg") == shown, "run `python -m benchmarks.figures.bars`"

    def one_more(name):
        return {
            point: value | {"peers": {"fa3": {"us": 1.0}}, "tokens_per_s": 1.0, "teraflops_per_second": 1.0}
            for point, value in bars.points(name).items()
        }

    bars.FIGURES[name](one_more, tmp_path / "wrong.svg")
    assert texts(tmp_path / "wrong.svg") != shown


def test_the_figure_of_memory_in_the_docs_matches_its_program(tmp_path, monkeypatch):
    shown = texts(ROOT / "docs/memory.svg")
    memory.draw_memory(tmp_path / "figure.svg")
    assert texts(tmp_path / "figure.svg") == shown, "run `python -m benchmarks.figures.memory`"
    monkeypatch.setattr(memory, "SEATS", 200)
    memory.draw_memory(tmp_path / "wrong.svg")
    assert texts(tmp_path / "wrong.svg") != shown


def test_a_store_continues_its_own_file_and_refuses_another_machines(tmp_path):
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
