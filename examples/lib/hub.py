"""Models by their name on the Hugging Face hub, such as Qwen/Qwen3-0.6B."""

from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, XetDownloadError

from lib.checkpoint import CheckpointError, one_line

# The files that are read here, at the top of a repository. consolidated.safetensors repeats the weights.
FILES = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model", "merges.txt", "vocab.txt"]
OTHERS = ["*/*", "consolidated*"]
SECONDS = 10  # without an answer
# The bases of the first are OSError and the errors of the HTTP client.
ERRORS: tuple[Any, ...] = (*HfHubHTTPError.__bases__, XetDownloadError, ValueError)


def download(name: str) -> Path:
    """The folder of the model in the hub's cache, where it is downloaded first. Raises `CheckpointError`."""
    hooks = huggingface_hub.get_session().event_hooks["request"]
    if _limit_waiting not in hooks:
        hooks.append(_limit_waiting)
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=FILES, ignore_patterns=OTHERS))
    except ERRORS as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        # A repository that needs a login or an accepted licence looks like a missing one.
        login = "hf auth login && " if isinstance(error, RepositoryNotFoundError) else ""
        raise CheckpointError(
            f"There is no checkpoint at {name}, and it cannot be downloaded ({one_line(cause)[:200]}); "
            f"on a network, type: {login}hf download {name}"
        ) from error


def _limit_waiting(request: Any) -> None:
    """Limits requests to the hub that would wait forever for an answer, which is huggingface_hub's default."""
    limits = request.extensions["timeout"]
    request.extensions["timeout"] = {phase: SECONDS if limit is None else limit for phase, limit in limits.items()}
