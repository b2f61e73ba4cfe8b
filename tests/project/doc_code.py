"""Finds mistakes in docs outside of executed code: calls, names, files, modules, tests, targets and options."""

import ast
import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxpaged
import jaxpaged.linen
import jaxpaged.nnx
from jaxpaged._scheduler.records import StepPlan

ROOT = Path(__file__).parents[2]
OWN = ("benchmarks", "docs", "examples", "jaxpaged", "pallas_kernels", "tests", "tools")
VARIABLES: dict[str, tuple[Any, ...]] = {  # types of variables in the docs
    "allocator": (jaxpaged.BlockAllocator,),
    "cache": (jaxpaged.KVCache, jaxpaged.CacheLayer),
    "engine": (jaxpaged.Engine,),
    "prefix_cache": (jaxpaged.PrefixCache,),
    "scheduler": (jaxpaged.scheduling.Scheduler,),
    "step": (jaxpaged.AttentionStep, StepPlan),
}
PUBLIC = {
    name: getattr(module, name)
    for module in (jaxpaged, jaxpaged.debug, jaxpaged.grammar, jaxpaged.ops, jaxpaged.scheduling)
    for name in module.__all__
}
CLASSES = [value for value in PUBLIC.values() if inspect.isclass(value)]
CLASSES += [jaxpaged.nnx.PagedAttention, jaxpaged.linen.PagedAttention]


# Modules and classes that an expression before a dot may refer to.
OWNERS = VARIABLES | {f"jaxpaged.{name}": (value,) for name, value in vars(jaxpaged).items()}
OWNERS |= {"jaxpaged": (jaxpaged,)} | {owner.__name__: (owner,) for owner in CLASSES}
FILES = {  # name patterns and their files
    rf"(?<![\w/.])((?:{'|'.join(OWN)})/[\w./-]*\w)": lambda path: path,
    r"(?<![\w/.])((?:cpu|h100|h200|decisions)/\w+\.json)": lambda path: f"benchmarks/results/{path}",
    rf"python -m ((?:{'|'.join(OWN)})[\w.]*)": lambda module: f"{module.replace('.', '/')}.py",
}


def mistakes(text: str) -> list[str]:
    """Missing names on a page, and calls that do not fit their function."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    spans = [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", prose)]
    codes = [*spans, *(code for kind, code in blocks if not kind)]  # python blocks are executed instead
    lines = [*spans, *(line for _, code in blocks for line in code.splitlines())]
    found = [find_code_mistakes(tree) for code in codes for tree in parsed(code)]
    return [*itertools.chain(*found, *map(find_command_mistakes, lines))]


def parsed(code: str) -> Iterator[ast.AST]:
    """The code as a whole, or its lines that are Python, without explanations after three spaces."""
    if re.search(r"\.(json|md|py|svg)$", code):
        return
    lines = [re.sub(r"(?<=\S) {3,}.*", "", line) for line in code.splitlines()]
    for part in ("\n".join(lines), *map(str.strip, lines)):
        try:
            yield ast.parse(part)
        except SyntaxError:
            continue
        if part == "\n".join(lines):
            return


def find_code_mistakes(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            functions = find_functions(node.func)
            if functions and not any(accepts(function, node) for function in functions):
                yield f"{ast.unparse(node)}: no such call"
        elif isinstance(node, ast.Attribute):
            owners = OWNERS.get(ast.unparse(node.value), ())
            if owners and not any(has(owner, node.attr) for owner in owners):
                yield f"{ast.unparse(node)}: no such name"


def has(owner: Any, name: str) -> bool:
    fields = dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ()
    return hasattr(owner, name) or name in {field.name for field in fields}


def find_functions(node: ast.expr) -> list[Any]:
    """Functions that the called expression may refer to. A bare name may be a method of any class."""
    if isinstance(node, ast.Attribute):
        owners = OWNERS.get(ast.unparse(node.value), ())
        return [getattr(owner, node.attr) for owner in owners if hasattr(owner, node.attr)]
    if not isinstance(node, ast.Name) or node.id.startswith("_"):
        return []
    calls = [owner.__call__ for owner in VARIABLES.get(node.id, ()) if inspect.isfunction(owner.__call__)]
    functions = [PUBLIC.get(node.id), *calls, *(getattr(owner, node.id, None) for owner in CLASSES)]
    return list(filter(callable, functions))


def accepts(function: Any, call: ast.Call) -> bool:
    """Whether these positional arguments and keywords fit the function, or the method with or without `self`."""
    positional = [arg for arg in call.args if not (isinstance(arg, ast.Constant) and arg.value is ...)]
    if any(isinstance(arg, ast.Starred) for arg in positional):
        positional = []
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
    passed_on = len(parameters) < len(signature.parameters)  # **options: the keywords of attention
    known = set(inspect.signature(jaxpaged.paged_attention).parameters) if passed_on else set()
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg and keyword.arg not in known}
    for taken in (parameters, [p for p in parameters if p.name != "self"]):
        try:
            signature.replace(parameters=taken).bind_partial(*positional, **keywords)
            return True
        except TypeError:
            continue
    return False


def find_command_mistakes(line: str) -> Iterator[str]:
    """Mistakes in a line or a span: files, modules of `python -m`, tests, targets of make, options of our programs."""
    for pattern, file_of in FILES.items():
        for path in map(file_of, re.findall(pattern, line)):
            if not (ROOT / path).exists():
                yield f"{path}: no such file"
    for test in re.findall(r"\b(test_\w+)\b(?!\.py)", line):
        if test not in read_tests():
            yield f"{test}: no such test"
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"^make ([a-z-]+)", line):
        if target not in targets:
            yield f"make {target}: no such target"
    if re.search(r"examples/\w+\.py|python -m benchmarks\.|^\w+\.py|^jaxpaged \w", line):
        options = {*re.findall(r"(?<!\S)(--[a-z][a-z-]+)", line.split("#")[0])} - {"--help"}
        yield from (f"{option}: no such option" for option in options if f'"{option}"' not in read_programs())


@functools.cache
def read_tests() -> set[str]:
    files = (ROOT / "tests").rglob("*.py")
    return {test for file in files for test in re.findall(r"^ *def (test_\w+)\(", file.read_text(), re.MULTILINE)}


@functools.cache
def read_programs() -> str:
    return "".join(file.read_text() for name in ("examples", "benchmarks") for file in (ROOT / name).rglob("*.py"))
