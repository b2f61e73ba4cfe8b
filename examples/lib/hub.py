"""Downloads models by their name on the Hugging Face hub, such as Qwen/Qwen3-0.6B."""

from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, XetDownloadError

from lib.checkpoint import CheckpointError, one_line

# The files to download from the top of a repository. consolidated.safetensors would repeat the weights.
FILES = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model", "merges.txt", "vocab.txt"]
OTHERS = ["*/*", "consolidated*"]
SECONDS = 10  # timeout of a request
# The bases of the first are OSError and the errors of the HTTP client.
ERRORS: tuple[Any, ...] = (*HfHubHTTPError.__bases__, XetDownloadError, ValueError)


def download(name: str) -> Path:
    """Downloads the model, and returns its folder in the hub's cache. Raises `CheckpointError`."""
    hooks = huggingface_hub.get_session().event_hooks["request"]
    if _limit_waiting not in hooks:
        hooks.append(_limit_waiting)
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=FILES, ignore_patterns=OTHERS))
    except ERRORS as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        # A repository that needs a login or an accepted licence is reported like a missing one.
        login = "hf auth login && " if isinstance(error, RepositoryNotFoundError) else ""
        raise CheckpointError(
            f"There is no checkpoint at {name}, and it cannot be downloaded ({one_line(cause)[:200]}); "
            f"on a network, type: {login}hf download {name}"
        ) from error


def _limit_waiting(request: Any) -> None:
    """Sets a timeout for requests to the hub; by default huggingface_hub waits forever."""
    limits = request.extensions["timeout"]
    request.extensions["timeout"] = {phase: SECONDS if limit is None else limit for phase, limit in limits.items()}
