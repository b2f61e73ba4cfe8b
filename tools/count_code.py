"""Counts code: `python tools/count_code.py [folder or file ...]`, by default the two packages and their parts.

Code is tokens, without comments, docstrings, imports and line ends: lines can be squeezed, tokens cannot. The share is
of words in comments and docstrings for each token of code. Branches are `if` statements and expressions. The last two
columns are in lines.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

FOLDERS = ("pallas_kernels", "jaxpaged", "jaxpaged/_attention", "jaxpaged/_allocator", "jaxpaged/_cache")
FOLDERS += ("jaxpaged/_scheduler", "jaxpaged/_engine")
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def line_range(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def docstrings(tree: ast.AST) -> list[ast.Expr]:
    owners = [n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | Function)]
    return [n.body[0] for n in owners if ast.get_docstring(n) is not None and isinstance(n.body[0], ast.Expr)]


def count(source: str) -> tuple[int, int]:
    """Tokens of code, and words of comments and docstrings."""
    tree = ast.parse(source)
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    texts = docstrings(tree)
    left_out = {line for node in (*imports, *texts) for line in line_range(node)}
    tokens, words = 0, sum(len(str(ast.literal_eval(node.value)).split()) for node in texts)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            words += len(token.string.split()) - 1
        elif token.type not in LAYOUT and token.start[0] not in left_out:
            tokens += 1
    return tokens, words


def count_branches(source: str) -> int:
    return sum(isinstance(node, ast.If | ast.IfExp) for node in ast.walk(ast.parse(source)))


def largest_function(source: str) -> tuple[int, str]:
    """Its lines without its docstring, and its name."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, Function)]
    sizes = [(0, "")]
    for function in functions:
        text = function.body[0] if ast.get_docstring(function) is not None else None
        sizes.append((len(line_range(function)) - (len(line_range(text)) if text else 0), function.name))
    return max(sizes)


def report(folder: Path) -> str:
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]
    sources = {file.relative_to(folder) if folder.is_dir() else file: file.read_text() for file in files}
    counts = [count(source) for source in sources.values()]
    tokens, words = (sum(column) for column in zip(*counts, strict=True))
    branches = sum(map(count_branches, sources.values()))
    lines, file = max((len(source.splitlines()), str(file)) for file, source in sources.items())
    size, name = max(largest_function(source) for source in sources.values())
    numbers = f"{len(files):5} {tokens:8} {words / max(tokens, 1):7.2f} {branches:10}"
    return f"{folder!s:<24} {numbers}   {file} {lines:<20} {name} {size}"


def main() -> None:
    folders = sys.argv[1:] or FOLDERS
    print(f"{'':<24} files   tokens   share   branches   largest file, function")
    for folder in map(Path, folders):
        print(report(folder))


if __name__ == "__main__":
    main()
