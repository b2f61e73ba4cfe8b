"""Examples of the README and the docs run, links resolve, and the site has every public name."""

import ast
import inspect
import re
import tomllib
from pathlib import Path

import jax
import pytest

import jaxpaged
import jaxpaged.linen
import jaxpaged.nnx
from tests.project.doc_code import mistakes

pytestmark = pytest.mark.usefixtures("one_kind")

ROOT = Path(__file__).parents[2]
PAGES = [str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("docs/**/*.md"))]
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (
        jaxpaged,
        jaxpaged.ops,
        jaxpaged.scheduling,
        jaxpaged.grammar,
        jaxpaged.debug,
        jaxpaged.nnx,
        jaxpaged.linen,
    )
    for name in module.__all__
}


def blocks(page, kind="python"):
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run(code):
    names: dict = {}
    with jax.numpy_dtype_promotion("strict"):
        exec(code, names)
    return names


def test_the_readme_runs(capsys):
    attention, _, model = blocks("README.md")
    run(model)
    assert [len(ast.literal_eval(line)) for line in capsys.readouterr().out.splitlines()] == [8, 8]
    names = run(attention)
    assert names["out"].shape == (4, 8, 64)
    assert names["ok"].all()
    cache, allocator = names["cache"], names["allocator"]
    tables = allocator.block_tables, allocator.lengths
    assert jaxpaged.debug.explain(names["q"], cache.k, cache.v, *tables, gpu="H100").implementation == "mosaic_gpu"


@pytest.mark.slow
def test_the_text_in_the_readme_is_the_models_output(optimised, capsys):
    _, code, _ = blocks("README.md")
    exec(code, {})
    assert capsys.readouterr().out.splitlines()[0] == re.search(r"# (The capital.*)", code)[1]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_the_examples_of_the_docs_run(page, capsys):
    for code in blocks(page):
        names = run(code)
        said = capsys.readouterr().out
        for comment in re.findall(r"^print\(.*\)\n((?:# .*\n)+)", code, re.MULTILINE):
            assert re.sub("^# ", "", comment, flags=re.MULTILINE) in said
        if isinstance(cache := names.get("cache"), jaxpaged.KVCache):  # one dtype, as the kernels require
            arrays = [names[name] for name in ("q", "weights", "embedding") if hasattr(names.get(name), "dtype")]
            assert {array.dtype for array in arrays} <= {cache.k.dtype}


def test_the_kernel_steps_equal_the_measured_ones():
    extracts = blocks("docs/kernel.md", "py")
    files = [ROOT / "benchmarks/kernels/kernel_steps.py", *(ROOT / "pallas_kernels").rglob("*.py")]
    code = "".join(file.read_text() for file in files)
    assert len(extracts) == 9
    assert all(extract in code for extract in extracts)


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", *PAGES])
def test_links_and_names_resolve(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target
    if page.startswith("docs/coming_from/"):
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)  # the first column has other libraries' names
    assert mistakes(text) == []


@pytest.mark.parametrize(
    "wrong",
    [
        "`jaxpaged.attention`",
        "`allocator.appends`",
        "`KVCache.make`",
        "`PrefixCache.create(num_blocks, block_size, secret=0)`",
        "| `append(num_tokens, max_tokens=n)` |",
        "`Engine(apply, weights, caches, seats=4)`",
        "```\ncache = write_kv(cache, k, v, slots, 3)   writes\n```",
        "```\nq = project and rotate\ncache, out = step.attend(q, k, v, cache, window=3)\n```",
        "`tests/test_nothing.py`",
        "| a promise | `test_nothing` in `tests/examples/` |",
        "`pallas_kernels/nothing`",
        "`h100/nothing.json`",
        "(`python -m benchmarks.nothing`)",
        "```sh\nmake nothing\n```",
        "`python examples/generate.py --nothing`",
        "`jaxpaged serve --nothing`",
    ],
)
def test_missing_names_are_detected(wrong):
    assert len(mistakes(wrong)) == 1


def test_the_site_has_every_page_and_every_public_name_once():
    navigation = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    others = [
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "benchmarks/README.md",
        "benchmarks/results/README.md",
        "benchmarks/results/decisions/README.md",
    ]
    assert sorted(navigation) == sorted([*PAGES, *others])
    names = [name for page in PAGES for name in re.findall(r"^::: (\S+)$", (ROOT / page).read_text(), re.MULTILINE)]
    assert sorted(name for name in names if "._" not in name) == sorted(PUBLIC)


def test_the_stable_names_are_the_public_ones():
    rows = re.findall(r"^\| `(jaxpaged[.\w]*)` \| (.*) \|$", (ROOT / "docs/stable.md").read_text(), re.MULTILINE)
    assert [f"{module}.{name}" for module, names in rows for name in re.findall(r"`(\w+)`", names)] == [*PUBLIC]


def test_the_stable_versions_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "docs/stable.md").read_text()
    needed = {line for line in project["dependencies"] if not line.startswith("jaxlib")}  # the same as jax
    assert set(re.findall(r"`(\w+>=[^`]+)`", text)) == needed
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert re.findall(r"\b3\.1\d\b", text) == pythons


def test_names_in_docstrings_exist():
    for name, value in PUBLIC.items():
        docs = [value, *vars(value).values()] if inspect.isclass(value) else [value]
        for doc in filter(None, (inspect.getdoc(each) for each in docs if callable(each))):
            prose = re.sub(r"^ *(>>>|\.\.\.) .*", "", doc, flags=re.MULTILINE)  # doctests run separately
            assert mistakes(prose) == [], name


def test_arguments_in_docstrings_exist():
    classes = [value for value in PUBLIC.values() if inspect.isclass(value)]
    methods = [method for owner in classes for _, method in inspect.getmembers(owner, inspect.isroutine)]
    for function in [*PUBLIC.values(), *methods]:
        doc = inspect.getdoc(function) or ""
        if found := re.search(r"^Args:\n((?: {4}.*\n?)+)", doc, re.MULTILINE):
            call = function.__init__ if inspect.isclass(function) else function
            described = re.findall(r"^ {4}(\w+)", found[1], re.MULTILINE)
            assert set(described) <= set(inspect.signature(call).parameters), function
