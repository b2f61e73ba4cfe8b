"""What the docs name outside of the code that runs: calls, attributes, files, modules, targets and options."""

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxpaged
import jaxpaged.linen
import jaxpaged.nnx
from jaxpaged._scheduler import records

ROOT = Path(__file__).parents[2]
OWN = ("benchmarks", "docs", "examples", "jaxpaged", "pallas_kernels", "tests", "tools")
# What a variable of these names is in the docs.
VARIABLES: dict[str, tuple[type, ...]] = {
    "allocator": (jaxpaged.BlockAllocator,),
    "cache": (jaxpaged.KVCache, jaxpaged.CacheLayer),
    "engine": (jaxpaged.Engine,),
    "prefix_cache": (jaxpaged.PrefixCache,),
    "scheduler": (jaxpaged.Scheduler,),
    "step": (jaxpaged.AttentionStep, records.Step),  # a model's, and what a scheduler has planned
}
CLASSES = [value for value in vars(jaxpaged).values() if inspect.isclass(value)]
CLASSES += [jaxpaged.nnx.PagedAttention, jaxpaged.linen.PagedAttention]


def mistakes(text: str) -> list[str]:
    """What a page names that is not there, or calls as it cannot be called."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    spans = [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", prose)]
    found: list[str] = []
    for code in [*spans, *(code for kind, code in blocks if not kind)]:  # blocks of python are run instead
        for tree in parsed(code):
            found += find_code_mistakes(tree)
    for line in [*spans, *(line for _, code in blocks for line in code.splitlines())]:
        found += find_command_mistakes(line)
    return found


def parsed(code: str) -> Iterator[ast.AST]:
    """The code as a whole, or the lines of it that are Python; what follows three spaces in a line explains it."""
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
            functions = named(node.func)
            if functions and not any(takes(function, node) for function in functions):
                yield f"{ast.unparse(node)}: no such call"
        elif isinstance(node, ast.Attribute):
            owners = find_owners(node.value)
            if owners and not any(has(owner, node.attr) for owner in owners):
                yield f"{ast.unparse(node)}: no such name"


def find_owners(node: ast.expr) -> tuple[Any, ...]:
    """The modules or classes that an expression before a dot may stand for; none if it is not ours."""
    if isinstance(node, ast.Name):
        if node.id in VARIABLES:
            return VARIABLES[node.id]
        return (jaxpaged,) if node.id == "jaxpaged" else tuple(c for c in CLASSES if c.__name__ == node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jaxpaged":
        return (value,) if (value := getattr(jaxpaged, node.attr, None)) is not None else ()
    return ()


def has(owner: Any, name: str) -> bool:
    fields = dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ()
    return hasattr(owner, name) or name in {field.name for field in fields}


def named(node: ast.expr) -> list[Any]:
    """The functions that the called expression may be; a bare name may be a method of any class."""
    if isinstance(node, ast.Attribute):
        return [getattr(owner, node.attr) for owner in find_owners(node.value) if hasattr(owner, node.attr)]
    if not isinstance(node, ast.Name):
        return []
    functions = [getattr(jaxpaged, node.id)] if node.id in jaxpaged.__all__ else []
    if node.id in VARIABLES:
        functions += [c.__call__ for c in VARIABLES[node.id] if inspect.isfunction(c.__call__)]
    methods = [] if node.id.startswith("_") else [getattr(c, node.id) for c in CLASSES if hasattr(c, node.id)]
    return functions + [method for method in methods if callable(method)]


def takes(function: Any, call: ast.Call) -> bool:
    """Whether it takes this number of positional arguments and these keywords; a method with or without `self`."""
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
    """Of a line or a span: files, modules that `python -m` runs, targets of make, options of our programs."""
    for path in re.findall(rf"(?<![\w/.])((?:{'|'.join(OWN)})/[\w./-]*\w)", line):
        if not (ROOT / path).exists():
            yield f"{path}: no such file"
    for path in re.findall(r"(?<![\w/.])((?:cpu|h100|h200|decisions)/\w+\.json)", line):
        if not (ROOT / "benchmarks/results" / path).exists():
            yield f"benchmarks/results/{path}: no such file"
    for module in re.findall(rf"python -m ((?:{'|'.join(OWN)})[\w.]*)", line):
        path = ROOT.joinpath(*module.split("."))
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
            yield f"python -m {module}: no such module"
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"^make ([a-z-]+)", line):
        if target not in targets:
            yield f"make {target}: no such target"
    if program := re.search(r"examples/(\w+)\.py|python -m benchmarks\.(\w+)|^(\w+)\.py", line):
        yield from find_option_mistakes(next(filter(None, program.groups())), line)


def find_option_mistakes(program: str, line: str) -> Iterator[str]:
    folders = [folder for folder in ("examples", "benchmarks") if list((ROOT / folder).rglob(f"{program}.py"))]
    sources = "".join(file.read_text() for folder in folders for file in (ROOT / folder).rglob("*.py"))
    for option in {*re.findall(r"(?<!\S)(--[a-z][a-z-]+)", line.split("#")[0])} - {"--help"}:
        if folders and f'"{option}"' not in sources:
            yield f"{program} {option}: no such option"
