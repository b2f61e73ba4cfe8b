"""Reports a missing optional package in one line, with its pip command."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

PIP = dict.fromkeys(
    ("gguf", "huggingface_hub", "jinja2", "safetensors", "tokenizers", "tqdm", "transformers"), '"jaxpaged[examples]"'
)
PIP |= dict.fromkeys(("h11", "prometheus_client", "regex", "starlette", "uvicorn"), '"jaxpaged[serve]"')
PIP |= {"gemma": "gemma", "skyrl": '"skyrl[jax,tinker]"', "tunix": "google-tunix"}


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """One sentence with the pip command, if the missing module belongs to an extra; otherwise None."""
    package = str(error.name).partition(".")[0]
    if package not in PIP:
        return None
    return f"The package {package} is not installed: pip install {PIP[package]}"


@contextlib.contextmanager
def imports(doc: str) -> Iterator[None]:
    """Context for the imports of optional packages in a program without arguments. For --help, prints `doc`."""
    if sys.modules["__main__"].__doc__ == doc and {"-h", "--help"} & set(sys.argv[1:]):
        print(doc)
        sys.exit(0)
    try:
        yield
    except ModuleNotFoundError as error:
        if (sentence := missing_extra(error)) is None:
            raise
        print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr)
        sys.exit(2)
