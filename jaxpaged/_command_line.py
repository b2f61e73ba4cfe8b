"""The command `jaxpaged`, which runs the programs serve and generate of the examples.

The wheel has their files in `jaxpaged/_examples`, a checkout in `examples`. They are programs to copy, not a
package, so their folder comes first in sys.path.
"""

import argparse
import importlib
import sys
from pathlib import Path

from jaxpaged._version import __version__


def main() -> None:
    parser = argparse.ArgumentParser(
        "jaxpaged",
        usage="%(prog)s [-h] [--version] {serve,generate} ...",
        description="Serves a model over OpenAI's HTTP API, or generates text with it.",
        epilog='"jaxpaged serve --help" and "jaxpaged generate --help" list the options.',
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=("serve", "generate"), help='"serve MODEL" or "generate MODEL PROMPT ..."')
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = Path(__file__).with_name("_examples")
    if not folder.exists():
        folder = Path(__file__).parents[1] / "examples"
    sys.path.insert(0, str(folder))
    sys.argv = [f"jaxpaged {args.command}", *args.arguments]  # the programs' usage and errors begin with the first
    program = importlib.import_module(args.command)
    importlib.import_module("lib.command_line").run(program.main)
